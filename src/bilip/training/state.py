"""Training state as one safetensors file: tensors, and everything else as JSON in its header.

One file is replaced at once, so that a run killed at any moment leaves a whole state behind. Loading reads numbers and JSON; nothing is
executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bilip.errors import CheckpointError, MissingExtra
from bilip.record import write_aside

__all__ = ["load_weights", "read_state", "restore_optimizer", "save_state", "split_optimizer"]

FORMAT = "bilip-training"
VERSION = 1


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
    document = json.dumps({"format": FORMAT, "version": VERSION, **facts})
    plain = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    write_aside(path, _safetensors().save(plain, metadata={"bilip": document}))


def read_state(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a file that `save_state` wrote.

    Raises:
        CheckpointError: The file is missing, truncated, foreign or from another version.
    """
    source = Path(path)
    try:
        data = source.read_bytes()
        length = int.from_bytes(data[:8], "little")
        text = json.loads(data[8 : 8 + length]).get("__metadata__", {}).get("bilip", "{}")
        tensors, facts = _safetensors().load(data), json.loads(text)
    except FileNotFoundError as error:
        raise CheckpointError(f"{source} does not exist.") from error
    except MissingExtra:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{source} is not a readable training state ({error}). Delete it to begin anew, or copy it again."
        ) from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise CheckpointError(f"{source} was not written by a bilip training run. Choose another folder.")
    if facts.get("version") != VERSION:
        raise CheckpointError(
            f"{source} has version {facts.get('version')!r}; this bilip reads version {VERSION}. Finish that run with the bilip "
            "that began it, or choose another folder."
        )
    return tensors, facts


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], where: str | Path = "the state") -> None:
    """Fill a model with the weights `model.*` of a state, or with all tensors where none is called so.

    Raises:
        CheckpointError: They are those of another architecture.
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
    model.load_state_dict(inner)


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
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    for entry in plain:
        k = int(entry["parameter"])
        state[k] = {name: value for name, value in entry.items() if name != "parameter"}
        prefix = f"optimizer.{k}."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        state[k] |= {name: _laid_out(value, parameters[k]) for name, value in own.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _laid_out(value: Tensor, like: Tensor) -> Tensor:
    if value.shape != like.shape:
        return value.clone()
    return torch.empty_like(like, dtype=value.dtype, requires_grad=False).copy_(value)


def _safetensors():
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtra("saving and loading needs safetensors: pip install 'bilip[train]'.") from error
    return safetensors.torch
