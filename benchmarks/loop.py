"""What does the training loop add to its steps?

The paper's CIFAR-10 classifier (3 levels x 16 blocks x 128 channels, batch 128, Adam, float32, TF32 off) is trained by
`bilip.training.train` for an epoch of 390 steps, gradients stored and memory-saving, on random images that are cut and mirrored
on the device as in the recipe. Then the very graphs of that run, gradients and update, are replayed without anything in between:
the bare steps. On a CPU, where nothing is captured, the bare steps are eager ones on one batch. The first 40 steps, with warm-up
and recording, are not timed.

    python benchmarks/loop.py --device cuda --out results/training/loop_h200.json
    python benchmarks/loop.py --blocks 1 --hidden 8 --batch 16 --steps 60
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time

import torch

from _measure import about, command_line, options, wait, write
from bilip.data import ImageBatches, Images
from bilip.models import Classifier, classifier, glow
from bilip.objectives import Classification
from bilip.reversible import Reversible
from bilip.training import Settings, Task, run, train
from bilip.training.step import CapturedStep
from bilip.training.task import Draw

FIRST = 40


def measured(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds a step, through the loop and bare, and the peak of memory in MiB."""
    seen: list[CapturedStep] = []

    class Seen(CapturedStep):
        def __init__(self, *given) -> None:  # type: ignore[no-untyped-def]
            super().__init__(*given)
            seen.append(self)

    generator = torch.Generator().manual_seed(0)
    images = Images(
        torch.randint(0, 256, (args.steps * args.batch, 3, 32, 32), generator=generator, dtype=torch.uint8),
        torch.randint(0, 10, (args.steps * args.batch,), generator=generator),
    )
    batches = ImageBatches(images, args.batch, device=args.device)
    torch.manual_seed(0)
    trunk = glow((3, 32, 32), levels=3, blocks=args.blocks, hidden=args.hidden, coupling="affine")
    model = classifier(trunk)
    if kind == "reversible":
        model.trunk = Reversible(model.trunk)
    times: dict[int, float] = {}

    def progress(done: int, steps: int, latest: object) -> None:
        if done in (FIRST, steps):
            wait(args.device)
            times[done] = time.perf_counter()

    kept, run.CapturedStep = run.CapturedStep, Seen
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(steps=args.steps, lr=1e-4, device=args.device, log_every=97, save_every=args.steps)
            train(Task(model, batches, Classification()), settings, folder, progress=progress)
    finally:
        run.CapturedStep = kept
    found = {"loop_ms": 1e3 * (times[args.steps] - times[FIRST]) / (args.steps - FIRST)}
    if args.device == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
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


def main() -> None:
    parser = options(__doc__, blocks=16, hidden=128, batch=128, steps=390, repeats=1)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
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
