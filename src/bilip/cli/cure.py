"""`bilip cure`: from a broken model to one that holds, in a folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bilip._progress import bar
from bilip.cli._arguments import listed, load_native, lying, named_files, require_apart
from bilip.cli._ending import Stop, Streams
from bilip.errors import BilipError, InputError

if TYPE_CHECKING:
    from bilip.cures import Cure

__all__ = ["cure", "cure_table"]

COLOURS = {"cured": "bold green", "not safe": "red", "too costly": "red", "failed": "red"}


def cure(
    target: Annotated[
        str, typer.Argument(help="A checkpoint folder, or package.module:function that returns a model.")
    ],
    data: Annotated[
        list[str] | None, typer.Option(help="Data for the audits: FILE or NAME=FILE, as in bilip audit. Repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the cured model, cure.json and both audits.")] = None,
    uses: Annotated[
        str | None,
        typer.Option(
            help="What has to become safe, comma-separated: inversion, sampling, likelihood, ood-likelihood, reversible-gradients, "
            "ood-inversion. By default all that the audit finds unsafe."
        ),
    ] = None,
    ood: Annotated[
        str, typer.Option(help="Out-of-distribution sources, comma-separated, as in bilip audit.")
    ] = "uniform",
    train: Annotated[
        str | None, typer.Option(help="Data for fine-tuning, a file as for --data. Without it nothing is fine-tuned.")
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(help="package.module:function, loss(model, batch); by default the likelihood of a flow."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Largest number of steps of fine-tuning.")] = 400,
    rate: Annotated[float, typer.Option(help="Learning rate of fine-tuning.")] = 3e-4,
    rungs: Annotated[
        str, typer.Option(help="Only these: settings, arithmetic, replacements, re-range, penalties.")
    ] = "",
    time: Annotated[
        float | None, typer.Option(help="Seconds that it may take; then the best so far is written, and called that.")
    ] = None,
    budget: Annotated[str, typer.Option(help="Of each audit: quick, standard or thorough.")] = "quick",
    device: Annotated[str | None, typer.Option(help="Move the model there first, as in cuda.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Cure a model: try repairs from the cheapest, audit each, hand over the first that makes the wanted uses safe.

    Exit code 0: cured, or nothing to cure; 1: not cured, or only the best so far.
    """
    if not data:
        raise InputError("there is no data: pass --data FILE.")
    sources = named_files(data)
    _require_folder(out, target, [*sources.values(), *([train] if train else [])])

    import bilip

    train, folder = train and lying(train), out and out.absolute()
    function = None if loss is None else _loss(loss)
    with Stop(keeps=True) as stop, Streams() as streams:
        model, adapted = load_native(target, device)
        batches = None if train is None else _rows(train, adapted)
        with bar() as running:
            task = running.add_task("cure", total=1.0)

            def show(text: str, share: float) -> None:
                if share < 1:
                    stop.check()
                running.update(task, description=text[:60], completed=share)

            result = bilip.cure(
                model,
                sources,
                uses=uses,
                loss=function,
                train=batches,
                ood=listed(ood),
                time=time,
                rungs=listed(rungs) or None,
                steps=steps,
                rate=rate,
                budget=budget,
                seed=seed,
                name=target,
                keep_interrupted=True,
                progress=show,
            )
            stop.late = True
        streams.restore()
        console = Console(highlight=False, soft_wrap=True)
        if folder is not None:
            result.save(folder)
        console.print(cure_table(result))
        console.print(_last_line(result))
        if out is not None:
            console.print(f"wrote {out}", markup=False)
            if result.chosen is not None:
                console.print(
                    f"load it:  model = bilip.cures.restore(build(), {str(out)!r})   # {shlex.quote(target)} builds it",
                    markup=False,
                )
        stop.check()
        if result.interrupted:
            raise KeyboardInterrupt
    if not result.cured:
        print(f"bilip: {result.status}: {', '.join(result.uses)}", file=sys.stderr)
        raise typer.Exit(1)


def cure_table(result: Cure) -> Table:
    """What was tried, one line each."""
    table = Table(title="What was tried", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in ("rung", "what", "outcome"):
        table.add_column(head)
    for head in ("held-out loss", "s"):
        table.add_column(head, justify="right")
    for attempt in result.tried:
        rise, words = attempt.cost.get("rise"), attempt.what
        colour = COLOURS.get(attempt.outcome, "dim")
        if attempt.outcome != "cured":
            words = f"{attempt.what}: {attempt.reason}" if attempt.what else attempt.reason
        table.add_row(
            attempt.rung,
            escape(words),
            f"[{colour}]{attempt.outcome}[/{colour}]",
            "" if rise is None else f"{rise:+.3g}",
            f"{attempt.repair_seconds:.1f}" if attempt.outcome != "skipped" else "",
        )
    return table


def _last_line(result: Cure) -> str:
    asked = ", ".join(result.uses)
    if result.status == "not needed":
        return f"Nothing to cure: {f'{asked} safe as it is' if asked else 'the audit finds no use unsafe'}."
    if result.status == "cured":
        return f"[bold green]Cured[/bold green]: {asked} safe now. Done: {escape(result.done)}."
    if result.status == "best so far":
        return f"[bold]The best so far[/bold], not safe: {escape(result.done)}."
    tuned = any(a.rung == "re-range" and a.outcome != "skipped" for a in result.tried)
    more = "" if tuned else " Fine-tuning needs --train."
    return f"[bold red]Not cured[/bold red]: nothing that was tried makes {asked} safe.{more}"


def _require_folder(out: Path | None, target: str, read: list[str]) -> None:
    from bilip.cures.result import FILES, require_folder

    if out is None:
        return
    if out.is_dir() and Path(target).is_dir() and out.samefile(target):
        raise InputError(
            f"--out {out} is the model that is cured, which would be lost: name another folder, or a new one."
        )
    require_folder(out)
    for name in FILES:
        require_apart({"--out": out / name}, read)
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}: it is a file; expected the name of a folder.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror or error}.") from error


def _loss(target: str) -> Any:
    from bilip.cli._arguments import import_named

    function = import_named(target)
    if isinstance(function, type):
        function = function()
    if not callable(function):
        raise InputError(f"--loss {target}: it is a {type(function).__name__}, expected a function loss(model, batch).")
    return function


def _rows(path: str, model: Any) -> Any:
    """The rows of a file, and their contexts where it has some."""
    from bilip.auditing.audit import source_for
    from bilip.auditing.subject import Subject

    try:
        source = source_for(Subject.of(model), "train", path, most=200_000)
        source.check()
        whole = source.read(0, source.count)
    except BilipError as error:
        raise InputError(f"--train {path}: {error}") from error
    return whole.x if whole.context is None else (whole.x, whole.context)
