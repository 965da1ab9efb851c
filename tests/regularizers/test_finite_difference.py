"""The finite-difference penalty: its formulas, its gradients, and what it leaves alone."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from bilip import Chain, blocks, models
from bilip.errors import InputError
from bilip.regularizers import FiniteDifference, SkippedSamples
from bilip.reversible import Guard, Reversible, angle, hold
from bilip.reversible.call import Call
from bilip.reversible.guard import Drift
from catalogue import saved_bytes, squash


def diagonal(*scales):
    return blocks.DiagonalScaling(torch.tensor(scales, dtype=torch.float64))


def gradients(model, loss):
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), found, strict=True)]


def test_clean_is_the_papers_formula():
    """For a multiple of the identity every direction is stretched alike: |F(x) - F(x + eps v)| / eps = 4, 1/4 for the inverse."""
    x = torch.randn(7, 3, dtype=torch.float64)
    model = diagonal(4.0, 4.0, 4.0)
    for mode, value in (("forward", 4.0), ("inverse", 0.25), ("both", 4.25)):
        for eps in (0.1, 1e-3):
            assert float(FiniteDifference(2.0, mode=mode, eps=eps)(model, x, step=0)) == pytest.approx(2 * value)


def test_clean_does_not_depend_on_batch_size_or_dimension():
    values = []
    for batch, size in ((8, 4), (64, 4), (8, 200)):
        x = torch.randn(batch, size, dtype=torch.float64)
        values.append(float(FiniteDifference(1.0)(diagonal(*[3.0] * size), x, step=0)))
    assert values == pytest.approx([3 + 1 / 3] * 3)


def test_original_is_the_papers_code():
    r"""Columns of unit norm, squared, summed over the batch, divided by eps: for F = 4 it is 16 eps d whatever was drawn."""
    x = torch.randn(9, 5, dtype=torch.float64)
    model, eps = diagonal(*[4.0] * 5), 0.1
    found = float(FiniteDifference(1.0, mode="forward", scaling="original", eps=eps)(model, x, step=3))
    assert found == pytest.approx(16 * eps * 5)
    found = float(FiniteDifference(1.0, scaling="original", eps=eps)(model, x, step=3))
    assert found == pytest.approx((16 + 1 / 16) * eps * 5)


def test_original_against_a_transcription():
    torch.manual_seed(0)
    model, x = models.real_nvp(6, blocks=3, hidden=(8,)).double(), torch.randn(10, 6, dtype=torch.float64)
    penalty = FiniteDifference(1e-2, scaling="original", seed=5)
    v, w = torch.randn(2, 10, 6, generator=penalty._generator(x, 2), dtype=torch.float64)
    v, w = v / v.norm(dim=0), w / w.norm(dim=0)
    z = model(x)
    forward = (z - model(x + 0.1 * v)).norm() ** 2 / 0.1
    inverse = (x - model.inverse(z + 0.1 * w)).norm() ** 2 / 0.1
    expected = 1e-2 * (forward + inverse)
    found = penalty(model, x, step=2)
    assert float(found) == pytest.approx(float(expected), rel=1e-12)
    for a, b in zip(gradients(model, found), gradients(model, expected), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scaling", ["clean", "original"])
@pytest.mark.parametrize("mode", ["both", "forward", "inverse"])
def test_latent_of_the_task_changes_nothing(mode, scaling):
    model, x = models.real_nvp(4, blocks=4, hidden=(8,)).double(), torch.randn(6, 4, dtype=torch.float64)
    penalty = FiniteDifference(1.0, mode=mode, scaling=scaling)
    alone, shared = penalty(model, x, step=1), penalty(model, x, latent=model.forward_and_log_det(x), step=1)
    assert float(alone) == pytest.approx(float(shared), rel=1e-12)
    for a, b in zip(gradients(model, alone), gradients(model, shared), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("coupling", ["additive", "affine"])
def test_through_reversible(coupling):
    """The same numbers and gradients memory-saving, and nothing but the ends of the passes is stored."""
    torch.manual_seed(0)
    model = models.glow((3, 8, 8), levels=2, blocks=3, hidden=8, coupling=coupling).double()
    x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    model(x)
    penalty, saving = FiniteDifference(1.0), Reversible(model)

    def loss(m):
        z, log_det = m.forward_and_log_det(x)
        return z.square().mean() + penalty(m, x, latent=(z, log_det), step=4)

    assert float(loss(model)) == pytest.approx(float(loss(saving)), rel=1e-12)
    for a, b in zip(gradients(model, loss(model)), gradients(model, loss(saving)), strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)
    assert saving.report().repaired == 0


def stored_bytes(model, x):
    return saved_bytes(lambda: FiniteDifference(1.0)(model, x, step=0))


def test_memory_is_flat_in_depth():
    x = torch.randn(64, 8)
    small, deep = (models.real_nvp(8, blocks=k, hidden=(32,)) for k in (4, 32))
    assert stored_bytes(deep, x) > 6 * stored_bytes(small, x)
    assert stored_bytes(Reversible(deep), x) <= 1.05 * stored_bytes(Reversible(small), x)


def noted(kind):
    """Couplings whose nets have dropout or BatchNorm."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(2, 16), kind(), nn.Tanh(), nn.Linear(16, 4)) for _ in range(4)]
    parts = [blocks.AffineCoupling(net, partition=blocks.Split(swap=k % 2 == 1)) for k, net in enumerate(nets)]
    return Chain(*parts, shape=(4,)).double().train()


@pytest.mark.parametrize("wrap", [lambda m: m, Reversible], ids=["stored", "reversible"])
@pytest.mark.parametrize("latent", [True, False])
def test_dropout_masks_are_shared(wrap, latent):
    """With masks of their own the two ends would differ however small the step; with shared ones, as the step."""
    model, x = noted(lambda: nn.Dropout(0.5)), torch.randn(8, 4, dtype=torch.float64)
    run = wrap(model)
    given = run.forward_and_log_det(x) if latent else None
    for mode in ("both", "forward", "inverse"):
        coarse, fine = (
            float(FiniteDifference(1.0, mode=mode, eps=eps)(run, x, latent=given, step=0)) for eps in (1e-3, 1e-6)
        )
        assert fine < 100
        assert coarse < 100
    found = []
    for m in (model, run):
        torch.manual_seed(1)
        given = m.forward_and_log_det(x) if latent else None
        found.append(gradients(model, FiniteDifference(1.0)(m, x, latent=given, step=0)))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("wrap", [lambda m: m, Reversible], ids=["stored", "reversible"])
def test_batchnorm_statistics_are_left_alone(wrap):
    model, x = noted(lambda: nn.BatchNorm1d(16)), torch.randn(8, 4, dtype=torch.float64)
    run = wrap(model)
    z, log_det = run.forward_and_log_det(x)
    before = copy.deepcopy(dict(model.named_buffers()))
    loss = z.square().mean() + FiniteDifference(1.0)(run, x, latent=(z, log_det), step=0)
    loss = loss + FiniteDifference(1.0)(run, x, step=1)
    loss.backward()
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())


def test_random_numbers_are_a_function_of_seed_and_step():
    model, x = models.real_nvp(4, blocks=3), torch.randn(16, 4)
    state = torch.get_rng_state()
    a, b = (FiniteDifference(1.0, seed=3)(model, x, step=k) for k in (7, 7))
    assert torch.equal(a, b)
    values = [
        float(FiniteDifference(1.0, seed=s, fraction=f)(model, x, step=k))
        for s, k, f in ((3, 8, 1), (4, 7, 1), (3, 7, 0.5))
    ]
    assert len({float(a), *values}) == 4
    assert torch.equal(torch.get_rng_state(), state)


def test_every_and_fraction():
    model, x = models.real_nvp(4, blocks=3), torch.randn(16, 4)
    model.forward = None  # type: ignore[method-assign]  # a call would raise
    penalty = FiniteDifference(1.0, every=5)
    zero = penalty(model, x, step=4)
    assert zero.shape == ()
    assert float(zero) == 0
    assert not zero.requires_grad
    with pytest.raises(TypeError):
        penalty(model, x, step=10)
    part = FiniteDifference(1.0, fraction=0.25)
    part(models.real_nvp(4, blocks=3), x, step=0)
    assert part.seen == 4


class Breaks(blocks.Bijection):
    """NaN beyond 3, with a gradient that is NaN there too."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0))

    def forward(self, x, context=None):
        return self.a * (3 - x).sqrt()

    def inverse(self, z, context=None):
        return 3 - (z / self.a).square()


@pytest.mark.parametrize("scaling", ["clean", "original"])
def test_samples_that_are_not_finite_are_left_out_and_counted(scaling):
    model, penalty = Breaks(), FiniteDifference(1.0, scaling=scaling)
    x = torch.tensor([[0.0, 1.0], [5.0, 0.0], [1.0, 1.0], [0.0, 9.0]])
    with pytest.warns(SkippedSamples, match="2 samples"):
        value = penalty(model, x, step=0)
    assert (penalty.seen, penalty.skipped) == (4, 2)
    assert math.isfinite(float(value))
    assert float(value) > 0
    assert bool(torch.isfinite(torch.autograd.grad(value, model.a)[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        nothing = penalty(model, x[[1, 3]], step=1)
    assert float(nothing) == 0
    assert (penalty.seen, penalty.skipped) == (6, 4)


def test_contexts_and_foreign_models():
    model, x = models.real_nvp(4, blocks=3, context=2), torch.randn(16, 4)
    penalty = FiniteDifference(1.0, fraction=0.5)
    assert float(penalty(model, x, context=torch.randn(16, 2), step=0)) > 0
    from bilip import Flow

    assert float(penalty(Flow(models.real_nvp(4, blocks=2)), x, step=0)) > 0
    head = models.classifier(models.real_nvp(4, blocks=2), classes=3)
    assert float(penalty(head, x, step=0)) > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"weight": -1.0}, "weight=-1.0"),
        ({"weight": math.nan}, "weight=nan"),
        ({"weight": 1.0, "every": 0}, "every=0"),
        ({"weight": 1.0, "every": 2.5}, "every=2.5"),
        ({"weight": 1.0, "eps": 0.0}, "eps=0.0"),
        ({"weight": 1.0, "fraction": 1.5}, "fraction=1.5"),
        ({"weight": 1.0, "fraction": 0.0}, "fraction=0.0"),
        ({"weight": 1.0, "mode": "sideways"}, "'both', 'forward', 'inverse'"),
        ({"weight": 1.0, "scaling": "odd"}, "'clean', 'original'"),
        ({"weight": 1.0, "seed": 0.5}, "seed=0.5"),
    ],
)
def test_bad_arguments(arguments, says):
    with pytest.raises(InputError, match=says):
        FiniteDifference(**arguments)


def test_bad_calls():
    model, x = models.real_nvp(4, blocks=2), torch.randn(8, 4)
    penalty = FiniteDifference(1.0)
    z, log_det = model.forward_and_log_det(x)
    for latent, says in (
        (z, "pair"),
        ((z[:4], log_det), "not the latents"),
        ((z[:, :3], log_det), "not the latents"),
        ((z, log_det[:, None]), "one log-determinant for each"),
        ((z, log_det.sum()), "one log-determinant for each"),
    ):
        with pytest.raises(InputError, match=says):
            penalty(model, x, latent=latent, step=0)
    with pytest.raises(InputError, match="step=-1"):
        penalty(model, x, step=-1)
    with pytest.raises(InputError, match="batch of floats"):
        penalty(model, torch.zeros(4, dtype=torch.long), step=0)
    with pytest.raises(InputError, match="batch of floats"):
        penalty(model, x[:0], step=0)


def squashed_flow(sigma=1e-3):
    """A coupling that loses some digits: its walk drifts, and not beyond the tolerance."""
    torch.manual_seed(0)
    model, x = models.real_nvp(8, blocks=8, hidden=(16,), activation="tanh"), torch.randn(32, 8)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    squash(model[4], sigma)
    return model, x


def gradients_of(f, model, x, penalty):
    z = f(x)
    loss = penalty(f, x, latent=(z, None), step=0)
    return torch.autograd.grad(loss, list(model.parameters()))


def seen_shares(monkeypatch):
    """By backward pass of a call: whether it is an inverse, and its share."""
    found, backward = [], Call.backward

    def seen(self, back):
        found.append((self.inverse, float(self.share)))
        return backward(self, back)

    monkeypatch.setattr(Call, "backward", seen)
    return found


@pytest.mark.numeric
def test_drift_that_matters_in_a_difference_alone_is_repaired():
    """Drift within the tolerance, which one gradient does not show and the difference of two does."""
    model, x = squashed_flow(0.05)
    penalty = FiniteDifference(1.0, eps=3e-3, mode="forward")
    stored = gradients_of(model, model, x, penalty)
    bare = angle(gradients_of(Reversible(model, guard=None), model, x, penalty), stored)
    saving = Reversible(model, Guard(spot_check=0))
    one, other = (torch.autograd.grad(f(x).square().sum(), [*model.parameters()]) for f in (saving, model))
    assert angle(one, other) < 1e-3
    assert saving.report().repaired == 0
    assert bare > 1e-3
    for _ in range(3):
        assert angle(gradients_of(saving, model, x, penalty), stored) < 1e-3
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
    gradients_of(saving, model, x, penalty)
    assert saving.report().repaired == 3
    walked = []
    monkeypatch.setattr(
        Call, "_walk", lambda self, back, **o: walked.append(1) or (*self._recompute(back), Drift.none(back.x))
    )
    gradients_of(
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
