"""What nets, hooks and regions of torch do around a call: kept tensors, hooks on tensors, autocast, saved tensors, fast paths."""

import gc
import warnings

import pytest
import torch
from torch import nn

from bilip import Chain, blocks
from bilip.errors import DriftError
from bilip.nets import MLP
from bilip.reversible import Reversible
from bilip.reversible.guard import DriftWarning
from walks import gradient, off


class Kept(nn.Module):
    """A net that hands on what it has computed, as for a second loss."""

    def __init__(self, detached):
        super().__init__()
        self.inner, self.detached, self.kept = MLP(4, 8, activation="elu"), detached, None

    def forward(self, x):
        y = self.inner(x)
        self.kept = y.detach() if self.detached else y
        return y


class Hooked(nn.Module):
    """A net that changes the gradient of what it is given, as a scaling or clipping of gradients does."""

    def __init__(self, of_input=True):
        super().__init__()
        self.inner, self.of_input = MLP(4, 8, activation="elu"), of_input

    def forward(self, x):
        if not x.requires_grad:
            return self.inner(x)
        seen = x if self.of_input else 1 * x
        seen.register_hook(lambda grad: 0.5 * grad)
        return self.inner(seen)


class Padded(nn.Module):
    """A transformer over the features, some of which are padding."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.lift, self.down = nn.Linear(1, 8), nn.Linear(8, 2)
        self.inner = nn.TransformerEncoder(layer, 1)

    def forward(self, x):
        padding = torch.tensor([False, False, False, True]).expand(len(x), 4)
        return 0.3 * self.down(self.inner(self.lift(x.unsqueeze(2)), src_key_padding_mask=padding)).flatten(1)


def chain(net, depth=4, kind=blocks.AffineCoupling):
    torch.manual_seed(0)
    return Chain(*(kind(net(), partition=blocks.Split(swap=k % 2 == 1)) for k in range(depth)), shape=(8,))


@pytest.mark.parametrize("memory", ["reversible", "checkpoint"])
def test_a_net_that_keeps_what_it_computes_is_told(memory):
    x = torch.randn(16, 8)
    with pytest.warns(DriftWarning, match=r"block 0 \(and 3 more\) keeps a tensor .* trains nothing"):
        Reversible(chain(lambda: Kept(detached=False)), memory=memory)(x)


def test_a_hook_that_keeps_what_a_block_computes_is_told():
    model, kept = chain(lambda: MLP(4, 8)), []
    model[2].register_forward_hook(lambda module, given, out: kept.append(out))
    with pytest.warns(DriftWarning, match="block 2 keeps"):
        Reversible(model)(torch.randn(16, 8))


@pytest.mark.parametrize("around", ["nothing", "hooks for saved tensors"])
def test_what_is_detached_or_freed_is_not(around):
    model, x = chain(lambda: Kept(detached=True)), torch.randn(16, 8)
    keeps = torch.autograd.graph.save_on_cpu() if around != "nothing" else torch.enable_grad()
    gc.collect()
    with warnings.catch_warnings(), keeps:
        warnings.simplefilter("error")
        Reversible(model)(x)


@pytest.mark.parametrize("of_input", [True, False])
@pytest.mark.parametrize("kind", [blocks.AffineCoupling, "generic"])
def test_hooks_that_nets_put_on_tensors_act(kind, of_input):
    class Own(blocks.AffineCoupling):
        """Not read by the walk: inverted, then evaluated again."""

    model = chain(lambda: Hooked(of_input), kind=Own if kind == "generic" else kind).double()
    saving, x = Reversible(model), torch.randn(16, 8, dtype=torch.float64)
    for _ in range(2):
        assert off(gradient(saving, model, x), gradient(model, model, x)) < 1e-6


def test_a_hook_that_moves_a_buffer_is_replayed():
    """On a net of bilip's, added when the first call has been made."""
    models = [chain(lambda: MLP(4, 8, activation="elu")).double() for _ in range(2)]
    saving, x = Reversible(models[1]), torch.randn(16, 8, dtype=torch.float64)
    saving(x).sum().backward()
    for model in models:
        net = model[0].t
        net.register_buffer("mean", torch.ones((), dtype=torch.float64))

        def moved(module, given, out):
            module.mean.mul_(0.9).add_(0.1 * out.detach().square().mean())
            return out / (1 + module.mean.clone())

        net.register_forward_hook(moved)
    for _ in range(3):
        assert off(gradient(saving, models[1], x), gradient(models[0], models[0], x)) < 1e-6
        assert torch.equal(models[0][0].t.mean, models[1][0].t.mean)


def test_transformers_take_the_same_way_with_and_without_gradients():
    model = chain(Padded, kind=lambda net, **options: blocks.AffineCoupling(net, **options)).eval()
    saving, x = Reversible(model), torch.randn(16, 8)
    outputs = model(x)
    for _ in range(3):
        assert torch.allclose(saving(x), outputs, rtol=1e-4, atol=1e-5)
        assert off(gradient(saving, model, x), gradient(model, model, x)) < 1e-3
    assert torch.backends.mha.get_fastpath_enabled()


def test_nets_are_not_told_of_a_graph_that_is_not_there():
    """Tensors without a graph do not ask for gradients, so that no hook can be put on them."""
    model = chain(lambda: Hooked(of_input=False))
    saving = Reversible(model)
    for _ in range(2):
        x = torch.randn(16, 8, requires_grad=True)
        saving(x).square().sum().backward()


def test_a_region_of_autocast_shares_no_weights_with_a_call():
    """A cast that is made without gradients and then used by a plain call of the same region would have none."""
    model, x = chain(lambda: MLP(4, 8, activation="elu")), torch.randn(16, 8)
    seen = []
    model[1].t.register_forward_pre_hook(lambda *given: seen.append(torch.is_autocast_cache_enabled()))

    def loss(f):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = f(x)
            return z.float().square().mean() + model(x + 1).float().abs().mean()

    saving = Reversible(model)
    for _ in range(2):
        found = []
        for f in (saving, model):
            model.zero_grad()
            loss(f).backward()
            found.append([p.grad.clone() for p in model.parameters()])
        assert off(*found) < 2e-2
    seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        saving(x).float().sum().backward()
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("step", [1e-3, 1e-1])
def test_parameters_that_change_before_the_backward_pass_are_noticed_under_hooks(step):
    """Autograd does not look where hooks save: a residual flow stores its inputs, so that no walk sees it either."""
    model, x = chain(lambda: MLP(4, 8, activation="elu")), torch.randn(16, 8)
    saving = Reversible(model)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        loss = saving(x).square().sum()
    with torch.no_grad():
        next(model.parameters()).add_(step)
    with pytest.raises(DriftError, match="changed in place between the call and its backward pass"):
        loss.backward()
