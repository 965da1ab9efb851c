"""What a recipe is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bilip.errors import CheckpointError
from bilip.record import read_json, to_plain, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bilip.training import Task, Trained

__all__ = ["SIZES", "Found", "Line", "Measured", "Recipe", "Work"]

SIZES = ("quick", "gpu", "paper")


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
class Measured:
    """What one part of a recipe found for one seed: numbers for the record, arrays for the figures."""

    numbers: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


Found = Mapping[int, Mapping[str, Measured]]  # by seed, then by part


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
        """Train in this folder; `until` is the share of the part that is then done. Every evaluation comes with a checkpoint."""
        from bilip.training import Settings, train

        def show(done: int, steps: int, latest: Mapping[str, float]) -> None:
            loss = f", loss {latest['loss']:.4g}" if "loss" in latest else ""
            self.progress(f"step {done} of {steps}{loss}", until * done / steps)

        settings = {"save_every": settings.get("evaluate_every", 0)} | settings
        chosen = Settings(seed=self.seed, device=self.device, **settings)
        return train(task, chosen, self.folder, fabric=self.fabric, progress=show, deadline=self.deadline)

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
    """

    name: str
    claim: str
    where: str
    sizes: Mapping[str, Any]
    cost: Mapping[str, str]
    matched: Sequence[str] = ()
    corrected: Sequence[str] = ()
    partial: bool = False

    @abstractmethod
    def parts(self, config: Any) -> Sequence[str]:
        """Pieces of work that know nothing of each other."""

    def has(self, part: str, config: Any) -> bool:
        """Whether there is such a part, for those who ask for it by name."""
        return part in self.parts(config)

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
    def figures(self, config: Any, found: Found) -> Mapping[str, Figure]:
        """The figures, by name."""

    def paper(self) -> dict[str, Any]:
        """The paper's numbers for this recipe, typed in from its text."""
        here = Path(__file__).resolve()
        packaged = here.parent / "paper" / f"{self.name}.json"
        return read_json(packaged if packaged.exists() else here.parents[3] / "results" / self.name / "paper.json")
