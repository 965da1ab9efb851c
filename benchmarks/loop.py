"""What does the training loop add to its steps?

The paper's CIFAR-10 classifier (3 levels x 16 blocks x 128 channels, batch 128, Adam, float32, TF32 off) is trained by
`bilip.training.train` for an epoch of 390 steps, gradients stored and memory-saving, on random images that are cut and mirrored
on the device as in the recipe. Then the very graphs of that run, gradients and update, are replayed without anything in between:
the bare steps. On a CPU, where nothing is captured, the bare steps are eager ones on one batch. The first 40 steps, with warm-up
and recording, are not timed.

`--beside stored nf reversible` asks what several trainings cost side by side, each in a process of its own, under CUDA's MPS if its server
was started: all begin at once after their first 40 steps, and what each has done is counted after `--seconds`.

    python benchmarks/loop.py --device cuda --out results/training/loop_h200.json
    python benchmarks/loop.py --device cuda --beside stored additive nf reversible fd --out results/training/beside_h200.json
    python benchmarks/loop.py --blocks 1 --hidden 8 --batch 16 --steps 60
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from _measure import about, command_line, options, release, wait, write
from bilip.data import ImageBatches, Images
from bilip.models import Classifier, classifier, glow
from bilip.objectives import Classification
from bilip.regularizers import FiniteDifference, FlowLikelihood
from bilip.reversible import Reversible
from bilip.training import Settings, Task, run, train
from bilip.training.step import CapturedStep
from bilip.training.task import Draw

FIRST = 40
TOGETHER: Any = None  # where processes side by side wait for each other
EPOCH = 390  # steps of 128 images through the 50,000 of CIFAR-10
# By kind of training: the coupling, whether gradients are memory-saving, and the penalties.
KINDS: dict[str, tuple[str, bool, tuple[Any, ...]]] = {
    "stored": ("affine", False, ()),
    "nf": ("affine", False, (FlowLikelihood(1e-5),)),
    "reversible": ("affine", True, ()),
    "fd": ("affine", True, (FiniteDifference(1e-4, 10, scaling="original"),)),
    "additive": ("additive", False, ()),
}


def made(kind: str, args: argparse.Namespace) -> tuple[Task, Classifier, ImageBatches]:
    """The classifier of a kind, and random images on the device."""
    generator = torch.Generator().manual_seed(0)
    images = Images(
        torch.randint(0, 256, (args.steps * args.batch, 3, 32, 32), generator=generator, dtype=torch.uint8),
        torch.randint(0, 10, (args.steps * args.batch,), generator=generator),
    )
    batches = ImageBatches(images, args.batch, device=args.device)
    torch.manual_seed(0)
    coupling, saving, penalties = KINDS[kind]
    model = classifier(glow((3, 32, 32), levels=3, blocks=args.blocks, hidden=args.hidden, coupling=coupling))
    if saving:
        model.trunk = Reversible(model.trunk)
    return Task(model, batches, Classification(penalties)), model, batches


def measured(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds a step, through the loop and bare, and the peak of memory in MiB."""
    seen: list[CapturedStep] = []

    class Seen(CapturedStep):
        def __init__(self, *given) -> None:  # type: ignore[no-untyped-def]
            super().__init__(*given)
            seen.append(self)

    release(args.device)  # the kinds share this process: none is charged for what the others left
    before = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    task, model, batches = made(kind, args)
    times: dict[int, float] = {}

    def progress(done: int, steps: int, latest: object) -> None:
        if done in (FIRST, steps):
            wait(args.device)
            times[done] = time.perf_counter()

    kept, run.CapturedStep = run.CapturedStep, Seen
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(steps=args.steps, lr=1e-4, device=args.device, log_every=97, save_every=args.steps)
            train(task, settings, folder, progress=progress)
    finally:
        run.CapturedStep = kept
    found = {"loop_ms": 1e3 * (times[args.steps] - times[FIRST]) / (args.steps - FIRST)}
    if args.device == "cuda":
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    found["bare_ms"] = 1e3 * bare(seen[0] if seen else None, model, batches, args)
    found["ratio"] = found["loop_ms"] / found["bare_ms"]
    if seen:
        found |= {"replays": seen[0].replays, "reruns": seen[0].reruns}
    return {name: round(value, 4) for name, value in found.items()}


def bare(captured: CapturedStep | None, model: Classifier, batches: ImageBatches, args: argparse.Namespace) -> float:
    """Seconds of one step with nothing around it."""
    if captured is not None:
        (recorded,) = captured.graphs.values()

        def step() -> None:
            recorded.graph.replay()
            recorded.finish.replay()
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        batch, objective = batches(Draw(0, 0)), Classification()
        model.to(args.device).train()

        def step() -> None:
            optimizer.zero_grad()
            objective(model, 0, *batch)["loss"].backward()
            optimizer.step()

    for _ in range(3):
        step()
    wait(args.device)
    started = time.perf_counter()
    for _ in range(args.steps - FIRST):
        step()
    wait(args.device)
    return (time.perf_counter() - started) / (args.steps - FIRST)


class Enough(Exception):
    """The time is over."""


def ready(barrier: Any) -> None:
    """Where the processes that train side by side wait for each other."""
    global TOGETHER
    TOGETHER = barrier


def one_of_several(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """How many steps this process did in the time in which all of them train, and the peak of its memory in MiB."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    task, _, _ = made(kind, args)
    begun = done_then = 0.0
    found: dict[str, Any] = {}

    def progress(done: int, steps: int, latest: object) -> None:
        nonlocal begun, done_then
        if not begun and done >= FIRST:
            wait(args.device)
            TOGETHER.wait(300)
            begun, done_then = time.perf_counter(), done
        elif begun and time.perf_counter() - begun >= args.seconds:
            wait(args.device)
            seconds = time.perf_counter() - begun
            found.update(kind=kind, steps=int(done - done_then), seconds=seconds)
            raise Enough

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(steps=10**6, lr=1e-4, device=args.device, log_every=97, save_every=0)
        with contextlib.suppress(Enough):
            train(task, settings, folder, progress=progress)
    if args.device == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return {**found, "step_ms": 1e3 * found["seconds"] / found["steps"]}


def side_by_side(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds that an epoch of one model takes, where so many are trained at once: the time of the last to end over the epochs of all.

    A process that stores gradients runs ahead of the GPU and ends later than the others, with less beside it: its own time would flatter.
    """
    context, count = multiprocessing.get_context("spawn"), len(args.beside)
    with ProcessPoolExecutor(count, mp_context=context, initializer=ready, initargs=(context.Barrier(count),)) as pool:
        rows = list(pool.map(one_of_several, args.beside, [args] * count))
    epochs = sum(row["steps"] for row in rows) / EPOCH
    return {"runs": rows, "seconds_an_epoch_a_model": max(row["seconds"] for row in rows) / epochs, "mps": mps()}


def mps() -> bool:
    """Whether the daemon of CUDA's multi-process service was started here."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def main() -> None:
    parser = options(__doc__, blocks=16, hidden=128, batch=128, steps=EPOCH, repeats=1, seconds=30)
    parser.add_argument("--beside", nargs="+", choices=list(KINDS), help="train these side by side")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if args.beside:
        document = {
            "question": "what does an epoch cost where several models are trained side by side?",
            "command": command_line(),
            "environment": about(args.device),
            **side_by_side(args),
        }
        print(json.dumps(document, indent=1))
        write(args.out, document)
        return
    runs = [{kind: measured(kind, args) for kind in ("stored", "reversible")} for _ in range(args.repeats)]
    document = {
        "question": "what does the training loop add to its steps?",
        "command": command_line(),
        "environment": about(args.device),
        "runs": runs,
        "reversible_over_stored": [round(one["reversible"]["loop_ms"] / one["stored"]["loop_ms"], 4) for one in runs],
    }
    print(json.dumps(document, indent=1))
    write(args.out, document)


if __name__ == "__main__":
    main()
