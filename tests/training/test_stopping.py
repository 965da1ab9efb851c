"""What ends a run: the clock, SIGTERM, gradients and losses that are not finite; evaluations at chosen steps; exact resumption."""

import os
import signal
import time

import pytest
import torch
from torch import nn

from bilip import Flow, models
from bilip.data import checkerboard, seed_of
from bilip.errors import InputError, Stopped, TrainingDiverged
from bilip.objectives import Likelihood
from bilip.training import Draw, Settings, Task, read_log, read_state, train
from recorded import watched_captures
from training.runs import silent


def make_task(at=None, evaluate=None):
    torch.manual_seed(0)

    def batch(draw):
        if at is not None:
            at(draw.step)
        return (checkerboard(16, draw("data")),)

    return Task(models.flow(models.real_nvp(2, blocks=2, hidden=(8,))), batch, Likelihood(), evaluate)


def settings(**changes):
    return Settings(**{"steps": 12, "lr": 1e-2, "log_every": 1, "device": "cpu"} | changes)


def test_the_deadline_saves_and_the_same_call_goes_on(tmp_path):
    train(make_task(), settings(), tmp_path / "whole", progress=silent)
    with pytest.raises(Stopped, match="the time is up"):
        train(make_task(), settings(), tmp_path / "cut", progress=silent, deadline=time.time() - 1)
    assert read_state(tmp_path / "cut" / "last.safetensors")[1]["step"] == 1
    train(make_task(), settings(), tmp_path / "cut", progress=silent, deadline=time.time() + 1e6)
    states = [read_state(tmp_path / name / "last.safetensors")[0] for name in ("whole", "cut")]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert read_log(tmp_path / "whole", "train") == read_log(tmp_path / "cut", "train")


def test_sigterm_waits_for_the_end_of_a_step_and_saves(tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    def at(step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="SIGTERM"):
        train(make_task(at), settings(), tmp_path, progress=silent)
    assert read_state(tmp_path / "last.safetensors")[1]["step"] == 6
    assert signal.getsignal(signal.SIGTERM) is before


def test_evaluations_at_chosen_steps(tmp_path):
    seen = []

    def evaluate(model, done):
        seen.append((done, model.training))
        return {"value": float(done)}

    chosen = settings(evaluate_every=5, evaluate_at=(0, 2, 5, 40))
    train(make_task(evaluate=evaluate), chosen, tmp_path, progress=silent)
    assert seen == [(step, False) for step in (0, 2, 5, 10, 12)]
    assert read_log(tmp_path, "evaluation")["step"] == [0, 2, 5, 10, 12]
    with pytest.raises(InputError, match="evaluate_at"):
        settings(evaluate_at=[1])


def test_a_run_from_before_evaluations_could_be_chosen_goes_on():
    old = {name: value for name, value in settings().defining().items() if name != "evaluate_at"}
    assert settings().difference(old) == ""
    assert "evaluate_at" in settings(evaluate_at=(3,)).difference(old)


def test_draws_know_their_step(tmp_path):
    steps = []
    task = make_task(steps.append)
    train(task, settings(steps=3), tmp_path, progress=silent)
    assert steps[-3:] == [0, 1, 2]
    assert Draw(3, 4)("data") != Draw(3, 5)("data")


class Turned(nn.Module):
    """A weight whose columns lie in memory one after the other, as a QR decomposition returns it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3).add_(torch.arange(9.0).view(3, 3) / 10).t().contiguous().t())

    def forward(self, x):
        return x @ self.weight


def test_the_optimizer_goes_on_for_weights_in_any_layout(tmp_path):
    def task(stop):
        torch.manual_seed(0)
        model = Turned()
        assert model.weight.stride() == (1, 3)

        def loss(model, step, x):
            return {"loss": (model(x) - x.flip(1)).square().mean()}

        def batch(draw):
            if draw.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return (torch.randn(8, 3, generator=torch.Generator().manual_seed(draw("data"))),)

        return Task(model, batch, loss)

    train(task(None), settings(), tmp_path / "whole", progress=silent)
    with pytest.raises(Stopped):
        train(task(6), settings(), tmp_path / "cut", progress=silent)
    train(task(None), settings(), tmp_path / "cut", progress=silent)
    whole, cut = (read_state(tmp_path / name / "last.safetensors")[0] for name in ("whole", "cut"))
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())


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


def make_broken_task(broken=(), far=(), factor=torch.nan):
    torch.manual_seed(0)
    gone = {seed_of(SEED, step, "data") for step in broken}
    away = {seed_of(SEED, step, "data") for step in far}

    def batch(draw):
        x = checkerboard(32, draw("data"))
        factors = torch.full((32,), factor if draw("data") in gone else 1.0)
        return x * (1e38 if draw("data") in away else 1.0), factors

    return Task(Flow(models.real_nvp(2, blocks=3, hidden=(8,))), batch, Objective())


def skipping(**changes):
    return settings(**{"steps": STEPS, "lr": 5e-3, "seed": SEED, "save_every": 4, "skip": 2} | changes)


@pytest.fixture(params=["eager", "captured"])
def steps(request, monkeypatch):
    return watched_captures(monkeypatch, torch.device("cpu")) if request.param == "captured" else []


@pytest.mark.parametrize("optimizer", ["adam", "adamax"])
def test_a_step_with_a_broken_gradient_changes_nothing_and_is_counted(optimizer, steps, tmp_path):
    whole = make_broken_task(broken=(2, 7, 8))
    train(whole, skipping(optimizer=optimizer, ema=0.9), tmp_path / "some", progress=silent)
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
        task = make_broken_task(broken)
        train(task, skipping(steps=count), tmp_path / name, progress=silent)
        weights.append([p.detach().clone() for p in task.model.parameters()])
    assert all(a.equal(b) for a, b in zip(*weights, strict=True))


def test_too_many_in_a_row_end_training(steps, tmp_path):
    task = make_broken_task(broken=(1, 2, 6, 7, 8, 9))
    said = r"3 gradients in a row were not finite.*step 9.*first in bijection\.blocks\.2.*last good"
    with pytest.raises(TrainingDiverged, match=said) as caught:
        train(task, skipping(), tmp_path, progress=silent)
    assert caught.value.step == 9
    assert read_state(tmp_path / "last.safetensors")[1]["step"] == 8
    again = make_broken_task(broken=(1, 2, 6, 7, 8, 9))
    with pytest.raises(TrainingDiverged, match=said):  # resumed in between, it ends the same
        train(again, skipping(), tmp_path, progress=silent)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_gradient_whose_square_overflows_is_skipped_and_counted(clip, tmp_path):
    task = make_broken_task(broken=(3,), factor=1e25)
    train(task, skipping(clip=clip), tmp_path, progress=silent)
    log = read_log(tmp_path, "train")
    assert [step for step, share in zip(log["step"], log["skipped"], strict=True) if share] == [4]
    tensors, _ = read_state(tmp_path / "last.safetensors")
    assert all(bool(value.isfinite().all()) for value in tensors.values())  # nor are Adam's averages lost
    task = make_broken_task(broken=(3, 4, 5), factor=1e25)
    with pytest.raises(TrainingDiverged, match=r"in \d+ parameters, going backward first in bijection"):
        train(task, skipping(clip=clip), tmp_path / "more", progress=silent)


def test_a_loss_that_is_not_finite_names_step_and_block(steps, tmp_path):
    task = make_broken_task(far=(5,))
    said = r"the loss was (inf|nan) in step 6; .*; the last good checkpoint"
    with pytest.raises(TrainingDiverged, match=said) as caught:
        train(task, skipping(), tmp_path, progress=silent)
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
    small = Chain(*(DiagonalScaling(torch.full((2,), 1e-15)) for _ in range(3)), shape=(2,))
    batch = (torch.ones(1, 2), torch.ones(1, 3), 1e10 * torch.ones(1, 2))
    assert "back from latents the first output that is not finite is that of block 1 (Diag" in first_non_finite(
        small, *batch
    )
    assert "every block is finite on this batch" in first_non_finite(small, *batch[:2])


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"optimizer": "sgd"}, "'adam' or 'adamax'"), ({"skip": -1}, "0 or more"), ({"precision": "16-mixed"}, "None")],
)
def test_settings_that_are_refused(changes, said):
    with pytest.raises(InputError, match=said):
        skipping(**changes)


def test_adamax_resumes_where_it_was(tmp_path):
    whole, cut = make_broken_task(), make_broken_task()
    train(whole, skipping(optimizer="adamax", weight_decay=1e-3), tmp_path / "whole", progress=silent)
    train(cut, skipping(optimizer="adamax", weight_decay=1e-3, steps=5), tmp_path / "cut", progress=silent)
    again = make_broken_task()
    train(again, skipping(optimizer="adamax", weight_decay=1e-3), tmp_path / "cut", progress=silent)
    assert all(a.equal(b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))
