"""Image sets by name: what they are, where they are looked for, and whether they are whole."""

from __future__ import annotations

import os
from pathlib import Path

from bilip.data.images import Images, cifar10
from bilip.errors import InputError

__all__ = ["image_set"]


def data_folder(folder: str | Path | None = None) -> Path:
    """Where data is looked for: the folder given, or the variable BILIP_DATA, or `.data`."""
    return Path(folder if folder is not None else os.environ.get("BILIP_DATA") or ".data")


def image_set(name: str, split: str = "train", folder: str | Path | None = None) -> Images:
    root = data_folder(folder)
    if name != "cifar10":
        raise InputError(name)
    return cifar10(root / name if (root / name).is_dir() else root, split=split)
