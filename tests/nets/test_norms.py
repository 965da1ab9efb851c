import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, svds
from torch import nn

from bilip.blocks import Residual
from bilip.errors import InputError, NonFiniteParameters
from bilip.nets import HeldConv2d, HeldLinear, conv_norm, gram_norm, matrix_norm, power_lower_bound, spectral
from bilip.nets.norms import gram_norms, smallest_singular_value
from catalogue import saved_bytes


def dense_norm(conv: nn.Module, shape: tuple[int, ...]) -> float:
    """The operator written out as a matrix, then an SVD; of a large one the largest value alone, to float64, by products with it."""
    size = torch.Size(shape).numel()
    point = torch.zeros(1, *shape, dtype=torch.float64, requires_grad=True)
    image = conv(point)  # its gradient is the adjoint, as the operator is linear
    if min(size, image.numel()) <= 512:
        rows = conv(torch.eye(size, dtype=torch.float64).view(size, *shape)).detach().flatten(1)
        return float(torch.linalg.matrix_norm(rows, ord=2))

    def act(v):
        return conv(torch.from_numpy(v).reshape(1, *shape)).detach().flatten().numpy()

    def adjoint(u):
        grad = torch.from_numpy(u).reshape(image.shape)
        return torch.autograd.grad(image, point, grad, retain_graph=True)[0].flatten().numpy()

    start = np.random.default_rng(0).random(min(size, image.numel()))
    operator = LinearOperator((image.numel(), size), matvec=act, rmatvec=adjoint, dtype=np.float64)
    return float(svds(operator, k=1, tol=0, v0=start, return_singular_vectors=False)[0])


def conv_with(weight: torch.Tensor, **options) -> nn.Conv2d:
    conv = nn.Conv2d(
        weight.shape[1] * options.get("groups", 1), weight.shape[0], weight.shape[2:], bias=False, **options
    ).double()
    conv.weight.data.copy_(weight)
    return conv


KERNELS = {
    "normal": lambda o, i, k: torch.randn(o, i, k, k, dtype=torch.float64),
    "positive": lambda o, i, k: torch.rand(o, i, k, k, dtype=torch.float64),
    "sparse": lambda o, i, k: torch.randn(o, i, k, k, dtype=torch.float64) * (torch.rand(o, i, k, k) < 0.3),
    "horizontal": lambda o, i, k: torch.randn(o, i, 1, k, dtype=torch.float64).expand(o, i, k, k).contiguous(),
}


SIZES = [(k, c) for k in KERNELS for c in [(1, 1), (3, 8), (16, 4), (8, 8)]] + [
    ("normal", (16, 16)),
    ("positive", (16, 16)),
]


@pytest.mark.parametrize(("kernel", "channels"), SIZES)
def test_zero_padded_norm_is_tight(kernel, channels):
    """Never below the dense operator, at most 1.05 above it: 3x3, stride 1, zero padding, 16x16 images."""
    weight = KERNELS[kernel](channels[1], channels[0], 3)
    true = dense_norm(conv_with(weight, padding=1), (channels[0], 16, 16))
    for method in ("svd", "gram"):
        assert true * (1 - 1e-12) <= conv_norm(weight, size=(16, 16), method=method) <= 1.05 * true


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    inputs=st.integers(1, 4),
    outputs=st.integers(1, 4),
    taps=st.sampled_from([1, 2, 3, 5]),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    padding=st.integers(0, 3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    known=st.booleans(),
    kernel=st.sampled_from(sorted(KERNELS)),
)
def test_never_below_the_dense_operator(
    seed, inputs, outputs, taps, height, width, padding, stride, dilation, known, kernel
):
    if min(height, width) + 2 * padding < dilation * (taps - 1) + 1:
        return
    torch.manual_seed(seed)
    weight = KERNELS[kernel](outputs, inputs, taps)
    conv = conv_with(weight, padding=padding, stride=stride, dilation=dilation)
    true = dense_norm(conv, (inputs, height, width))
    size = (height, width) if known else None
    assert conv_norm(weight, size=size, stride=stride, dilation=dilation) >= true * (1 - 1e-12)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    taps=st.sampled_from([1, 3, 5]),
    side=st.integers(3, 8),
    known=st.booleans(),
    stride=st.integers(1, 2),
)
def test_circular_padding(seed, taps, side, known, stride):
    torch.manual_seed(seed)
    weight = torch.randn(3, 2, taps, taps, dtype=torch.float64)
    conv = conv_with(weight, padding=taps // 2, padding_mode="circular", stride=stride)
    true = dense_norm(conv, (2, side, side))
    bound = conv_norm(weight, size=(side, side) if known else None, padding_mode="circular", stride=stride)
    assert bound >= true * (1 - 1e-12)
    if known and side % stride == 0:
        assert bound <= true * (1 + 1e-9)  # exact


def test_stride_two_argument_is_sharper_than_dropping_rows():
    weight = torch.rand(4, 4, 3, 3, dtype=torch.float64)
    true = dense_norm(conv_with(weight, padding=1, stride=2), (4, 16, 16))
    strided, dropped = conv_norm(weight, size=(16, 16), stride=2), conv_norm(weight, size=(16, 16))
    assert true <= strided <= 1.1 * true
    assert strided < 0.7 * dropped


def test_groups_and_one_dimension():
    weight = torch.randn(6, 2, 3, 3, dtype=torch.float64)
    true = dense_norm(conv_with(weight, padding=1, groups=3), (6, 8, 8))
    assert true <= conv_norm(weight, size=(8, 8), groups=3) <= 1.1 * true
    line = nn.Conv1d(2, 3, 3, padding=1, bias=False).double()
    assert dense_norm(line, (2, 20)) <= conv_norm(line.weight, size=(20,)) <= 1.05 * dense_norm(line, (2, 20))


@pytest.mark.parametrize("taps", [3, 5, 7])
def test_spectral_norm_of_torch_is_not_a_bound_for_convolutions(taps):
    """It flattens the kernel: the "normalised" convolution still stretches, several times for a positive kernel."""
    conv = nn.Conv2d(16, 16, taps, padding=taps // 2, bias=False).double()
    nn.init.uniform_(conv.weight)
    conv = nn.utils.parametrizations.spectral_norm(conv, n_power_iterations=200).eval()
    true = power_lower_bound(conv, (16, 32, 32), steps=8)
    assert true > 2.5
    assert conv_norm(conv.weight, size=(32, 32)) >= true
    held = HeldConv2d(16, 16, taps, coefficient=1.0, bias=False).double()
    held.weight.data.copy_(conv.weight.detach())
    assert power_lower_bound(held, (16, 32, 32), steps=8) <= 1.0


def test_power_iteration_is_only_a_lower_bound():
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False).double()
    few, many = power_lower_bound(layer, (64,), steps=2), power_lower_bound(layer, (64,), steps=500)
    assert few < many <= matrix_norm(layer.weight)


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)
@settings(max_examples=40, deadline=None)
def test_gram_iteration_bounds_from_above(seed, rows, columns, scale):
    torch.manual_seed(seed)
    matrices = scale * torch.randn(3, rows, columns, dtype=torch.complex128)
    true = float(torch.linalg.matrix_norm(matrices, ord=2).max())
    assert true <= float(gram_norm(matrices)) <= 1.01 * true
    assert true <= float(gram_norm(matrices, steps=2))


def test_gram_norm_gradient():
    matrix = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: gram_norm(a, steps=4), (matrix,))
    several = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: gram_norm(a, steps=4), (several,))  # of the largest
    assert torch.autograd.gradcheck(lambda a: gram_norms(a, steps=4), (several,))  # of each


def test_norms_taken_together_are_those_taken_one_by_one(monkeypatch):
    shapes = [(4, 6), (4, 6), (6, 4), (4, 6), (6, 4), (5, 5)]
    layers = [HeldLinear(a, b, coefficient=0.5 if k else 0.7) for k, (a, b) in enumerate(shapes)]
    with torch.no_grad():
        for k, layer in enumerate(layers):
            layer.weight *= 10.0 ** (k - 2)  # some are below their coefficient
    alone = [layer.held_weight() for layer in layers]
    for most in (2**22, 50, 1):  # all of a size at once, two at a time, one by one
        monkeypatch.setattr(spectral, "_MOST", most)
        with spectral.held_together(layers):
            found = [layer.held_weight() for layer in layers]
            table = spectral._TOGETHER.get()
            assert all(layer in table for layer in layers)
            with spectral.held_together(layers):  # a chain in a chain
                assert all(spectral._TOGETHER.get()[layer] is table[layer] for layer in table)
            other = torch.randn(6, 4)
            swapped = torch.func.functional_call(layers[1], {"weight": other, "bias": torch.zeros(6)}, torch.eye(4))
        for layer, one, each in zip(layers, found, alone, strict=True):
            torch.testing.assert_close(one, each, rtol=1e-6, atol=1e-7)
            assert matrix_norm(one) <= layer.coefficient
            grads = [torch.autograd.grad(w.square().sum(), layer.weight, retain_graph=True)[0] for w in (one, each)]
            torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
        assert matrix_norm(swapped) == pytest.approx(0.5, rel=1e-4)
        assert not torch.equal(swapped, found[1].T)
    assert not spectral._TOGETHER.get()


def test_what_is_taken_together_cannot_be_stale():
    layers = [HeldLinear(4, 4, coefficient=0.5) for _ in range(3)]
    with spectral.held_together(layers):
        with torch.no_grad():
            layers[0].weight.zero_()
        layers[1].coefficient = 0.1
        assert not layers[0].held_weight().any()
        assert matrix_norm(layers[1].held_weight()) <= 0.1


def test_forward_derivatives_of_norms():
    a, v = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    layer = HeldLinear(5, 4, coefficient=0.3).double()
    for f in (
        gram_norms,
        gram_norm,
        lambda a: torch.func.functional_call(layer, {"weight": a[0]}, torch.eye(5).double()),
    ):
        _, along = torch.func.jvp(f, (a,), (v,))
        expected = (f(a + 1e-6 * v) - f(a - 1e-6 * v)) / 2e-6
        torch.testing.assert_close(along, expected, rtol=1e-6, atol=1e-8)
        with torch.no_grad():
            torch.testing.assert_close(torch.func.jvp(f, (a,), (v,))[1], along)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    coefficient=st.floats(0.01, 5),
    size=st.floats(1e-3, 1e3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    stride=st.integers(1, 2),
)
def test_held_layers_stay_below_their_coefficient_as_certified(seed, coefficient, size, dtype, stride):
    torch.manual_seed(seed)
    linear = HeldLinear(5, 7, coefficient=coefficient).to(dtype)
    conv = HeldConv2d(3, 4, 3, coefficient=coefficient, stride=stride).to(dtype)
    with torch.no_grad():
        linear.weight.mul_(size)
        conv.weight.mul_(size)
    assert matrix_norm(linear.held_weight()) <= coefficient
    assert conv_norm(conv.held_weight(), stride=stride) <= coefficient
    assert conv_norm(conv.held_weight(), size=(8, 8), stride=stride) <= coefficient
    small = HeldLinear(5, 7, coefficient=coefficient).to(dtype)
    small.weight.data.mul_(0.5 * coefficient / matrix_norm(small.weight))
    assert torch.equal(small.held_weight(), small.weight)  # nothing is shrunk that need not be


def test_held_layers_stay_held_while_training():
    torch.manual_seed(0)
    net = nn.Sequential(HeldLinear(4, 16, coefficient=0.9), nn.ReLU(), HeldLinear(16, 4, coefficient=0.9))
    optimizer = torch.optim.SGD(net.parameters(), lr=5.0)
    for _ in range(20):
        x = torch.randn(32, 4)
        optimizer.zero_grad()
        (net(x) - 10 * x).square().mean().backward()
        optimizer.step()
        assert all(matrix_norm(layer.held_weight()) <= 0.9 for layer in (net[0], net[2]))
    assert matrix_norm(net[0].weight) > 1.0  # the raw weight did grow


def test_cached_weight_is_never_stale():
    layer = HeldLinear(4, 4, coefficient=0.5).eval()
    with torch.no_grad():
        first = layer.held_weight()
        assert layer.held_weight() is first
        layer.weight.data.mul_(-1)  # moves no version counter
        assert torch.equal(layer.held_weight(), -first)
    layer.train()
    with torch.no_grad():
        assert layer.held_weight() is not layer.held_weight()


def test_frozen_weights_are_cached_with_gradients_on():
    layer = HeldLinear(4, 4, coefficient=0.5).eval().requires_grad_(False)
    first, x = layer.held_weight(), torch.randn(3, 4, requires_grad=True)
    assert layer.held_weight() is first
    assert torch.equal(torch.autograd.grad(layer(x).sum(), x)[0][0], first.sum(0))
    layer.weight.mul_(-1)
    assert torch.equal(layer.held_weight(), -first)
    layer.requires_grad_(True)
    assert layer.held_weight().requires_grad
    tangent = torch.randn(4, 4)
    with torch.autograd.forward_ad.dual_level():
        layer.requires_grad_(False)
        dual = torch.autograd.forward_ad.make_dual(layer.weight.detach(), tangent)
        moved = torch.func.functional_call(layer, {"weight": dual}, (torch.eye(4),))
        assert torch.autograd.forward_ad.unpack_dual(moved).tangent is not None


def test_smallest_singular_value_of_a_singular_matrix_is_zero():
    assert smallest_singular_value(torch.ones(3, 3)) == 0.0


def test_bad_input():
    with pytest.raises(NonFiniteParameters, match="NaN or Inf"):
        matrix_norm(torch.tensor([[float("nan")]]))
    with pytest.raises(InputError, match="padding_mode='reflect'"):
        conv_norm(torch.ones(1, 1, 3, 3), padding_mode="reflect")
    with pytest.raises(InputError, match="method='magic'"):
        conv_norm(torch.ones(1, 1, 3, 3), method="magic")
    with pytest.raises(InputError, match="coefficient=0"):
        HeldLinear(2, 2, coefficient=0)


def test_a_held_convolution_keeps_little_for_its_backward_pass():
    """The frequencies and iterations of its norm are not among what autograd keeps."""
    layer = HeldConv2d(32, 32, 3, coefficient=0.5)
    assert saved_bytes(lambda: layer.held_weight().sum()) < 8 * layer.weight.numel() * layer.weight.element_size()


def test_a_zero_weight_has_finite_gradients():
    layer = HeldLinear(3, 3, coefficient=0.5)
    torch.nn.init.zeros_(layer.weight)
    layer(torch.ones(2, 3)).sum().backward()
    assert torch.isfinite(layer.weight.grad).all()


@pytest.mark.parametrize(("rows", "columns"), [(7, 5), (5, 7), (60, 50), (50, 60)])
@pytest.mark.parametrize("unit", [1e-200, 1.0, 1e200])
def test_gram_iteration_of_complex_matrices_is_that_of_their_real_form(rows, columns, unit):
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 2, rows, columns, generator=generator, dtype=torch.float64) * unit
    matrices = torch.complex(parts[:, 0], parts[:, 1])
    true = torch.linalg.matrix_norm(matrices / unit, ord=2)
    real = torch.cat((torch.cat((parts[:, 0], -parts[:, 1]), 2), torch.cat((parts[:, 1], parts[:, 0]), 2)), 1)
    for steps in (0, 3, 10):
        bound = gram_norms(matrices, steps) / unit
        assert bool((bound >= true * (1 - 1e-12)).all())
        assert bool((bound <= true * min(rows, columns) ** (0.5 / 2**steps) * (1 + 1e-9)).all())
    # Every singular value comes twice in the real form, so its bound is larger by that root of two.
    doubled = gram_norms(real, 10) / unit * 2 ** (-1 / 2**11)
    torch.testing.assert_close(gram_norms(matrices, 10) / unit, doubled, rtol=1e-9, atol=0)
    conjugate = matrices.mH  # a view, whose numbers are conjugated only when they are read
    torch.testing.assert_close(gram_norms(conjugate, 10), gram_norms(matrices, 10), rtol=1e-9, atol=0)


@pytest.mark.numeric
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


AUTOCAST = [torch.bfloat16, torch.float16]


def held_of_ones(kind, coefficient, size=3, dtype=torch.float32):
    layer = kind(size, size, *((1,) if kind is HeldConv2d else ()), coefficient=coefficient, bias=False).to(dtype)
    layer.weight.data.fill_(-1.0)
    return layer


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", AUTOCAST)
@pytest.mark.parametrize("coefficient", [0.9, 0.995, 0.999, 0.9995, 0.9999])
@pytest.mark.parametrize("kind", [HeldLinear, HeldConv2d])
def test_held_layers_hold_under_autocast(kind, coefficient, dtype, training):
    layer = held_of_ones(kind, coefficient).train(training)
    eye = torch.eye(3) if kind is HeldLinear else torch.eye(3)[..., None, None]  # no rounding: the weight that acts
    with torch.autocast("cpu", dtype):
        acting = layer(eye).detach().double().view(3, 3)
        other = layer(eye.to(dtype))  # as it comes from a layer that is not held
    assert float(torch.linalg.matrix_norm(acting, 2)) <= coefficient
    assert other.dtype == torch.float32
    assert torch.equal(other.detach().double().view(3, 3), acting)
    assert torch.equal(layer(eye).detach().double().view(3, 3), acting)


@pytest.mark.parametrize("dtype", AUTOCAST)
def test_an_inverse_under_autocast_keeps_its_bound(dtype):
    block = Residual(nn.Sequential(held_of_ones(HeldLinear, 0.9999, 4))).eval()
    one, other = torch.full((1, 4), 1.0), torch.full((1, 4), 7.0)
    with torch.no_grad(), torch.autocast("cpu", dtype):
        gain = float((other - one).norm() / (block(other) - block(one)).norm())
        assert gain <= block.bounds().inverse * (1 + 1e-2)  # what is left of 1 - 0.9999 in float32


def test_gradients_of_held_layers_under_autocast_are_those_outside():
    layer, x = held_of_ones(HeldConv2d, 0.9), torch.randn(2, 3, 4, 4)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    with torch.autocast("cpu", torch.bfloat16):
        value = layer(x)
    (found,) = torch.autograd.grad(value.square().sum(), layer.weight)
    assert torch.equal(found, expected)


def test_held_layers_act_on_any_device_and_compile_under_autocast():
    assert held_of_ones(HeldLinear, 0.9).to("meta")(torch.empty(2, 3, device="meta")).shape == (2, 3)
    layer, x = held_of_ones(HeldLinear, 0.9).eval().requires_grad_(False), torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))
