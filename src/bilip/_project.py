"""What a project says in `[tool.bilip]` of its pyproject.toml: the command line and the pytest plugin read it. No torch is needed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bilip.errors import InputError, nearest

__all__ = ["Project", "find_project"]

LIMITS = (
    "relative", "share", "non_finite", "log_det", "sample_gap", "angle", "bad_share", "log_prob", "range", "more",
)  # fmt: skip


@dataclass(frozen=True)
class Project:
    """The table `[tool.bilip]`; an empty one where no file has it.

    Example:
        >>> Project().sources, Project().limits
        ({}, {})
    """

    path: Path | None = None  # the file, or `None`
    # Files by name, as `--data NAME=FILE`; relative ones lie beside the file.
    sources: Mapping[str, str] = field(default_factory=dict)
    ood: tuple[str, ...] | None = None  # out-of-distribution sources
    limits: Mapping[str, Any] = field(default_factory=dict)  # fields of `Thresholds`
    require: tuple[str, ...] = ()  # uses that must be safe
    not_measured: str | None = None  # `"fail"` or `"pass"`: what a required use that was not measured does
    budget: str | None = None  # `"quick"`, `"standard"` or `"thorough"`
    time: float | None = None  # seconds that an audit may take


KEYS = tuple(f.name for f in fields(Project) if f.name != "path")


def find_project(start: str | Path = ".") -> Project:
    """Read the nearest pyproject.toml, from a folder upwards, that has a table `[tool.bilip]`.

    Raises:
        InputError: A file on the way is not TOML, or the table holds a key or a value that is not known: one line that says which.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "pyproject.toml").write_text("[tool.bilip]\\nrequire = ['sampling']\\nlimits = {bad_share = 0.05}")
        ...     project = find_project(folder)
        >>> project.require, project.limits["bad_share"]
        (('sampling',), 0.05)
    """
    start = Path(start).absolute()
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if not path.is_file():
            continue
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # not TOML, not UTF-8, no permission
            raise InputError(f"{path} cannot be read: {' '.join(str(error).split()):.200}.") from error
        tool = document.get("tool")
        if isinstance(tool, dict) and "bilip" in tool:
            return _project(path, tool["bilip"])
    return Project()


def _project(path: Path, table: Any) -> Project:
    where = f"{path}: [tool.bilip]"
    _known(where, table, KEYS)
    limits = table.get("limits", {})
    _known(f"{where[:-1]}.limits]", limits, LIMITS)
    sources = table.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(value, str) for value in sources.values()):
        raise InputError(
            f"{where}: sources = {sources!r:.80}; expected a table of names and files, as in {{test = 'x.npy'}}."
        )
    texts = {}
    for key in ("budget", "not_measured"):
        texts[key] = table.get(key)
        if texts[key] is not None and not isinstance(texts[key], str):
            raise InputError(f"{where}: {key} = {texts[key]!r:.80}; expected a text.")
    if texts["not_measured"] not in (None, "fail", "pass"):
        raise InputError(f"{where}: not_measured = {texts['not_measured']!r:.80}; expected 'fail' or 'pass'.")
    time = table.get("time")
    if time is not None and (not isinstance(time, (int, float)) or isinstance(time, bool)):
        raise InputError(f"{where}: time = {time!r:.80}; expected a number of seconds.")
    return Project(
        path=path,
        sources={name: _beside(path, value) for name, value in sources.items()},
        ood=_names(where, table, "ood"),
        limits=limits,
        require=_names(where, table, "require") or (),
        not_measured=texts["not_measured"],
        budget=texts["budget"],
        time=time,
    )


def _known(where: str, table: Any, known: tuple[str, ...]) -> None:
    if not isinstance(table, dict):
        raise InputError(f"{where} is {table!r:.80}; expected a table with {', '.join(known)}.")
    for key in table:
        if key not in known:
            hint = nearest(key.replace("-", "_").lower(), known)
            raise InputError(f"{where} has an unknown key {key!r}; the known ones are {', '.join(known)}.{hint}")


def _names(where: str, table: dict[str, Any], key: str) -> tuple[str, ...] | None:
    value = table.get(key)
    if value is None:
        return None
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InputError(f"{where}: {key} = {value!r:.80}; expected a list of names, as in ['sampling'].")
    return tuple(value)


def _beside(path: Path, value: str) -> str:
    """A file beside the project's; what is no file there, such as the name of an image set, stays as it is."""
    found = path.parent / value
    return str(found) if found.exists() or Path(value).suffix else value
