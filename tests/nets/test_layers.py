"""Layers of torch that can be read: no gain above the constant, no image outside the box, no value farther off than it says."""

import math

import pytest
import torch
from torch import nn

from bilip.bounds import Box
from bilip.errors import NonFiniteParameters, UnknownLipschitz
from bilip.nets import enclose, log_cap, log_lipschitz, point_image

F64 = torch.float64


def trained(layer):
    """Some weights and statistics that are not those of the start."""
    generator = torch.Generator().manual_seed(1)
    for p in layer.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            values = torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype)
            buffer.copy_(3 * values + 0.1 if "var" in name else 4 * values - 2)
    return layer.eval()


# Each with the shape of a sample, and how near a gain must come to the constant for it to be worth stating.
LAYERS = {
    "batch norm": (lambda: nn.BatchNorm1d(4), (4,), 0.999),
    "batch norm images": (lambda: nn.BatchNorm2d(3), (3, 4, 4), 0.999),
    "batch norm plain": (lambda: nn.BatchNorm3d(2, affine=False), (2, 2, 2, 2), 0.999),
    "layer norm": (lambda: nn.LayerNorm(5), (5,), 0.5),
    "layer norm flat": (lambda: nn.LayerNorm((3, 4), eps=0.3, elementwise_affine=False), (3, 4), 0.9),
    "layer norm last": (lambda: nn.LayerNorm(4, eps=0.1), (3, 4), 0.3),
    "group norm": (lambda: nn.GroupNorm(2, 4, eps=0.1), (4, 3, 3), 0.3),
    "group norm plain": (lambda: nn.GroupNorm(1, 4, affine=False), (4,), 0.9),
    "max pool": (lambda: nn.MaxPool2d(2), (2, 4, 4), 0.999),
    "max pool shared": (lambda: nn.MaxPool2d(3, stride=1, padding=1), (1, 4, 4), 0.999),
    "max pool dilated": (lambda: nn.MaxPool1d(3, stride=2, dilation=2), (2, 9), 0.999),
    "max pool ceil": (lambda: nn.MaxPool3d(2, ceil_mode=True), (1, 3, 3, 3), 0.999),
    "average pool": (lambda: nn.AvgPool2d(2), (2, 4, 4), 0.999),
    "average pool shared": (lambda: nn.AvgPool2d(3, stride=1, padding=1), (1, 5, 5), 0.7),
    "average pool odd": (lambda: nn.AvgPool1d(3, stride=2), (2, 7), 0.8),
    "average pool ceil": (lambda: nn.AvgPool2d(2, ceil_mode=True), (1, 3, 3), 0.999),
    "average pool border": (lambda: nn.AvgPool1d(2, padding=1, count_include_pad=False), (1, 4), 0.999),
    "average pool divisor": (lambda: nn.AvgPool3d(2, divisor_override=3), (1, 2, 2, 2), 0.999),
    "zero pad": (lambda: nn.ZeroPad2d((1, 0, 2, 1)), (1, 3, 3), 0.999),
    "crop": (lambda: nn.ZeroPad1d((-1, 2)), (2, 4), 0.999),
    "constant pad": (lambda: nn.ConstantPad1d(2, 3.5), (2, 4), 0.999),
    "reflection pad": (lambda: nn.ReflectionPad2d(1), (1, 3, 3), 0.6),
    "replication pad": (lambda: nn.ReplicationPad2d((2, 1, 0, 3)), (1, 3, 3), 0.999),
    "replication of one": (lambda: nn.ReplicationPad1d((2, 1)), (2, 1), 0.999),
    "circular pad": (lambda: nn.CircularPad1d((2, 1)), (1, 3), 0.7),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), (4, 2, 3), 0.999),
    "pixel unshuffle": (lambda: nn.PixelUnshuffle(2), (1, 4, 6), 0.999),
    "unflatten": (lambda: nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 3))), (6,), 0.999),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3), (2, 4, 4), 0.7),
    "transposed strided": (lambda: nn.ConvTranspose2d(2, 1, 3, stride=2, padding=1, output_padding=1), (2, 4, 4), 0.7),
    "transposed groups": (lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, dilation=2), (4, 6), 0.6),
    "transposed volume": (lambda: nn.ConvTranspose3d(1, 2, 2, stride=2, bias=False), (1, 2, 2, 2), 0.9),
    "reflected convolution": (lambda: nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), (2, 5, 5), 0.2),
    "replicated convolution": (lambda: nn.Conv2d(1, 2, 3, padding=2, padding_mode="replicate"), (1, 4, 4), 0.3),
    "replicated same": (lambda: nn.Conv1d(1, 2, 4, padding="same", padding_mode="replicate"), (1, 5), 0.3),
    "reflected pixels": (lambda: nn.Conv2d(2, 2, 1, padding=1, padding_mode="reflect"), (2, 3, 3), 0.5),
    "prelu": (lambda: nn.PReLU(3), (3, 2, 2), 0.999),
    "prelu one": (nn.PReLU, (4,), 0.999),
    "dropout": (lambda: nn.Dropout2d(0.3), (2, 3, 3), 0.999),
    "alpha dropout": (nn.AlphaDropout, (4,), 0.999),
}


def points(shape, count, scale):
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(count, *shape, generator=generator, dtype=F64)


def largest_gain(layer, shape):
    """The largest norm of a Jacobian found: at random points of three sizes, at equal entries and at falling ones."""
    steps = torch.linspace(1, 0.5, math.prod(shape), dtype=F64).view(1, *shape)
    x = torch.cat((*(points(shape, 6, scale) for scale in (1e-3, 1.0, 30.0)), torch.zeros(1, *shape, dtype=F64), steps))
    x = x.clone().requires_grad_()
    out = layer(x).flatten(1)
    rows = [torch.autograd.grad(out[:, k].sum(), x, retain_graph=True)[0].flatten(1) for k in range(out.shape[1])]
    return float(torch.linalg.matrix_norm(torch.stack(rows, 1), ord=2).max())


@pytest.mark.parametrize("name", LAYERS)
def test_no_gain_is_above_the_constant(name):
    make, shape, near = LAYERS[name]
    layer = trained(make().double())
    gain = largest_gain(layer, shape)
    sharp, any_size = math.exp(log_lipschitz(layer, shape)), math.exp(log_lipschitz(layer))
    assert gain <= sharp * (1 + 1e-12)
    assert sharp <= any_size * (1 + 1e-12)
    assert gain >= near * sharp


@pytest.mark.parametrize("name", LAYERS)
def test_no_difference_is_above_the_constant(name):
    make, shape, _ = LAYERS[name]
    layer = trained(make().double())
    bound = math.exp(log_lipschitz(layer, shape))
    for scale in (1e-3, 1.0, 30.0):
        x = points(shape, 100, scale)
        y = torch.cat((x[50:], x[:50] + 1e-2 * scale * x[50:]))
        apart = (layer(x) - layer(y)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
        assert float(apart.max()) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("low", "high"), [(-1.0, 0.5), (2.0, 2.001), (-30.0, 40.0), (-3.0, -3.0)])
def test_no_image_lies_outside_the_box(name, low, high):
    make, shape, _ = LAYERS[name]
    layer = trained(make().double())
    box = Box(low, high, shape=shape)
    image = enclose(layer, box)
    x = box.sample(60)
    x[:20] = torch.where(torch.rand(20, *shape) < 0.5, box.low, box.high)
    assert image.contains(layer(x)).all()
    assert image.is_bounded
    assert tuple(image.shape) == tuple(layer(x).shape[1:])
    half = Box(torch.full(shape, low, dtype=F64), torch.full(shape, math.inf, dtype=F64))
    assert enclose(layer, half).contains(layer(x)).all()
    assert enclose(layer, Box.everything()).contains(layer(x)).all()


@pytest.mark.parametrize("name", LAYERS)
def test_a_value_is_as_near_as_it_says(name):
    """Against the layer itself in float64, and against one whose input is off by a known length."""
    make, shape, _ = LAYERS[name]
    layer = trained(make().double())
    for scale in (1e-3, 1.0, 1e3):
        x = points(shape, 20, scale)
        value, error = point_image(layer, x)
        gap = (value - layer(x)).flatten(1).norm(dim=1)
        assert bool((gap <= 2 * error + 1e-300).all())  # both are rounded
        # float64 loses a few digits to the size of the input at most, times the constant
        assert float(error.max()) <= 1e-12 * (1 + scale * 10 * (1 + math.exp(log_lipschitz(layer))))


def test_shapes_go_on_through_a_stack():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"),
        nn.BatchNorm2d(4),
        nn.Hardswish(inplace=True),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
        nn.PReLU(4),
        nn.PixelUnshuffle(2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.LayerNorm(16, eps=1.0),
        nn.Dropout(),
        nn.Linear(16, 2),
    )
    net = trained(net.double())
    box = Box(-1, 1, shape=(1, 4, 4))
    x = box.sample(50)
    assert enclose(net, box).contains(net(x)).all()
    assert largest_gain(net, (1, 4, 4)) <= math.exp(log_lipschitz(net, (1, 4, 4)))
    value, error = point_image(net, x)
    assert bool(((value - net(x)).norm(dim=1) <= 2 * error).all())
    assert log_cap(net) is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.BatchNorm1d(2), r"normalises by its batch.*call .eval\(\)"),
        (lambda: nn.BatchNorm1d(2, track_running_stats=False).eval(), "normalises by its batch"),
        (lambda: nn.LayerNorm(2, eps=0.0), "eps=0.0, without which it has no Lipschitz constant"),
        (lambda: nn.MaxPool2d(2, return_indices=True), "parameters for which no constant is known"),
        (lambda: nn.AvgPool2d(2, divisor_override=-1), "parameters for which no constant is known"),
        (lambda: nn.Unflatten(0, (1, 2)), "parameters for which no constant is known"),
        (lambda: nn.InstanceNorm1d(2), "is not a layer whose constant is known"),
        (lambda: nn.Hardshrink(), "is not a layer whose constant is known"),
    ],
)
def test_what_has_no_constant_is_refused_with_the_reason(make, reason):
    with pytest.raises(UnknownLipschitz, match=reason):
        log_lipschitz(make())


def test_statistics_that_are_not_numbers():
    layer = nn.BatchNorm1d(2).eval()
    layer.running_mean[0] = math.nan  # type: ignore[index]
    with pytest.raises(NonFiniteParameters, match="running_mean"):
        log_lipschitz(layer)
    layer = nn.BatchNorm1d(2).eval()
    layer.running_var[0] = -1.0  # type: ignore[index]
    with pytest.raises(UnknownLipschitz, match="not positive"):
        log_lipschitz(layer)
