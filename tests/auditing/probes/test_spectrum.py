"""Singular values against dense decompositions, known spectra and exact arithmetic; proven bounds beside them."""

import math

import pytest
import torch
from torch import nn

import bilip
from bilip import Bijection, Chain, blocks, models
from bilip.auditing.probes import Bounds, Spectrum, Subject, extremes, jacobian, singular_values, spectrum
from bilip.errors import NotMeasured
from bilip.linalg.lanczos import largest_singular_value
from catalogue import CATALOGUE

pytestmark = pytest.mark.numeric


def woken(model, scale=0.2):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * scale * torch.randn_like(p))
    for part in model.modules():
        if isinstance(part, blocks.ActNorm):
            part._mark(True)
    return model.double().eval()


def dense(model, x):
    rows = torch.autograd.functional.jacobian(lambda y: model(y[None]).flatten(), x[0])
    return rows.reshape(-1, x[0].numel())


MODELS = {
    "coupling": (lambda: models.real_nvp(6, blocks=8), (6,)),
    "residual": (
        lambda: Chain(*(blocks.Residual(bilip.nets.MLP(4, 4, lipschitz=0.9)) for _ in range(4)), shape=(4,)),
        (4,),
    ),
    "glow": (lambda: models.glow((3, 8, 8), levels=2, blocks=2, hidden=8), (3, 8, 8)),
    "multi-scale": (lambda: models.glow((3, 8, 8), levels=3, blocks=1, hidden=8, factor_out=True), (3, 8, 8)),
    "large": (lambda: models.real_nvp(400, blocks=3, hidden=(16,)), (400,)),  # large enough for the vmap road
}


@pytest.mark.parametrize("name", MODELS)
def test_exact_mode_agrees_with_a_dense_svd(name):
    make, shape = MODELS[name]
    model, x = woken(make()), torch.randn(1, *shape, dtype=torch.float64)
    reference = torch.linalg.svdvals(dense(model, x))
    found = singular_values(model, x)
    known = reference >= 1e-6 * reference[0]
    assert torch.allclose(found.values[known], reference[known], rtol=1e-6, atol=0)
    assert bool(found.resolved[known].all())
    assert torch.allclose(jacobian(model, x), dense(model, x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_matrix_free_extremes_keep_their_word(name):
    make, shape = MODELS[name]
    model, x = woken(make()), torch.randn(3, *shape, dtype=torch.float64)
    found = extremes(model, x, steps=120)
    for k in range(3):
        values = singular_values(model, x[k : k + 1]).values
        for mine, true, error in (
            (found.sigma_max[k], values[0], found.sigma_max_error[k]),
            (found.sigma_min[k], values[-1], found.sigma_min_error[k]),
        ):
            off = abs(float(mine / true) - 1)
            assert off <= max(1e-6, float(error))
            if error <= 1e-6:
                assert off <= 1e-6
        assert float(found.sigma_max[k]) <= float(values[0]) * (1 + 1e-9)  # one-sided, whatever the residual
        assert float(found.sigma_min[k]) >= float(values[-1]) * (1 - 1e-9)


def turned_scalings(scales, depth, size=6):
    """Q D Q^T, `depth` times: the spectrum is the scales to the power of the depth."""
    q = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]
    forth, back = blocks.InvertibleConv1x1(size), blocks.InvertibleConv1x1(size)
    with torch.no_grad():
        forth.weight.data, back.weight.data = q.T.contiguous(), q.contiguous()
    one = [forth, blocks.DiagonalScaling(torch.tensor(scales, dtype=torch.float64)), back]
    return Chain(*(one * depth), shape=(size,)).eval()


@pytest.mark.parametrize("depth", [5, 10, 15])
def test_known_spectra_down_to_1e_30(depth):
    scales = [1.0, 0.9, 0.5, 0.3, 0.1, 0.01]
    model, x = turned_scalings(scales, depth), torch.randn(1, 6, dtype=torch.float64)
    true = [s**depth for s in scales]
    found = singular_values(model, x)
    assert float(found.values[-1]) == pytest.approx(true[-1], rel=1e-3)
    assert float(found.values[0]) == pytest.approx(true[0], rel=1e-6)
    for value, resolved, expected in zip(found.values.tolist(), found.resolved.tolist(), true, strict=True):
        if resolved:
            assert value == pytest.approx(expected, rel=1e-3)
        else:
            assert value < 1e-10 * found.values[0]
    free = extremes(model, x)
    assert float(free.sigma_min) == pytest.approx(true[-1], rel=1e-3)


def test_what_neither_side_resolves_is_marked():
    model = turned_scalings(
        [1.0, 1e-1, 1e-7, 1e-7, 1e-8, 1e-15], 2
    )  # 1e-30 at one end, 1 at the other, 1e-14 in between
    found = singular_values(model, torch.randn(1, 6, dtype=torch.float64))
    assert found.resolved.tolist() == [True, True, False, False, False, True]


def test_against_exact_arithmetic():
    """A deep affine chain: the Jacobian in 150 digits, its smallest singular value from the inverse Gram matrix."""
    mpmath = pytest.importorskip("mpmath")
    torch.manual_seed(3)
    model = models.real_nvp(4, blocks=16, hidden=(8,), activation="relu").double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.1)
    x = 2 * torch.randn(1, 4, dtype=torch.float64)
    at = Subject.of(model).linearized(x)
    eye = torch.eye(4, dtype=torch.float64)
    with mpmath.workdps(150):
        total = mpmath.eye(4)
        for part in at.parts:  # each block's Jacobian is well conditioned; only their product is not
            total = mpmath.matrix(part.apply(eye).T.tolist()) * total
        values = mpmath.svd_r(total, compute_uv=False)
        true = float(min(values))
        largest = float(max(values))
    assert 1e16 < largest / true < 1e40  # a float64 decomposition of the product would see nothing
    found = singular_values(model, x)
    assert float(found.values[-1]) == pytest.approx(true, rel=max(1e-3, found.min_error))
    free = extremes(model, x)
    assert float(free.sigma_min) == pytest.approx(true, rel=1e-3), free.note


def test_an_opaque_model_whose_inverse_fails_the_check_is_not_measured():
    class Off(Bijection):
        def __init__(self):
            super().__init__()
            self.inner = models.real_nvp(1200, blocks=1, hidden=(4,))

        def forward(self, x, context=None):
            return 5 * self.inner(x)

        def inverse(self, z, context=None):
            return self.inner.inverse(z / 5) * 1.5

    model, x = woken(Off()), torch.randn(1, 1200, dtype=torch.float64)
    with pytest.raises(NotMeasured, match="not the inverse of its Jacobian"):
        Subject.of(model).linearized(x).solve(torch.ones(1, 1200, dtype=torch.float64))
    m = Spectrum(1, steps=10).measure(model, x)
    assert m["sigma_min_status"] == "not-measured"
    assert math.isnan(m["sigma_min"])
    assert m["sigma_max"] > 0


def test_an_iterative_inverse_that_autograd_does_not_see_is_solved_instead():
    class Iterated(nn.Module):
        def forward(self, x):
            return x + 0.5 * torch.sin(x)

        @torch.no_grad()
        def inverse(self, z):
            x = z
            for _ in range(200):
                x = z - 0.5 * torch.sin(x)
            return x

    x = torch.randn(2, 5, dtype=torch.float64)
    found = extremes(Iterated().double(), x)
    true = 1 + 0.5 * torch.cos(x)
    assert torch.allclose(found.sigma_min, true.amin(1), rtol=1e-6)
    assert torch.allclose(found.sigma_max, true.amax(1), rtol=1e-6)


def test_a_large_image_is_measured_without_a_matrix():
    model = woken(models.glow((3, 64, 64), levels=2, blocks=1, hidden=4), 0.1)
    m = Spectrum(1, steps=30).measure(model, torch.rand(1, 3, 64, 64))
    assert (m["method"], m["dimension"]) == ("lanczos", 12288)
    assert m["sigma_max_status"] in ("measured", "one-sided")
    assert m["condition"] > 1


def test_lanczos_reports_what_it_does_not_know():
    torch.manual_seed(0)
    values = torch.cat((torch.linspace(1, 1.0001, 300), torch.rand(100))).double()
    found = largest_singular_value(
        lambda v: values * v, lambda u: values * u, torch.randn(1, 400, dtype=torch.float64), steps=5, tolerance=0
    )
    assert not bool(found.converged(1e-6))
    assert 0.5 < float(found.value) <= 1.0001


def test_context_is_used():
    model = blocks.AffineCoupling(bilip.nets.MLP(2, 4, context=3), scale="half_sigmoid").double()
    x, context = torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    both = extremes(model, x, context)
    for k in range(2):
        one = singular_values(model, x[k : k + 1], context[k : k + 1]).values
        assert float(both.sigma_max[k]) == pytest.approx(float(one[0]), rel=1e-6)


def conv(weight):
    block = blocks.InvertibleConv1x1(len(weight)).double().eval()
    block.weight.data = weight.clone()
    return block


@pytest.mark.parametrize("condition", [1e4, 1e8, 1e12, 1e15])
@pytest.mark.parametrize("order", ["there and back", "back and there", "and on"])
def test_errors_of_linear_chains_that_cancel_are_true(condition, order):
    """W and its inverse: each block is exact, their product is not. Against 60 digits."""
    mpmath = pytest.importorskip("mpmath")
    size = 5
    turns = [torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0] for _ in range(2)]
    first = turns[0] @ torch.diag(torch.logspace(0, -math.log10(condition), size, dtype=torch.float64)) @ turns[1]
    weights = [first, torch.linalg.inv(first)]
    if order == "back and there":
        weights.reverse()
    if order == "and on":
        weights.append(100 * torch.randn(size, size, dtype=torch.float64))
    with mpmath.workdps(60):
        product = mpmath.eye(size)
        for weight in weights:
            product = mpmath.matrix(weight.tolist()) * product
        true = sorted(mpmath.svd_r(product, compute_uv=False), reverse=True)
    model, x = Chain(*map(conv, weights), shape=(size,)).eval(), torch.randn(1, size, dtype=torch.float64)
    found = singular_values(model, x)
    for value, error, exact in zip(found.values.tolist(), found.errors.tolist(), true, strict=True):
        assert abs(value - exact) <= error * value
    if condition < 1e9:
        assert bool(found.resolved.all())
    values = Spectrum(samples=1).measure(model, x).values
    if values.get("sigma_max_status") == "one-sided":
        assert values["sigma_max"] <= true[0] * (1 + 1e-12)
    if values.get("sigma_min_status") == "one-sided":
        assert values["sigma_min"] >= true[-1] * (1 - 1e-12)


def test_lanczos_sees_what_a_chain_that_cancels_loses():
    """Beyond the exact mode too: at condition 1e14 the largest singular value of W^-1 W is off by more than its residual."""
    size = 300
    turns = [torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0] for _ in range(2)]
    first = turns[0] @ torch.diag(torch.logspace(0, -14, size, dtype=torch.float64)) @ turns[1]
    model = Chain(conv(first), conv(torch.linalg.inv(first)), shape=(size,)).eval()
    values = Spectrum(samples=1, steps=20).measure(model, torch.randn(1, size, dtype=torch.float64)).values
    assert values["sigma_max_status"] != "measured"


NAMES = ("additive held", "affine half", "affine exp", "affine context", "diagonal", "chain", "logit then affine")
NAMES += ("residual", "residual flow", "real_nvp additive", "real_nvp affine", "glow held")
CHOSEN = [e for e in CATALOGUE if e.name in NAMES]


@pytest.mark.parametrize("entry", CHOSEN, ids=[e.name for e in CHOSEN])
def test_proven_is_never_below_measured(entry):
    assert len(CHOSEN) == len(NAMES)
    x, context = entry.batch(20, torch.float32), entry.contexts(20, torch.float32)
    m = Bounds(samples=6).measure(entry.make(), x if context is None else (x, context))
    assert m.measured, m.reason
    for way in ("forward", "inverse"):
        proven, measured = m[f"log10_{way}"], m[f"measured_log10_{way}"]
        assert math.isfinite(measured)
        assert proven >= measured - 1e-6
    assert m.rows
    assert m.rows[-1]["total_forward"] == pytest.approx(sum(r["log10_forward"] for r in m.rows))


def test_a_diagonal_is_known_exactly():
    m = Bounds().measure(Chain(blocks.DiagonalScaling(torch.tensor([10.0, 0.01])), shape=(2,)), torch.randn(5, 2))
    assert (m["log10_forward"], m["log10_inverse"]) == pytest.approx((1.0, 2.0), abs=1e-6)
    assert (m["measured_log10_forward"], m["measured_log10_inverse"]) == pytest.approx((1.0, 2.0), abs=1e-6)


def test_the_domain_is_the_hull_of_the_data():
    m = Bounds(limit=2).measure(
        Chain(blocks.DiagonalScaling(torch.ones(2)), shape=(2,)), torch.tensor([[-1.0, 0.0], [2.0, 3.0], [9.0, 9.0]])
    )
    assert m["domain"] == "[-1, 3]: the hull of 2 samples"


def test_a_net_that_cannot_be_read_is_not_measured():
    class Opaque(nn.Module):
        def forward(self, x):
            return x * x.sum()

    m = Bounds().measure(Chain(blocks.AdditiveCoupling(Opaque()), shape=(4,)), torch.randn(5, 4))
    assert not m.measured
    assert "Opaque" in m.reason


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad.detach()


def test_the_jacobian_through_a_backward_pass_that_cannot_be_differentiated():
    class Fourfold(nn.Module):
        def forward(self, x):
            return x + Triple.apply(x), x.new_zeros(len(x))

        def inverse(self, z):
            return z / 4, z.new_zeros(len(z))

    model = Fourfold()
    x = torch.randn(1, 3, dtype=torch.float64)
    assert torch.allclose(jacobian(model, x), 4 * torch.eye(3, dtype=torch.float64))
    assert torch.allclose(singular_values(model, x).values, torch.full((3,), 4.0, dtype=torch.float64))


def test_gains_of_a_large_model_are_measured_once(monkeypatch):
    """What the spectrum finds of the first sample stands beside the bounds as well; what is given outside of an audit is found anew."""
    torch.manual_seed(0)
    model, x = models.glow((3, 16, 16), levels=2, blocks=1, hidden=8), torch.rand(300, 3, 16, 16)
    model(x)
    seen = []
    whole = spectrum._extremes
    monkeypatch.setattr(spectrum, "_extremes", lambda *given: seen.append(given[1]) or whole(*given))
    record = bilip.audit(model.eval(), {"test": x}, ood=["scaled:10"], budget="quick", probes=["spectrum", "bounds"])
    assert len(seen) == 2  # one for each source
    for source in ("test", "scaled:10"):
        found = {m.probe: m for m in record.measurements if m.source == source}
        gain = math.log10(found["spectrum"].rows[0]["sigma_max"])
        assert found["bounds"]["measured_log10_forward"] == pytest.approx(gain, abs=1e-12)
    for _ in range(2):
        extremes(model, x[:1].double(), steps=8)
    assert len(seen) == 4


def test_what_was_found_of_points_is_not_served_for_others():
    torch.manual_seed(0)
    subject, x = Subject.of(models.real_nvp(3, blocks=2)), torch.randn(1, 3, dtype=torch.float64)
    with subject.repeating():
        first = extremes(subject, x, steps=3)
        assert extremes(subject, x.clone(), steps=3) is first
        x.mul_(5)  # in place: other points
        assert extremes(subject, x, steps=3) is not first
        assert extremes(subject, x, steps=2) is not extremes(subject, x, steps=3)
