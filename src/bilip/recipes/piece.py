"""One part of a recipe for one seed: done once, in a folder of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bilip.errors import CheckpointError, InputError
from bilip.recipes.recipe import Measured, Recipe, Work
from bilip.record import read_json, to_plain, write_json
from bilip.record.files import open_regular

__all__ = ["SCHEMA", "Piece", "do", "is_measured", "load"]

SCHEMA = 1


@dataclass(frozen=True)
class Piece:
    """What has to be done, and where."""

    recipe: Recipe
    part: str
    seed: int
    config: Any
    folder: Path
    device: str

    @property
    def title(self) -> str:
        return f"{self.part}, seed {self.seed}"


def do(piece: Piece, progress: Callable[[str, float], None], fabric: Any = None) -> None:
    """Measure, and write `measured.json` last: a folder that has one is finished."""
    recipe, began = piece.recipe, time.perf_counter()
    piece.folder.mkdir(parents=True, exist_ok=True)
    with _threads(piece.device):
        m = recipe.run(piece.part, piece.config, Work(piece.folder, piece.seed, piece.device, fabric, progress))
    if fabric is not None and not fabric.is_global_zero:
        return
    if m.arrays:
        aside = piece.folder / f".arrays.{os.getpid()}.npz"
        np.savez_compressed(aside, **m.arrays)  # type: ignore[arg-type]
        os.replace(aside, piece.folder / "arrays.npz")
    stamp = {"recipe": recipe.name, "schema": SCHEMA, "config": asdict(piece.config)}
    stamp |= {"seconds": time.perf_counter() - began, "arrays": list(m.arrays), "numbers": dict(m.numbers)}
    write_json(piece.folder / "measured.json", stamp)


def is_measured(folder: Path, recipe: Recipe, config: Any) -> bool:
    """Whether a part is finished; an error if it was begun with another configuration."""
    marker, finished = folder / "config.json", folder / "measured.json"
    stamp = {"recipe": recipe.name, "schema": SCHEMA, "config": to_plain(asdict(config))}
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


def load(folder: Path) -> Measured:
    """What a finished folder holds."""
    try:
        found = read_json(folder / "measured.json")
        arrays: dict[str, np.ndarray] = {}
        if found["arrays"]:
            with open_regular(folder / "arrays.npz", most=2**34) as file, np.load(file, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in found["arrays"]}
        return Measured(found["numbers"], arrays)
    except Exception as error:  # a broken archive can raise almost anything
        raise CheckpointError(
            f"{folder} cannot be read ({type(error).__name__}: {error}). Delete its measured.json to measure again."
        ) from error


@contextmanager
def _threads(device: str) -> Iterator[None]:
    """One thread where the operators are small: more would only slow them down, and change the last bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
