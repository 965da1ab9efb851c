"""What does the finite-difference penalty cost on top of memory-saving training?

The paper's affine CIFAR-10 classifier, 3 x 16 blocks, trained through `bilip.Reversible` with its guard on. Three kinds of
step are timed in one run, in turns: stored without penalty, reversible without, reversible with the bi-directional penalty
(original scaling). A penalty every K steps costs ((K - 1) plain + 1 with) / K. The paper reports 3.04, 1.45 and 1.26 for
K = 1, 5, 10 over its own memory-saving base, which evaluates every net twice in the backward pass; the operation count here
is 12 against 4 net passes.

    python benchmarks/fd_overhead.py --hidden 32 --batch 8 --blocks 4 --out results/reversible/fd_cpu.json
    python benchmarks/fd_overhead.py --device cuda --batch 512 --mode captured --out results/reversible/fd_h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

from _measure import command_line, in_turns, training_step, write
from bilip.record import environment
from bilip.regularizers import FiniteDifference
from bilip.reversible import Reversible
from reversible import make_model


def make(settings: dict, *, saving: bool, penalised: bool):
    model, x, labels = make_model(settings, settings["blocks"], settings["coupling"])
    trunk = Reversible(model.trunk) if saving else model.trunk
    penalty = FiniteDifference(weight=1e-4, scaling="original")

    def loss() -> Tensor:
        z = trunk(x)
        value = nn.functional.cross_entropy(model.head(z), labels)
        return value + penalty(trunk, x, latent=(z, None), step=0) if penalised else value

    return training_step(loss, model.parameters(), settings["device"], settings["mode"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--coupling", default="affine", choices=["affine", "additive"])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--mode", default="eager", choices=["eager", "captured"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    settings = {**vars(args), "loss": "classifier"}
    steps = {
        "stored": make(settings, saving=False, penalised=False),
        "reversible": make(settings, saving=True, penalised=False),
        "with penalty": make(settings, saving=True, penalised=True),
    }
    times = in_turns(steps, device=args.device, repeats=args.repeats)
    middle = {name: statistics.median(values) for name, values in times.items()}
    plain, full, stored = middle["reversible"], middle["with penalty"], middle["stored"]
    overhead = {str(k): ((k - 1) * plain + full) / k / plain for k in (1, 5, 10)}
    over_stored = {str(k): ((k - 1) * plain + full) / k / stored for k in (1, 5, 10)}
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    document = {
        "question": "cost of the finite-difference penalty",
        "command": command_line(),
        "environment": environment() | {"torch": torch.__version__, "device": device},
        "seed": args.seed,
        "milliseconds": middle,
        "all_milliseconds": times,
        "overhead_over_reversible": overhead,
        "over_stored": over_stored,
        "paper": {"1": 3.04, "5": 1.45, "10": 1.26},
    }
    print(json.dumps({k: document[k] for k in ("milliseconds", "overhead_over_reversible", "over_stored")}, indent=1))
    write(args.out, document)


if __name__ == "__main__":
    main()
