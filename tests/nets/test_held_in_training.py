"""Held layers in training: certified anew only where it matters, below their coefficient whatever happens to the weight."""

import contextlib
import copy
import io

import pytest
import torch
from torch import nn

from bilip import Chain, models
from bilip.blocks import Residual
from bilip.nets import MLP, ConvNet, HeldConv2d, HeldLinear, conv_norm, matrix_norm, spectral
from bilip.nets.spectral import certify_anew, held_layers, held_together
from bilip.reversible import Reversible


@contextlib.contextmanager
def counted(monkeypatch):
    """The number of layers certified inside, as a list that grows."""
    found, original = [], spectral._certified

    def certified(weights, *args):
        found.extend(weights)
        return original(weights, *args)

    monkeypatch.setattr(spectral, "_certified", certified)
    yield found
    monkeypatch.setattr(spectral, "_certified", original)


def true_norm(layer, weight):
    """Float64 SVD, of a convolution written as a matrix on a small image."""
    weight = weight.detach().double()
    if isinstance(layer, HeldLinear):
        return float(torch.linalg.matrix_norm(weight, ord=2))
    side = 7
    eye = torch.eye(weight.shape[1] * side * side, dtype=torch.float64).view(-1, weight.shape[1], side, side)
    image = nn.functional.conv2d(eye, weight, stride=layer.stride, padding=layer.padding)
    return float(torch.linalg.matrix_norm(image.flatten(1), ord=2))


def layers_of(dtype=torch.float32):
    torch.manual_seed(0)
    made = [
        HeldLinear(5, 7, coefficient=0.9),
        HeldLinear(5, 7, coefficient=0.9),
        HeldConv2d(2, 5, 3, coefficient=0.7),
        HeldConv2d(5, 2, 3, coefficient=0.7),
        HeldConv2d(3, 4, 3, coefficient=0.7, stride=2),
        HeldConv2d(4, 4, 1, coefficient=0.9),
    ]
    return [layer.to(dtype) for layer in made]


def step(layer, k):
    """Small steps, large ones, huge ones, zeros, and steps that no version counter shows."""
    noise = torch.randn(layer.weight.shape).to(layer.weight.dtype)
    with torch.no_grad():
        if k % 10 == 9:
            layer.weight.zero_()
        elif k % 10 == 7:
            layer.weight.data = noise * 1e3
        elif k % 10 == 3:
            layer.weight.data.add_(noise, alpha=5.0)
        else:
            layer.weight.add_(noise, alpha=10.0 ** -(k % 5))


@pytest.mark.parametrize(
    ("dtype", "capturing", "steps"),
    [(torch.float32, False, 20), (torch.float32, True, 100), (torch.float64, True, 20), (torch.bfloat16, True, 20)],
)
def test_no_step_lets_a_layer_exceed_its_coefficient(dtype, capturing, steps, monkeypatch):
    """While a graph is recorded nothing is certified anew: the bound for the change alone has to hold."""
    layers = layers_of(dtype)
    with held_together(layers):
        pass
    for k in range(steps):
        for layer in layers:
            step(layer, k)
        monkeypatch.setattr(spectral, "capturing", lambda weight: capturing)
        with held_together(layers):
            for layer in layers:
                held = layer.held_weight()
                assert true_norm(layer, held) <= layer.coefficient
                assert bool(held.isfinite().all())


def test_the_bound_for_a_change_is_one():
    torch.manual_seed(0)
    for layer in layers_of(torch.float64):
        for size in (1e-200, 1e-6, 1.0, 1e6, 1e140):
            certify_anew([layer], slack=0.0)
            before = layer.weight.detach().clone()
            layer.weight.data += size * torch.randn_like(layer.weight)
            (bound,), (change,) = spectral._bounds([layer])
            assert float(change) >= true_norm(layer, (layer.weight - before) / size) * size * (1 - 1e-12)
            assert float(bound + change) >= true_norm(layer, layer.weight / size) * size * (1 - 1e-12)
        certify_anew([layer], slack=0.0)
        assert float(spectral._bounds([layer])[1]) == 0


def test_a_change_is_bounded_far_better_than_by_its_frobenius_norm():
    layer = HeldLinear(256, 256, coefficient=0.9)
    certify_anew([layer])
    with torch.no_grad():
        layer.weight += 1e-4 * torch.randn(256, 256)
    change = float(spectral._bounds([layer])[1])
    assert change < 0.25 * 1e-4 * 256


def residual_chain(kind):
    torch.manual_seed(0)
    if kind == "images":
        return models.residual_flow((2, 4, 4), blocks=(1, 1), hidden=6, coefficient=0.9)
    return Chain(*(Residual(MLP(3, 3, hidden=(8, 8), activation="elu", lipschitz=0.9)) for _ in range(3)))


@pytest.mark.parametrize("kind", ["images", "vectors"])
def test_few_certifications_in_small_steps_and_as_many_as_needed_in_large_ones(kind, monkeypatch):
    chain = residual_chain(kind)
    x = torch.randn(4, 2, 4, 4) if kind == "images" else torch.randn(4, 3)
    chain(x)
    held = held_layers(chain)
    with torch.no_grad():
        for layer in held:
            layer.weight *= 20  # all of them are shrunk
    for lr, most, least in ((1e-4, 0.1, 0.0), (1.0, 1.0, 0.5)):
        optimizer = torch.optim.Adam(chain.parameters(), lr=lr)
        with counted(monkeypatch) as count:
            for _ in range(10):
                optimizer.zero_grad()
                chain(x).square().mean().backward()
                optimizer.step()
        assert least * 10 * len(held) <= len(count) <= most * 10 * len(held) + len(held)
        for layer in held:
            assert true_norm(layer, layer.held_weight()) <= layer.coefficient


def test_a_second_pass_certifies_nothing(monkeypatch):
    chain, x = residual_chain("vectors"), torch.randn(4, 3)
    with counted(monkeypatch) as count:
        first = chain(x)
        assert len(count) == len(held_layers(chain))
        assert torch.equal(chain(x), first)
        chain.bounds()
        assert len(count) == len(held_layers(chain))


def test_proofs_and_evaluation_are_about_the_present_weight():
    """What they say is not left to a bound from steps ago: the weight uses up its coefficient."""
    layer = HeldLinear(6, 6, coefficient=0.9)
    layer.weight.data = torch.diag(torch.tensor([50.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    with held_together([layer]):
        layer.held_weight()
    with torch.no_grad():
        layer.weight[1, 1] += 0.3  # within the slack, and the norm stays
    with held_together([layer]):
        within = layer.held_weight()
    assert matrix_norm(within) < 0.9 * 0.9999
    for held in (layer.held_weight(), layer.eval().held_weight()):
        assert 0.9 * 0.9999 < matrix_norm(held) <= 0.9
    with torch.no_grad():
        assert matrix_norm(layer.held_weight()) > 0.9 * 0.9999


def test_gradients_are_those_of_the_plain_path():
    for layer in layers_of(torch.float64):
        with torch.no_grad():
            layer.weight *= 10
        weight = layer.weight.detach().clone().requires_grad_()
        probe = torch.randn_like(weight)
        with held_together([layer]):
            (fast,) = torch.autograd.grad((layer.held_weight() * probe).sum(), layer.weight)
        (plain,) = torch.autograd.grad((layer._hold(weight) * probe).sum(), weight)
        torch.testing.assert_close(fast, plain, rtol=1e-9, atol=1e-12)

        def numeric(w, layer=layer, probe=probe):
            return (layer._hold(w) * probe).sum()

        along = torch.randn_like(weight)
        with torch.no_grad():
            slope = (numeric(weight + 1e-6 * along) - numeric(weight - 1e-6 * along)) / 2e-6
        torch.testing.assert_close((fast * along).sum(), slope, rtol=1e-5, atol=1e-7)


def in_pass(layer):
    with held_together([layer]):
        return layer.held_weight()


def test_copies_loaded_states_and_other_dtypes():
    layer = HeldConv2d(3, 4, 3, coefficient=0.5)
    in_pass(layer)
    assert set(layer.state_dict()) == {"weight", "bias"}
    loud = {name: 100 * value for name, value in layer.state_dict().items()}
    twin = copy.deepcopy(layer)
    assert twin._certificate is None
    twin.load_state_dict(loud)
    assert conv_norm(in_pass(twin)) <= 0.5
    layer.load_state_dict(loud)
    assert conv_norm(in_pass(layer)) <= 0.5
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        assert conv_norm(in_pass(layer.to(dtype))) <= 0.5
        assert in_pass(layer).dtype == dtype
    lent = {"weight": torch.randn(4, 3, 3, 3, requires_grad=True), "bias": torch.zeros(4)}
    x = torch.randn(2, 3, 5, 5)
    with held_together([layer]):
        found = torch.func.functional_call(layer, lent, (x,))
        (grad,) = torch.autograd.grad(found.sum(), lent["weight"])
    other = HeldConv2d(3, 4, 3, coefficient=0.5)
    other.load_state_dict(lent)
    torch.testing.assert_close(found, other(x))
    assert bool(grad.isfinite().all())
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert again._certificate is None
    assert torch.equal(again.held_weight(), layer.held_weight())
    layer.coefficient = 0.25
    assert conv_norm(in_pass(layer)) <= 0.25


def test_two_sets_of_weights_in_one_loss():
    """What the first pass left for its backward pass is not overwritten by the second."""
    net = nn.Sequential(HeldLinear(3, 3, coefficient=0.9), nn.Tanh(), HeldLinear(3, 3, coefficient=0.9))
    x, total = torch.randn(5, 3), 0.0
    sets = [{name: torch.randn_like(p).requires_grad_() for name, p in net.named_parameters()} for _ in range(3)]
    for lent in sets:
        total = total + torch.func.functional_call(net, lent, (x,)).square().sum()
    together = torch.autograd.grad(total, [p for lent in sets for p in lent.values()])
    alone = []
    for lent in sets:
        alone += torch.autograd.grad(torch.func.functional_call(net, lent, (x,)).square().sum(), list(lent.values()))
    torch.testing.assert_close(together, tuple(alone))


def test_weights_that_are_no_numbers_stay_none():
    layer = HeldLinear(3, 3, coefficient=0.9)
    in_pass(layer)
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    assert bool(in_pass(layer).isnan().any())
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3))
    assert matrix_norm(in_pass(layer)) <= 0.9


def test_certificates_in_fixed_memory():
    layers = layers_of()
    certify_anew(layers)
    memory = [layer._certificate.bound.data_ptr() for layer in layers]
    with torch.no_grad():
        for layer in layers:
            layer.weight *= 30
    assert certify_anew(layers, in_place=True) == len(layers)
    assert memory == [layer._certificate.bound.data_ptr() for layer in layers]
    assert certify_anew(layers, slack=0.0, in_place=True) == 0


def test_branches_of_convolutions_are_certified_in_few_calls(monkeypatch):
    """One for each shape, not one for each layer."""
    torch.manual_seed(0)
    chain = Chain(*(Residual(ConvNet(2, 2, hidden=4, gain=False, lipschitz=0.9, activation="elu")) for _ in range(6)))
    calls, original = [], spectral._certified
    monkeypatch.setattr(spectral, "_certified", lambda *args: (calls.append(1), original(*args))[1])
    chain(torch.randn(2, 2, 4, 4))
    assert len(calls) == 3


@pytest.mark.parametrize("training", [True, False])
def test_a_stride_changed_later_is_certified_anew(training):
    """Without the stride a convolution has more outputs, and a larger norm."""
    layer = HeldConv2d(2, 2, 3, coefficient=0.5, stride=2).train(training)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer(torch.randn(1, 2, 8, 8))
        layer.stride = (1, 1)
        assert true_norm(layer, layer.held_weight()) <= 0.5
        layer.stride = (2, 2)
        assert 0.3 < true_norm(layer, layer.held_weight()) <= 0.5


def test_memory_saving_passes_hold_layers_as_chains_do():
    """The same certificates, so the same numbers in every step of training."""
    torch.manual_seed(0)
    stored = models.residual_flow(4, blocks=3, hidden=(16,)).double().train()
    saving = copy.deepcopy(stored)
    wrapped, x = Reversible(saving), torch.randn(8, 4, dtype=torch.float64)
    for seed in range(4):
        results = []
        for f in (stored, wrapped):
            torch.manual_seed(seed)
            z, log_det = f.forward_and_log_det(x)
            results.append((z, log_det, torch.autograd.grad(z.sin().sum() - log_det.sum(), list(f.parameters()))))
        torch.testing.assert_close(*results)
        with torch.no_grad():
            for p, q in zip(stored.parameters(), saving.parameters(), strict=True):
                p.add_(1e-3 * p.norm() * torch.randn_like(p) / p.numel() ** 0.5)
                q.copy_(p)
