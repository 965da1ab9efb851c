"""A model is taken apart only where its parts, one after the other, are the model: what hooks, subclasses and patches do is done too."""

import copy

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.module_tracker import ModuleTracker

from bilip import Chain, Invert, blocks, models, nets
from bilip.nets import MLP
from bilip.reversible import Reversible, angle


class Doubled(Chain):
    """Twice what a chain gives."""

    def forward(self, x, context=None):
        return 2 * super().forward(x, context)

    def inverse(self, z, context=None):
        return super().inverse(z / 2, context)

    def forward_and_log_det(self, x, context=None):
        z, log_det = super().forward_and_log_det(x, context)
        return 2 * z, log_det + x[0].numel() * 0.6931471805599453


class Named(Chain):
    """A chain with a constructor of its own, and nothing else."""

    def __init__(self, *parts):
        super().__init__(*parts, shape=(4,))


def couplings(count=3):
    return [
        blocks.AffineCoupling(MLP(2, 4, activation="elu"), partition=blocks.Split(swap=k % 2 == 1))
        for k in range(count)
    ]


def larger(module, args, output):
    return 1.5 * output


def replaced(part, name, factor=1.5):
    original = getattr(part, name)
    setattr(part, name, lambda *args, **kwargs: factor * original(*args, **kwargs))


def factored():
    inner = Chain(*couplings())
    inner.register_forward_hook(larger)
    return Chain(blocks.FactorOut(inner, (8,), keep=4), shape=(8,))


def watched_backward(chain):
    chain[1].register_full_backward_hook(
        lambda module, inputs, outputs: tuple(g if g is None else 2 * g for g in inputs)
    )


def nested(change=lambda inner: None):
    inner = Chain(*couplings())
    chain = Chain(*couplings(2), inner, *couplings(2), shape=(4,))
    change(inner)
    return chain


MODELS = {
    "subclass": lambda: Doubled(*couplings(), shape=(4,)),
    "subclass inside": lambda: Chain(*couplings(2), Doubled(*couplings()), *couplings(2), shape=(4,)),
    "subclass inverted": lambda: Invert(Doubled(*couplings(), shape=(4,))),
    "hook on a chain inside": lambda: nested(lambda inner: inner.register_forward_hook(larger)),
    "pre-hook on a chain inside": lambda: nested(
        lambda inner: inner.register_forward_pre_hook(lambda module, args: (1.5 * args[0], *args[1:]))
    ),
    "forward of a chain replaced": lambda: nested(lambda inner: replaced(inner, "forward")),
    "forward of a coupling replaced": lambda: nested(lambda inner: replaced(inner[1], "forward")),
    "scale of a coupling replaced": lambda: nested(
        lambda inner: (
            setattr(inner[1], "scale", copy.copy(inner[1].scale))
            or inner[1].scale.__dict__.update(log=torch.zeros_like)
        )
    ),
    "backward hook on a coupling": lambda: nested(watched_backward),
    "constructor": lambda: Named(*couplings()),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_numbers_and_gradients_of_a_changed_model(kind):
    """In three steps, so that anchors are in place as well; the inverse that no longer fits is drift, which is repaired."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    x = torch.randn(16, *model.shape)
    memory_saving = Reversible(model)
    for _ in range(3):
        losses, grads = [], []
        for f in (model, memory_saving):
            point = x.clone().requires_grad_()
            z, log_det = f.forward_and_log_det(point)
            losses.append(z.square().sum() - log_det.sum() + f(point).sin().sum())
            grads.append(torch.autograd.grad(losses[-1], [point, *model.parameters()], allow_unused=True))
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
        assert [g is None for g in grads[1]] == [g is None for g in grads[0]]
        pairs = [(a, b) for a, b in zip(*grads, strict=True) if a is not None]
        assert angle([b for _, b in pairs], [a for a, _ in pairs]) < 1e-5
        sizes = [sum(float(g.double().square().sum()) for g in side) for side in zip(*pairs, strict=True)]
        assert sizes[1] == pytest.approx(sizes[0], rel=1e-4)


def test_parts_one_after_the_other_are_the_map():
    torch.manual_seed(0)
    for name, make in MODELS.items():
        model = make()
        x = y = torch.randn(4, *model.shape)
        for _, part in model.parts():
            y = part(y)
        assert torch.allclose(y, model(x), atol=1e-6), name
    assert len(MODELS["constructor"]().parts()) == 3, "nothing has changed: it is taken apart"
    with ModuleTracker():  # which only watches
        assert len(MODELS["constructor"]().parts()) == 3
    hook = register_module_forward_hook(lambda module, args, output: None)
    try:
        assert len(MODELS["constructor"]().parts()) == 1
    finally:
        hook.remove()


def test_factor_outs_with_hooks_inside():
    torch.manual_seed(0)
    model = factored()
    x = torch.randn(8, 8)
    values = [f(x) for f in (model, Reversible(model))]
    assert torch.allclose(*values, atol=1e-6)
    a, b = (torch.autograd.grad(value.sin().sum(), list(model.parameters())) for value in values)
    assert angle(list(b), list(a)) < 1e-5


@pytest.mark.parametrize("part", [0, 1], ids=["ActNorm", "1x1"])
@pytest.mark.parametrize("way", ["forward", "inverse"])
def test_blocks_that_a_chain_takes_together_keep_what_was_replaced(part, way):
    """A chain computes ActNorms and 1x1 convolutions without calling them, unless somebody has changed them."""
    torch.manual_seed(0)
    chain = Chain(blocks.ActNorm(3, start="identity"), blocks.InvertibleConv1x1(3), shape=(3, 2, 2))
    x = torch.randn(4, 3, 2, 2)
    replaced(chain[part], way)
    one = x
    for block in chain if way == "forward" else reversed(list(chain)):
        one = block(one) if way == "forward" else block.inverse(one)
    for f in (chain, Reversible(chain)):
        assert torch.allclose(f(x) if way == "forward" else f.inverse(x), one, atol=1e-6)


@pytest.mark.parametrize("kind", ["couplings", "glow", "residual"])
def test_hooks_of_parameters_see_their_gradient_once(kind):
    """Clipping or masking a gradient by `Parameter.register_hook` acts on the whole of it, not on the parts that blocks find."""
    torch.manual_seed(0)
    model = {
        "couplings": lambda: Chain(*couplings(), shape=(4,)),
        "glow": lambda: models.glow((2, 2, 2), levels=1, blocks=2, hidden=4, mixing="conv1x1"),
        "residual": lambda: models.residual_flow(4, blocks=2, hidden=(8,)),
    }[kind]()
    x = torch.randn(8, *model.shape)
    model(x)  # ActNorms start
    f, own = Reversible(model), list(model.parameters())

    def gradients():
        torch.manual_seed(1)
        z, log_det = f.forward_and_log_det(x)
        (z.square().sum() - log_det.sum() + f.inverse(0.5 * z).sin().sum()).backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        for p in own:
            p.grad = None
        return found

    plain = gradients()
    for p in own:
        p.register_hook(lambda grad: 3 * grad)
    for before, after in zip(plain, gradients(), strict=True):
        assert torch.allclose(after, 3 * before, rtol=1e-3, atol=1e-5 * float(before.abs().max()) + 1e-6)


@pytest.mark.numeric
def test_hooks_keep_their_say():
    model = Chain(blocks.InvertibleConv1x1(4), blocks.AdditiveCoupling(nets.MLP(2, 2)), shape=(4,)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    model[0].register_forward_pre_hook(lambda module, given: (2 * given[0], *given[1:]))
    assert torch.allclose(Reversible(model)(x), model(x))
