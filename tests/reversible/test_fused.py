"""The kernels for GPUs give what torch's operations give. On a CPU Triton's interpreter plays them."""

import contextlib
import functools
import itertools

import pytest
import torch

from bilip import Guard, Reversible, models
from bilip.blocks.scale import SigmoidScale
from bilip.reversible import angle, coupling, fingerprint
from bilip.reversible.fingerprint import Fingerprint, Print, scales

SCALES = {"additive": None, "sigmoid": (0.0, 1.0, 2.0), "half": (0.5, 1.0, 2.0), "floored": (1e-6, 1 + 1e-6, 0.0)}


@functools.cache
def why_not_interpreted(fused):
    """Triton's interpreter of one version does not go with every numpy."""
    import triton
    import triton.language as tl

    @triton.jit
    def doubled(x, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        for _ in range(0, n, BLOCK):
            tl.store(x + at, 2 * tl.load(x + at, mask=at < n, other=0.0), mask=at < n)

    x = torch.ones(3)
    try:
        doubled[(1,)](x, 3, 4)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if x.tolist() == [2.0, 2.0, 2.0] else "it doubles wrongly"


@pytest.fixture
def fused(device, monkeypatch):
    """The kernels, and everything that asks for them gets them."""
    if device.type == "cuda":
        found = fingerprint.kernels(torch.zeros(1, device=device))
        assert found is not None, "Triton does not work here"
        return found
    pytest.importorskip("triton")
    from bilip.reversible import fused

    monkeypatch.setattr(torch.cuda, "device_of", lambda x: contextlib.nullcontext())
    if reason := why_not_interpreted(fused):
        pytest.skip(f"Triton's interpreter does not work here: {reason}")
    for module in (fingerprint, coupling):
        monkeypatch.setattr(module, "kernels", lambda x: fused)
    return fused


def by_torch(mark, x, scale):
    """The sums of a fingerprint by torch's operations, and how far those of a kernel may be from them by rounding: weighted and summed
    in another order.
    """
    flat = x.flatten(1)
    terms = fingerprint.squeezed(flat, scale)[:, :, None] * mark.weights(flat)
    size = fingerprint.norm(flat.shape[1])
    sums, sizes = fingerprint.by_parts(terms), fingerprint.by_parts(terms.abs())
    return sums / size, 20 * torch.finfo(scale.dtype).eps * sizes / size


def same(mark, x, scale, found):
    expected, rounding = by_torch(mark, x, scale)
    return bool(((found - expected).abs() <= rounding + 1e-30).all())


def close(a, b, tolerance=2e-5):
    return float((a.double() - b.double()).abs().max() / b.double().abs().max()) < tolerance


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", SCALES)
def test_coupling(fused, device, kind, inverse, swap):
    batch, c1, c2, pixels = 5, 3, 4, 301
    x, g = (torch.randn(batch, c1 + c2, pixels, device=device) for _ in range(2))
    g_log = torch.randn(batch, device=device)
    h = torch.randn(batch, c2 if SCALES[kind] is None else 2 * c2, pixels, device=device)
    moved, place = (slice(0, c2), 0) if swap else (slice(c1, None), c1 * pixels)
    mark = Fingerprint(torch.tensor(3, device=device), 7)
    scale = scales(x.flatten(1))
    taken = Print(mark, scale, by_torch(mark, x, scale)[0])

    inputs = [t.double().requires_grad_() for t in (x, h)]
    x2, log = inputs[0][:, moved], torch.zeros(batch, dtype=torch.float64, device=device)
    if SCALES[kind] is None:
        y2 = x2 - inputs[1] if inverse else x2 + inputs[1]
    else:
        gain, log_gain = SigmoidScale(*SCALES[kind]).with_log(inputs[1][:, c2:])
        shift, log = inputs[1][:, :c2], log_gain.flatten(1).sum(1) * (-1 if inverse else 1)
        y2 = (x2 - shift) / gain if inverse else x2 * gain + shift
    y = x.clone()
    y[:, moved] = y2.detach().float()

    state = x.clone()
    seen, logs = fused.couple(state, h, SCALES[kind], place, mark, inverse=inverse)
    assert close(state, y)
    assert close(seen.scale, scale)
    assert same(mark, x, seen.scale, seen.sums)
    assert SCALES[kind] is None or close(logs, log)
    for with_log, watched, expanded in itertools.product((False, True), repeat=3):
        given = g_log[:1].expand(batch) if expanded else g_log
        loss = (y2 * g[:, moved]).sum() + ((given * log).sum() if with_log else 0)
        true = torch.autograd.grad(loss, inputs, retain_graph=True)
        state = y.clone()
        g_h, g_x, seen = fused.uncouple(
            state, h, g, given if with_log else None, SCALES[kind], place, taken if watched else None, inverse=inverse
        )
        assert close(state, x, 1e-4)  # through a gain of 1e-2
        assert close(g_h, true[1])
        assert close(g_x[:, moved], true[0][:, moved])
        assert (seen is None) == (not watched)
        assert seen is None or same(mark, state, scale, seen)


@pytest.mark.parametrize("value", [-1e4, -200.0, -90.0, 90.0, 200.0, 1e4, torch.nan])
def test_extreme_scales(fused, device, value):
    x, h = torch.ones(1, 2, 1, device=device), torch.full((1, 2, 1), value, device=device)
    h[:, 0] = 0.25
    fused.couple(x, h, (0.0, 1.0, 0.0), 1, None, inverse=False)
    assert torch.allclose(x[0, 1, 0], torch.sigmoid(h[0, 1, 0]) + 0.25, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 2), (16, 3072), (7, 4099), (6, 520), (70, 5), (40, 130)])
def test_fingerprints(fused, device, rows, size, dtype):
    x = torch.randn(rows, size, device=device).to(dtype)
    x[0] *= 1e3 if dtype == torch.float16 else 1e20
    x[:, -1] = 0  # a coordinate that is zero throughout
    x[:, 0] += 50  # one that is far from zero
    mark = Fingerprint(torch.tensor(2**40 + 5, device=device), 19)
    scale = fused.scales(x)
    expected = scales(x)
    assert scale.dtype == expected.dtype
    assert bool(((scale - expected).abs() <= 1e-5 * expected).all())
    found = mark.sums(x, scale)
    assert found.shape == (rows, -(-size // 128), 2)
    assert same(mark, x, scale, found)
    x[0, -1] = torch.nan
    found = mark.sums(x, scale)
    assert bool(found[0, -1].isnan().all())
    assert not bool(found[1:].isnan().any() | found[:, :-1].isnan().any())


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("guard", [None, Guard(spot_check=2)])
@pytest.mark.parametrize("kind", ["additive", "affine", "affine, vectors"])
def test_a_walk_has_the_stored_gradient(fused, device, monkeypatch, kind, guard, inverse):
    """The first call looks at the blocks themselves, the others use the kernels; the gradient of a sum is one number, expanded."""
    used = []
    for name in ("couple", "uncouple"):
        whole = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *a, whole=whole, name=name, **o: used.append(name) or whole(*a, **o))
    if kind == "affine, vectors":
        model, shape = models.real_nvp(6, blocks=3, hidden=(8,)).to(device), (3, 6)
    else:
        shape = (2, 3, 8, 8)
        model = models.glow(shape[1:], levels=2, blocks=2, hidden=8, coupling=kind).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        x = torch.randn(shape, device=device)
        x = model(x) if inverse else x
    x.requires_grad_()
    saving = Reversible(model, guard=guard)

    def gradient(bijection, reduce):
        z, log_det = (bijection.inverse_and_log_det if inverse else bijection.forward_and_log_det)(x)
        loss = reduce(z.flatten(1).square().sum(1) / 2) - reduce(log_det)
        return torch.autograd.grad(loss, [x, *model.parameters()])

    for reduce in (torch.mean, torch.mean, torch.sum):
        assert angle(gradient(saving, reduce), gradient(model, reduce)) < 1e-5
    assert set(used) == {"couple", "uncouple"}
    assert guard is None or saving.report().spot_checks == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sensitivities(fused, device, dtype, monkeypatch):
    x, g = (torch.randn(5, 3001, dtype=dtype, device=device) for _ in range(2))
    x[1] *= 1e6  # far beyond the scale of the others
    g[2] *= 1e25  # squares are no float32
    taken = Print(Fingerprint(torch.tensor(3, device=device)), scales(x), x.new_zeros(5, 2))
    found = taken.sensitivity(x, g)
    monkeypatch.setattr(fingerprint, "kernels", lambda x: None)
    assert torch.allclose(found, taken.sensitivity(x, g), rtol=1e-5, atol=0)
