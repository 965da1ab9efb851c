"""`bilip audit`: one command from a model to verdicts."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bilip.cli._bar import bar
from bilip.cli._door import Stop
from bilip.cli._processes import Processes, processes
from bilip.errors import InputError

__all__ = ["audit", "require_page", "require_writable"]


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
    required = list(project.require) if require is None else _listed(require)
    _require_uses(required, None if require is not None else project.path)
    not_measured = not_measured or project.not_measured or "fail"
    if not_measured not in ("fail", "pass"):
        raise InputError(f"--not-measured {not_measured}: expected fail or pass.")
    if not data and not project.sources:
        raise InputError(
            "there is no data: pass --data FILE, or name files under sources in [tool.bilip] of pyproject.toml."
        )
    limits = {**project.limits, **_limits(limit or [])}
    if summary is None and os.environ.get("GITHUB_STEP_SUMMARY"):
        summary = Path(os.environ["GITHUB_STEP_SUMMARY"])
    if Processes.started().first:
        for path in (out, html, junit, summary):
            require_writable(path)
        require_page(html)

    import bilip
    from bilip import report
    from bilip.cli._target import load_model
    from bilip.record import write_aside

    thresholds = bilip.Thresholds(**limits)
    sources = _sources(data) if data else dict(project.sources)
    noise = project.ood if ood is None else _listed(ood)
    with Stop() as stop, processes(stop) as here:
        model = load_model(target, device)
        with bar(quiet=not here.first) as running:
            task = running.add_task("auditing", total=1.0)

            def show(text: str, share: float) -> None:
                if share < 1:  # else all is measured, and is written first
                    stop.check()
                running.update(task, description=text, completed=share)

            record = bilip.audit(
                model,
                sources,
                ood=("uniform", "gaussian", "rademacher") if noise is None else noise,
                budget=budget or project.budget or "standard",
                time=project.time if time is None else time,
                thresholds=thresholds,
                probes=_listed(probes) or None,
                bits=bits,
                seed=seed,
                name=target,
                command=shlex.join(["bilip", *sys.argv[1:]]),
                keep_interrupted=True,
                distributed=here.size > 1,
                progress=show,
            )
            stop.late = True
        if here.first:
            if out is not None:  # first of all: what was measured must not be lost
                record.save(out)
            report.print_terminal(record)
            shown = Console(highlight=False, soft_wrap=True)
            if out is not None:
                shown.print(f"wrote {out}", markup=False)
            if junit is not None:
                write_aside(junit, report.to_junit(record, require=required, not_measured=not_measured))
                shown.print(f"wrote {junit}", markup=False)
            if summary is not None:
                with summary.open("a", encoding="utf-8") as file:
                    file.write(report.to_markdown(record) + "\n")
                shown.print(f"added to {summary}", markup=False)
            if html is not None:
                report.write_html(record, html)
                shown.print(f"wrote {html}", markup=False)
            if project.path is not None:
                shown.print(f"settings of {project.path} [tool.bilip]", markup=False)
        stop.check()
        if record.settings["stopped"]:
            raise KeyboardInterrupt
    if not here.first:
        return
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

    where = "--require" if path is None else f"{path}: [tool.bilip] require:"
    for use in required:
        if use not in USES:
            near = difflib.get_close_matches(use, USES, 1, 0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InputError(f"{where} {use}: expected {', '.join(USES)}.{hint}")


def _limits(entries: list[str]) -> dict[str, float]:
    from bilip._project import LIMITS

    found = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        if name not in LIMITS or name == "more":
            near = difflib.get_close_matches(name, LIMITS, 1, 0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InputError(f"--limit {entry}: expected NAME=NUMBER with a name of {', '.join(LIMITS[:-1])}.{hint}")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise InputError(f"--limit {entry}: expected a number after the equals sign.") from error
    return found


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _sources(entries: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not equals or not name or Path(entry).exists():
            name, path = Path(entry).stem or "data", entry
        if name in found:
            raise InputError(f"--data: two sources are called {name!r}. Give each a name, as in --data other={path}.")
        found[name] = path
    return found


def require_page(path: Path | None) -> None:
    """Say what a page needs before a long audit, not after it."""
    if path is not None:
        from bilip.report.extras import need

        for module in ("jinja2", "markupsafe", "plotly.offline"):
            need(module, "the HTML page")


def require_writable(path: Path | None) -> None:
    """Say so before a long audit, not after it."""
    if path is None:
        return
    folder = path.parent if str(path.parent) else Path()
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder.")
    if not folder.is_dir():
        why = f"{folder} is not a folder" if folder.exists() else f"the folder {folder} does not exist"
        raise InputError(f"cannot write {path}: {why}.")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InputError(f"cannot write {path}: no permission.")
