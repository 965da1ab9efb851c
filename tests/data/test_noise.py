"""What is drawn: noise like the data, and toy sets."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilip.data import NOISE_NAMES, as_source, checkerboard, gaussians, noise, two_moons
from bilip.errors import InputError

DATA = as_source("test", torch.linspace(-1, 3, 30)[:, None].expand(30, 2).clone())  # centre 1, half-range 2


@given(
    spec=st.sampled_from(NOISE_NAMES),
    factor=st.none() | st.floats(0.1, 20),
    seed=st.integers(0, 2**40),
    sizes=st.tuples(st.integers(1, 400), st.integers(1, 400)),
)
@settings(max_examples=40, deadline=None)
def test_samples_depend_on_the_seed_and_not_on_batches(spec, factor, seed, sizes):
    spec = spec if factor is None else f"{spec}:{factor!r}"
    first, second = (torch.cat([b.x for b in noise(spec, DATA, count=600, seed=seed).batches(size)]) for size in sizes)
    assert torch.equal(first, second)


@pytest.mark.parametrize("shape", [(2,), (3, 4, 4)], ids=["features", "images"])
@pytest.mark.parametrize("spec", NOISE_NAMES)
def test_data_may_be_on_any_device(spec, shape, device):
    x = torch.randn(30, *shape, generator=torch.Generator().manual_seed(0))
    here, there = (noise(spec, as_source("test", some), count=20).first(20).x for some in (x, x.to(device)))
    assert torch.equal(here, there.cpu())


def draws(spec, count=40_000, **options):
    return noise(spec, DATA, count=count, **options).first(count).x.double()


def test_uniform():
    x = draws("uniform:2")
    assert x.min() >= -3
    assert x.max() <= 5
    assert abs(x.mean() - 1) < 0.05
    assert abs(x.std() - 8 / math.sqrt(12)) < 0.05


def test_gaussian_is_not_clipped_unless_asked():
    x = draws("gaussian")
    assert abs(x.mean() - 1) < 0.05
    assert abs(x.std() - 2) < 0.05
    assert x.max() > 7
    clipped = draws("gaussian", clip=True)
    assert torch.equal(clipped, x.clamp(-1, 3))
    assert "clipped to [-1, 3]" in noise("gaussian", DATA, clip=True).description


def test_rademacher():
    x = draws("rademacher:3")
    assert set(x.unique().tolist()) == {-5.0, 7.0}
    assert abs((x > 0).double().mean() - 0.5) < 0.02


def test_scaled_is_the_data_times_the_factor():
    source = noise("scaled", DATA, count=7)
    assert source.count == 7
    assert torch.equal(source.first(7).x, 10 * DATA.first(7).x)
    assert noise("scaled:2", DATA, count=1000).count == DATA.count


def test_seeds_kinds_and_chunks_differ():
    a, b = draws("uniform", seed=0), draws("uniform", seed=1)
    assert not torch.equal(a, b)
    assert not torch.equal(a[:256], a[256:512])
    assert abs(np.corrcoef(a.flatten(), b.flatten())[0, 1]) < 0.02
    g = draws("gaussian")
    assert abs(np.corrcoef(a.flatten(), g.flatten())[0, 1]) < 0.02


def test_sources_say_what_they_are():
    source = noise("uniform", DATA, count=5, seed=3)
    assert (source.name, source.role, source.shape, source.dtype) == ("uniform", "ood", (2,), torch.float32)
    assert source.description == "uniform noise on [-1, 3], seed 3"
    assert noise("scaled:4", DATA).description == "test times 4"


def test_noise_is_made_once_for_who_remembers_and_not_to_be_checked():
    like = as_source("test", torch.tensor([[0.0, 1.0], [2.0, 3.0]]).half())
    for spec, chunks in (("uniform", 0), ("gaussian:1e4", 4)):  # half precision may overflow in the second
        source, made = noise(spec, like, count=1000), []
        make = source.rows.make
        source.rows.make = lambda k, make=make, made=made: made.append(k) or make(k)
        source.check()
        assert len(made) == chunks
        source.remember()
        made.clear()
        first = source.read(0, 1000).x
        assert torch.equal(source.read(0, 1000).x, first)
        assert made in ([0, 1, 2, 3], [0, 1, 2])  # the last is at hand after a check
        found = source.statistics()
        assert source.statistics() is found
    source.rows.room = first[0].numel() * first.element_size() * 256  # for one chunk
    source.rows._kept.clear()
    made.clear()
    for _ in range(2):
        source.read(0, 1000)
    assert made.count(0) == 1
    assert made.count(1) == 2


def test_a_long_source_costs_nothing_until_it_is_read():
    source = noise("gaussian", DATA, count=10**12)
    assert len(source.first(10)) == 10
    assert source.read(10**12 - 3, 10**12).x.shape == (3, 2)
    assert source.statistics().samples == 4096


@pytest.mark.parametrize("spec", NOISE_NAMES)
def test_contexts_come_from_the_data_in_order(spec):
    data = as_source("test", (torch.randn(5, 2), torch.arange(5.0)[:, None]))
    batch = noise(spec, data, count=12).first(12)
    assert batch.context is not None
    assert batch.context.flatten().tolist() == [k % 5 for k in range(len(batch))]


def test_pixels_give_noise_on_the_unit_interval():
    photos = as_source("photos", np.array([0, 255] * 24, np.uint8).reshape(4, 2, 2, 3))
    x = noise("uniform", photos, count=50).first(50).x
    assert x.shape == (50, 3, 2, 2)
    assert 0 <= x.min() < x.max() <= 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("unifrom", "Did you mean 'uniform'"),
        ("Gauss", "Did you mean 'gaussian'"),
        ("salt", "the kinds of noise are uniform, gaussian, rademacher, scaled, near, shuffled"),
        ("uniform:", "positive factor"),
        ("uniform:x", "positive factor"),
        ("uniform:-1", "positive factor"),
        ("uniform:0", "positive factor"),
        ("scaled:nan", "positive factor"),
        ("scaled:inf", "positive factor"),
        ("uniform:1e308", "not finite"),
        (3, "expected a string"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(InputError, match=message):
        noise(spec, DATA)


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 2.5}, {"seed": -1}, {"seed": "a"}])
def test_bad_numbers(options):
    with pytest.raises(InputError, match="expected a whole number"):
        noise("uniform", DATA, **options)


def test_data_without_a_range_or_with_nan():
    with pytest.raises(InputError, match="every entry of source 'flat' is 2"):
        noise("uniform", as_source("flat", torch.full((3, 2), 2.0)))
    with pytest.raises(InputError, match="sample 0 holds NaN"):
        noise("uniform", as_source("broken", torch.full((3, 2), math.nan)))


def test_each_feature_gets_noise_on_its_own_range():
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(500, 3, generator=rng) * torch.tensor([1.0, 1e4, 0.0]) + torch.tensor([0.0, 0.0, 7.0])
    table = as_source("table", x)
    for spec, widest in (("uniform", 1.0), ("near", 1.5), ("rademacher", 1.0), ("uniform:2", 2.0)):
        drawn = noise(spec, table, count=2000).first(2000).x
        spread = drawn.amax(0) - drawn.amin(0)
        assert spread[0] <= widest * 1.001
        assert 0.9 * widest * 1e4 < spread[1] <= widest * 1e4 * 1.001
        assert (drawn[:, 2] == 7).all()
    drawn = noise("gaussian", table, count=4000).first(4000).x
    assert abs(float(drawn[:, 0].std()) - 0.5) < 0.05
    assert abs(float(drawn[:, 1].std()) - 5e3) < 500
    assert "own range" in noise("uniform", table).description


def test_shuffled_features_are_those_of_the_data_and_do_not_belong_together():
    x = torch.arange(200.0)[:, None] * torch.tensor([1.0, 10.0])
    drawn = noise("shuffled", as_source("table", x), count=2000).first(2000).x
    assert set(drawn[:, 0].tolist()) <= set(x[:, 0].tolist())
    assert set(drawn[:, 1].tolist()) <= set(x[:, 1].tolist())
    assert abs(float(torch.corrcoef(drawn.T)[0, 1])) < 0.1


def test_images_keep_one_range_for_all_pixels():
    images = torch.zeros(20, 1, 4, 4)
    images[:, :, 2:] = 1.0
    drawn = noise("uniform", as_source("images", images), count=200).first(200).x
    assert float(drawn[:, :, 0].max()) > 0.9


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        ([-4.0, -3.999], [4.0, 3.998], "on about [-8, 8]"),
        ([-4.0, -4.0], [4.0, 4.0], "on [-8, 8]"),
        ([0.0, 0.0], [1.0, 1e4], "on each feature's own range"),
        ([-4.0, 0.0], [4.0, 8.0], "on each feature's own range"),
    ],
)
def test_the_range_is_told_as_one_where_it_is_one(low, high, said):
    source = noise("uniform:2", as_source("test", torch.tensor([low, high])), count=10)
    assert said in source.description


# ---- toy sets


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
