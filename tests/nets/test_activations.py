import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bilip.bounds import Box
from bilip.errors import InputError
from bilip.nets import activations

MODULES = {
    **{
        name: (lambda name=name: activations.make(name))
        for name in ("relu", "leaky_relu", "elu", "tanh", "softplus", "swish", "scaled_swish", "gelu")
    },
    "steep leaky": lambda: nn.LeakyReLU(3.0),
    "steep elu": lambda: nn.ELU(2.5),
    "sharp softplus": lambda: nn.Softplus(beta=4.0),
    "large beta": lambda: activations.ScaledSwish(5.0),
    "sigmoid": nn.Sigmoid,
    "relu6": nn.ReLU6,
    "hardtanh": lambda: nn.Hardtanh(-0.5, 2.0),
    "hardswish": nn.Hardswish,
    "selu": nn.SELU,
    "celu": lambda: nn.CELU(0.4),
    "mish": nn.Mish,
    "softsign": nn.Softsign,
    "log sigmoid": nn.LogSigmoid,
    "gelu tanh": lambda: nn.GELU(approximate="tanh"),
    "prelu": nn.PReLU,
    "steep prelu": lambda: nn.PReLU(1, 2.5),
    "dropout": lambda: nn.Dropout().eval(),
}


@pytest.mark.parametrize("name", MODULES)
def test_slope_never_exceeds_the_constant_and_comes_close(name):
    module = MODULES[name]().double()
    x = torch.linspace(-30, 30, 600_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(module(x).sum(), x)
    constant = activations.facts(module).lipschitz
    assert float(slope.abs().max()) <= constant
    assert float(slope.abs().max()) > 0.999 * constant


@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=40, deadline=None)
@given(low=st.floats(-50, 50), width=st.floats(0, 20))
def test_interval_encloses_the_image(name, low, width):
    module = MODULES[name]().double()
    box = Box(low, low + width, shape=(1,))
    image = activations.facts(module).enclose(box)
    values = module(torch.linspace(low, low + width, 1001, dtype=torch.float64)).detach()
    assert float(image.low) <= float(values.min())
    assert float(values.max()) <= float(image.high)
    assert float(image.high - image.low) <= float(values.max() - values.min()) + 1e-4 * (1 + width)  # and is tight


@pytest.mark.parametrize("name", MODULES)
def test_unbounded_intervals_stay_sound(name):
    module = MODULES[name]().double()
    for low, high in ((-torch.inf, torch.inf), (-torch.inf, 0.0), (0.0, torch.inf)):
        image = activations.facts(module).enclose(Box(low, high, shape=(1,)))
        values = module(torch.linspace(max(low, -60.0), min(high, 60.0), 999, dtype=torch.float64)).detach()
        assert float(image.low) <= float(values.min())
        assert float(values.max()) <= float(image.high)


def test_unknown_names_and_modules():
    with pytest.raises(InputError, match=r"activation='cube' is not known. Choose one of: relu"):
        activations.make("cube")
    assert activations.facts(nn.Softmax()) is None
    assert activations.facts(nn.LeakyReLU(-1.0)) is None
    assert activations.facts(nn.CELU(-1.0)) is None
