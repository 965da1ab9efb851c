"""Save and load models: a folder with `config.json` and `model.safetensors`.

Loading calls the functions of `bilip.models` that the config names and fills in numbers; nothing in the files is
executed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import bilip
from bilip.blocks import Bijection, Flow
from bilip.errors import CheckpointError, MissingExtra
from bilip.models._config import build, config_of, remembers
from bilip.record import write_aside

__all__ = ["flow", "load", "save"]

FORMAT = "bilip-model"
VERSION = 1


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
    if isinstance(model, Flow) and not hasattr(model, "config") and model.base == "normal":
        model = flow(model.bijection)
    dtype = next((str(p.dtype).removeprefix("torch.") for p in model.parameters()), "float32")
    document = {"format": FORMAT, "version": VERSION, "bilip": bilip.__version__, "dtype": dtype, **config_of(model)}
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    # The weights first: a folder with new weights and an old config fails to load; it never loads as something else.
    write_aside(target / "model.safetensors", safetensors.save(state, metadata={"format": "pt"}))
    write_aside(target / "config.json", text)


def load(folder: str | Path) -> Any:
    """Read a model from a folder that `save` wrote.

    Raises:
        CheckpointError: A file is missing, truncated, foreign, or does not fit the model.
    """
    safetensors = _safetensors()
    source = Path(folder)
    model = build(_read_config(source / "config.json"))
    weights = source / "model.safetensors"
    try:
        state: dict[str, Tensor] = safetensors.load(weights.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{weights} does not exist; a checkpoint is a folder with config.json and model.safetensors."
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{weights} is not a readable safetensors file ({error}). It may be truncated: copy or save it again."
        ) from error
    wanted = model.state_dict()
    missing, extra = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
    shapes = [
        f"{k}: {tuple(state[k].shape)} instead of {tuple(wanted[k].shape)}"
        for k in wanted
        if k in state and state[k].shape != wanted[k].shape
    ]
    if missing or extra or shapes:
        raise CheckpointError(
            f"{weights} does not fit its config: missing {_some(missing)}; unexpected {_some(extra)}; shapes "
            f"{_some(shapes)}."
        )
    floats = {value.dtype for value in state.values() if value.is_floating_point()}
    if len(floats) == 1:
        model.to(floats.pop())
    model.load_state_dict(state)
    return model


def _read_config(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist; a checkpoint is a folder with config.json and model.safetensors."
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(
            f"{path} is not readable JSON ({error}). It may be truncated: copy or save it again."
        ) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by bilip: its 'format' is not {FORMAT!r}.")
    if document.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {document.get('version')!r}; this bilip reads version {VERSION}. Upgrade bilip."
        )
    return document


def _some(items: list[str]) -> str:
    return "none" if not items else ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def _safetensors():
    try:
        import safetensors.torch
    except ImportError as error:
        raise MissingExtra("saving and loading models needs safetensors: pip install 'bilip[train]'.") from error
    return safetensors.torch
