"""How far above the best gain found do the proven bounds lie, and does any gain exceed one?

Every block and network of `tests/catalogue.py`, with its weights as initialised (x1) and tripled (x3), over several seeds: bounds in both
formulas, on a box and (where one exists) everywhere, against random pairs and gradient ascent on float64 Jacobian gains. Writes JSON; a
gain more than 1e-9 above a bound ends the run with exit code 1.

    python benchmarks/tightness.py --seeds 2 --steps 15 --out results/soundness/quick.json
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from pathlib import Path

import torch
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from _measure import about, options, write
from bilip import Box
from bilip.blocks import ActNorm, Bijection, DiagonalScaling, InvertibleConv1x1
from bilip.errors import NoGlobalBound
from bilip.testing import search_gains
from catalogue import CATALOGUE, Entry


def scaled(block: Bijection, factor: float) -> Bijection:
    """Multiply the weights of the nets inside a block; linear blocks stay as they are."""
    linear = {
        id(p)
        for m in block.modules()
        if isinstance(m, (ActNorm, DiagonalScaling, InvertibleConv1x1))
        for p in m.parameters()
    }
    with torch.no_grad():
        for p in block.parameters():
            if id(p) not in linear and p.is_floating_point():
                p.mul_(factor)
    return block


def rows_of(entry: Entry, seed: int, factor: float, *, points: int, steps: int) -> list[dict]:
    """One row for each formula and domain: log10 of the bounds and of the best gains."""
    torch.manual_seed(seed)
    block = scaled(entry.make().double(), factor)
    box = (Box(0.01, 0.99) if entry.unit else Box(-1.5, 1.5)).expand(entry.shape)
    contexts = entry.contexts(1)
    context = None if contexts is None else contexts[0]
    gains = search_gains(block, box, context=context, points=points, steps=steps, seed=seed)
    rows = []
    for formula in ("sharp", "paper"):
        for where, domain in (("box", box), ("everywhere", None)):
            try:
                bound = block.bounds(domain, context=None if context is None else Box.point(context), formula=formula)
            except NoGlobalBound:
                continue
            for direction in ("forward", "inverse"):
                gain, log = getattr(gains, direction), getattr(bound, f"log_{direction}")
                log10 = log / math.log(10)
                rows.append(
                    {
                        "block": entry.name,
                        "weights": factor,
                        "seed": seed,
                        "formula": formula,
                        "where": where,
                        "direction": direction,
                        "log10_bound": log10 if math.isfinite(log10) else "inf",
                        "log10_gain": math.log10(gain) if gain > 0 else "-inf",
                        "excess": 0.0 if log > 700 else max(0.0, gain / math.exp(log) - 1),
                    }
                )
    return rows


def summary(rows: list[dict]) -> list[dict]:
    """Median log10 of bound over gain for each block, weight factor, formula and direction, on the box."""
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        if row["where"] == "box" and "inf" not in (row["log10_bound"], row["log10_gain"]):
            key = (row["block"], row["weights"], row["formula"], row["direction"])
            groups.setdefault(key, []).append(row["log10_bound"] - row["log10_gain"])
    names = ("block", "weights", "formula", "direction")
    return [
        {**dict(zip(names, key, strict=True)), "median_log10_ratio": round(statistics.median(v), 4)}
        for key, v in groups.items()
    ]


def main() -> int:
    parser = options(__doc__, device=None, out="results/soundness/quick.json", seeds=2, points=16, steps=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start, rows = time.time(), []
    jobs = [(entry, seed, factor) for entry in CATALOGUE for factor in (1.0, 3.0) for seed in range(args.seeds)]
    for entry, seed, factor in track(jobs, description="searching gains"):
        rows += rows_of(entry, seed, factor, points=args.points, steps=args.steps)
    worst = max(row["excess"] for row in rows)
    document = {
        "question": "proven bounds against the best gains found",
        "command": f"python benchmarks/tightness.py --seeds {args.seeds} --points {args.points} --steps {args.steps}",
        "environment": about("cpu"),
        "seconds": round(time.time() - start),
        "comparisons": len(rows),
        "largest_excess_of_a_gain_over_a_bound": worst,
        "tightness": summary(rows),
    }
    write(args.out, document)
    print(
        f"{'block':24}{'weights':>8}  {'sharp F':>9}{'sharp F^-1':>11}{'paper F':>9}{'paper F^-1':>11}   "
        "median log10(bound / gain)"
    )
    table: dict[tuple, dict] = {}
    for row in document["tightness"]:
        table.setdefault((row["block"], row["weights"]), {})[row["formula"], row["direction"]] = row[
            "median_log10_ratio"
        ]
    for (name, weights), cell in table.items():
        cells = [cell.get((f, d), math.nan) for f in ("sharp", "paper") for d in ("forward", "inverse")]
        print(f"{name:24}{weights:>8.0f}  {cells[0]:>9.3f}{cells[1]:>11.3f}{cells[2]:>9.3f}{cells[3]:>11.3f}")
    print(f"{len(rows)} comparisons, largest excess of a gain over a bound: {worst:.2e}; wrote {args.out}")
    return 1 if worst > 1e-9 else 0


if __name__ == "__main__":
    sys.exit(main())
