"""Training state as one safetensors file: tensors, and everything else as JSON in its header.

One file is replaced at once, so that a run killed at any moment leaves a whole state behind; it holds the SHA-256 of itself, so that damage
is found. Loading reads numbers and JSON; nothing is executed.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from bilip._torch import dtype_name
from bilip.errors import BilipError, CheckpointError, need
from bilip.record import write_aside
from bilip.record.files import UNSEALED, is_whole, read_file, seal
from bilip.record.header import read_header
from bilip.record.plain import parse_json

__all__ = [
    "Writer",
    "load_weights",
    "read_state",
    "require_facts",
    "require_kind",
    "restore_optimizer",
    "save_state",
    "split_optimizer",
]

FORMAT = "bilip-training"
VERSION = 2  # 1 had no checksum
MOST = 2**38
# What a state holds of a run beside tensors: the kind of each fact, and of what is inside it.
FACTS: dict[str, Any] = {
    "step": int,
    "settings": dict,
    "trainable": list,
    "optimizer": list,
    "scaler": dict,
    "best_step": int,
    "best_loss": (int, float),
    "guards": dict,
    "penalties": list,
    "log": dict,
    "sums": list,
    "summed": int,
}
INSIDE = {"trainable": str, "optimizer": dict, "guards": dict, "penalties": dict, "log": int, "sums": str}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def save_state(path: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and facts, whole or not at all.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_state(f"{folder}/state.safetensors", {"a": torch.ones(2)}, {"step": 3})
        ...     tensors, facts = read_state(f"{folder}/state.safetensors")
        >>> tensors["a"].tolist(), facts["step"]
        ([1.0, 1.0], 3)
    """
    document = json.dumps({"format": FORMAT, "version": VERSION, "sha256": UNSEALED, **facts})
    plain = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
    safetensors = need("safetensors.torch", "saving and loading", "train")
    write_aside(path, seal(safetensors.save(plain, metadata={"bilip": document})))


def read_state(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a file that `save_state` wrote.

    States of bilip 0.1 have no checksum; they are read, with a warning that says so.

    Raises:
        CheckpointError: The file is missing, truncated, damaged, foreign or from another version.
    """
    source = Path(path)
    try:
        return _read(source)
    except _Damaged as error:
        raise CheckpointError(f"{error} {_left_of(source)}") from error


class _Damaged(CheckpointError):
    """A state that cannot be used, though another one beside it may."""


def _read(source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    data = read_file(source, most=MOST, error=CheckpointError, missing="does not exist.")
    header = read_header(
        io.BytesIO(data), len(data), lambda why: _Damaged(f"{source} is not a readable training state ({why}).")
    )
    try:
        facts = parse_json(header.metadata.get("bilip", "{}"), "its list of facts", strict=False, advice="")
    except BilipError as error:
        raise _Damaged(f"{source} is not a readable training state ({str(error).rstrip('. ')}).") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise _Damaged(f"{source} was not written by a bilip training run, or its header is damaged.")
    version, sealed = facts.get("version"), facts.pop("sha256", None)
    if version != 1 and not is_whole(data, sealed):  # before the version is believed
        raise _Damaged(f"{source} is damaged: its checksum is another one.")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{source} has version {version!r:.40}; this bilip reads versions 1 to {VERSION}. Finish that run with the bilip "
            "that began it, or choose another folder."
        )
    if version == 1:
        warnings.warn(f"{source} has no checksum, as in bilip 0.1: damage would go unnoticed.", stacklevel=3)
    safetensors = need("safetensors.torch", "saving and loading", "train")
    try:
        return safetensors.load(data), facts
    except Exception as error:
        raise _Damaged(f"{source} is not a readable training state ({error!s:.300}).") from error


def _left_of(source: Path) -> str:
    """What there is beside a damaged state to go back to."""
    for name, advice in (("previous", "rename it to {} to go on from there"), ("best", "it holds weights alone")):
        other = source.with_name(f"{name}.safetensors")
        if source.name == "last.safetensors" and other.is_file():
            try:
                step = _read(other)[1].get("step")
            except BilipError:
                continue
            return f"The last good state is {other}, after {step} steps: {advice.format(source.name)}."
    return "Copy it again, or delete it to begin anew."


def require_facts(facts: Mapping[str, Any], path: Path) -> None:
    """Raise a `CheckpointError` unless a state holds every fact of a run, each of its kind."""
    missing = set(FACTS) - set(facts)
    if missing:
        raise CheckpointError(
            f"{path} is not the state of a run ({min(missing)!r} is missing; best.safetensors holds weights alone). Delete "
            "it to begin anew."
        )
    for name, kind in FACTS.items():
        parts = facts[name].values() if isinstance(facts[name], dict) else facts[name]
        good = isinstance(facts[name], kind) and type(facts[name]) is not bool
        good = good and (kind is not int or 0 <= facts[name] < 2**63)
        if not good or (name in INSIDE and not all(type(part) is INSIDE[name] for part in parts)):
            raise CheckpointError(
                f"{path} is not the state of a run ({name!r} is {facts[name]!r:.40}). Delete it to begin anew."
            )
    if bool(facts["sums"]) != bool(facts["summed"]) or any(size < 0 for size in facts["log"].values()):
        raise CheckpointError(
            f"{path} is not the state of a run (losses of no steps, or logs of less than nothing). Delete it to begin anew."
        )


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], where: str | Path = "the state") -> None:
    """Fill a model with the weights `model.*` of a state, or with all tensors where none is called so.

    Raises:
        CheckpointError: They are those of another architecture, or no floats where floats are expected.
    """
    inner = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    inner = inner or dict(tensors)
    wanted = model.state_dict()
    wrong = sorted(set(wanted) ^ set(inner)) + [
        name for name, value in wanted.items() if name in inner and inner[name].shape != value.shape
    ]
    if wrong:
        raise CheckpointError(
            f"{where} holds the weights of another architecture: {len(wrong)} names or shapes differ, the first is "
            f"{wrong[0]}. Choose another folder, or the configuration of that run."
        )
    for name, value in wanted.items():
        require_kind(inner[name], value, f"{where}, tensor {name!r},")
    model.load_state_dict(inner)


def require_kind(found: Tensor, like: Tensor, where: str) -> None:
    """Raise a `CheckpointError` unless a tensor has the shape of another, and floats for floats or exactly its dtype."""
    fits = found.dtype in FLOATS if like.is_floating_point() else found.dtype == like.dtype
    if not fits or found.shape != like.shape:
        raise CheckpointError(
            f"{where} is {dtype_name(found.dtype)} of shape {tuple(found.shape)}; expected {dtype_name(like.dtype)} of shape "
            f"{tuple(like.shape)}."
        )


def split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The state of an optimizer as tensors by name and plain values by parameter."""
    tensors: dict[str, Tensor] = {}
    plain: list[dict[str, Any]] = []
    state = optimizer.state_dict()["state"]
    for k in sorted(state):
        rest = {}
        for name, value in state[k].items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{k}.{name}"] = value
            else:
                rest[name] = value
        plain.append({"parameter": k, **rest})
    return tensors, plain


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], plain: list[dict[str, Any]]
) -> None:
    """The inverse of `split_optimizer`; learning rates and other options stay as they are.

    Every tensor is laid out in memory as its parameter is: the fused kernels go through both in the order of the memory.

    Raises:
        CheckpointError: The state is that of other parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for entry in plain:
        k = entry.get("parameter") if isinstance(entry, dict) else None
        if type(k) is not int or not 0 <= k < len(parameters) or k in state:
            raise CheckpointError(
                f"the state of the optimizer names parameter {k!r:.40} of {len(parameters)}, or one twice."
            )
        prefix = f"optimizer.{k}."
        state[k] = {name: value for name, value in entry.items() if name != "parameter"}
        state[k] |= {
            name.removeprefix(prefix): _laid_out(v, parameters[k])
            for name, v in tensors.items()
            if name.startswith(prefix)
        }
        for name, value in state[k].items():
            if isinstance(value, Tensor):
                require_kind(
                    value, parameters[k] if name != "step" else torch.zeros((), device="cpu"), f"{prefix}{name}"
                )
            elif not isinstance(value, (int, float, NoneType)):
                raise CheckpointError(f"the state of the optimizer holds {prefix}{name} = {value!r:.40}.")
        if not {"exp_avg", "step"} <= set(state[k]) or not {"exp_avg_sq", "exp_inf"} & set(state[k]):  # Adam, Adamax
            raise CheckpointError(f"the state of the optimizer lacks the moments of parameter {k}.")
    lost = [name for name in tensors if name.startswith("optimizer.") and name.split(".")[1] not in map(str, state)]
    if lost:
        raise CheckpointError(f"the state of the optimizer does not say whose {lost[0]} is.")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        return value.clone()
    return torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)


class Writer:
    """Does one piece of work at a time on a thread of its own, and hands its error to whoever waits for it.

    Example:
        >>> done = []
        >>> writer = Writer()
        >>> writer.begin(lambda: done.append("first"))
        >>> writer.begin(lambda: done.append("second"))  # waits for the first
        >>> writer.wait()
        >>> done
        ['first', 'second']
        >>> writer.close()
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "bilip-writer")
        self._under_way: Future[object] | None = None

    def begin(self, work: Callable[[], object]) -> None:
        """Begin a piece of work when the one before is done; raises what that one raised."""
        self.wait()
        self._under_way = self._pool.submit(work)

    def wait(self) -> None:
        """Until nothing is under way; raises what it raised."""
        last, self._under_way = self._under_way, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
