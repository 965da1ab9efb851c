import math

import pytest
import torch

from bilip.data import checkerboard, gaussians, two_moons
from bilip.errors import InputError

ALL = [checkerboard, two_moons, gaussians]


@pytest.mark.parametrize("make", ALL)
def test_deterministic_in_the_seed(make):
    x = make(100, 3)
    assert x.shape == (100, 2)
    assert x.dtype == torch.float32
    assert torch.equal(x, make(100, 3))
    assert not torch.equal(x, make(100, 4))
    state = torch.get_rng_state()
    make(10)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("count", [0, -1, 2.5])
def test_bad_counts(make, count):
    with pytest.raises(InputError, match="expected a whole number"):
        make(count)


def test_checkerboard_fills_eight_squares_evenly():
    x = checkerboard(80_000)
    square = ((x + 4) / 2).floor().clamp(max=3).long()
    counts = torch.zeros(4, 4).index_put((square[:, 0], square[:, 1]), torch.ones(len(x)), accumulate=True)
    dark = torch.tensor([[(i + j) % 2 == 0 for j in range(4)] for i in range(4)])
    assert not counts[~dark].any()
    # Binomial(80000, 1/8) has standard deviation 94.
    assert (counts[dark] - 10_000).abs().max() < 5 * 94
    within = ((x + 4) / 2) % 1
    assert (within.mean(0) - 0.5).abs().max() < 5 / math.sqrt(12 * 80_000)


def test_moons_and_gaussians_lie_where_they_should():
    x = two_moons(1000, noise=0)
    upper = (x.norm(dim=1) - 1).abs() < 1e-5
    lower = ((x - torch.tensor([1.0, 0.5])).norm(dim=1) - 1).abs() < 1e-5
    assert bool((upper | lower).all())
    assert 400 < int(upper.sum()) < 600
    centers = gaussians(1000, modes=3, radius=2, std=0)
    assert len(centers.unique(dim=0)) == 3
    assert torch.allclose(centers.norm(dim=1), torch.tensor(2.0))


def test_bad_options():
    with pytest.raises(InputError, match="standard deviation"):
        two_moons(10, noise=-1)
    with pytest.raises(InputError, match="modes >= 1"):
        gaussians(10, modes=0)
