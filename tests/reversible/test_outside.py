"""Tensors that blocks use without owning them get their gradient, or a sentence says why not."""

import copy
import pickle

import pytest
import torch
from torch import nn

import bilip
from bilip import Chain, blocks
from bilip.errors import DriftError
from bilip.nets import MLP
from bilip.reversible import Guard, Reversible, angle


class Gated(nn.Module):
    """A net times a gate that is not registered with it."""

    def __init__(self, inputs, outputs, gate):
        super().__init__()
        self.net, self.gate = MLP(inputs, outputs, activation="elu"), [gate]

    def forward(self, x):
        return self.net(x) if self.gate[0] is None else self.net(x) * self.gate[0]


def gated(gate, depth=4, kind=blocks.AffineCoupling):
    torch.manual_seed(0)
    outputs = 4 if kind is blocks.AdditiveCoupling else 8
    return Chain(
        *(kind(Gated(4, outputs, gate), partition=blocks.Split(swap=k % 2 == 1)) for k in range(depth)), shape=(8,)
    ).double()


def loss_of(f, x, inverse):
    z, log_det = f.inverse_and_log_det(x) if inverse else f.forward_and_log_det(x)
    return z.square().sum() - log_det.sum()


@pytest.mark.parametrize("options", [{}, {"guard": None}, {"memory": "checkpoint"}, {"guard": Guard(spot_check=1)}])
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_a_shared_gate_gets_its_gradient(options, inverse):
    gate = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    model, x = gated(gate), torch.randn(16, 8, dtype=torch.float64)
    leaves = [gate, *model.parameters()]
    saving, stored = Reversible(model, **options), torch.autograd.grad(loss_of(model, x, inverse), leaves)
    for _ in range(3):
        found = torch.autograd.grad(loss_of(saving, x, inverse), leaves)
        assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(found, stored, strict=True))


def test_what_was_computed_outside_hands_its_gradient_on():
    """A row of an embedding, handed to the nets by attribute: another tensor with every call, with the history of that call."""
    embedding = nn.Embedding(3, 1).double()
    rows = torch.arange(16) % 3
    model, x = gated(None), torch.randn(16, 8, dtype=torch.float64)
    saving = Reversible(model)
    for _ in range(3):
        found = []
        for f in (model, saving):
            given = embedding(rows).exp()
            for block in model:
                block.t.gate[0] = given
            found.append(torch.autograd.grad(loss_of(f, x, False), [embedding.weight, *model.parameters()]))
        assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(*found, strict=True))


def test_second_derivatives_reach_the_outside():
    gate = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    model, found = gated(gate, 2), []
    for f in (model, Reversible(model)):
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (first,) = torch.autograd.grad(loss_of(f, x, False), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [gate, x, *model.parameters()], allow_unused=True))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-8, atol=1e-10)


def test_a_tensor_that_comes_in_later_is_named():
    model, x = gated(None), torch.randn(4, 8, dtype=torch.float64)
    saving = Reversible(model)
    loss_of(saving, x, False).backward()
    for block in model:
        block.t.gate[0] = nn.Parameter(torch.ones(1, dtype=torch.float64))
    with pytest.raises(DriftError, match=r"block 3 uses a tensor of shape \(1,\).*its gradient would be lost"):
        loss_of(saving, x, False).backward()


def test_transforms_of_torch_with_parameters_of_their_own():
    loc, log_scale = (nn.Parameter(torch.randn(8, dtype=torch.float64)) for _ in range(2))
    x, found = torch.randn(5, 8, dtype=torch.float64), []
    for wrap in (bilip.as_bijection, Reversible, Reversible):
        affine = torch.distributions.AffineTransform(loc, log_scale.exp(), event_dim=1)
        cubed = torch.distributions.ComposeTransform([affine, torch.distributions.SigmoidTransform()])
        y = x.clone().requires_grad_()
        found.append(torch.autograd.grad(wrap(cubed)(y).square().sum(), [y, loc, log_scale]))
    for other in found[1:]:
        assert angle(other, found[0]) < 1e-7


def test_the_first_call_leaves_numbers_and_statistics_as_one_call_does():
    """With a tensor from outside it is made twice."""
    gate = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def net():
        inner = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8))
        gated_net = Gated(4, 8, gate)
        gated_net.net = inner
        return gated_net

    torch.manual_seed(0)
    model = Chain(
        *(blocks.AffineCoupling(net(), partition=blocks.Split(swap=k % 2 == 1)) for k in range(3)), shape=(8,)
    )
    model, x = model.double(), torch.randn(16, 8, dtype=torch.float64)
    results = []
    for wrap in (lambda m: m, Reversible):
        own = copy.deepcopy(model)
        for block in own:
            block.t.gate[0] = gate
        torch.manual_seed(3)
        gate.grad = None
        loss_of(wrap(own), x, False).backward()
        results.append([torch.rand(3), gate.grad.clone(), *own.buffers(), *(p.grad for p in own.parameters())])
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-9) for a, b in zip(*results, strict=True))


def test_the_first_call_after_a_resumption_counts_once():
    """It is made twice; a fingerprint of another number would be another one than without the break."""
    gate = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    model, x = gated(gate), torch.randn(16, 8, dtype=torch.float64)
    uncut, resumed = Reversible(model), Reversible(model)
    for k in range(4):
        if k == 2:
            resumed.load_guard_state(uncut.guard_state())
        for saving in (uncut, resumed)[: 1 + (k > 1)]:
            torch.autograd.grad(loss_of(saving, x, False), gate)
    assert resumed.guard_state() == uncut.guard_state()
    assert uncut.guard_state()["count"] == 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))], ids=["deepcopy", "pickle"])
def test_copies_find_their_own(copied):
    gate = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    saving, x = Reversible(gated(gate)), torch.randn(4, 8, dtype=torch.float64)
    loss_of(saving, x, False).backward()
    other, before = copied(saving), gate.grad.clone()
    loss_of(other, x, False).backward()
    assert torch.equal(gate.grad, before)
    assert torch.allclose(other.bijection[0].t.gate[0].grad - before, before) or torch.allclose(
        other.bijection[0].t.gate[0].grad, before
    )


def test_checkpoints_of_torch_around_a_first_call():
    model, x = gated(None), torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    found = []
    for f in (model, Reversible(model)):
        value = torch.utils.checkpoint.checkpoint(lambda y, f=f: loss_of(f, y, False), x, use_reentrant=False)
        found.append(torch.autograd.grad(value, [x, *model.parameters()]))
    assert angle(*found) < 1e-7
