"""Does a run that is killed and resumed end where an uninterrupted one ends?

The flow of the checkerboard recipe's `quick` size is trained twice without interruption, and once killed (SIGKILL) at a random moment
within 0.3 s of a checkpoint and resumed, as often as asked. On a CPU all must end with the same bits; on a GPU, where sums are added in
any order, what counts is the difference between the two uninterrupted runs: the spread from run to run.

    python benchmarks/resume.py --out results/training/resume_cpu.json
    python benchmarks/resume.py --device cuda --steps 240 --save_every 40 --kills 2 --out results/training/resume_h200.json
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from _measure import about, command_line, options, write
from bilip.data import checkerboard
from bilip.objectives import Likelihood
from bilip.recipes.checkerboard import QUICK, make_flow
from bilip.training import Settings, Task, read_state, train


def run(folder: Path, args: argparse.Namespace) -> None:
    """Train, or go on."""
    torch.manual_seed(args.seed)
    task = Task(make_flow("half", QUICK), lambda draw: (checkerboard(QUICK.batch, draw("data")),), Likelihood())
    settings = Settings(
        steps=args.steps, lr=1e-3, clip=1.0, seed=args.seed, save_every=args.save_every, device=args.device
    )
    train(task, settings, folder, progress=lambda done, steps, latest: None)


def start(folder: Path, args: argparse.Namespace) -> subprocess.Popen:
    options = [f"--{name}={getattr(args, name)}" for name in ("device", "steps", "save_every", "seed")]
    return subprocess.Popen([sys.executable, __file__, *options, "--work", str(folder)])


def weights(folder: Path) -> torch.Tensor:
    tensors = read_state(folder / "last.safetensors")[0]
    return torch.cat([t.double().flatten().cpu() for name, t in sorted(tensors.items()) if name.startswith("model.")])


def main() -> None:
    parser = options(__doc__, steps=300, save_every=50, seed=0, kills=3)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        run(args.work, args)
        return
    moments = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / name for name in ("once", "again", "killed")]
        for folder in folders[:2]:
            if start(folder, args).wait():
                raise SystemExit("a run failed")
        last, killed = folders[2] / "last.safetensors", []
        for _ in range(args.kills):
            process, before = start(folders[2], args), last.stat().st_mtime if last.exists() else 0
            while process.poll() is None and not (last.exists() and last.stat().st_mtime > before):
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.3))  # a state was saved; now at any moment
            process.kill()
            process.wait()
            killed.append(read_state(last)[1]["step"])
        if start(folders[2], args).wait():
            raise SystemExit("the resumed run failed")
        once, again, resumed = map(weights, folders)
    document = {
        "question": "does a run that is killed and resumed end where an uninterrupted one ends?",
        "command": command_line(),
        "environment": about(args.device),
        "seed": args.seed,
        "steps": args.steps,
        "steps_saved_when_killed": killed,
        "two_runs_differ_by": float((again - once).norm() / once.norm()),
        "resumed_differs_by": float((resumed - once).norm() / once.norm()),
        "bit_equal": {"two runs": torch.equal(once, again), "resumed": torch.equal(once, resumed)},
    }
    print(json.dumps(document, indent=1))
    write(args.out, document)


if __name__ == "__main__":
    main()
