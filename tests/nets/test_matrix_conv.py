"""Convolutions as matrix products: equal to torch's but for the rounding that a proof is charged for."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bilip.bounds import EPS, norms, shares
from bilip.errors import NonFiniteParameters
from bilip.nets import ConvNet, HeldConv2d, HeldLinear, matrix_conv, point_image
from bilip.nets.matrix_conv import matrix_conv2d
from bilip.nets.point import Point
from bilip.nets.read import read

F64 = torch.float64


def _conv(inputs, outputs, kernel, **options):
    torch.manual_seed(0)
    return nn.Conv2d(inputs, outputs, kernel, dtype=F64, **options), torch.randn(5, inputs, 9, 8, dtype=F64)


CASES = {
    "1x1": (3, 7, 1, {}),
    "1x1 with a stride": (7, 3, 1, {"stride": 2}),
    "1x1 with padding": (7, 3, 1, {"padding": 1}),
    "few inputs": (3, 7, 3, {"padding": 1}),
    "few outputs": (7, 3, 3, {"padding": 1}),
    "no padding": (7, 3, 3, {}),
    "padding beyond the kernel": (7, 3, 3, {"padding": 4}),
    "strides": (3, 7, 3, {"stride": (2, 3), "padding": (1, 0)}),
    "strides, few outputs": (30, 2, 3, {"stride": (2, 3), "padding": (1, 0)}),
    "dilation": (3, 7, 3, {"dilation": (2, 1), "padding": 2}),
    "dilation, few outputs": (7, 3, 3, {"dilation": (2, 3), "padding": (2, 3)}),
    "an oblong kernel": (7, 3, (5, 2), {"padding": (2, 1)}),
    "an even kernel": (3, 7, 4, {"stride": 2, "padding": 1}),
}


def _matrix(layer, x):
    options = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    return matrix_conv2d(x, layer.weight.detach(), **options)


@pytest.mark.parametrize("most", [matrix_conv._MOST, 1], ids=["whole", "sample by sample"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_convolution_within_the_charged_error(name, most, monkeypatch):
    monkeypatch.setattr(matrix_conv, "_MOST", most)
    inputs, outputs, kernel, options = CASES[name]
    layer, x = _conv(inputs, outputs, kernel, bias=False, **options)
    known = point_image(layer, x)
    found = _matrix(layer, x)
    assert found.shape == known[0].shape
    # Both lie within the charge of the exact value, and the charge is rounding: far below the values.
    assert bool((norms(found - known[0]) <= 2 * known[1]).all())
    assert float((known[1] / norms(found)).max()) < 1e-11
    # Entry by entry, as every order of adding up n products errs by n eps of the sum of their sizes at most.
    size = F.conv2d(x.abs(), layer.weight.detach().abs(), None, layer.stride, layer.padding, layer.dilation)
    terms = layer.weight[0].numel()
    assert bool(((found - known[0]).abs() <= 2 * terms * EPS * size).all())


@pytest.mark.parametrize("stride", [1, 2])
def test_images_in_any_layout(stride):
    for inputs, outputs in ((3, 7), (7, 3)):
        layer, x = _conv(inputs, outputs, 3, padding=1, stride=stride, bias=False)
        for other in (x.contiguous(memory_format=torch.channels_last), x.mT.contiguous().mT, x.repeat(2, 1, 1, 1)[5:]):
            torch.testing.assert_close(_matrix(layer, other), _matrix(layer, x), rtol=0, atol=1e-13)


def test_what_is_laid_out_stays_below_the_limit(monkeypatch):
    sizes, times, most = [], matrix_conv._times, 2 * 27 * 100

    def noted(matrix, batch):
        found = times(matrix, batch)
        sizes.append(min(found.numel(), batch.numel()))  # the other one is the image, or its convolution
        return found

    monkeypatch.setattr(matrix_conv, "_times", noted)
    monkeypatch.setattr(matrix_conv, "_MOST", most)
    for inputs, outputs in ((3, 64), (64, 3)):
        layer, _ = _conv(inputs, outputs, 3, padding=1, bias=False)
        x = torch.randn(6, inputs, 8, 8, dtype=F64)
        torch.testing.assert_close(_matrix(layer, x), layer(x).detach(), rtol=0, atol=1e-12)
    assert max(sizes) <= most
    assert len(sizes) > 2


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_held_convolution_on_the_device_is_that_of_the_cpu(kernel, device):
    torch.manual_seed(0)
    layer, x = HeldConv2d(6, 5, kernel, coefficient=0.9).eval(), torch.randn(4, 6, 8, 8)
    near, there = point_image(layer, x), point_image(layer.to(device), x.to(device))
    assert there[0].device.type == torch.device(device).type
    assert bool((norms(near[0] - there[0].cpu()) <= near[1] + there[1].cpu()).all())
    torch.testing.assert_close(near[1], there[1].cpu(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_weights_that_are_not_finite_are_named(name, bad, place):
    net = ConvNet(2, 2, hidden=4, activation="tanh", gain=False)
    getattr(net.layers[place], name).data.view(-1)[1] = bad
    with pytest.raises(NonFiniteParameters, match=f"the {name}"):
        point_image(net, torch.zeros(3, 2, 4, 4))


def test_the_lengths_of_values_are_found_once(monkeypatch):
    count = []
    monkeypatch.setattr("bilip.nets.point.shares", lambda *args: count.append(1) or shares(*args))
    net = ConvNet(2, 2, hidden=4, activation="tanh", gain=False).double()
    known = Point(torch.randn(3, 2, 4, 4, dtype=F64), torch.zeros(3, dtype=F64))
    for layer in net.layers:
        known = read(layer).point(known)
    assert len(count) == 1 + len(net.layers)


@pytest.mark.parametrize("size", [0.0, 5e-324, 1e-310, 1e-160, 1.0, 1e160, 1.7e308])
def test_a_share_of_a_length_is_at_least_that(size):
    value = torch.full((1, 100), size, dtype=F64)
    share = Point(value, torch.zeros(1, dtype=F64)).share(16 * EPS)
    exact = 16 * EPS * 10 * size
    assert exact <= float(share) <= exact * (1 + 1e-9) + 5e-324


class Clamped(nn.Module):
    """A layer that bounds what it is told, errors too."""

    def forward(self, x):
        return x.clamp(-1, 1)

    def log_lipschitz(self, shape=None, outputs=None):
        return 0.0

    def log_cap(self):
        return 0.0

    def point(self, value, error):
        return value.clamp(-1, 1), error.clamp_max(2 * math.sqrt(math.prod(value.shape[1:])))


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("place", ["weight", "bias"])
def test_a_layer_behind_hides_no_parameter_that_is_not_finite(place, value, rows):
    net = nn.Sequential(HeldLinear(4, 4, coefficient=0.5), Clamped()).eval()
    with torch.no_grad():
        getattr(net[0], place).view(-1)[0] = value
    with pytest.raises(NonFiniteParameters):
        point_image(net, torch.randn(rows, 4))


@pytest.mark.parametrize("name", ["few inputs", "few outputs"])
def test_an_empty_batch(name, monkeypatch):
    inputs, outputs, kernel, options = CASES[name]
    layer, x = _conv(inputs, outputs, kernel, **options)
    assert _matrix(layer, x[:0]).shape == (0, outputs, 9, 8)


def test_options_that_are_one_number():
    layer, x = _conv(64, 2, 3, padding=1)
    expected = point_image(layer, x)[0]
    layer.padding = layer.stride = layer.dilation = 1
    assert torch.equal(point_image(layer, x)[0], expected)
