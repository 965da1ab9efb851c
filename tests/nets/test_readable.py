"""A net is read only if it computes what its class says: nothing hooked, patched, overridden, changed or in place."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.utils.module_tracker import ModuleTracker

from bilip import blocks
from bilip._torch import EvalCache
from bilip.bounds import Box
from bilip.errors import InputError, UnknownLipschitz
from bilip.nets import MLP, ConvNet, Declared, GainConv2d, HeldConv2d, HeldLinear, enclose, log_cap, log_lipschitz
from bilip.nets.activations import ScaledSwish
from bilip.nets.certify import float64_copy, overwriting
from bilip.nets.norms import matrix_norm
from catalogue import hooked, louder, patched, pre_hooked


def with_option(layer, **options):
    for name, value in options.items():
        setattr(layer, name, value)
    return layer


class Repeated(nn.Sequential):
    def __iter__(self):
        return iter(list(self._modules.values()) * 2)


class Named(nn.Linear):
    def __getattr__(self, name):
        value = super().__getattr__(name)
        return 100 * value if name == "weight" else value


class Joined(MLP):
    def join(self, box, context):
        return box


class Amplified(nn.Module):
    def forward(self, weight):
        return 100 * weight


class Compiled(nn.Tanh):
    pass


def parametrized(layer, by):
    parametrize.register_parametrization(layer, "weight", by)
    return layer.eval()


def normalized(layer, change):
    layer = nn.utils.parametrizations.spectral_norm(layer).eval()
    change(layer.parametrizations.weight[0])
    return layer


REFUSED = {
    "hook": lambda: hooked(nn.Linear(2, 2)),
    "pre-hook": lambda: pre_hooked(nn.Linear(2, 2)),
    "hook on a container": lambda: hooked(nn.Sequential(nn.Linear(2, 2))),
    "hook deep inside": lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2), hooked(nn.Tanh()))),
    "hook on a net's stack": lambda: with_option(MLP(2, 2), layers=hooked(MLP(2, 2).layers)),
    "activation patched": lambda: nn.Sequential(nn.Linear(2, 2), patched(nn.ReLU(), "forward")),
    "linear patched": lambda: patched(nn.Linear(2, 2), "forward"),
    "call patched": lambda: patched(nn.Linear(2, 2), "_call_impl"),
    "compiled call patched": lambda: with_option(Compiled(), _compiled_call_impl=lambda x: 100 * x),
    "convolution patched": lambda: patched(nn.Conv2d(2, 2, 3), "_conv_forward"),
    "held patched": lambda: patched(HeldLinear(2, 2, coefficient=0.5), "held_weight"),
    "container patched": lambda: patched(nn.Sequential(nn.Linear(2, 2)), "forward"),
    "net patched": lambda: patched(MLP(2, 2, lipschitz=0.5), "forward"),
    "flatten patched": lambda: nn.Sequential(patched(nn.Flatten(), "forward"), nn.Linear(2, 2)),
    "declared patched": lambda: patched(Declared(nn.Tanh(), lipschitz=0.5), "forward"),
    "call overridden": lambda: louder(nn.Linear, "__call__")(2, 2),
    "forward overridden": lambda: louder(nn.Linear, "forward")(2, 2),
    "convolution overridden": lambda: louder(nn.Conv2d, "_conv_forward")(2, 2, 3),
    "hold overridden": lambda: louder(HeldLinear, "_hold")(2, 2, coefficient=0.5),
    "held forward overridden": lambda: louder(HeldLinear, "forward")(2, 2, coefficient=0.5),
    "activation overridden": louder(ScaledSwish, "forward"),
    "order overridden": lambda: Repeated(nn.Linear(2, 2)),
    "attributes overridden": lambda: Named(2, 2),
    "join overridden": lambda: Joined(2, 2, context=1),
    "declared overridden": lambda: louder(Declared, "forward")(nn.Tanh(), lipschitz=0.5),
    "unknown parametrization": lambda: parametrized(nn.Linear(2, 2), Amplified()),
    "parametrization patched": lambda: normalized(nn.Linear(2, 2), lambda part: patched(part, "forward")),
    "parametrization hooked": lambda: normalized(nn.Linear(2, 2), hooked),
    "padding mode of a held convolution": lambda: with_option(
        HeldConv2d(2, 2, 3, coefficient=0.5), padding_mode="replicate"
    ),
    "circular held convolution": lambda: with_option(HeldConv2d(2, 2, 3, coefficient=0.5), padding_mode="circular"),
    "dilation of a held convolution": lambda: with_option(HeldConv2d(2, 2, 3, coefficient=0.5), dilation=(2, 2)),
    "kernel size of a held convolution": lambda: with_option(HeldConv2d(2, 2, 3, coefficient=0.5), kernel_size=(1, 1)),
    "complex weights": lambda: nn.Linear(2, 2, dtype=torch.complex64),
    "padding changed": lambda: with_option(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), padding=(0, 0)),
    "negative coefficient": lambda: with_option(HeldLinear(2, 2, coefficient=0.5), coefficient=-1.0),
    "inputs changed": lambda: with_option(MLP(2, 2, context=2), inputs=1),
    "in place": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2)),
    "in place behind identity": lambda: nn.Sequential(nn.Identity(), nn.ELU(inplace=True), nn.Linear(2, 2)),
    "in place behind flatten": lambda: nn.Sequential(nn.Flatten(), nn.SiLU(inplace=True), nn.Linear(2, 2)),
    "in place behind dropout": lambda: nn.Sequential(nn.Dropout(), nn.ReLU6(inplace=True), nn.Linear(2, 2)).eval(),
    "in place in the end": lambda: nn.Sequential(nn.Identity(), nn.Sequential(nn.Hardtanh(inplace=True))),
    "in place behind declared": lambda: nn.Sequential(
        Declared(nn.Identity(), lipschitz=1.0), nn.CELU(inplace=True), nn.Linear(2, 2)
    ),
    "dropout in training": lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)),
    "nothing where a layer should be": lambda: nn.Sequential(nn.Linear(2, 2), None),  # type: ignore[arg-type]
}


REASONS = {
    "hook": "Linear has hooks that may change what it computes",
    "activation patched": "ReLU has its method forward replaced",
    "forward overridden": "Louder has Louder.forward overridden",
    "order overridden": "Repeated has Repeated.__iter__ overridden",
    "unknown parametrization": "parametrized by Amplified, which is not one of torch's own",
    "padding mode of a held convolution": "HeldConv2d is held for zero padding",
    "in place behind identity": "ELU works in place on what the net was given",
    "dropout in training": r"Dropout is another map at every call in training mode \(call .eval\(\)\)",
    "inputs changed": "MLP has inputs=1 and context=2, but its first layer takes 4",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_changed_net_is_refused_with_the_reason(name):
    net = REFUSED[name]()
    with pytest.raises(UnknownLipschitz, match=REASONS.get(name)):
        log_lipschitz(net)
    with pytest.raises(UnknownLipschitz):
        enclose(net, Box(-1, 1, shape=(2,)))
    assert log_cap(net) is None


def is_refused(net):
    try:
        log_lipschitz(net)
    except UnknownLipschitz:
        return True
    return False


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (nn.ReLU, "forward"),
        (nn.Linear, "forward"),
        (nn.Conv2d, "_conv_forward"),
        (nn.Module, "_call_impl"),
        (nn.Sequential, "forward"),
        (HeldLinear, "held_weight"),  # which both held layers inherit
        (GainConv2d, "forward"),
        (GainConv2d, "_conv_forward"),
    ],
)
def test_a_class_patched_after_import_is_refused(kind, name, monkeypatch):
    nets = (MLP(2, 2), ConvNet(2, 2, hidden=3), MLP(2, 2, lipschitz=0.5))
    assert all(log_lipschitz(net) < 10 for net in nets)
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, lambda self, *given: None)
        assert any(is_refused(net) for net in nets)
    assert all(log_lipschitz(net) < 10 for net in nets)


@pytest.mark.parametrize(
    "register", [torch_module.register_module_forward_hook, torch_module.register_module_forward_pre_hook]
)
def test_global_hooks_are_refused_and_trackers_are_not(register):
    net = MLP(2, 2, lipschitz=0.5)
    handle = register(lambda module, *given: None)
    try:
        with pytest.raises(UnknownLipschitz, match="global hooks"):
            log_lipschitz(net)
        assert log_cap(net) is None
    finally:
        handle.remove()
    with ModuleTracker():
        assert log_lipschitz(net) < 0


class Titled(nn.Sequential):
    """What many users write: a constructor, something to print and a method of their own."""

    width = 4

    def __init__(self):
        super().__init__(nn.Linear(2, self.width), nn.ReLU(inplace=True), nn.Linear(self.width, 2))

    def extra_repr(self):
        return "titled"

    def describe(self):
        return f"{self.width}"


def test_what_changes_nothing_is_read():
    assert log_lipschitz(Titled()) < 10
    assert log_lipschitz(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)).eval()) < 10
    compiled = nn.Linear(2, 2)
    compiled.compile()
    assert log_lipschitz(compiled) < 10
    with pytest.raises(UnknownLipschitz, match=r"compiled net \(net.compile\(\), in place of torch.compile\(net\)"):
        log_lipschitz(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert log_lipschitz(ConvNet(2, 2, hidden=3)) < 10  # its activations work in place, on tensors of its own
    assert log_lipschitz(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval()) < 10
    watched = nn.Linear(2, 2)
    watched.register_full_backward_hook(lambda *given: None)  # gradients only
    assert log_lipschitz(watched) < 10


def test_blocks_do_not_take_nets_that_overwrite_their_input():
    for first in ((), nn.Identity(), nn.Flatten(), nn.Dropout(), nn.Sequential(nn.Identity())):
        net = nn.Sequential(*([first] if first else []), nn.ReLU(inplace=True), nn.Linear(2, 2))
        assert isinstance(overwriting(net), nn.ReLU)
        for make in (blocks.AdditiveCoupling, blocks.Residual, blocks.NeuralODE):
            with pytest.raises(
                InputError, match=r"ReLU\(inplace=True\) in \w works in place and would overwrite .* inplace=False"
            ):
                make(net)
    own = nn.Sequential(nn.Identity(), nn.Linear(2, 2), nn.ReLU(inplace=True))
    x = torch.randn(3, 4)
    before = x.clone()
    blocks.AdditiveCoupling(own)(x)
    assert torch.equal(x, before)
    assert blocks.AdditiveCoupling(own).bounds().forward < 10


def test_an_activation_switched_to_in_place_later_is_seen():
    block = blocks.AdditiveCoupling(nn.Sequential(nn.Identity(), nn.ReLU(), nn.Linear(2, 2)))
    assert block.bounds().forward < 10
    block.t[1].inplace = True  # type: ignore[index]
    with pytest.raises(UnknownLipschitz, match="in place"):
        block.bounds()


class Sloped(nn.LeakyReLU):
    """The slope that acts is another than the one that is read."""

    @property
    def negative_slope(self):
        return self.__dict__["slope"]

    @negative_slope.setter
    def negative_slope(self, value):
        self.__dict__["slope"] = value


class Loud(torch.Tensor):
    """A weight whose products are not those of its numbers, as those of fewer bits are not."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        value = super().__torch_function__(func, types, args, kwargs or {})
        return 100 * value if func is nn.functional.linear else value


def with_weight(weight):
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(weight)
    return layer


def test_a_property_in_place_of_an_attribute_is_not_read_and_one_beside_them_is_harmless():
    with pytest.raises(UnknownLipschitz, match=r"Sloped\.negative_slope overridden"):
        log_lipschitz(Sloped(0.1))
    Sized = type("Sized", (nn.Linear,), {"size": property(lambda self: 4), "__module__": "mine"})
    assert log_lipschitz(Sized(2, 2)) < 10


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (lambda: with_weight(torch.eye(2).as_subclass(Loud)), "class Loud"),
        (lambda: with_weight(torch.eye(2).to_sparse()), "layout torch.sparse_coo"),
        (lambda: nn.LazyLinear(2), "class UninitializedParameter|has hooks"),
    ],
)
def test_weights_that_are_not_plain_numbers_are_not_read(layer, what):
    for prove in (log_lipschitz, lambda net: blocks.AdditiveCoupling(net).bounds()):
        with pytest.raises(UnknownLipschitz, match=what):
            prove(layer())


class Overwriting(nn.Module):
    def forward(self, x):
        return x.relu_()


@pytest.mark.parametrize("block", [blocks.AdditiveCoupling, blocks.Residual])
def test_a_net_that_overwrites_its_input_is_caught_where_it_acts(block):
    x = -torch.ones(3, 4)
    with pytest.raises(InputError, match="overwrites its input in place"):
        block(Declared(Overwriting(), lipschitz=0.5))(x)


def test_a_parametrization_that_moves_on_in_an_evaluated_layer_is_refused():
    """`.eval()` on the layer is not enough if its spectral norm was set back to training mode: each look gives another weight."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)).eval()
    block = blocks.AdditiveCoupling(layer)
    assert block.bounds().forward > 1
    layer.parametrizations.weight[0].training = True
    with pytest.raises(UnknownLipschitz, match=r"whenever the weight is read in training mode: call \.eval\(\)"):
        block.bounds()


def test_nets_without_hidden_units_are_constants():
    net = nn.Sequential(nn.Linear(2, 0), nn.Tanh(), nn.Linear(0, 2))
    assert blocks.AdditiveCoupling(net).bounds(Box(-1, 1, shape=(4,))).forward == pytest.approx(1)


@pytest.mark.parametrize("scale", [lambda raw: 100 * raw.exp(), object()], ids=["function", "object"])
def test_a_scale_that_states_nothing_is_refused(scale):
    block = blocks.AffineCoupling(nn.Linear(2, 4))
    block.scale = scale
    with pytest.raises(UnknownLipschitz, match="nothing can be proved"):
        block.bounds(Box(-1, 1, shape=(4,)))


def test_caches_of_two_threads_are_one_weights_each():
    """One thread evaluates, the other differentiates, which empties the cache: nobody meets half of it."""
    layer = HeldLinear(8, 8, coefficient=0.9).eval()
    cache, weight, failed, stop = EvalCache(), torch.randn(3, 3), [], threading.Event()

    def emptied():
        while not stop.is_set():
            cache.clear()

    other = threading.Thread(target=emptied)
    other.start()
    try:
        for k in range(3000):
            with torch.no_grad():
                value = cache.get_all(layer, weight + k % 2, (torch.sum, torch.mean))
            failed += [] if torch.equal(value[0], (weight + k % 2).sum()) else [k]
    finally:
        stop.set()
        other.join()
    assert not failed


@torch.no_grad()
def test_a_kept_value_that_somebody_wrote_into_is_computed_anew():
    layer, conv = HeldLinear(4, 4, coefficient=0.5).eval(), blocks.InvertibleConv1x1(3).eval()
    layer.weight.mul_(10)
    layer.held_weight().mul_(10)
    assert not layer.held_weight().requires_grad
    assert matrix_norm(layer.held_weight()) <= 0.5
    conv.inverse_matrix().mul_(7)
    x = torch.randn(5, 3)
    assert torch.allclose(conv.inverse(conv(x)), x, atol=1e-5)


@torch.no_grad()
def test_a_float64_copy_shares_no_memory_with_what_acts_in_the_original():
    net = nn.Sequential(HeldLinear(4, 4, coefficient=0.5)).double().eval()
    net[0].weight.mul_(10)
    copied = float64_copy(net)
    copied[0].weight.data.mul_(10)
    assert matrix_norm(net[0].held_weight()) <= 0.5


@pytest.mark.parametrize(
    "make", [lambda: HeldLinear(3, 3, coefficient=0.5), lambda: blocks.Invert(blocks.InvertibleConv1x1(3))]
)
def test_what_was_kept_in_inference_mode_takes_part_in_graphs_later(make):
    part = make().eval().requires_grad_(False)
    x = torch.randn(2, 3, requires_grad=True)
    with torch.inference_mode():
        before = part(x)
    after = part(x)
    assert torch.equal(before, after.detach())
    after.sum().backward()
    assert x.grad is not None
