"""Nets and their layers: what is proved about them, and what is refused."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bilip.bounds import Box
from bilip.errors import InputError, NonFiniteParameters, UnknownLipschitz
from bilip.nets import MLP, ConvNet, Declared, GainConv2d, HeldLinear, enclose, log_cap, log_lipschitz, point_image
from catalogue import hooked, louder


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    side=st.floats(1e-3, 10),
    activation=st.sampled_from(["relu", "elu", "swish", "scaled_swish"]),
)
def test_boxes_and_constants_of_an_mlp(seed, side, activation):
    torch.manual_seed(seed)
    net = MLP(3, 4, hidden=(8, 8), activation=activation).double()
    box = Box(-side, side / 2, shape=(3,))
    x = box.sample(200)
    assert enclose(net, box).contains(net(x)).all()
    jacobians = torch.func.vmap(torch.func.jacrev(net))(x).detach()
    assert float(torch.linalg.matrix_norm(jacobians, ord=2).max()) <= math.exp(log_lipschitz(net))
    rows = jacobians[:, 1:3]
    assert float(torch.linalg.matrix_norm(rows, ord=2).max()) <= math.exp(log_lipschitz(net, outputs=slice(1, 3)))


def test_plain_torch_stacks_are_read():
    conv = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        nn.SiLU(),
        nn.Sequential(nn.Conv2d(4, 3, 3, stride=2), nn.Tanh()),
        nn.Flatten(),
        nn.Linear(12, 2),
    ).double()
    box = Box(-1, 1, shape=(2, 6, 5))
    x = box.sample(100)
    assert enclose(conv, box).contains(conv(x)).all()
    jacobians = torch.func.vmap(torch.func.jacrev(lambda v: conv(v[None])[0]))(x[:20]).detach().flatten(2)
    assert float(torch.linalg.matrix_norm(jacobians, ord=2).max()) <= math.exp(log_lipschitz(conv, (2, 6, 5)))


def test_context_is_not_part_of_the_constant_but_of_the_box():
    torch.manual_seed(0)
    net = MLP(2, 2, hidden=(8,), context=3).double()
    with torch.no_grad():
        net.layers[0].weight[:, 2:].mul_(100)
    assert log_lipschitz(net) < math.log(10)
    box, context = Box(-1, 1, shape=(2,)), Box(-0.1, 0.1, shape=(3,))
    assert enclose(net, box, context).contains(net(box.sample(99), context.sample(99))).all()
    assert not enclose(net, box).is_bounded  # any context
    images = ConvNet(1, 1, hidden=4, context=1)
    assert images(torch.ones(2, 1, 4, 4), torch.ones(2, 1, 4, 4)).shape == (2, 1, 4, 4)


def test_zero_weights_give_a_constant_function():
    net = ConvNet(2, 2, hidden=4)
    assert log_lipschitz(net) == -math.inf
    assert enclose(net, Box.everything((2, 4, 4))).magnitude < 1e-9


def test_gain_is_part_of_the_weight():
    layer = GainConv2d(2, 3).double()
    with torch.no_grad():
        layer.weight.normal_()
        layer.log_gain.copy_(torch.tensor([0.5, -0.2, 0.1]))
    x = torch.randn(4, 2, 5, 5, dtype=torch.float64)
    expected = nn.functional.conv2d(x, layer.weight, layer.bias, padding=1) * (3 * layer.log_gain).exp()[:, None, None]
    assert torch.allclose(layer(x), expected)
    assert log_lipschitz(nn.Sequential(layer)) > log_lipschitz(nn.Sequential(nn.Conv2d(2, 3, 1)))


class Pretender(nn.Module):
    """Not one of ours, though it has layers and they are held."""

    coefficient = 0.1

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(HeldLinear(2, 2, coefficient=0.9))

    def forward(self, x):
        return -10 * self.layers(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LocalResponseNorm(2)),
        lambda: louder(nn.Linear, "forward")(2, 2),
        lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
        lambda: nn.GRUCell(2, 2),
        lambda: louder(MLP, "forward")(2, 2, lipschitz=0.5),
        lambda: Pretender(),
        lambda: hooked(HeldLinear(2, 2, coefficient=0.5)),
        lambda: hooked(MLP(2, 2, lipschitz=0.5)),
        lambda: hooked(nn.Tanh()),
        lambda: hooked(Declared(nn.Tanh(), lipschitz=1.0)),
        lambda: nn.Sequential(louder(nn.Flatten, "forward")(), nn.Linear(2, 2)),
        lambda: nn.Sequential(nn.Flatten(2), nn.Linear(2, 2)),
        lambda: nn.Softplus(threshold=0.1),
        lambda: nn.Upsample(scale_factor=2),
    ],
)
def test_what_cannot_be_read_is_refused(make):
    net = make()
    with pytest.raises(UnknownLipschitz, match=r"declare it: bilip.nets.Declared\(net, lipschitz=...\)"):
        log_lipschitz(net)
    assert log_cap(net) is None  # and no shortcut trusts it either


def test_parametrized_layers_are_read_in_eval_mode_only():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    with pytest.raises(UnknownLipschitz, match=r"Call .eval\(\)"):
        log_lipschitz(layer)
    before = layer.parametrizations.weight[0]._u.clone()
    assert log_lipschitz(layer.eval()) > -1
    assert torch.equal(before, layer.parametrizations.weight[0]._u)


def test_circular_padding_that_repeats_pixels_is_refused():
    conv = nn.Conv2d(1, 1, 3, padding=2, padding_mode="circular")
    with pytest.raises(UnknownLipschitz, match="repeats pixels"):
        log_lipschitz(conv)


def test_declared_nets():
    net = Declared(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), lipschitz=3.0)
    assert math.exp(log_lipschitz(net)) == pytest.approx(3.0)
    box = Box(-1e-3, 1e-3, shape=(2,))
    assert enclose(net, box).contains(net(box.sample(50).float())).all()
    with pytest.raises(InputError, match="lipschitz=-1"):
        Declared(nn.Identity(), lipschitz=-1)


def test_non_finite_weights():
    net = MLP(2, 2)
    net.layers[0].weight.data[0, 0] = torch.inf
    with pytest.raises(NonFiniteParameters, match="weight of Linear"):
        log_lipschitz(net)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: MLP(0, 2), "every size must be at least 1"),
        (lambda: ConvNet(1, 1, hidden=0), "every size must be at least 1"),
        (lambda: MLP(2, 2, hidden=8), "expected the sizes of the hidden layers"),
        (lambda: ConvNet(1, 1, hidden=(8,)), "expected one number, the channels inside"),
        (lambda: MLP(2, 2, hidden=(4.5,)), "expected whole numbers"),
        (lambda: MLP("2", 2), "expected whole numbers"),
        (lambda: ConvNet(1, None), "expected whole numbers"),
        (lambda: MLP(2, 2, context=3)(torch.ones(1, 2)), "pass context="),
        (lambda: MLP(2, 2, context=3)(torch.ones(1, 2), torch.ones(1, 2)), r"context has shape \(1, 2\)"),
        (lambda: MLP(2, 2, lipschitz=-2), "lipschitz=-2"),
    ],
)
def test_bad_sizes_and_contexts(wrong, said):
    with pytest.raises(InputError, match=said):
        wrong()


# ---- layers of torch that can be read: no gain above the constant, no image outside the box, no value farther off than it says


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
    "max pool one number": (lambda: nn.MaxPool2d((3,), (1,), (1,), (1,)), (1, 4, 4), 0.999),
    "max pool ceil": (lambda: nn.MaxPool3d(2, ceil_mode=True), (1, 3, 3, 3), 0.999),
    "average pool": (lambda: nn.AvgPool2d(2), (2, 4, 4), 0.999),
    "average pool shared": (lambda: nn.AvgPool2d(3, stride=1, padding=1), (1, 5, 5), 0.7),
    "average pool odd": (lambda: nn.AvgPool1d(3, stride=2), (2, 7), 0.8),
    "average pool ceil": (lambda: nn.AvgPool2d(2, ceil_mode=True), (1, 3, 3), 0.999),
    "average pool border": (lambda: nn.AvgPool1d(2, padding=1, count_include_pad=False), (1, 4), 0.999),
    "average pool divisor": (lambda: nn.AvgPool3d(2, divisor_override=3), (1, 2, 2, 2), 0.999),
    "average pool one number": (lambda: nn.AvgPool2d((3,), (1,), divisor_override=1), (1, 5, 5), 0.5),
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


@pytest.fixture(params=LAYERS)
def case(request):
    """A layer, the shape of a sample, and how near a gain must come to the constant."""
    make, shape, near = LAYERS[request.param]
    return trained(make().double()), shape, near


def test_no_gain_and_no_difference_is_above_the_constant(case):
    layer, shape, near = case
    gain = largest_gain(layer, shape)
    sharp, any_size = math.exp(log_lipschitz(layer, shape)), math.exp(log_lipschitz(layer))
    assert gain <= sharp * (1 + 1e-12)
    assert sharp <= any_size * (1 + 1e-12)
    assert gain >= near * sharp
    for scale in (1e-3, 1.0, 30.0):
        x = points(shape, 100, scale)
        y = torch.cat((x[50:], x[:50] + 1e-2 * scale * x[50:]))
        apart = (layer(x) - layer(y)).flatten(1).norm(dim=1) / (x - y).flatten(1).norm(dim=1)
        assert float(apart.max()) <= sharp * (1 + 1e-9)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 0.5), (2.0, 2.001), (-30.0, 40.0), (-3.0, -3.0)])
def test_no_image_lies_outside_the_box(case, low, high):
    layer, shape, _ = case
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


def test_a_value_is_as_near_as_it_says(case):
    """Against the layer itself in float64, and against one whose input is off by a known length."""
    layer, shape, _ = case
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
        (lambda: nn.LayerNorm(2, eps=1e-320), "eps=1e-320, beside which squares lose their digits to underflow"),
        (lambda: nn.GroupNorm(1, 2, eps=1e-300), "eps=1e-300, beside which squares lose their digits to underflow"),
        (lambda: nn.MaxPool2d(2, return_indices=True), "parameters for which no constant is known"),
        (lambda: nn.AvgPool2d(2, divisor_override=-1), "parameters for which no constant is known"),
        (lambda: nn.Unflatten(0, (1, 2)), "parameters for which no constant is known"),
        (lambda: nn.ConstantPad1d(1, math.inf), "parameters for which no constant is known"),
        (lambda: nn.ConstantPad1d(1, math.nan), "parameters for which no constant is known"),
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


def test_norms_and_images_are_computed_once_for_all_statements_about_a_coupling(monkeypatch):
    from bilip.models import glow
    from bilip.nets import certify, read

    torch.manual_seed(0)
    model = glow((3, 8, 8), levels=2, blocks=1, hidden=8)
    with torch.no_grad():
        model(torch.rand(16, 3, 8, 8))
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    box, other = Box(0.0, 1.0, shape=(3, 8, 8)), Box(-1.0, 1.0, shape=(3, 8, 8))
    plain_norm, plain_image, norms, images = read.conv_norm, certify._ball_and_interval, [], []
    monkeypatch.setattr(read, "conv_norm", lambda w, **o: norms.append(w) or plain_norm(w, **o))
    monkeypatch.setattr(certify, "_ball_and_interval", lambda *a: images.append(a) or plain_image(*a))
    with certify.remembering():
        found = [model.bounds(box), model.bounds(other), model.bounds(box)]
    # Two couplings with a convolution of 3x3 before and after: once whole and once for each half of the outputs.
    assert len(norms) == 2 * 4
    assert len({tuple(w.shape) for w in norms}) < len(norms)
    assert len(images) == 2 * 2 * 3  # on two boxes for each question
    # Asked alone the numbers are the same, bit for bit.
    for asked, kept in zip((box, other, box), found, strict=True):
        alone = model.bounds(asked)
        assert (alone.log_forward, alone.log_inverse) == (kept.log_forward, kept.log_inverse)
    coupling = next(part for part in model.modules() if type(part).__name__ == "AffineCoupling")
    inside = Box(-0.5, 0.5, shape=(12, 4, 4))
    statements = ("log_lip", "log_lip_inverse", "log_lip_inverse_on_image")
    bare = [getattr(coupling, name)(inside) for name in statements]  # nothing is remembered here
    with certify.remembering():
        assert [getattr(coupling, name)(inside) for name in statements] == bare
        image = coupling.interval(inside)
    assert torch.equal(image.low, coupling.interval(inside).low)


def test_the_last_layer_is_asked_for_each_part_of_its_outputs():
    from bilip.nets import certify

    torch.manual_seed(0)
    net = MLP(3, 4, hidden=(8,)).double()
    with torch.no_grad():
        net.layers[-1].weight[2:] *= 100
    parts = [None, slice(0, 2), slice(2, 4)]
    bare = [log_lipschitz(net, outputs=part) for part in parts]
    with certify.remembering():
        assert [log_lipschitz(net, outputs=part) for part in parts] == bare
    assert bare[1] < bare[2] - 2


@pytest.mark.numeric
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


@pytest.mark.parametrize(("log_gain", "weight"), [(-250.1, 1e300), (250.1, 1e-300), (99.7, 1.0), (-99.3, 1.0)])
def test_a_gain_beyond_float64_counts_where_its_product_with_the_weight_is_not(log_gain, weight):
    layer = GainConv2d(1, 1, 1).double()
    nn.init.constant_(layer.log_gain, log_gain)
    nn.init.constant_(layer.weight, weight)
    nn.init.zeros_(layer.bias)
    log, image = log_lipschitz(layer), enclose(layer, Box(-1, 1, shape=(1, 1, 1)))
    with mpmath.workdps(50):
        exact = weight * mpmath.exp(3 * mpmath.mpf(log_gain))
        assert mpmath.log(exact) <= log <= mpmath.log(exact) + 1e-9
        assert exact <= float(image.high) <= exact * (1 + mpmath.mpf(1e-9))
