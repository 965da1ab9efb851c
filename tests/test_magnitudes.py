"""Proofs at the ends of the range of floating point: nothing that is stated is lost to overflow or underflow."""

import copy
import math

import pytest
import torch
from torch import nn

from bilip import Box, blocks
from bilip.adapters._proofs import AtanExpScale
from bilip.blocks.fixed_point import solve_fixed_point
from bilip.bounds import BiLipschitz, exp_down, exp_up, norms
from bilip.errors import InputError, PartitionError
from bilip.nets import MLP, Declared, HeldConv2d, HeldLinear, conv_norm, enclose, matrix_norm, power_lower_bound
from bilip.nets.norms import gram_bounds, smallest_singular_value

mpmath = pytest.importorskip("mpmath")
D = torch.float64


def linear_residual(factor=0.9, size=2, dtype=D):
    """x + factor x."""
    layer = nn.Linear(size, size, bias=False).to(dtype)
    layer.weight.data = factor * torch.eye(size, dtype=dtype)
    return blocks.Residual(layer).eval()


# ---- numbers


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e-30, 1.0, 1e150, 1e200, 1e307])
def test_norms_of_samples_of_any_size(size):
    x = torch.tensor([[3.0, 4.0], [0.6, -0.8], [0.0, 1.0], [0.0, 0.0]], dtype=D) * size
    with mpmath.workdps(50):
        for row, found in zip(x.tolist(), norms(x).tolist(), strict=True):
            true = mpmath.sqrt(sum(mpmath.mpf(v) ** 2 for v in row))
            assert true * (1 - mpmath.mpf(2) ** -60) <= found <= true * (1 + 1e-14) + 1e-323
    assert norms(x)[-1] == 0
    lost = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [1.7e308, 1.7e308]], dtype=D)
    assert norms(lost).tolist() == [math.inf] * 3
    assert norms(torch.zeros(2, 0, dtype=D)).tolist() == [0.0, 0.0]


def test_a_positive_constant_is_not_rounded_to_zero():
    bound = BiLipschitz(log_forward=-800.0, log_inverse=800.0)
    assert bound.forward > 0
    assert bound.inverse == math.inf
    assert bound.forward_lower == 0
    assert exp_up(-math.inf) == 0
    for log in (-744.0, -708.5, -1e-3, 0.0, 1.0, 700.0, 709.0):
        assert exp_down(log) <= mpmath.exp(log) <= exp_up(log)


# ---- norms of matrices


@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-200, 1.0, 1e200, 1e307])
def test_norms_of_matrices_of_any_size(size):
    """Against a decomposition in 40 digits; Gram iteration too, for which log(1e307) used to cost the last digits."""
    torch.manual_seed(0)
    with mpmath.workdps(40):
        for shape in ((1, 1), (2, 2), (3, 5)):
            weight = (torch.rand(*shape, dtype=D) + 0.5) * size
            values = mpmath.svd_r(mpmath.matrix(weight.tolist()), compute_uv=False)
            top, bottom = max(values), min(values)
            assert top <= matrix_norm(weight) <= top * (1 + 1e-12) + 1e-323
            assert smallest_singular_value(weight) <= bottom
            assert top <= gram_bounds(weight[None])[0].item()
            kernel = weight[..., None, None].expand(*shape, 2, 2)
            assert top <= conv_norm(kernel)  # one tap alone has this norm
            assert gram_bounds(weight[None], slopes=True)[1].isfinite().all()


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1.0, 1e170, 1e300])
def test_a_lower_bound_by_power_iteration_stays_below(size):
    layer = nn.Linear(3, 3, bias=False).double()
    layer.weight.data = size * torch.diag(torch.tensor([3.0, 0.5, 0.1], dtype=D))
    assert 2.99 * size <= power_lower_bound(layer, (3,)) <= matrix_norm(layer.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("coefficient", [0.999, 1e-3])
def test_held_layers_hold_up_to_the_ends_of_their_dtype(dtype, coefficient):
    kind = torch.finfo(dtype)
    for size in (kind.max, kind.max / 1000, 1.0, kind.tiny, 3 * kind.tiny * kind.eps):
        torch.manual_seed(0)
        linear = HeldLinear(6, 5, coefficient=coefficient, bias=False).to(dtype)
        linear.weight.data = (torch.rand(5, 6, dtype=D) * 2 - 1).mul(size).to(dtype)
        conv = HeldConv2d(3, 4, 3, coefficient=coefficient, bias=False).to(dtype)
        conv.weight.data = (torch.rand(4, 3, 3, 3, dtype=D) * 2 - 1).mul(size).to(dtype)
        assert matrix_norm(linear.held_weight()) <= coefficient
        assert conv_norm(conv.held_weight()) <= coefficient
        if size >= 1:
            assert matrix_norm(linear.held_weight()) >= 0.9 * coefficient  # and not by falling to zero
        for layer in (linear, conv):
            (grad,) = torch.autograd.grad(layer.held_weight().double().square().sum(), layer.weight)
            assert grad.isfinite().all()


def test_a_held_layer_is_one_to_one_where_it_says_so():
    g = HeldLinear(2, 2, coefficient=0.999, bias=False).half()
    g.weight.data.fill_(-49920.0)
    block = blocks.Residual(g).eval()
    z = block(torch.tensor([[1.0, 1.0], [7.0, 7.0]]).half())
    assert not torch.equal(z[0], z[1])


def test_a_coefficient_below_the_spacing_of_a_dtype_is_refused():
    layer = HeldLinear(8, 8, coefficient=1e-7).half()
    with pytest.raises(InputError, match=r"too small for a weight of shape \(8, 8\) in torch.float16"):
        layer(torch.zeros(1, 8).half())


# ---- residual blocks


@pytest.mark.parametrize("size", [1e-320, 1e-300, 1e-170, 1e-150, 1.0, 1e150, 1e155, 1e300, 1.2e308])
def test_the_error_of_an_inverse_is_stated_at_any_magnitude(size):
    block = linear_residual()
    z = torch.full((1, 2), size, dtype=D)
    solution = block.solve(z)
    with mpmath.workdps(40):
        weight = mpmath.mpf(block.g.weight[0, 0].item())
        true = mpmath.mpf(size) / (1 + weight)
        error = mpmath.sqrt(2) * abs(mpmath.mpf(solution.x[0, 0].item()) - true)
    assert error <= solution.error_bound.item() < math.inf
    assert bool(solution.converged)
    assert solution.error_bound.item() <= 1e-12 * (1 + size)


def test_a_bound_that_is_not_finite_never_converges():
    infinite = torch.tensor([math.inf], dtype=D)
    finite = torch.tensor([1.0], dtype=D)
    for tolerance in (finite, infinite):
        assert not bool(blocks.residual.Solution(finite, finite, infinite, tolerance, finite).converged)


@pytest.mark.parametrize("tolerance", [None, 1e-6])
def test_right_hand_sides_that_are_not_finite_do_not_converge(tolerance):
    z = torch.tensor([[math.nan, 1.0], [math.inf, 1.0], [0.5, 1.0]], dtype=D)
    solution = linear_residual().solve(z, tolerance=tolerance)
    assert solution.converged.tolist() == [False, False, True]
    assert solution.error_bound[:2].tolist() == [math.inf, math.inf]


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_fixed_points_of_tiny_and_huge_numbers(size):
    """Also accelerated: the Gram matrix of Anderson's method would underflow or overflow."""
    torch.manual_seed(0)
    q = 0.97 * torch.linalg.qr(torch.randn(6, 6, dtype=D))[0]
    y = torch.randn(3, 6, dtype=D) * size
    found = solve_fixed_point(lambda x, rows: x @ q, y, norms(y) * 1e-14)
    exact = y @ torch.linalg.inv(torch.eye(6, dtype=D) + q)
    assert bool((norms(found.x - exact) <= 1e-12 * norms(y)).all())
    assert int(found.evaluations.max()) < 100  # plain iteration takes a thousand


def test_implicit_gradients_of_any_size():
    block = linear_residual()
    for size in (1e-200, 1.0, 1e200):
        z = torch.ones(1, 2, dtype=D, requires_grad=True)
        (grad,) = torch.autograd.grad(block.inverse(z), z, torch.full((1, 2), size, dtype=D))
        assert torch.allclose(grad / size, torch.full((1, 2), 1 / 1.9, dtype=D), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inverses_over_their_whole_range(dtype):
    block = linear_residual(0.5, 8, dtype)
    top = torch.finfo(dtype).max
    z = torch.full((4, 8), 1.0) * torch.tensor([1e-3, 1.0, top / 100, top / 1.6])[:, None]
    solution = block.solve(z.to(dtype))
    error = norms(solution.x.double() - z.to(dtype).double() / 1.5)
    assert bool((error <= solution.error_bound).all())
    assert bool(solution.converged.all())


def test_a_residual_block_on_huge_latent_boxes():
    block = linear_residual()
    for size in (1e-300, 1e200, 1e290):
        box = block.enclose_inverse(Box(-size, size, shape=(2,)))
        assert box.contains(torch.full((1, 2), size / 1.9, dtype=D)).all()
        assert box.is_bounded


# ---- linear blocks


def exact_svd(*factors):
    product = mpmath.eye(factors[0].rows)
    for factor in factors:
        product = product * factor
    return sorted(mpmath.svd_r(product, compute_uv=False))


def plu(lower, upper, log_diagonal, sign=(1.0, -1.0)):
    block = blocks.InvertibleConv1x1(2, kind="plu").double()
    with torch.no_grad():
        block.lower.zero_()
        block.upper.zero_()
        block.lower[1, 0], block.upper[0, 1] = lower, upper
        block.log_diagonal.copy_(torch.tensor(log_diagonal, dtype=D))
        block.sign.copy_(torch.tensor(sign))
        block.permutation.copy_(torch.tensor([0, 1]))
    return block


@pytest.mark.parametrize("lower", [1.2345678901234567e15, 1e8, 3.0, 1e-9])
def test_products_of_triangular_factors_are_rounded_outward(lower):
    """L U cancels: only what the factors say is left of its smallest singular value."""
    block = plu(lower, 1.1, [-math.log(lower), math.log(1.1 * lower)])
    with mpmath.workdps(60):
        a, b = (mpmath.exp(mpmath.mpf(v)) for v in block.log_diagonal.tolist())
        values = exact_svd(
            mpmath.matrix([[1, 0], [mpmath.mpf(lower), 1]]), mpmath.matrix([[a, mpmath.mpf(1.1)], [0, -b]])
        )
        bound = block.bounds()
        assert values[-1] <= bound.forward
        assert 1 / values[0] <= bound.inverse < math.inf
        box = block.interval(Box(0.3, 0.3, shape=(2,)))
        image = mpmath.mpf(0.3) * (mpmath.mpf(lower) * (a + mpmath.mpf(1.1)) - b)
        assert box.low[1].item() <= image <= box.high[1].item()


def test_float32_factors_are_rounded_outward():
    for seed in range(20):
        torch.manual_seed(seed)
        block = blocks.InvertibleConv1x1(3, kind="plu")
        with torch.no_grad():
            for p in block.parameters():
                p.add_(torch.randn_like(p))
        with mpmath.workdps(40):
            lower = mpmath.matrix((block.lower.detach().double().tril(-1) + torch.eye(3, dtype=D)).tolist())
            upper = mpmath.matrix(block.upper.detach().double().triu(1).tolist())
            for k in range(3):
                upper[k, k] = mpmath.mpf(block.sign[k].item()) * mpmath.exp(mpmath.mpf(block.log_diagonal[k].item()))
            values = exact_svd(lower, upper)
            assert values[-1] <= block.bounds().forward <= values[-1] * (1 + 1e-10)
            assert 1 / values[0] <= block.bounds().inverse <= 1 / values[0] * (1 + 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_an_orthogonal_matrix_is_one_up_to_rounding_and_its_bounds_say_so(dtype):
    """The inverse multiplies with the transpose, whose norm is that of W and not 1 / sigma_min."""
    for seed in range(5):
        torch.manual_seed(seed)
        block = blocks.InvertibleConv1x1(8, kind="orthogonal").to(dtype).eval()
        values = torch.linalg.svdvals(block.matrix(D).detach())
        bound = block.bounds()
        assert max(1.0, float(values[0])) <= bound.forward
        assert max(float(values[0]), 1 / float(values[-1])) <= bound.inverse <= 1 + 16 * torch.finfo(dtype).eps + 1e-12
        box = Box(0.5, 1.0, shape=(8,))
        z = box.sample(4)
        assert block.enclose_inverse(box).contains(z @ block.matrix(D)).all()
        assert block.enclose_inverse(box).contains(torch.linalg.solve(block.matrix(D), z.mT).mT).all()
        exact = copy.deepcopy(block).double()  # without the rounding of the dtype
        assert block.enclose(box).contains(exact(z)).all()
        assert block.enclose_inverse(box).contains(exact.inverse(z)).all()


def test_what_is_not_a_permutation_has_no_bound():
    block = plu(0.5, 0.5, [0.0, 0.0])
    block.permutation.zero_()
    with pytest.raises(PartitionError, match="not a permutation"):
        block.bounds()
    mixed = blocks.Permutation.shuffle(4)
    mixed.order.fill_(1)
    with pytest.raises(PartitionError, match="not a permutation"):
        mixed.bounds()


def test_only_the_sign_of_a_loaded_sign_counts():
    block = blocks.DiagonalScaling(torch.ones(2))
    block.load_state_dict({"log_scale": torch.zeros(2), "sign": torch.tensor([3.0, -0.5])})
    assert torch.equal(block(torch.ones(1, 2)), torch.tensor([[1.0, -1.0]]))
    assert block.bounds().forward == pytest.approx(1.0)
    factors = plu(0.5, 0.5, [0.0, 0.0])
    before = factors.matrix()
    factors.sign.mul_(7)
    assert torch.equal(factors.matrix(), before)


@pytest.mark.parametrize("log_scale", [-800.0, -740.0, 740.0, 800.0])
def test_scales_beyond_float64(log_scale):
    """e^-800 is no number of float64, but times 1e290 it is not zero either."""
    scaling = blocks.DiagonalScaling(torch.ones(2, dtype=D))
    norm = blocks.ActNorm(2, start="identity").double()
    with torch.no_grad():
        scaling.log_scale.fill_(log_scale)
        norm.log_scale.fill_(log_scale)
    for block in (scaling, norm):
        for size in (1e-290, 1e290):
            box = Box(size, size, shape=(2,))
            for image, log in ((block.interval(box), log_scale), (block.interval_inverse(box), -log_scale)):
                true = mpmath.mpf(size) * mpmath.exp(mpmath.mpf(log))
                assert image.low[0].item() <= true
                assert image.high[0].item() >= true


def test_actnorm_refuses_a_batch_whose_squares_overflow():
    with pytest.raises(InputError, match="too large to square"):
        blocks.ActNorm(2).double()(torch.randn(4, 2, dtype=D) * 1e200)


# ---- functions of one number


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.4999, 0.49999999, math.nextafter(0.5, 0.0)])
def test_logit_encloses_its_inverse_image(alpha):
    block = blocks.Logit(alpha)
    ends = torch.cat((torch.linspace(-40, 40, 21, dtype=D), torch.logspace(-8, 0, 40, dtype=D)))
    boxes = block.interval_inverse(Box(ends, ends))
    with mpmath.workdps(50):
        exact = mpmath.mpf(block.alpha)
        for z, low, high in zip(ends.tolist(), boxes.low.tolist(), boxes.high.tolist(), strict=True):
            true = (1 / (1 + mpmath.exp(-mpmath.mpf(z))) - exact) / (1 - 2 * exact)
            assert low <= true <= high
            slope = mpmath.exp(-abs(mpmath.mpf(z))) / (1 + mpmath.exp(-abs(mpmath.mpf(z)))) ** 2 / (1 - 2 * exact)
            assert mpmath.log(slope) <= block.log_lip_inverse(Box(z, z, shape=(1,)))


def test_a_slope_too_small_for_float64_is_not_zero():
    assert blocks.Logit(0.05).log_lip_inverse(Box(800.0, 900.0, shape=(1,))) >= -801
    raw = torch.tensor([1e200], dtype=D)
    assert float(AtanExpScale(1.0).suprema(raw, 2 * raw).slope) == pytest.approx(math.pi / 2 - 2 * math.log(1e200))


@pytest.mark.parametrize(
    "scale", [blocks.SIGMOID, blocks.EXP, blocks.TanhExpScale(690.0)], ids=["sigmoid", "exp", "tanh"]
)
def test_scales_that_underflow_stay_positive(scale):
    """exp(-800) times 1e290 has to lie in the interval image."""
    t, s = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()
    for net, bias in ((t, 0.0), (s, -800.0)):
        net.weight.data.zero_()
        net.bias.data.fill_(bias)
    block = blocks.AffineCoupling(t, s, scale=scale)
    corner = torch.tensor([0.0, 1e290], dtype=D)
    image = block.interval(Box(corner, corner))
    shift = getattr(scale, "shift", 0.0)
    true = mpmath.mpf(1e290) * mpmath.exp(-690 if isinstance(scale, blocks.TanhExpScale) else -800 + shift)
    assert image.low[1].item() <= true <= image.high[1].item()


@pytest.mark.parametrize(("lip", "time"), [(0.99e-12, 3e12), (1e-320, 1e300), (0.0, 5.0), (1e-9, 1e9), (2.0, 1.0)])
def test_the_path_of_an_ode_is_enclosed_for_any_product_of_constant_and_time(lip, time):
    field = nn.Linear(2, 2).double()
    field.weight.data = torch.eye(2, dtype=D) * lip
    field.bias.data = torch.tensor([1.0 / time, 0.0], dtype=D)
    block = blocks.NeuralODE(field, time=time)
    with mpmath.workdps(40):
        rate, bias, t = mpmath.mpf(lip), mpmath.mpf(field.bias[0].item()), mpmath.mpf(time)
        end = bias * (mpmath.expm1(rate * t) / rate if rate else t)
        image = block.enclose(Box(0.0, 0.0, shape=(2,)))
        assert image.low[0].item() <= end <= image.high[0].item()
        assert rate * t <= block.bounds().log_forward


@pytest.mark.numeric
def test_infinite_boxes_have_infinite_inverse_constants():
    s = MLP(1, 1, hidden=()).double()
    s.layers[0].weight.data.fill_(1e-300)
    block = blocks.AffineCoupling(MLP(1, 1, hidden=()).double(), s, scale="half_sigmoid")
    assert block.log_lip_inverse(Box.everything((2,))) == math.inf


@pytest.mark.numeric
def test_the_bound_of_logit_near_its_edge():
    low = -0.7499999999999994
    bound = blocks.Logit(0.3).bounds(Box(low, 0.5, shape=(1,))).forward
    assert bound >= 2.0588e15


@pytest.mark.numeric
def test_boxes_beyond_the_range_of_float64():
    assert not enclose(Declared(nn.Identity(), lipschitz=1.0), Box(-1e306, 1e306, shape=(1,))).is_bounded
    field = nn.Linear(1, 1, bias=False).double()
    field.weight.data.fill_(720.0)
    assert not blocks.NeuralODE(field).enclose(Box.point(torch.tensor([1e-12], dtype=torch.float64))).is_bounded
