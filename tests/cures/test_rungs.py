"""Rungs by themselves: stable splines that compute what a library's do, and a refined inverse where its own error dominates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor, nn

import bilip
from bilip.auditing.audit import make_sources
from bilip.auditing.budget import BUDGETS
from bilip.auditing.subject import Subject
from bilip.blocks import Bijection
from bilip.bounds import Box
from bilip.cures.arithmetic import DOMINATES, Refined
from bilip.cures.replacements import Replacements, _splines
from bilip.cures.reranging import Ranged, Reranging, _which, _widths, calibrate, scalings
from bilip.cures.rung import Case
from bilip.cures.treated import copied
from stacks import FLOWS, bilip_flow

BUDGET = replace(BUDGETS["quick"], samples=256, noise=256, draws=256, batch=128, bad_share=0.04, log_dets=1)


def nflows_spline(steep: float, kind: str = "coupling"):
    pytest.importorskip("nflows")
    from nflows import distributions, flows, transforms
    from nflows.nn.nets import ResidualNet

    torch.manual_seed(0)
    options = {"tails": "linear", "tail_bound": 3.0, "num_bins": 8}
    if kind == "coupling":
        parts = [
            transforms.PiecewiseRationalQuadraticCouplingTransform(
                [(k + j) % 2 for j in range(4)], lambda i, o: ResidualNet(i, o, 16, num_blocks=1), **options
            )
            for k in range(4)
        ]
    else:
        parts = [
            transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(4, 16, num_blocks=1, **options)
            for _ in range(2)
        ]
    flow = flows.Flow(transforms.CompositeTransform(parts), distributions.StandardNormal([4])).eval()
    with torch.no_grad():
        for part in parts:
            final = (part.transform_net if kind == "coupling" else part.autoregressive_net).final_layer
            final.bias.normal_(0, steep)
    return flow


def normflows_spline(steep: float, kind: str = "coupling"):
    nf = pytest.importorskip("normflows")
    torch.manual_seed(0)
    make = {"coupling": "CoupledRationalQuadraticSpline", "autoregressive": "AutoregressiveRationalQuadraticSpline"}
    parts = [getattr(nf.flows, make[kind])(4, 1, 16) for _ in range(3)]
    flow = nf.NormalizingFlow(nf.distributions.DiagGaussian(4, trainable=False), parts).eval()
    with torch.no_grad():
        for name, p in flow.named_parameters():
            if name.endswith("final_layer.bias"):
                p.normal_(0, steep)
    return flow


@pytest.mark.parametrize("kind", ["coupling", "autoregressive"])
@pytest.mark.parametrize("make", [nflows_spline, normflows_spline], ids=["nflows", "normflows"])
def test_it_is_the_librarys_own_function_in_both_directions(make, kind):
    model = make(1.0, kind).double()
    before = bilip.as_bijection(model)
    treated = Replacements().apply(copied(model), {"splines": True})
    assert _splines(before)
    after = treated.bijection
    x = 2 * torch.randn(64, 4, dtype=torch.float64)
    with torch.no_grad():
        z, log_det = before.forward_and_log_det(x)
        ours, our_log_det = after.forward_and_log_det(x)
        back, down = after.inverse_and_log_det(z)
    assert torch.allclose(ours, z, rtol=0, atol=1e-9)
    assert torch.allclose(our_log_det, log_det, rtol=0, atol=1e-8)
    assert torch.allclose(back, x, rtol=0, atol=1e-6)
    assert torch.allclose(down, -log_det, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steep", [4.0, 12.0, 40.0])
def test_steep_bins_never_assert_and_solve_for_their_latent(steep):
    """The library's own inverse asserts in some batches of such layers, on some CPUs; this one solves F(x) = z to rounding everywhere."""
    model = nflows_spline(steep)
    block = Replacements().apply(copied(model._transform._transforms[0]), {"splines": True}).bijection
    z = 6 * torch.rand(4096, 4) - 3
    z[:8] = torch.tensor([-3.0, 3.0, 0.0, 2.9999998])
    with torch.no_grad():
        x, log_det = block.inverse_and_log_det(z)
        again, up = block.forward_and_log_det(x)
    assert torch.isfinite(x).all()
    assert torch.isfinite(log_det).all()
    assert torch.isfinite(up).all()
    assert torch.isfinite(again).all()
    # x is the float32 nearest to the solution: its neighbours, in the entries that are moved, lie on both sides of it
    moved = torch.tensor([False, True, False, True])
    ends = []
    for way in (-torch.inf, torch.inf):
        near = torch.nextafter(torch.nextafter(x, torch.tensor(way)), torch.tensor(way))
        with torch.no_grad():
            ends.append(block(torch.where(moved, near, x)))
    rounding = 4 * 2.0**-23 * 3
    assert bool((ends[0] - rounding <= z).all())
    assert bool((z <= ends[1] + rounding).all())


def test_without_tails_nothing_is_raised_outside():
    pytest.importorskip("nflows")
    from nflows import transforms
    from nflows.nn.nets import ResidualNet

    block = transforms.PiecewiseRationalQuadraticCouplingTransform(
        [0, 1], lambda i, o: ResidualNet(i, o, 8, num_blocks=1)
    )
    treated = Replacements().apply(copied(block), {"splines": True})
    x = torch.tensor([[0.5, 7.0], [0.5, 0.25], [0.5, 1.0]])
    with torch.no_grad():
        assert torch.allclose(treated.bijection.inverse(treated.bijection(x)), x, atol=1e-6)


def test_a_model_without_splines_is_skipped_with_the_reason():
    result = bilip.cure(bilip_flow(), torch.randn(256, 4), uses=["inversion"], rungs=["replacements"], budget=BUDGET)
    assert result.tried[0].outcome == "skipped"
    assert "no block" in result.tried[0].reason


class Sloppy(Bijection):
    """x + sin(x) / 2 + w, with an inverse that stops after three steps of its fixed point: off by about 1e-2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return x + torch.sin(x) / 2 + self.w

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        x = z
        for _ in range(3):
            x = z - self.w - torch.sin(x) / 2
        return x

    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self(x), torch.log1p(torch.cos(x) / 2).sum(1)


def errors(model: Bijection, x: Tensor) -> Tensor:
    with torch.no_grad():
        return (model.inverse(model(x)).double() - x.double()).norm(dim=1)


def points(width: int) -> Tensor:
    return torch.randn(256, width, generator=torch.Generator().manual_seed(3))


def test_it_helps_where_the_inverse_itself_is_off():
    model, x = Sloppy(), points(3)
    assert float(errors(model, x).max()) > 1e-3
    assert float(errors(Refined(model), x).max()) < 1e-5
    result = bilip.cure(model, x, uses=["inversion"], rungs=["arithmetic"], budget=BUDGET)
    assert result.status == "cured", str(result)
    assert result.chosen is not None
    assert "refined" in result.chosen.settings


def test_it_is_skipped_where_the_latent_is_too_short_and_would_not_help():
    torch.manual_seed(0)
    flow, x = bilip_flow(-4.0), points(4)
    result = bilip.cure(flow, x, uses=["inversion"], rungs=["arithmetic"], all_rungs=True, budget=BUDGET)
    assert not any("refined" in attempt.settings for attempt in result.tried)
    # the theory, tried all the same: a latent of float32 does not know more about x
    plain, refined = errors(flow.bijection, x), errors(Refined(flow.bijection), x)
    assert float(refined.median()) > 0.1 * float(plain.median()) > 1e-3


class Detour(Bijection):
    """Far away and back, before a contraction: latents lose digits on the way, in both directions alike."""

    def __init__(self) -> None:
        super().__init__()
        self.far = nn.Parameter(torch.tensor(3e4))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return ((x + self.far) - self.far) * 1e-3

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return (z * 1e3 - 1.7 * self.far) + 1.7 * self.far


class Turning(Sloppy):
    """Far from the identity: a step without a Jacobian leads away."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return -4 * super().forward(x)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> Tensor:
        return super().inverse(-z / 4)


@pytest.mark.parametrize(("model", "width"), [(Detour(), 3), (Turning(), 80)])
def test_it_is_skipped_where_the_latent_is_as_wrong_or_no_step_leads_there(model, width):
    if isinstance(model, Turning):
        model.w = nn.Parameter(torch.zeros(width))
    x = points(width)
    result = bilip.cure(model, x, uses=["inversion"], rungs=["arithmetic"], all_rungs=True, budget=BUDGET)
    assert result.before.verdicts["inversion"].status == "unsafe"
    assert not any("refined" in attempt.settings for attempt in result.tried)
    assert not float(errors(Refined(model), x).median()) < 0.1 * float(errors(model, x).median())


@pytest.mark.parametrize("width", [3, 80])
def test_large_dimensions_take_steps_without_a_jacobian(width):
    model = Sloppy()
    model.w = nn.Parameter(torch.zeros(width))
    x = points(width)
    assert float(errors(Refined(model, 40), x).max()) < 1e-4


def test_it_follows_its_parameters_and_is_not_stale():
    model = Refined(Sloppy())
    x = points(3)
    errors(model, x)
    with torch.no_grad():
        model.inner.w.add_(1.0)
    assert float(errors(model, x).max()) < 1e-5
    assert DOMINATES > 1


@pytest.mark.parametrize("name", ["bilip", "nflows", "normflows", "zuko", "pyro", "FrEIA"])
def test_bounded_scales_leave_the_mean_of_every_channel_where_it_was(name):
    pytest.importorskip(name)
    torch.manual_seed(0)
    model = FLOWS[name](-0.5)
    with torch.no_grad():  # scales that depend on x, so that bounding them moves the means
        for scaling in scalings(bilip.as_bijection(model)):
            last = [layer for layer in scaling.net.modules() if type(layer).__name__.endswith("Linear")][-1]
            last.weight[_which(len(last.weight), "second" if scaling.layout == "pair" else scaling.layout)] *= 20
    x = torch.randn(1024, 4, generator=torch.Generator().manual_seed(1)) + 2
    treated, moved = held(model, x)
    with torch.no_grad():
        aim, ours = (bilip.as_bijection(m)(x) for m in (model, treated.model))
        for part in moved:
            part.shift.zero_()
        bare = treated.bijection(x)
    assert float((ours.mean(0) - aim.mean(0)).abs().max()) < 0.02 * float(aim.std())
    assert float((ours - aim).norm()) < float((bare - aim).norm())


@pytest.mark.parametrize("factor_out", [False, True])
def test_images_keep_the_means_of_their_channels(factor_out):
    torch.manual_seed(0)
    model = bilip.models.glow((3, 8, 8), levels=2, blocks=2, hidden=8, coupling="affine", factor_out=factor_out)
    x = torch.rand(600, 3, 8, 8)
    model.train()(x)
    with torch.no_grad():
        for scaling in scalings(model.eval()):
            for p in scaling.net.parameters():
                p += 0.1 * torch.randn_like(p)
    treated, moved = held(model, x)
    with torch.no_grad():
        aim, ours = model(x), treated.bijection(x)
        for part in moved:
            part.shift.zero_()
        bare = treated.bijection(x)
    off, without = (float((z.mean(0) - aim.mean(0)).norm()) for z in (ours, bare))
    assert off < 0.9 * without


def held(model, x: Tensor):
    """A copy whose scales are bounded, not tuned, and the nets that hold them."""
    treated = copied(model)
    subject = Subject(copied(model).adapted, "")
    sources = make_sources(x, [], BUDGET, 0, subject)
    before: Any = None
    case = Case(subject, sources, before, ("inversion",), None, lambda: math.inf, lambda text: None)
    settings = {"widths": _widths(case), "spread": 0.3, "centre": None}
    treated = Reranging().apply(treated, settings)
    calibrate(treated, settings, case)
    return treated, [part for part in treated.bijection.modules() if isinstance(part, Ranged)]


def test_a_ranged_image_lies_in_its_box_where_centre_and_range_cancel():
    held = Ranged(nn.Identity(), 2, "second").double()
    held.centre.fill_(58.799320459365845)
    held.radius.fill_(58.871997684738986)
    raw = -158.72159920732437
    with mpmath.workdps(50):
        centre, half = mpmath.mpf(float(held.centre[1])), mpmath.mpf(float(held.radius[1]))
        value = centre + half * mpmath.tanh((raw - centre) / half)
        for high in (raw, math.inf):
            ends = (torch.tensor([0.0, end], dtype=torch.float64) for end in (raw, high))
            image = held.enclose(Box(*ends))
            assert float(image.low[1]) <= value <= float(image.high[1])
