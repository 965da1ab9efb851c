"""Models that remember how they were built, saved and loaded: a folder with `config.json` and `model.safetensors`.

Loading calls the functions of `bilip.models` that the config names and fills in numbers; nothing in the files is
executed. Each file holds the SHA-256 of itself, and the weights hold the config that they belong to. Files are compared with each
other before a model is built.
"""

from __future__ import annotations

import functools
import inspect
import io
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import bilip
from bilip._torch import dtype_name
from bilip.blocks import Bijection, Flow
from bilip.blocks.scale import Scale
from bilip.errors import BilipError, CheckpointError, need
from bilip.record import write_aside
from bilip.record.files import UNSEALED, is_whole, read_file, seal
from bilip.record.header import Header, read_header
from bilip.record.plain import parse_json

__all__ = ["build", "config_of", "flow", "load", "remembers", "save"]

FORMAT = "bilip-model"
VERSION = 2  # 1 had no checksums
MISSING = "does not exist; a checkpoint is a folder with config.json and model.safetensors."
ADVICE = "It may be truncated: copy or save it again."
MOST_CONFIG, MOST_WEIGHTS = 2**24, 2**37
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
OTHERS = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32}
OTHERS |= {"I64": torch.int64}


P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)
_BUILDERS: dict[str, Callable[..., nn.Module]] = {}


def remembers(function: Callable[P, M]) -> Callable[P, M]:
    """Register a model function and note its arguments on what it returns, as JSON values."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> M:
        model = function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        model.config = {  # type: ignore[assignment]
            "model": function.__name__,
            "arguments": {name: _plain(value) for name, value in bound.arguments.items()},
        }
        return model

    _BUILDERS[function.__name__] = wrapper
    return wrapper


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return getattr(value, "config", None)
    if isinstance(value, Scale):
        return value.spec()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def config_of(model: nn.Module) -> dict[str, Any]:
    """The config noted on a model, or an error that says how to get one."""
    config = getattr(model, "config", None)
    if not _complete(config):
        raise CheckpointError(
            f"this {type(model).__name__} was not built by a function of bilip.models, so a file could not say how to build it "
            "again. Save its weights with safetensors and load them into a model that your own code builds."
        )
    return config  # type: ignore[return-value]


def _complete(config: object) -> bool:
    if not isinstance(config, dict):
        return False
    trunk = config["arguments"].get("trunk", {})
    return "trunk" not in config["arguments"] or _complete(trunk)


def build(config: dict[str, Any], *, tensors: int, numbers: int) -> nn.Module:
    """Build a model from its config; only the functions of `bilip.models` are called.

    Args:
        config: Name and arguments of the function.
        tensors: How many tensors the model has, as its file of weights says; building stops when it takes far more.
        numbers: Entries of these tensors together.

    Raises:
        CheckpointError: The config describes no model, or one that is larger than that.
    """
    try:
        with _AtMost(tensors, numbers):
            return _build(config)
    except CheckpointError:
        raise
    except BilipError as error:
        raise CheckpointError(f"the config's arguments do not fit {config.get('model')}: {error}") from error
    except Exception as error:  # arguments of any kind, so errors of any kind
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(f"the config's arguments do not fit {config.get('model')} ({text:.300}).") from error


def _build(config: Any) -> nn.Module:
    if not isinstance(config, dict) or not isinstance(config.get("arguments"), dict):
        raise CheckpointError(f"the config {config!r:.60} does not describe a model.")
    name, arguments = config.get("model"), dict(config["arguments"])
    if not isinstance(name, str) or name not in _BUILDERS:
        raise CheckpointError(
            f"the config names the model {name!r:.60}; this version of bilip knows {', '.join(sorted(_BUILDERS))}."
        )
    if "trunk" in arguments:
        arguments["trunk"] = _build(arguments["trunk"])
    try:
        return _BUILDERS[name](**arguments)
    except TypeError as error:
        raise CheckpointError(f"the config's arguments do not fit {name} ({error!s:.300}).") from error


class _AtMost(TorchFunctionMode):
    """Inside, torch may be called about so often as a model of this size needs, and makes no tensor that is larger.

    A model takes up to twenty calls for each of its tensors; a config that asks for ten million blocks is stopped after some
    thousand calls, and one that asks for a matrix of terabytes before there is one.
    """

    MAKERS = (
        "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "normal", "arange", "linspace", "eye",
    )  # fmt: skip

    def __init__(self, tensors: int, numbers: int) -> None:
        super().__init__()
        self.calls, self.numbers = 10_000 + 200 * tensors, 2**20 + 4 * numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls -= 1
        made = _entries(args) if getattr(func, "__name__", "").removeprefix("new_") in self.MAKERS else 0
        if self.calls < 0 or made > self.numbers:
            raise CheckpointError(
                "the config asks for a model that is far larger than its weights: the two do not belong together, or one is damaged."
            )
        return func(*args, **(kwargs or {}))


def _entries(args: Any) -> int:
    """Entries of a tensor that is made with these arguments: `(2, 3)`, `((2, 3), ...)`, or `(3,)` for a square one too."""
    size = next((value for value in args if isinstance(value, (list, tuple))), [n for n in args if type(n) is int])
    return math.prod(n for n in size if isinstance(n, int))


# ---- files


@remembers
def flow(trunk: Bijection) -> Flow:
    """A flow with a standard normal base over a model of this package: the form in which flows are saved.

    Example:
        >>> from bilip.models import real_nvp
        >>> flow(real_nvp(2, blocks=2)).sample(3).shape
        torch.Size([3, 2])
    """
    return Flow(trunk)


def save(model: nn.Module, folder: str | Path) -> None:
    """Write a model built by `bilip.models` to a folder; an interrupted save leaves the old files whole.

    Example:
        >>> import tempfile
        >>> from bilip.models import real_nvp
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(real_nvp(2, blocks=2), folder)
        ...     type(load(folder)).__name__
        'Chain'
    """
    safetensors = _safetensors()
    target = _folder(folder)
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"save: expected a model built by bilip.models, got {type(model).__name__}.")
    if isinstance(model, Flow) and not hasattr(model, "config") and model.base == "normal":
        model = flow(model.bijection)
    dtype = next((dtype_name(p.dtype) for p in model.parameters()), "float32")
    document = {"format": FORMAT, "version": VERSION, "sha256": UNSEALED, "bilip": bilip.__version__, "dtype": dtype}
    document |= config_of(model)
    text = seal((json.dumps(document, indent=2, allow_nan=False) + "\n").encode())
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    metadata = {"format": "pt", "bilip": json.dumps(document, allow_nan=False)}
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write to the folder {target} ({error.strerror}).") from error
    # The weights first: a folder with new weights and an old config fails to load; it never loads as something else.
    write_aside(target / "model.safetensors", seal(safetensors.save(state, metadata=metadata)))
    write_aside(target / "config.json", text)


def load(folder: str | Path) -> Any:
    """Read a model from a folder that `save` wrote.

    Checkpoints of bilip 0.1 have no checksum; they load, with a warning that says so.

    Raises:
        CheckpointError: A file is missing, truncated, foreign, damaged, or does not fit the model.
    """
    safetensors = _safetensors()
    source = _folder(folder)
    document, weights = _read_config(source / "config.json"), source / "model.safetensors"
    data = read_file(weights, most=MOST_WEIGHTS, error=CheckpointError, missing=MISSING)
    header = read_header(
        io.BytesIO(data),
        len(data),
        lambda why: CheckpointError(f"{weights} is not a readable safetensors file ({why}). {ADVICE}"),
    )
    if document["version"] == 1:
        warnings.warn(
            f"{source} has no checksums, as in bilip 0.1: damage would go unnoticed. Save it again.", stacklevel=2
        )
    if document["version"] > 1 or "bilip" in header.metadata:
        _require_whole(weights, data, header, document)
    try:
        model = build(document, tensors=len(header.tensors), numbers=header.numbers)
    except CheckpointError as error:
        raise CheckpointError(f"{source / 'config.json'}: {error}") from error
    _require_fitting(weights, header, model)
    try:
        state: dict[str, Tensor] = safetensors.load(data)
        floats = {value.dtype for value in state.values() if value.is_floating_point()}
        if len(floats) == 1:
            model.to(floats.pop())
        model.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(f"{weights} is not a readable safetensors file ({error!s:.300}). {ADVICE}") from error
    return model


def _folder(folder: str | Path) -> Path:
    try:
        return Path(folder)
    except TypeError as error:
        raise CheckpointError(f"expected the name of a folder, got {type(folder).__name__}.") from error


def _read_config(path: Path) -> dict[str, Any]:
    raw = read_file(path, most=MOST_CONFIG, error=CheckpointError, missing=MISSING)
    try:
        document = parse_json(raw, str(path), advice=ADVICE)
    except BilipError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by bilip: its 'format' is not {FORMAT!r}.")
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{path} has version {version!r:.40}; this bilip reads versions 1 to {VERSION}. Upgrade bilip."
        )
    if version > 1 and not is_whole(raw, document.get("sha256")):
        raise CheckpointError(
            f"{path} is damaged or was edited: its checksum is another one. Copy or save it again; after an edit that is meant, set "
            "its version to 1."
        )
    return document


def _require_whole(path: Path, data: bytes, header: Header, document: dict[str, Any]) -> None:
    try:
        own = parse_json(header.metadata.get("bilip", "null"), str(path))
    except BilipError as error:
        raise CheckpointError(f"{error} {ADVICE}") from error
    if not isinstance(own, dict) or not is_whole(data, own.get("sha256")):
        raise CheckpointError(f"{path} is damaged: its checksum is another one. Copy or save it again.")
    if document["version"] > 1 and any(own.get(name) != document.get(name) for name in ("model", "arguments")):
        raise CheckpointError(
            f"{path} belongs to another config.json than the one beside it: a save was interrupted, or files were mixed. Save again."
        )


def _require_fitting(path: Path, header: Header, model: nn.Module) -> None:
    wanted, there = model.state_dict(), header.tensors
    missing, extra = sorted(set(wanted) - set(there)), sorted(set(there) - set(wanted))
    both = [name for name in wanted if name in there]
    shapes = [
        f"{k}: {there[k].shape} instead of {tuple(wanted[k].shape)}" for k in both if there[k].shape != wanted[k].shape
    ]
    if missing or extra or shapes:
        raise CheckpointError(
            f"{path} does not fit its config: missing {_some(missing)}; unexpected {_some(extra)}; shapes {_some(shapes)}."
        )
    for k in both:
        if wanted[k].is_floating_point():
            fits, expected = there[k].dtype in FLOATS, "floats: " + ", ".join(FLOATS)
        else:
            expected = next(name for name, dtype in OTHERS.items() if dtype == wanted[k].dtype)
            fits = there[k].dtype == expected
        if not fits:
            raise CheckpointError(f"{path}, tensor {k!r}, holds {there[k].dtype}; expected {expected}.")


def _some(items: list[str]) -> str:
    return "none" if not items else ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def _safetensors() -> Any:
    return need("safetensors.torch", "saving and loading models", "train")
