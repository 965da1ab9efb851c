"""Devices and processes, through Lightning Fabric."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bilip.errors import InputError, MissingExtra
from bilip.training.settings import Settings

__all__ = ["launch", "own_rows"]


def launch(settings: Settings) -> Any:
    """A launched Fabric. With several devices, the program is run once for each of them from the start.

    Example:
        >>> fabric = launch(Settings(steps=1, device="cpu"))
        >>> fabric.world_size, fabric.device
        (1, device(type='cpu'))
    """
    try:
        from lightning.fabric import Fabric
    except ImportError as error:
        raise MissingExtra("training needs Lightning Fabric: pip install 'bilip[train]'.") from error
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device='cuda': torch sees no CUDA device here. Use device='cpu'.")
    device = settings.device if settings.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and settings.devices > torch.cuda.device_count():
        raise InputError(f"devices={settings.devices}: torch sees {torch.cuda.device_count()} CUDA devices here.")
    several = settings.devices * settings.nodes > 1
    with warnings.catch_warnings(), _without_advice():
        warnings.filterwarnings("ignore", module="lightning")
        fabric = Fabric(
            accelerator=device,
            devices=settings.devices,
            num_nodes=settings.nodes,
            strategy="ddp" if several else "auto",
            precision=settings.precision,  # type: ignore[arg-type]
        )
        fabric.launch()
    return fabric


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Lightning would tell in every process that products could be rounded to TF32: of all things, not here."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)


def own_rows(batch: Tensor, fabric: Any) -> Tensor:
    """This process's share of a batch: every n-th row."""
    if len(batch) % fabric.world_size:
        raise InputError(
            f"a batch of {len(batch)} rows cannot be shared equally by {fabric.world_size} processes: the mean of their losses would not "
            "be that of the batch. Choose another batch size."
        )
    return batch[fabric.global_rank :: fabric.world_size]
