"""How a model is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from bilip.errors import InputError

__all__ = ["Settings"]

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
# Settings that earlier versions did not have, and what they did.
LATER = {"evaluate_at": [], "optimizer": "adam", "skip": None}
# What may differ between a run and its continuation: where it runs, and how often it is saved and logged.
FREE = ("log_every", "save_every", "device", "devices", "nodes", "capture")


@dataclass(frozen=True)
class Settings:
    """Optimizer, schedule, cadence and machines of one run.

    Args:
        steps: Steps in all.
        optimizer: `"adam"` or `"adamax"`.
        lr: Its learning rate.
        betas: Its two decay rates.
        warmup: Steps over which the rate grows linearly from `lr / warmup`.
        milestones: Steps at which the rate is multiplied by `decay`.
        decay: That factor.
        weight_decay: Of Adam, decoupled (AdamW) where it is not 0; of Adamax, added to the gradient.
        clip: Largest norm of a gradient; `None` for no clipping.
        skip: Look at every gradient. A step whose gradient, or its square, is not finite then changes nothing, and is counted in the
            column `skipped` of the log; after so many of them in a row training ends, with the step and where it began. `None` looks at
            losses alone.
        ema: Decay of an exponential moving average of the weights, which is then what is evaluated; `None` for none.
        accumulate: Parts into which a batch is cut, one after the other, to save memory; the step stays the same.
        seed: Every random number is a function of it, the step and a purpose.
        evaluate_every: Steps from one evaluation to the next; 0 for one at the end only.
        evaluate_at: Further steps after which there is an evaluation; 0 is before the first one.
        save_every: Steps from one checkpoint to the next; 0 for one at the end only.
        log_every: Steps from one logged row to the next.
        precision: As Lightning Fabric names it: `"32-true"`, `"64-true"`, `"bf16-mixed"`, `"16-mixed"`.
        device: `"auto"`, `"cpu"` or `"cuda"`.
        devices: Processes on one machine, one for each device; on a CPU, so many processes.
        nodes: Machines.
        capture: Whether steps run as CUDA graphs; `None` for wherever they can: on one GPU, without gradient scaling.

    Example:
        >>> settings = Settings(steps=100, lr=0.1, warmup=10, milestones=(50,))
        >>> [round(settings.rate(step), 3) for step in (0, 4, 9, 49, 50)]
        [0.01, 0.05, 0.1, 0.1, 0.01]
    """

    steps: int
    optimizer: str = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int = 0
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    weight_decay: float = 0.0
    clip: float | None = None
    skip: int | None = None
    ema: float | None = None
    accumulate: int = 1
    seed: int = 0
    evaluate_every: int = 0
    evaluate_at: tuple[int, ...] = ()
    save_every: int = 1000
    log_every: int = 100
    precision: str = "32-true"
    device: str = "auto"
    devices: int = 1
    nodes: int = 1
    capture: bool | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "log_every", "devices", "nodes"):
            self._require(name, _whole(getattr(self, name), 1), "a whole number, 1 or more")
        for name in ("warmup", "evaluate_every", "save_every", "seed"):
            self._require(name, _whole(getattr(self, name), 0), "a whole number, 0 or more")
        for name in ("lr", "decay"):
            self._require(name, _number(getattr(self, name), above=0.0), "a positive number")
        self._require(
            "weight_decay", self.weight_decay == 0 or _number(self.weight_decay, above=0.0), "a number, 0 or more"
        )
        self._require("clip", self.clip is None or _number(self.clip, above=0.0), "a positive number or None")
        self._require("optimizer", self.optimizer in ("adam", "adamax"), "'adam' or 'adamax'")
        good = self.skip is None or (_whole(self.skip, 0) and self.precision != "16-mixed")
        self._require("skip", good, "a whole number, 0 or more, or None; with 16-mixed None: it skips steps by itself")
        self._require(
            "ema",
            self.ema is None or (_number(self.ema, above=0.0) and self.ema < 1),
            "a number between 0 and 1, or None",
        )
        good = isinstance(self.betas, tuple) and len(self.betas) == 2
        self._require(
            "betas", good and all(_number(b, above=-1e-9) and b < 1 for b in self.betas), "two numbers in [0, 1)"
        )
        for name in ("milestones", "evaluate_at"):
            steps = getattr(self, name)
            self._require(name, isinstance(steps, tuple) and all(_whole(s, 0) for s in steps), "a tuple of steps")
        self._require("precision", self.precision in PRECISIONS, f"one of {', '.join(PRECISIONS)}")
        self._require("device", self.device in ("auto", "cpu", "cuda"), "'auto', 'cpu' or 'cuda'")

    def _require(self, name: str, good: bool, expected: str) -> None:
        if not good:
            raise InputError(f"Settings({name}={getattr(self, name)!r}): expected {expected}.")

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return self.lr * warm * self.decay ** sum(step >= milestone for milestone in self.milestones)

    def captures(self, device: str, processes: int) -> bool:
        """Whether steps on such a device run as CUDA graphs."""
        self._require(
            "precision", device != "cpu" or not self.precision.startswith("16"), "another one: float16 needs a GPU"
        )
        can = device == "cuda" and processes == 1 and self.precision != "16-mixed"
        self._require("capture", can or not self.capture, "None: only one GPU without gradient scaling can capture")
        return can if self.capture is None else self.capture

    def due(self, every: int, done: int) -> bool:
        """Whether something is due after so many steps: every so often, and at the end."""
        return done == self.steps or (every > 0 and done % every == 0)

    def evaluates(self, done: int) -> bool:
        """Whether there is an evaluation after so many steps."""
        return done in self.evaluate_at or (done > 0 and self.due(self.evaluate_every, done))

    def defining(self) -> dict[str, Any]:
        """What a continued run has to have in common with its beginning; it may be longer."""
        values = {name: value for name, value in asdict(self).items() if name not in (*FREE, "steps")}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def difference(self, other: dict[str, Any]) -> str:
        """The first of the defining settings that another run had otherwise; empty if there is none."""
        mine = self.defining()
        for name in (field.name for field in fields(self) if field.name in mine):
            if name not in other and mine[name] == LATER.get(name):  # a run from before there was such a setting
                continue
            if mine[name] != other.get(name):
                return f"{name}={other.get(name)!r} there, {name}={mine[name]!r} now"
        return ""


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _number(value: object, *, above: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and above < value < float("inf")
