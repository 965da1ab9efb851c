"""Global switches of torch: the device that new tensors are made on, and deterministic algorithms.

The device `meta` stands for any other one than the CPU: a tensor that is made there by oversight has no numbers, and is found by that.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bilip
from bilip import Box, data, models
from bilip.blocks import Poisson
from bilip.objectives import Likelihood
from bilip.regularizers import FiniteDifference
from bilip.reversible import Reversible
from bilip.reversible.guard import Drift
from bilip.testing import check_contract
from bilip.training import Settings, StabilityMonitor, Task, train
from catalogue import CATALOGUE, IDS, wake
from walks import gradient, off, planted


@pytest.fixture
def elsewhere():
    with torch.device("meta"):
        yield


@pytest.fixture
def flow():
    return bilip.Flow(models.real_nvp(4, blocks=3, hidden=(8,)), base="normal")


@pytest.fixture
def x():
    return torch.randn(1200, 4)


@pytest.mark.parametrize("entry", CATALOGUE, ids=IDS)
def test_blocks_are_run_inverted_and_bounded(entry):
    block, x, context = wake(entry.make().double()), entry.batch(), entry.contexts()
    with torch.device("meta"):
        z, log_det = block.forward_and_log_det(x, context)
        assert z.device == log_det.device == x.device
        assert block.inverse(z, context).shape == x.shape
        context = None if entry.context is None else Box(-1, 1, entry.context)
        assert block.bounds(Box(0.25, 0.75, entry.shape), context=context).forward > 0


def test_the_contract_holds():
    flow, x = wake(models.real_nvp(4, blocks=2, hidden=(8,))).double(), torch.randn(3, 4, dtype=torch.float64)
    with torch.device("meta"):
        check_contract(flow, x)


def test_a_flow_is_audited(flow, x, elsewhere):
    """Noise of every kind, samples, maps, spectra, attacks: with the numbers that it has without a default device."""
    ood = ["uniform", "gaussian", "rademacher", "scaled:30", "near", "shuffled"]
    record = bilip.audit(flow, {"test": x}, ood=ood, budget="quick")
    with torch.device("cpu"):
        usual = bilip.audit(flow, {"test": x}, ood=ood, budget="quick")
    assert {name: v.status for name, v in record.verdicts.items()} == {n: v.status for n, v in usual.verdicts.items()}
    assert record.verdicts["likelihood"].status == "safe"


def test_an_image_flow_is_audited(elsewhere):
    with torch.device("cpu"):
        glow, images = models.glow((3, 8, 8), levels=2, blocks=1, hidden=8, factor_out=True), torch.rand(24, 3, 8, 8)
        glow(images)
    assert bilip.audit(glow, {"test": images}, budget="quick").verdicts


def test_what_cancels_within_a_call_is_measured():
    model, x = planted(1e-3)
    pairs = torch.cat([x, x + 1e-3 * torch.randn_like(x)])

    def difference(f, x):
        z = f(x).tanh()
        return (z[:16] - z[16:]).mean()

    stored = gradient(model, model, pairs, difference)
    with torch.device("meta"):
        guarded = Reversible(model)
        assert off(gradient(guarded, model, pairs, difference), stored) < 1e-3
        guarded.load_guard_state(guarded.guard_state())
    assert guarded.report().repaired


def test_a_flow_is_trained_and_cured(flow, x, tmp_path, elsewhere):
    penalties = (FiniteDifference(0.01, every=2),)
    batches = iter(x.split(100))
    task = Task(flow, lambda draw: (next(batches),), Likelihood(penalties), penalties=penalties)
    for steps in (2, 4):  # the second goes on from the state of the first
        assert train(task, Settings(steps=steps, save_every=2), tmp_path).steps == steps
    assert bilip.cure(flow, x, train=x).status == "not needed"


def test_random_terms_and_toy_data_are_drawn_on_the_cpu(elsewhere):
    assert Poisson(2.0).draw() >= 0
    assert Box(-1, 1, (2,)).sample(3).device == data.checkerboard(3).device == torch.device("cpu")


class Refused(TorchDispatchMode):
    """Notes operations that raise on a GPU under `torch.use_deterministic_algorithms(True)`, as its documentation lists them."""

    NAMES = ("histc", "median.dim", "nanmedian.dim", "kthvalue", "put_", "nll_loss2d_forward", "scatter_reduce")

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.name().removeprefix("aten::"), kwargs or {}
        cumulative = name.startswith("cumsum") and args[0].is_floating_point()
        weighed = name == "bincount" and len(args) > 1 and args[1] is not None
        if name in self.NAMES or cumulative or weighed:
            self.found.add(name)
        return func(*args, **kwargs)


def test_guarded_steps_are_deterministic_on_a_gpu(x):
    model = Reversible(models.glow((3, 8, 8), levels=2, blocks=2, hidden=8, factor_out=True))
    images = torch.rand(8, 3, 8, 8)
    penalty = FiniteDifference(0.1)
    with Refused() as refused:
        for step in range(2):
            z, log_det = model.forward_and_log_det(images)
            (z.square().mean() - log_det.mean() + penalty(model, images, latent=(z, log_det), step=step)).backward()
        StabilityMonitor(model, images)(0)
    assert not refused.found


def test_audits_are_deterministic_on_a_gpu(flow, x):
    with Refused() as refused:
        bilip.audit(flow, {"test": x}, ood=["uniform", "near"], budget="quick")
    assert not refused.found


def test_drift_that_is_not_finite_is_not_added_to_what_came_before_it():
    drift = Drift.of([2, 1, 0], torch.tensor([1.0, torch.inf, torch.nan]), [], everywhere=True)
    assert drift.added[:2].tolist() == [1.0, torch.inf]
    assert drift.added[2].isnan()
