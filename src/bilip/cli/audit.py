"""`bilip audit`: one command from a model to verdicts."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from bilip._progress import bar
from bilip.cli._arguments import listed, named_files, read_for, require_outputs, require_page
from bilip.cli._ending import Stop, Streams
from bilip.cli._processes import Processes, processes
from bilip.errors import InputError, nearest

if TYPE_CHECKING:
    from bilip.record import AuditRecord

__all__ = ["audit"]


def audit(
    target: Annotated[
        str, typer.Argument(help="A checkpoint folder, or package.module:function that returns a model.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Data: FILE or NAME=FILE; .npy, .npz, .csv, .pt, .safetensors or a folder of images. Repeatable."
        ),
    ] = None,
    ood: Annotated[
        str | None,
        typer.Option(
            help="Out-of-distribution sources: uniform, near, gaussian, rademacher, shuffled, scaled:10, or names of --data. "
            "By default uniform,gaussian,rademacher."
        ),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="quick, standard (the default) or thorough.")] = None,
    time: Annotated[
        float | None,
        typer.Option(help="Seconds that the audit may take; what does not fit is recorded as not measured."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the record as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML page.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write a JUnit file: one test case for each use.")] = None,
    summary: Annotated[
        Path | None,
        typer.Option(
            help="Append a summary in Markdown to this file; by default to $GITHUB_STEP_SUMMARY, where it is set."
        ),
    ] = None,
    require: Annotated[
        str | None,
        typer.Option(help="Uses that must be safe, comma-separated; else exit code 1. As in likelihood,sampling."),
    ] = None,
    not_measured: Annotated[
        str | None, typer.Option(help="fail (the default) or pass: what a required use that was not measured does.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="A limit: NAME=NUMBER, a field of Thresholds, as in bad_share=0.01. Repeatable."),
    ] = None,
    probes: Annotated[str, typer.Option(help="Only these probes, comma-separated.")] = "",
    bits: Annotated[
        int | None, typer.Option(help="Bit depth of the data, for attacks inside the dequantization cell.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Move the model there first, as in cuda.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Audit a model: is it invertible, where does it break, what may it be used for?

    What is not given here is read from [tool.bilip] of the nearest pyproject.toml.

    Under torchrun several processes, GPUs or machines share the work and give the record of one:
    torchrun --nproc-per-node 4 -m bilip audit ...
    """
    from bilip._project import find_project

    project = find_project()
    required = list(project.require) if require is None else listed(require)
    if require is not None or required:
        _require_uses(required, None if require is not None else project.path)
    not_measured = not_measured or project.not_measured or "fail"
    if not_measured not in ("fail", "pass"):
        raise InputError(f"--not-measured {not_measured}: expected fail or pass.")
    if not data and not project.sources:
        raise InputError(
            "there is no data: pass --data FILE, or name files under sources in [tool.bilip] of pyproject.toml."
        )
    limits = {**project.limits, **_limits(limit or [])}
    written = _Written(out, html, junit, summary or _summary_of_github())
    sources = named_files(data) if data else dict(project.sources)
    if Processes.started().first:
        written.require([*sources.values(), *read_for(target), *([project.path] if project.path else [])])

    import bilip
    from bilip.auditing.audit import staying
    from bilip.cli._arguments import load_model

    thresholds = bilip.Thresholds(**limits)
    noise = project.ood if ood is None else listed(ood)
    with Stop(keeps=True) as stop, staying(), processes(stop) as here, Streams() as streams:
        model = load_model(target, device)
        with bar(quiet=not here.first) as running:
            task = running.add_task("auditing", total=1.0)

            def show(text: str, share: float) -> None:
                if share < 1:
                    stop.check()
                elif text == "done":  # all is measured, and is written first
                    stop.late = True
                running.update(task, description=text, completed=share)

            record = bilip.audit(
                model,
                sources,
                ood=("uniform", "gaussian", "rademacher") if noise is None else noise,
                budget=budget or project.budget or "standard",
                time=project.time if time is None else time,
                thresholds=thresholds,
                probes=listed(probes) or None,
                bits=bits,
                seed=seed,
                name=target,
                command=shlex.join(["bilip", *sys.argv[1:]]),
                keep_interrupted=True,
                distributed=here.size > 1,
                progress=show,
            )
            stop.late = True
        streams.restore()
        if here.first:
            written.write(record, required, not_measured, project.path)
        stop.check()
        if record.settings["stopped"]:
            raise KeyboardInterrupt
    if here.first:
        _require_safe(record, required, not_measured)


@dataclass(frozen=True)
class _Written:
    """The files that an audit leaves, below the folder in which it began: a model may change the working folder, or remove it."""

    out: Path | None
    html: Path | None
    junit: Path | None
    summary: Path | None
    folder: Path = field(default_factory=Path.cwd)

    def require(self, read: list[str | Path]) -> None:
        """Refuse what cannot be written, or is read."""
        files = {"--out": self.out, "--html": self.html, "--junit": self.junit, "--summary": self.summary}
        require_outputs(files, read)
        require_page(self.html)

    def write(self, record: AuditRecord, required: list[str], not_measured: str, project: Path | None) -> None:
        """Save the record, print it, write what else was asked for, and say where."""
        from bilip import report
        from bilip.record import write_aside

        if self.out is not None:  # first of all: what was measured must not be lost
            record.save(self._at(self.out))
        lines = [] if self.out is None else [f"wrote {self.out}"]
        try:
            report.print_terminal(record)
        finally:  # also where nobody reads on, as after `| head`
            if self.junit is not None:
                write_aside(self._at(self.junit), report.to_junit(record, require=required, not_measured=not_measured))
                lines.append(f"wrote {self.junit}")
            if self.summary is not None:
                with self._at(self.summary).open("a", encoding="utf-8") as file:
                    file.write(report.to_markdown(record) + "\n")
                lines.append(f"added to {self.summary}")
            if self.html is not None:
                report.write_html(record, self._at(self.html))
                lines.append(f"wrote {self.html}")
        if project is not None:
            lines.append(f"settings of {project} [tool.bilip]")
        for line in lines:
            Console(highlight=False, soft_wrap=True).print(line, markup=False)

    def _at(self, path: Path) -> Path:
        found = self.folder / path
        found.parent.mkdir(parents=True, exist_ok=True)  # it was there before
        return found


def _summary_of_github() -> Path | None:
    """The file that GitHub shows beside a run; `None` elsewhere."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    return Path(path) if path else None


def _require_safe(record: AuditRecord, required: list[str], not_measured: str) -> None:
    """Leave with exit code 1 unless every required use is safe."""
    if required and record.settings["ended"]:
        print(f"bilip: required, but {record.settings['ended']}", file=sys.stderr)
        raise typer.Exit(1)
    failed = [use for use in required if not record.passed(use, not_measured=not_measured)]
    if failed:
        states = ", ".join(f"{use} is {record.verdicts[use].status.value}" for use in failed)
        print(f"bilip: required, but {states}", file=sys.stderr)
        raise typer.Exit(1)


def _require_uses(required: list[str], path: Path | None) -> None:
    from bilip.record import USES

    if path is None and not required:
        raise InputError(f"--require names no use: expected some of {', '.join(USES)}, or leave it out.")
    where = "--require" if path is None else f"{path}: [tool.bilip] require:"
    for use in required:
        if use not in USES:
            raise InputError(f"{where} {use}: expected {', '.join(USES)}.{nearest(use, USES)}")


def _limits(entries: list[str]) -> dict[str, float]:
    from bilip._project import LIMITS

    found = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        if name not in LIMITS or name == "more":
            known, hint = ", ".join(LIMITS[:-1]), nearest(name, LIMITS)
            raise InputError(f"--limit {entry}: expected NAME=NUMBER with a name of {known}.{hint}")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise InputError(f"--limit {entry}: expected a number after the equals sign.") from error
    return found
