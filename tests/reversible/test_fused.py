"""The kernels for GPUs give what torch's operations give: `--device cuda`."""

import itertools

import pytest
import torch

from bilip import Guard, Reversible, models
from bilip.blocks.scale import SigmoidScale
from bilip.reversible import angle
from bilip.reversible.fingerprint import Fingerprint, kernels, sums

SCALES = {"additive": None, "sigmoid": (0.0, 1.0, 2.0), "half": (0.5, 1.0, 2.0), "floored": (1e-6, 1 + 1e-6, 0.0)}


@pytest.fixture
def fused(device):
    if device.type != "cuda":
        pytest.skip("the kernels run on a GPU: --device cuda")
    found = kernels(torch.zeros(1, device=device))
    assert found is not None, "Triton does not work here"
    return found


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
    signs = Fingerprint(torch.tensor(3, device=device)).signs_of(x)

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
    seen, logs = fused.couple(state, h, SCALES[kind], place, signs, inverse=inverse)
    assert close(state, y)
    assert close(seen, sums(x.flatten(1), signs), 1e-12)
    assert SCALES[kind] is None or close(logs, log)
    for with_log, watched, expanded in itertools.product((False, True), repeat=3):
        given = g_log[:1].expand(batch) if expanded else g_log
        loss = (y2 * g[:, moved]).sum() + ((given * log).sum() if with_log else 0)
        true = torch.autograd.grad(loss, inputs, retain_graph=True)
        state = y.clone()
        g_h, g_x, seen = fused.uncouple(
            state, h, g, given if with_log else None, SCALES[kind], place, signs if watched else None, inverse=inverse
        )
        assert close(state, x, 1e-4)  # through a gain of 1e-2
        assert close(g_h, true[1])
        assert close(g_x[:, moved], true[0][:, moved])
        assert (seen is None) == (not watched)
        assert seen is None or close(seen, sums(state.flatten(1), signs), 1e-12)


@pytest.mark.parametrize("value", [-1e4, -200.0, -90.0, 90.0, 200.0, 1e4, torch.nan])
def test_extreme_scales(fused, device, value):
    x, h = torch.ones(1, 2, 1, device=device), torch.full((1, 2, 1), value, device=device)
    h[:, 0] = 0.25
    fused.couple(x, h, (0.0, 1.0, 0.0), 1, None, inverse=False)
    assert torch.allclose(x[0, 1, 0], torch.sigmoid(h[0, 1, 0]) + 0.25, equal_nan=True)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (4, 12, 16, 16), (2, 3, 7)])
def test_shift(fused, device, shape, before):
    x, bias = torch.randn(shape, device=device), torch.randn(shape[1], device=device)
    signs = Fingerprint(torch.tensor(3, device=device)).signs_of(x)
    for sign in (1, -1):
        out, seen = fused.shift(x, bias, sign, signs, before=before)
        true = x + sign * bias.view(-1, *[1] * (len(shape) - 2))
        assert torch.equal(out, true)
        assert close(seen, sums((x if before else true).flatten(1), signs), 1e-12)


@pytest.mark.parametrize("coupling", ["additive", "affine"])
@pytest.mark.parametrize("guard", [None, Guard(spot_check=1)])
@pytest.mark.parametrize("reduce", [torch.mean, torch.sum])  # the gradient of a sum is one number, expanded
@pytest.mark.parametrize("inverse", [False, True])
def test_a_walk_has_the_stored_gradient(device, coupling, guard, inverse, reduce):
    """In float32, which the kernels are for; on a CPU the same walk without them."""
    torch.manual_seed(0)
    model = models.glow((3, 8, 8), levels=2, blocks=3, hidden=8, coupling=coupling).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        model(torch.randn(16, 3, 8, 8, device=device))
    x = torch.randn(16, 3, 8, 8, device=device, requires_grad=True)
    x = model(x).detach().requires_grad_() if inverse else x
    found = []
    for bijection in (model, Reversible(model, guard=guard)):
        z, log_det = (bijection.inverse_and_log_det if inverse else bijection.forward_and_log_det)(x)
        loss = reduce(z.flatten(1).square().sum(1) / 2) - reduce(log_det)
        found.append(torch.autograd.grad(loss, [x, *model.parameters()]))
    assert angle(found[1], found[0]) < 1e-4
