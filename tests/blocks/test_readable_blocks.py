"""Bounds are proved only about blocks that compute what their class says."""

import contextlib
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import bilip
from bilip import blocks
from bilip.blocks import AdditiveCoupling, AffineCoupling, Bijection, Chain, FactorOut, Invert, Residual, Split
from bilip.bounds import Box
from bilip.errors import InputError, UnknownLipschitz
from bilip.nets import MLP

BOX = Box(-1, 1, shape=(4,))


def additive(kind=AdditiveCoupling, **options):
    return kind(MLP(2, 2, hidden=(4,), lipschitz=0.5), **options)


def hooked(block):
    block.register_forward_hook(lambda module, given, output: 100 * output)
    return block


def pre_hooked(block):
    block.register_forward_pre_hook(lambda module, given: (100 * given[0], *given[1:]))
    return block


def patched(block, name):
    original = getattr(block, name)
    setattr(block, name, lambda *given: 100 * original(*given))
    return block


class Forward(AdditiveCoupling):
    def forward(self, x, context=None):
        return 100 * super().forward(x, context)


class Backward(AdditiveCoupling):
    def inverse(self, z, context=None):
        return 100 * super().inverse(z, context)


class BothWays(AdditiveCoupling):
    def inverse_and_log_det(self, z, context=None):
        return 100 * self.inverse(z, context), z.new_zeros(len(z))


class Called(AdditiveCoupling):
    def __call__(self, x, context=None):
        return 100 * super().__call__(x, context)


class Helper(AdditiveCoupling):
    def shift(self, x1, x2, context):
        return 100 * super().shift(x1, x2, context)


class Branch(Residual):
    def branch(self, x, context=None):
        return 100 * super().branch(x, context)


class HalfStated(AdditiveCoupling):
    def forward(self, x, context=None):
        return 100 * super().forward(x, context)

    def log_lip(self, box, context=None, formula="sharp"):
        return 10.0


class Affine(AffineCoupling):
    """All four restated, but not what affine coupling knows besides."""

    def forward(self, x, context=None):
        return 100 * super().forward(x, context)

    log_lip, log_lip_inverse = AffineCoupling.log_lip, AffineCoupling.log_lip_inverse
    interval, interval_inverse = AffineCoupling.interval, AffineCoupling.interval_inverse


class MyChain(Chain):
    def forward(self, x, context=None):
        return 100 * super().forward(x, context)

    log_lip = log_lip_inverse = lambda self, box, context=None, formula="sharp": 10.0
    interval = interval_inverse = lambda self, box, context=None: Box.everything(box.shape)


class Mixin:
    def forward(self, x, context=None):
        return 100 * super().forward(x, context)  # type: ignore[misc]


class Mixed(Mixin, AdditiveCoupling):
    pass


class Later(Forward):
    """The override is not in the last class."""

    def __init__(self, t):
        super().__init__(t)


class Steep(blocks.SigmoidScale):
    def __call__(self, s):
        return 100 * super().__call__(s)


class Stretched(Split):
    def merge(self, x1, x2):
        return 100 * super().merge(x1, x2)


def patched_partition():
    block = additive(partition=Split())
    patched(block.partition, "merge")
    return block


def patched_scale():
    scale = blocks.SigmoidScale()
    object.__setattr__(scale, "with_log", lambda s: (100 * s, s))
    return AffineCoupling(MLP(2, 4), scale=scale)


def parametrized():
    block = blocks.ActNorm(4, start="identity")
    nn.utils.parametrize.register_parametrization(block, "log_scale", nn.Dropout())
    return block.eval()


REFUSED = {
    "parametrized": (parametrized, "parametrized by Dropout, which is not one of torch's own"),
    "hook": (lambda: hooked(additive()), "hooks"),
    "pre-hook": (lambda: pre_hooked(additive()), "hooks"),
    "forward patched": (lambda: patched(additive(), "forward"), "method forward replaced"),
    "inverse patched": (lambda: patched(additive(), "inverse"), "method inverse replaced"),
    "helper patched": (lambda: patched(additive(), "shift"), "method shift replaced"),
    "proof patched": (lambda: patched(additive(), "log_lip"), "method log_lip replaced"),
    "forward overridden": (lambda: additive(Forward), "Forward.forward, but inherits"),
    "inverse overridden": (lambda: additive(Backward), "Backward.inverse, but inherits"),
    "a default overridden": (lambda: additive(BothWays), "BothWays.inverse_and_log_det, but inherits"),
    "call overridden": (lambda: additive(Called), "Called.__call__, but inherits"),
    "helper overridden": (lambda: additive(Helper), "Helper.shift, but inherits"),
    "branch overridden": (lambda: Branch(MLP(4, 4, lipschitz=0.5)), "Branch.branch, but inherits"),
    "half of it stated": (lambda: additive(HalfStated), "HalfStated.forward, but inherits"),
    "chain overridden": (lambda: MyChain(additive()), "MyChain.forward, but inherits"),
    "a sharper constant inherited": (lambda: Affine(MLP(2, 4)), "Affine.forward, but inherits"),
    "mixed in": (lambda: additive(Mixed), "Mixin.forward, but inherits"),
    "overridden before": (lambda: additive(Later), "Forward.forward, but inherits"),
    "scale overridden": (lambda: AffineCoupling(MLP(2, 4), scale=Steep()), "Steep.__call__, but inherits"),
    "partition overridden": (lambda: additive(partition=Stretched()), "Stretched.merge, but inherits"),
    "partition patched": (patched_partition, "method merge replaced"),
    "scale patched": (patched_scale, "method with_log replaced"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_changed_block_is_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    block = make()
    for ask in (lambda: block.bounds(BOX), lambda: block.bounds(latent=BOX), lambda: block.enclose(BOX)):
        with pytest.raises(UnknownLipschitz, match=reason):
            ask()


INSIDE = {
    "chain": lambda block: Chain(additive(), block),
    "inverted": Invert,
    "twice": lambda block: Invert(Chain(Chain(block))),
    "reversible": bilip.Reversible,
    "factor-out": lambda block: FactorOut(block, shape=(6,), keep=4),
}


class LouderFlow(bilip.Flow):
    def inverse(self, z, context=None):
        return 100 * self.bijection.inverse(z, context)


class RenamedFlow(bilip.Flow):
    def log_prob(self, x, context=None):
        return super().log_prob(x, context) / 4


FLOWS = {
    "hook": lambda: hooked(bilip.Flow(additive())),
    "pre-hook": lambda: pre_hooked(bilip.Flow(additive())),
    "forward patched": lambda: patched(bilip.Flow(additive()), "forward"),
    "inverse patched": lambda: patched(bilip.Flow(additive()), "inverse"),
    "inverse overridden": lambda: LouderFlow(additive()),
}


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_whose_map_is_another_one_has_no_bound(name):
    flow = FLOWS[name]()
    for prove in (lambda: flow.bounds(BOX), lambda: flow.enclose(BOX), lambda: flow.enclose_inverse(BOX)):
        with pytest.raises(UnknownLipschitz, match="no bound can be proved"):
            prove()
    assert flow.bijection.bounds(BOX).forward < 2


def test_a_flow_with_another_log_prob_keeps_its_bounds():
    assert RenamedFlow(block := additive()).bounds(BOX).forward == block.bounds(BOX).forward


def test_weights_without_numbers_have_no_bound():
    block = AdditiveCoupling(nn.Linear(2, 2, device="meta"))
    for prove in (lambda: block.bounds(BOX), lambda: block.enclose(BOX)):
        with pytest.raises(UnknownLipschitz, match="device meta"):
            prove()


@pytest.mark.parametrize("where", INSIDE)
@pytest.mark.parametrize("name", ["hook", "forward patched", "forward overridden", "scale overridden"])
def test_a_changed_block_is_found_inside(where, name):
    make, reason = REFUSED[name]
    model = INSIDE[where](make())
    size = 6 if where == "factor-out" else 4
    with pytest.raises(UnknownLipschitz, match=reason):
        model.bounds(Box(-1, 1, shape=(size,)))


@pytest.mark.parametrize("where", INSIDE)
def test_a_hook_on_a_wrapper_counts_too(where):
    model = hooked(INSIDE[where](additive()))
    with pytest.raises(UnknownLipschitz, match="hooks"):
        model.bounds(Box(-1, 1, shape=(6 if where == "factor-out" else 4,)))


def test_a_class_patched_later_is_refused():
    block, before = additive(), AdditiveCoupling.forward
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, AdditiveCoupling, "forward", before)
        AdditiveCoupling.forward = lambda self, x, context=None: 100 * before(self, x, context)  # type: ignore[method-assign]
        with pytest.raises(UnknownLipschitz, match="method forward of its class AdditiveCoupling replaced"):
            block.bounds()
    assert block.bounds().forward < 2


@pytest.mark.parametrize(("kind", "name"), [(blocks.Flatten, "log_lip"), (Chain, "interval"), (Chain, "__call__")])
def test_a_method_put_over_an_inherited_one_later_is_refused(kind, name, monkeypatch):
    block = Chain(blocks.Flatten((4,)))
    assert name not in vars(kind)
    before = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, *given: before(self, *given))
    with pytest.raises(UnknownLipschitz, match=f"method {name} of its class {kind.__name__} replaced"):
        block.bounds(BOX)
    monkeypatch.undo()
    assert block.bounds(BOX).forward < 1 + 1e-12


class Restated(Forward):
    """All of it said anew: F is 100 times the coupling."""

    def inverse(self, z, context=None):
        return super().inverse(z / 100, context)

    def log_lip(self, box, context=None, formula="sharp"):
        return math.log(100) + 1e-14 + super().log_lip(box, context, formula)

    def log_lip_inverse(self, box, context=None, formula="sharp"):
        return -math.log(100) + 1e-14 + super().log_lip(box, context, formula)

    def interval(self, box, context=None):
        image = super().interval(box, context)
        return Box.outward(100 * image.low, 100 * image.high)

    def interval_inverse(self, box, context=None):
        return super().interval_inverse(Box.outward(box.low / 100, box.high / 100), context)


class Titled(AdditiveCoupling):
    def __init__(self, width):
        super().__init__(MLP(width, width, lipschitz=0.5))

    def extra_repr(self):
        return "titled"

    def describe(self):
        return "a method of its own"


@dataclass(frozen=True)
class Gentle(blocks.SigmoidScale):
    low: float = 0.9


class Evens(blocks.Partition):
    """A partition of the user's own, by the contract of the base class."""

    def split(self, x):
        return x[:, 0::2], x[:, 1::2]

    def merge(self, x1, x2):
        return torch.stack((x1, x2), 2).flatten(1)


class Own(Bijection):
    def forward(self, x, context=None):
        return 2 * x

    def inverse(self, z, context=None):
        return z / 2

    def log_lip(self, box, context=None, formula="sharp"):
        return math.log(2)

    def log_lip_inverse(self, box, context=None, formula="sharp"):
        return -math.log(2)

    def interval(self, box, context=None):
        return Box(2 * box.low, 2 * box.high)

    def interval_inverse(self, box, context=None):
        return Box(box.low / 2, box.high / 2)


@pytest.mark.parametrize(
    ("make", "least", "most"),
    [
        (lambda: additive(Restated), 100, 200),
        (lambda: Titled(2), 1, 2),
        (lambda: AffineCoupling(MLP(2, 4), scale=Gentle()), 1, 20),
        (lambda: additive(partition=Evens()), 1, 2),
        (Own, 2, 2.001),
    ],
    ids=["restated", "titled", "scale", "partition", "own"],
)
def test_what_states_itself_or_changes_nothing_is_proved(make, least, most):
    block = make().double()
    bound = Chain(block, shape=(4,)).bounds(BOX)
    assert least <= bound.forward <= most
    x = BOX.sample(40)
    gain = (block(x[:20]) - block(x[20:])).norm(dim=1) / (x[:20] - x[20:]).norm(dim=1)
    assert float(gain.max()) <= bound.forward


def test_watching_gradients_is_no_change():
    block = additive()
    block.register_full_backward_hook(lambda *given: None)
    for p in block.parameters():
        p.register_hook(lambda grad: grad)
    assert block.bounds().forward < 2


def test_nets_inside_blocks_pass_the_same_check():
    act = nn.ReLU()
    act.forward = lambda x: 100 * torch.relu(x)  # type: ignore[method-assign]
    for make in (AdditiveCoupling, lambda t: AffineCoupling(MLP(2, 2), t), blocks.NeuralODE):
        with pytest.raises(UnknownLipschitz, match="ReLU has its method forward replaced"):
            make(nn.Sequential(nn.Linear(2, 2), act)).bounds(Box(-1, 1, shape=(2 if make is blocks.NeuralODE else 4,)))
    with pytest.raises(UnknownLipschitz, match="ReLU has its method forward replaced"):
        Residual(nn.Sequential(nn.Linear(2, 2), act))


@pytest.mark.numeric
def test_nets_that_overwrite_their_input_are_refused():
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))
    for make in (lambda: blocks.AdditiveCoupling(net), lambda: blocks.Residual(net)):
        with pytest.raises(InputError, match=r"works in place and would overwrite .* inplace=False"):
            make()
