"""Gradients that are not finite are counted and change nothing; a loss that is not names the step and the block."""

import pytest
import torch

from bilip import Flow, models
from bilip.data import checkerboard, seed_of
from bilip.errors import InputError, TrainingDiverged
from bilip.objectives import Likelihood
from bilip.training import Settings, Task, read_log, read_state, run, train
from bilip.training.step import CapturedStep
from recorded import play_graphs_on_the_cpu
from training.runs import silent

STEPS, SEED = 12, 1


class Broken(torch.autograd.Function):
    """The identity, with a gradient that is NaN where the factor is."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Objective(Likelihood):
    def __call__(self, flow, step, x, factor):
        found = super().__call__(flow, step, x)
        return {**found, "loss": Broken.apply(found["loss"], factor[0])}


def make_task(broken=(), far=()):
    torch.manual_seed(0)
    gone = {seed_of(SEED, step, "data") for step in broken}
    away = {seed_of(SEED, step, "data") for step in far}

    def batch(draw):
        x = checkerboard(32, draw("data"))
        factor = torch.full((32,), torch.nan if draw("data") in gone else 1.0)
        return x * (1e38 if draw("data") in away else 1.0), factor

    return Task(Flow(models.real_nvp(2, blocks=3, hidden=(8,))), batch, Objective())


def settings(**changes):
    defaults = {"steps": STEPS, "lr": 5e-3, "seed": SEED, "log_every": 1, "save_every": 4, "device": "cpu", "skip": 2}
    return Settings(**defaults | changes)


@pytest.fixture(params=["eager", "captured"])
def steps(request, monkeypatch):
    seen = []
    if request.param == "captured":

        class Seen(CapturedStep):
            def __init__(self, *args):
                super().__init__(*args)
                seen.append(self)

        monkeypatch.setattr(run, "CapturedStep", Seen)
        play_graphs_on_the_cpu(monkeypatch)
    return seen


@pytest.mark.parametrize("optimizer", ["adam", "adamax"])
def test_a_step_with_a_broken_gradient_changes_nothing_and_is_counted(optimizer, steps, tmp_path):
    whole = make_task(broken=(2, 7, 8))
    train(whole, settings(optimizer=optimizer, ema=0.9), tmp_path / "some", progress=silent)
    log = read_log(tmp_path / "some", "train")
    assert [step for step, share in zip(log["step"], log["skipped"], strict=True) if share] == [3, 8, 9]
    tensors, facts = read_state(tmp_path / "some" / "last.safetensors")
    assert all(bool(value.isfinite().all()) for value in tensors.values() if value.is_floating_point())
    counts = [float(value) for name, value in tensors.items() if name.endswith(".step")]
    assert counts
    assert set(counts) == {STEPS - 3}  # the optimizer has not seen them either
    assert facts["step"] == STEPS
    if steps and optimizer == "adam":  # on a CPU, Adamax makes numbers on the host, which no graph can hold
        assert steps[0].replays > 3


def test_skipped_steps_leave_the_weights_of_the_step_before(tmp_path):
    weights = []
    for name, broken, count in (("two", (), 2), ("three", (2,), 3)):
        task = make_task(broken)
        train(task, settings(steps=count), tmp_path / name, progress=silent)
        weights.append([p.detach().clone() for p in task.model.parameters()])
    assert all(a.equal(b) for a, b in zip(*weights, strict=True))


def test_too_many_in_a_row_end_training(steps, tmp_path):
    task = make_task(broken=(1, 2, 6, 7, 8, 9))
    said = r"3 gradients in a row were not finite.*step 9.*first in bijection\.blocks\.2.*last good"
    with pytest.raises(TrainingDiverged, match=said) as caught:
        train(task, settings(), tmp_path, progress=silent)
    assert caught.value.step == 9
    assert read_state(tmp_path / "last.safetensors")[1]["step"] == 8


def test_a_loss_that_is_not_finite_names_step_and_block(steps, tmp_path):
    task = make_task(far=(5,))
    said = r"the loss was (inf|nan) in step 6; .*; the last good checkpoint"
    with pytest.raises(TrainingDiverged, match=said) as caught:
        train(task, settings(), tmp_path, progress=silent)
    assert caught.value.step == 6
    assert "finite" in str(caught.value)
    assert all(bool(p.isfinite().all()) for p in task.model.parameters())


def test_the_first_block_that_is_not_finite():
    from bilip import Chain
    from bilip.blocks import DiagonalScaling
    from bilip.training.run import first_non_finite

    chain = Chain(*(DiagonalScaling(torch.full((2,), 1e20)) for _ in range(3)), shape=(2,))
    assert "output that is not finite is that of block 1 (DiagonalScaling)" in first_non_finite(
        Flow(chain), torch.ones(1, 2)
    )
    assert "no blocks" in first_non_finite(torch.nn.Linear(2, 2), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"optimizer": "sgd"}, "'adam' or 'adamax'"), ({"skip": -1}, "0 or more"), ({"precision": "16-mixed"}, "None")],
)
def test_settings_that_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        settings(**changes)


def test_adamax_resumes_where_it_was(tmp_path):
    whole, cut = make_task(), make_task()
    train(whole, settings(optimizer="adamax", weight_decay=1e-3), tmp_path / "whole", progress=silent)
    train(cut, settings(optimizer="adamax", weight_decay=1e-3, steps=5), tmp_path / "cut", progress=silent)
    again = make_task()
    train(again, settings(optimizer="adamax", weight_decay=1e-3), tmp_path / "cut", progress=silent)
    assert all(a.equal(b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))
