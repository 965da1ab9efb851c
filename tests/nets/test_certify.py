import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bilip.bounds import Box
from bilip.errors import InputError, NonFiniteParameters, UnknownLipschitz
from bilip.nets import MLP, ConvNet, Declared, GainConv2d, HeldLinear, enclose, log_cap, log_lipschitz, point_image


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


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Louder(MLP):
    def forward(self, x, context=None):
        return 100 * super().forward(x, context)


class Pretender(nn.Module):
    """Not one of ours, though it has layers and they are held."""

    coefficient = 0.1

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(HeldLinear(2, 2, coefficient=0.9))

    def forward(self, x):
        return -10 * self.layers(x)


class Sliced(nn.Flatten):
    def forward(self, x):
        return 10 * x


def hooked(layer):
    layer.register_forward_hook(lambda module, inputs, output: 100 * output)
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LocalResponseNorm(2)),
        lambda: Doubled(2, 2),
        lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
        lambda: nn.GRUCell(2, 2),
        lambda: Louder(2, 2, lipschitz=0.5),
        lambda: Pretender(),
        lambda: hooked(HeldLinear(2, 2, coefficient=0.5)),
        lambda: hooked(MLP(2, 2, lipschitz=0.5)),
        lambda: hooked(nn.Tanh()),
        lambda: hooked(Declared(nn.Tanh(), lipschitz=1.0)),
        lambda: nn.Sequential(Sliced(), nn.Linear(2, 2)),
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


def test_bad_sizes_and_contexts():
    with pytest.raises(InputError, match="every size must be at least 1"):
        MLP(0, 2)
    with pytest.raises(InputError, match="every size must be at least 1"):
        ConvNet(1, 1, hidden=0)
    with pytest.raises(InputError, match="pass context="):
        MLP(2, 2, context=3)(torch.ones(1, 2))
    with pytest.raises(InputError, match=r"context has shape \(1, 2\)"):
        MLP(2, 2, context=3)(torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(InputError, match="lipschitz=-2"):
        MLP(2, 2, lipschitz=-2)


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
