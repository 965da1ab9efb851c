"""`bilip.cure`: try cures from the cheapest, audit each, hand over the first that holds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from types import SimpleNamespace
from typing import Any

import torch

from bilip._progress import Progress
from bilip.auditing import Budget, Thresholds, audit
from bilip.auditing.audit import make_sources
from bilip.auditing.budget import budget_named
from bilip.auditing.looks import Looks
from bilip.auditing.probes.probe import PROBES
from bilip.auditing.subject import Subject
from bilip.auditing.verdicts import judge
from bilip.cures import arithmetic, replacements, reranging  # noqa: F401 - they enter themselves
from bilip.cures.advise import is_number
from bilip.cures.result import Attempt, Cure
from bilip.cures.rung import RUNGS, Case, Skipped
from bilip.cures.treated import Treated, copied
from bilip.cures.tuning import Tuning, held_out_loss
from bilip.data import Source
from bilip.errors import BilipError, InputError, said_by
from bilip.record import USES, AuditRecord, Status

__all__ = ["cure"]

EVERYWHERE = "ood-inversion"  # round trips outside the data too
_COST = 0.02 * math.log(2)  # nats per dimension: 0.02 bits
# Uses that are audited whatever is asked for, unless others=False.
_AUDITED = frozenset({"inversion", "sampling", "likelihood", "ood-likelihood"})


def cure(
    model: Any,
    data: Mapping[str, Any] | Any,
    *,
    uses: Sequence[str] | str | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    train: Any = None,
    held_out: Any = None,
    ood: Sequence[str] = (),
    time: float | None = None,
    rungs: Sequence[str] | str | None = None,
    all_rungs: bool = False,
    others: bool = True,
    most_cost: float | None = None,
    steps: int = 400,
    rate: float = 3e-4,
    batch: int = 256,
    tune_tf32: bool = False,
    budget: str | Budget = "quick",
    thresholds: Thresholds | None = None,
    seed: int = 0,
    name: str | None = None,
    keep_interrupted: bool = False,
    progress: Progress | None = None,
    each: Callable[[Attempt], object] = lambda attempt: None,
) -> Cure:
    """Repair a trained model: try cures from the cheapest, audit each, and hand over the first that makes the wanted uses safe.

    The model itself is never changed. What is handed over was found safe by an audit, and no use that was safe before is unsafe after.

    Args:
        model: A bijection, a flow, or anything `as_bijection` takes.
        data: Sources for the audits, as in `bilip.audit`.
        uses: What has to become safe: names of `bilip.record.USES`, or `"ood-inversion"` for round trips on out-of-distribution sources. By
            default every use that the audit of the model finds unsafe.
        loss: `loss(model, batch)`, a scalar to be minimised, for the rungs that fine-tune; a module is copied and tuned along. By default
            the negative log-likelihood, where the model has a base and `train` is given.
        train: Batches for fine-tuning: a tensor or a tuple of tensors, a `DataLoader`, a `Dataset` or a list of batches. Without it the
            rungs that fine-tune are skipped.
        held_out: Batches on which the cost is measured; by default the last tenth of `train`, at most 2,048 rows.
        ood: Out-of-distribution sources, as in `bilip.audit`.
        time: Seconds that it may take. When they are over, the best so far is returned and called that.
        rungs: Names of the rungs to try, in that order; by default `settings`, `arithmetic`, `replacements`, `re-range`, `penalties`,
            from the cheapest.
        all_rungs: Go on after the first cure, to compare; the first that holds is still what is handed over.
        others: Whether uses that were not asked for are audited as well, so that none that was safe gets worse. Without, audits are faster.
        most_cost: Largest rise of the held-out loss; by default 0.02 bits per dimension for a likelihood, 5 % of the loss for another one.
        steps: Largest number of steps of fine-tuning.
        rate: Learning rate of fine-tuning.
        batch: Rows in a batch, where `train` is a tensor.
        tune_tf32: Whether steps of fine-tuning multiply in TF32, which is faster on a GPU; what is measured does not.
        budget: Of each audit.
        thresholds: What counts as safe.
        seed: Seed of everything random.
        name: Name of the model in reports.
        keep_interrupted: On Ctrl-C return the best so far instead of raising.
        progress: Called with a text and the share that is done.
        each: Called with each `Attempt` as it ends.

    Example:
        >>> import bilip, torch
        >>> from bilip.demo import load_demo_flow
        >>> flow = load_demo_flow("affine_sigmoid")
        >>> data = torch.rand(1000, 2) * 8 - 4
        >>> result = bilip.cure(flow, data, ood=["uniform:2"], uses=["ood-inversion"])
        >>> result.status, result.chosen.rung
        ('cured', 'arithmetic')
    """
    given = {k: v for k, v in locals().items() if k not in ("model", "data")}
    return _Ladder(model, data, SimpleNamespace(**given)).climb()


class _Ladder:
    """The rungs, tried one after the other.

    Args:
        model: The model.
        data: Sources for the audits.
        asked: The other arguments of `cure`, by their names.
    """

    def __init__(self, model: Any, data: Any, asked: SimpleNamespace) -> None:
        for label in ("steps", "batch"):
            value = getattr(asked, label)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"cure({label}={value!r}): expected a whole number, 1 or more.")
        for label, least in (("rate", 0.0), ("time", 0.0), ("most_cost", -math.inf)):
            number = getattr(asked, label)
            if number is not None and not (is_number(number) and least < number < math.inf):
                raise InputError(f"cure({label}={number!r}): expected a{' positive' if least == 0 else ''} number.")
        self.model, self.seed, self.all_rungs, self.keep = model, asked.seed, asked.all_rungs, asked.keep_interrupted
        self.time, self.others, self.progress, self.each = asked.time, asked.others, asked.progress, asked.each
        self.end = math.inf if self.time is None else monotonic() + self.time
        self.asked, self.rungs = _uses(asked.uses), _chosen(asked.rungs)
        self.treated, name = copied(model), asked.name or _name(model)
        self.subject = Subject(self.treated.adapted, name)
        spent = asked.budget if isinstance(asked.budget, Budget) else budget_named(asked.budget)
        if EVERYWHERE in (self.asked or ()) and not asked.ood and not isinstance(data, Mapping):
            raise InputError(
                "cure(uses=['ood-inversion']): there is no out-of-distribution source; name one with ood=."
            )
        self.sources: list[Source] = make_sources(data, asked.ood, spent, self.seed, self.subject)
        named = {str(label) for label in data} if isinstance(data, Mapping) else {self.sources[0].name}
        # Noise is made by each audit: shuffled like data, every row of it would be drawn with the 255 others of its chunk.
        self.given = {source.name: source for source in self.sources if source.name in named}
        self._require_enough(spent, asked.thresholds)
        self.options: dict[str, Any] = {"budget": asked.budget, "thresholds": asked.thresholds, "seed": self.seed}
        self.options |= {"name": name, "keep_interrupted": False}
        self.thresholds, self.most_cost = asked.thresholds or Thresholds(), asked.most_cost
        options = {"batch": asked.batch, "seed": self.seed, "steps": asked.steps, "rate": asked.rate}
        with self._drawing():  # a DataLoader draws its order where it is read
            self.tuning = Tuning.of(
                asked.loss, asked.train, asked.held_out, self.treated, self.sources, tf32=asked.tune_tf32, **options
            )
        self.tried: list[Attempt] = []
        self.place = 0.0
        self.interrupted = False

    def _require_enough(self, spent: Budget, thresholds: Thresholds | None) -> None:
        """Raise where there are too few samples for any use to be found safe: every cure would fail."""
        share = spent.bad_share if thresholds is None or thresholds.bad_share is None else thresholds.bad_share
        needed = Looks(share).needed if share else 0
        few = next((s for s in self.sources if s.role == "data" and s.count < needed), None)
        if few is not None:
            raise InputError(
                f"cure: source {few.name!r} has {few.count:,} samples; {needed:,} good ones are needed to find that at most "
                f"{100 * share:g} % are bad. Pass more data, or thresholds=bilip.Thresholds(bad_share=...)."
            )

    # ---- the climb

    def climb(self) -> Cure:
        """Try one rung after the other, until one cures, none is left or the time is over."""
        with self._drawing():
            return self._climb()

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        """Random numbers from the seed inside, and the caller's afterwards as if none had been drawn."""
        with torch.random.fork_rng(devices=self.subject.devices):
            torch.manual_seed(self.seed)
            yield

    def _climb(self) -> Cure:
        self._tell("audit of the model as it is")
        self.before = self._audit(self.treated, blame=True)
        states = self._states(self.before)
        self.uses = self.asked or self._found_unsafe(states)
        if self.tuning is not None:
            self.tuning.metrics = held_out_loss(self.treated, self.tuning)
        if all(states.get(use) == Status.SAFE for use in self.uses):
            return self._result("not needed", None)
        self.was_safe = {use for use, status in states.items() if status == Status.SAFE}
        case = Case(
            self.subject,
            self.sources,
            self.before,
            self.uses,
            self.tuning,
            self.left,
            self._tell,
            dict(self.before.settings),
        )
        cured: Attempt | None = None
        try:
            for attempt in self._attempts(case):
                self.tried.append(attempt)
                self.each(attempt)
                if attempt.outcome == "cured" and cured is None:
                    cured = attempt
                    if not self.all_rungs:
                        break
        except KeyboardInterrupt:
            if not self.keep:
                raise
            self.end, self.interrupted = -math.inf, True
        if cured is not None:
            return self._result("cured", cured)
        best = self._best()
        if self.left() <= 0 and best is not None:
            return self._result("best so far", best)
        return self._result("not cured", None)

    def _found_unsafe(self, states: Mapping[str, Status]) -> tuple[str, ...]:
        """The uses that are unsafe; where the time was over before the audit ended, those that it has not reached as well."""
        late = bool(self.before.settings.get("out_of_time"))
        return tuple(
            use
            for use, status in states.items()
            if status == Status.UNSAFE or (late and status != Status.SAFE and use in _AUDITED)
        )

    def left(self) -> float:
        """Seconds that are left."""
        return self.end - monotonic()

    def _attempts(self, case: Case) -> Iterator[Attempt]:
        for k, name in enumerate(self.rungs):
            self.place = (k + 0.5) / (len(self.rungs) + 1)
            rung = RUNGS[name]()
            if rung.needs_loss and self.tuning is None:
                yield Attempt(
                    name,
                    "",
                    "skipped",
                    "it needs batches and a loss: pass train= (and loss=, for a model without a base)",
                )
                continue
            if self.left() <= 0:
                yield Attempt(name, "", "skipped", self._over)
                continue
            try:
                for chosen, what in rung.options(case):
                    if self.left() <= 0:
                        yield Attempt(name, what, "skipped", self._over)
                        break
                    attempt = self._attempt(name, chosen, what, case)
                    yield attempt
                    if attempt.outcome == "cured" and rung.needs_loss:
                        break  # milder than what would come next
            except Skipped as why:
                yield Attempt(name, "", "skipped", str(why))

    @property
    def _over(self) -> str:
        return f"the time of {self.time or 0:g} s was over"

    def _attempt(self, name: str, chosen: dict[str, Any], what: str, case: Case) -> Attempt:
        self._tell(f"{name}: {what}")
        attempt = Attempt(name, what, "failed", settings=chosen)
        started = monotonic()
        rung = RUNGS[name]()
        try:
            with self._drawing():
                treated = rung.apply(copied(self.model), chosen)
                facts = rung.finish(treated, chosen, case)
                treated.evaluated()
        except Skipped as why:
            attempt.outcome, attempt.reason = "skipped", str(why)
            attempt.repair_seconds = round(monotonic() - started, 2)
            return attempt
        except InputError:
            raise
        except Exception as error:  # of the model, of the loss: the next rung may do better
            attempt.reason = said_by(error)
            attempt.repair_seconds = round(monotonic() - started, 2)
            return attempt
        attempt.loss = facts.pop("loss", None)
        attempt.facts, attempt.treated = facts, treated
        attempt.repair_seconds, started = round(monotonic() - started, 2), monotonic()
        try:
            if self.tuning is not None:
                attempt.cost = self._cost(treated, self.tuning, attempt.loss)
            self._tell(f"{name}: audit")
            attempt.record = self._audit(treated)
        except BilipError as error:
            attempt.reason, attempt.treated = str(error), None
            return attempt
        finally:
            attempt.audit_seconds = round(monotonic() - started, 2)
        states = self._states(attempt.record)
        attempt.verdicts = {use: str(status.value) for use, status in states.items()}
        open_ = [use for use in self.uses if states.get(use) != Status.SAFE]
        worse = [use for use in self.was_safe if states.get(use) == Status.UNSAFE]
        if open_ or worse:
            attempt.outcome = "not safe"
            attempt.reason = self._reason(attempt.record, (open_ or worse)[0])
            if attempt.record.settings.get("out_of_time") and Status.UNSAFE not in map(states.get, open_ + worse):
                attempt.reason = f"{self._over} before its audit ended"
        elif attempt.cost and not math.isfinite(attempt.cost["loss"]):
            attempt.outcome, attempt.reason = "too costly", "the held-out loss is not finite"
        elif attempt.cost and attempt.cost["rise"] > self._most():
            attempt.outcome = "too costly"
            attempt.reason = f"the held-out loss rises by {attempt.cost['rise']:.3g}, {self._most():.3g} allowed"
        else:
            attempt.outcome, attempt.reason = "cured", ""
        return attempt

    # ---- measuring

    def _audit(self, treated: Treated, *, blame: bool = False) -> AuditRecord:
        wanted = set(self.asked or ()) - {EVERYWHERE} | ({"inversion"} if EVERYWHERE in (self.asked or ()) else set())
        if self.others or not self.asked:
            wanted |= _AUDITED
        probes = [
            probe.name for probe in PROBES.values() if any(q.judged and wanted & set(q.uses) for q in probe.quantities)
        ]
        left = self.left()
        return audit(
            treated.adapted,
            self.given,
            ood=[source.name for source in self.sources if source.role == "ood"],
            probes=[*probes, "blame"] if blame else probes,
            time=None if left == math.inf else max(left, 1.0),
            progress=self._shown,
            **self.options,
        )

    def _states(self, record: AuditRecord) -> dict[str, Status]:
        states = {use: verdict.status for use, verdict in record.verdicts.items() if use in USES}
        if EVERYWHERE in (self.asked or ()):
            states[EVERYWHERE] = self._everywhere(record).status
        return states

    def _everywhere(self, record: AuditRecord) -> Any:
        """The verdict on inversion, with every source counted as data."""
        sources = [{**source, "role": "data"} for source in record.sources]
        limits = self.thresholds
        if limits.bad_share is None:
            limits = Thresholds(bad_share=float(record.settings["costs"]["bad_share"]))
        return judge(record.measurements, sources, limits, self.subject.eps)["inversion"]

    def _reason(self, record: AuditRecord, use: str) -> str:
        return self._everywhere(record).reason if use == EVERYWHERE else record.verdicts[use].reason

    def _cost(self, treated: Treated, tuning: Tuning, loss: Any) -> dict[str, float]:
        try:
            found = held_out_loss(treated, tuning, loss)
        except InputError:
            if treated.model is treated.native:
                raise
            return {}  # a loss that knows the library's own object alone; the parameters are the same
        return {**found, "rise": found["loss"] - tuning.metrics["loss"]}

    def _most(self) -> float:
        if self.most_cost is not None:
            return self.most_cost
        if self.subject.base is not None:
            return _COST * math.prod(self.sources[0].shape)
        return 0.05 * abs(self.tuning.metrics["loss"]) if self.tuning is not None else math.inf

    def _best(self) -> Attempt | None:
        """The way that leaves the fewest samples bad, if it is fewer than before."""

        def bad(record: AuditRecord) -> tuple[int, float]:
            states = self._states(record)
            shares = [
                float(m["share_bad"]) for m in record.measurements if m.measured and m.get("share_bad") is not None
            ]
            return sum(states.get(use) != Status.SAFE for use in self.uses), sum(shares)

        measured = [(bad(a.record), a) for a in self.tried if a.record is not None and a.treated is not None]
        measured = [(score, a) for score, a in measured if score < bad(self.before) and a.outcome != "too costly"]
        return min(measured, key=lambda pair: pair[0])[1] if measured else None

    def _result(self, status: str, chosen: Attempt | None) -> Cure:
        self.place = 1.0
        if self.progress is not None:
            self.progress("done", 1.0)
        model, after, done = None, None, ""
        if status == "not needed":
            model, after = self.treated.model, self.before
        elif chosen is not None and chosen.treated is not None:
            model, after, done = chosen.treated.model, chosen.record, chosen.what
        for attempt in self.tried:
            if attempt is not chosen and not self.all_rungs:
                attempt.treated = None  # memory
        return Cure(
            status,
            model,
            done,
            tuple(self.uses),
            self.before,
            after,
            tuple(self.tried),
            {} if self.tuning is None else self.tuning.metrics,
            None if chosen is None else chosen.loss,
            chosen,
            self.interrupted,
        )

    def _tell(self, text: str) -> None:
        if self.progress is not None:
            self.progress(text, min(self.place, 0.99))

    def _shown(self, text: str, share: float) -> None:
        self._tell(text)


def _listed(argument: str, value: Any) -> list[str]:
    """Names as a list, or as one string with commas between them."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, Iterable):
        raise InputError(f"cure({argument}={value!r:.40}): expected a list of names.")
    return list(dict.fromkeys(value))


def _uses(uses: Sequence[str] | str | None) -> tuple[str, ...] | None:
    if uses is None:
        return None
    listed, known = tuple(_listed("uses", uses)), (*USES, EVERYWHERE)
    for use in listed:
        if use not in known:
            raise InputError(f"cure(uses={use!r:.40}): expected some of {', '.join(known)}.")
    if not listed:
        raise InputError(f"cure(uses=()): expected some of {', '.join(known)}, or None for all that are unsafe.")
    return listed


def _chosen(rungs: Sequence[str] | str | None) -> list[str]:
    order = sorted(RUNGS, key=lambda name: RUNGS[name].place)
    if rungs is None:
        return order
    listed = _listed("rungs", rungs)
    for rung in listed:
        if rung not in RUNGS:
            raise InputError(f"cure(rungs=...): unknown rung {rung!r:.40}; expected some of {', '.join(order)}.")
    if not listed:
        raise InputError(f"cure(rungs=()): expected some of {', '.join(order)}, or None for all.")
    return listed


def _name(model: Any) -> str:
    return type(getattr(model, "bijection", model)).__name__ if hasattr(model, "library") else type(model).__name__
