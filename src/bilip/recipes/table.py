"""What there is of results, and the README's table, drawn from the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bilip.errors import InputError, RecordError
from bilip.recipes.frame import find, names
from bilip.recipes.recipe import SIZES
from bilip.record import read_json, write_aside

__all__ = ["readme_table", "status", "write_readme"]

BEGIN, END = "<!-- recipes: begin -->", "<!-- recipes: end -->"


def runs(name: str, *roots: str | Path) -> dict[str, Any]:
    """The runs of a recipe, by size, in the first of some folders that holds any."""
    for root in roots or ("runs", "results"):
        try:
            found = read_json(Path(root) / name / "ours.json")["runs"]
        except (RecordError, KeyError, TypeError):
            continue
        if found:
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


def readme_table(results: str | Path) -> str:
    """The recipes as a Markdown table, from `results/*/ours.json`."""
    rows = [
        "| recipe | claim of the paper | size | statement | paper | ours | agrees |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names():
        for size in (size for size in SIZES if size in runs(name, results)):
            run = runs(name, results)[size]
            for k, line in enumerate(line for line in run["lines"] if line["holds"] is not None):
                head = (
                    [f"`{name}`", find(name).claim, f"{size}, {_seeds(run)}, {run['device']}"]
                    if k == 0
                    else ["", "", ""]
                )
                tail = [line["what"], line["paper"], line["ours"], "yes" if line["holds"] else "**no**"]
                rows.append("| " + " | ".join(cell.replace("|", "/") for cell in head + tail) + " |")
    return "\n".join(rows)


def write_readme(readme: str | Path, results: str | Path) -> None:
    """Put the table between its marks."""
    text = Path(readme).read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise InputError(f"{readme} has no place for the table: expected one {BEGIN} and one {END}.")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    write_aside(readme, f"{before}{BEGIN}\n{readme_table(results)}\n{END}{after}")


def _seeds(run: dict[str, Any]) -> str:
    count = len(run["measured"])
    return f"{count} seeds" if count > 1 else "1 seed"
