"""Layers of a user's own state what is proved about them and are treated like bilip's."""

import doctest
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bilip import blocks
from bilip.bounds import Box
from bilip.errors import InputError, UnknownLipschitz
from bilip.nets import Declared, HeldLinear, enclose, log_cap, log_lipschitz, point_image
from catalogue import louder

F64 = torch.float64


def test_the_examples_in_contributing_run():
    path = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
    found = doctest.testfile(str(path), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert found.attempted >= 8
    assert found.failed == 0


class Wave(nn.Module):
    def forward(self, x):
        return torch.sin(2 * x)

    def log_lipschitz(self, shape=None, outputs=None):
        return math.log(2) + 1e-15

    def enclose(self, box, context=None):
        return Box(-1, 1, shape=box.shape)

    def point(self, value, error):
        return torch.sin(2 * value), 2 * error + 1e-15 * (1 + value.flatten(1).norm(dim=1))


class OnlyConstant(nn.Module):
    def forward(self, x):
        return torch.sin(2 * x)

    def log_lipschitz(self, shape=None, outputs=None):
        return math.log(2) + 1e-15


class Moved(nn.Module):
    """A conditional net of the user's own: x + context."""

    def forward(self, x, context):
        return x + context

    def log_lipschitz(self, shape=None, outputs=None):
        return 0.0

    def enclose(self, box, context=None):
        if context is None:
            return Box.everything(box.shape)
        return Box.outward(box.low + context.low, box.high + context.high)

    def point(self, value, error, context=None):
        return value + context, error + 1e-15 * (value + context).flatten(1).norm(dim=1)


class Doubled(nn.Linear):
    """The weight that acts is not the one that is stored."""

    def held_weight(self):
        return 2 * self.weight

    def held_bias(self):
        return 3 * self.bias

    def forward(self, x):
        return F.linear(x, self.held_weight(), self.held_bias())


class Centred(nn.Conv2d):
    """A kernel of mean zero."""

    def held_weight(self):
        return self.weight - self.weight.mean((2, 3), keepdim=True)

    def forward(self, x):
        return self._conv_forward(x, self.held_weight(), self.bias)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 6), Wave(), nn.Linear(6, 2)), (2,)),
        (lambda: nn.Sequential(nn.Linear(2, 6), OnlyConstant(), nn.Linear(6, 2)), (2,)),
        (lambda: Wave(), (2,)),
        (lambda: nn.Sequential(Doubled(2, 6), nn.Tanh(), Doubled(6, 2)), (2,)),
        (lambda: nn.Sequential(Centred(1, 3, 3, padding=1), nn.Tanh(), Centred(3, 1, 3, padding=1)), (1, 5, 5)),
    ],
    ids=["stated", "only a constant", "alone", "weight that acts", "kernel that acts"],
)
def test_what_a_layer_states_is_used_and_true(make, shape):
    net = make().double().requires_grad_(False)
    box = Box(-0.3, 0.4, shape=shape)
    x = box.sample(200)
    assert enclose(net, box).contains(net(x)).all()
    assert enclose(net, box).is_bounded
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: net(v[None])[0].flatten()))(x[:50]).flatten(2)
    gain = float(torch.linalg.matrix_norm(jacobians, ord=2).max())
    assert 0.02 * math.exp(log_lipschitz(net)) < gain <= math.exp(log_lipschitz(net, shape))
    value, error = point_image(net, x)
    assert torch.allclose(value, net(x), rtol=0, atol=1e-12)
    assert float(error.max()) < 1e-11
    assert log_cap(net) is None


def test_a_net_of_ones_own_may_take_a_context():
    block = blocks.AdditiveCoupling(Moved())
    box, context = Box(-1, 1, shape=(4,)), Box(2, 3, shape=(2,))
    image = block.enclose(box, context)
    assert image.contains(block(box.sample(50), context.sample(50))).all()
    assert float(image.low[3]) > -1
    x, given = torch.randn(3, 2), torch.randn(3, 2)
    assert torch.equal(point_image(Moved(), x, given)[0], x.double() + given.double())


def test_a_residual_block_of_ones_own_layers_inverts_with_a_true_error():
    net = nn.Sequential(HeldLinear(2, 8, coefficient=0.6), Wave(), HeldLinear(8, 2, coefficient=0.6)).double()
    block = blocks.Residual(net).eval()
    z = 3 * torch.randn(64, 2, dtype=F64)
    found = block.solve(z, tolerance=1e-8)
    assert bool(found.converged.all())
    exact = block.solve(z)
    apart = (found.x - exact.x).norm(dim=1)
    assert bool((apart <= found.error_bound + exact.error_bound).all())


class Redone(louder(Wave, "forward")):
    def log_lipschitz(self, shape=None, outputs=None):
        return math.log(200) + 1e-14

    enclose = None  # type: ignore[assignment]
    point = None  # type: ignore[assignment]


class Helped(nn.Module):
    def scale(self, x):
        return x

    def forward(self, x):
        return self.scale(x)

    def log_lipschitz(self, shape=None, outputs=None):
        return 0.0


class Nan(Helped):
    def log_lipschitz(self, shape=None, outputs=None):
        return math.nan


class NoBox(Helped):
    def enclose(self, box, context=None):
        return box.low, box.high


class SinglePoint(Helped):
    def point(self, value, error):
        return value.float(), error


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (louder(Wave, "forward")(), r"Louder.forward, but inherits what was proved without it"),
        (louder(Helped, "scale")(), r"Louder.scale, but inherits"),
        (louder(Doubled, "forward")(2, 2), r"Louder.forward, but inherits the weight"),
        (Nan(), "NaN"),
    ],
)
def test_statements_do_not_outlive_an_override(layer, reason):
    with pytest.raises(UnknownLipschitz, match=reason):
        log_lipschitz(layer)


def test_a_subclass_may_state_everything_anew():
    assert math.exp(log_lipschitz(Redone())) == pytest.approx(200)
    x = torch.randn(5, 2, dtype=F64)
    assert torch.equal(point_image(Redone(), x)[0], 100 * torch.sin(2 * x))


class Tenfold(Declared):
    """A declared net that is changed, with a constant for the changed map."""

    def forward(self, x, context=None):
        return 10 * self.net(x)

    def log_lipschitz(self, shape=None, outputs=None):
        return math.log(10 * self.lipschitz) + 1e-15


def test_a_declared_net_that_is_changed_states_its_own_constant():
    net, x = Tenfold(nn.Tanh(), lipschitz=1.0), torch.linspace(-1, 1, 6, dtype=F64).view(3, 2)
    assert log_lipschitz(net) >= math.log(10)
    value, error = point_image(net, x)
    assert bool(((value - 10 * x.tanh()).norm(dim=1) <= error + 1e-14).all())


def test_statements_of_the_wrong_kind_are_refused():
    with pytest.raises(UnknownLipschitz, match="tuple, not a bilip.Box"):
        enclose(NoBox(), Box(-1, 1, shape=(2,)))
    with pytest.raises(UnknownLipschitz, match="not float64"):
        point_image(SinglePoint(), torch.ones(1, 2))


def _inverse_errors(block, z):
    """The true errors of `solve`, against forty plain iterations more than float64 needs."""
    found = block.solve(z)
    x = found.x.double()
    for _ in range(100):
        x = z.double() - 0.5 * torch.sin(x * 3.1) / 3.1
    return found, (found.x.double() - x).norm(dim=1)


class Keeps(nn.Module):
    """A net that keeps a tensor of its last call, as `torch.nn.utils.weight_norm` keeps a weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        nn.init.eye_(self.linear.weight)

    def forward(self, x):
        self.kept = self.linear(x)
        return 0.5 * self.kept.tanh()


@pytest.mark.parametrize("kind", [blocks.Residual, blocks.NeuralODE, blocks.AdditiveCoupling])
def test_a_declared_net_may_keep_what_it_computed(kind):
    """A tensor with a graph cannot be copied; nor can a scripted module be told that it needs no gradients."""
    x = torch.randn(3, 4 if kind is blocks.AdditiveCoupling else 2)
    for net in (Keeps(), torch.jit.script(Keeps().linear)):
        block = kind(Declared(net, lipschitz=1.0 if kind is not blocks.Residual else 0.5))
        block(x).sum().backward()
        assert block.bounds(Box(-1, 1, shape=x.shape[1:])).image.is_bounded
    if kind is blocks.Residual:
        block = kind(Declared(Keeps(), lipschitz=0.5))
        with torch.no_grad():
            z = block(x)
        block(x)
        assert bool(block.solve(z).converged.all())


def test_a_declared_net_states_its_own_error():
    class Sine(nn.Module):
        def forward(self, x):
            return 0.5 * torch.sin(x * 3.1) / 3.1

    z = torch.linspace(-50, 50, 101)[:, None]
    for error in (1e-12, lambda x: 1e-14 * (1 + x.norm(dim=1))):
        found, errors = _inverse_errors(blocks.Residual(Declared(Sine(), lipschitz=0.5, error=error)).eval(), z)
        assert bool((errors <= found.error_bound).all())
        stated = point_image(Declared(Sine(), lipschitz=0.5, error=error), z)[1]
        assert float(stated.max()) <= 1e-12
    assert float(point_image(Declared(Sine(), lipschitz=0.5), z)[1].min()) > 1e-7  # float32 by default
    assert float(point_image(Declared(Sine(), lipschitz=0.5), z.double())[1].max()) < 1e-12
    with pytest.raises(InputError, match="error=-1"):
        Declared(Sine(), lipschitz=0.5, error=-1)
    assert "error=1e-12" in repr(Declared(Sine(), lipschitz=0.5, error=1e-12))


class Added(nn.Module):
    """A net that may do without its context."""

    def forward(self, x, context=None):
        return 0.5 * torch.tanh(x if context is None else x + context) + (0.0 if context is None else context)


@pytest.mark.parametrize(
    "make",
    [
        lambda: blocks.AdditiveCoupling(Declared(Added(), lipschitz=0.5)),
        lambda: blocks.AffineCoupling(*(Declared(Added(), lipschitz=0.5) for _ in range(2)), scale="exp"),
        lambda: blocks.Chain(blocks.Residual(Declared(Added(), lipschitz=0.5)), shape=(2,)),
        lambda: blocks.AffineCoupling(*(Declared(Added(), lipschitz=0.5) for _ in range(2)), scale="half_sigmoid"),
    ],
    ids=["additive", "exp", "residual", "half sigmoid"],
)
def test_a_context_that_a_proof_is_not_given_may_be_any(make):
    block = make()
    box = Box(-1, 1, shape=(2,) if isinstance(block, blocks.Chain) else (4,))
    bound, x = block.bounds(box), box.sample(50).float()
    for size in (0.0, -5.0, 5.0):
        context = torch.full((50, 2), size)
        z = block(x, context)
        assert bound.image.contains(z).all()
        assert float(((z[1:] - z[:1]).norm(dim=1) / (x[1:] - x[:1]).norm(dim=1)).max()) <= bound.forward
        assert block.enclose_inverse(box).contains(block.inverse(x, context)).all()
    known = block.bounds(box, context=Box.point(torch.full((2,), 5.0)))
    assert known.image.is_bounded
    assert known.image.contains(block(x, torch.full((50, 2), 5.0))).all()


def test_a_net_in_a_container_is_given_no_context():
    image = enclose(nn.Sequential(Declared(Added(), lipschitz=0.5)), Box(-1, 1, shape=(2,)))
    assert image.is_bounded
    assert not enclose(Declared(Added(), lipschitz=0.5), Box(-1, 1, shape=(2,))).is_bounded
