"""What does an image-size residual flow cost, beside the published code: training step, memory, inverse and its error?

The 16-16-16 model on 3x32x32 images with four fully connected blocks, width 512, c = 0.98, two exact terms and Poisson(2) further ones,
random inputs, float32 without TF32, Adam. The published code (github.com/rtqichen/residual-flows, MIT) is not part of this project: give
the folder that holds its package `resflows`, and it is measured in the same run. bilip is measured in three ways:

* `eager`: each block draws its number of terms, activations are kept;
* `recompute`: activations are made again in the backward pass;
* `captured`: one number of terms for all blocks of a step, through `bilip.training`, as CUDA graphs; with `recompute` too. Only on a GPU.

    PYTHONPATH=src python benchmarks/residual_flow.py --original PATH --out results/residual_flow/h200_beside.json
    PYTHONPATH=src python benchmarks/residual_flow.py --device cpu --blocks 1 --hidden 16 --batch 4 --steps 3
"""

from __future__ import annotations

import argparse
import collections
import collections.abc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from _measure import about, command_line, in_turns, options, release, wait, write
from bilip import Chain, Flow, models
from bilip.blocks import Poisson, Residual, Roulette, Solution, inverting
from bilip.errors import NotConverged
from bilip.nets import conv_norm, matrix_norm
from bilip.nets.spectral import HeldLinear, certify_anew, held_layers
from bilip.training import Settings, Task, train

SHAPE, COEFFICIENT, ALPHA, DENSE, LR = (3, 32, 32), 0.98, 0.05, 4, 1e-3
DIMENSION = 3 * 32 * 32


def times_of(work: Callable[[], object], device: str, repeats: int, warmup: int = 3) -> list[float]:
    """Milliseconds of each repeat."""
    return in_turns({"": work}, device=device, repeats=repeats, warmup=warmup)[""]


def summary(ms: list[float]) -> dict[str, float]:
    return {"mean_ms": statistics.fmean(ms), "median_ms": statistics.median(ms), "most_ms": max(ms), "steps": len(ms)}


def start_memory(device: str) -> None:
    release(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None


def largest_error(found: Tensor, x: Tensor) -> float:
    return float((found.double() - x.double()).flatten(1).norm(dim=1).max())


def measure_original(folder: Path, x: Tensor, args: argparse.Namespace, row: dict) -> None:
    """The published code with the options of its CIFAR-10 model."""
    sys.path.insert(0, str(folder))
    for name in ("Iterable", "Sequence"):  # it was written for a Python that had them there
        setattr(collections, name, getattr(collections.abc, name))
    from resflows import layers  # type: ignore[import-not-found]
    from resflows.layers import base  # type: ignore[import-not-found]
    from resflows.resflow import ResidualFlow  # type: ignore[import-not-found]

    torch.manual_seed(args.seed)
    start_memory(args.device)
    model = ResidualFlow(
        (len(x), *SHAPE),
        n_blocks=[args.blocks] * 3,
        intermediate_dim=args.hidden,
        factor_out=False,
        quadratic=False,
        init_layer=layers.LogitTransform(ALPHA),
        actnorm=True,
        fc_actnorm=False,
        batchnorm=False,
        dropout=0.0,
        fc=False,
        coeff=COEFFICIENT,
        vnorms="2222",
        n_lipschitz_iters=None,
        sn_atol=1e-3,
        sn_rtol=1e-3,
        n_power_series=None,
        n_dist="poisson",
        n_samples=1,
        kernels="3-1-3",
        activation_fn="swish",
        fc_end=True,
        fc_idim=128,
        n_exact_terms=2,
        preact=True,
        neumann_grad=True,
        grad_in_forward=True,
        first_resblock=True,
        learn_p=False,
        classification=False,
        classification_hdim=64,
        n_classes=10,
        block_type="resblock",
    ).to(args.device)
    with torch.no_grad():
        model(x)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    kinds = (base.SpectralNormConv2d, base.SpectralNormLinear, base.InducedNormConv2d, base.InducedNormLinear)

    def update() -> None:
        with torch.no_grad():
            for part in model.modules():
                if isinstance(part, kinds):
                    part.compute_weight(update=True)

    def step() -> None:
        z, minus_log_det = model(x, 0)
        loss = (0.5 * z.flatten(1).square().sum(1)).mean() + minus_log_det.mean()
        (loss / DIMENSION).backward()
        optimizer.step()
        optimizer.zero_grad()
        update()

    row["parameters"] = sum(p.numel() for p in model.parameters())
    row["training_step"] = summary(times_of(step, args.device, args.steps))
    row["peak_GiB"] = peak_memory(args.device)
    row["norms"] = summary(times_of(update, args.device, 5, 1))
    model.eval()
    with torch.no_grad():
        z = model(x)
        row["inverse"] = {"its own stop": summary(times_of(lambda: model(z, inverse=True), args.device, 5, 1))}
        row["inverse"]["its own stop"]["largest_error"] = largest_error(model(z, inverse=True), x)


def make(args: argparse.Namespace, x: Tensor, *, shared: bool, recompute: bool) -> Chain:
    torch.manual_seed(args.seed)
    model = models.residual_flow(
        SHAPE,
        blocks=(args.blocks,) * 3,
        hidden=args.hidden,
        coefficient=COEFFICIENT,
        logit=ALPHA,
        dense_blocks=DENSE,
        recompute=recompute,
    ).to(args.device)
    for part in model.modules():
        if isinstance(part, Residual):
            part.estimator = Roulette(Poisson(2.0), exact_terms=2, shared=shared)
    with torch.no_grad():
        model.train()(x)  # starts ActNorm
    return model


def loss_of(model: Chain, x: Tensor) -> Tensor:
    z, log_det = model.forward_and_log_det(x)
    return (0.5 * z.flatten(1).square().sum(1) - log_det).mean() / DIMENSION


def measure_eager(x: Tensor, args: argparse.Namespace, row: dict, *, recompute: bool) -> None:
    start_memory(args.device)
    model = make(args, x, shared=False, recompute=recompute)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, fused=args.device == "cuda")

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    row["parameters"] = sum(p.numel() for p in model.parameters())
    row["training_step"] = summary(times_of(step, args.device, args.steps))
    row["peak_GiB"] = peak_memory(args.device)
    norms_and_inverse(model, x, args, row)


def measure_captured(x: Tensor, args: argparse.Namespace, row: dict, *, recompute: bool) -> None:
    """Through the training loop; its first steps of each kind are eager, and are left out with the steps that record a graph."""
    start_memory(args.device)
    model = make(args, x, shared=True, recompute=recompute)
    task = Task(Flow(model), lambda draw: (x,), lambda flow, step, x: {"loss": loss_of(flow.bijection, x)})
    clock, spent = [time.perf_counter()], []

    def tick(done: int, steps: int, latest: object) -> None:
        wait(args.device)
        spent.append(1e3 * (time.perf_counter() - clock[0]))
        clock[0] = time.perf_counter()

    begin = 10 + 2 * args.steps  # by then the common numbers of terms have their graphs
    settings = Settings(steps=begin + 4 * args.steps, lr=LR, seed=args.seed, device=args.device, capture=True)
    with tempfile.TemporaryDirectory() as folder:
        train(task, settings, folder, progress=tick)
    row |= {"training_step": summary(spent[begin:]), "peak_GiB": peak_memory(args.device)}
    norms_and_inverse(model, x, args, row)


def norms_and_inverse(model: Chain, x: Tensor, args: argparse.Namespace, row: dict) -> None:
    held = held_layers(model)
    row["norms"] = summary(times_of(lambda: certify_anew(held, slack=-1.0), args.device, 5, 1))
    row["norms_looked_at"] = summary(times_of(lambda: certify_anew(held), args.device, 5, 1))
    model.eval()
    rows = row["inverse"] = {}
    with torch.no_grad():
        for layer in (held[0], held[1], held[-1]):
            norm = matrix_norm if isinstance(layer, HeldLinear) else conv_norm
            if not norm(layer.held_weight()) <= layer.coefficient:
                raise SystemExit(f"{layer} exceeds its coefficient")
        z = model(x)
        rows["default"] = inverse_row(model, x, z, args)
        for tolerance in (10.0, 1.0, 1e-1, 1e-2, 1e-3):
            with inverting(model, tolerance=tolerance) as solutions:
                rows[f"tolerance {tolerance:g}"] = inverse_row(model, x, z, args, solutions)


def inverse_row(
    model: Chain, x: Tensor, z: Tensor, args: argparse.Namespace, solutions: list[Solution] | None = None
) -> dict:
    """Time and error of the inverse; a tolerance that float32 cannot prove, as 1 / (1 - c) magnifies rounding, is a result too."""
    try:
        found = model.inverse(z)
        row: dict = {"largest_error": largest_error(found, x)}
        if solutions is not None:
            row["largest_stated_error_of_a_block"] = max(float(one.error_bound.max()) for one in solutions)
            row["evaluations"] = sum(int(one.evaluations.max()) for one in solutions)
        return summary(times_of(lambda: model.inverse(z), args.device, 3, 0)) | row
    except NotConverged as error:
        missed = int((~error.solution.converged).sum())  # type: ignore[attr-defined]
        return {"missed": f"by {missed} of {len(z)}, in the first block that missed it", "error": str(error)}


def main() -> None:
    parser = options(__doc__, device="cuda", batch=64, hidden=512, seed=0)
    parser.add_argument("--original", type=Path, help="the folder that holds the package resflows")
    parser.add_argument("--blocks", type=int, default=16, help="of each of the three scales")
    parser.add_argument("--steps", type=int, default=12, help="timed training steps")
    parser.add_argument("--only", nargs="*", help="some of: original, eager, recompute, captured")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; use --device cpu with small sizes")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    x = torch.rand(args.batch, *SHAPE, device=args.device)
    work: dict[str, Callable[[dict], None]] = {
        "eager": lambda row: measure_eager(x, args, row, recompute=False),
        "recompute": lambda row: measure_eager(x, args, row, recompute=True),
    }
    if args.device == "cuda":
        work["captured"] = lambda row: measure_captured(x, args, row, recompute=False)
        work["captured, recompute"] = lambda row: measure_captured(x, args, row, recompute=True)
    if args.original is not None:
        work = {"original": lambda row: measure_original(args.original, x, args, row), **work}
    if args.only:
        work = {name: run for name, run in work.items() if name.split(",")[0] in args.only}
    document: dict = {
        "command": command_line("--original"),
        "environment": about(args.device) | {"precision": "float32, TF32 off"},
        "models": {},
    }
    for name, run in track(work.items(), total=len(work)):
        document["models"][name] = row = {}
        try:
            run(row)
        except Exception as error:  # what the row has so far is kept, and the others are measured
            row["failed"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(name, json.dumps(row), flush=True)
        write(args.out, document)
    timed = {name: row for name, row in document["models"].items() if "peak_GiB" in row}
    base = timed.get("original")
    for name, row in timed.items():
        ratio = row["training_step"]["mean_ms"] / base["training_step"]["mean_ms"] if base else float("nan")
        print(
            f"{name}: {row['training_step']['mean_ms']:.0f} ms a step ({ratio:.2f} of the original), peak {row['peak_GiB']} GiB"
        )
    failed = [name for name, row in document["models"].items() if "failed" in row]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
