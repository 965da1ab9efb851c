"""Differences of outputs: their gradients nearly cancel, so the walks behind them are held to less drift."""

import copy

import pytest
import torch

from bilip import models
from bilip.errors import InputError
from bilip.regularizers import FiniteDifference
from bilip.reversible import Guard, Reversible, angle, hold
from bilip.reversible.call import Call
from bilip.reversible.guard import Drift
from squashed import squash


def planted(sigma=1e-3):
    """A coupling that loses some digits: its walk drifts, and not beyond the tolerance."""
    torch.manual_seed(0)
    model, x = models.real_nvp(8, blocks=8, hidden=(16,), activation="tanh"), torch.randn(32, 8)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    squash(model[4], sigma)
    return model, x


def gradients(f, model, x, penalty):
    z = f(x)
    loss = penalty(f, x, latent=(z, None), step=0)
    return torch.autograd.grad(loss, list(model.parameters()))


def seen_shares(monkeypatch):
    """By backward pass of a call: whether it is an inverse, and its share."""
    found, pull = [], Call.pull

    def seen(self, back):
        found.append((self.inverse, float(self.share)))
        return pull(self, back)

    monkeypatch.setattr(Call, "pull", seen)
    return found


@pytest.mark.numeric
def test_drift_that_matters_in_a_difference_alone_is_repaired():
    """Drift within the tolerance, which one gradient does not show and the difference of two does."""
    model, x = planted(0.05)
    penalty = FiniteDifference(1.0, eps=3e-3, mode="forward")
    stored = gradients(model, model, x, penalty)
    bare = angle(gradients(Reversible(model, guard=None), model, x, penalty), stored)
    saving = Reversible(model, Guard(spot_check=0))
    one, other = (torch.autograd.grad(f(x).square().sum(), [*model.parameters()]) for f in (saving, model))
    assert angle(one, other) < 1e-3
    assert saving.report().repaired == 0
    assert bare > 1e-3
    for _ in range(3):
        assert angle(gradients(saving, model, x, penalty), stored) < 1e-3
    assert saving.report().repaired > 0


def test_all_walks_of_a_penalty_are_held_and_no_others(monkeypatch):
    """Both its own and the task's, whose latent it was given, also behind an index and in one batch."""
    torch.manual_seed(0)
    f, x = Reversible(models.real_nvp(4, blocks=4)), torch.randn(64, 4)
    found = seen_shares(monkeypatch)
    for options, count in (({}, 3), ({"fraction": 0.5}, 3), ({"mode": "forward"}, 2), ({"mode": "inverse"}, 2)):
        z, log_det = f.forward_and_log_det(x)
        FiniteDifference(1.0, eps=0.01, **options)(f, x, latent=(z, log_det), step=0).backward()
        assert len(found) == count
        assert all(0.01 < share < 0.9 for _, share in found)  # 10 eps over the spread of the samples
        found.clear()
    FiniteDifference(1.0, eps=0.01)(f, x, step=0).backward()
    assert [inverse for inverse, _ in found] == [True, False]
    assert all(share < 0.9 for _, share in found)
    found.clear()
    f(x).sum().backward()
    assert found == [(False, 1.0)]


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_steps_that_no_walk_can_resolve_are_not_walked(dtype, eps, monkeypatch):
    """The states are evaluated again from what is stored."""
    monkeypatch.setattr(Call, "_walk", lambda *a, **o: pytest.fail("walked"))
    torch.manual_seed(0)
    model, x = models.real_nvp(4, blocks=4).to(dtype), torch.randn(16, 4, dtype=dtype)
    penalty, saving = FiniteDifference(1.0, eps=eps), Reversible(model)
    gradients(saving, model, x, penalty)
    assert saving.report().repaired == 3
    walked = []
    monkeypatch.setattr(
        Call, "_walk", lambda self, back, **o: walked.append(1) or (*self._recompute(back), Drift.none(back.x))
    )
    gradients(
        saving, model, 1e-3 * x, FiniteDifference(1.0, eps=eps, mode="forward")
    )  # beside smaller samples it is larger
    assert len(walked) == 2


def test_what_is_asked_of_a_walk():
    torch.manual_seed(0)
    model, x = models.real_nvp(4, blocks=4), torch.randn(16, 4)
    f, g = Reversible(model), Reversible(copy.deepcopy(model))
    z = g(f(x))
    assert hold(z, 0.5) == 2
    assert hold(x, 0.5) == hold(model(x), 0.5) == 0
    assert hold(z, 1.0) == 2  # the smaller share stays
    z.sum().backward()
    assert f.report().tolerance == g.report().tolerance == pytest.approx(0.5 * Guard().limit(torch.float32))
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match="from 0 to 1"):
            hold(z, share)


@pytest.mark.parametrize("action", ["warn", "raise"])
def test_other_actions_walk_as_well_as_they_can(action):
    torch.manual_seed(0)
    f, x = Reversible(models.real_nvp(4, blocks=2), Guard(tolerance=0.1, action=action)), torch.randn(16, 4)
    z = f(x)
    hold(z, 1e-12)
    assert Guard().least(torch.float32) == pytest.approx(20 * torch.finfo(torch.float32).eps)
    z.sum().backward()
    assert f.report().tolerance == pytest.approx(20 * torch.finfo(torch.float32).eps)
