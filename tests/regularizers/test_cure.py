"""The documented weights keep an affine classifier invertible where the unregularized one explodes."""

import pytest
import torch
from torch import nn

from bilip import models
from bilip.probes import Reconstruction
from bilip.regularizers import FiniteDifference, FlowLikelihood
from bilip.reversible import Reversible

DIMENSION, CLASSES, SAMPLES = 8, 10, 512


def trained(seed, penalty=None, *, saving=False):
    """Random labels for random points, which a network can only learn by stretching space: 200 steps at a high rate."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, DIMENSION, generator=generator)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    trunk = models.real_nvp(DIMENSION, blocks=12, hidden=(32,), scale="sigmoid")
    run = Reversible(trunk) if saving else trunk
    head = nn.Linear(DIMENSION, CLASSES)
    optimizer = torch.optim.Adam([*trunk.parameters(), *head.parameters()], lr=1e-2)
    for step in range(200):
        rows = torch.randint(SAMPLES, (128,))
        z, log_det = run.forward_and_log_det(x[rows])
        loss = nn.functional.cross_entropy(head(z), y[rows])
        if penalty is not None:
            loss = loss + penalty(run, x[rows], latent=(z, log_det), step=step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = float((head(trunk(x)).argmax(1) == y).float().mean())
    return Reconstruction(rounds=1).measure(trunk, x), accuracy, run


@pytest.mark.parametrize("seed", [0, 1])
def test_without_a_penalty_it_explodes(seed):
    m, accuracy, _ = trained(seed)
    assert m["share_nan"] + m["share_inf"] > 0  # 0.6 to 4.5 % over six seeds
    assert m["share_wrong"] > 0.01  # 6 to 12 %: less than half of the digits
    assert accuracy > 0.3


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("penalty", "limit"),
    [
        (lambda: FiniteDifference(0.3, every=10), 1e-4),
        (lambda: FiniteDifference(0.01, every=10, scaling="original"), 1e-4),
        (lambda: FlowLikelihood(0.01), 1e-2),
    ],
    ids=["clean", "original", "likelihood"],
)
def test_the_documented_weights_keep_it_invertible(penalty, limit, seed):
    m, accuracy, _ = trained(seed, penalty())
    assert m["share_nan"] + m["share_inf"] + m["share_failed"] == 0
    assert m["relative_max"] < limit
    assert accuracy > 0.2  # chance is 0.1


def test_memory_saving_training_needs_no_repair_with_the_penalty():
    m, _, run = trained(0, FiniteDifference(0.3, every=10), saving=True)
    assert m["relative_max"] < 1e-4
    assert run.report().repaired <= 5
