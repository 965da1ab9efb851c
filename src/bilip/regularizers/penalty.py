"""What every penalty has in common: when it is due, what it is given, and which samples it leaves out."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bilip._torch import Flag, capturing
from bilip.adapters import as_bijection
from bilip.blocks import Bijection
from bilip.errors import InputError

__all__ = ["Latent", "Penalty", "SkippedSamples"]

Latent = tuple[Tensor, Tensor | None]


class SkippedSamples(UserWarning):
    """A penalty left samples out, because the network does not give finite numbers for them."""


class Penalty(ABC):
    r"""A term that a training loop adds to its loss: `loss = task + penalty(model, x, latent=(z, log_det), step=step)`.

    A penalty of your own writes `value(model, x, latent, step, context)`, a scalar without the weight. It is computed in the steps
    with `step % every == 0`; in the others the answer is an exact zero that costs nothing. As in the paper's code it is *not*
    multiplied by `every`: a rarer penalty is a weaker one.

    Args:
        weight: Factor of the penalty, 0 or more.
        every: Steps from one penalty to the next.

    Attributes:
        seen: Samples that were looked at so far.
        skipped: How many of them were left out, because the network gives NaN or Inf for them.
        uses_log_det: Whether it looks at the log-determinant of `latent`; a task need not compute it for one that does not.

    Example:
        >>> from bilip.models import real_nvp
        >>> class Small(Penalty):
        ...     def value(self, model, x, latent, step, context):
        ...         return model(x).square().mean()
        >>> x = torch.ones(4, 2)
        >>> penalty = Small(weight=0.1, every=5)
        >>> float(penalty(real_nvp(2, blocks=1), x, step=3)), penalty(real_nvp(2, blocks=1), x, step=5) > 0
        (0.0, tensor(True))
    """

    uses_log_det: bool = True

    def __init__(self, weight: float, every: int = 1) -> None:
        self.weight = self._number("weight", weight, least=0.0)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise InputError(f"{self._who}(every={every!r}): expected a whole number of steps, 1 or more.")
        self.every = every
        self.seen, self.skipped, self.flag = 0, 0, Flag(self)
        self._foreign: tuple[Any, Bijection] | None = None

    @property
    def _who(self) -> str:
        return type(self).__name__

    def __call__(
        self, model: Any, x: Tensor, *, step: int, latent: Latent | None = None, context: Tensor | None = None
    ) -> Tensor:
        """The penalty, a scalar.

        Args:
            model: The network: a bijection, for example a `Reversible`, a flow, or anything `as_bijection` takes.
            x: The batch.
            step: Number of the training step.
            latent: z and log-determinant of the task's own pass through the same model, so that they are not computed twice.
                The log-determinant may be `None` where it is not used.
            context: Context of the batch.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise InputError(f"{self._who}(step={step!r}): expected the number of the training step, 0 or more.")
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or not len(x):
            shape = f"shape {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"{self._who}: expected a batch of floats, shape (batch, ...), got {shape}.")
        if latent is not None:
            self._check_latent(x, latent)
        if step % self.every or not self.weight:
            return x.new_zeros(())
        return self.weight * self.value(self._bijection(model), x, latent, step, context)

    @abstractmethod
    def value(self, model: Bijection, x: Tensor, latent: Latent | None, step: int, context: Tensor | None) -> Tensor:
        """The penalty without its weight."""

    def state(self) -> dict[str, Any]:
        """What is carried from step to step, as JSON values. For checkpoints."""
        return {"seen": self.seen, "skipped": self.skipped}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on as the penalty whose `state()` this was."""
        self.seen, self.skipped = int(state["seen"]), int(state["skipped"])

    def counts(self) -> dict[str, int]:
        """What is counted on the host, which a replay of a captured step does not do."""
        return {"seen": self.seen}

    def recount(self, counts: Mapping[str, int]) -> None:
        """Go on from other counts."""
        self.seen = counts["seen"]

    # ---- what penalties share

    def _bijection(self, model: Any) -> Bijection:
        if isinstance(model, Bijection):
            return model
        if self._foreign is None or self._foreign[0] is not model:
            trunk = getattr(model, "trunk", None)
            self._foreign = (model, trunk if isinstance(trunk, Bijection) else as_bijection(model))
        return self._foreign[1]

    def _check_latent(self, x: Tensor, latent: Latent) -> None:
        who = f"{self._who}(latent=...)"
        if not isinstance(latent, (tuple, list)) or len(latent) != 2 or not isinstance(latent[0], Tensor):
            raise InputError(f"{who}: expected the pair (z, log_det) from forward_and_log_det; log_det may be None.")
        z, log_det = latent
        if len(z) != len(x) or z[0].numel() != x[0].numel():
            raise InputError(f"{who}: x has shape {tuple(x.shape)}, z has {tuple(z.shape)}: not the latents of x.")
        if log_det is not None and (not isinstance(log_det, Tensor) or log_det.shape != x.shape[:1]):
            shape = tuple(log_det.shape) if isinstance(log_det, Tensor) else type(log_det).__name__
            raise InputError(f"{who}: expected one log-determinant for each of {len(x)} samples, got {shape}.")

    def _number(
        self, name: str, value: float, *, least: float, open_end: bool = False, most: float = math.inf
    ) -> float:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not good or value < least or value > most or (open_end and value == least):
            end = f"above {least:g}" if open_end else f"{least:g} or more"
            limit = "" if most == math.inf else f", at most {most:g}"
            raise InputError(f"{self._who}({name}={value!r}): expected a number {end}{limit}.")
        return float(value)

    def _finite_mean(self, terms: Callable[..., Tensor], x: Tensor, *others: Tensor | None) -> Tensor:
        """The mean over the samples of terms that are finite, 0 where none is; the arguments are those of `_finite_only`."""
        found = self._finite_only(terms, x, *others)
        return found.mean() if len(found) else x.new_zeros(())

    def _finite_only(self, terms: Callable[..., Tensor], *rows: Tensor | None) -> Tensor:
        """Terms of the samples, shape `(batch,)`, without those that are not finite; possibly empty.

        A term that is not finite cannot be masked out afterwards: its gradient, 0 times infinity, would reach every parameter. So the
        terms are evaluated again for the other samples alone. A captured step cannot stop to look: it raises `flag`, and has to be run
        again without its graph.

        Args:
            terms: From some rows of each of `rows`, or from these tensors themselves where all samples are meant, to their terms.
            rows: The batch, and what else has a row for each of its samples; `None` stays `None`.
        """
        found = terms(*rows)
        self.flag.note()
        self.seen += len(found)
        if capturing(found):
            good = torch.isfinite(found)
            self.flag.raise_unless(good.all())
            return torch.where(good, found, 0.0)
        kept: Tensor | None = None
        for _ in range(3):  # once, unless samples act upon each other
            good = torch.isfinite(found.detach())
            if bool(good.all()):
                return found
            fine = good.nonzero().flatten()
            kept = fine if kept is None else kept[fine]
            self._skip(len(good) - len(fine))
            if not len(fine):
                return found[fine].detach()
            found = terms(*(None if t is None else t[kept] for t in rows))
        return found[torch.isfinite(found.detach())]

    def _skip(self, count: int) -> None:
        if not self.skipped:
            warnings.warn(
                f"{self._who}: the network gives NaN or Inf for {count} samples of a batch; they are left out. Its attribute "
                "skipped counts them; this is said once. Begin with the penalty earlier, or with a larger weight.",
                SkippedSamples,
                stacklevel=5,
            )
        self.skipped += count

    def __repr__(self) -> str:
        return f"{self._who}(weight={self.weight:g}, every={self.every})"
