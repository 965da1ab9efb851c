"""Why do finite differences slow some classifiers down? Their gradients beside the loss's, in the first steps of a training.

A run of the recipe `cifar10_classifier`, with its weights, its batches and its penalty, is trained with stored gradients and Adam at
1e-4. In each step the gradient of the cross-entropy and that of the penalty are taken apart. The square root of Adam's second moment
divides each update: beside it is followed what it would be of the cross-entropy alone, on the same path. `slower` is the median of
the ratio of the two: the steps of a typical weight are so many times smaller. `--begin` is the first step with a penalty, `--clip`
the largest norm of a gradient.

    python benchmarks/fd_gradients.py --data .data --seed 1 --out results/regularizers/fd_gradients_seed1.json
    python benchmarks/fd_gradients.py --data .data --seed 1 --clip 10 --out results/regularizers/fd_gradients_seed1_clip.json
    python benchmarks/fd_gradients.py --data .data --seed 1 --begin 100 --steps 120 --out results/regularizers/fd_gradients_seed1_late.json
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from _measure import about, command_line, options, write
from bilip.data import seed_of
from bilip.recipes.cifar10_classifier import Config, load, make_model, make_penalties, trunk_of
from bilip.recipes.classifier_runs import Run
from bilip.recipes.images import start_actnorms
from bilip.recipes.recipe import Work, sizes_of
from bilip.training import Draw

FORGETS = 0.999  # Adam's second moment, a step


def gradients(value: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Zeros for what the value does not depend on."""
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def slower(moments: Sequence[Tensor], without: Sequence[Tensor]) -> float:
    """The median ratio of the square roots, over weights that the loss moves at all."""
    ratios = torch.cat([(a / b)[b > 0] for a, b in zip(moments, without, strict=True)])
    return float(ratios.median().sqrt())


def measured(args: argparse.Namespace) -> list[dict[str, float]]:
    """A row for each step."""
    run, config = Run.of(args.part), sizes_of(Config)[args.size]
    with tempfile.TemporaryDirectory() as folder:
        batches, _, _ = load(config, Work(Path(folder), seed=args.seed, device=args.device, data=args.data))
    torch.manual_seed(seed_of(args.seed, 0, "weights"))
    model = make_model(replace(run, kind="none"), config).to(args.device)
    trunk = trunk_of(model)
    start_actnorms(trunk, batches, config, args.seed)
    (penalty,) = make_penalties(run, config, args.seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=config.lr)
    moments, without = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    rows: list[dict[str, float]] = []
    for step in range(args.steps):
        x, labels = batches(Draw(args.seed, step))
        loss = cross_entropy(model(x), labels)
        of_loss = gradients(loss, parameters)
        row = {"step": step, "cross_entropy": loss.item(), "gradient": norm(of_loss)}
        total = of_loss
        if step >= args.begin and step % penalty.every == 0:
            value = penalty(trunk, x, step=step)
            of_penalty = gradients(value, parameters)
            row |= {"penalty": value.item(), "penalty_gradient": norm(of_penalty)}
            total = [a + b for a, b in zip(of_loss, of_penalty, strict=True)]
        for p, g in zip(parameters, total, strict=True):
            p.grad = g
        if args.clip:
            torch.nn.utils.clip_grad_norm_(parameters, args.clip)
        with torch.no_grad():
            for p, alone, a, b in zip(parameters, of_loss, moments, without, strict=True):
                a.mul_(FORGETS).addcmul_(p.grad, p.grad, value=1 - FORGETS)
                b.mul_(FORGETS).addcmul_(alone, alone, value=1 - FORGETS)
        optimizer.step()
        rows.append({**row, "slower": slower(moments, without)})
        if step % penalty.every == 0:
            print({name: round(value, 3) for name, value in rows[-1].items()}, flush=True)
    return rows


def summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest gradient of a penalty, and the mean cross-entropy of the last 97 steps, as the recipe logs it."""
    penalised = [row for row in rows if "penalty" in row]
    worst = max(penalised, key=lambda row: row["penalty_gradient"], default={})
    last = rows[-97:]
    return {
        **{
            f"worst_{name}": worst[name]
            for name in ("step", "penalty", "penalty_gradient", "gradient", "slower")
            if worst
        },
        "slower_at_the_end": rows[-1]["slower"],
        "cross_entropy_of_the_last_97": sum(row["cross_entropy"] for row in last) / len(last),
    }


def main() -> None:
    parser = options(__doc__, seed=0, steps=291, begin=0, threads=1)
    parser.add_argument("--part", default="affine-conv1x1-fd", help="a run of the recipe with finite differences")
    parser.add_argument("--size", default="gpu")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of a gradient; 0 for any")
    parser.add_argument("--data", type=Path, default=Path(".data"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = measured(args)
    found = summary(rows)
    print(found)
    write(
        args.out, {"command": command_line("--data"), "environment": about(args.device), "summary": found, "rows": rows}
    )


if __name__ == "__main__":
    main()
