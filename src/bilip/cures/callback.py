"""`Watch` for Lightning code of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bilip.cures.watching import NonFinite, Watch
from bilip.errors import MissingExtra

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingExtra("DiagnoseCallback needs lightning: pip install 'bilip[train]'.") from error

__all__ = ["DiagnoseCallback"]


class DiagnoseCallback(Callback):
    """Stops a training of Lightning at the first gradient that is not finite, and says where it began.

    The batch is run again through `training_step`, on a copy, operation by operation. Until then each step costs one look at the norms of
    the gradients.

    Args:
        model: From the LightningModule to its network: a bijection, a flow, or anything `as_bijection` takes.
        save: A folder for what failed, for `Watch.replay`.

    Attributes:
        watch: The `Watch`, once training has begun.
    """

    def __init__(self, model: Callable[[Any], Any], *, save: Any = None) -> None:
        self.model, self.save = model, save
        self.watch: Watch | None = None
        self._batch: Any = None
        self._index = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch."""
        self._batch, self._index = batch, batch_idx

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Look at the gradients; they are those before clipping."""
        if self.watch is None:
            self.watch = Watch(self.model(pl_module), save=self.save)
        index = self._index

        def loss(model: Any, batch: Any) -> Any:
            found = _with(pl_module, self.model(pl_module), model).training_step(batch, index)
            return found["loss"] if isinstance(found, dict) else found

        self.watch.loss = loss
        try:
            self.watch.step(torch.zeros((), device=pl_module.device), self._batch)
        except NonFinite:
            trainer.should_stop = True
            raise


def _with(module: LightningModule, model: Any, other: Any) -> Any:
    """A shell of a LightningModule whose network is another one."""
    import copy

    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    for name, part in module._modules.items():
        if part is model:
            shell._modules[name] = other
    return shell
