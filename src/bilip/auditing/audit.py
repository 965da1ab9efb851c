"""The audit: sources x probes -> measurements -> verdicts -> record."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any, NoReturn

import torch

from bilip._progress import Progress, silent
from bilip._torch import dtype_name
from bilip.auditing import probes as p
from bilip.auditing.budget import BUDGETS, Budget, budget_named
from bilip.auditing.float32 import float32_products, uses_tf32
from bilip.auditing.looks import Looks
from bilip.auditing.probes.blame import kind_of
from bilip.auditing.probes.probe import PROBES, Task
from bilip.auditing.processes import Processes
from bilip.auditing.subject import ENDED
from bilip.auditing.verdicts import Thresholds, judge
from bilip.data import Batch, Source, as_source, noise
from bilip.data.convert import is_loader
from bilip.data.noise import NOISE_NAMES
from bilip.data.rows import TensorRows
from bilip.errors import BilipError, InputError, NotMeasured, said_by
from bilip.nets.certify import remembering
from bilip.record import AuditRecord, Measurement, environment

__all__ = ["BUDGETS", "Budget", "audit"]


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Inside, `os._exit` raises `SystemExit`, so that a model which calls it is noticed and no gate ends with exit code 0.

    Other processes end as they would, and other threads end this one with an exit code other than 0. Audits of several threads may end in
    any order: what one of them leaves in place does nothing more.
    """
    leave, process, thread, inside = os._exit, os.getpid(), threading.get_ident(), True

    def noticed(status: int) -> NoReturn:
        if os.getpid() != process or not inside:
            leave(status)
        if threading.get_ident() != thread:
            leave(status or 1)
        raise SystemExit(status)

    os._exit = noticed
    try:
        yield
    finally:
        inside, os._exit = False, leave


@staying()
def audit(
    model: Any,
    sources: Mapping[str, Any] | Any,
    *,
    ood: Sequence[str] = (),
    budget: str | Budget = "standard",
    time: float | None = None,
    probes: Sequence[str | p.Probe] | None = None,
    thresholds: Thresholds | None = None,
    bits: int | None = None,
    autocast: torch.dtype | None = None,
    tf32: bool | None = None,
    seed: int = 0,
    name: str | None = None,
    description: str = "",
    command: str = "",
    keep_interrupted: bool = False,
    distributed: bool = False,
    progress: Progress | None = None,
) -> AuditRecord:
    r"""Is this model still invertible, where does it break, and what may it be used for?

    The model is audited as you run it: in evaluation mode, in its own dtype, with the TF32 switches and the autocast that hold at the
    call. Modes are put back afterwards; nothing about the model is changed.

    Args:
        model: A bijection, a flow, or anything `as_bijection` takes.
        sources: By name: a batch, a pair `(x, context)`, a `DataLoader` or `Dataset`, a file (`.npy`, `.npz`, `.csv`, `.pt`,
            `.safetensors`), a folder of images or a `Source`. A single one is called `data`. Names that begin with
            uniform, gaussian, rademacher or scaled are out of distribution.
        ood: Sources to be treated as out of distribution, by name; or noise made from the first data source, as in `"uniform"`,
            `"gaussian"`, `"rademacher"`, `"scaled:10"`.
        budget: `"quick"`, `"standard"`, `"thorough"`, or a `Budget`.
        time: Seconds that the audit may take; a probe that is running then ends with its current batch. What was not measured by then is
            recorded as not measured, with the reason. `None` for as long as it takes.
        probes: Names of probes, or probes of your own; by default all that make sense for the model.
        thresholds: What counts as safe.
        bits: Bit depth of the data, for attacks inside the dequantization cell.
        autocast: Judge the model under autocast to this dtype; by default as it is at the call.
        tf32: Judge it with TF32 products on or off; by default as it is at the call.
        seed: Seed of everything random.
        name: Name of the model in reports.
        description: One line that says what the model is, for reports.
        command: The command to repeat the audit, for the report.
        keep_interrupted: On Ctrl-C return what was measured so far instead of raising.
        distributed: Divide the work among the processes of `torch.distributed`, which all make this call, with the same model and the
            same data. Each gets the whole record, with the numbers of one process.
        progress: Called with a text and the share that is done; by default a line on the terminal.

    Example:
        >>> import bilip
        >>> flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, coupling="additive"))
        >>> record = bilip.audit(flow, torch.randn(1000, 2), ood=["uniform"], budget="quick")
        >>> record.verdicts["likelihood"].status.value, record.verdicts["sampling"].status.value
        ('safe', 'safe')
    """
    started = monotonic()
    spent = budget if isinstance(budget, Budget) else budget_named(budget)
    for label, value, least, most in (("seed", seed, 0, 2**63 - 1), ("bits", bits, 1, 32)):
        if value is not None and not (isinstance(value, int) and least <= value <= most):
            raise InputError(f"audit({label}={value!r}): expected a whole number, {least} to {most}.")
    clock, processes = _Clock(started, time), Processes(distributed=distributed)
    thresholds = thresholds or Thresholds()
    probes = None if probes is None else _listed([probes] if isinstance(probes, p.Probe) else probes)
    with _unended():
        subject = p.Subject.of(model, name)
    _require_numbers(subject)
    streams = make_sources(sources, ood, spent, seed, subject)
    for stream in streams:
        stream.check(spent.samples)
        stream.remember()  # no one else holds these sources
    thresholds = replace(
        thresholds,
        relative=thresholds.limit(subject.eps),
        bad_share=spent.bad_share if thresholds.bad_share is None else thresholds.bad_share,
    )
    show = progress or (_Line() if processes.rank == 0 else silent)
    with (
        _arithmetic(subject, autocast, tf32) as as_run,
        subject.evaluating(),
        torch.random.fork_rng(devices=subject.devices),
        subject.repeating(),
        remembering(),  # the norms of the nets are the same for every source
        warnings.catch_warnings(),
    ):
        # what a library says to its own developers is not for the user of a model
        warnings.filterwarnings("ignore", message=".*deprecated")
        torch.manual_seed(seed)  # for models that draw numbers; each probe starts from here
        for stream in streams:
            first = stream.first(4, dtype=subject.dtype, device=subject.device)
            subject.check(first.x, first.context, f"source {stream.name!r}", strict=stream.role == "data")
        plan = list(_plan(streams, spent, probes, thresholds, bits, seed))
        processes.agree("model", subject.bijection.state_dict().values())
        for stream in streams:
            some = stream.first(64, dtype=torch.float64)
            processes.agree(f"source {stream.name!r}", (some.x, some.context))
        run = _Run(subject, plan, clock, processes, show, keep_interrupted)
        run.measure(streams)
    show("done", 1.0)
    described = tuple(_describe(stream, spent) for stream in streams)
    return AuditRecord(
        model=_about(subject, streams[0]) | ({"description": description} if description else {}),
        sources=described,
        measurements=tuple(run.measurements),
        verdicts=judge(run.measurements, described, thresholds, subject.eps),
        settings={
            "seed": seed,
            "budget": budget if isinstance(budget, str) else "custom",
            "costs": asdict(spent),
            "probes": list(dict.fromkeys(probe.name for probe, _ in plan)),
            "thresholds": thresholds.as_settings(),
            "sections": {
                probe.name: {"title": probe.section[0], "lead": probe.section[1]}
                for probe, _ in plan
                if any(probe.section)
            },
            "bits": bits,
            "command": command,
            "seconds": round(monotonic() - started, 3),
            **as_run,
            "stopped": run.stopped,
            "time": time,
            "ended": run.ended,
            "out_of_time": run.out_of_time,
        },
        environment=environment() | _device(subject),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@dataclass(frozen=True)
class _Done:
    """What became of one task."""

    measurement: Measurement
    failing: Batch | None = None
    stopped: bool = False
    piece: Any = None


@dataclass
class _Run:
    """The measuring part of an audit: every planned probe on its source, those that look at failing samples last."""

    subject: p.Subject
    plan: list[tuple[p.Probe, Source]]
    clock: _Clock
    processes: Processes
    show: Progress
    keep_interrupted: bool
    measurements: list[Measurement] = field(default_factory=list)
    failing: dict[str, Batch] = field(default_factory=dict)  # by source
    stopped: bool = False

    def measure(self, streams: Sequence[Source]) -> None:
        """Fill `measurements`, in the order of the plan."""
        main = main_source(streams)
        # Probes that look closer at what failed wait for those that find it.
        for _, group in itertools.groupby(self.plan, lambda pair: pair[0].scope == "failing"):
            self._all_of([(q, s) for q, s in group if not q.only_failing or s is main or s.name in self.failing])
        lost = self.failing.get("base")  # bad samples of the model
        if lost is not None and not self.stopped and all(s.name != "base" for s in streams):
            bad = Source("base", TensorRows(lost.x), context=_context_rows(lost))
            self._all_of([(q, bad) for q in {q.name: q for q, _ in self.plan if q.scope == "failing"}.values()])

    @property
    def ended(self) -> str:
        """What a model said that ended the program; empty where none did."""
        said = (text for m in self.measurements for text in _said(m))
        return next((text for text in said if text.startswith(ENDED)), "")

    @property
    def out_of_time(self) -> bool:
        """Whether something was left out because the time was over."""
        return self.clock.rang or any(m.reason == self.clock.reason for m in self.measurements if m.reason)

    def _all_of(self, tasks: list[tuple[p.Probe, Source]]) -> None:
        """Measure some tasks. Several processes divide the probes that come in pieces, and put these together."""
        several = self.processes.size > 1
        pieces = [probe.pieces if several else 1 for probe, _ in tasks]
        units = [
            (*task, k if count > 1 else None) for task, count in zip(tasks, pieces, strict=True) for k in range(count)
        ]
        # The longest first, and what is measured once: another process does the rest meanwhile.
        order = sorted(range(len(units)), key=lambda k: (-units[k][0].load, units[k][0].scope != "data"))
        every = iter(self.processes.all_of(units, order if several else range(len(units)), self._one))
        for (probe, stream), count in zip(tasks, pieces, strict=True):
            found = [next(every) for _ in range(count)]
            done = next((one for one in found if one.measurement.reason), found[0])
            if count > 1 and not done.measurement.reason:
                source = _at_failing(probe, stream, self.failing)
                done = _Done(probe.find(self.subject, source, pieces=[one.piece for one in found]).measurement)
            self.measurements.append(done.measurement)
            self.stopped = self.stopped or any(one.stopped for one in found)
            if done.failing is not None:
                self.failing.setdefault(done.measurement.source, done.failing)

    def _one(self, task: tuple[p.Probe, Source, int | None], begun: int) -> _Done:
        """One probe, or a piece of it, on one source; `begun` counts the tasks of its group before it."""
        probe, stream, piece = task
        if self.processes.interrupted and not self.keep_interrupted:
            raise KeyboardInterrupt
        self.stopped = self.stopped or self.processes.interrupted
        if self.stopped or self.clock.over:
            reason = "the audit was stopped before" if self.stopped else self.clock.reason
            return _Done(Measurement(probe.name, stream.name, reason=reason), stopped=self.stopped)
        text, done = f"{probe.name} on {stream.name}", len(self.measurements) + begun

        def moved(part: float) -> None:
            self.clock.check()
            self.show(text, min(1.0, (done + part) / len(self.plan)))

        try:
            self.show(text, min(1.0, done / len(self.plan)))
            with self.subject.watched(self.clock.check):
                source = _at_failing(probe, stream, self.failing)
                found = probe.find(self.subject, source, piece=piece, progress=moved)
        except KeyboardInterrupt:
            if not self.keep_interrupted:
                raise
            self.stopped = True
            return _Done(Measurement(probe.name, stream.name, reason="the audit was stopped here"), stopped=True)
        if self.clock.rang:  # a part of what it measures may be missing
            return _Done(Measurement(probe.name, stream.name, reason=self.clock.reason))
        lost = found.failing
        if lost is not None and self.processes.size > 1:  # it travels
            lost = lost.cpu()
        return _Done(found.measurement, lost, piece=found.piece)


class _Clock:
    """How long an audit may take; `check` raises when that is over."""

    def __init__(self, started: float, seconds: float | None) -> None:
        if seconds is not None and not (
            isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < math.inf
        ):
            raise InputError(f"audit(time={seconds!r}): expected a positive number of seconds, or None.")
        self.end = math.inf if seconds is None else started + seconds
        self.reason = "" if seconds is None else f"the time of {seconds:g} s was over"
        self.rang = False

    @property
    def over(self) -> bool:
        """Whether there is no time left."""
        return monotonic() >= self.end

    def check(self) -> None:
        """Raise `NotMeasured` if there is no time left."""
        if self.over:
            self.rang = True
            raise NotMeasured(self.reason)


def _said(measurement: Measurement) -> list[str]:
    """What a probe says in words: why it measured nothing, what the model raised."""
    return [measurement.reason, *(value for value in measurement.values.values() if isinstance(value, str))]


@contextlib.contextmanager
def _unended() -> Iterator[None]:
    """Inside, a model that ends the program is an error like any other."""
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise InputError(f"{ENDED} ({said_by(error)}).") from error


def _require_numbers(subject: p.Subject) -> None:
    empty = [name for name, value in subject.bijection.state_dict().items() if getattr(value, "is_meta", False)]
    if empty:
        raise InputError(
            f"the model is on the device meta, where tensors have no numbers ({empty[0]}). Load its weights first, as in "
            "model.to_empty(device='cpu') and model.load_state_dict(...)."
        )


def make_sources(given: Any, ood: Sequence[str], budget: Budget, seed: int, subject: p.Subject) -> list[Source]:
    """The sources of an audit, shuffled with its seed, and the noise that `ood` names, made from the first data source."""
    table = dict(given) if isinstance(given, Mapping) else {"data": given}
    if not table:
        raise InputError("audit: there is no source. Pass a batch, or a dict of names and batches.")
    ood = _listed(ood)
    found: dict[str, Source] = {}
    for label, value in table.items():
        name = str(label) if isinstance(given, Mapping) or not isinstance(value, Source) else value.name
        source = source_for(subject, name, value, role="ood" if name in ood else None, most=budget.samples)
        found[name] = source.shuffled(seed)  # what is counted on a part of the samples speaks for all of them
    first = next(iter(found.values()))
    for source in found.values():
        if source.shape != first.shape:
            raise InputError(
                f"the sources differ in shape: samples of {first.name!r} have shape {first.shape}, those of {source.name!r} "
                f"{source.shape}. One model takes one of them."
            )
    like = main_source(list(found.values()))
    for spec in ood:
        if spec in found:
            continue
        if str(spec).partition(":")[0] not in NOISE_NAMES:
            raise InputError(
                f"ood={spec!r} is neither the name of a source ({', '.join(found)}) nor a kind of noise: "
                f"{', '.join(NOISE_NAMES)}."
            )
        found[spec] = noise(spec, like, count=budget.noise, seed=seed)
    return list(found.values())


def main_source(sources: Sequence[Source]) -> Source:
    """The first source of data; where all are out of distribution, the first one."""
    return next((s for s in sources if s.role == "data"), sources[0])


def source_for(
    subject: p.Subject, name: str, value: Any, *, role: str | None = None, most: int | None = None
) -> Source:
    """A source under the name and in the role that this audit gives it, with contexts where the model takes them."""
    source = as_source(name, value, role=role, most=most, conditional=subject.conditional)
    if source.context_rows is None and is_loader(value) and _fails(subject, source):
        # What stands beside x may be the context.
        other = as_source(name, value, role=role, most=most, conditional=True)
        source = other if other.context_rows is not None and not _fails(subject, other) else source
    if source.name == name and role in (None, source.role):
        return source
    return Source(
        name,
        source.rows,
        role=role or source.role,
        description=source.description,
        context=source.context_rows,
    )


def _fails(subject: p.Subject, source: Source) -> bool:
    """Whether a model takes no sample of a source at all."""
    batch = source.first(4, dtype=subject.dtype, device=subject.device)
    try:
        with subject.evaluating():
            return bool(subject.forward(batch.x, batch.context).failed.all())
    except (BilipError, NotImplementedError):
        return True


def _listed(names: Any) -> list[Any]:
    """One name, names with commas between them, or a list."""
    return [part.strip() for part in names.split(",") if part.strip()] if isinstance(names, str) else list(names)


def _plan(
    streams: list[Source],
    budget: Budget,
    wanted: Sequence[str | p.Probe] | None,
    thresholds: Thresholds,
    bits: int | None,
    seed: int,
) -> Iterable[tuple[p.Probe, Source]]:
    """Every registered probe that the budget pays for, where its scope says; then the probes that were passed."""
    main = main_source(streams)
    task = Task(
        seed=seed,
        shape=main.shape,
        conditional=main.context_shape is not None,
        bits=bits,
        relative=thresholds.relative,
        log_prob=thresholds.log_prob,
        range=thresholds.range,
        looks=Looks(thresholds.bad_share or 0.0, most=budget.samples),
    )
    names = None if wanted is None else [_named(w) for w in wanted]
    for probe in sorted(PROBES.values(), key=lambda probe: (probe.scope == "failing", probe.place)):
        cost = probe.cost(budget, task)
        if cost is None and names is not None and probe.name in names:
            cost = {}  # asked for by name: as it comes
        if cost is None or (names is not None and probe.name not in names):
            continue
        made = probe(**cost)
        for stream in [main] if probe.scope == "data" else streams:
            yield made, stream
    for probe in wanted or ():
        if isinstance(probe, p.Probe):
            for stream in streams:
                yield probe, stream


def _at_failing(probe: p.Probe, stream: Source, failing: Mapping[str, Batch]) -> Source:
    """The samples that fail on a source, for a probe that looks at these; the source itself where none does."""
    lost = failing.get(stream.name)
    if probe.scope != "failing" or lost is None:
        return stream
    return Source(stream.name, TensorRows(lost.x), role=stream.role, context=_context_rows(lost))


def _context_rows(batch: Batch) -> TensorRows | None:
    return None if batch.context is None else TensorRows(batch.context)


@contextlib.contextmanager
def _arithmetic(subject: p.Subject, autocast: torch.dtype | None, tf32: bool | None) -> Iterator[dict[str, Any]]:
    """The arithmetic that is judged: what was given, else what holds at the call. What comes out is what the record states."""
    kind = subject.device.type
    with contextlib.ExitStack() as stack:
        if autocast is not None:
            stack.enter_context(torch.autocast(kind, dtype=autocast))
        if tf32 is not None:
            stack.enter_context(float32_products("tf32" if tf32 else "ieee"))
        on = torch.is_autocast_enabled(kind)
        yield {
            "tf32": kind == "cuda" and uses_tf32(),
            "autocast": dtype_name(torch.get_autocast_dtype(kind)) if on else "",
        }


def _named(wanted: str | p.Probe) -> str:
    if isinstance(wanted, p.Probe):
        return ""
    if wanted not in PROBES:
        raise InputError(
            f"audit(probes=...): unknown probe {wanted!r}; expected {', '.join(PROBES)} or a Probe of your own."
        )
    return wanted


def _about(subject: p.Subject, source: Source) -> dict[str, Any]:
    parts = subject.parts
    bijection = subject.bijection
    return {
        "name": subject.name,
        "library": subject.library,
        "dtype": dtype_name(subject.dtype),
        "device": subject.device.type,
        "parameters": sum(q.numel() for q in bijection.parameters()),
        "shape": list(source.shape),
        "dimension": math.prod(source.shape),
        "blocks": [{"name": name, "kind": kind_of(part)} for name, part in parts],
        "base": subject.base is not None,
        **(
            {"called": "; ".join(called)}
            if (called := [c for _, q in parts if (c := getattr(q, "called", ""))])
            else {}
        ),
    }


def _describe(source: Source, budget: Budget) -> dict[str, Any]:
    used = source.count if budget.samples is None else min(source.count, budget.samples)
    return {
        "name": source.name,
        "role": source.role,
        "count": used,
        "shape": list(source.shape),
        "description": source.description,
    }


def _device(subject: p.Subject) -> dict[str, str]:
    if subject.device.type != "cuda":
        return {"threads": str(torch.get_num_threads())}
    return {"device": torch.cuda.get_device_name(subject.device), "cuda": str(torch.version.cuda)}


class _Line:
    """One line on the terminal that appears after two seconds and goes away at the end."""

    def __init__(self) -> None:
        self.started, self.shown = monotonic(), False
        self.live = sys.stderr.isatty()

    def __call__(self, text: str, share: float) -> None:
        if not self.live or monotonic() - self.started < 2:
            return
        if share >= 1:
            sys.stderr.write("\r\033[K" if self.shown else "")
        else:
            sys.stderr.write(f"\r\033[Kbilip audit {100 * share:3.0f} %  {text}")
        self.shown = True
        sys.stderr.flush()
