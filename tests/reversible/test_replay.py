"""What a call has drawn, kept or moved on (random numbers, modes, buffers as those of spectral norm) is the same in its backward pass."""

import copy

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from bilip import Chain, blocks, models, nets
from bilip.errors import DriftError
from bilip.reversible import Reversible, angle


class Drifting(nn.Module):
    """A net with a buffer of its own that moves on: in place, or by taking a new tensor."""

    def __init__(self, inputs, outputs, how):
        super().__init__()
        self.linear, self.how = nn.Linear(inputs, outputs), how
        self.register_buffer("turn", torch.tensor(0.3))

    def forward(self, x):
        y = self.linear(x).tanh() * (1 + self.turn.clone())
        if self.how == "in place":
            self.turn.mul_(-0.9)
        else:
            self.turn = -0.9 * self.turn
        return y


def new_style(inputs, outputs):
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(inputs, 32)), nn.ELU(), norm(nn.Linear(32, outputs)))


def old_style(inputs, outputs):
    norm = nn.utils.spectral_norm
    return nn.Sequential(norm(nn.Linear(inputs, 32)), nn.ELU(), norm(nn.Linear(32, outputs)))


NETS = {
    "parametrization": new_style,
    "hook": old_style,
    "in place": lambda i, o: Drifting(i, o, "in place"),
    "taken anew": lambda i, o: Drifting(i, o, "taken anew"),
}


def chain(kind, shared=False):
    torch.manual_seed(0)
    nets = [NETS[kind](2, 4)] * 5 if shared else [NETS[kind](2, 4) for _ in range(5)]
    parts = [blocks.AffineCoupling(net, partition=blocks.Split(swap=k % 2 == 1)) for k, net in enumerate(nets)]
    return Chain(*parts, shape=(4,)).double().train()


def loss_of(f, x):
    z, log_det = f.forward_and_log_det(x)
    return z.square().sum() - log_det.sum() + f.inverse(z + 0.1).sin().sum()


@pytest.mark.parametrize("options", [{}, {"memory": "checkpoint"}], ids=["reversible", "checkpoint"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("kind", NETS)
def test_every_step_as_in_a_stored_run(kind, shared, options):
    stored, saved = chain(kind, shared), chain(kind, shared)
    saving, x = Reversible(saved, **options), torch.randn(16, 4, dtype=torch.float64)
    for _ in range(3):  # two calls before each backward pass, one of them the inverse
        found = []
        for model, f in ((stored, stored), (saved, saving)):
            found.append(torch.autograd.grad(loss_of(f, x), list(model.parameters())))
            assert model.training
        assert angle(*found) < 1e-7
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(stored.buffers(), saved.buffers(), strict=True))
    assert saving.report().repaired == 0


@pytest.mark.parametrize("kind", NETS)
def test_second_derivatives(kind):
    model, found = chain(kind), []
    x = torch.randn(8, 4, dtype=torch.float64)
    for wrap in (lambda m: m, Reversible):
        own = copy.deepcopy(model)
        y = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss_of(wrap(own), y), y, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [y, *own.parameters()], allow_unused=True))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("memory", ["reversible", "checkpoint"])
def test_statistics_of_instance_norms_advance_once(memory):
    """Unlike BatchNorm, InstanceNorm updates its statistics in training mode whatever it is told: the backward pass would do so again."""

    def net():
        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Linear(2, 16), nn.Unflatten(1, (4, 4)), norm, nn.Flatten(), nn.ELU(), nn.Linear(16, 4))

    def made():
        torch.manual_seed(0)
        parts = [blocks.AffineCoupling(net(), partition=blocks.Split(swap=k % 2 == 1)) for k in range(4)]
        return Chain(*parts, shape=(4,)).double().train()

    stored, saving, x = made(), made(), torch.randn(16, 4, dtype=torch.float64)
    wrapped = Reversible(saving, memory=memory)
    for _ in range(3):
        for model, f in ((stored, stored), (saving, wrapped)):
            model.zero_grad()
            z, log_det = f.forward_and_log_det(x)
            (z.square().sum() - log_det.sum()).backward()
        a, b = ([p.grad for p in model.parameters()] for model in (saving, stored))
        assert angle(a, b) < 1e-8
        assert all(torch.allclose(u, v) for u, v in zip(saving.buffers(), stored.buffers(), strict=True))


def gradients(model, wrapped, x, *, seed=7, between=lambda: None, log_det=False):
    model.zero_grad()
    torch.manual_seed(seed)
    z, log = wrapped.forward_and_log_det(x)
    between()
    (log.sum() if log_det else z.square().sum() - log.sum()).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def stacked(net, depth=4):
    parts = [p for _ in range(depth) for p in (blocks.AffineCoupling(net()), blocks.Permutation.reverse(4))]
    return Chain(*parts, shape=(4,))


def residual(log_det):
    net = nets.MLP(4, 4, activation="elu", lipschitz=0.8)
    return Chain(*(blocks.Residual(net, log_det=log_det) for _ in range(2)), shape=(4,)).double()


@pytest.mark.numeric
@pytest.mark.parametrize("log_det", [blocks.Series(), blocks.Roulette()], ids=["series", "roulette"])
@pytest.mark.parametrize("memory", ["reversible", "checkpoint"])
def test_estimated_log_dets_are_drawn_once(log_det, memory):
    model, x = residual(log_det).train(), torch.randn(8, 4, dtype=torch.float64)
    stored = gradients(model, model, x, log_det=True)
    assert angle(stored, gradients(model, Reversible(model, memory=memory), x, log_det=True)) < 1e-6


class Undeclared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 16), nn.Linear(16, 4)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.b(functional.dropout(torch.relu(self.a(x)), 0.5))


@pytest.mark.numeric
def test_undeclared_dropout_is_noticed():
    model, x = stacked(Undeclared).double(), torch.randn(32, 4, dtype=torch.float64)
    assert angle(gradients(model, model, x), gradients(model, Reversible(model), x)) < 1e-6


@pytest.mark.numeric
def test_the_mode_of_the_call_counts():
    def net():
        made = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
        nn.init.zeros_(made[-1].weight)
        return made

    model, x = stacked(net).double(), torch.randn(32, 4, dtype=torch.float64)
    stored = gradients(model.train(), model, x, between=model.eval)
    found = gradients(model.train(), Reversible(model), x, between=model.eval)
    assert angle(stored, found) < 1e-6
    assert not model.training


@pytest.mark.numeric
def test_a_frozen_parameter_changed_in_place_is_noticed():
    model = models.real_nvp(4, blocks=2)
    frozen = next(model.parameters()).requires_grad_(False)
    loss = Reversible(model)(torch.randn(3, 4)).sum()
    frozen.mul_(1.003)
    with pytest.raises(DriftError, match="changed in place"):
        loss.backward()


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4))
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, x):
        return self.net(self.temperature * x)


@pytest.mark.numeric
@pytest.mark.parametrize("place", [0, 4])
def test_a_buffer_replaced_by_another_is_noticed(place):
    """In the first block too, whose input is known, so that no drift tells; after the first call nothing else does."""
    model, x = stacked(Tempered), torch.randn(32, 4)
    saving, net = Reversible(model), model[place].t

    def replace():
        net.temperature = 3 * net.temperature

    gradients(model, saving, x)
    with pytest.raises(DriftError, match=f"'blocks.{place}.t.temperature' was replaced"):
        gradients(model, saving, x, between=replace)
    with pytest.raises(DriftError, match="was replaced"):  # lent for one call
        buffers = {f"bijection.blocks.{place}.t.temperature": torch.tensor(2.0)}
        torch.func.functional_call(saving, buffers, (x,)).sum().backward()
    assert angle(gradients(model, model, x), gradients(model, saving, x)) < 1e-4


@pytest.mark.numeric
@pytest.mark.parametrize("memory", ["reversible", "checkpoint"])
@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_weights_that_torch_caches_get_their_gradient(normed, memory):
    """What `parametrize.cached` keeps of a pass without a graph has none."""

    def net():
        return nn.Sequential(normed(nn.Linear(2, 8)), nn.Tanh(), normed(nn.Linear(8, 4)))

    model, x = stacked(net).double(), torch.randn(32, 4, dtype=torch.float64)
    saving, stored = Reversible(model, memory=memory), gradients(model, model, x)
    for _ in range(2):
        with nn.utils.parametrize.cached():
            assert angle(stored, gradients(model, saving, x)) < 1e-8
    with nn.utils.parametrize.cached():
        y = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(saving(y).square().sum(), y, create_graph=True)
        first.square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in model[0].t.parameters() if p.ndim > 1)
