"""A training loop that is watched: the first loss or gradient that is not finite is diagnosed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bilip.adapters import adapt
from bilip.cures.diagnose import Diagnosis, Loss, diagnose
from bilip.errors import InputError, TrainingDiverged

__all__ = ["NonFinite", "Watch", "watch"]


class NonFinite(TrainingDiverged):
    """A loss or a gradient that is not finite, with its `diagnosis`."""

    def __init__(self, message: str, step: int, diagnosis: Diagnosis) -> None:
        super().__init__(message, step)
        self.diagnosis = diagnosis


class Watch:
    """Looks at losses and gradients while a model is trained; diagnoses the first that is not finite.

    Args:
        model: The model.
        loss: `loss(model, batch)`, for the replay; by default as in `diagnose`.
        save: A folder for what failed: weights, batch and random state, for `Watch.replay`.
        stop: Raise `NonFinite` at the first failure; else the diagnosis is kept and training goes on.

    Attributes:
        diagnosis: What was found, or `None`.
        steps: Steps that were watched.
    """

    def __init__(
        self, model: Any, loss: Loss | None = None, *, save: str | Path | None = None, stop: bool = True
    ) -> None:
        self.model, self.loss, self.save, self.stop = model, loss, None if save is None else Path(save), stop
        self.adapted = adapt(model)
        self.target: nn.Module = model if isinstance(model, nn.Module) else self.adapted.bijection
        self.steps, self.diagnosis = 0, None
        self._random = torch.get_rng_state()

    def step(self, loss: Tensor, batch: Any) -> bool:
        """Call it between `loss.backward()` and `optimizer.step()`: whether all is finite.

        Raises:
            NonFinite: The loss or a gradient is not, and `stop` is set.
        """
        self.steps += 1
        gradients = [p.grad for p in self.target.parameters() if p.grad is not None]
        sizes = torch._foreach_norm(gradients) if gradients else []
        total = torch.stack([loss.detach().to(torch.float64).sum(), *(s.to(loss.device, torch.float64) for s in sizes)])
        if bool(torch.isfinite(total).all()):
            self._random = torch.get_rng_state()
            return True
        after = torch.get_rng_state()
        torch.set_rng_state(self._random)
        try:
            if self.save is not None:
                self._write(batch)
            found = diagnose(self.model, batch, loss=self.loss, step=self.steps)
        finally:
            torch.set_rng_state(after)
        if self.diagnosis is None:
            self.diagnosis = found
        if self.stop:
            said = (
                str(found)
                if found.found
                else "the replay of the batch is finite: what failed depends on random numbers or other code."
            )
            raise NonFinite(f"training broke in step {self.steps}: {said}", self.steps, found)
        return False

    def _write(self, batch: Any) -> None:
        folder = self.save
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "state": self.target.state_dict(),
                "batch": batch,
                "random": self._random,
                "step": self.steps,
                "training": self.target.training,
            },
            folder / "failure.pt",
        )

    @staticmethod
    def replay(model: Any, folder: str | Path, loss: Loss | None = None) -> Diagnosis:
        """Diagnose what a watch has saved, with a model of the same architecture; it is loaded with the saved weights.

        Tensors alone are read, nothing in the file is executed.
        """
        path = Path(folder) / "failure.pt"
        if not path.is_file():
            raise InputError(f"{path} does not exist; a Watch with save= writes it where training breaks.")
        saved = torch.load(path, weights_only=True, map_location="cpu")
        model = copy.deepcopy(model)
        target = model if isinstance(model, nn.Module) else adapt(model).bijection
        target.load_state_dict(saved["state"])
        target.train(saved["training"])
        with torch.random.fork_rng():
            torch.set_rng_state(saved["random"])
            return diagnose(model, saved["batch"], loss=loss, step=saved["step"])


@contextmanager
def watch(
    model: Any, loss: Loss | None = None, *, save: str | Path | None = None, stop: bool = True
) -> Iterator[Watch]:
    """A `Watch` for a training loop.

    Example:
        >>> import bilip, torch
        >>> flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, scale="exp"))
        >>> optimizer = torch.optim.SGD(flow.parameters(), lr=1e6)
        >>> with bilip.cures.watch(flow, stop=False) as watching:
        ...     for _ in range(5):
        ...         x = torch.randn(64, 2)
        ...         loss = -flow.log_prob(x).mean()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         if not watching.step(loss, x):
        ...             break
        ...         optimizer.step()
        >>> watching.diagnosis.found
        True
    """
    yield Watch(model, loss, save=save, stop=stop)
