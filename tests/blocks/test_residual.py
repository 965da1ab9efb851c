import contextlib
import math

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bilip import Box, Chain, Invert, blocks, models
from bilip._torch import half_digits
from bilip.blocks import Residual, inverting, residual
from bilip.errors import InputError, NotAContraction, NotConverged
from bilip.nets import MLP, ConvNet, Declared
from bilip.nets.certify import float64_copy
from bilip.nets.spectral import held_layers, held_together
from bilip.testing import search_gains
from catalogue import saved_bytes


def make(seed=0, size=4, c=0.9, loud=10.0, **options):
    """A residual block whose layers really use up their coefficients."""
    torch.manual_seed(seed)
    net = MLP(size, size, hidden=(32, 32), activation="elu", lipschitz=c)
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim == 2:
                p.mul_(loud)
    return Residual(net, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["anderson", "plain"])
def test_stated_bound_is_never_below_the_true_error(dtype, method):
    """4,000 inverses for each dtype and method, at tolerances from useless to the best there is."""
    below = 0
    for seed in range(5):
        block = make(seed, c=(0.5, 0.9, 0.99)[seed % 3]).to(dtype).eval()
        y = 3 * torch.randn(200, 4, dtype=dtype)
        exact = Residual(Declared(float64_copy(block.g), lipschitz=block.contraction()), max_evaluations=20_000).eval()
        reference = exact.solve(y.double(), tolerance=1e-14, method="plain")
        assert float(reference.residual.max()) < 1e-14
        for tolerance in (1.0, 1e-2, 1e-4, None):
            solution = block.solve(y, tolerance=tolerance, method=method)
            error = (solution.x.double() - reference.x).norm(dim=1)
            below += int((error > solution.error_bound + 1e-14 / (1 - block.contraction())).sum())
            if tolerance is not None:
                assert bool((error <= tolerance).all())
            assert bool(solution.converged.all())
    assert below == 0


def test_a_float64_copy_can_be_inverted():
    """Its held layers keep the weight that acts and are held to nothing, so that their coefficients say nothing about c."""
    block = make(1, c=0.9).eval()
    copied, y = float64_copy(Chain(block)), torch.randn(5, 4)
    exact, solution = copied.inverse(y.double()), block.solve(y)
    assert bool(((solution.x.double() - exact).norm(dim=1) <= solution.error_bound).all())
    assert copied.bounds().inverse <= block.bounds().inverse * (1 + 1e-12)


def test_the_bound_holds_for_points_that_are_no_iterates():
    """The residual form holds anywhere; the step-difference form |x_k - x_{k-1}| c / (1 - c) fails for "
    "accelerated iterates."""
    block = make(1, c=0.95).double().eval()
    y = torch.randn(500, 4, dtype=torch.float64)
    exact = block.solve(y)
    anywhere = exact.x + torch.randn_like(exact.x) * torch.logspace(-8, 1, 500, dtype=torch.float64)[:, None]
    with torch.no_grad():
        residual = (y - block(anywhere)).norm(dim=1)
    assert bool(((anywhere - exact.x).norm(dim=1) <= residual / (1 - block.contraction()) + 1e-12).all())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_round_trips_at_the_tolerance_asked_for(dtype, tolerance):
    block = make(2, tolerance=tolerance).to(dtype).eval()
    x = torch.randn(500, 4, dtype=dtype)
    with torch.no_grad():
        error = (block.inverse(block(x)).double() - x.double()).norm(dim=1)
    # The forward pass rounds too; the inverse may magnify that by 1 / (1 - c).
    assert float(error.max()) <= tolerance + 10 * torch.finfo(dtype).eps * 10 / (1 - 0.9)


@pytest.mark.parametrize("method", ["anderson", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_tolerance_little_is_left_but_rounding(dtype, method):
    """So that the errors of a hundred blocks add up to a hundred roundings."""

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            random = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
            self.q = nn.Parameter(torch.linalg.qr(random)[0].to(dtype))

        def forward(self, x):
            return 0.9 * torch.tanh(x @ self.q.T) @ self.q

    block = Residual(Declared(Slow(), lipschitz=0.9001)).eval()
    y = 0.3 * torch.randn(500, 16, dtype=dtype, generator=torch.Generator().manual_seed(1))
    solution = block.solve(y, method=method)
    assert float((solution.residual / (1 + y.double().norm(dim=1))).max()) <= 4 * torch.finfo(dtype).eps
    assert int(solution.evaluations.max()) < (40 if method == "anderson" else 400)  # and no stall


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 30, 3000])
def test_large_biases_do_not_make_the_usual_tolerance_unreachable(dtype, size):
    """g then loses more to rounding than z has in its last digits, and the inverse is as good as the dtype allows all the same."""
    torch.manual_seed(0)
    net = MLP(8, 8, hidden=(256, 256), lipschitz=0.9, activation="elu")
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "bias" in name:
                p.copy_(size * torch.randn_like(p))
    block, y = Residual(net).to(dtype).eval(), torch.randn(300, 8).to(dtype)
    solution = block.solve(y)
    assert bool(solution.converged.all())
    assert float((solution.residual / (1 + solution.x.double().norm(dim=1))).max()) <= half_digits(dtype)
    block.max_evaluations = 3
    if dtype in (torch.float32, torch.float64):  # three evaluations may be all that half precision can use
        assert not bool(block.solve(y).converged.all())


def test_status_for_each_sample_and_an_error_with_the_residual():
    block = make(3, c=0.99, max_evaluations=3).eval()
    y = torch.cat((torch.zeros(1, 4) + 1e-12, 5 * torch.randn(7, 4)))
    solution = block.solve(y)
    assert solution.converged.shape == (8,)
    assert not bool(solution.converged.all())
    with pytest.raises(NotConverged, match=r"inverses missed their tolerance; worst is sample \d+, residual") as caught:
        block.inverse(y)
    assert caught.value.solution.residual.shape == (8,)


def test_tolerances_below_the_reach_of_the_dtype():
    block = make().eval()
    with pytest.raises(InputError, match=r"is below what torch.float32 can give"):
        block.solve(100 * torch.ones(2, 4), tolerance=1e-9)
    hard = make(c=0.999).eval()
    solution = hard.solve(torch.randn(50, 4), tolerance=2e-7)  # representable, but rounding times 1 / (1 - c) is larger
    assert not bool(solution.converged.all())
    assert bool((solution.error_bound < 1e-2).all())


@pytest.mark.parametrize("bad", [0.0, 1.0, 1.2, -0.1])
def test_coefficients_outside_the_unit_interval(bad):
    with pytest.raises(InputError, match=r"constant in \(0, 1\)"):
        models.residual_flow(2, coefficient=bad)
    if bad >= 1:
        with pytest.raises(NotAContraction, match="invertible for a constant below 1"):
            Residual(MLP(2, 2, lipschitz=bad))


def test_branches_that_are_no_certified_contraction():
    with pytest.raises(NotAContraction, match="Build g from held layers"):
        Residual(
            nn.Sequential(nn.Linear(2, 2), nn.Flatten(), nn.Linear(2, 2))
            .requires_grad_(False)
            .apply(lambda m: m.weight.data.fill_(3) if hasattr(m, "weight") else None)
        )
    small = nn.Linear(2, 2)
    small.weight.data.fill_(0.1)
    block = Residual(small)
    assert block.contraction() == pytest.approx(0.2)
    small.weight.data.fill_(10.0)  # not held: training may break it, and the inverse notices
    with pytest.raises(NotAContraction):
        block.inverse(torch.ones(1, 2))


def test_implicit_gradients_equal_unrolled_ones():
    block = make(4, c=0.8).double()
    y = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64)
    parameters = list(block.parameters())
    implicit = torch.autograd.grad((block.inverse(y) * weight).sum(), [y, *parameters])
    unrolled = torch.autograd.grad((block.unrolled_inverse(y, 200) * weight).sum(), [y, *parameters])
    for a, b in zip(implicit, unrolled, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-8)


def test_implicit_gradients_of_a_chain_in_training_are_those_of_the_weights_that_act():
    """Between certificates a chain holds its weights by a bound that is up to a hundredth larger: the gradient is taken there as well."""
    torch.manual_seed(0)
    chain = Chain(*(make(4, c=0.8).double() for _ in range(2))).train()
    layers, y = held_layers(chain), torch.randn(6, 4, dtype=torch.float64)
    with torch.no_grad():
        for p in chain.parameters():
            p.mul_(3)
    for _ in range(3):
        with held_together(layers):  # as `chain.inverse` does, so that both see the same
            implicit, unrolled = chain.inverse(y).sin().sum(), y
            for block in reversed(list(chain)):
                unrolled = block.unrolled_inverse(unrolled, 200)
        expected = torch.autograd.grad(unrolled.sin().sum(), list(chain.parameters()))
        torch.testing.assert_close(torch.autograd.grad(implicit, list(chain.parameters())), expected)
        with torch.no_grad():
            for p in chain.parameters():
                p.add_(1e-3 * p.norm() * torch.randn_like(p) / p.numel() ** 0.5)


def test_implicit_gradient_of_the_context():
    torch.manual_seed(0)
    block = Residual(MLP(2, 2, hidden=(16,), context=3, activation="tanh", lipschitz=0.8)).double()
    y = torch.randn(5, 2, dtype=torch.float64)
    context = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    (a,) = torch.autograd.grad(block.inverse(y, context).square().sum(), context)
    (b,) = torch.autograd.grad(block.unrolled_inverse(y, 200, context).square().sum(), context)
    assert torch.allclose(a, b, rtol=1e-8, atol=1e-8)


def test_memory_does_not_depend_on_the_number_of_iterations():
    block = make(5, c=0.99).double()
    y = torch.randn(256, 4, dtype=torch.float64, requires_grad=True)
    few = make(5, c=0.99, tolerance=1e-1).double()
    many = make(5, c=0.99, tolerance=1e-9).double()
    assert int(many.solve(y).evaluations.max()) > 2 * int(few.solve(y).evaluations.max())
    assert saved_bytes(lambda: many.inverse(y)) == saved_bytes(lambda: few.inverse(y))
    assert saved_bytes(lambda: block.unrolled_inverse(y, 40)) > 10 * saved_bytes(lambda: block.unrolled_inverse(y, 2))


def test_bounds_under_adversarial_search():
    for seed in range(4):
        for c in (0.5, 0.95):
            block = make(seed, c=c).double()
            gains = search_gains(block, Box(-3, 3, shape=(4,)), points=16, steps=15, seed=seed)
            bound = block.bounds()
            assert gains.forward <= bound.forward * (1 + 1e-9) <= (1 + c) * (1 + 1e-8)
            assert gains.inverse <= bound.inverse * (1 + 1e-9) <= 1 / (1 - c) * (1 + 1e-8)
            assert gains.forward > 1.02  # the search is not idle


def test_a_block_built_with_torchs_spectral_norm_breaks_the_bounds():
    """Normalised "to 0.9", its branch is no contraction: the gain of F exceeds 1 + c, and iterating for the "
    "inverse diverges."""
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 8, 3, padding=1, bias=False).double()
    nn.init.uniform_(conv.weight)
    conv = nn.utils.parametrizations.spectral_norm(conv, n_power_iterations=100).eval()

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = conv

        def forward(self, x):
            return 0.9 * self.conv(x)

    believed = Residual(Declared(Scaled(), lipschitz=0.9)).eval()  # what other libraries take for granted
    constant = torch.ones(1, 8, 12, 12, dtype=torch.float64)
    gain = float((believed(constant) - believed(0 * constant)).norm() / constant.norm())
    assert gain > 1 + 0.9
    assert not bool(believed.solve(constant).converged.all()) or not torch.allclose(
        believed(believed.solve(constant).x), constant
    )
    with pytest.raises(NotAContraction):
        Residual(conv)  # read layer by layer, the truth comes out
    held = Residual(ConvNet(8, 8, hidden=8, gain=False, lipschitz=0.9)).double().eval()
    assert bool(held.solve(constant).converged.all())


def test_training_keeps_the_certificate():
    torch.manual_seed(0)
    flow = models.residual_flow(2, blocks=3, hidden=(16,), coefficient=0.7)
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.05)
    for _ in range(30):
        x = torch.randn(64, 2) * torch.tensor([3.0, 0.1])
        z, log_det = flow.forward_and_log_det(x)
        optimizer.zero_grad()
        (0.5 * z.square().sum(1) - log_det).mean().backward()
        optimizer.step()
    assert flow.bounds().inverse <= 1 / (1 - 0.7) ** 3 * 1.0001
    x = torch.randn(64, 2)
    assert torch.allclose(flow.eval().inverse(flow(x)), x, atol=1e-4)


def test_image_flows():
    table = models.residual_flow(
        (3, 16, 16), blocks=(1, 1, 1, 1), hidden=8, squeeze_first=True, dense_blocks=2, dense_hidden=8, logit=0.05
    )
    x = torch.rand(4, 3, 16, 16)
    table.train()
    table(x)
    table.eval()
    with torch.no_grad():
        z = table(x)
        assert z.shape == (4, 768)
        assert torch.allclose(table.inverse(z), x, atol=1e-3)
    multi = models.residual_flow((3, 8, 8), blocks=(1, 1), hidden=8, factor_out=True, actnorm=False)
    z, log_det = multi.forward_and_log_det(torch.randn(2, 3, 8, 8))
    assert z.shape == (2, 192)
    assert log_det.shape == (2,)
    assert math.isfinite(multi.bounds().log_inverse)
    with pytest.raises(InputError, match="divisible by 8"):
        models.residual_flow((3, 12, 12), blocks=(1, 1, 1), squeeze_first=True)
    with pytest.raises(InputError, match="above 1"):
        models.residual_flow(2, blocks=2, activation="swish")


# ---- norms of a chain are computed together, and nothing else is


class Checkpointed(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)


def held_chain(count=3):
    torch.manual_seed(0)
    return Chain(*(Residual(MLP(2, 2, hidden=(8, 8), activation="elu", lipschitz=0.9)) for _ in range(count)))


def grads_of(chain, x):
    z, log_det = chain.forward_and_log_det(x)
    return torch.autograd.grad((z.square().sum(1) / 2 - log_det).mean(), list(chain.parameters()))


def test_together_as_one_by_one(monkeypatch):
    chain, x = held_chain().double(), torch.randn(5, 2, dtype=torch.float64)
    together = grads_of(chain, x)
    monkeypatch.setattr("bilip.blocks.chain.held_together", lambda layers: contextlib.nullcontext())
    for one, other in zip(together, grads_of(chain, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_nets_of_a_chain_can_be_checkpointed():
    chain, x = held_chain(), torch.randn(5, 2)
    expected = torch.autograd.grad(chain(x).square().sum(), list(chain.parameters()))
    for block in chain:
        block.g = Declared(Checkpointed(block.g), lipschitz=0.9)
    found = torch.autograd.grad(chain(x).square().sum(), list(chain.parameters()))
    torch.testing.assert_close(found, expected)


def test_each_block_has_a_graph_of_its_own():
    chain, x = held_chain(), torch.randn(5, 2)
    losses = []
    for block in chain:
        block.register_forward_hook(lambda module, given, output: losses.append(output.square().sum()))
        block.register_forward_pre_hook(lambda module, given: (given[0].detach(),))
    chain(x)
    for loss in losses:
        loss.backward()  # local losses, one after the other
    chain[0].requires_grad_(False)
    outputs = []
    chain[0].register_forward_hook(lambda module, given, output: outputs.append(output))
    chain(x)
    assert not outputs[0].requires_grad  # a frozen block stays out of the graph


def test_a_looser_tolerance_takes_fewer_evaluations_and_states_its_error():
    torch.manual_seed(0)
    flow = models.residual_flow((2, 8, 8), blocks=(2, 2), hidden=8, coefficient=0.9, factor_out=True, activation="elu")
    with torch.no_grad():
        for layer in held_layers(flow):
            layer.weight *= 20
    x = torch.randn(6, 2, 8, 8)
    flow(x)
    flow.eval()
    counts, errors = [], []
    with torch.no_grad():
        z = flow(x)
        before = flow.inverse(z)
        for tolerance in (1e-1, 1e-2, 1e-3):
            with inverting(flow, tolerance=tolerance) as solutions:
                found = flow.inverse(z)
            assert len(solutions) == 4
            assert all(bool((solution.error_bound <= tolerance).all()) for solution in solutions)
            counts.append(sum(int(solution.evaluations.max()) for solution in solutions))
            errors.append(float((found - x).flatten(1).norm(dim=1).max()))
        assert torch.equal(flow.inverse(z), before)  # as it was
    assert counts[0] < counts[1] < counts[2]
    assert errors[2] < 1e-2
    with pytest.raises(InputError, match="tolerance=0"), inverting(flow, tolerance=0):
        pass
    with pytest.raises(InputError, match="no Residual block"), inverting(nn.Linear(2, 2), tolerance=1e-2):
        pass


def test_where_an_expected_end_does_not_come_true_the_solve_goes_on(monkeypatch):
    """What is stated is what was found, and the tolerance is met."""

    class Offset(nn.Module):  # the first step is long, those after are short and slow
        def forward(self, x):
            return torch.cat((torch.ones_like(x[:, :1]), 0.95 * x[:, 1:]), 1)

    block = Residual(Declared(Offset(), lipschitz=0.95, error=1e-14)).eval().double()
    z = torch.tensor([[0.3, 0.01], [0.3, 1e-9], [-2.0, 0.02]], dtype=torch.float64)
    seen, original = [], residual.solve_fixed_point

    def noting(*args, **options):
        seen.append(options.get("start") is not None)
        return original(*args, **options)

    monkeypatch.setattr(residual, "solve_fixed_point", noting)
    exact = torch.stack((z[:, 0] - 1, z[:, 1] / 1.95), 1)
    for tolerance, count in ((1.0, 1), (1e-1, 2), (1e-3, 1)):
        seen.clear()
        solution = block.solve(z, tolerance=tolerance)
        assert len(seen) == count  # at the loosest it comes true, and at the tightest it is not expected so soon
        assert bool(solution.converged.all())
        assert bool(((solution.x - exact).norm(dim=1) <= solution.error_bound).all())
    assert int(solution.evaluations[1]) == 2


def launches(call):
    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += 1
            return function(*args, **(kwargs or {}))

    with Count() as count:
        call()
    return count.number


def test_an_easy_inverse_needs_little_besides_its_evaluations():
    """Bookkeeping for acceleration begins when plain steps were not enough; held weights are looked at once."""
    torch.manual_seed(0)
    block = Residual(ConvNet(2, 2, hidden=4, gain=False, activation="elu", lipschitz=0.9)).eval()
    with torch.no_grad():
        for layer in held_layers(block):
            layer.weight *= 0.1
        z = torch.randn(4, 2, 6, 6)
        block.solve(z)
        one = launches(lambda: block.branch(z))
        certificate = launches(lambda: block._residual(z, z, None))
        solution = block.solve(z, tolerance=1e-4)
        evaluations = int(solution.evaluations.max())
        assert evaluations <= 4
        assert launches(lambda: block.solve(z, tolerance=1e-4)) < certificate + evaluations * (one + 30) + 120


@pytest.mark.parametrize("training", [False, True])
def test_a_solve_is_the_same_in_training_mode_and_sees_changed_weights(training):
    block = make(7, c=0.9).train(training)
    y = torch.randn(9, 4)
    for scale in (1.0, -1.0, 3.0):
        with torch.no_grad():
            for layer in held_layers(block):
                layer.weight.data.mul_(scale)
        solution = block.solve(y)
        assert bool(solution.converged.all())
        with torch.no_grad():
            assert torch.allclose(block(solution.x), y, atol=1e-5)


@pytest.mark.numeric
def test_implicit_gradients_under_functional_call():
    torch.manual_seed(0)
    model = Invert(blocks.Residual(MLP(2, 2, lipschitz=0.9, activation="tanh")).double())
    z = torch.randn(3, 2, dtype=torch.float64)
    lent = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
    got = torch.autograd.grad(torch.func.functional_call(model, lent, (z,)).sum(), list(lent.values()))
    model.load_state_dict({name: p.detach() for name, p in lent.items()})
    wanted = torch.autograd.grad(model(z).sum(), list(model.parameters()))
    for a, b in zip(got, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-9)


@pytest.mark.numeric
def test_the_inverse_of_an_empty_batch():
    assert blocks.Residual(MLP(2, 2, lipschitz=0.8)).eval().inverse(torch.zeros(0, 2)).shape == (0, 2)


def test_inverse_with_weights_that_torch_caches():
    """`parametrize.cached` gives a copy of a layer the weights of the layer itself, in their dtype, and keeps them without their graph."""
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm
    layers = nn.Sequential(normed(nn.Linear(2, 8)), nn.Tanh(), normed(nn.Linear(8, 2)))
    with torch.no_grad():
        for layer in (layers[0], layers[2]):
            layer.parametrizations.weight.original0.mul_(0.3)
    block, z = Residual(Declared(layers, lipschitz=0.9)), torch.randn(5, 2)

    def gradients():
        block.zero_grad()
        x, log_det = block.inverse_and_log_det(z)
        (x.square().sum() + log_det.sum()).backward()
        return [p.grad.clone() for p in block.parameters() if p.grad is not None]

    expected = gradients()
    with nn.utils.parametrize.cached():
        found = gradients()
    assert len(found) == len(expected) == 6
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True))
