"""Which penalty, with which weight, keeps a small affine classifier invertible?

Random labels for 512 random points in 8 dimensions, which a network can only learn by stretching space: 12 coupling blocks and a linear
head, 200 steps of Adam at a rate of 1e-2, float32. Afterwards every point makes one round trip; condition numbers are those of 8 points.

    OMP_NUM_THREADS=1 python benchmarks/penalties.py --seeds 6 --out results/regularizers/cure.json
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from _measure import about, options, write
from bilip import models
from bilip.auditing.probes import Reconstruction, Spectrum
from bilip.regularizers import ActivationNorm, FiniteDifference, FlowLikelihood, Penalty
from bilip.reversible import Reversible

DIMENSION, CLASSES, SAMPLES = 8, 10, 512
Penalties = Callable[[], Sequence[Penalty]]


def trained(seed: int, penalties: Sequence[Penalty] = (), *, saving: bool = False, **model: Any):
    """Round trip of the training points, accuracy on them, and the network."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, DIMENSION, generator=generator)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    trunk = models.real_nvp(DIMENSION, blocks=12, hidden=(32,), **({"scale": "sigmoid"} | model))
    run = Reversible(trunk) if saving else trunk
    head = nn.Linear(DIMENSION, CLASSES)
    optimizer = torch.optim.Adam([*trunk.parameters(), *head.parameters()], lr=1e-2)
    for step in range(200):
        rows = torch.randint(SAMPLES, (128,))
        z, log_det = run.forward_and_log_det(x[rows])
        loss = nn.functional.cross_entropy(head(z), y[rows])
        for penalty in penalties:
            loss = loss + penalty(run, x[rows], latent=(z, log_det), step=step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = float((head(trunk(x)).argmax(1) == y).float().mean())
    return Reconstruction(rounds=1).measure(trunk, x), accuracy, run


def differences(weight: float, **options: Any) -> Penalties:
    return lambda: [FiniteDifference(weight, every=10, **options)]


ROWS: dict[str, tuple[Penalties, dict[str, Any]]] = {
    "no penalty": (list, {}),
    "FiniteDifference(0.01, every=10)": (differences(0.01), {}),
    "FiniteDifference(0.1, every=10)": (differences(0.1), {}),
    "FiniteDifference(0.3, every=10)": (differences(0.3), {}),
    "FiniteDifference(1.0, every=10)": (differences(1.0), {}),
    "the same, original, 0.001": (differences(0.001, scaling="original"), {}),
    "the same, original, 0.01": (differences(0.01, scaling="original"), {}),
    "the same, original, 0.1": (differences(0.1, scaling="original"), {}),
    'FiniteDifference(0.3, every=10, mode="inverse")': (differences(0.3, mode="inverse"), {}),
    'FiniteDifference(0.3, every=10, mode="forward")': (differences(0.3, mode="forward"), {}),
    "FlowLikelihood(0.001)": (lambda: [FlowLikelihood(0.001)], {}),
    "FlowLikelihood(0.01)": (lambda: [FlowLikelihood(0.01)], {}),
    "FlowLikelihood(0.03)": (lambda: [FlowLikelihood(0.03)], {}),
    "FlowLikelihood(0.1)": (lambda: [FlowLikelihood(0.1)], {}),
    'ActivationNorm(0.1, at="blocks")': (lambda: [ActivationNorm(0.1, at="blocks")], {}),
    "the same and FlowLikelihood(0.01)": (lambda: [ActivationNorm(0.1, at="blocks"), FlowLikelihood(0.01)], {}),
    "scale in (0.5, 1), no penalty": (list, {"scale": "half_sigmoid"}),
    "additive, no penalty": (list, {"coupling": "additive"}),
    "additive, nets held to 1": (list, {"coupling": "additive", "lipschitz": 1.0}),
}


def measure(name: str, seed: int) -> dict[str, float]:
    make, model = ROWS[name]
    m, accuracy, run = trained(seed, make(), **model)
    x = torch.randn(SAMPLES, DIMENSION, generator=torch.Generator().manual_seed(seed))
    spectrum = Spectrum(8).measure(run, x)
    return {
        "accuracy": accuracy,
        "lost": m["share_nan"] + m["share_inf"] + m["share_failed"],
        "wrong": m["share_wrong"],
        "largest_finite": m["relative_max"],
        "condition": spectrum["condition"] if spectrum.measured else math.nan,
    }


def main() -> None:
    parser = options(__doc__, device=None, seeds=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of penalties about samples they leave out
    rows: dict[str, list[dict[str, float]]] = {}
    for name in ROWS:
        rows[name] = [measure(name, seed) for seed in range(args.seeds)]
        print(name, json.dumps(summary(rows[name])), flush=True)
    document = {
        "command": f"python benchmarks/penalties.py --seeds {args.seeds}",
        "environment": about("cpu"),
        "summary": {name: summary(found) for name, found in rows.items()},
        "seeds": rows,
    }
    write(args.out, document)


def summary(found: list[dict[str, float]]) -> dict[str, float]:
    """Mean accuracy, ranges of what was lost and wrong, the largest error and condition number."""
    columns = {name: [row[name] for row in found] for name in found[0]}
    return {
        "accuracy": sum(columns["accuracy"]) / len(found),
        **{f"{name}_{end.__name__}": end(columns[name]) for name in ("lost", "wrong") for end in (min, max)},
        "largest_finite": max(columns["largest_finite"]),
        "condition": max(columns["condition"]),
    }


if __name__ == "__main__":
    main()
