"""Blocks of known structure: the same products as autograd's, from far fewer operator calls."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bilip import blocks, models
from bilip.auditing.probes import Subject, extremes
from bilip.blocks.factor_out import OnKept
from bilip.linalg.linearized import LinearPart
from bilip.linalg.structured import Room
from bilip.nets import MLP, ConvNet

pytestmark = pytest.mark.numeric


class Bent(nn.Module):
    """A net of no known layers."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs)

    def forward(self, x):
        return torch.sin(x @ self.weight.T) + x.square().mean(1, keepdim=True)


def image_coupling(**options):
    return blocks.AffineCoupling(ConvNet(2, 4, hidden=6, gain=False), scale="half_sigmoid", **options)


CASES = {
    "actnorm": (lambda: blocks.ActNorm(4, start="identity"), (4, 6, 6)),
    "actnorm of the last dimension": (lambda: blocks.ActNorm(9, dim=-1, start="identity"), (4, 3, 9)),
    "scaling": (lambda: blocks.DiagonalScaling(torch.rand(80) - 1.5), (80,)),
    "scaling of every entry": (lambda: blocks.DiagonalScaling(torch.rand(4, 6, 6) + 0.5), (4, 6, 6)),
    "conv1x1": (lambda: blocks.InvertibleConv1x1(4), (4, 6, 6)),
    "conv1x1 of vectors": (lambda: blocks.InvertibleConv1x1(80), (80,)),
    "plu": (lambda: blocks.InvertibleConv1x1(4, kind="plu"), (4, 6, 6)),
    "orthogonal": (lambda: blocks.InvertibleConv1x1(4, kind="orthogonal"), (4, 6, 6)),
    "squeeze": (lambda: blocks.Squeeze(), (4, 6, 6)),
    "flatten": (lambda: blocks.Flatten((4, 6, 6)), (4, 6, 6)),
    "shuffle": (lambda: blocks.Permutation.shuffle(80), (80,)),
    "additive": (lambda: blocks.AdditiveCoupling(MLP(40, 40)), (80,)),
    "additive, any net": (lambda: blocks.AdditiveCoupling(Bent(40, 40)), (80,)),
    "affine": (image_coupling, (4, 6, 6)),
    "affine, swapped": (lambda: image_coupling(partition=blocks.Split(swap=True)), (4, 6, 6)),
    "affine, Glow's last layer": (lambda: blocks.AffineCoupling(ConvNet(2, 4, hidden=6)), (4, 6, 6)),
    "affine, held": (lambda: blocks.AffineCoupling(ConvNet(2, 4, hidden=6, lipschitz=0.9)), (4, 6, 6)),
    "affine, two nets": (lambda: blocks.AffineCoupling(MLP(40, 40), MLP(40, 40)), (80,)),
    "affine, any net": (lambda: blocks.AffineCoupling(Bent(40, 80)), (80,)),
    "checkerboard": (
        lambda: blocks.AffineCoupling(ConvNet(2, 4, hidden=6, gain=False), partition=blocks.Checkerboard()),
        (2, 6, 6),
    ),
    "on what is kept": (lambda: OnKept(image_coupling(), shape=(4, 6, 6)), (150,)),
    "mixing of what is kept": (lambda: OnKept(blocks.InvertibleConv1x1(4), shape=(4, 6, 6)), (150,)),
}


def made(name):
    torch.manual_seed(0)
    make, shape = CASES[name]
    block = make()
    with torch.no_grad():
        for p in block.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return block.double().eval(), torch.randn(2, *shape, dtype=torch.float64)


def check_products(part, block, x):
    v = torch.randn(2, x[0].numel(), dtype=torch.float64)
    for k in range(2):
        dense = torch.autograd.functional.jacobian(lambda y: block(y[None]).flatten(), x[k])
        dense = dense.reshape(-1, x[k].numel())
        for product, matrix in (
            (part.apply, dense),
            (part.adjoint, dense.T),
            (part.solve, torch.linalg.inv(dense)),
            (part.solve_adjoint, torch.linalg.inv(dense).T),
        ):
            torch.testing.assert_close(product(v)[k], matrix @ v[k], rtol=1e-9, atol=1e-9)
            one = getattr(LinearPart(block, x[k : k + 1]), product.__name__)  # many directions at one point
            torch.testing.assert_close(one(v), v @ matrix.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_dense_jacobian(name):
    block, x = made(name)
    part = LinearPart(block, x)
    assert part._structured() is not None
    check_products(part, block, x)


def test_where_there_is_no_room_the_nets_are_evaluated_again():
    block, x = made("affine")
    room = Room(x.device)
    room.left = 100
    part = LinearPart(block, x, room=room)
    check_products(part, block, x)
    assert part._structure.known is None


def test_a_block_that_was_changed_is_differentiated():
    """A subclass, a hook and a method of the instance: what the block does counts, not what its class says."""

    class Doubled(blocks.ActNorm):
        def forward(self, x, context=None):
            return 2 * super().forward(x)

        def inverse(self, z, context=None):
            return super().inverse(z / 2)

    x = torch.randn(2, 80, dtype=torch.float64)
    hooked = blocks.DiagonalScaling(torch.ones(80)).double()
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    bound = blocks.Permutation.reverse(80)
    bound.forward = lambda x, context=None: 2 * x.flip(1)
    for block in (Doubled(80, start="identity").double(), hooked, bound):
        part = LinearPart(block, x)
        assert torch.allclose(part.apply(x).abs().sort().values, 2 * x.abs().sort().values)
        assert part._structured() is None


def test_a_backward_pass_without_a_derivative_is_not_differentiated_twice():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, u):
            return u.detach() * ctx.saved_tensors[0].detach().cos()

    class Net(nn.Module):
        def forward(self, x):
            return Once.apply(x)

    block, x = blocks.AdditiveCoupling(Net()).double(), torch.randn(2, 80, dtype=torch.float64)
    v = torch.randn(2, 80, dtype=torch.float64)
    image = torch.cat((v[:, :40], v[:, 40:] + x[:, :40].cos() * v[:, :40]), 1)
    torch.testing.assert_close(LinearPart(block, x).apply(v), image)


class Calls(TorchDispatchMode):
    """Counts operators, but for views."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += name not in ("view", "expand", "transpose", "split", "split_with_sizes", "slice", "detach")
        return func(*args, **(kwargs or {}))


def glow(blocks_):
    torch.manual_seed(0)
    model = models.glow((3, 8, 8), levels=2, blocks=blocks_, hidden=4, actnorm="identity")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.eval()


def test_a_product_costs_few_operator_calls():
    model = glow(3)
    at = Subject.of(model).linearized(torch.randn(2, 3, 8, 8))
    v = torch.randn(2, at.size, dtype=torch.float64)
    for product in (at.apply, at.adjoint, at.solve, at.solve_adjoint):
        product(v)
        with Calls() as calls:
            product(v)
        assert calls.count <= 20 * 6 + 10, product.__name__  # 6 blocks of ActNorm, 1x1 convolution and coupling


def test_a_lanczos_step_costs_its_products_and_little_more():
    model, x = glow(1), torch.randn(2, 3, 8, 8)
    counts = []
    for steps in (8, 18):  # no residual is looked at in between
        with Calls() as calls:
            extremes(model, x, steps=steps, tolerance=0.0)
        counts.append(calls.count)
    per_step = (counts[1] - counts[0]) / 10
    assert per_step <= 4 * (20 * 2 + 10) + 2 * 40
