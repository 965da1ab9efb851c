"""Linear algebra of models: stacks of matrices, linearized blocks and models."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bilip import _linalg, blocks, models
from bilip.auditing.probes import Subject, extremes
from bilip.blocks import ActNorm, DiagonalScaling, InvertibleConv1x1
from bilip.blocks.factor_out import OnKept
from bilip.linalg.jacobian import jvp
from bilip.linalg.linearized import LinearPart
from bilip.linalg.structured import Room
from bilip.nets import MLP, ConvNet

# ---- stacks of matrices: right after torch.set_num_threads, as torch.linalg everywhere else


NAMES = ["inv", "inv_ex", "lu", "slogdet", "det", "solve", "solve_ex"]
TWO_THREADS = """
import math
import torch
torch.set_num_threads(2)
import bilip
from bilip import _linalg
from bilip.blocks.log_det import Exact

for rows in (160, 192):
    for dtype in (torch.float32, torch.float64):
        a = torch.linalg.qr(torch.randn(4, rows, rows, dtype=dtype))[0] + torch.eye(rows, dtype=dtype) / 2
        b = torch.randn(4, rows, 3, dtype=dtype)
        for name in ("inv", "inv_ex", "lu", "slogdet", "det", "solve", "solve_ex"):
            stacks = (a, b) if name.startswith("solve") else (a,)
            found, ones = getattr(_linalg, name)(*stacks), [getattr(torch.linalg, name)(*one) for one in zip(*stacks)]
            if isinstance(found, torch.Tensor):
                found, ones = (found,), [(one,) for one in ones]
            for part, expected in zip(found, zip(*ones)):
                assert torch.equal(part, torch.stack(expected)), (name, rows, dtype)

x = torch.rand(4, 3, 16, 16)
glow = bilip.models.glow((3, 16, 16), levels=3, blocks=4, hidden=8)
with torch.no_grad():
    glow(x)
    for model in (glow.train(), glow.eval()):
        z, log_det = model.forward_and_log_det(x)
        assert (model.inverse(z) - x).abs().max() < 1e-4
        assert log_det.isfinite().all()
        assert torch.allclose(model.inverse_and_log_det(z)[1], -log_det, rtol=1e-3)
grads = []
for model in (glow.train(), bilip.Reversible(glow)):
    glow.zero_grad()
    z, log_det = model.forward_and_log_det(x)
    (z.square().flatten(1).sum(1) / 2 - log_det).sum().backward()
    grads.append(torch.cat([p.grad.flatten() for p in glow.parameters()]))
assert torch.allclose(*grads, rtol=1e-3, atol=1e-3 * float(grads[0].abs().max()))

slope = torch.randn(160, 160, dtype=torch.float64) / 40
found = Exact()(lambda x: x @ slope.T, torch.randn(3, 160, dtype=torch.float64))
assert torch.allclose(found, torch.linalg.slogdet(torch.eye(160, dtype=torch.float64) + slope)[1].expand(3), atol=1e-9)
print("right")
"""


@pytest.mark.process
@pytest.mark.slow
def test_stacks_are_right_after_set_num_threads():
    """The faulty calls return wrong numbers, raise, or never return."""
    patient = os.environ | {"OMP_WAIT_POLICY": "passive"}  # threads that wait do not spin, where others need the cores
    command = [sys.executable, "-c", TWO_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=patient)
    assert done.stdout == "right\n", done.stderr[-2000:]


def stacks_for(name, dtype=torch.float64, rows=40):
    a = torch.randn(2, 3, rows, rows, dtype=dtype) + 4 * torch.eye(rows, dtype=dtype)
    return (a, torch.randn(3, rows, 2, dtype=dtype)) if name.startswith("solve") else (a,)


def tensors(value):
    return [value] if isinstance(value, torch.Tensor) else [part for part in value if part.is_floating_point()]


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("name", NAMES)
def test_as_in_torch(name, rows, device):
    """Values, shapes and names of one call for the stack, with leading dimensions that are broadcast; gradients; forward mode."""
    ours, torchs = getattr(_linalg, name), getattr(torch.linalg, name)
    stacks = [stack.to(device) for stack in stacks_for(name, rows=rows)]
    found, expected = ours(*stacks), torchs(*stacks)
    assert type(found) is type(expected)
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    a = stacks[0].requires_grad_()
    grads = []
    for function in (ours, torchs):
        value = tensors(function(a, *stacks[1:]))[-1]
        weights = torch.linspace(0, 1, value.numel(), dtype=value.dtype, device=device).view_as(value)
        first = torch.autograd.grad((value.log() if name == "det" else value).mul(weights).sum(), a, create_graph=True)
        grads.append((*first, *torch.autograd.grad(first[0].square().sum(), a)))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)

    a = a.detach()
    tangents = [
        tensors(torch.func.jvp(lambda a, f=f: tensors(f(a, *stacks[1:]))[-1], (a,), (torch.ones_like(a),))[1])
        for f in (ours, torchs)
    ]
    torch.testing.assert_close(*tangents, rtol=1e-6, atol=1e-9)


def test_a_singular_matrix_is_named_or_reported():
    stack = torch.eye(40).repeat(3, 1, 1)
    stack[1] = 0
    assert _linalg.inv_ex(stack).info.tolist() == [0, 1, 0]
    assert _linalg.solve_ex(stack, torch.ones(40, 1)).info.tolist() == [0, 1, 0]
    assert _linalg.slogdet(stack).logabsdet.tolist() == [0, -torch.inf, 0]
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        _linalg.inv(stack)


def test_stacks_without_matrices():
    assert _linalg.inv(torch.zeros(0, 40, 40)).shape == (0, 40, 40)
    assert _linalg.slogdet(torch.zeros(0, 40, 40)).logabsdet.shape == (0,)
    assert _linalg.solve(torch.zeros(0, 40, 40), torch.zeros(0, 40, 1)).shape == (0, 40, 1)


# ---- blocks of known structure: the same products as autograd's, from far fewer operator calls


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


@pytest.mark.numeric
@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_dense_jacobian(name):
    block, x = made(name)
    part = LinearPart(block, x)
    assert part._structured() is not None
    check_products(part, block, x)


@pytest.mark.numeric
def test_where_there_is_no_room_the_nets_are_evaluated_again():
    block, x = made("affine")
    room = Room(x.device)
    room.left = 100
    part = LinearPart(block, x, room=room)
    check_products(part, block, x)
    assert part._structure.known is None


@pytest.mark.numeric
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


@pytest.mark.numeric
@pytest.mark.parametrize("where", ["activation", "last layer", "net"])
def test_a_coupling_whose_net_is_hooked_has_the_jacobian_of_what_it_computes(where):
    torch.manual_seed(0)
    block = blocks.AdditiveCoupling(MLP(40, 40, activation="tanh")).double()
    net = block.t
    changed = {"activation": net.layers[1], "last layer": net.layers[-1], "net": net}[where]
    changed.register_forward_hook(lambda module, inputs, output: 3 * output)
    x, v = torch.randn(2, 2, 80, dtype=torch.float64)
    assert torch.allclose(LinearPart(block, x).apply(v), jvp(block, x, v), rtol=1e-9)


@pytest.mark.numeric
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


@pytest.mark.numeric
def test_a_product_costs_few_operator_calls():
    model = glow(3)
    at = Subject.of(model).linearized(torch.randn(2, 3, 8, 8))
    v = torch.randn(2, at.size, dtype=torch.float64)
    for product in (at.apply, at.adjoint, at.solve, at.solve_adjoint):
        product(v)
        with Calls() as calls:
            product(v)
        assert calls.count <= 20 * 6 + 10, product.__name__  # 6 blocks of ActNorm, 1x1 convolution and coupling


@pytest.mark.numeric
def test_a_lanczos_step_costs_its_products_and_little_more():
    model, x = glow(1), torch.randn(2, 3, 8, 8)
    counts = []
    for steps in (8, 18):  # no residual is looked at in between
        with Calls() as calls:
            extremes(model, x, steps=steps, tolerance=0.0)
        counts.append(calls.count)
    per_step = (counts[1] - counts[0]) / 10
    assert per_step <= 4 * (20 * 2 + 10) + 2 * 40


# ---- products with the Jacobian of one block, and what they cost


def linear_blocks():
    torch.manual_seed(0)
    norm = ActNorm(6, start="identity")
    torch.nn.init.normal_(norm.bias, std=3.0)
    torch.nn.init.normal_(norm.log_scale)
    return {
        "actnorm": (norm, (6, 4, 4)),
        "diagonal": (DiagonalScaling(torch.randn(96).exp()), (96,)),
        "full": (InvertibleConv1x1(6), (6, 4, 4)),
        "plu": (InvertibleConv1x1(6, kind="plu"), (6, 4, 4)),
        "kept": (OnKept(InvertibleConv1x1(6), (6, 4, 4)), (130,)),
        "kept actnorm": (OnKept(norm, (6, 4, 4)), (130,)),
    }


@pytest.mark.parametrize("kind", linear_blocks())
def test_a_large_linear_block_is_differentiated_once(kind):
    block, shape = linear_blocks()[kind]
    block = block.double().eval().requires_grad_(False)
    x = torch.randn(2, *shape, dtype=torch.float64)
    part = LinearPart(block, x)
    part.solve(
        torch.randn(2, x[0].numel(), dtype=torch.float64)
    )  # the first product finds its numbers, and checks them
    calls, forward, inverse = [], block.forward, block.inverse
    block.forward = lambda *a: calls.append(1) or forward(*a)
    block.inverse = lambda *a: calls.append(1) or inverse(*a)
    size = x[0].numel()
    v = torch.randn(2, size, dtype=torch.float64)
    image, pulled = part.apply(v), part.adjoint(v)
    back, pulled_back = part.solve(image), part.solve_adjoint(pulled)
    assert calls == []
    jacobian = torch.autograd.functional.jacobian(lambda y: forward(y).flatten(), x[:1]).reshape(size, size)
    torch.testing.assert_close(image, v @ jacobian.T, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(pulled, v @ jacobian, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(back, v, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pulled_back, v, rtol=1e-10, atol=1e-10)
    assert part.residual < 1e-10
    values = torch.linalg.svdvals(jacobian)
    torch.testing.assert_close(torch.tensor(part.extremes, dtype=torch.float64), values[[0, -1]], rtol=1e-10, atol=0)


def test_a_linear_block_that_is_changed_is_no_linear_block():
    class Bent(ActNorm):
        def forward(self, x, context=None):
            return super().forward(x + 0.1 * x.sin())

    block = Bent(100, start="identity").double().eval()
    x = torch.randn(2, 100, dtype=torch.float64)
    v = torch.ones(2, 100, dtype=torch.float64)
    torch.testing.assert_close(LinearPart(block, x).apply(v), 1 + 0.1 * x.cos())
