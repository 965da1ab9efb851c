"""How long does a Jacobian spectrum take? bilip against the paper's way, in one run.

The paper's way takes one backward pass for each output and then a dense SVD. bilip takes forward-mode columns, many at a
time, and then the same dense SVD (float64), or the eigenvalues of the Gram matrix in float64 (float32: its rounding there is
below the rounding of the entries). Matrix-free: both extremes by Lanczos, in float64. All on the trunk of the paper's
CIFAR-10 classifier, weights moved away from their start so that no map is trivial; the sides run in turns, and the ratio of
medians is reported.

    python benchmarks/spectrum.py --sizes 8 16 --out results/spectrum/cpu.json
    python benchmarks/spectrum.py --sizes 32 --device cuda --out results/spectrum/h200.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from _measure import about, command_line, options, wait, write
from bilip import models
from bilip.auditing.probes import Subject, extremes, jacobian, singular_values


def trunk(size: int, args: argparse.Namespace) -> tuple[Subject, Tensor]:
    torch.manual_seed(args.seed)
    model = models.glow(
        (3, size, size), levels=3, blocks=args.blocks, hidden=args.hidden, coupling="affine", mixing="conv1x1"
    )
    with torch.no_grad():
        model.train()(torch.rand(64, 3, size, size))  # ActNorm starts from data
        for p in model.parameters():
            p.add_(args.wake * torch.randn_like(p) * (p.std() if p.numel() > 1 and p.std() > 0 else 1.0))
    model.eval().requires_grad_(False).to(args.device)
    return Subject.of(model), torch.rand(1, 3, size, size).to(args.device)


def paper_way(subject: Subject, x: Tensor, dtype: torch.dtype) -> Tensor:
    """One backward pass for each output, then a dense SVD."""
    twin = subject.copy_in(dtype)
    point = x.to(dtype).requires_grad_()
    z = twin.bijection(point).flatten()
    rows = [torch.autograd.grad(z[k], point, retain_graph=True)[0].flatten() for k in range(z.numel())]
    return svd(torch.stack(rows))


def svd(matrix: Tensor) -> Tensor:
    """The same for both sides: on a GPU the faster of torch's drivers."""
    return torch.linalg.svdvals(matrix, driver="gesvd" if matrix.is_cuda else None)


def columns(subject: Subject, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Forward-mode columns, many at a time, then singular values from float64 arithmetic."""
    matrix = jacobian(subject, x, dtype=dtype)
    if dtype == torch.float64:
        return svd(matrix)
    wide = matrix.double()
    return torch.linalg.eigvalsh(wide.T @ wide).clamp_min(0).sqrt().flip(0)


def timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    wait(device)
    start = time.perf_counter()
    value = work()
    wait(device)
    return time.perf_counter() - start, value


def compare(size: int, dtype: torch.dtype, args: argparse.Namespace) -> dict[str, Any]:
    subject, x = trunk(size, args)
    sides = {
        "paper": lambda: paper_way(subject, x, dtype),
        "exact": lambda: columns(subject, x, dtype),
    }
    if dtype == torch.float64:
        sides["both ends"] = lambda: singular_values(subject, x).values
        sides["matrix-free"] = lambda: extremes(subject, x, steps=args.steps)
    times: dict[str, list[float]] = {name: [] for name in sides}
    values: dict[str, Any] = {}
    sides["exact"]()  # warm up: kernels are chosen and compiled once
    for _ in range(args.repeats):
        for name, work in sides.items():
            if name == "paper" and len(times[name]) >= args.paper_repeats:
                continue
            seconds, values[name] = timed(work, args.device)
            times[name].append(seconds)
    reference, ours = values["paper"].double(), values["exact"].double()
    known = reference >= (1e-6 if dtype == torch.float64 else 1e-3) * reference[0]
    row: dict[str, Any] = {
        "d": x.numel(),
        "dtype": str(dtype).removeprefix("torch."),
        "seconds": {name: statistics.median(t) for name, t in times.items()},
        "all_seconds": times,
        "paper_over_exact": statistics.median(times["paper"]) / statistics.median(times["exact"]),
        "largest_relative_difference": float(((ours - reference) / reference)[known].abs().max()),
        "compared_values": int(known.sum()),
        "condition": float(reference[0] / reference[-1]),
    }
    if dtype == torch.float64:
        found, both = values["matrix-free"], values["both ends"]
        row["matrix_free"] = {
            "paper_over_matrix_free": row["seconds"]["paper"] / row["seconds"]["matrix-free"],
            "sigma_max_relative_error": abs(float(found.sigma_max) / float(both[0]) - 1),
            "sigma_max_residual": float(found.sigma_max_error),
            "sigma_min_relative_error": abs(float(found.sigma_min) / float(both[-1]) - 1),
            "sigma_min_residual": float(found.sigma_min_error),
            "sigma_min": float(found.sigma_min),
            "note": found.note,
            "steps": args.steps,
        }
    return row


def main() -> None:
    parser = options(__doc__, blocks=16, hidden=128, steps=100, repeats=3, seed=0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16], help="image sides; d = 3 side^2")
    parser.add_argument("--wake", type=float, default=0.05, help="noise on the weights, in units of their deviation")
    parser.add_argument("--paper-repeats", type=int, default=2)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows = []
    for size in args.sizes:
        for dtype in (torch.float32, torch.float64):
            row = compare(size, dtype, args)
            rows.append(row)
            seconds = "  ".join(f"{name} {t:.3g} s" for name, t in row["seconds"].items())
            print(
                f"d = {row['d']:5d} {row['dtype']}: {seconds}   paper/exact {row['paper_over_exact']:.1f}x", flush=True
            )
    document = {
        "question": "time of a Jacobian spectrum against the paper's way",
        "command": command_line(),
        "environment": about(args.device),
        "seed": args.seed,
        "tf32": False,
        "rows": rows,
    }
    write(args.out, document)


if __name__ == "__main__":
    main()
