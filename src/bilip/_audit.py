"""The audit: sources x probes -> measurements -> verdicts -> record."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import torch

from bilip import probes as p
from bilip._budget import BUDGETS, Budget, budget_named
from bilip._verdicts import Thresholds, judge
from bilip.data import Source, as_source, noise
from bilip.data.noise import NOISE_NAMES
from bilip.errors import InputError, NotMeasured
from bilip.probes.blame import kind_of
from bilip.probes.probe import ENDED
from bilip.record import AuditRecord, Measurement, environment

__all__ = ["BUDGETS", "Budget", "audit"]

Progress = Callable[[str, float], None]


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
    seed: int = 0,
    name: str | None = None,
    command: str = "",
    keep_interrupted: bool = False,
    progress: Progress | None = None,
) -> AuditRecord:
    r"""Is this model still invertible, where does it break, and what may it be used for?

    The model is audited in evaluation mode and in its own dtype, with TF32 off, and put back afterwards. Nothing about it is changed.

    Args:
        model: A bijection, a flow, or anything `as_bijection` takes.
        sources: By name: a batch, a pair `(x, context)`, a file (`.npy`, `.npz`, `.safetensors`), a folder of images or a
            `Source`. A single one is called `data`. Names that begin with uniform, gaussian, rademacher or scaled are out of
            distribution.
        ood: Sources to be treated as out of distribution, by name; or noise made from the first data source, as in `"uniform"`,
            `"gaussian"`, `"rademacher"`, `"scaled:10"`.
        budget: `"quick"`, `"standard"`, `"thorough"`, or a `Budget`.
        time: Seconds that the audit may take; a probe that is running then ends with its current batch. What was not measured by then is
            recorded as not measured, with the reason. `None` for as long as it takes.
        probes: Names of probes, or probes of your own; by default all that make sense for the model.
        thresholds: What counts as safe.
        bits: Bit depth of the data, for attacks inside the dequantization cell.
        seed: Seed of everything random.
        name: Name of the model in reports.
        command: The command to repeat the audit, for the report.
        keep_interrupted: On Ctrl-C return what was measured so far instead of raising.
        progress: Called with a text and the share that is done; by default a line on the terminal.

    Example:
        >>> import bilip
        >>> flow = bilip.Flow(bilip.models.real_nvp(2, blocks=2, coupling="additive"))
        >>> record = bilip.audit(flow, torch.randn(100, 2), ood=["uniform"], budget="quick")
        >>> record.verdicts["likelihood"].status.value, record.verdicts["sampling"].status.value
        ('safe', 'safe')
    """
    started = monotonic()
    spent = budget if isinstance(budget, Budget) else budget_named(budget)
    for label, value, least, most in (("seed", seed, 0, 2**63 - 1), ("bits", bits, 1, 32)):
        if value is not None and not (isinstance(value, int) and least <= value <= most):
            raise InputError(f"audit({label}={value!r}): expected a whole number, {least} to {most}.")
    clock = _Clock(started, time)
    thresholds = thresholds or Thresholds()
    probes = None if probes is None else _listed([probes] if isinstance(probes, p.Probe) else probes)
    with _unended():
        subject = p.Subject.of(model, name)
    _require_numbers(subject)
    streams = _sources(sources, ood, spent, seed)
    for stream in streams:
        stream.check(spent.samples)
    show, measurements, stopped = progress or _Line(), [], False
    with subject.evaluating(), torch.random.fork_rng(devices=subject.devices), warnings.catch_warnings():
        # what a library says to its own developers is not for the user of a model
        warnings.filterwarnings("ignore", message=".*deprecated")
        torch.manual_seed(seed)  # for models that draw numbers; each probe starts from here
        for stream in streams:
            first = next(iter(stream.batches(4, limit=4, dtype=subject.dtype, device=subject.device)))
            subject.check(first.x, first.context, f"source {stream.name!r}")
        plan = list(_plan(subject, streams, spent, probes, bits, seed))
        for k, (probe, stream) in enumerate(plan):
            text = f"{probe.name} on {stream.name}"
            if stopped or clock.over:
                reason = "the audit was stopped before" if stopped else clock.reason
                measurements.append(Measurement(probe.name, stream.name, reason=reason))
                continue

            def moved(share: float, k: int = k, text: str = text) -> None:
                clock.check()
                show(text, (k + share) / len(plan))

            try:
                show(text, k / len(plan))
                with subject.watched(clock.check), _told(probe, moved):
                    found = probe.measure(subject, stream)
                if clock.rang:  # a part of what it measures may be missing
                    found = Measurement(probe.name, stream.name, reason=clock.reason)
                measurements.append(found)
            except KeyboardInterrupt:
                if not keep_interrupted:
                    raise
                stopped = True
                measurements.append(Measurement(probe.name, stream.name, reason="the audit was stopped here"))
    show("done", 1.0)
    described = tuple(_describe(stream, spent) for stream in streams)
    return AuditRecord(
        model=_about(subject, streams[0]),
        sources=described,
        measurements=tuple(measurements),
        verdicts=judge(measurements, described, thresholds, subject.eps),
        settings={
            "seed": seed,
            "budget": budget if isinstance(budget, str) else "custom",
            "costs": asdict(spent),
            "probes": list(dict.fromkeys(probe.name for probe, _ in plan)),
            "thresholds": {**asdict(thresholds), "relative": thresholds.limit(subject.eps)},
            "bits": bits,
            "command": command,
            "seconds": round(monotonic() - started, 3),
            "tf32": False,
            "stopped": stopped,
            "time": time,
            "ended": next((m.reason for m in measurements if m.reason.startswith(ENDED)), ""),
            "out_of_time": time is not None and any(m.reason == clock.reason for m in measurements),
        },
        environment=environment() | _device(subject),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


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


@contextlib.contextmanager
def _told(probe: p.Probe, progress: Callable[[float], None]) -> Iterator[None]:
    """Inside, a probe tells of its progress; afterwards it is as it was."""
    before = vars(probe).get("progress")
    probe.progress = progress
    try:
        yield
    finally:
        if before is None:
            del probe.progress
        else:
            probe.progress = before


@contextlib.contextmanager
def _unended() -> Iterator[None]:
    """Inside, a model that ends the program is an error like any other."""
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise InputError(f"{ENDED} ({type(error).__name__}: {error}).") from error


def _require_numbers(subject: p.Subject) -> None:
    empty = [name for name, value in subject.bijection.state_dict().items() if getattr(value, "is_meta", False)]
    if empty:
        raise InputError(
            f"the model is on the device meta, where tensors have no numbers ({empty[0]}). Load its weights first, as in "
            "model.to_empty(device='cpu') and model.load_state_dict(...)."
        )


def _sources(given: Any, ood: Sequence[str], budget: Budget, seed: int) -> list[Source]:
    table = dict(given) if isinstance(given, Mapping) else {"data": given}
    if not table:
        raise InputError("audit: there is no source. Pass a batch, or a dict of names and batches.")
    ood = _listed(ood)
    found: dict[str, Source] = {}
    for label, value in table.items():
        name = str(label) if isinstance(given, Mapping) or not isinstance(value, Source) else value.name
        found[name] = _called(name, value, role="ood" if name in ood else None)
    first = next(iter(found.values()))
    for source in found.values():
        if source.shape != first.shape:
            raise InputError(
                f"the sources differ in shape: samples of {first.name!r} have shape {first.shape}, those of {source.name!r} "
                f"{source.shape}. One model takes one of them."
            )
    like = next((s for s in found.values() if s.role == "data"), first)
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


def _called(name: str, value: Any, role: str | None) -> Source:
    """A source under the name and in the role that this audit gives it."""
    source = as_source(name, value, role=role)
    if source.name == name and role in (None, source.role):
        return source
    return Source(
        name,
        source.rows,
        role=role or source.role,
        description=source.description,
        context=source.context_rows,
    )


def _listed(names: Any) -> list[Any]:
    """One name, names with commas between them, or a list."""
    return [part.strip() for part in names.split(",") if part.strip()] if isinstance(names, str) else list(names)


def _plan(
    subject: p.Subject,
    streams: list[Source],
    b: Budget,
    wanted: Sequence[str | p.Probe] | None,
    bits: int | None,
    seed: int,
) -> Iterable[tuple[p.Probe, Source]]:
    main = next((s for s in streams if s.role == "data"), streams[0])
    size = math.prod(main.shape)
    everywhere: list[p.Probe] = [
        p.Reconstruction(b.samples, batch=b.batch, rounds=b.repeats),
        p.LogDet(b.samples, batch=b.batch, samples=b.spectra, exact=min(b.exact, 512)),
        p.Blame(b.walk, spectra=min(2, b.spectra)),
        p.Spectrum(b.spectra, exact=b.exact, steps=b.steps, seed=seed),
        p.Bounds(min(4, b.spectra)),
        p.Trust(limit=b.samples, batch=b.batch),
    ]
    once: list[p.Probe] = [p.Consistency(), p.Sampling(b.draws, batch=b.batch, seed=seed)]
    if wanted is not None or (size == 2 and main.context_shape is None):
        once.append(p.ErrorMap())
    if b.gradients:
        once.append(p.GradientAngle(samples=b.gradients, batch=min(32, b.gradients)))
    if b.precision:
        once.append(p.Precision(b.precision, seed=seed))
    if b.attack:
        once.append(p.Attack(samples=b.attack, steps=b.attack_steps, bits=bits, seed=seed))
    known = {probe.name: probe for probe in (*everywhere, *once)}
    chosen = list(known) if wanted is None else [_named(w, known) for w in wanted]
    order = [*once[:1], *everywhere, *once[1:]]
    for probe in order:
        if probe.name in chosen:
            for stream in streams if probe in everywhere else [main]:
                yield probe, stream
    for probe in wanted or ():
        if isinstance(probe, p.Probe):
            for stream in streams:
                yield probe, stream


def _named(wanted: str | p.Probe, known: Mapping[str, p.Probe]) -> str:
    if isinstance(wanted, p.Probe):
        return ""
    if wanted not in known:
        raise InputError(
            f"audit(probes=...): unknown probe {wanted!r}; expected {', '.join(known)} or a Probe of your own."
        )
    return wanted


def _about(subject: p.Subject, source: Source) -> dict[str, Any]:
    parts = subject.parts
    bijection = subject.bijection
    return {
        "name": subject.name,
        "library": subject.library,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "device": subject.device.type,
        "parameters": sum(q.numel() for q in bijection.parameters()),
        "shape": list(source.shape),
        "dimension": math.prod(source.shape),
        "blocks": [{"name": name, "kind": kind_of(part)} for name, part in parts],
        "base": subject.base is not None,
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
