"""Bounds are proved only about blocks that compute what their class says."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import bilip
from bilip import blocks
from bilip.blocks import AdditiveCoupling, AffineCoupling, Bijection, Chain, FactorOut, Invert, Residual, Split
from bilip.bounds import Box
from bilip.errors import UnknownLipschitz
from bilip.nets import MLP
from catalogue import hooked, louder, patched, pre_hooked

BOX = Box(-1, 1, shape=(4,))


def additive(kind=AdditiveCoupling, **options):
    return kind(MLP(2, 2, hidden=(4,), lipschitz=0.5), **options)


Forward = louder(AdditiveCoupling, "forward")


class BothWays(AdditiveCoupling):
    def inverse_and_log_det(self, z, context=None):
        return 100 * self.inverse(z, context), z.new_zeros(len(z))


class HalfStated(Forward):
    def log_lip(self, box, context=None, formula="sharp"):
        return 10.0


class Affine(louder(AffineCoupling, "forward")):
    """All four restated, but not what affine coupling knows besides."""

    log_lip, log_lip_inverse = AffineCoupling.log_lip, AffineCoupling.log_lip_inverse
    interval, interval_inverse = AffineCoupling.interval, AffineCoupling.interval_inverse


class MyChain(louder(Chain, "forward")):
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


def patched_partition():
    return additive(partition=patched(Split(), "merge"))


def patched_scale():
    return AffineCoupling(MLP(2, 4), scale=patched(blocks.SigmoidScale(), "with_log"))


def in_a_list(block):
    """A chain whose blocks are none of its modules, so that a walk over these passes them by."""
    chain = Chain(block)
    del chain.blocks
    chain.blocks = [block]  # type: ignore[assignment]
    return chain


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
    "forward overridden": (lambda: additive(Forward), "Louder.forward, but inherits"),
    "inverse overridden": (lambda: additive(louder(AdditiveCoupling, "inverse")), "Louder.inverse, but inherits"),
    "a default overridden": (lambda: additive(BothWays), "BothWays.inverse_and_log_det, but inherits"),
    "call overridden": (lambda: additive(louder(AdditiveCoupling, "__call__")), "Louder.__call__, but inherits"),
    "helper overridden": (lambda: additive(louder(AdditiveCoupling, "shift")), "Louder.shift, but inherits"),
    "branch overridden": (lambda: louder(Residual, "branch")(MLP(4, 4, lipschitz=0.5)), "Louder.branch, but inherits"),
    "half of it stated": (lambda: additive(HalfStated), "Louder.forward, but inherits"),
    "chain overridden": (lambda: MyChain(additive()), "Louder.forward, but inherits"),
    "a sharper constant inherited": (lambda: Affine(MLP(2, 4)), "Louder.forward, but inherits"),
    "mixed in": (lambda: additive(Mixed), "Mixin.forward, but inherits"),
    "overridden before": (lambda: additive(Later), "Louder.forward, but inherits"),
    "scale overridden": (
        lambda: AffineCoupling(MLP(2, 4), scale=louder(blocks.SigmoidScale, "__call__")()),
        "Louder.__call__, but inherits",
    ),
    "partition overridden": (lambda: additive(partition=louder(Split, "merge")()), "Louder.merge, but inherits"),
    "partition patched": (patched_partition, "method merge replaced"),
    "scale patched": (patched_scale, "method with_log replaced"),
    "blocks in a list": (lambda: in_a_list(hooked(additive())), "blocks a plain list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_changed_block_is_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    block = make()
    for ask in (lambda: block.bounds(BOX), lambda: block.bounds(latent=BOX), lambda: block.enclose(BOX)):
        with pytest.raises(UnknownLipschitz, match=reason):
            ask()


def with_number(block, name, value):
    setattr(block, name, value)
    return block


def refuses(block, box, reason):
    for ask in (
        lambda: block.bounds(box),
        lambda: block.bounds(latent=box),
        lambda: block.enclose(box),
        lambda: block.enclose_inverse(box),
    ):
        with pytest.raises(UnknownLipschitz, match=reason):
            ask()


@pytest.mark.parametrize("time", [-2.0, 0.0, math.nan, math.inf])
def test_a_time_that_was_set_to_no_positive_number_is_refused(time):
    block = with_number(blocks.NeuralODE(MLP(2, 2, hidden=(4,), lipschitz=1.0)), "time", time)
    timed = with_number(blocks.NeuralODE(MLP(2, 2, hidden=(4,), context=1, lipschitz=1.0)), "time", time)
    for part in (block, timed, Chain(block)):
        refuses(part, Box(-1, 1, shape=(2,)), "NeuralODE has time=.*, not a positive number")


@pytest.mark.parametrize("alpha", [-0.5, 0.5, 0.6, math.nan, math.inf])
def test_an_alpha_that_was_set_out_of_range_is_refused(alpha):
    block = with_number(blocks.Logit(0.05), "alpha", alpha)
    for part in (block, Chain(block), Invert(block)):
        refuses(part, Box(0.2, 0.8, shape=(1,)), r"Logit has alpha=.*, not a number in \[0, 0.5\)")


@pytest.mark.parametrize("error", [ZeroDivisionError, OverflowError, KeyError, ValueError])
def test_a_number_that_breaks_a_proof_is_an_error_in_words(error):
    def log_lip(self, box, context=None, formula="sharp"):
        raise error("division by zero")

    kind = type("Own", (Forward,), dict.fromkeys(Bijection.proof_methods, log_lip))
    with pytest.raises(UnknownLipschitz, match="holds a part about which nothing can be proved"):
        additive(kind).bounds(BOX)


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


def complex_block(name):
    block = {"log_scale": blocks.ActNorm(4, start="identity"), "weight": blocks.InvertibleConv1x1(4)}[name]
    numbers = getattr(block, name).detach().to(torch.complex64) + 2j
    return with_number(block, name, nn.Parameter(numbers))


def complex_statistics():
    norm = nn.BatchNorm1d(2)
    norm.running_var = torch.tensor([1e-3 + 1j, 1.0])
    return AdditiveCoupling(nn.Sequential(norm)).eval()


@pytest.mark.parametrize(
    "make", [lambda: complex_block("log_scale"), lambda: complex_block("weight"), complex_statistics]
)
def test_complex_numbers_are_not_read_as_their_real_parts(make):
    refuses(make(), BOX, "a tensor of complex numbers")


@pytest.mark.parametrize("where", INSIDE)
@pytest.mark.parametrize(
    "name", ["hook", "forward patched", "forward overridden", "scale overridden", "wrapper hooked"]
)
def test_a_changed_block_is_found_inside_and_a_hook_on_a_wrapper_counts_too(where, name):
    make, reason = REFUSED.get(name, (additive, "hooks"))
    model = INSIDE[where](make())
    if name == "wrapper hooked":
        hooked(model)
    with pytest.raises(UnknownLipschitz, match=reason):
        model.bounds(Box(-1, 1, shape=(6 if where == "factor-out" else 4,)))


@pytest.mark.parametrize(
    ("kind", "name", "inherited"),
    [
        (AdditiveCoupling, "forward", False),
        (blocks.Flatten, "log_lip", True),
        (Chain, "interval", True),
        (Chain, "__call__", True),
    ],
)
def test_a_method_that_is_replaced_or_put_over_an_inherited_one_later_is_refused(kind, name, inherited, monkeypatch):
    block = additive() if kind is AdditiveCoupling else Chain(blocks.Flatten((4,)))
    assert (name not in vars(kind)) == inherited
    before = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, *given: before(self, *given))
    with pytest.raises(UnknownLipschitz, match=f"method {name} of its class {kind.__name__} replaced"):
        block.bounds(BOX)
    monkeypatch.undo()
    assert block.bounds(BOX).forward < 2


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
