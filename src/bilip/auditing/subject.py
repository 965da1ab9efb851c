"""The model under test: one way to call it, whatever library it comes from, that survives samples for which it raises."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bilip._torch import Replayed, can_record, deepcopy_memo, dtype_name, half_digits, has_room
from bilip.adapters import Adapted, Base, adapt
from bilip.adapters.foreign import reference
from bilip.auditing.float32 import switches
from bilip.blocks import Bijection, Flow
from bilip.errors import BilipError, InputError, NotConverged, NotMeasured, SolverFailed, said_by
from bilip.linalg.linearized import AtPoint, Linearized, Repointed
from bilip.nets.spectral import held_layers

__all__ = ["ENDED", "Outcome", "Subject", "run_guarded"]

Result = TypeVar("Result")
_OFTEN = 64  # rows from which on a batch is one of many


def _nothing() -> None:
    """What is called before each call of a model that no clock watches."""


@dataclass
class _Session:
    """What holds for the calls of a model and of its copies, while an audit lasts.

    Attributes:
        tick: Called before each call; an audit looks at its clock.
        recorded: Calls that are repeated, and what was counted, while nothing about the model changes; `None` outside of
            `Subject.repeating`.
    """

    tick: Callable[[], None] = _nothing
    recorded: dict[Any, Any] | None = None


class Subject:
    """A model under test: its bijection, its base, its parts, and guarded calls.

    Args:
        adapted: What `bilip.adapters.adapt` gave for the model.
        name: Name for reports.
        copied: Whether it is a copy in another dtype, which runs without the user's autocast.
        session: What a copy shares with the model that it is a copy of.

    Attributes:
        bijection: The map F from data to latents.
        base: Base distribution, or `None`.
        library: Where the model comes from.
        name: Name for reports.

    Example:
        >>> from bilip.models import real_nvp
        >>> subject = Subject.of(real_nvp(2, blocks=2))
        >>> subject.dtype, len(subject.parts), subject.forward(torch.zeros(3, 2)).value.shape
        (torch.float32, 2, torch.Size([3, 2]))
    """

    def __init__(self, adapted: Adapted, name: str, *, copied: bool = False, session: _Session | None = None) -> None:
        self.bijection: Bijection = adapted.bijection
        self.base: Base | None = adapted.base
        self.library, self.name = adapted.library, name
        self._copies: dict[torch.dtype, Subject | str] = {}
        self.copied = copied
        self.stated_log_prob: Callable[..., Any] | None = None  # what a user's own module calls log p
        self._session = session or _Session()
        self.watched_products: dict[str, bool] = {}  # see `Reference`

    @classmethod
    def of(cls, model: Any, name: str | None = None) -> Subject:
        """The subject for anything `as_bijection` takes; a subject is returned as it is."""
        if isinstance(model, Subject):
            return model
        adapted = model if isinstance(model, Adapted) else adapt(model)
        subject = cls(adapted, name or type(model).__name__)
        if adapted.library == "generic" and adapted.base is None:
            stated = getattr(model, "log_prob", None)
            subject.stated_log_prob = stated if callable(stated) else None
        return subject

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copies": {}, "_session": _Session()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that most of the model's numbers have, or torch's default."""
        recorded = self._session.recorded
        if recorded is None:
            return self._counted_dtype()
        if (self, "dtype") not in recorded:
            recorded[self, "dtype"] = self._counted_dtype()
        return recorded[self, "dtype"]

    def _counted_dtype(self) -> torch.dtype:
        return reference(self.bijection).dtype

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next((t.device for t in self._tensors()), torch.device("cpu"))

    @property
    def devices(self) -> list[torch.device]:
        """The devices, beside the CPU, whose random state a call may touch."""
        return [torch.device(k) for k in range(torch.cuda.device_count())] if self.device.type == "cuda" else []

    @property
    def eps(self) -> float:
        """Machine epsilon of the model's dtype."""
        return torch.finfo(self.dtype).eps

    @property
    def half_digits(self) -> float:
        """Half of the digits of the model's dtype, as a relative error: 3.5e-4 in float32, and in float64 no less.

        What a user can bear does not shrink when a model is converted to float64.
        """
        return max(half_digits(self.dtype), half_digits(torch.float32))

    @property
    def parts(self) -> list[tuple[str, Bijection]]:
        """The visible blocks with their paths, in forward order."""
        return self.bijection.parts()

    @property
    def has_log_det(self) -> bool:
        """Whether the model states its log-determinant."""
        return all(getattr(part, "has_log_det", True) for _, part in self.parts)

    @property
    def conditional(self) -> bool:
        """Whether the model takes a context: a part states how large it is, or a callable has an argument for it."""
        named = any(getattr(part, "takes_context", False) for _, part in self.parts)
        return named or wants_context(self.bijection)

    def _tensors(self) -> Iterator[Tensor]:
        for value in (*self.bijection.parameters(), *self.bijection.buffers()):
            if value.is_floating_point():
                yield value

    # ---- guarded calls, in the mode the model is in, without gradients

    @torch.no_grad()
    def forward(self, x: Tensor, context: Tensor | None = None) -> Outcome:
        """F(x). The inputs are cloned, so that a model that works in place changes nothing of the user's."""
        return self._guarded(self.bijection.__call__, x, context)

    @torch.no_grad()
    def inverse(self, z: Tensor, context: Tensor | None = None) -> Outcome:
        """F^-1(z). The latents are cloned, so that no cache can recognise them."""
        return self._guarded(self.bijection.inverse, z, context)

    @torch.no_grad()
    def forward_and_log_det(self, x: Tensor, context: Tensor | None = None) -> Outcome:
        """F(x) and log |det J_F(x)|."""
        return self._guarded(self.bijection.forward_and_log_det, x, context)

    @torch.no_grad()
    def inverse_and_log_det(self, z: Tensor, context: Tensor | None = None) -> Outcome:
        """F^-1(z) and log |det J_F^-1(z)|."""
        return self._guarded(self.bijection.inverse_and_log_det, z, context)

    def _guarded(self, call: Call, x: Tensor, context: Tensor | None) -> Outcome:
        def timed(x: Tensor, context: Tensor | None) -> Tensor | tuple[Tensor, ...]:
            self.tick()
            return call(x, context)

        with self.arithmetic():
            often = self._often(call, x, context)
            if often is not None:
                self.tick()
                try:
                    return Outcome(often(x), torch.zeros(len(x), dtype=torch.bool, device=x.device))
                except Exception:  # find out by which samples
                    often.failed = "the model raised"
            return run_guarded(timed, x.clone(), context)

    def _often(self, call: Call, x: Tensor, context: Tensor | None) -> Replayed | None:
        """The call as one that is repeated on a GPU; `None` where it is not, or cannot be."""
        recorded = self._session.recorded
        if recorded is None or context is not None or len(x) < _OFTEN or not can_record(x):
            return None
        if (
            torch.is_autocast_enabled(x.device.type)
            or not self.recordable
            or getattr(call, "__self__", None) is not self.bijection
        ):
            return None
        key = (self, call.__name__, x.shape, x.dtype, switches())
        if key not in recorded:
            if not has_room(x):
                return None
            recorded[key] = Replayed(lambda y: _tuple(call(y.clone(), None)))
        return recorded[key]

    @functools.cached_property
    def recordable(self) -> bool:
        """Whether calls can be recorded on a GPU and replayed: a recording repeats every choice that Python made.

        So that there are none, all blocks have to be bilip's own with closed inverses, and no layer may be held by norms that are
        looked at.
        """
        own = all(type(part).__module__.startswith("bilip.blocks.") for _, part in self.parts)
        return own and self.bijection.closed_form and not held_layers(self.bijection)

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Inside, nothing about the model changes: on a GPU the launches of calls on large batches are recorded and replayed."""
        self._session.recorded = {}
        try:
            yield
        finally:
            self._session.recorded = None

    def once(self, key: object, given: Sequence[Tensor | None], find: Callable[[], Result]) -> Result:
        """What `find` finds; inside `repeating` what it found before under this key, if these tensors were given then too."""
        recorded = self._session.recorded
        if recorded is None:
            return find()
        known = recorded.setdefault((self, "once", key), [])
        for before, result in known:
            if all(_same(a, b) for a, b in zip(before, given, strict=True)):
                return result
        before, result = tuple(None if tensor is None else tensor.clone() for tensor in given), find()
        known.append((before, result))
        return result

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """The user's own autocast for the model itself; none for a copy in another dtype."""
        if not self.copied:
            yield
            return
        with torch.autocast(self.device.type, enabled=False):
            yield

    # ---- copies and modes

    def twin(self, dtype: torch.dtype) -> Subject:
        """The former name of `copy_in`."""
        warnings.warn("Subject.twin is now called copy_in.", DeprecationWarning, stacklevel=2)
        return self.copy_in(dtype)

    def copy_in(self, dtype: torch.dtype) -> Subject:
        """A copy in another dtype, in evaluation mode; made once.

        Raises:
            NotMeasured: The model cannot be copied or converted.
        """
        found = self._copies.get(dtype)
        if found is None:
            try:
                bijection = (
                    copy.deepcopy(self.bijection, deepcopy_memo(self.bijection)).to(dtype).eval().requires_grad_(False)
                )
                adapted = Adapted(bijection, self.base_in(dtype, bijection), self.library)
                found = Subject(adapted, self.name, copied=True, session=self._session)
            except Exception as error:  # foreign modules may refuse to be copied in any way they like
                found = f"the model cannot be copied in {dtype_name(dtype)} ({said_by(error)})"
            self._copies[dtype] = found
        if isinstance(found, str):
            raise NotMeasured(found)
        return found

    def forget_copies(self) -> None:
        """Copies are made anew from then on: of a model that has been trained further, say."""
        self._copies.clear()

    def linearized(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        noise: float = 0.0,
        like: Linearized | AtPoint | None = None,
    ) -> Linearized | AtPoint:
        """The model linearised at points, in float64; `noise` and `like` are as in `Linearized`. On a GPU, inside `repeating`, by
        replays where that can be.
        """
        found = None if isinstance(like, Linearized) else self.repointed(x, context, noise=noise, like=like)
        if found is not None:
            return found
        like = like if isinstance(like, Linearized) else None
        return Linearized(self.copy_in(torch.float64).parts, x, context, noise=noise, like=like)

    def repointed(
        self, x: Tensor, context: Tensor | None = None, *, noise: float = 0.0, like: AtPoint | None = None
    ) -> AtPoint | None:
        """The model linearised at points by replays, on a GPU inside `repeating`; `None` where that is not, or cannot be."""
        recorded, copied = self._session.recorded, self.copy_in(torch.float64)
        if recorded is None or context is not None or not can_record(x) or not copied.recordable:
            return None
        if torch.is_autocast_enabled(x.device.type):
            return None
        key = (copied, "linearized", x.shape)
        if key not in recorded:
            if not has_room(x):
                return None
            recorded[key] = Repointed(copied.parts)
        if recorded[key] is None:
            return None
        try:
            return recorded[key].at(x, noise, like)
        except (NotMeasured, RuntimeError, ValueError, TypeError):  # block by block it is told why
            recorded[key] = None
            return None

    def base_in(self, dtype: torch.dtype, bijection: Bijection) -> Base | None:
        """The base for a copy in another dtype: the modules that it holds, such as an embedding of contexts, are converted too."""
        if self.base is None:
            return None
        base = copy.copy(self.base)
        for name, value in vars(self.base).items():
            if value is self.bijection:
                setattr(base, name, bijection)
            elif isinstance(value, nn.Module) and not isinstance(value, (Bijection, Flow)):
                setattr(base, name, copy.deepcopy(value).to(dtype).eval().requires_grad_(False))
        return base

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode inside, put back afterwards. TF32 and autocast stay as the user has them."""
        held = [value for value in vars(self.base).values() if isinstance(value, nn.Module)] if self.base else []
        modes = {module: module.training for top in (self.bijection, *held) for module in top.modules()}
        try:
            try:
                for top in (self.bijection, *held):
                    top.eval()
            except Exception as error:
                raise InputError(f"{self.name} cannot be put into evaluation mode: {said_by(error)}.") from error
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    @contextlib.contextmanager
    def watched(self, tick: Callable[[], None]) -> Iterator[None]:
        """Inside, `tick` is called before each guarded call of the model, of copies too."""
        before, self._session.tick = self._session.tick, tick
        try:
            yield
        finally:
            self._session.tick = before

    def tick(self) -> None:
        """Look at the clock of the audit, if one lasts: `NotMeasured` is raised where the time is over."""
        self._session.tick()

    def check(self, x: Tensor, context: Tensor | None, where: str, *, strict: bool = True) -> None:
        """Raise an `InputError` in one line if the model takes no sample of a batch at all, or has no inverse.

        Samples outside the domain of a model are refused where they are data (`strict`); out of distribution they are a finding.
        """
        shape = tuple(x.shape)
        complaint = f"{where}: {self.name} takes no batch of shape {shape}"
        outcome = self._first("forward", self.forward, x, context, complaint, strict=strict)
        if bool(outcome.failed.all()):
            return
        got = tuple(outcome.value.shape) if isinstance(outcome.value, Tensor) else type(outcome.value).__name__
        if not isinstance(got, tuple) or got[:1] != shape[:1] or math.prod(got) == 0:
            raise InputError(
                f"{where}: {self.name} turned a batch of shape {shape} into {got}; expected one latent for each sample."
            )
        complaint = f"{where}: the inverse of {self.name} does not work"
        self._first("inverse", self.inverse, outcome.value, context, complaint, strict=strict)

    def _first(
        self, what: str, call: Any, x: Tensor, context: Tensor | None, complaint: str, *, strict: bool
    ) -> Outcome:
        try:
            outcome: Outcome = call(x, context)
        except BilipError as error:
            raise InputError(f"{complaint} ({error})") from error
        except NotImplementedError as error:
            raise InputError(f"{complaint}: NotImplementedError {error}".rstrip() + ".") from error
        fatal = ("TypeError", "KeyError", "AttributeError", "InverseNotAvailable", "RuntimeError")
        if outcome.value.device != x.device:
            raise InputError(f"{complaint}: it was given a batch on {x.device} and gave one on {outcome.value.device}.")
        if not bool(outcome.failed.all()):
            return outcome
        said = outcome.message[:300]
        if "domain" in said.lower():  # nflows' InputOutsideDomain, and others that say so
            if not strict:
                return outcome
            low, high = float(x.min()), float(x.max())
            raise InputError(
                f"{complaint}: its values, from {low:.3g} to {high:.3g}, lie outside the domain of the model. A spline without tails "
                f"takes values inside its interval alone: scale the data into it, or build it with linear tails. The model said: {said}"
            )
        short = re.search(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", said)
        if context is None and (wants_context(self.bijection) or (short and int(short[2]) > int(short[1]))):
            raise InputError(
                f"{complaint} without a context: it seems to be conditional. Pass (x, context). The model said: {said}"
            )
        if what == "forward" or outcome.message.split(":")[0] in fatal:
            raise InputError(f"{complaint}: {said}")
        return outcome


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))


def in_dtype(context: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Contexts in another dtype; integers, such as labels, stay as they are."""
    return context.to(dtype) if context is not None and context.is_floating_point() else context


def wants_context(module: nn.Module) -> bool:
    """Whether a model seems to be conditional: a part of it states how large a context is.

    Example:
        >>> from bilip.models import real_nvp
        >>> wants_context(real_nvp(2, context=3)), wants_context(real_nvp(2))
        (True, False)
    """
    names = (
        "context",
        "context_features",
        "context_channels",
        "context_size",
        "context_shape",
        "condition_length",
        "dims_c",
    )
    for part in module.modules():
        for name in names:
            value = vars(part).get(name)
            if value and not callable(value) and not isinstance(value, (str, Tensor)):
                return True
    return False


def parameter_count(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in module.parameters())


ENDED = "the model ended the program"
Call = Callable[[Tensor, Tensor | None], "Tensor | tuple[Tensor, ...]"]
_CANDIDATES = 8


@dataclass(frozen=True)
class Outcome:
    """What came out of a guarded call.

    Attributes:
        values: The tensors that the call returned; NaN in the rows of failed samples.
        failed: For each sample: did the model raise because of it?
        message: The first exception, in one line; empty if there was none.
        exact: Whether the guilty samples could be told apart within the budget of the search; if not, some innocent may be
            among them.
    """

    values: tuple[Tensor, ...]
    failed: Tensor
    message: str = ""
    exact: bool = True

    @property
    def value(self) -> Tensor:
        """The first tensor that the call returned."""
        return self.values[0]


def run_guarded(call: Call, x: Tensor, context: Tensor | None = None, *, budget: int = 512) -> Outcome:
    """Call a model on a batch; if it raises, find the samples that make it raise.

    Smaller batches round differently and can lose the failure, so that the search keeps the shape of the batch: it replaces
    suspects by a copy of a sample that is known to be good, and halves the set of suspects.

    Args:
        call: `call(x, context)`, which returns a tensor or a tuple of tensors with the batch in front.
        x: The batch.
        context: Its contexts.
        budget: Largest number of calls spent on the search.

    Example:
        >>> def picky(x, context):
        ...     if (x > 2).any():
        ...         raise ValueError("too large")
        ...     return 2 * x
        >>> outcome = run_guarded(picky, torch.tensor([[0.0], [3.0], [1.0]]))
        >>> outcome.failed.tolist(), outcome.value.flatten().tolist(), outcome.message
        ([False, True, False], [0.0, nan, 2.0], 'ValueError: too large')
    """
    try:
        return Outcome(_tuple(call(x, context)), torch.zeros(len(x), dtype=torch.bool, device=x.device))
    except BaseException as error:  # a model may call sys.exit
        if not _of_a_sample(error):
            raise
        message = _one_line(error)
    return _Search(call, x, context, budget).run(message)


class _Search:
    def __init__(self, call: Call, x: Tensor, context: Tensor | None, budget: int) -> None:
        self.call, self.x, self.context, self.left = call, x, context, budget
        self.good: int | None = None
        self.exact = True

    def run(self, message: str) -> Outcome:
        everyone = torch.arange(len(self.x), device="cpu")
        norms = self.x.detach().double().flatten(1).norm(dim=1).nan_to_num(torch.inf)
        order = norms.argsort().cpu()  # small samples are good ones most often; then some of every size
        spread = order[_CANDIDATES :: max(1, (len(order) - 1) // _CANDIDATES)]
        candidates = [*order[:_CANDIDATES].tolist(), *spread.tolist()]
        for k in candidates:
            self.good = k
            if self._try(everyone[:0]) is not None:
                break
        else:
            failed = torch.ones(len(self.x), dtype=torch.bool, device=self.x.device)
            return Outcome(self._nothing(), failed, message, len(candidates) == len(self.x))
        guilty = self._find(everyone)
        innocent = torch.ones(len(self.x), dtype=torch.bool, device="cpu")
        innocent[guilty] = False
        values = self._try(everyone[innocent])
        if values is None:  # the innocent fail together: nobody can be told apart
            innocent[:] = self.exact = False
            values = self._try(everyone[:0]) or self._nothing()
        failed = ~innocent.to(self.x.device)
        return Outcome(tuple(_blank(v, failed) for v in values), failed, message, self.exact)

    def _nothing(self) -> tuple[Tensor, Tensor]:
        nan = torch.full_like(self.x, torch.nan)
        return nan, nan.flatten(1).sum(1)

    def _find(self, suspects: Tensor) -> Tensor:
        if self.left <= 0:
            self.exact = False
            return suspects
        self.left -= 1
        if self._try(suspects) is not None:
            return suspects[:0]
        if len(suspects) == 1:
            return suspects
        half = len(suspects) // 2
        found = torch.cat([self._find(suspects[:half]), self._find(suspects[half:])])
        if len(found):
            return found
        self.exact = False  # they raise only together
        return suspects

    def _try(self, kept: Tensor) -> tuple[Tensor, ...] | None:
        """The result with everybody but `kept` replaced by the good sample, or `None` if it raises."""
        rows = torch.full((len(self.x),), self.good or 0, dtype=torch.long, device="cpu")
        rows[kept] = kept
        rows = rows.to(self.x.device)
        try:
            return _tuple(self.call(self.x[rows], None if self.context is None else self.context[rows]))
        except BaseException as error:
            if not _of_a_sample(error):
                raise
            return None


def _of_a_sample(error: BaseException) -> bool:
    """Whether an exception may be about some samples: bilip's own complaints about the whole call, memory and Ctrl-C are not."""
    if isinstance(error, (NotConverged, SolverFailed)):
        return True
    whole = (BilipError, torch.OutOfMemoryError, NotImplementedError, KeyboardInterrupt, GeneratorExit)
    return not isinstance(error, whole)


def _blank(value: Tensor, failed: Tensor) -> Tensor:
    return torch.where(failed.view(-1, *[1] * (value.ndim - 1)), torch.full_like(value, torch.nan), value)


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _one_line(error: BaseException) -> str:
    """The message of an exception; where it has none, the place that raised it. One that would end the program says so."""
    text = said_by(error)
    if not isinstance(error, Exception):
        return f"{ENDED} ({text})"
    if text != type(error).__name__:
        return text
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}: {place.line}"
