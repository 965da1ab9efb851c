"""What regularizers cost: the time of a training step of the additive classifier with memory-saving gradients, all rows in one run.

Beside the paper's rows, the same model with stored gradients, the flow likelihood, FD of the inverse alone; and for the affine
classifier what the training loop adds to bare captured steps. Images are noise: nothing here depends on what they show.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bilip import Guard, Reversible, models
from bilip.data import ImageBatches, Images, seed_of
from bilip.models import Classifier
from bilip.objectives import Classification
from bilip.recipes import figures
from bilip.recipes.images import make_glow
from bilip.recipes.recipe import Figures, Found, Line, Measured, Recipe, Work, require
from bilip.regularizers import FiniteDifference, FlowLikelihood, Penalty
from bilip.training import Draw, Settings, Task, train

__all__ = ["RECIPE", "Config"]

EPOCH = 390  # steps of 128 images through the 50,000 of CIFAR-10


@dataclass(frozen=True)
class Config:
    """Sizes and counts."""

    side: int = 32  # height and width of the images
    levels: int = 3  # levels of the network
    blocks: int = 16  # blocks a level
    hidden: int = 128  # channels of the nets
    batch: int = 128  # images in each step
    warm: int = 50  # steps before the clock starts; captured steps are recorded in them
    steps: int = 200  # steps by the clock
    rounds: int = 1  # how often all rows are measured; the smallest time counts

    def __post_init__(self) -> None:
        require(self)


@dataclass(frozen=True)
class Row:
    """One way to train: couplings, how gradients are computed, and the penalty."""

    coupling: str
    reversible: bool
    penalty: Callable[[], Penalty] | None = None
    bare: bool = False


def _fd(every: int, mode: str = "both") -> Callable[[], Penalty]:
    return lambda: FiniteDifference(5e-5, every, mode=mode, scaling="original")


ROWS: Mapping[str, Row] = {
    "none": Row("additive", True),
    "fd1": Row("additive", True, _fd(1)),
    "fd5": Row("additive", True, _fd(5)),
    "fd10": Row("additive", True, _fd(10)),
    "fd10-inverse": Row("additive", True, _fd(10, "inverse")),
    "nf": Row("additive", True, lambda: FlowLikelihood(1e-5)),
    "stored": Row("additive", False),
    "stored-nf": Row("additive", False, lambda: FlowLikelihood(1e-5)),
    "affine-stored": Row("affine", False),
    "affine-none": Row("affine", True),
}
BARE: Mapping[str, Row] = {
    "affine-stored-bare": Row("affine", False, bare=True),
    "affine-none-bare": Row("affine", True, bare=True),
}


class RegularizerTiming(Recipe):
    """Times of a step, and their ratios."""

    name = "regularizer_timing"
    where = "table on the timing of finite differences"
    claim = "Finite differences every 10 steps cost a quarter of the time; the flow likelihood costs nothing."
    sizes: Mapping[str, Config] = {
        "quick": Config(side=16, levels=2, blocks=2, hidden=32, batch=32, warm=10, steps=20, rounds=2),
        "gpu": Config(),
        "paper": Config(steps=390, rounds=3),
    }
    cost: Mapping[str, str] = {
        "quick": "about a minute on one core",
        "gpu": "about 3 minutes on one GPU, which must have nothing else to do",
        "paper": "about 15 minutes on one GPU, which must have nothing else to do",
    }
    matched = ("All rows of the paper's table use memory-saving gradients; FD in the original's scaling.",)
    corrected = (
        "Gradients are guarded, activations are evaluated once in the backward pass, and on a GPU steps are captured. Times are those of "
        "the whole training loop, with images cut, mirrored and normalised on the device.",
    )

    def parts(self, config: Config) -> Sequence[str]:
        return ("timing",)  # one after the other in one process: ratios are of one run

    def run(self, part: str, config: Config, work: Work) -> Measured:
        rows = {**ROWS, **(BARE if work.device == "cuda" else {})}
        found: dict[str, dict[str, float]] = {}
        for k in range(config.rounds):
            for place, (name, row) in enumerate(rows.items()):
                work.progress(name, (k + place / len(rows)) / config.rounds)
                again = (bare if row.bare else through_the_loop)(row, config, work)
                if name not in found or again["milliseconds"] < found[name]["milliseconds"]:
                    found[name] = again
        return Measured({"rows": found, "steps": config.steps, "rounds": config.rounds})

    def lines(self, config: Config, found: Found) -> list[Line]:
        said = self.paper()["table"]
        several = [parts["timing"].numbers["rows"] for parts in found.values()]

        def ratio(a: str, b: str) -> list[float]:
            return [rows[a]["milliseconds"] / rows[b]["milliseconds"] for rows in several]

        def text(values: Sequence[float]) -> str:
            return "; ".join(f"{value:.2f}" for value in values)

        lines = []
        for name, title in (("none", "none"), ("fd1", "FD every step"), ("fd5", "FD every 5"), ("fd10", "FD every 10")):
            times = "; ".join(f"{rows[name]['milliseconds'] * EPOCH / 1000:.1f} s" for rows in several)
            lines.append(Line(f"{title}: an epoch of {EPOCH} steps", f"{said[name]['seconds']} s", times))
        for name in ("fd1", "fd5", "fd10"):
            values, most = ratio(name, "none"), said[name]["overhead"]
            what = f"FD every {name[2:]}: times the time of none"
            lines.append(Line(what, f"{most}", text(values), max(values) <= 1.05 * most))
        both = ratio("fd10", "fd10-inverse")
        lines.append(
            Line("FD every 10, both directions: times the inverse alone", "1.06", text(both), max(both) <= 1.15)
        )
        free = ratio("stored-nf", "stored")
        lines.append(Line("NF, stored gradients: times the time of none", "no overhead", text(free), max(free) <= 1.1))
        lines += [
            Line("NF, memory-saving gradients: times the time of none", "", text(ratio("nf", "none"))),
            Line("additive, memory-saving: times stored", "", text(ratio("none", "stored"))),
            Line("affine, memory-saving: times stored", "", text(ratio("affine-none", "affine-stored")), key=True),
        ]
        for name, how in (("affine-stored", "stored"), ("affine-none", "memory-saving")):
            if all(f"{name}-bare" in rows for rows in several):
                what = f"affine, {how}: the loop, times bare captured steps"
                lines.append(Line(what, "", text(ratio(name, f"{name}-bare")), key=True))
        for name in ("stored", "none", "fd10", "affine-stored", "affine-none"):
            memory = [rows[name].get("mib") for rows in several]
            if all(value is not None for value in memory):
                lines.append(Line(f"{name}: memory at the peak", "", "; ".join(f"{value:.0f} MiB" for value in memory)))
        return lines

    def figures(self, config: Config, found: Found) -> Figures:
        every = {1: "fd1", 5: "fd5", 10: "fd10"}
        rows, said = found[min(found)]["timing"].numbers["rows"], self.paper()["table"]
        ours = [rows[name]["milliseconds"] / rows["none"]["milliseconds"] for name in every.values()]
        paper = [said[name]["overhead"] for name in every.values()]
        panels = {"time, of that without FD": {"paper": (list(every), paper), "ours": (list(every), ours)}}
        return {"overhead": figures.curves(panels, xlabel="steps from one FD penalty to the next", linear=list(panels))}


def make(row: Row, config: Config, work: Work) -> tuple[Classifier, ImageBatches]:
    """A classifier and noise to train it on."""
    generator = torch.Generator().manual_seed(seed_of(work.seed, 0, "images"))
    count, side = 16 * config.batch, config.side
    x = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    batches = ImageBatches(
        Images(x, torch.randint(10, (count,), generator=generator)),
        config.batch,
        device=work.device,
        mean=(0.5,) * 3,
        std=(0.29,) * 3,
    )
    torch.manual_seed(seed_of(work.seed, 0, "weights"))
    trunk = make_glow(config, coupling=row.coupling)
    model = models.classifier(trunk)
    if row.reversible:
        model.trunk = Reversible(trunk, Guard())
    return model.to(work.device), batches


def through_the_loop(row: Row, config: Config, work: Work) -> dict[str, float]:
    """Milliseconds of a step of `train`, and the memory it takes."""
    before = _forget(work)
    model, batches = make(row, config, work)
    clock: dict[int, float] = {}

    def tick(done: int, steps: int, latest: Mapping[str, float]) -> None:
        if done in (config.warm, config.warm + config.steps):
            _wait(work)
            clock[done] = time.perf_counter()

    penalties = () if row.penalty is None else (row.penalty(),)
    steps = config.warm + config.steps + 1  # the last one saves
    settings = Settings(steps, lr=1e-4, seed=work.seed, save_every=0, log_every=steps, device=work.device)
    work.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work.folder) as folder:
        train(Task(model, batches, Classification(penalties)), settings, folder, progress=tick)
    elapsed = clock[config.warm + config.steps] - clock[config.warm]
    return {"milliseconds": 1000 * elapsed / config.steps, **_memory(work, before)}


def bare(row: Row, config: Config, work: Work) -> dict[str, float]:
    """Milliseconds of a step that is nothing but a replay of its graph: gradients and update, always the same batch."""
    before = _forget(work)
    model, batches = make(row, config, work)
    x, y = batches(Draw(work.seed, 0))
    model.train()(x)  # ActNorms start
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True, capturable=True)
    loss = Classification()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(model, 1, x, y)["loss"].backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(10):
        graph.replay()
    _wait(work)
    began = time.perf_counter()
    for _ in range(config.steps):
        graph.replay()
    _wait(work)
    return {"milliseconds": 1000 * (time.perf_counter() - began) / config.steps, **_memory(work, before)}


def _wait(work: Work) -> None:
    if work.device == "cuda":
        torch.cuda.synchronize()


def _forget(work: Work) -> int:
    """Leave what earlier rows took, begin a new peak, and say how many bytes of the device are taken all the same."""
    if work.device != "cuda":
        return 0
    gc.collect()  # models and graphs hold each other
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _memory(work: Work, before: int) -> dict[str, Any]:
    """The peak of a row above what was taken before it was built."""
    return {"mib": (torch.cuda.max_memory_allocated() - before) / 2**20} if work.device == "cuda" else {}


RECIPE = RegularizerTiming()
