"""Activations and values in float64: constants, intervals, and how far a value is from the exact one."""

import ctypes
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bilip.blocks import Residual
from bilip.bounds import Box
from bilip.errors import InputError
from bilip.nets import MLP, Declared, HeldLinear, activations, point_image
from bilip.nets.activations import ScaledSwish
from bilip.nets.point import Point

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


def relu6(**limits):
    module = nn.ReLU6()
    vars(module).update(limits)
    return module


@pytest.mark.parametrize("limits", [{"max_val": 600.0}, {"min_val": -50.0}, {"min_val": 2.0, "max_val": 3.0}])
def test_relu6_acts_with_the_limits_it_has_now(limits):
    module = relu6(**limits)
    x = torch.linspace(-700, 700, 1401, dtype=torch.float64)[:, None]
    image = activations.facts(module).enclose(Box(-700, 700, shape=(1,)))
    assert float(image.low) <= float(module(x).min()) < float(module(x).max()) <= float(image.high)
    value, error = point_image(module, x)
    assert bool(((value - module(x)).norm(dim=1) <= error).all())


def test_relu6_with_limits_that_do_not_fit_is_not_known():
    assert activations.facts(relu6(max_val=-1.0)) is None
    assert activations.facts(relu6(min_val=math.nan)) is None


# ---- values in float64 and how far they are from the exact ones: measured against 60 digits


F64 = torch.float64


def _swish(x, beta=1):
    return x / (1 + mpmath.exp(-beta * x))


def _softplus(x, beta=1):
    scaled = beta * x
    return (max(scaled, mpmath.mpf(0)) + mpmath.log1p(mpmath.exp(-abs(scaled)))) / beta


def _celu(x, alpha):
    return x if x > 0 else alpha * mpmath.expm1(x / alpha)


def _selu(x):
    alpha, scale = mpmath.mpf("1.6732632423543772848170429916717"), mpmath.mpf("1.0507009873554804934193349852946")
    return scale * (x if x > 0 else alpha * mpmath.expm1(x))


def _gelu_tanh(x):
    inner = mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)
    return x / (1 + mpmath.exp(-2 * inner))


EXACT = {
    "identity": (nn.Identity, lambda x: x),
    "relu": (nn.ReLU, lambda x: max(x, 0)),
    "relu6": (nn.ReLU6, lambda x: min(max(x, 0), 6)),
    "leaky": (lambda: nn.LeakyReLU(0.3), lambda x: x if x > 0 else mpmath.mpf(0.3) * x),
    "prelu": (lambda: nn.PReLU(1, -0.7), lambda x: x if x > 0 else mpmath.mpf(float(torch.tensor(-0.7))) * x),
    "elu": (lambda: nn.ELU(1.7), lambda x: x if x > 0 else mpmath.mpf(1.7) * mpmath.expm1(x)),
    "selu": (nn.SELU, _selu),
    "celu": (lambda: nn.CELU(0.4), lambda x: _celu(x, mpmath.mpf(0.4))),
    "flat celu": (lambda: nn.CELU(1e200), lambda x: _celu(x, mpmath.mpf(1e200))),
    "flattest celu": (lambda: nn.CELU(1.7e308), lambda x: _celu(x, mpmath.mpf(1.7e308))),
    "steep celu": (lambda: nn.CELU(1e-200), lambda x: _celu(x, mpmath.mpf(1e-200))),
    "tanh": (nn.Tanh, mpmath.tanh),
    "hardtanh": (lambda: nn.Hardtanh(-2.0, 0.7), lambda x: min(max(x, -2), mpmath.mpf(0.7))),
    "sigmoid": (nn.Sigmoid, lambda x: 1 / (1 + mpmath.exp(-x))),
    "logsigmoid": (nn.LogSigmoid, lambda x: -_softplus(-x)),
    "softsign": (nn.Softsign, lambda x: x / (1 + abs(x))),
    "softplus": (nn.Softplus, _softplus),
    "sharp softplus": (lambda: nn.Softplus(7.0, 15.0), lambda x: _softplus(x, 7)),
    "steep softplus": (lambda: nn.Softplus(1e8, 40.0), lambda x: _softplus(x, mpmath.mpf(1e8))),
    "steepest softplus": (lambda: nn.Softplus(1e300, 40.0), lambda x: _softplus(x, mpmath.mpf(1e300))),
    "flat softplus": (lambda: nn.Softplus(1e-3, 40.0), lambda x: _softplus(x, mpmath.mpf(1e-3))),
    "swish": (nn.SiLU, _swish),
    "hardswish": (nn.Hardswish, lambda x: x * min(max(x + 3, 0), 6) / 6),
    "mish": (nn.Mish, lambda x: x * mpmath.tanh(_softplus(x))),
    "gelu": (nn.GELU, lambda x: x * mpmath.ncdf(x) if abs(x) < 1e3 else max(x, 0)),
    "gelu tanh": (lambda: nn.GELU(approximate="tanh"), _gelu_tanh),
    "scaled swish": (
        lambda: ScaledSwish(0.5),
        lambda x: _swish(x, _softplus(mpmath.mpf(0.5))) / mpmath.mpf(1.1),
    ),
    # above 20 torch's softplus is the identity by default
    "steep scaled swish": (
        lambda: ScaledSwish(20.125),
        lambda x: _swish(x, _softplus(mpmath.mpf(20.125))) / mpmath.mpf(1.1),
    ),
    "dropout": (lambda: nn.Dropout().eval(), lambda x: x),
}


def _grid():
    sizes = [10.0**k for k in (-310, -200, -30, -9, -5, -3)] + [0.01, 0.1, 0.5, 1, 1.5, 2, 3, 5, 8, 14, 19.9, 20.1, 30]
    sizes += [37, 50, 99, 300, 745, 1e4, 1e6, 1e9, 1e60, 1e150, 1e300, 1.7e308]
    return torch.tensor([s * side for s in sizes for side in (1.0, -1.0)] + [0.0], dtype=F64)


def test_every_known_activation_is_measured():
    assert {type(make()) for make, _ in EXACT.values()} >= {
        kind for kind in activations.KNOWN if "Dropout" not in kind.__name__
    }


@pytest.mark.parametrize("name", EXACT)
def test_a_value_is_as_near_as_it_says(name):
    make, exact = EXACT[name]
    x = _grid()
    known = activations.facts(make())
    found = known.point(Point(x[:, None], torch.zeros(len(x), dtype=F64)))
    values, errors = found.value, found.error
    with mpmath.workdps(60):
        for v, value, error in zip(x.tolist(), values[:, 0].tolist(), errors.tolist(), strict=True):
            true = exact(mpmath.mpf(v))
            assert abs(mpmath.mpf(value) - true) <= error, f"{name}({v})"
            # and no farther off than rounding is, but where torch leaves softplus for the identity or takes 1/6 in float32
            loose = math.exp(-15) * 1e3 if "softplus" in name and v > 0 else 4.1e-8 * abs(true) * (name == "hardswish")
            assert error <= 1e-14 * (abs(true) + abs(v)) + 1e-299 + loose


@pytest.mark.parametrize("name", EXACT)
def test_an_interval_of_one_point_holds_the_value_at_any_magnitude(name):
    make, exact = EXACT[name]
    x = _grid()
    found = activations.facts(make()).enclose(Box(x, x))
    with mpmath.workdps(60):
        for v, low, high in zip(x.tolist(), found.low.tolist(), found.high.tolist(), strict=True):
            assert -math.inf < low <= exact(mpmath.mpf(v)) <= high < math.inf, f"{name}({v})"


@pytest.mark.parametrize("name", EXACT)
def test_an_error_of_the_input_is_carried_on(name):
    known = activations.facts(EXACT[name][0]())
    x = torch.linspace(-6, 6, 97, dtype=F64)[:, None]
    moved = x + 0.01
    far = (known.value(moved) - known.value(x)).abs()[:, 0]
    assert bool((far <= known.point(Point(x, torch.full((97,), 0.01 + 1e-15, dtype=F64))).error).all())


@pytest.mark.parametrize("weight", [1e-170, 1e-30, 1.0, 1e30, 1e170])
@pytest.mark.parametrize("size", [1e-170, 1.0, 1e130])
def test_a_linear_layer_is_as_near_as_it_says_at_any_size(weight, size):
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(3, 2).double()
    layer.weight.data = weight * torch.randn(2, 3, generator=generator, dtype=F64)
    x = size * torch.randn(8, 3, generator=generator, dtype=F64)
    values, errors = point_image(layer, x)
    with mpmath.workdps(60):
        w, b = layer.weight.tolist(), layer.bias.tolist()
        for row, value, error in zip(x.tolist(), values.tolist(), errors.tolist(), strict=True):
            true = [
                sum(mpmath.mpf(p) * mpmath.mpf(q) for p, q in zip(line, row, strict=True)) + mpmath.mpf(c)
                for line, c in zip(w, b, strict=True)
            ]
            gap = mpmath.sqrt(sum((mpmath.mpf(v) - t) ** 2 for v, t in zip(value, true, strict=True)))
            assert gap <= error
            assert error <= 1e-13 * (weight * size + 1) + 1e-290 or math.isinf(error)


@pytest.mark.parametrize("name", [name for name in EXACT if name not in ("identity", "dropout")])
def test_the_error_bound_of_an_inverse_is_true(name):
    """Against a solution in 30 digits, for a net whose constant is 0.9 times that of its activation over its own."""
    make, exact = EXACT[name]
    act = make()
    known = activations.facts(act)
    first, last = nn.Linear(1, 1), nn.Linear(1, 1)
    with torch.no_grad():
        first.weight.fill_(0.9 / known.lipschitz)
        first.bias.fill_(0.3)
        last.weight.fill_(-0.9)
        last.bias.fill_(0.1)
    block = Residual(nn.Sequential(first, act, last).double()).eval()
    z = torch.tensor([-40.0, -3.0, -0.729, -1e-3, 0.0, 0.2, 1.0, 2.5, 17.0, 60.0, 300.0], dtype=F64)[:, None]
    rough = block.solve(z, tolerance=1e-6 * 300)
    fine = block.solve(z)
    assert bool(fine.converged.all())
    w1, b1, w2, b2 = (mpmath.mpf(float(p)) for p in (first.weight, first.bias, last.weight, last.bias))
    with mpmath.workdps(30):
        for k, target in enumerate(z[:, 0].tolist()):
            x = mpmath.mpf(float(fine.x[k]))
            for _ in range(180):
                x = mpmath.mpf(target) - (w2 * exact(w1 * x + b1) + b2)
            for found in (rough, fine):
                assert abs(mpmath.mpf(float(found.x[k])) - x) <= float(found.error_bound[k]), f"{name} at {target}"


@pytest.mark.parametrize(
    "activation", ["relu", "leaky_relu", "elu", "tanh", "softplus", "swish", "scaled_swish", "gelu"]
)
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_inverses_of_nets_with_every_activation_converge(activation, dtype):
    block = Residual(MLP(2, 2, hidden=(16,), activation=activation, lipschitz=0.9)).to(dtype).eval()
    z = torch.cat((torch.randn(8, 2, dtype=dtype), 80 * torch.randn(8, 2, dtype=dtype)))
    back = block(block.inverse(z).detach())
    assert torch.allclose(back, z, rtol=0, atol=500 * torch.finfo(dtype).eps * float(z.abs().max()))


def test_softplus_above_its_threshold_is_charged_for_the_jump():
    act = nn.Softplus()
    value, error = point_image(act, torch.tensor([[19.0], [25.0]], dtype=F64))
    assert float(error[0]) < 1e-13 < 2e-9 < float(error[1]) < 3e-9
    assert float((value - act(torch.tensor([[19.0], [25.0]], dtype=F64))).abs().max()) <= float(error[1])
    block = Residual(nn.Sequential(HeldLinear(2, 4, coefficient=0.9), act, HeldLinear(4, 2, coefficient=0.9)).double())
    assert block.eval().inverse(torch.full((1, 2), 500.0, dtype=F64)).shape == (1, 2)


class Coarse(nn.Module):
    """sin(3.1 x) / 6.2 with fewer digits than it is given, on the way in, or everywhere."""

    def __init__(self, inside, only_in):
        super().__init__()
        self.inside, self.only_in = inside, only_in

    def forward(self, x):
        given = x.to(self.inside).to(x.dtype) if self.only_in else x.to(self.inside)
        return (0.5 * torch.sin(given * 3.1) / 3.1).to(x.dtype)


class Clamped(nn.Module):
    def forward(self, x):
        return 0.5 * x.clamp(-1, 1)


@pytest.mark.parametrize("only_in", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("inside", [torch.bfloat16, torch.float16, torch.float32])
def test_a_declared_net_is_charged_for_the_digits_in_which_it_computes(inside, dtype, only_in):
    block = Residual(Declared(Coarse(inside, only_in), lipschitz=0.5))
    z = torch.linspace(-50, 50, 401, dtype=F64)[:, None].to(dtype) + 0.0123
    solution = block.solve(z)
    x = solution.x.double()
    for _ in range(100):
        x = z.double() - 0.5 * torch.sin(x * 3.1) / 3.1
    errors = (solution.x.double() - x).abs()[:, 0]
    assert (errors <= solution.error_bound).all()
    if inside == torch.float32:
        assert bool(solution.converged.all())
        assert float(errors.max()) > 1e-8  # so the charge is not for nothing


def test_a_declared_net_with_all_digits_is_charged_for_no_fewer():
    z = torch.linspace(-50, 50, 401, dtype=F64)[:, None]
    exact = Residual(Declared(Coarse(F64, only_in=False), lipschitz=0.5))
    flat = Residual(Declared(Clamped(), lipschitz=0.5))  # constant for most of them
    assert exact.solve(z).error_bound.max() < 1e-11
    assert flat.solve(z).error_bound.max() < 1e-11


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sin(x.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


def in_a_buffer(x):
    y = torch.empty(x.shape)
    y.copy_(x)
    return y.sin_().to(x.dtype)


def in_a_function(x):
    return Own.apply(x)


class Scripted(nn.Module):
    def forward(self, x):
        return torch.sin(x.float()).double()


@torch.library.custom_op("bilip_tests::sine", mutates_args=())
def registered(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x.float()).double()


def by_its_address(x):
    x = x.contiguous()
    numbers = (ctypes.c_double * x.numel()).from_address(x.data_ptr())
    return torch.from_numpy(np.sin(np.array(numbers, dtype=np.float32)).astype(np.float64)).view_as(x)


def from_its_memory(x):
    numbers = np.frombuffer(bytes(x.contiguous().untyped_storage()))
    return torch.from_numpy(np.sin(numbers.astype(np.float32)).astype(np.float64)).view_as(x)


SINES = {
    "registered": lambda x: registered(x),
    "by its address": by_its_address,
    "from its memory": from_its_memory,
    "its bits": lambda x: torch.sin((x.view(torch.int64) & -(1 << 30)).view(torch.float64)),
    "float32": lambda x: torch.sin(x.float()).to(x.dtype),
    "only in": lambda x: torch.sin(x.float().to(x.dtype)),
    "only out": lambda x: torch.sin(x).float().to(x.dtype),
    "a buffer": in_a_buffer,
    "a function of its own": in_a_function,
    "scripted": torch.jit.script(Scripted()),
    "numpy": lambda x: torch.from_numpy(np.sin(x.numpy().astype(np.float32)).astype(np.float64)),
    "an array": lambda x: torch.from_numpy(np.sin(np.asarray(x, dtype=np.float32)).astype(np.float64)),
    "a list": lambda x: torch.tensor([[math.sin(row[0])] for row in x.tolist()]).double(),
    "numbers": lambda x: torch.tensor([[math.sin(row[0].item())] for row in x]).double(),
}


class BesideASkip(nn.Module):
    """x / 10 + sin(x) / 2 with a skip in float64, which every step of the input moves."""

    def __init__(self, sine):
        super().__init__()
        self.sine = sine

    def forward(self, x):
        return 0.1 * x + 0.5 * self.sine(x)


class States(BesideASkip):
    def log_lipschitz(self, shape=None, outputs=None):
        return math.log(0.6) + 1e-15


@pytest.mark.parametrize("name", SINES)
@pytest.mark.parametrize("kind", [lambda sine: Declared(BesideASkip(sine), lipschitz=0.6), States])
def test_a_part_in_fewer_digits_is_charged_beside_a_skip_in_float64(kind, name):
    block = Residual(kind(SINES[name]))
    z = torch.linspace(-5, 5, 201, dtype=F64)[:, None] + 0.0123
    with torch.no_grad():
        solution = block.solve(z)
    x = solution.x
    for _ in range(100):
        x = z - (0.1 * x + 0.5 * torch.sin(x))
    errors = (solution.x - x).abs()[:, 0]
    assert bool((errors <= solution.error_bound).all())
    assert bool(solution.converged.all())
    assert float(errors.max()) > 1e-9  # so the charge is not for nothing


class Harmless(nn.Module):
    """Constants, masks and buffers in float32 that no digit of the input passes through."""

    def __init__(self):
        super().__init__()
        self.half = torch.tensor([0.5])

    def forward(self, x):
        zeros = torch.zeros(x.shape)
        zeros = zeros.masked_fill(x.isnan(), 2.0)[:]
        kept = torch.where(x.isnan(), torch.tensor(1.0), x) * torch.where(x > 0, 1.0, 1.0) * (x < math.inf).float()
        return self.half * torch.sin(kept) + zeros


def test_constants_and_masks_in_fewer_digits_are_not_charged():
    z = torch.linspace(-5, 5, 41, dtype=F64)[:, None]
    assert Residual(Declared(Harmless(), lipschitz=0.5)).solve(z).error_bound.max() < 1e-13


@pytest.mark.parametrize(
    ("module", "exact", "low", "high"),
    [
        (nn.Softplus(5.0, 100.0), lambda x: mpmath.log1p(mpmath.exp(5 * x)) / 5, -6.90459075772892, math.inf),
        (
            nn.GELU(approximate="tanh"),
            lambda x: x / (1 + mpmath.exp(-mpmath.sqrt(8 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
            -math.inf,
            -4.343464542718084,
        ),
    ],
    ids=["softplus", "gelu tanh"],
)
def test_a_finite_end_is_rounded_outward_beside_an_infinite_one(module, exact, low, high):
    ends = (torch.tensor([end], dtype=torch.float64) for end in (low, high))
    image = activations.facts(module).enclose(Box(*ends))
    with mpmath.workdps(50):
        value = exact(mpmath.mpf(low if math.isinf(high) else high))
        assert float(image.low) <= value <= float(image.high)
