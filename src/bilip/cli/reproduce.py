"""`bilip reproduce`: one claim of the paper, its numbers beside ours."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bilip._progress import bar
from bilip.cli._arguments import require_outputs
from bilip.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from bilip.recipes import Outcome

__all__ = ["reproduce"]


def reproduce(
    name: Annotated[str | None, typer.Argument(help="The recipe; --list shows them.")] = None,
    size: Annotated[str, typer.Option(help="quick, gpu or paper.")] = "quick",
    seeds: Annotated[str, typer.Option(help="Comma-separated; each is a run of its own.")] = "0",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    devices: Annotated[int, typer.Option(help="Processes that share each batch, one for each GPU or on the CPU.")] = 1,
    jobs: Annotated[
        int, typer.Option(help="Parts of the recipe side by side; 0 for one on each of up to 4 cores.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Where results go: runs/NAME; of --page the file, reproduction.html.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change the configuration: key=value. Repeatable.")
    ] = None,
    parts: Annotated[str | None, typer.Option(help="Comma-separated: some parts of the recipe alone.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Save and stop training after so many minutes (exit code 75); run again to go on."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the data: BILIP_DATA or .data.")] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Train nothing; table and figures of the parts in NAME/parts.")
    ] = False,
    page: Annotated[
        bool,
        typer.Option("--page", help="Write one HTML page: every claim of the paper beside what is in --results."),
    ] = False,
    results: Annotated[Path, typer.Option(help="With --page: the folder with claims.json.")] = Path("results"),
    list_: Annotated[
        bool, typer.Option("--list", help="Show the recipes, their cost and what there is of results.")
    ] = False,
) -> None:
    """Run one claim of the paper; a run that was stopped goes on where it was. Writes ours.json and figures."""
    if page:
        _write_page(name, out, results)
        return
    from bilip.recipes import names

    if list_:
        _show_all()
        return
    if name is None:
        raise InputError(f"which recipe? There are {', '.join(names())}; bilip reproduce --list says more.")
    options = {
        "size": size,
        "device": device,
        "devices": devices,
        "out": out,
        "changes": changes or [],
        "parts": None if parts is None else [part.strip() for part in parts.split(",") if part.strip()],
        "minutes": minutes,
        "data": data,
        "collect": collect,
    }
    if os.environ.get("LOCAL_RANK", "0") != "0":  # one of several processes: the first one speaks
        _run(name, seeds, 1, Console(quiet=True), options)
        return
    console = Console(highlight=False)
    outcome = _run(name, seeds, jobs, console, options)
    console.print(_table(outcome))
    for why in outcome.diverged:
        console.print(why, markup=False, soft_wrap=True)
    if outcome.diverged:
        console.print("The same command diverges again: change --set lr=... and --out.\n", markup=False)
    other = [", ".join(outcome.differences) + "."] if outcome.differences else []
    for title, notes in (
        ("As in the original code", outcome.recipe.matched),
        ("Otherwise", outcome.recipe.corrected),
        ("Other than at the size paper", other),
    ):
        if notes:
            console.print(f"[bold]{title}:[/bold] " + " ".join(notes))
    drawn = f" and {', '.join(f.name for f in outcome.figures)}" if outcome.figures else ""
    console.print(f"\nwrote {outcome.folder / 'ours.json'}{drawn}", markup=False)


def _write_page(name: str | None, out: Path | None, results: Path) -> None:
    from bilip.recipes.page import write_page

    if name is not None:
        raise InputError(f"--page is about all recipes: run it without {name!r}.")
    path = out or Path("reproduction.html")
    require_outputs({"--out": path}, [results / "claims.json", *results.glob("*/ours.json")])
    write_page(path, results)
    Console(highlight=False).print(f"wrote {path}", markup=False)


def _run(name: str, seeds: str, jobs: int, console: Console, options: dict[str, Any]) -> Outcome:
    from bilip.recipes import find
    from bilip.recipes import reproduce as run

    recipe, size = find(name), options["size"]
    if importlib.util.find_spec("matplotlib") is None:  # said before a long run, not after it
        raise MissingExtra("the figures need matplotlib: pip install 'bilip[train]'.")
    if size in recipe.cost:
        console.print(f"[bold]{recipe.name}[/bold] ({recipe.where}): {recipe.claim}\n{size}: {recipe.cost[size]}")
    try:
        chosen = [int(seed) for seed in seeds.split(",")]
    except ValueError as error:
        raise InputError(f"--seeds {seeds}: expected whole numbers, as in 0,1,2.") from error
    if jobs < 0:
        raise InputError(f"--jobs {jobs}: expected 0 or more.")
    jobs = jobs or (1 if options["devices"] > 1 else min(4, os.cpu_count() or 1))
    with bar(quiet=console.quiet) as shown:
        tasks: dict = {}

        def show(which: str, what: str, share: float) -> None:
            if which not in tasks:
                tasks[which] = shown.add_task(which, total=1.0)
            shown.update(tasks[which], description=f"{which}: {what}", completed=share)

        return run(name, seeds=chosen, jobs=jobs, progress=show, **options)


def _table(outcome: Outcome) -> Table:
    table = Table(title=f"{outcome.recipe.name}, {outcome.size}", title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("", "paper", "ours", "agrees"):
        table.add_column(head)
    for line in outcome.lines:
        agrees = {True: "yes", False: "[bold]no[/bold]", None: ""}[line.holds]
        table.add_row(line.what, line.paper, line.ours, agrees)
    return table


def _show_all() -> None:
    from bilip.recipes import SIZES, find, names
    from bilip.recipes.page import status

    console = Console(highlight=False)
    for name in names():
        recipe = find(name)
        console.print(f"[bold]{name}[/bold]  {recipe.claim}  ({recipe.where})")
        table = Table.grid(padding=(0, 2))
        for size in SIZES:
            table.add_row("", size, recipe.cost[size], status(name, size))
        console.print(table)
