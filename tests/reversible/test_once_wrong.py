"""Ways in which a memory-saving gradient was once wrong without a word."""

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from bilip import Chain, blocks, models, nets
from bilip.errors import DriftError
from bilip.regularizers import FlowLikelihood
from bilip.reversible import Guard, Reversible, angle

pytestmark = pytest.mark.numeric


def grads(model, wrapped, x, *, seed=7, between=lambda: None, log_det=False):
    model.zero_grad()
    torch.manual_seed(seed)
    z, log = wrapped.forward_and_log_det(x)
    between()
    (log.sum() if log_det else z.square().sum() - log.sum()).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def chain(net, depth=4):
    parts = [p for _ in range(depth) for p in (blocks.AffineCoupling(net()), blocks.Permutation.reverse(4))]
    return Chain(*parts, shape=(4,))


def test_calls_made_while_resting_are_recomputed():
    torch.manual_seed(0)
    model = chain(lambda: nets.MLP(2, 4), 6)
    with torch.no_grad():
        for block in model:
            if isinstance(block, blocks.AffineCoupling):
                list(block.parameters())[-2].mul_(20)
    wrapped = Reversible(model, Guard(budget=0, spot_check=0))
    x = torch.randn(2, 16, 4)
    for _ in range(45):
        model.zero_grad()
        (wrapped(x[0]).square().sum() + wrapped(x[1]).square().sum()).backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        (model(x[0]).square().sum() + model(x[1]).square().sum()).backward()
        assert angle(found, [p.grad for p in model.parameters()]) < 1e-2


def residual(log_det):
    net = nets.MLP(4, 4, activation="elu", lipschitz=0.8)
    return Chain(*(blocks.Residual(net, log_det=log_det) for _ in range(2)), shape=(4,)).double()


@pytest.mark.parametrize("log_det", [blocks.Series(), blocks.Roulette()], ids=["series", "roulette"])
@pytest.mark.parametrize("memory", ["reversible", "checkpoint"])
def test_estimated_log_dets_are_drawn_once(log_det, memory):
    model, x = residual(log_det).train(), torch.randn(8, 4, dtype=torch.float64)
    stored = grads(model, model, x, log_det=True)
    assert angle(stored, grads(model, Reversible(model, memory=memory), x, log_det=True)) < 1e-6


class Undeclared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 16), nn.Linear(16, 4)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.b(functional.dropout(torch.relu(self.a(x)), 0.5))


def test_undeclared_dropout_is_noticed():
    model, x = chain(Undeclared).double(), torch.randn(32, 4, dtype=torch.float64)
    assert angle(grads(model, model, x), grads(model, Reversible(model), x)) < 1e-6


def test_the_mode_of_the_call_counts():
    def net():
        made = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
        nn.init.zeros_(made[-1].weight)
        return made

    model, x = chain(net).double(), torch.randn(32, 4, dtype=torch.float64)
    stored = grads(model.train(), model, x, between=model.eval)
    found = grads(model.train(), Reversible(model), x, between=model.eval)
    assert angle(stored, found) < 1e-6
    assert not model.training


def test_functional_call():
    model, x = models.real_nvp(4, blocks=2).double(), torch.randn(5, 4, dtype=torch.float64)
    wrapped = Reversible(model)
    for values in (
        {k: v.detach().clone().requires_grad_() for k, v in wrapped.named_parameters()},
        {k: nn.Parameter(1.001 * v.detach()) for k, v in wrapped.named_parameters()},
    ):
        loss = torch.func.functional_call(wrapped, values, (x,)).square().sum()
        try:
            loss.backward()
        except DriftError:
            continue
        assert all(v.grad is not None and v.grad.any() for v in values.values())


def test_an_outlier_hides_nobody():
    class Spike(nn.Module):
        def forward(self, a):
            return 3e6 * torch.relu(a - 3)

    torch.manual_seed(0)
    strong = blocks.AffineCoupling(nets.MLP(1, 2), scale=blocks.SigmoidScale(1e4, 1e4 + 1))
    model = Chain(strong, blocks.AdditiveCoupling(Spike()), blocks.AdditiveCoupling(nets.MLP(1, 1)), shape=(2,))
    x = torch.randn(16, 2)
    x[0, 0] = 4.0
    wrapped = Reversible(model, Guard(spot_check=0))
    stored, found = grads(model, model, x), grads(model, wrapped, x)
    assert angle(stored, found) < 1e-2 or wrapped.report().repaired


def test_a_frozen_parameter_changed_in_place_is_noticed():
    model = models.real_nvp(4, blocks=2)
    frozen = next(model.parameters()).requires_grad_(False)
    loss = Reversible(model)(torch.randn(3, 4)).sum()
    frozen.mul_(1.003)
    with pytest.raises(DriftError, match="changed in place"):
        loss.backward()


def test_hooks_keep_their_say():
    model = Chain(blocks.InvertibleConv1x1(4), blocks.AdditiveCoupling(nets.MLP(2, 2)), shape=(4,)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    model[0].register_forward_pre_hook(lambda module, given: (2 * given[0], *given[1:]))
    assert torch.allclose(Reversible(model)(x), model(x))


def test_an_empty_batch():
    assert Reversible(models.real_nvp(4))(torch.randn(0, 4)).shape == (0, 4)


def test_no_false_alarm_of_the_spot_check(recwarn):
    model = models.real_nvp(4, blocks=2).requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    (Reversible(model, Guard(spot_check=1))(x).sum() * 0).backward()
    assert not [w for w in recwarn if "spot check" in str(w.message)]


def test_anchors_keep_to_the_budget_for_any_batch():
    wrapped = Reversible(models.real_nvp(4, blocks=4), Guard(budget=4 * 4 * 4 * 3))
    watch = wrapped._watch
    watch.anchors = {(False, k): 64 for k in (1, 2, 3)}
    watch.names = {(False, k): str(k) for k in (1, 2, 3)}
    assert len(watch.places(False, 64)) == 3
    assert not watch.places(False, 4096 * 16)


def test_a_sample_left_out_of_a_penalty_reaches_no_gradient():
    model, x = models.real_nvp(4, blocks=2), torch.randn(6, 4)
    x[0, 0] = torch.inf
    with pytest.warns(UserWarning, match="NaN or Inf"):
        FlowLikelihood(1.0)(model, x, latent=model.forward_and_log_det(x), step=0).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# ---- states and gradients that are written in place


class Added(nn.Module):
    """A net with a parameter of the whole shape of its output: for one sample its gradient is the very one that comes in."""

    def __init__(self, channels, outputs):
        super().__init__()
        self.conv = nn.Conv2d(channels, outputs, 1)
        self.whole = nn.Parameter(torch.zeros(1, outputs, 4, 4))
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return self.conv(x) + self.whole


def mixed(kind):
    torch.manual_seed(0)
    parts = []
    for _ in range(4):
        coupling = blocks.AdditiveCoupling(Added(2, 2)) if kind == "additive" else blocks.AffineCoupling(Added(2, 4))
        parts += [blocks.ActNorm(4, start="identity"), blocks.InvertibleConv1x1(4), coupling]
    return Chain(*parts).double()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", ["additive", "affine"])
def test_a_gradient_that_is_handed_on_is_not_written_to(kind, inverse):
    model, x = mixed(kind), torch.randn(1, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    weights, found = torch.randn(1, 4, 4, 4, dtype=torch.float64), []
    for bijection in (model, Reversible(model)):
        z, log_det = (bijection.inverse_and_log_det if inverse else bijection.forward_and_log_det)(x)
        found.append(torch.autograd.grad((z * weights).sum() + log_det.sum(), [x, *model.parameters()]))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["additive", "affine"])
def test_what_nets_have_seen_stays_as_it_was(kind):
    model, x = mixed(kind), torch.randn(3, 4, 4, 4, dtype=torch.float64)
    model(x)
    nets = [part.t for part in model if hasattr(part, "t")]
    true = [net.seen.pop().clone() for net in nets]
    saving = Reversible(model)
    z = saving(x)
    z.sum().backward()
    for net, value in zip(nets, true, strict=True):
        assert len(net.seen) == 2  # on the way there and on the way back
        assert all(torch.allclose(seen.detach(), value, atol=1e-12) for seen in net.seen)


@pytest.mark.parametrize("kind", ["additive", "affine"])
@pytest.mark.parametrize("inverse", [False, True])
def test_anchors_are_not_written_to(kind, inverse):
    model, x = mixed(kind), torch.randn(3, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    saving = Reversible(model)
    run = (lambda b: b.inverse_and_log_det(x)) if inverse else (lambda b: b.forward_and_log_det(x))
    stored = torch.autograd.grad(run(model)[0].square().sum(), [x, *model.parameters()])
    for k in range(1, 8):  # ActNorm and convolution are one unit
        saving._watch.anchors, saving._watch.names = {(inverse, k): 0}, {(inverse, k): str(k)}
        z, _ = run(saving)
        first, again = (
            torch.autograd.grad(z.square().sum(), [x, *model.parameters()], retain_graph=True) for _ in range(2)
        )
        for a, b, c in zip(stored, first, again, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
            assert torch.equal(b, c)
