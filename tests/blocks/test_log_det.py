"""Log-determinants of residual blocks: series, roulette, and their gradients."""

import functools
import math
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bilip import blocks
from bilip.blocks import Chain, Exact, Geometric, Poisson, Residual, Roulette, Series
from bilip.blocks.layer_stack import LipSwish
from bilip.blocks.log_det import one_draw, probes, series_error, weighted_series
from bilip.blocks.residual import _Branch
from bilip.errors import InputError
from bilip.nets import MLP, ConvNet, Declared, HeldLinear
from bilip.nets.activations import ScaledSwish
from bilip.nets.activations import make as make_activation
from bilip.reversible import Reversible
from catalogue import saved_bytes


def block(seed=0, size=3, c=0.6):
    torch.manual_seed(seed)
    net = MLP(size, size, hidden=(16,), activation="tanh", lipschitz=c).double()
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim == 2:
                p.mul_(5)
    return Residual(net)


def grads(value, model):
    return torch.autograd.grad(value, list(model.parameters()), allow_unused=True)


def test_series_error_is_a_bound():
    model, x = block(c=0.8), torch.randn(20, 3, dtype=torch.float64)
    exact = Exact()(model.branch, x)
    for terms in (1, 2, 5, 10, 30):
        error = (Series(terms, samples=None)(model.branch, x) - exact).detach().abs().max()
        assert float(error) <= series_error(3, 0.8, terms)
    assert series_error(3, 0.8, 100) < 1e-9
    assert series_error(3, 1.0, 100) == math.inf


@pytest.mark.parametrize("law", [Geometric(0.5), Geometric(0.4), Poisson(2.0), Poisson(0.7)])
@pytest.mark.parametrize("exact_terms", [0, 2])
def test_roulette_is_unbiased_exactly(law, exact_terms):
    """With exact traces the sum over N of P(N) times the estimate is the series, in value and gradient: no "
    "statistics."""
    model, x = block(c=0.5), torch.randn(2, 3, dtype=torch.float64)
    estimator = Roulette(law, exact_terms=exact_terms, samples=None)
    basis = probes(x, None)
    last = 60  # P(N > 60) < 1e-13 for each of these laws, and c^60 is smaller still
    total, slopes = 0.0, None
    for further in range(last + 1):
        p = law.probability(further)
        estimate = estimator.estimate(model.branch, x, further, basis).sum()
        total = total + p * float(estimate)
        step = [p * g for g in grads(estimate, model) if g is not None]
        slopes = step if slopes is None else [a + b for a, b in zip(slopes, step, strict=True)]
    exact = Exact()(model.branch, x).sum()
    truth = [g for g in grads(exact, model) if g is not None]
    assert total == pytest.approx(float(exact), abs=1e-10)
    for a, b in zip(slopes, truth, strict=True):
        assert torch.allclose(a, b, atol=1e-10, rtol=0)


def test_roulette_in_the_mean():
    """A statistical check for a law with finite variance, c^2 < 1 - p, at a fixed seed."""
    model, x = block(c=0.5), torch.randn(1, 3, dtype=torch.float64)
    estimator = Roulette(Geometric(0.5), exact_terms=1)
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.cat([estimator(model.branch, x) for _ in range(1000)])
        exact = float(Exact()(model.branch, x))
    error = abs(float(draws.mean()) - exact)
    assert error < 4 * float(draws.std()) / math.sqrt(len(draws))
    assert float(draws.std()) < 1


def shared_chain(estimator):
    made = [block(seed) for seed in range(4)]
    for part in made:
        part.estimator = estimator
    return Chain(made[0], Chain(*made[1:3]), made[3])


def test_a_shared_number_of_terms_is_one_for_all_blocks_of_a_pass(monkeypatch):
    """Chains in chains too; the next pass draws anew, and without `shared` each block draws its own."""
    drawn, original = [], Poisson.draw
    monkeypatch.setattr(Poisson, "draw", lambda law, *args: drawn.append(original(law, *args)) or drawn[-1])
    x = torch.randn(2, 3, dtype=torch.float64)
    for shared, count in ((True, 1), (False, 4)):
        chain = shared_chain(Roulette(Poisson(2.0), exact_terms=1, shared=shared))
        for _ in range(3):
            drawn.clear()
            chain.forward_and_log_det(x)[1].sum().backward()
            assert len(drawn) == count


@pytest.mark.parametrize("around", ["outside", "inside"])
def test_a_shared_number_of_terms_in_a_memory_saving_pass(around):
    """The backward pass evaluates again with the number that the forward pass has drawn, wherever that was."""
    estimator, x = Roulette(Poisson(2.0), exact_terms=1, shared=True), torch.randn(2, 3, dtype=torch.float64)
    stored, other = shared_chain(estimator), shared_chain(estimator)
    saving = Reversible(other) if around == "outside" else Chain(other[0], Reversible(other[1:]))
    for seed in range(4):
        results = []
        for f in (stored, saving):
            torch.manual_seed(seed)
            z, log_det = f.forward_and_log_det(x)
            found = torch.autograd.grad(log_det.sum() + z.sin().sum(), list(f.parameters()), allow_unused=True)
            results.append((log_det, [g for g in found if g is not None]))
        torch.testing.assert_close(*results)


def test_a_shared_number_of_terms_is_unbiased_exactly():
    estimator = Roulette(Poisson(1.0), exact_terms=1, samples=None, shared=True)
    chain, x = shared_chain(estimator), torch.randn(2, 3, dtype=torch.float64)
    total, slopes = 0.0, None
    for further in range(25):  # P(N > 25) < 1e-26
        with one_draw({estimator: further}):
            value = chain.forward_and_log_det(x)[1].sum()
        p = estimator.law.probability(further)
        total += p * value.item()
        step = [p * g for g in grads(value, chain) if g is not None]
        slopes = step if slopes is None else [a + b for a, b in zip(slopes, step, strict=True)]
    other = shared_chain(Exact())
    exact = other.forward_and_log_det(x)[1].sum()
    assert total == pytest.approx(exact.item(), abs=1e-6)  # c^25 of the series is left out
    truth = [g for g in grads(exact, other) if g is not None]
    for a, b in zip(slopes, truth, strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=0)


def test_laws_draw_what_they_say():
    for law in (Geometric(0.3), Poisson(2.0)):
        generator = torch.Generator().manual_seed(0)
        draws = torch.tensor([law.draw(generator) for _ in range(5000)])
        for n in range(4):
            p = law.probability(n)
            assert abs(float((draws == n).double().mean()) - p) < 4 * math.sqrt(p / 5000)
            assert law.at_least(n) == pytest.approx(1 - sum(law.probability(k) for k in range(n)))
        assert math.fsum(law.probability(k) for k in range(300)) == pytest.approx(1)


def test_neumann_gradient_equals_autograd_of_the_series():
    """With exact traces the surrogate's gradient is the gradient of the truncated series, also in x."""
    model = block(c=0.7)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    eye = torch.eye(3, dtype=torch.float64)

    def truncated(terms):
        jacobian = torch.func.vmap(torch.func.jacrev(lambda v: model.branch(v[None])[0]))(x)
        power, total = eye.expand(4, 3, 3), 0
        for k in range(1, terms + 1):
            power = power @ jacobian
            total = total + (-1) ** (k + 1) / k * power.diagonal(dim1=1, dim2=2).sum(1)
        return total

    for terms in (1, 4, 9):
        ours, plain = Series(terms, samples=None)(model.branch, x), truncated(terms)
        assert torch.allclose(ours, plain, atol=1e-12)
        inputs = [x, *(p for p in model.parameters() if p.ndim == 2)]
        for a, b in zip(torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(plain.sum(), inputs), strict=True):
            assert torch.allclose(a, b, atol=1e-10)


def test_memory_does_not_grow_with_the_terms():
    model, x = block(size=8), torch.randn(64, 8, dtype=torch.float64)

    many, few = (saved_bytes(lambda terms=terms: Series(terms)(model.branch, x)) for terms in (40, 2))
    assert many <= 1.2 * few


def plain_series(g, x, weights, v):
    """The same value and gradient by plain autograd, with a graph of its own for each term."""
    x = x if x.requires_grad else x.clone().requires_grad_()
    value = g(x)

    def pull(u, graph=False):
        return torch.autograd.grad(value, x, u, retain_graph=True, create_graph=graph)[0]

    total = surrogate = 0.0
    for probe in v:
        power, neumann = probe, torch.zeros_like(probe)
        for k, weight in enumerate(weights, 1):
            neumann = neumann - (-1) ** k * weight * power
            power = pull(power).detach()
            total = total - (-1) ** k * weight / k * (power * probe).flatten(1).sum(1)
        surrogate = surrogate + (pull(neumann, graph=True) * probe).flatten(1).sum(1)
    return value, (total + surrogate - surrogate.detach()) / len(v)


def conv_block(recompute, context=0):
    torch.manual_seed(0)
    if context:
        net = MLP(5, 5, hidden=(8, 8), activation="tanh", context=context, lipschitz=0.8)
    else:
        net = ConvNet(2, 2, hidden=6, activation="scaled_swish", gain=False, lipschitz=0.8)
    return Residual(net.double(), log_det=Roulette(Poisson(2.0), exact_terms=2, samples=2), recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("context", [0, 3])
def test_gradients_are_those_of_plain_autograd(recompute, context):
    """For losses that weight samples and outputs as they like; twice, and after another pass in between."""
    model = conv_block(recompute, context)
    shape = (5,) if context else (2, 4, 4)
    x = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    given = torch.randn(3, context, dtype=torch.float64, requires_grad=True) if context else None
    inputs = [x, *model.parameters(), *(() if given is None else (given,))]
    u, w = torch.randn(3, *shape, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    torch.manual_seed(5)
    weights = model.estimator.weights(2 + model.estimator.law.draw())
    v = probes(x, 2)
    value, plain = plain_series(lambda t: model.branch(t, given), x, weights, v)
    expected = torch.autograd.grad(((x + value) * u).sum() + (plain * w).sum(), inputs)
    torch.manual_seed(5)
    z, log_det = model.forward_and_log_det(x, given)
    torch.testing.assert_close(log_det, plain, rtol=1e-12, atol=1e-12)
    model.forward_and_log_det(torch.randn_like(x), given)
    loss = (z * u).sum() + (log_det * w).sum()
    for keep in (True, False):
        found = torch.autograd.grad(loss, inputs, retain_graph=keep)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)
    for part, plain_part in ((0, lambda t: t.sum()), (1, lambda t: 0 * t.sum())):  # one without the other
        torch.manual_seed(5)
        found = torch.autograd.grad(model.forward_and_log_det(x, given)[part].sum(), inputs, allow_unused=True)
        value, plain = plain_series(lambda t: model.branch(t, given), x, weights, v)
        expected = torch.autograd.grad(plain_part(x + value) + (plain.sum() if part else 0), inputs)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.zeros_like(b) if a is None else a, b, rtol=1e-9, atol=1e-11)


def preactivated(activation):
    net = ConvNet(2, 2, hidden=6, activation=activation, gain=False, lipschitz=0.8)
    return nn.Sequential(make_activation(activation), net)


BY_HAND = {
    **{activation: functools.partial(preactivated, activation) for activation in ("scaled_swish", "elu", "softplus")},
    "relu in place": lambda: ConvNet(2, 2, hidden=6, lipschitz=0.8, gain=False),
    "linear": lambda: MLP(5, 5, hidden=(8, 8), activation="scaled_swish", lipschitz=0.8),
    "one layer": lambda: nn.Sequential(nn.Sequential(HeldLinear(5, 5, coefficient=0.7))),
    "layers and activations in a row": lambda: nn.Sequential(
        HeldLinear(5, 7, coefficient=0.9, bias=False),
        HeldLinear(7, 5, coefficient=0.9),
        nn.Tanh(),
        ScaledSwish(),
        HeldLinear(5, 5, coefficient=0.9),
        nn.LeakyReLU(0.2),
    ),
    "plain layers": lambda: small(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=2, dilation=2, groups=2), nn.Tanh(), nn.Conv2d(4, 2, 1, bias=False))
    ),
    "repeated layer": lambda: nn.Sequential(*[HeldLinear(5, 5, coefficient=0.9), ScaledSwish()] * 2),
    "smooth": lambda: small(nn.Sequential(nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 5))),
}


def small(net):
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.3)
    return net


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("net", BY_HAND)
def test_by_hand_as_by_autograd(net, samples):
    """Value and gradients for all ways to keep things, and for samples that a loss weights as it likes."""
    torch.manual_seed(0)
    model = Residual(BY_HAND[net](), log_det=Roulette(Poisson(2.0), exact_terms=2, samples=samples)).double()
    shape = (2, 4, 4) if any(p.ndim == 4 for p in model.parameters()) else (5,)
    x = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    u, w = torch.randn(3, *shape, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    inputs = [x, *model.parameters()]
    assert _Branch(model, x, None).stack(x) is not None
    for terms in (0, 1, 2, 5):
        v = probes(x, samples)
        weights = model.estimator.weights(terms)
        value, plain = plain_series(model.branch, x, weights, v)
        loss = ((value * u).sum() if terms != 2 else 0) + (plain * w).sum()
        expected = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        for recompute in (False, True):
            model.recompute = recompute
            found, log_det = weighted_series(_Branch(model, x, None), x, weights, v)
            assert torch.equal(found, value)
            torch.testing.assert_close(log_det, plain, rtol=1e-12, atol=1e-12)
            loss = ((found * u).sum() if terms != 2 else 0) + (log_det * w).sum()
            found_grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
            torch.testing.assert_close(found_grads, expected, rtol=1e-9, atol=1e-11)
            with torch.no_grad():
                again = weighted_series(_Branch(model, x, None), x, weights, v)
            assert torch.equal(again[0], found)
            assert torch.equal(again[1], log_det)


class Convolutions(TorchDispatchMode):
    """Counts convolutions, and gradients of convolutions for inputs and for weights."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        if name == "convolution_backward":
            inputs, weights, _ = args[10]
            self.count += Counter(inputs=int(inputs), weights=int(weights))
        elif name == "convolution":
            self.count["plain" if max(args[1].shape[2:]) <= 3 else "as large as the image"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("terms", [1, 4])
def test_as_many_convolutions_as_it_takes(terms):
    """Three layers, n terms: the value, n - 1 vjps and one jvp; then two gradients for each layer's input and for its weight. The first
    layer's gradients for x are not asked for."""
    model, x = conv_block(False), torch.randn(2, 2, 8, 8, dtype=torch.float64)
    model.estimator = Series(terms)
    with Convolutions() as there:
        z, log_det = model.forward_and_log_det(x)
    with Convolutions() as back:
        (z.sum() + log_det.sum()).backward()
    assert dict(+there.count) == dict(+Counter(plain=6, inputs=3 * (terms - 1)))
    assert dict(+back.count) == {"inputs": 4, "weights": 6}


def test_frozen_parts_take_no_gradients():
    model, x = conv_block(False), torch.randn(2, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    model.g.layers[1:3].requires_grad_(False)
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]

    def gradients():
        torch.manual_seed(1)
        z, log_det = model.forward_and_log_det(x)
        return torch.autograd.grad(z.square().sum() + log_det.sum(), wanted)

    with Convolutions() as count:
        found = gradients()
    assert count.count["weights"] == 2 * 3  # two layers; the value and two probes
    model.requires_grad_(True)
    torch.testing.assert_close(found, gradients())


def watched(net):
    net.layers[1].register_forward_hook(lambda *_: calls.append("hook"))


def replaced(net):
    original = net.layers[2].forward
    net.layers[2].forward = lambda x: calls.append("replaced") or original(x)


def of_another_class(net):
    class Counting(type(net.layers[0])):
        def forward(self, input):
            calls.append("subclass")
            return super().forward(input)

    net.layers[0].__class__ = Counting


calls = []


@pytest.mark.parametrize("change", [watched, replaced, of_another_class])
def test_nets_that_somebody_watches_or_changes_are_called(change):
    model, x = conv_block(False), torch.randn(2, 2, 4, 4, dtype=torch.float64)

    def gradients():
        torch.manual_seed(1)
        log_det = model.log_det(x).sum()
        return torch.autograd.grad(log_det, list(model.parameters()), materialize_grads=True, allow_unused=True)

    expected = gradients()
    change(model.g)
    calls.clear()
    found = gradients()
    assert calls
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [1e-3, 0.97, 30.0])
def test_slopes_of_scaled_swish_by_hand(dtype, beta):
    """As by autograd in float64, from the smallest number to where beta times the input overflows."""
    largest = torch.finfo(dtype).max
    sizes = torch.tensor(
        [torch.finfo(dtype).tiny, 1e-6, 0.1, 1.0, 2.4, 7.0, 40.0, 900.0, 1e6, largest / 4], dtype=dtype
    )
    h = torch.cat((-sizes, sizes.new_zeros(1), sizes))
    grad, bend = torch.randn(2, len(h), dtype=dtype, generator=torch.Generator().manual_seed(0))
    inner, b = h.double().clamp(-1e30, 1e30).requires_grad_(), torch.tensor(beta, dtype=dtype).double().requires_grad_()
    value = inner * torch.sigmoid(inner * b) / 1.1
    (slope,) = torch.autograd.grad(value.sum(), inner, create_graph=True)
    expected = torch.autograd.grad((value * grad.double() + slope * bend.double())[abs(h) < 1e5].sum(), (inner, b))
    act, tensors = LipSwish(), (torch.tensor(beta, dtype=dtype),)
    eps = 64 * torch.finfo(dtype).eps
    close = functools.partial(torch.testing.assert_close, rtol=eps, atol=eps, check_dtype=False)
    look = act.look(h, *tensors)
    close(look[1], slope.detach())
    assert torch.equal(look[0], act.value(h, *tensors))
    whole, _ = act.backward(h, look, grad, bend, tensors, [True])
    assert whole.isfinite().all()
    small = abs(h) < 1e5
    look = act.look(h[small], *tensors)
    found, (for_beta,) = act.backward(h[small], look, grad[small], bend[small], tensors, [True])
    close(found, expected[0][small])
    close(for_beta, expected[1], rtol=1e-4 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_by_finite_differences(recompute):
    """With exact traces and a fixed number of terms value and gradient belong together."""
    model = conv_block(recompute)
    model.estimator = Series(6, samples=None)
    x = torch.randn(1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(model.forward_and_log_det, (x,), atol=1e-7)
    weight = model.g.layers[2].weight
    along = torch.randn_like(weight)
    (grad,) = torch.autograd.grad(model.log_det(x).sum(), weight)

    def moved(step):
        with torch.no_grad():
            weight.add_(along, alpha=step)
            value = float(model.log_det(x).sum())
            weight.sub_(along, alpha=step)
        return value

    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    assert float((grad * along).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("recompute", [False, True])
def test_second_derivatives_of_the_value_and_none_of_the_estimate(recompute):
    model = conv_block(recompute, context=3)
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    given = torch.randn(2, 3, dtype=torch.float64)
    z = model.forward_and_log_det(x, given)[0]
    (slope,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    found = torch.autograd.grad(slope.square().sum(), [x, *model.parameters()], allow_unused=True)
    (slope,) = torch.autograd.grad(model(x, given).square().sum(), x, create_graph=True)
    expected = torch.autograd.grad(slope.square().sum(), [x, *model.parameters()], allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-9)
    (slope,) = torch.autograd.grad(model.forward_and_log_det(x, given)[1].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        slope.sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_lent_parameters_and_tensors_from_outside(recompute):
    """`functional_call` has ended when the backward pass comes; a net may use tensors that are not its own."""
    model = conv_block(recompute, context=3)
    x, given = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    start = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    lent = {name: 1.5 * p for name, p in start.items()}  # not leaves

    class LogDet(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, given):
            torch.manual_seed(3)
            z, log_det = self.model.forward_and_log_det(x, given)
            return log_det.sum() + z.square().sum()

    called = torch.func.functional_call(LogDet(), {f"model.{name}": p for name, p in lent.items()}, (x, given))
    found = torch.autograd.grad(called, [*lent.values(), *start.values()])
    model.load_state_dict({name: p.detach() for name, p in lent.items()})
    expected = torch.autograd.grad(LogDet()(x, given), list(model.parameters()))
    torch.testing.assert_close(found[: len(lent)], expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[len(lent) :], tuple(1.5 * g for g in expected), rtol=1e-9, atol=1e-12)

    leaf = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    gate = leaf.tanh()

    class Gated(torch.nn.Module):
        def forward(self, x):
            return 0.5 * gate * torch.tanh(x + gate)

    outside = Residual(Declared(Gated(), lipschitz=0.5), log_det=Series(4, samples=None), recompute=recompute)
    z, log_det = outside.forward_and_log_det(x)
    value, plain = plain_series(outside.branch, x, [1.0] * 4, probes(x, None))
    (expected,) = torch.autograd.grad(plain.sum() + (x + value).square().sum() + gate, leaf, retain_graph=True)
    (found,) = torch.autograd.grad(log_det.sum() + z.square().sum() + gate, leaf)
    torch.testing.assert_close(found, expected)


def test_dropout_and_autocast_are_those_of_the_forward_pass():
    class Dropped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.3))

        def forward(self, x):
            return self.scale * torch.nn.functional.dropout(torch.tanh(x), 0.5)

    torch.manual_seed(0)
    x = torch.randn(64, 6, requires_grad=True)
    found = []
    for recompute in (False, True):
        model = Residual(Declared(Dropped(), lipschitz=0.9), log_det=Series(3), recompute=recompute)
        torch.manual_seed(1)
        z, log_det = model.forward_and_log_det(x)
        torch.rand(3)
        found.append(torch.autograd.grad(z.square().sum() + log_det.sum(), [x, *model.parameters()]))
        assert torch.equal(found[-1][0] == found[0][0], torch.ones(64, 6, dtype=torch.bool))
    torch.testing.assert_close(*found)
    found = []
    for recompute in (False, True):
        model = conv_block(recompute, context=3).float()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            z, log_det = model.forward_and_log_det(torch.ones(4, 5), torch.ones(4, 3))
        found.append(torch.autograd.grad(z.float().square().sum() + log_det.float().sum(), list(model.parameters())))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Moving(torch.nn.Module):
    """A buffer that follows the data, as running statistics do."""

    def __init__(self):
        super().__init__()
        self.linear = HeldLinear(6, 6, coefficient=0.8)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.3)
        return torch.tanh(self.linear(x - self.mean))


MOVING = {
    "own buffer": Moving,
    "batch norm": lambda: torch.nn.Sequential(HeldLinear(6, 6, coefficient=0.1), torch.nn.BatchNorm1d(6)),
    "spectral norm": lambda: torch.nn.Sequential(
        torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 40)),
        torch.nn.ELU(),
        HeldLinear(40, 6, coefficient=0.5),
    ),
    "dropout": lambda: torch.nn.Sequential(HeldLinear(6, 6, coefficient=0.4), torch.nn.Dropout(0.4)),
}


@pytest.mark.parametrize("between", ["nothing", "evaluation mode", "another pass"])
@pytest.mark.parametrize("kind", MOVING)
def test_what_is_recomputed_is_the_net_of_the_forward_pass(kind, between):
    """Buffers as they were, the mode that it had, and no buffer moves on twice; with `retain_graph`, the second time too."""
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        net = Declared(MOVING[kind](), lipschitz=0.9)
        model, x = Residual(net, log_det=Series(3), recompute=recompute).double().train(), torch.randn(32, 6).double()
        z, log_det = model.forward_and_log_det(x)
        loss = z.square().sum() - log_det.sum()
        if between == "evaluation mode":
            model.eval()
        elif between == "another pass":
            model(2 * x)
        moved = [buffer.clone() for buffer in model.buffers()]
        found = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(moved, list(model.buffers()))
        results.append((found[0], moved))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "estimator", [Exact(), Series(3), Roulette(exact_terms=2)], ids=["exact", "series", "roulette"]
)
def test_hooks_of_parameters_see_the_whole_gradient_once(estimator):
    torch.manual_seed(0)
    model = Residual(MLP(6, 6, activation="elu", lipschitz=0.8), log_det=estimator).double()
    x = torch.randn(8, 6).double()

    def gradients():
        torch.manual_seed(1)
        z, log_det = model.forward_and_log_det(x)
        (z.square().sum() - log_det.sum() + model.inverse(x).sin().sum()).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    plain = gradients()
    for p in model.parameters():
        p.register_hook(lambda grad: 3 * grad)
    torch.testing.assert_close(gradients(), [3 * grad for grad in plain])


def test_parameters_changed_before_the_backward_pass_are_noticed():
    for recompute in (False, True):
        model = conv_block(recompute)
        log_det = model.log_det(torch.randn(2, 2, 4, 4, dtype=torch.float64))
        with torch.no_grad():
            model.g.layers[0].weight.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            log_det.sum().backward()


def test_what_is_recomputed_is_not_kept():
    """Neither the graph of the series nor, with `recompute`, that of g: a few tensors of the size of x."""
    x = torch.randn(16, 2, 8, 8, dtype=torch.float64)

    class Packed:
        def __init__(self, t):
            self.tensor = t.detach()

    def kept(model):
        packed = []

        def pack(t):
            made = Packed(t)
            packed.append(weakref.ref(made))
            return made

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda made: made.tensor):
            result = model.forward_and_log_det(x)
        assert result[1].requires_grad
        alive = {ref().tensor.untyped_storage().data_ptr(): ref().tensor for ref in packed if ref() is not None}
        return sum(t.numel() * t.element_size() for t in alive.values())

    stored, again = kept(conv_block(False)), kept(conv_block(True))
    activations = 16 * 6 * 64 * 8
    assert stored > 2 * activations
    assert again < activations + 8 * x.numel() * 8
    one = conv_block(False)
    one.estimator = Series(4)
    assert kept(one) < 4 * activations + 8 * x.numel() * 8  # what the activations are given, and its tangents


def test_default_estimators():
    small, large = block(size=3), block(size=70)
    x = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(small.log_det(x), Exact()(small.branch, x))
    large.eval()
    y = torch.randn(2, 70, dtype=torch.float64)
    with torch.no_grad():
        torch.manual_seed(1)
        first = large.log_det(y)
        torch.manual_seed(1)
        torch.testing.assert_close(first, Series(20)(large.branch, y), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Series(0),
        lambda: Geometric(1.0),
        lambda: Poisson(0),
        lambda: Roulette(exact_terms=-1),
        lambda: Series(3, samples=0),
    ],
)
def test_bad_input(make):
    with pytest.raises(InputError, match="expected"):
        make()


@pytest.mark.numeric
@pytest.mark.parametrize(
    "block",
    [
        blocks.Residual(MLP(3, 3, lipschitz=0.8)).eval(),
        blocks.Residual(MLP(3, 3, lipschitz=0.8), log_det=blocks.Series(5)).eval(),
        blocks.NeuralODE(MLP(3, 3, activation="tanh"), method="rk4", options={"step_size": 0.2}),
    ],
    ids=["exact", "series", "ode"],
)
def test_log_dets_in_inference_mode(block):
    with torch.inference_mode():
        z, log_det = block.forward_and_log_det(torch.randn(4, 3))
        assert torch.isfinite(log_det).all()
        assert block.inverse(z).shape == (4, 3)
