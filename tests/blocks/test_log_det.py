"""Log-determinants of residual blocks: series, roulette, and their gradients."""

import math

import pytest
import torch

from bilip.blocks import Exact, Geometric, Poisson, Residual, Roulette, Series
from bilip.blocks.log_det import probes, series_error
from bilip.errors import InputError
from bilip.nets import MLP

pytestmark = pytest.mark.numeric


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

    def kept(terms):
        sizes = {}

        def pack(t):
            sizes[(t.data_ptr(), t.shape)] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            result = Series(terms)(model.branch, x)
        assert result.requires_grad
        return sum(sizes.values())

    assert kept(40) <= 1.2 * kept(2)


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
        assert torch.equal(first, Series(20)(large.branch, y))


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
