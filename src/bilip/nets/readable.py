"""Whether an object computes what its class says: the one place that decides if a proof may read it.

A bound is proved about a class: `nn.ReLU`, `AffineCoupling`. It speaks about an object only if nothing was changed on the way:
no hooks, no method replaced on the object or on its class, no subclass that overrides a method and keeps what was
proved about the original, and weights that are plain tensors, whose products are what torch says. Nets, blocks, their partitions and
scales, and foreign modules all pass here.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, parametrize

__all__ = [
    "HARMLESS",
    "as_born",
    "changed",
    "is_itself",
    "is_untouched",
    "is_watched",
    "odd_tensor",
    "parametrized",
    "tampered",
    "unstated",
]

# Names that a subclass may define without changing what is computed.
_HARMLESS = """
    __init__ __new__ __post_init__ reset_parameters train extra_repr _get_name __repr__ __str__
    __doc__ __module__ __qualname__ __dict__ __weakref__ __slots__ __annotations__ __constants__
    __annotate__ __annotate_func__ __annotations_cache__ __static_attributes__ __firstlineno__
    __orig_bases__ __parameters__ __abstractmethods__ _abc_impl __init_subclass__ __class_getitem__
    __eq__ __hash__ __len__ __dir__ __setattr__ __delattr__ __match_args__ __replace__
    __dataclass_fields__ __dataclass_params__ __copy__ __deepcopy__ __reduce__ __reduce_ex__
    __getstate__ __setstate__ state_dict load_state_dict _load_from_state_dict _save_to_state_dict
    get_extra_state set_extra_state _version _apply out_shape in_shape parts check spec
"""
HARMLESS = frozenset(_HARMLESS.split())
# What a call of any module goes through.
_CALL = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "forward")
# Global hooks of torch's own that only watch.
_WATCHERS = ("torch.utils.module_tracker", "torch.distributed._tools.mod_tracker")

# Parametrizations that give the same weight at every call, in evaluation mode.
_UNDERSTOOD = tuple(getattr(parametrizations, name) for name in ("_SpectralNorm", "_WeightNorm", "_Orthogonal"))

_BORN: WeakKeyDictionary[type, dict[str, object]] = WeakKeyDictionary()
_METHODS: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def as_born(*kinds: type) -> None:
    """Remember the methods of classes as they are now, so that one replaced later is noticed."""
    for kind in kinds:
        names = _CALL if kind is nn.Module else [name for name, value in vars(kind).items() if _is_method(value)]
        _BORN[kind] = {name: vars(kind)[name] for name in names if name in vars(kind)}


def tampered(thing: object) -> str | None:
    """What was done to an object or its class that may change what it computes, as the rest of a sentence; `None` if nothing.

    Example:
        >>> act = nn.ReLU()
        >>> tampered(act)
        >>> act.forward = lambda x: 100 * x
        >>> tampered(act)
        'has its method forward replaced'
    """
    kind = type(thing)
    if isinstance(thing, nn.Module):
        if thing._forward_hooks or thing._forward_pre_hooks:
            return "has hooks that may change what it computes"
        if _hooked_everywhere():
            return "is called under global hooks that may change what it computes"
        compiled = thing._compiled_call_impl
        if compiled is not None and getattr(compiled, "_torchdynamo_orig_callable", None) != thing._call_impl:
            return "has its method _compiled_call_impl replaced"
        if "_orig_mod" in thing._modules and kind.__name__ == "OptimizedModule":
            return (
                "stands for a compiled net (net.compile(), in place of torch.compile(net), leaves one that can be read)"
            )
        for name, value in (*thing._parameters.items(), *thing._buffers.items(), *vars(thing).items()):
            if isinstance(value, Tensor) and (odd := odd_tensor(value)) is not None:
                return f"holds as {name} {odd}"
    methods = _methods(kind)
    for name in getattr(thing, "__dict__", ()):
        if name in methods:
            return f"has its method {name} replaced"
    return _replaced(kind)


def _replaced(kind: type) -> str | None:
    """A method of a class, or of an ancestor, that is another one than when it was made, or was put over an inherited one since."""
    order = kind.__mro__
    for k, ancestor in enumerate(order):
        born, now = _BORN.get(ancestor), vars(ancestor)
        if born is None:
            continue
        for name, value in born.items():
            if now.get(name) is not value:
                return f"has the method {name} of its class {ancestor.__name__} replaced"
        for name in now.keys() - born.keys() - HARMLESS if ancestor is not nn.Module else ():
            if _is_method(now[name]) and any(name in vars(later) for later in order[k + 1 :]):
                return f"has the method {name} of its class {ancestor.__name__} replaced"
    return None


def is_watched(module: nn.Module) -> bool:
    """Whether somebody watches the calls of a module by hooks, or has replaced one of its methods: then its calls have to happen.

    Example:
        >>> layer = nn.ReLU()
        >>> is_watched(layer), bool(layer.register_forward_hook(lambda *args: None)), is_watched(layer)
        (False, True, True)
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or _hooked_everywhere() or not _methods(type(module)).isdisjoint(vars(module))


def _hooked_everywhere() -> bool:
    """Whether there are global hooks that may change what modules compute."""
    kinds = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
    return any(getattr(hook, "__module__", None) not in _WATCHERS for hooks in kinds for hook in hooks.values())


def is_itself(module: nn.Module, known: dict[type, bool] | None = None) -> bool:
    """Whether a module of bilip may be taken apart, or computed in another way: no hooks, no methods replaced, and no subclass by
    somebody else that overrides one.

    Args:
        module: The module.
        known: What was found about classes so far, where many modules are looked at.

    Example:
        >>> from bilip.blocks import Chain
        >>> Doubled = type("Doubled", (Chain,), {"forward": lambda self, x, context=None: 2 * x, "__module__": "mine"})
        >>> is_itself(Chain()), is_itself(Doubled())
        (True, False)
    """
    kind, known = type(module), {} if known is None else known
    if is_watched(module):
        return False
    if kind not in known:
        order = kind.__mro__
        own = next((k for k, part in enumerate(order) if part.__module__.split(".")[0] == "bilip"), len(order))
        known[kind] = _replaced(kind) is None and changed(kind, own) is None
    return known[kind]


def is_untouched(thing: object, known: dict[type, bool]) -> bool:
    """Whether no method of an object or of its class was replaced; `known` as in `is_itself`, of its own."""
    kind = type(thing)
    if kind not in known:
        known[kind] = _replaced(kind) is None
    return known[kind] and _methods(kind).isdisjoint(getattr(thing, "__dict__", ()))


def odd_tensor(value: Tensor) -> str | None:
    """What keeps a tensor from being plain numbers, which act as they are stored; `None` if nothing does.

    A tensor of a class of its own, as weights of fewer bits are, may multiply otherwise than its numbers say.

    Example:
        >>> odd_tensor(torch.ones(2)), odd_tensor(torch.ones(2).to_sparse())
        (None, 'a tensor of layout torch.sparse_coo')
    """
    if type(value) not in (Tensor, nn.Parameter):
        return f"a tensor of class {type(value).__name__}"
    if value.is_meta:
        return "a tensor on the device meta, which has no numbers"
    if value.is_complex():
        return "a tensor of complex numbers"
    return None if value.layout is torch.strided else f"a tensor of layout {value.layout}"


def parametrized(module: nn.Module) -> str | None:
    """By what a module is parametrized that may give another weight at every call, as the rest of a sentence; `None` if by nothing.

    Example:
        >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        >>> parametrized(layer)
        >>> parametrize.register_parametrization(layer, "bias", nn.Dropout()) is layer
        True
        >>> parametrized(layer)
        "is parametrized by Dropout, which is not one of torch's own"
    """
    if not parametrize.is_parametrized(module):
        return None
    for parts in module.parametrizations.values():  # type: ignore[union-attr, operator]
        for part in (parts, *parts) if isinstance(parts, parametrize.ParametrizationList) else (parts,):
            why = tampered(part)
            if why is None and isinstance(part, parametrizations._SpectralNorm) and part.training:
                why = "moves on whenever the weight is read in training mode: call .eval()"
            own = type(part).__module__.split(".")[0] == "bilip"
            if why is None and part is not parts and not own and type(part) not in _UNDERSTOOD:
                why = "is not one of torch's own"
            if why is not None:
                return f"is parametrized by {type(part).__name__}, which {why}"
    return None


def changed(kind: type, count: int, stated: Iterable[str] = ()) -> str | None:
    """The first method that the first `count` classes of a class's ancestry override, as `Class.method`; `None` if none do.

    Constructors, representations and what belongs to saving do not count, nor do bilip's own classes or the names in `stated`.
    """
    order = kind.__mro__
    for k, part in enumerate(order[:count]):
        if part.__module__.split(".")[0] == "bilip":
            continue
        for name, value in vars(part).items():
            if name in HARMLESS or name in stated:
                continue
            before = next((vars(later)[name] for later in order[k + 1 :] if name in vars(later)), None)
            special = name.startswith("__") and name.endswith("__")
            if (special and callable(value)) or (before is not None and (_is_method(before) or _is_method(value))):
                return f"{part.__name__}.{name}"
            if hasattr(type(value), "__set__") and any(name in _set_by(later) for later in order[k + 1 :]):
                return f"{part.__name__}.{name}"  # a property in place of an attribute
    return None


def _set_by(kind: type) -> tuple[str, ...]:
    """Names that the constructor of a class speaks of, those of the attributes that it sets among them."""
    return getattr(getattr(vars(kind).get("__init__"), "__code__", None), "co_names", ())


def unstated(kind: type, statements: Iterable[str], root: type) -> str | None:
    """A method that a subclass overrides although what is proved about the class was stated before; `None` if there is none.

    Args:
        kind: The class.
        statements: The methods that state what is proved.
        root: The abstract class; what it states in general counts as stated by the class right below it.

    Example:
        >>> Doubled = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * x, "__module__": "mine"})
        >>> unstated(Doubled, ("held_weight",), nn.Module)
        'Doubled.forward'
    """
    order = kind.__mro__
    end = order.index(root)
    places = [next((k for k, part in enumerate(order) if name in vars(part)), end) for name in statements]
    return changed(kind, min(max(places, default=end), end - 1), statements)


def _methods(kind: type) -> frozenset[str]:
    """The names that are methods of a class, and so no business of its objects."""
    if kind not in _METHODS:
        found = {name for part in kind.__mro__ for name, value in vars(part).items() if _is_method(value)}
        _METHODS[kind] = frozenset(found)
    return _METHODS[kind]


def _is_method(value: object) -> bool:
    return isinstance(value, (FunctionType, classmethod, staticmethod, property)) or (
        callable(value) and hasattr(value, "__get__") and not isinstance(value, type)
    )


as_born(nn.Module, parametrize.ParametrizationList, *_UNDERSTOOD)
