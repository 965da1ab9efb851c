"""One part of a recipe for one seed: done once, in a folder of its own."""

from __future__ import annotations

import base64
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from bilip.errors import BilipError, CheckpointError, InputError, RecordError
from bilip.recipes.recipe import Measured, Recipe, Work
from bilip.record import environment, read_json, to_plain, write_json

__all__ = [
    "SCHEMA",
    "About",
    "Borrowed",
    "Piece",
    "device_name",
    "do",
    "is_measured",
    "keep",
    "kept",
    "loaded",
    "taken",
    "today",
]

SCHEMA = 1
KINDS: Mapping[str, Any] = {  # of what stands in a part's file
    **dict.fromkeys(("part", "date", "device"), str),
    **dict.fromkeys(("arrays", "config", "environment", "numbers"), dict),
    "seed": int,
    "seconds": (int, float),
}
MOST = 2**28  # bytes of one array in a part's file
PICTURES = ".pictures.json"  # how the file with the pictures of a part ends, where they are apart


@dataclass(frozen=True)
class Piece:
    """What has to be done, and where."""

    recipe: Recipe
    part: str
    seed: int
    config: Any
    folder: Path
    device: str
    deadline: float | None = None
    data: Path | None = None
    file: Path | None = None  # what is found goes there as well, as one small file

    @property
    def title(self) -> str:
        return f"{self.part}, seed {self.seed}"


def do(piece: Piece, progress: Callable[[str, float], None], fabric: Any = None) -> None:
    """Measure, and write `measured.json` last: a folder that has one is finished."""
    import torch

    from bilip.auditing.float32 import float32_products

    recipe, began = piece.recipe, time.perf_counter()
    piece.folder.mkdir(parents=True, exist_ok=True)
    work = Work(piece.folder, piece.seed, piece.device, fabric, progress, piece.deadline, piece.data)
    try:
        with _threads(piece.device), float32_products():
            m = recipe.run(piece.part, piece.config, work)
    except torch.OutOfMemoryError as error:
        raise BilipError(
            f"{piece.title}: the GPU is out of memory. Run fewer parts at a time (--jobs), use a smaller batch (--set batch=...), or "
            "train with bilip.Reversible, whose memory does not grow with depth. The same command goes on from the last checkpoint."
        ) from error
    if fabric is not None and not fabric.is_global_zero:
        return
    facts = {"recipe": recipe.name, "schema": SCHEMA, "config": recipe.defining(piece.config)}
    facts |= {"device": device_name(piece.device), "environment": environment(), "date": today()}
    m.save(piece.folder, **facts, seconds=time.perf_counter() - began)
    if piece.file is not None:
        keep(piece.folder, piece.file, apart=recipe.pictures_apart)
    shutil.rmtree(piece.folder / "found", ignore_errors=True)  # what `Work.once` kept until here


def is_measured(folder: Path, recipe: Recipe, config: Any) -> bool:
    """Whether a part is finished; an error if it was begun with another configuration."""
    marker, finished = folder / "config.json", folder / "measured.json"
    stamp = {"recipe": recipe.name, "schema": SCHEMA, "config": to_plain(recipe.defining(config))}
    for path in (marker, finished):
        if not path.exists():
            continue
        before = read_json(path)
        if not isinstance(before, dict) or not isinstance(before.get("config"), dict):
            raise CheckpointError(f"{path} is not what a recipe writes. Delete {folder}, or choose another --out.")
        if before.get("schema") != SCHEMA:
            raise CheckpointError(
                f"{folder} was written by another bilip (schema {before.get('schema')!r}, expected {SCHEMA}). Choose another --out."
            )
        there, now = before.get("config", {}), stamp["config"]
        changed = [key for key in now if there.get(key) != now[key]] or sorted(set(there) ^ set(now))
        if changed:
            key = changed[0]
            raise CheckpointError(
                f"{folder} was begun with {key}={there.get(key)!r}, now it is {now.get(key)!r}. Choose another --out, or delete it."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot work in {folder} ({error.strerror}). Choose another --out.") from error
    write_json(marker, stamp)
    return finished.exists()


About = dict[int, dict[str, dict[str, Any]]]  # by seed, then by part: what is known of its measurement


def loaded(folders: Mapping[tuple[str, int], Path]) -> tuple[dict[int, dict[str, Measured]], About]:
    """What finished folders hold, by seed and part, and what is known of each."""
    found: dict[int, dict[str, Measured]] = {}
    about: About = {}
    for part, seed in sorted(folders, key=lambda key: key[1]):
        found.setdefault(seed, {})[part] = Measured.load(folders[part, seed])
        about.setdefault(seed, {})[part] = read_json(folders[part, seed] / "measured.json")
    return found, about


def keep(folder: Path, path: Path, *, apart: bool = False) -> None:
    """Write what a finished folder holds as one small file, which can be collected without the folder; nothing if it is not finished.

    Pictures can be kept `apart`, in a file beside that one: what shows people can then be left out where parts are published.
    """
    if not (folder / "measured.json").exists():
        return
    facts, arrays = read_json(folder / "measured.json"), Measured.load(folder).arrays
    path.parent.mkdir(parents=True, exist_ok=True)
    part = {"part": folder.name, "seed": int(folder.parent.name.removeprefix("seed"))}
    written = {name: _written(value) for name, value in arrays.items()}
    pictures = {name: value for name, value in written.items() if apart and isinstance(value, dict)}
    if pictures:
        write_json(path.with_suffix(PICTURES), {"recipe": facts["recipe"], "arrays": pictures})
    facts |= part | {"arrays": {name: value for name, value in written.items() if name not in pictures}}
    write_json(path, facts)


def _written(value: np.ndarray) -> Any:
    """An array for a JSON file: numbers in lists, and bytes, as of pictures, compressed in one string."""
    if value.dtype != np.uint8:
        return value.tolist()
    packed = zlib.compress(value.tobytes(), 9)
    return {"shape": list(value.shape), "bytes": base64.b64encode(packed).decode()}


def _read(value: Any) -> np.ndarray:
    if not isinstance(value, dict):
        return np.array(value, dtype=np.float64)
    shape, size = tuple(map(int, value["shape"])), math.prod(map(int, value["shape"]))
    if min(shape, default=0) < 0 or size > MOST:
        raise ValueError(f"an array of shape {shape}")
    raw = zlib.decompressobj().decompress(base64.b64decode(value["bytes"], validate=True), size + 1)
    return np.frombuffer(raw, np.uint8).reshape(shape)


def kept(folder: Path, size: str, recipe: Recipe) -> tuple[dict[int, dict[str, Measured]], About]:
    """What the files in a folder hold, by seed and part, in the recipe's order.

    Raises:
        InputError: There is none.
        CheckpointError: One cannot be read, or is another recipe's.
    """
    found: dict[int, dict[str, Measured]] = {}
    about: About = {}
    for path in sorted(folder.glob(f"{size}-seed*.json")):
        if path.name.endswith(PICTURES):
            continue
        try:
            facts = read_json(path)
            if facts["recipe"] != recipe.name or facts["schema"] != SCHEMA:
                raise CheckpointError(
                    f"{path} is of recipe {facts['recipe']!r}, schema {facts['schema']!r}; expected {recipe.name!r}, {SCHEMA}."
                )
            for key, kind in KINDS.items():
                if not isinstance(facts[key], kind):
                    raise TypeError(f"{key} is {facts[key]!r:.40}")
            beside = path.with_suffix(PICTURES)
            pictures = read_json(beside)["arrays"] if beside.exists() else {}
            arrays = {name: _read(value) for name, value in (facts["arrays"] | pictures).items()}
            seed, part = facts["seed"], facts["part"]
            if path.name != f"{size}-seed{seed}-{part}.json":
                raise ValueError(f"it is {part}, seed {seed}: expected that in its name")
            found.setdefault(seed, {})[part] = Measured(facts["numbers"], arrays)
            about.setdefault(seed, {})[part] = {
                key: facts[key] for key in ("config", "date", "device", "environment", "seconds")
            }
        except (RecordError, KeyError, TypeError, ValueError, zlib.error) as error:
            raise CheckpointError(
                f"{path} is not a part that a recipe wrote ({type(error).__name__}: {error}). Copy it again, or delete it."
            ) from error
    if not found:
        raise InputError(f"{folder} holds no part of size {size} that was measured.")
    return dict(sorted(found.items())), dict(sorted(about.items()))


def taken(recipe: Recipe, part: str, config: Any, work: Work) -> Measured | None:
    """The same run of another recipe, with the same configuration, from the folder beside the one that works here, with its origin; `None`
    without one.
    """
    here = work.folder.resolve()
    if len(here.parents) < 5 or here.parents[2].name != "pieces":
        return None
    there, size = here.parents[4] / recipe.name / "parts", here.parents[1].name
    if not (there / f"{size}-seed{work.seed}-{part}.json").exists():
        return None
    found, about = kept(there, size, recipe)
    origin = about[work.seed][part]
    then, now = to_plain(origin.pop("config")), to_plain(recipe.defining(config))
    if any(now.get(key) != value for key, value in then.items()):
        return None
    return replace(found[work.seed][part], origin=origin)


class Borrowed(Recipe):
    """A recipe whose parts are runs of another one, which measures what is shown here while it has the weights.

    Where that recipe has measured a part with the same configuration, in the folder beside this one, its numbers are taken and
    nothing is trained.

    Attributes:
        lender: The other recipe.
        numbers: Names of the numbers that are taken of a run, where it has them.
        arrays: Names of the arrays, likewise.
    """

    lender: Recipe
    numbers: Collection[str]
    arrays: Collection[str]
    partial = True

    def has(self, part: str, config: Any) -> bool:
        return self.lender.has(part, config)

    def defining(self, config: Any) -> dict[str, Any]:
        return self.lender.defining(config)

    def run(self, part: str, config: Any, work: Work) -> Measured:
        m = taken(self.lender, part, config, work) or self.lender.run(part, config, work)
        if not work.main:
            return Measured({})
        numbers = {name: m.numbers[name] for name in self.numbers if name in m.numbers}
        return replace(m, numbers=numbers, arrays={name: m.arrays[name] for name in m.arrays if name in self.arrays})


def device_name(device: str) -> str:
    """The device in words."""
    import platform

    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, {platform.machine()}"


def today() -> str:
    """The date, in UTC."""
    return datetime.now(UTC).date().isoformat()


@contextmanager
def _threads(device: str) -> Iterator[None]:
    """One thread where the operators are small: more would only slow them down, and change the last bits."""
    import torch

    before = torch.get_num_threads()
    # Every call of set_num_threads changes how torch's libraries share work, even with the same number.
    if device != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
