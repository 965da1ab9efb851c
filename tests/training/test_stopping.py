"""Stopping by the clock or by SIGTERM, evaluations at chosen steps, and a state that is laid out as its parameters are."""

import os
import signal
import time

import pytest
import torch
from torch import nn

from bilip import models
from bilip.data import checkerboard
from bilip.errors import InputError, Stopped
from bilip.objectives import Likelihood
from bilip.training import Draw, Settings, Task, read_log, read_state, train
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
