"""Short fine-tuning, and the rung that does it with penalties.

Gradients are clipped, held-out batches are evaluated every few steps, and the model returns to the best state.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from bilip.adapters.foreign import reference
from bilip.auditing.audit import main_source
from bilip.auditing.float32 import float32_products
from bilip.blocks import Bijection
from bilip.cures.rung import Case, Rung, Screen, Skipped
from bilip.cures.treated import Treated
from bilip.data import Source
from bilip.errors import InputError, said_by
from bilip.nets.replay import evaluating
from bilip.regularizers import FiniteDifference, FlowLikelihood, Penalty
from bilip.regularizers.penalty import Latent, SkippedSamples

__all__ = ["Penalties", "RoundTrip", "Tuning", "held_out_loss", "tuned"]

Loss = Callable[[Any, Any], Any]
_MOST_HELD_OUT = 2048  # rows set aside at most


@dataclass
class Tuning:
    """What fine-tuning needs."""

    # `loss(model, batch)`, a scalar, or a mapping with a scalar `loss`. A module has parameters of its own, which are
    # tuned along.
    loss: Loss
    batches: Callable[[], Iterator[Any]]  # called for an endless stream of batches
    held_out: list[Any]  # batches on which the cost is measured
    held_out_from: str  # where these come from, in words
    steps: int = 400  # largest number of steps
    rate: float = 3e-4  # learning rate of Adam
    clip: float = 1.0  # largest norm of a gradient
    tf32: bool = False  # whether the steps, not what is measured, multiply in TF32
    # Further numbers of `loss`, such as an accuracy, are reported where it returns a mapping.
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        loss: Loss | None,
        train: Any,
        held_out: Any,
        treated: Treated,
        sources: Sequence[Source],
        *,
        batch: int = 256,
        seed: int = 0,
        **options: Any,
    ) -> Tuning | None:
        """What the user gave as loss and batches; `None` if they gave too little for fine-tuning."""
        if train is None:
            if loss is not None:
                raise InputError("cure(loss=...): a loss needs batches to be tuned on; pass train= as well.")
            return None
        own = loss is None
        if loss is None:
            if treated.adapted.base is None:
                return None
            loss = Likelihood()
        if not callable(loss):
            raise InputError(
                f"cure(loss={type(loss).__name__}): expected a function loss(model, batch) that returns a scalar."
            )
        given = None if held_out is None else _held_out_batches(held_out, batch)
        rows = _rows(train, "train")
        if rows is not None:
            return cls(loss, *_from_rows(rows, given, batch, seed, single=not isinstance(train, tuple)), **options)
        loader = _loader(train, batch)
        if given is not None:
            held, text = given, "held_out"
        elif own:
            first = main_source(sources)
            held, text = (
                [b.x if b.context is None else (b.x, b.context) for b in first.batches(batch, limit=_MOST_HELD_OUT)],
                f"source {first.name}",
            )
        else:
            held, text = list(itertools.islice(loader, 4)), "the first four batches of train itself"

        return cls(loss, functools.partial(_again_and_again, loader), held, text, **options)


def _from_rows(
    rows: tuple[Tensor, ...], held_out: list[Any] | None, batch: int, seed: int, *, single: bool
) -> tuple[Callable[[], Iterator[Any]], list[Any], str]:
    """From tensors: an endless stream of random batches, held-out batches, and where these come from in words.

    Without held-out batches the last rows, a tenth, are set aside.
    """
    aside = 0 if held_out is not None else min(_MOST_HELD_OUT, max(1, len(rows[0]) // 10))
    count = len(rows[0]) - aside
    if count < 1:
        raise InputError(f"cure(train=...): {len(rows[0])} rows are too few to train on and to hold some out.")
    used, text = tuple(t[:count] for t in rows), "held_out"
    if held_out is None:
        rest = tuple(t[count:] for t in rows)
        held_out, text = _held_out_batches(rest[0] if single else rest, batch), f"the last {aside:,} rows of train"

    def batches() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            pick = torch.randint(count, (min(batch, count),), generator=generator, device="cpu")
            chosen = tuple(t[pick.to(t.device)] for t in used)
            yield chosen[0] if single else chosen

    return batches, held_out, text


def _again_and_again(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, from the beginning again when they end."""
    while True:
        count = 0
        for batch in loader:
            count += 1
            yield batch
        if not count:
            raise InputError("cure(train=...): it has no more batches; expected some in every pass.")


def _loader(train: Any, batch: int) -> Any:
    """Batches that can be read again and again, from a `DataLoader`, a `Dataset`, a list or an iterator."""
    if not isinstance(train, (DataLoader, Dataset, Iterable)) or isinstance(train, (str, bytes, Mapping, Set)):
        raise InputError(
            f"cure(train={type(train).__name__}): expected a tensor, a tuple of tensors, a DataLoader, a Dataset or a list of batches."
        )
    loader: Any = train
    if isinstance(train, Dataset):
        loader = DataLoader(train, batch, shuffle=None if isinstance(train, IterableDataset) else True)
    if not isinstance(loader, DataLoader) and iter(loader) is loader:
        loader = list(itertools.islice(loader, 1024))
    if isinstance(loader, (list, tuple)) and not len(loader):
        raise InputError("cure(train=...): it has no batch.")
    return loader


class Likelihood:
    """The mean negative log-likelihood in nats, for any flow."""

    def __call__(self, model: Any, batch: Any) -> Tensor:
        x, context = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (first_of(batch), None)
        if hasattr(model, "adapted"):  # a treated model knows its base
            z, log_det = model.adapted.bijection.forward_and_log_det(x, context)
            return -(model.adapted.base.log_prob(z, context) + log_det).mean()
        return -(model.log_prob(x) if context is None else model.log_prob(x, context)).mean()


def first_of(batch: Any) -> Any:
    """The input: the first of a tuple, a list or a mapping, else the batch itself."""
    if isinstance(batch, Mapping):
        return next(iter(batch.values()), None)
    return batch[0] if isinstance(batch, (tuple, list)) and batch else batch


def _rows(value: Any, argument: str) -> tuple[Tensor, ...] | None:
    """Tensors or arrays with one row for each sample; `None` for what holds batches."""
    if isinstance(value, (Tensor, np.ndarray)):
        value = (value,)
    if not isinstance(value, tuple) or not value or not all(isinstance(t, (Tensor, np.ndarray)) for t in value):
        return None
    try:
        rows = tuple(t if isinstance(t, Tensor) else torch.as_tensor(t, device="cpu") for t in value)
    except (TypeError, ValueError) as error:
        raise InputError(f"cure({argument}=...): an array that torch does not take ({said_by(error)}).") from error
    lengths = [len(t) if t.ndim else 0 for t in rows]
    if len(set(lengths)) > 1:
        raise InputError(
            f"cure({argument}=...): the tensors of a tuple have {' and '.join(map(str, lengths))} rows; expected as many of each. "
            "Batches come in a list."
        )
    return rows


def _held_out_batches(value: Any, batch: int) -> list[Any]:
    """Held-out batches from a tensor, a tuple of tensors, or batches: at most 16 of these."""
    rows = _rows(value, "held_out")
    if rows is None:
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping, Set)):
            raise InputError(f"cure(held_out={type(value).__name__}): expected what train may be.")
        if isinstance(value, Dataset):
            value = DataLoader(value, batch)
        parts = list(itertools.islice(value, 16))
    else:
        parts = [tuple(t[start : start + batch] for t in rows) for start in range(0, len(rows[0]), batch)]
        parts = parts if isinstance(value, tuple) else [part[0] for part in parts]
    if not parts:
        raise InputError("cure(held_out=...): it has no batch.")
    return parts


def moved(batch: Any, like: Tensor) -> Any:
    """A batch on the device of a tensor, floats in its dtype."""
    if isinstance(batch, Tensor):
        return batch.to(device=like.device, dtype=like.dtype if batch.is_floating_point() else None)
    if isinstance(batch, Mapping):
        return {name: moved(part, like) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(part, like) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(moved(part, like) for part in batch)
    return batch


def scalar(found: Any, caller: str = "cure") -> tuple[Tensor, dict[str, float]]:
    """What a loss returned, as the scalar and the further numbers beside it; errors name the caller."""
    more: dict[str, float] = {}
    if isinstance(found, dict):
        if "loss" not in found:
            raise InputError(
                f"{caller}(loss=...): it returned a mapping of {', '.join(map(str, found))}; expected one with 'loss'."
            )
        more = {k: float(v) for k, v in found.items() if k != "loss"}
        found = found["loss"]
    if not isinstance(found, Tensor) or found.numel() != 1 or found.is_complex():
        given = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        if isinstance(found, Tensor) and found.is_complex():
            given = "a complex number"
        raise InputError(f"{caller}(loss=...): it returned {given}, expected a scalar tensor.")
    return found.reshape(()), more


def _called(loss: Loss, treated: Treated, batch: Any) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch. One that is written for the library's own object, and not for a wrapper, gets that."""
    given = moved(batch, reference(treated.bijection))
    if isinstance(loss, Likelihood):
        return scalar(loss(treated, given))
    if treated.model is treated.native:
        return scalar(loss(treated.model, given))
    try:
        return scalar(loss(treated.model, given))
    except Exception:
        return scalar(loss(treated.native, given))


@torch.no_grad()
def held_out_loss(treated: Treated, tuning: Tuning, loss: Loss | None = None) -> dict[str, float]:
    """The mean loss on the held-out batches, and the means of what else the loss returns; infinite where it is not finite.

    Raises:
        InputError: The loss does not work on this model and its batches.
    """
    sums: dict[str, float] = {}
    module = treated.native if isinstance(treated.native, nn.Module) else treated.bijection
    total = 0
    with evaluating(module):
        for batch in tuning.held_out:
            size = len(first_of(batch)) if hasattr(first_of(batch), "__len__") else 1
            try:
                value, more = _called(loss or tuning.loss, treated, batch)
            except InputError as error:
                if str(error).startswith("cure("):
                    raise
                raise InputError(f"cure(train=...): the model does not take its batches. {error}") from error
            except Exception as error:
                raise InputError(f"cure(loss=...): it raised {said_by(error)} on a held-out batch.") from error
            for name, number in ({"loss": float(value)} | more).items():
                sums[name] = sums.get(name, 0.0) + size * (number if math.isfinite(number) else math.inf)
            total += size
    return {name: value / total for name, value in sums.items()}


@dataclass
class Tuned:
    """What fine-tuning did."""

    steps: int
    seconds: float
    held_out: dict[str, float]
    history: list[dict[str, float]]
    loss: Loss

    def facts(self) -> dict[str, Any]:
        """The same as JSON values, times in seconds."""
        return {
            "steps": self.steps,
            "tuning_seconds": round(self.seconds, 2),
            "held_out_history": self.history,
        }


def tuned(
    treated: Treated,
    tuning: Tuning,
    *,
    penalties: Sequence[Penalty] = (),
    extra: Callable[[Bijection, int], Tensor] | None = None,
    bad: Callable[[], float] | None = None,
    target: float = -math.inf,
    left: Callable[[], float] = lambda: math.inf,
    tell: Callable[[str], None] = lambda text: None,
) -> Tuned:
    """Fine-tune a copy, and leave it in its best state.

    Args:
        treated: The copy.
        tuning: Loss, batches and held-out batches.
        penalties: Added to the loss, on the input of each batch.
        extra: A further term, a function of the bijection and the step.
        bad: Measures the share of samples that are bad; a state is better if that is smaller, then if its held-out loss is.
        target: Stop early at a held-out loss of at most this, if nothing is bad.
        left: Seconds that are left.
        tell: Progress.
    """
    started = monotonic()
    optimizer = _Optimizer(treated, tuning, penalties, extra)
    check = max(1, tuning.steps // 10)
    history: list[dict[str, float]] = []

    def score(step: int) -> tuple[tuple[float, float], dict[str, float]]:
        """What is compared, the share of bad samples and the loss, and all held-out numbers."""
        found = held_out_loss(treated, tuning, optimizer.loss)
        share = 0.0 if bad is None else bad()
        history.append({"step": step, **found, "bad": share})
        return (round(share, 4), found["loss"]), found

    best, held_out = score(0)
    saved, at, done = optimizer.state(), 0, 0
    stream = tuning.batches()
    if best[0] <= 0 and best[1] <= target:
        return Tuned(0, monotonic() - started, held_out, history, optimizer.loss)
    optimizer.module.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedSamples)
        while done < tuning.steps and left() > 0:
            done += 1
            optimizer.step(next(stream), done)
            if optimizer.lost_in_a_row == 10:
                break
            if done % check:
                continue
            now, found = score(done)
            tell(f"step {done} of {tuning.steps}, held-out loss {found['loss']:.4g}")
            if now < best:
                best, held_out, saved, at = now, found, optimizer.state(), done
            if best[0] <= 0 and best[1] <= target:
                break
            optimizer.module.train()
    optimizer.restore(saved)
    return Tuned(done, monotonic() - started, held_out, [*history, {"kept": at}], optimizer.loss)


class _Optimizer:
    """Steps of Adam on a copy and on a loss with parameters, which is copied too.

    Args:
        treated: The copy of the model.
        tuning: Loss, rate and clipping.
        penalties: Added to the loss, on the input of each batch.
        extra: A further term, a function of the bijection and the step.

    Attributes:
        module: What is tuned.
        loss: The loss, or its copy.
        lost_in_a_row: How many of the last steps had a loss or a gradient that is not finite; they change nothing.
    """

    def __init__(
        self,
        treated: Treated,
        tuning: Tuning,
        penalties: Sequence[Penalty],
        extra: Callable[[Bijection, int], Tensor] | None,
    ) -> None:
        self.treated, self.tuning, self.penalties, self.extra = treated, tuning, penalties, extra
        self.module = treated.native if isinstance(treated.native, nn.Module) else treated.bijection
        learned = isinstance(tuning.loss, nn.Module)
        self.loss = copy.deepcopy(tuning.loss) if learned else tuning.loss
        modules = [self.module, treated.bijection, *([self.loss] if isinstance(self.loss, nn.Module) else [])]
        # What is frozen stays: a permutation that a library keeps as a parameter has its inverse beside it.
        weights = [p for module in modules for p in module.parameters() if p.is_floating_point() and p.requires_grad]
        self.weights = list({id(p): p for p in weights}.values())
        if not self.weights:
            raise Skipped("no parameter may be tuned: there is none, or all are frozen (requires_grad is False)")
        self.optimizer = torch.optim.Adam(self.weights, lr=tuning.rate)
        self.lost_in_a_row = 0

    def step(self, batch: Any, step: int) -> None:
        """One step; the rate rises over 20 steps and falls over the last three tenths."""
        tuning, treated = self.tuning, self.treated
        falls = 1.0 if step < 0.7 * tuning.steps else (tuning.steps - step + 1) / (0.3 * tuning.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = tuning.rate * (min(1.0, step / 20) * falls)
        with float32_products("tf32") if tuning.tf32 else contextlib.nullcontext():
            value, _ = _called(self.loss, treated, batch)
            x = moved(first_of(batch), reference(treated.bijection))
            for penalty in self.penalties:
                value = value + penalty(treated.bijection, x, step=step)
            if self.extra is not None:
                value = value + self.extra(treated.bijection, step)
            self.optimizer.zero_grad()
            finite = bool(torch.isfinite(value))
            if finite:
                value.backward()
        finite = finite and bool(torch.isfinite(nn.utils.clip_grad_norm_(self.weights, tuning.clip)))
        if finite:
            self.optimizer.step()
        self.lost_in_a_row = 0 if finite else self.lost_in_a_row + 1

    def _tensors(self) -> list[Tensor]:
        buffers = [*self.module.buffers(), *(self.loss.buffers() if isinstance(self.loss, nn.Module) else ())]
        return [*self.weights, *buffers]

    def state(self) -> list[Tensor]:
        """Copies of all parameters and buffers."""
        return [t.detach().clone() for t in self._tensors()]

    def restore(self, state: list[Tensor]) -> None:
        """Go back to a state, in evaluation mode and without gradients."""
        with torch.no_grad():
            for t, value in zip(self._tensors(), state, strict=True):
                t.copy_(value)
        self.module.eval()
        self.optimizer.zero_grad()


class Penalties(Rung):
    """The flow's likelihood, finite differences, or round trips, added to the loss; the best state that was seen is kept."""

    name: ClassVar[str] = "penalties"
    place: ClassVar[int] = 50
    needs_loss: ClassVar[bool] = True

    def options(self, case: Case) -> Iterator[tuple[dict[str, Any], str]]:
        words = {
            "likelihood": "fine-tuned with the likelihood of a normal latent as a penalty",
            "finite-differences": "fine-tuned with finite differences of the map and its inverse as a penalty",
            "round-trips": "fine-tuned with round trips of data, samples and the failing source as a penalty",
        }
        for kind in ("likelihood", "finite-differences", "round-trips"):
            if kind == "likelihood" and (case.subject.base is not None or not case.subject.has_log_det):
                continue  # it is the loss already, or cannot be computed
            yield {"penalty": kind}, words[kind]

    def finish(self, treated: Treated, settings: dict[str, Any], case: Case) -> dict[str, Any]:
        size = math.prod(case.sources[0].shape)
        penalty: Penalty | None = None
        if settings["penalty"] == "likelihood":
            penalty = FlowLikelihood(0.03 / size)
        elif settings["penalty"] == "finite-differences":
            penalty = FiniteDifference(1e-3 if size > 64 else 0.3, every=1 if size > 64 else 10)
        trips = _Trips(case) if settings["penalty"] == "round-trips" else None
        result = tuned(
            treated,
            replace(case.tuned, steps=max(1, case.tuned.steps // 3)),  # each step costs more than a plain one
            penalties=() if penalty is None else (penalty,),
            extra=trips,
            bad=Screen(treated, case),
            target=case.tuned.metrics.get("loss", -math.inf),
            left=case.left,
            tell=case.tell,
        )
        return {"loss": result.loss, **result.facts()}


class RoundTrip(Penalty):
    r"""How far $F^{-1}(F(x))$ is from $x$, as the mean of $\log(1 + |x - \hat x|^2 / |x|^2)$, which a single lost sample does not outweigh.

    Rounding cannot be differentiated, so the latent is shaken as rounding would: each entry by `noise` times its size.

    Args:
        weight: Factor.
        every: Steps from one penalty to the next.
        noise: Size of the shaking, relative to a latent; about $2^{-12}$ makes the effect of float32 visible and differentiable.

    Example:
        >>> from bilip.models import real_nvp
        >>> bool(RoundTrip(1.0)(real_nvp(2, coupling="additive"), torch.randn(8, 2), step=0) < 0.1)
        True
    """

    uses_log_det = False

    def __init__(self, weight: float, every: int = 1, *, noise: float = 2.0**-12) -> None:
        super().__init__(weight, every)
        self.noise = self._number("noise", noise, least=0.0)

    def value(self, model: Bijection, x: Tensor, latent: Latent | None, step: int, context: Tensor | None) -> Tensor:
        def terms(points: Tensor, given: Tensor | None) -> Tensor:
            z = model(points, given)
            generator = torch.Generator().manual_seed(step)
            signs = (torch.randint(0, 2, z.shape, generator=generator, device="cpu") * 2 - 1).to(z)
            back = model.inverse(z + self.noise * z.detach().abs() * signs, given)
            size = points.flatten(1).square().sum(1).clamp_min(1e-12)
            return torch.log1p((back - points).flatten(1).square().sum(1) / (size * self.noise))

        return self._finite_mean(terms, x, context)


class _Trips:
    """Round trips of samples and of the sources that fail; data come with the batch."""

    def __init__(self, case: Case, batch: int = 128) -> None:
        subject = case.subject
        self.penalty = RoundTrip(0.1)
        self.pools: list[tuple[Tensor, Tensor | None]] = []
        data = [s for s in case.sources if s.role == "data"]
        for source in {s.name: s for s in (*data, *case.failing())}.values():
            some = source.first(2048, dtype=subject.dtype, device=subject.device)
            self.pools.append((some.x, some.context))
        self.base = subject.base if subject.base is not None and not subject.conditional else None
        self.batch = batch

    def __call__(self, model: Bijection, step: int) -> Tensor:
        x, context = self.pools[step % len(self.pools)]
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(len(x), (min(self.batch, len(x)),), generator=generator, device="cpu").to(x.device)
        value = self.penalty(model, x[rows], step=step, context=None if context is None else context[rows])
        if self.base is not None and step % 2 == 0:
            with torch.no_grad():
                made = model.inverse(self.base.sample(self.batch).to(x))
            made = made[torch.isfinite(made.flatten(1)).all(1)]
            if len(made):
                value = value + self.penalty(model, made.detach(), step=step)
        return value
