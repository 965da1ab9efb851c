"""Does the paper hold? One self-contained HTML page from `results/`, and the table in the docs.

`results/claims.json` lists what the paper claims, in its order, with a status and the evidence for it. The numbers, figures, seeds, devices
and commands come from `results/NAME/ours.json`, so that a recipe that is run later is on the page without a change of this file.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from bilip.errors import InputError, RecordError, need
from bilip.recipes.parts import SCHEMA
from bilip.recipes.recipe import SIZES
from bilip.recipes.runner import names
from bilip.record import read_json, write_aside

__all__ = ["STATUSES", "Claim", "read_claims", "results_table", "status", "to_page", "write_page", "write_table"]

STATUSES = {
    "reproduced": "Reproduced",
    "in part": "In part",
    "not reproduced": "Not reproduced",
    "not run": "Not run yet",
}
KINDS = ("figure", "table", "theorem", "lemma", "remark", "hyperparameters", "prose")
NEEDED = ("label", "kind", "title", "says", "status", "why", "evidence")
LISTS = ("evidence", "lines", "figures", "settings", "sizes")  # fields of an entry that are lists
PNG = b"\x89PNG\r\n\x1a\n"
EXPONENT = re.compile(r"(?<=\de)-(?=\d)|(?<= )-(?=\d)")  # no line ends within 5e-5
BEGIN, END = "<!-- recipes: begin -->", "<!-- recipes: end -->"  # of the table
RUN: Mapping[str, type] = {  # what a run of a recipe holds
    **dict.fromkeys(("lines", "figures", "other_than_paper"), list),
    **dict.fromkeys(("measured", "environment", "parts"), dict),
    **dict.fromkeys(("command", "device", "date"), str),
}
FEW = 14  # lines of a table that are shown at once; the others are folded


@dataclass(frozen=True)
class Claim:
    """One claim of the paper."""

    label: str  # that of `paper.tex`; claims without one there begin with `intro:` or `prose:`
    kind: str  # one of `KINDS`
    title: str  # what it is about
    says: str  # what the paper says
    status: str  # a key of `STATUSES`
    why: str  # one sentence for the status
    evidence: Sequence[str]  # files, or tests as `tests/test_x.py::test_y`
    number: str = ""  # as it is printed in the paper, as Figure 4
    recipe: str = ""  # the recipe that measures it; empty for claims that a test decides
    sizes: Sequence[str] = ()  # of that recipe, which `why` knows
    # Beginnings of the lines of its table that belong to the claim, with * for anything; none for all that are judged.
    lines: Sequence[str] = ()
    figures: Sequence[str] = ()  # names of its figures that belong to the claim, without the size, with * for anything
    settings: Sequence[Sequence[str]] = ()  # of a table of hyperparameters: name, the paper's, ours

    @property
    def id(self) -> str:
        """Its anchor on the page."""
        return "".join(c if c.isalnum() else "-" for c in self.label)


def read_claims(results: str | Path) -> list[tuple[str, list[Claim]]]:
    """The claims in `claims.json` of a folder, section by section.

    Raises:
        InputError: The file is missing, or an entry is not whole or not of the form of a claim.

    Example:
        >>> import json, pathlib, tempfile
        >>> claim = {"label": "fig:a", "kind": "figure", "title": "A", "says": "", "status": "not run", "why": "", "evidence": []}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = json.dumps({"schema": 1, "sections": [{"title": "1", "claims": [claim]}]})
        ...     _ = (pathlib.Path(folder) / "claims.json").write_text(text)
        ...     read_claims(folder)[0][1][0].label
        'fig:a'
    """
    return _sections(_document(Path(results)))


def write_page(path: str | Path, results: str | Path = "results") -> None:
    """Write the page, whole or not at all, of a folder with `claims.json` and a folder for each recipe.

    Raises:
        InputError: There are no results, or some of another schema.
        MissingExtra: jinja2 is not installed.
    """
    write_aside(path, to_page(results))


def to_page(results: str | Path = "results") -> str:
    """The page as text."""
    root = Path(results)
    document = _document(root)
    sections = _sections(document)
    learned = document.get("learned", [])
    if not isinstance(learned, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("evidence", []), list) for entry in learned
    ):
        raise InputError("claims.json: expected a list of what was learned, each entry with a list of evidence.")
    runs = {name: _runs(root, name) for name in dict.fromkeys(c.recipe for _, claims in sections for c in claims)}
    if not any(runs.values()):
        raise InputError(
            f"{root} holds claims but no results: not one of its recipes has an ours.json with runs. Run some, for example bilip reproduce "
            f"coupling_depth --out {root / 'coupling_depth'}."
        )
    jinja2 = need("jinja2", "the page")
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["held"] = lambda text: EXPONENT.sub("\N{NON-BREAKING HYPHEN}", str(text))
    shelf: dict[Path, str] = {}
    views = [(title, [_view(claim, runs[claim.recipe], root, shelf) for claim in claims]) for title, claims in sections]
    every = [view for _, some in views for view in some]
    counts = {status: sum(view["status"] == status for view in every) for status in STATUSES}
    page = environment.get_template("page.html.j2").render(
        sections=views,
        counts={status: (STATUSES[status], count) for status, count in counts.items()},
        total=len(every),
        learned=learned,
        answer=document.get("answer", ""),
        paper=document.get("paper", {}),
    )
    return page.strip() + "\n"


# ---- reading


def _document(root: Path) -> dict[str, Any]:
    path = root / "claims.json"
    if not root.is_dir() or not path.exists():
        raise InputError(
            f"{root} holds no claims.json: expected the folder results of bilip's repository, or a copy of it. Name it: --results FOLDER."
        )
    document = _read(path)
    if document.get("schema") != SCHEMA or not document.get("sections"):
        found = document.get("schema")
        raise InputError(f"{path} has schema {found!r} or no sections; this bilip reads schema {SCHEMA}.")
    return document


def _read(path: Path) -> dict[str, Any]:
    """The table in a JSON file; an empty one where something else is in it."""
    try:
        document = read_json(path)
    except RecordError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    return document if isinstance(document, dict) else {}


def _sections(document: Mapping[str, Any]) -> list[tuple[str, list[Claim]]]:
    found: list[tuple[str, list[Claim]]] = []
    seen: set[str] = set()
    for section in document["sections"] if isinstance(document["sections"], list) else [None]:
        if not isinstance(section, dict) or not isinstance(section.get("claims"), list) or "title" not in section:
            raise InputError("claims.json: expected a list of sections, each with a title and a list of claims.")
        claims = [_claim(entry) for entry in section["claims"]]
        for claim in claims:
            if claim.label in seen:
                raise InputError(f"claims.json: the label {claim.label!r} is there twice.")
            seen.add(claim.label)
        found.append((section["title"], claims))
    return found


def _claim(entry: Any) -> Claim:
    if not isinstance(entry, dict):
        raise InputError(f"claims.json: expected claims with a label, found {entry!r}.")
    label = entry.get("label")
    missing = [name for name in NEEDED if name not in entry]
    if missing:
        raise InputError(f"claims.json: the entry {label!r} has no {missing[0]!r}.")
    for name, value in entry.items():
        if not isinstance(value, list if name in LISTS else str):
            expected = "a list" if name in LISTS else "a text"
            raise InputError(f"claims.json: {name!r} of the entry {label!r} is {value!r}; expected {expected}.")
    if entry["status"] not in STATUSES or entry["kind"] not in KINDS:
        raise InputError(
            f"claims.json: the entry {label!r} has the status {entry['status']!r} and the kind {entry['kind']!r}; expected one of "
            f"{', '.join(STATUSES)}, and one of {', '.join(KINDS)}."
        )
    for row in entry.get("settings", ()):
        if not isinstance(row, list) or len(row) != 3:
            raise InputError(
                f"claims.json: the entry {label!r} has the setting {row!r}; expected its name, the paper's and ours."
            )
    try:
        return Claim(**entry)
    except TypeError as error:
        raise InputError(f"claims.json: the entry {label!r}: {error}.") from error


def _runs(root: Path, name: str) -> dict[str, Any]:
    """The runs of a recipe by size, the largest first; none where it was not run."""
    path = root / name / "ours.json"
    if not name or not path.exists():
        return {}
    document = _read(path)
    if document.get("schema") != SCHEMA:
        raise InputError(
            f"{path} has schema {document.get('schema')!r}, the others {SCHEMA}: results of different versions are not put on one page. "
            "Run that recipe again, or take its folder away."
        )
    runs = document.get("runs", {})
    for size, run in runs.items() if isinstance(runs, dict) else [("", None)]:
        if not _is_whole(run):
            raise InputError(
                f"{path}: its run {size!r} has no lines, or is damaged. Run that recipe again, or take its folder away."
            )
    return {size: runs[size] for size in reversed(SIZES) if size in runs}


def _is_whole(run: Any) -> bool:
    """Whether a run has the form that recipes write."""
    if not isinstance(run, dict) or not all(isinstance(run.get(name, kind()), kind) for name, kind in RUN.items()):
        return False
    if not all(isinstance(name, str) for name in (*run.get("figures", ()), *run.get("other_than_paper", ()))):
        return False
    return all(isinstance(some, dict) for some in run.get("parts", {}).values()) and all(
        isinstance(line, dict)
        and all(isinstance(line.get(name), str) for name in ("what", "paper", "ours"))
        and line.get("holds", "") in (True, False, None)
        for line in run.get("lines", [None])
    )


# ---- what the template shows


def _view(claim: Claim, runs: Mapping[str, Any], root: Path, shelf: dict[Path, str]) -> dict[str, Any]:
    tables: list[dict[str, Any]] = []
    for size, run in runs.items():
        table = _table(claim, size, run)
        if table["lines"] and all(table["lines"] != other["lines"] for other in tables):
            tables.append(table)
    pictures = []
    for wanted in claim.figures:
        pictures += _pictures(claim, wanted, runs, root, shelf)
    status = claim.status
    return {
        "claim": claim,
        "status": status,
        "word": STATUSES[status],
        "kind": claim.number or ("said in prose" if claim.kind == "prose" else claim.kind),
        "absent": bool(claim.recipe) and not runs and status != "not run",
        "unjudged": [size for size in runs if size not in claim.sizes],
        "tables": tables,
        "pictures": pictures,
        "evidence": claim.evidence,
    }


def _table(claim: Claim, size: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """The lines of a run that belong to a claim, and where the run comes from."""
    chosen = [line for line in run["lines"] if _belongs(claim, line)]
    return {
        "size": size,
        "lines": chosen[:FEW],
        "more": chosen[FEW:],
        "seeds": len(run.get("measured", {})),
        "device": run.get("device", ""),
        "torch": run.get("environment", {}).get("torch", ""),
        "date": run.get("date", ""),
        "other": run.get("other_than_paper", []),
        "commands": _commands(run),
    }


def _belongs(claim: Claim, line: Mapping[str, Any]) -> bool:
    if claim.lines:
        return any(fnmatchcase(line["what"], f"{start}*") for start in claim.lines)
    return line["holds"] is not None or bool(line.get("key"))


def _commands(run: Mapping[str, Any]) -> list[str]:
    """The command that made a run; of recipes that collect their parts those that measure them, one for seeds with the same parts."""
    command, parts = run.get("command", ""), run.get("parts", {})
    if not parts or not command.endswith(" --collect"):
        return [command]
    seeds: dict[str, list[str]] = {}
    for seed, some in parts.items():
        seeds.setdefault(",".join(some), []).append(seed)
    start = command.removesuffix(" --collect")
    return [f"{start} --seeds {','.join(some)} --parts {names}" for names, some in seeds.items()]


def _pictures(
    claim: Claim, wanted: str, runs: Mapping[str, Any], root: Path, shelf: dict[Path, str]
) -> list[dict[str, str]]:
    """The figures of a name at the largest size that has them; one that is on the page already is linked."""
    for size, run in runs.items():
        names = [name for name in run.get("figures", ()) if fnmatchcase(name, f"{wanted}-{size}.png")]
        paths = [path for name in names if (path := root / claim.recipe / Path(name).name).is_file()]
        if not paths:
            continue
        found = []
        for path in paths:
            above = shelf.setdefault(path, claim.id)
            image = path.read_bytes()
            if not image.startswith(PNG):
                raise InputError(f"{path} is not a PNG. Run {claim.recipe} again, or take the file away.")
            data = "" if above != claim.id else base64.b64encode(image).decode()
            found.append({"name": path.stem, "size": size, "data": data, "above": above})
        return found
    return []


# ---- what there is of results, and the table in the docs


def _found(name: str, *roots: str | Path) -> dict[str, Any]:
    """The runs of a recipe, by size, in the first of some folders that holds any."""
    for root in roots or ("runs", "results"):
        try:
            found = read_json(Path(root) / name / "ours.json")["runs"]
        except (RecordError, KeyError, TypeError):
            continue
        if isinstance(found, dict) and found and all(map(_is_whole, found.values())):
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
    run = _found(name, *roots).get(size)
    if run is None:
        return "not run"
    judged = [line["holds"] for line in run["lines"] if line["holds"] is not None]
    return f"{sum(judged)} of {len(judged)} statements agree, {_seeds(run)} ({run.get('device', '?')})"


def results_table(results: str | Path) -> str:
    """What was judged, as a Markdown table, from `results/*/ours.json`: the smallest and the largest size that were run, one of them
    where both say the same.
    """
    rows, notes = ["| recipe | statement | paper | ours, seed by seed | agrees |", "|---|---|---|---|---|"], []
    for name in names():
        before: list[dict[str, Any]] = []
        found = _found(name, results)
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
            changed = run.get("other_than_paper") if size == "paper" else ()
            other = f", {', '.join(changed)}" if changed else ""
            where = f"{run.get('device', '?')}, torch {run.get('environment', {}).get('torch', '?')}"
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
    count = len(run.get("measured", ()))
    return f"{count} seeds" if count > 1 else "1 seed"
