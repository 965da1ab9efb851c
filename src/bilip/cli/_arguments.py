"""What users name on the command line: a model, data, files to write."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bilip.errors import BilipError, InputError, need, said_by
from bilip.record.files import is_open_file

if TYPE_CHECKING:
    from bilip.adapters import Adapted


def load_model(target: str, device: str | None = None) -> Adapted:
    """Load `folder`, `package.module:function` or `package.module:object`, of any library that `as_bijection` takes.

    A function is called, a module is taken as it is.
    """
    return load_native(target, device)[1]


def load_native(target: str, device: str | None = None) -> tuple[object, Adapted]:
    """The object of the library itself, and the model that `as_bijection` makes of it."""
    import torch

    from bilip.adapters import adapt
    from bilip.models import load

    model = load(target) if Path(target).is_dir() else import_named(target)
    if callable(model) and not isinstance(model, (torch.nn.Module, torch.distributions.Transform)):
        try:
            model = model()
        except (BilipError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise InputError(f"{target} raised {_text(error)}.") from error
    try:
        adapted = adapt(model)
    except BilipError as error:
        raise InputError(f"{target} gave an object of type {type(model).__name__}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(
            f"{target} gave an object of type {type(model).__name__}, which raised {_text(error)}."
        ) from error
    if device is not None:
        try:
            adapted.bijection.to(device)
            if isinstance(model, torch.nn.Module):  # its base too
                model.to(device)
        except Exception as error:  # torch raises several kinds where a device is missing
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"--device {device}: {text:.300}") from error
    empty = [name for name, value in adapted.bijection.state_dict().items() if getattr(value, "is_meta", False)]
    if empty:
        raise InputError(
            f"{target} is on the device meta, where tensors have no numbers ({empty[0]}). Load its weights first, and use another --device."
        )
    return model, adapted


def _text(error: BaseException) -> str:
    return said_by(error).rstrip(".: ")


def import_named(target: str) -> object:
    """What a module calls by a name: `package.module:name`. Modules of the folder in which bilip runs are found."""
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise InputError(f"{target!r} is neither a checkpoint folder nor of the form package.module:function.")
    if module.endswith(".py") or "/" in module:
        raise InputError(
            f"{target} names a file: expected a module, as in {Path(module).stem}:{name}, in the folder that holds it."
        )
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except (BilipError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        raise InputError(f"{target}: {error}. Run bilip in the folder that holds it, or install it.") from error
    except BaseException as error:
        raise InputError(f"importing the module {module!r} raised {_text(error)}.") from error
    finally:
        sys.path.remove("")
    if not hasattr(found, name):
        raise InputError(f"the module {module!r} has no {name!r}.")
    return getattr(found, name)


def listed(text: str) -> list[str]:
    """The parts of a text between commas, as in `likelihood,sampling`."""
    return [part.strip() for part in text.split(",") if part.strip()]


def named_files(entries: list[str]) -> dict[str, str]:
    """Files of `--data` by name: `NAME=FILE`, or a file that is called by its stem; each where it lies now."""
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not equals or not name or Path(entry).exists():
            name, path = Path(entry).stem or "data", entry
        if not path:  # a variable that is empty; Python takes it for the working folder
            raise InputError(f"--data {entry!r} names no file: expected FILE or NAME=FILE.")
        if name in found:
            raise InputError(f"--data: two sources are called {name!r}. Give each a name, as in --data other={path}.")
        found[name] = lying(path)
    return found


def lying(path: str) -> str:
    """A file by its absolute path: a model may change the working folder. What is no file there stays as it is."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def require_page(path: Path | None) -> None:
    """Say what a page needs before a long audit, not after it."""
    if path is not None:
        for module in ("jinja2", "markupsafe", "plotly.offline"):
            need(module, "the HTML page")


def require_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written: before a long audit, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder.")
    if is_open_file(path) and path.exists():
        return  # whoever may open it again, as `/dev/stdout`
    folder = (Path(os.path.realpath(path)) if path.is_symlink() else path).parent
    if not folder.is_dir():
        why = f"{folder} is not a folder" if folder.exists() else f"the folder {folder} does not exist"
        raise InputError(f"cannot write {path}: {why}.")
    replaced = path.is_file() or not path.exists()  # pipes and devices are written to where they are
    if not os.access(path if path.exists() else folder, os.W_OK) or (replaced and not os.access(folder, os.W_OK)):
        raise InputError(f"cannot write {path}: no permission.")


def require_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[str | Path]) -> None:
    """Refuse files that cannot be written, that are read as well, or that are written twice: before a long audit, not after it.

    Args:
        outputs: Files by the option that names them.
        inputs: Files and folders that the verb reads.
    """
    for path in outputs.values():
        require_writable(path)
    require_apart(outputs, inputs)


def require_apart(outputs: Mapping[str, Path | None], inputs: Iterable[str | Path]) -> None:
    """Refuse outputs that would overwrite what is read, or one another; a pipe or a device may be named twice."""
    taken = [(str(path), Path(path)) for path in inputs]
    for option, path in outputs.items():
        if path is None or is_open_file(path) or (path.exists() and not path.is_file()):
            continue
        for name, other in taken:
            if _overwrites(path, other):
                raise InputError(f"{option} {path} would overwrite {name}: name another file.")
        taken.append((f"{option} {path}", path))


def read_for(target: str) -> list[Path]:
    """The files that a model comes from, as far as its name tells: a folder, or a module below the current folder."""
    if Path(target).is_dir():
        return [Path(target)]
    module = target.partition(":")[0].replace(".", "/")
    return [path for path in (Path(f"{module}.py"), Path(module, "__init__.py")) if path.is_file()]


def _overwrites(path: Path, read: Path) -> bool:
    """Whether writing a file changes what is read: the same file, also through links, or a part of a folder of images or weights."""
    if path.exists() and read.is_dir():
        part = path.suffix.lower() in (".png", ".jpg", ".jpeg", ".safetensors") or path.name == "config.json"
        return part and Path(os.path.realpath(read)) in Path(os.path.realpath(path)).parents
    same = os.path.realpath(path) == os.path.realpath(read)
    return same or (path.exists() and read.exists() and path.samefile(read))
