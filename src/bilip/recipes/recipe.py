"""What a recipe is, and its typed configuration, changed by `key=value`."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from bilip.errors import CheckpointError, InputError, Stopped, TrainingDiverged, nearest
from bilip.record import read_json, to_plain, write_json
from bilip.record.files import open_regular

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bilip.training import Task, Trained

__all__ = [
    "SIZES",
    "Figures",
    "Found",
    "Line",
    "Measured",
    "Recipe",
    "Topic",
    "Work",
    "configured",
    "differences",
    "largest",
    "percent",
    "require",
    "runs_of_part",
    "short",
    "sized",
    "sizes_of",
    "sound",
]

SIZES = ("quick", "gpu", "paper")
C = TypeVar("C")
V = TypeVar("V")
WORDS = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True)
class Line:
    """One number or statement of the paper beside ours.

    Attributes:
        what: What it is about.
        paper: What the paper says; empty where it says nothing.
        ours: What we measured.
        holds: Whether ours agrees with the statement; `None` where there is none to agree with.
        key: Whether the README shows it although it is not judged.
    """

    what: str
    paper: str
    ours: str
    holds: bool | None = None
    key: bool = False


@dataclass(frozen=True)
class Topic:
    """What several lines are about: each begins with its name."""

    name: str
    lines: list[Line]

    def add(self, what: str, paper: str, ours: Iterable[str], holds: Iterable[bool] = (), *, key: bool = False) -> None:
        """Add a line with what each seed gave; it holds where all of `holds` do, and is not judged where there are none."""
        judged = list(holds)
        self.lines.append(Line(f"{self.name}: {what}", paper, "; ".join(ours), all(judged) if judged else None, key))


@dataclass(frozen=True)
class Measured:
    """What one part of a recipe found for one seed.

    Attributes:
        numbers: For the record.
        arrays: For the figures.
        origin: Where and when it was measured (`device`, `environment`, `date`, `seconds`), if another recipe did; empty for here and now.
    """

    numbers: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of what was logged under a name at the evaluations."""
        return self.arrays["log_step"].tolist(), self.arrays[f"log_{name}"].tolist()

    def save(self, folder: Path, **facts: Any) -> None:
        """Write `arrays.npz` and, last, `measured.json`, with these facts beside the numbers: a folder that has one is finished."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.arrays:
            aside = folder / f".arrays.{os.getpid()}.npz"
            np.savez_compressed(aside, **self.arrays)  # type: ignore[arg-type]
            os.replace(aside, folder / "arrays.npz")
        stamp = {**facts, "arrays": list(self.arrays), "numbers": dict(self.numbers), **self.origin}
        write_json(folder / "measured.json", stamp)

    @classmethod
    def load(cls, folder: Path) -> Measured:
        """What a finished folder holds."""
        try:
            found = read_json(folder / "measured.json")
            arrays: dict[str, np.ndarray] = {}
            if found["arrays"]:
                with (
                    open_regular(folder / "arrays.npz", most=2**34) as file,
                    np.load(file, allow_pickle=False) as stored,
                ):
                    arrays = {name: stored[name] for name in found["arrays"]}
            return cls(found["numbers"], arrays)
        except Exception as error:  # a broken archive can raise almost anything
            raise CheckpointError(
                f"{folder} cannot be read ({type(error).__name__}: {error}). Delete its measured.json to measure again."
            ) from error


Found = Mapping[int, Mapping[str, Measured]]  # by seed, then by part
Figures: TypeAlias = "Mapping[str, Figure]"  # by name


def runs_of_part(found: Found, part: str) -> list[Measured]:
    """What a part found, one entry for each seed that it was run with."""
    return [parts[part] for parts in found.values() if part in parts]


@dataclass(frozen=True)
class Work:
    """Where one part of a recipe works, for one seed.

    Attributes:
        folder: For checkpoints, logs and records.
        seed: The seed.
        device: `"cpu"` or `"cuda"`.
        fabric: A launched Fabric, or `None` to make one.
        progress: Called with a text and the share that is done.
        deadline: When training saves and stops, in the seconds of `time.time()`; `None` for never.
        data: The folder of the data that recipes read; `None` for where it is by default.
    """

    folder: Path
    seed: int = 0
    device: str = "cpu"
    fabric: Any = None
    progress: Callable[[str, float], None] = lambda text, share: None
    deadline: float | None = None
    data: Path | None = None

    def train(self, task: Task, *, until: float = 1.0, **settings: Any) -> Trained:
        """Train in this folder; `until` is the share of the part that is then done. Where nothing else is said, there is a checkpoint
        every `evaluate_every` steps.
        """
        from bilip.training import Settings, train

        def show(done: int, steps: int, latest: Mapping[str, float]) -> None:
            loss = f", loss {latest['loss']:.4g}" if "loss" in latest else ""
            self.progress(f"step {done} of {steps}{loss}", until * done / steps)

        settings = {"save_every": settings.get("evaluate_every", 0)} | settings
        chosen = Settings(seed=self.seed, device=self.device, **settings)
        return train(task, chosen, self.folder, fabric=self.fabric, progress=show, deadline=self.deadline)

    def try_train(self, task: Task, *, until: float = 1.0, **settings: Any) -> TrainingDiverged | None:
        """Train as `train` does; the error where training diverges, `None` where it does not."""
        try:
            self.train(task, until=until, **settings)
        except TrainingDiverged as error:
            return error
        return None

    def evaluations(self) -> dict[str, np.ndarray]:
        """What the evaluations in this folder logged, column by column, as `log_step` and so on."""
        return self._logged("evaluation", "log")

    def logs(self) -> dict[str, np.ndarray]:
        """What evaluations logged, and what training did, as `train_step` and so on."""
        return self.evaluations() | self._logged("train", "train")

    def _logged(self, kind: str, prefix: str) -> dict[str, np.ndarray]:
        from bilip.training import read_log

        return {f"{prefix}_{name}": np.array(values) for name, values in read_log(self.folder, kind).items()}

    def once(self, name: str, measure: Callable[[], Measured]) -> Measured:
        """What `measure` finds, kept in this folder: a part that is stopped later does not measure it again.

        Raises:
            Stopped: It is not measured yet, and the time is up.
        """
        folder = self.folder / "found" / name
        if (folder / "measured.json").exists():
            return Measured.load(folder)
        if self.deadline is not None and time.time() >= self.deadline:
            raise Stopped("the time is up.")
        found = measure()
        found.save(folder)
        return found

    def require_same(self, what: str, facts: Mapping[str, Any]) -> None:
        """Remember what a part was begun with, and refuse to go on with something else.

        Raises:
            CheckpointError: The part was begun with other facts.
        """
        path, now = self.folder / f"{what}.json", to_plain(dict(facts))
        if not path.exists():
            if self.main:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_json(path, now)
            return
        before = read_json(path)
        if not isinstance(before, dict):
            raise CheckpointError(f"{path} is not what a recipe writes. Delete {self.folder}, or choose another --out.")
        if before != now:
            key = next(key for key in {**before, **now} if before.get(key) != now.get(key))
            raise CheckpointError(
                f"{self.folder} was begun with other {what}: {key} was {before.get(key)!r}, now it is {now.get(key)!r}. Choose "
                "another --out, or delete it."
            )

    @property
    def main(self) -> bool:
        """Whether this process is the one that measures and writes."""
        return self.fabric is None or self.fabric.is_global_zero


class Recipe(ABC):
    """One claim of the paper, run through the public interface.

    Attributes:
        name: On the command line.
        claim: In a sentence.
        where: Figure or table of the paper.
        sizes: A configuration, a frozen dataclass, for each size.
        cost: What each size costs, and on what.
        matched: What is done as in the original code although the paper does not say it.
        corrected: What is done otherwise than in the original code, and why.
        partial: Whether `lines` and `figures` can do with some of the parts, which then come in as they are measured, whatever the
            machine and the day.
        pictures_apart: Whether the pictures of a part, of people, have a file of their own beside its numbers, so that these can be
            published without them.
        named: From the name of a part to the run that it describes, with an `InputError` for a name that describes none; `None` where
            `parts` lists all that there are.
    """

    name: str
    claim: str
    where: str
    sizes: Mapping[str, Any]
    cost: Mapping[str, str]
    matched: Sequence[str] = ()
    corrected: Sequence[str] = ()
    partial: bool = False
    pictures_apart: bool = False
    named: Callable[[str], object] | None = None

    @abstractmethod
    def parts(self, config: Any) -> Sequence[str]:
        """Pieces of work that know nothing of each other."""

    def has(self, part: str, config: Any) -> bool:
        """Whether there is such a part, for those who ask for it by name."""
        if self.named is None:
            return part in self.parts(config)
        try:
            self.named(part)
        except InputError:
            return False
        return True

    def defining(self, config: Any) -> dict[str, Any]:
        """What of a configuration a part depends on: a part that was begun with another one is not continued."""
        return asdict(config)

    @abstractmethod
    def run(self, part: str, config: Any, work: Work) -> Measured:
        """Do one piece of the work, for one seed."""

    @abstractmethod
    def lines(self, config: Any, found: Found) -> list[Line]:
        """The paper's numbers beside ours."""

    @abstractmethod
    def figures(self, config: Any, found: Found) -> Figures:
        """The figures, by name."""

    def paper(self) -> dict[str, Any]:
        """The paper's numbers for this recipe, typed in from its text."""
        here = Path(__file__).resolve()
        packaged = here.parent / "paper" / f"{self.name}.json"
        return read_json(packaged if packaged.exists() else here.parents[3] / "results" / self.name / "paper.json")


def sound(name: str, several: Sequence[Measured]) -> tuple[list[Measured], list[Line]]:
    """Of the runs of a name, one for each seed, those whose training did not diverge, and a line for each of the others."""
    lost = [m.numbers["diverged"] for m in several if m.numbers["diverged"]]
    return [m for m in several if not m.numbers["diverged"]], [
        Line(f"{name}: training", "", why, key=True) for why in lost
    ]


def largest(values: Iterable[float]) -> float:
    """The largest value; NaN if one is, which `max` may pass over.

    Example:
        >>> largest([1.0, float("nan")])
        nan
    """
    return max(values, key=lambda value: (math.isnan(value), value))


def percent(share: float) -> str:
    """A share in percent, with as many digits as tell it from none and all."""
    value = 100 * share
    if 0 < value < 0.01 or 99.99 < value < 100:
        return f"{value:.3f} %"
    return f"{value:.3g} %" if value < 99 or value == 100 else f"{value:.2f} %"


def short(value: float) -> str:
    """Two digits and the exponent."""
    return f"{value:.1e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


# ---- configurations


def sized(paper: V, **others: V) -> V:
    """A setting of a configuration: its value at the size `paper`, and at other sizes where it is another one."""
    return field(default=paper, metadata=others)


def sizes_of(config: type[C]) -> dict[str, C]:
    """A configuration for each size, from what its settings say.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config:
        ...     steps: int = sized(1000, quick=10)
        ...     batch: int = 64
        >>> sizes_of(Config)["quick"]
        Config(steps=10, batch=64)
    """
    found = dataclasses.fields(config)  # type: ignore[arg-type]
    return {size: config(**{f.name: f.metadata[size] for f in found if size in f.metadata}) for size in SIZES}


def configured(defaults: C, changes: Sequence[str]) -> C:
    """A configuration with some of its values changed; each value is read as the type of its field.

    Args:
        defaults: A frozen dataclass.
        changes: Entries such as `"steps=200"` or `"hidden=64,64"`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config:
        ...     steps: int = 100
        ...     hidden: tuple[int, ...] = (64, 64)
        >>> configured(Config(), ["steps=5", "hidden=32,32,32"])
        Config(steps=5, hidden=(32, 32, 32))
    """
    kinds = typing.get_type_hints(type(defaults))
    found: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals:
            raise InputError(f"--set {change}: expected key=value.")
        if key not in kinds:
            raise InputError(f"--set {key}: there is no such key.{nearest(key, kinds)} There are {', '.join(kinds)}.")
        found[key] = _read(key, text.strip(), kinds[key])
    return dataclasses.replace(defaults, **found)  # type: ignore[type-var]


def require(
    config: Any,
    *,
    filled: Sequence[str] = (),
    nonnegative: Sequence[str] = (),
    one_of: Mapping[str, Sequence[str]] | None = None,
    free: Sequence[str] = (),
) -> None:
    """Raise an `InputError` unless fields have values that make sense: numbers, and tuples of them, are above 0 where nothing else is said.

    Args:
        config: A configuration.
        filled: Tuples that have at least one number, and each once.
        nonnegative: Numbers that may be 0.
        one_of: Words, and which there are.
        free: Fields that are not looked at here.
    """
    numbers = [f.name for f in dataclasses.fields(config) if not isinstance(f.default, (str, bool))]
    for name in (*(name for name in numbers if name not in (*filled, *nonnegative, *free)), *filled):
        value = getattr(config, name)
        items = value if isinstance(value, tuple) else (value,)
        if not items or not all(0 < item < float("inf") for item in items):
            raise InputError(
                f"--set {name}={value}: expected positive numbers{', one or more' if name in filled else ''}."
            )
        if name in filled and len(set(items)) < len(items):
            raise InputError(f"--set {name}={value}: expected each number once.")
    for name in nonnegative:
        if getattr(config, name) < 0:
            raise InputError(f"--set {name}={getattr(config, name)}: expected 0 or more.")
    for name, known in (one_of or {}).items():
        if getattr(config, name) not in known:
            raise InputError(f"--set {name}={getattr(config, name)}: expected {', '.join(known)}.")


def differences(config: Any, other: Any) -> list[str]:
    """The fields in which a configuration differs from another one, as `steps=5 (100)`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Config:
        ...     steps: int = 100
        >>> differences(Config(5), Config())
        ['steps=5 (100)']
    """
    pairs = ((f.name, getattr(config, f.name), getattr(other, f.name)) for f in dataclasses.fields(config))
    return [f"{name}={_short(a)} ({_short(b)})" for name, a, b in pairs if a != b]


def _short(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _read(key: str, text: str, kind: Any) -> Any:
    options = typing.get_args(kind)
    if type(None) in options:  # X | None
        if text.lower() in ("none", ""):
            return None
        kind = next(option for option in options if option is not type(None))
    if typing.get_origin(kind) is tuple:
        return tuple(_read(key, part.strip(), typing.get_args(kind)[0]) for part in text.split(",") if part.strip())
    try:
        if kind is bool:
            return WORDS[text.lower()]
        if kind is int:
            return int(float(text)) if float(text) == int(float(text)) else int(text)
        return kind(text)
    except (ValueError, KeyError, OverflowError) as error:
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, str(kind))
        raise InputError(f"--set {key}={text}: expected {wanted}.") from error
