"""What reviews found once and must not come back."""

import math

import pytest
import torch
from torch import nn

from bilip import Box, Chain, Invert, blocks
from bilip.errors import InputError, NoGlobalBound, UnknownLipschitz
from bilip.nets import (
    MLP,
    Declared,
    HeldConv2d,
    HeldLinear,
    conv_norm,
    enclose,
    log_lipschitz,
    matrix_norm,
    point_image,
)

pytestmark = pytest.mark.numeric

D = torch.float64


def test_a_module_used_twice_counts_twice():
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(3.0)
    net = nn.Sequential(layer, nn.ReLU(), layer)
    assert math.exp(log_lipschitz(net)) == pytest.approx(9.0)
    assert float(point_image(net, torch.ones(1, 1))[0]) == pytest.approx(9.0)
    act = nn.ReLU()
    torch.manual_seed(0)
    shared = nn.Sequential(nn.Linear(2, 16), act, nn.Linear(16, 16), act, nn.Linear(16, 2)).double()
    box = Box(0.9, 0.91, shape=(2,))
    assert enclose(shared, box).contains(shared(box.sample(50))).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [16, 128, 512])
def test_held_layers_in_half_precision(dtype, size):
    layer = HeldLinear(size, size, coefficient=0.9).to(dtype)
    with torch.no_grad():
        layer.weight.mul_(4)
    held = layer.held_weight()
    assert matrix_norm(held) <= 0.9
    assert bool((held.double() * layer.weight.double() >= 0).all())  # no sign is turned
    conv = HeldConv2d(32, 32, 3, coefficient=0.9).to(dtype)
    assert conv_norm(conv.held_weight()) <= 0.9


def test_nets_that_overwrite_their_input_are_refused():
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    for make in (lambda: blocks.AdditiveCoupling(net), lambda: blocks.Residual(net)):
        with pytest.raises(InputError, match=r"works in place and would overwrite .* inplace=False"):
            make()


def test_modules_that_do_not_compute_what_their_class_says():
    class Tenfold(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, 10 * weight, bias)

    class Twice(nn.Sequential):
        def __iter__(self):
            return iter([*self._modules.values()] * 2)

    patched = nn.Linear(1, 1)
    patched.forward = lambda x: 10 * x
    for net in (Tenfold(1, 1, 1), Twice(nn.Linear(1, 1)), patched):
        with pytest.raises(UnknownLipschitz):
            log_lipschitz(net)


def test_infinite_boxes_have_infinite_inverse_constants():
    s = MLP(1, 1, hidden=()).double()
    s.layers[0].weight.data.fill_(1e-300)
    block = blocks.AffineCoupling(MLP(1, 1, hidden=()).double(), s, scale="half_sigmoid")
    assert block.log_lip_inverse(Box.everything((2,))) == math.inf


def test_logit_near_its_edge():
    low = -0.7499999999999994
    bound = blocks.Logit(0.3).bounds(Box(low, 0.5, shape=(1,))).forward
    assert bound >= 2.0588e15


def test_boxes_beyond_the_range_of_float64():
    assert not enclose(Declared(nn.Identity(), lipschitz=1.0), Box(-1e306, 1e306, shape=(1,))).is_bounded
    field = nn.Linear(1, 1, bias=False).double()
    field.weight.data.fill_(720.0)
    assert not blocks.NeuralODE(field).enclose(Box.point(torch.tensor([1e-12], dtype=D))).is_bounded


def test_implicit_gradients_under_functional_call():
    torch.manual_seed(0)
    model = Invert(blocks.Residual(MLP(2, 2, lipschitz=0.9, activation="tanh")).double())
    z = torch.randn(3, 2, dtype=D)
    lent = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
    got = torch.autograd.grad(torch.func.functional_call(model, lent, (z,)).sum(), list(lent.values()))
    model.load_state_dict({name: p.detach() for name, p in lent.items()})
    wanted = torch.autograd.grad(model(z).sum(), list(model.parameters()))
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_orthogonal_matrices_keep_up_with_the_dtype():
    block = blocks.InvertibleConv1x1(8, kind="orthogonal").double()
    x = torch.randn(5, 8, dtype=D)
    assert float((block.inverse(block(x)) - x).abs().max()) < 1e-13


def test_caches_know_all_they_depend_on():
    held = HeldLinear(4, 4, coefficient=2.0).eval()
    plu = blocks.InvertibleConv1x1(3, kind="plu").eval()
    x = torch.randn(2, 3)
    with torch.no_grad():
        held.weight.mul_(100)
        held.held_weight()
        held.coefficient = 0.5
        assert matrix_norm(held.held_weight()) <= 0.5
        plu.inverse(x)
        plu.sign.neg_()
        assert torch.allclose(plu.inverse(plu(x)), x, atol=1e-5)


@pytest.mark.parametrize(
    "block",
    [
        blocks.Residual(MLP(3, 3, lipschitz=0.8)).eval(),
        blocks.Residual(MLP(3, 3, lipschitz=0.8), log_det=blocks.Series(5)).eval(),
        blocks.NeuralODE(MLP(3, 3, activation="tanh"), method="rk4", options={"step_size": 0.2}),
    ],
    ids=["exact", "series", "ode"],
)
def test_inference_mode(block):
    with torch.inference_mode():
        z, log_det = block.forward_and_log_det(torch.randn(4, 3))
        assert torch.isfinite(log_det).all()
        assert block.inverse(z).shape == (4, 3)


def test_empty_batches():
    assert blocks.Residual(MLP(2, 2, lipschitz=0.8)).eval().inverse(torch.zeros(0, 2)).shape == (0, 2)


def test_contexts_of_neural_odes():
    field = MLP(2, 2, context=3, activation="tanh")
    block = blocks.NeuralODE(field)
    assert block.bounds(Box(-1, 1, shape=(2,)), context=Box(-1, 1)).image.is_bounded
    assert block.bounds(Box(-1, 1, shape=(2,)), context=Box(-1, 1, shape=(2,))).image.is_bounded


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: blocks.AffineCoupling(MLP(2, 4)), (6,)),
        (lambda: blocks.InvertibleConv1x1(3), (5,)),
        (lambda: blocks.ActNorm(3, start="identity"), (5,)),
        (lambda: blocks.ActNorm(3, start="identity"), (1,)),
        (lambda: blocks.DiagonalScaling(torch.ones(3)), (1,)),
    ],
)
def test_boxes_of_the_wrong_shape(make, shape):
    with pytest.raises(InputError):
        make().bounds(Box(-1, 1, shape=shape))


def test_singular_matrices_are_called_singular():
    block = blocks.InvertibleConv1x1(2)
    block.weight.data.fill_(1.0)
    for call in (lambda: block.bounds(), lambda: Chain(block, shape=(2,)).bounds(Box(-1, 1))):
        with pytest.raises(NoGlobalBound, match="singular to working precision"):
            call()
