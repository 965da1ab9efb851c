"""What there is of results, and the table in the docs, drawn from the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bilip.errors import InputError, RecordError
from bilip.recipes.recipe import SIZES
from bilip.recipes.runner import names
from bilip.record import read_json, write_aside

__all__ = ["results_table", "status", "write_table"]

BEGIN, END = "<!-- recipes: begin -->", "<!-- recipes: end -->"


def runs(name: str, *roots: str | Path) -> dict[str, Any]:
    """The runs of a recipe, by size, in the first of some folders that holds any."""
    for root in roots or ("runs", "results"):
        try:
            found = read_json(Path(root) / name / "ours.json")["runs"]
        except (RecordError, KeyError, TypeError):
            continue
        if (
            isinstance(found, dict)
            and found
            and all(isinstance(run, dict) and "lines" in run for run in found.values())
        ):
            return found
    return {}


def status(name: str, size: str, *roots: str | Path) -> str:
    """In a word, what there is of a recipe at a size: in `runs/` or `results/` here.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     status("checkerboard", "paper", folder)
        'not run'
    """
    run = runs(name, *roots).get(size)
    if run is None:
        return "not run"
    judged = [line["holds"] for line in run["lines"] if line["holds"] is not None]
    return f"{sum(judged)} of {len(judged)} statements agree, {_seeds(run)} ({run['device']})"


def results_table(results: str | Path) -> str:
    """What was judged, as a Markdown table, from `results/*/ours.json`: the smallest and the largest size that were run, one of them
    where both say the same.
    """
    rows, notes = ["| recipe | statement | paper | ours, seed by seed | agrees |", "|---|---|---|---|---|"], []
    for name in names():
        before: list[dict[str, Any]] = []
        found = runs(name, results)
        ran = [size for size in SIZES if size in found]
        for size in dict.fromkeys(ran[:1] + ran[-1:]):
            run = found[size]
            lines = [line for line in run["lines"] if line["holds"] is not None or line.get("key")]
            if lines == before:
                continue
            before = lines
            for k, line in enumerate(lines):
                head = f"`{name}`, {size}" if k == 0 else ""
                cells = [
                    head,
                    line["what"],
                    line["paper"],
                    line["ours"],
                    {True: "yes", False: "**no**", None: ""}[line["holds"]],
                ]
                rows.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
            other = f", {', '.join(run['other_than_paper'])}" if size == "paper" and run["other_than_paper"] else ""
            where = f"{run['device']}, torch {run['environment'].get('torch', '?')}"
            notes.append(f"{name} {size}{other}: {_seeds(run)}, {where}")
    return "\n".join(rows) + f"\n\n({'; '.join(notes)}. All numbers are in the files.)"


def write_table(page: str | Path, results: str | Path) -> None:
    """Put the table between its marks."""
    text = Path(page).read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise InputError(f"{page} has no place for the table: expected one {BEGIN} and one {END}.")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_aside(page, f"{before}{BEGIN}\n{results_table(results)}\n{END}{after}")


def _seeds(run: dict[str, Any]) -> str:
    count = len(run["measured"])
    return f"{count} seeds" if count > 1 else "1 seed"
