"""What does a stated error cost? bilip's inverse of residual blocks against the stopping rule of other libraries.

The rule of residual-flows and normflows iterates plainly until every entry of the batch has (x - x_prev)^2 / (1e-5 + 1e-5 |y|) < 1, a step
of about 3e-3, and returns no error. bilip solves each sample to a tolerance with a proven bound. Both run on the same blocks, in the same
process, in turns; errors are distances from a float64 solution.

    python benchmarks/inverse.py
"""

from __future__ import annotations

import statistics

import torch
from rich.progress import track

from _measure import about, in_turns, options, write
from bilip.blocks import Residual
from bilip.nets import MLP, ConvNet, Declared
from bilip.nets.certify import float64_copy


def vector(c: float) -> tuple[Residual, torch.Tensor]:
    net = MLP(2, 2, hidden=(128,) * 4, activation="scaled_swish", lipschitz=c)
    return Residual(_loud(net)), 4 * torch.randn(2000, 2)


def wide(c: float) -> tuple[Residual, torch.Tensor]:
    net = MLP(64, 64, hidden=(128,), activation="elu", lipschitz=c)
    return Residual(_loud(net)), torch.randn(500, 64)


def monotone(c: float) -> tuple[Residual, torch.Tensor]:
    """Symmetric and monotone, the slow case of plain iteration: g = c W^T tanh(W .) with W orthogonal."""
    q = torch.linalg.qr(torch.randn(16, 16))[0]

    class Gradient(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = torch.nn.Parameter(q)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return c * torch.tanh(x @ self.q.T) @ self.q

    return Residual(Declared(Gradient(), lipschitz=c * 1.00001)), 0.3 * torch.randn(2000, 16)


def image(c: float) -> tuple[Residual, torch.Tensor]:
    net = ConvNet(12, 12, hidden=64, activation="scaled_swish", gain=False, lipschitz=c)
    return Residual(_loud(net)), torch.randn(16, 12, 16, 16)


CASES = {
    "2-D, 128 x 4, c = 0.8": lambda: vector(0.8),
    "2-D, 128 x 4, c = 0.98": lambda: vector(0.98),
    "64-D, c = 0.98": lambda: wide(0.98),
    "monotone 16-D, c = 0.9": lambda: monotone(0.9),
    "monotone 16-D, c = 0.98": lambda: monotone(0.98),
    "image 12 x 16 x 16, c = 0.98": lambda: image(0.98),
}


def _loud(net: torch.nn.Module) -> torch.nn.Module:
    """Large weights, so that every layer uses up its coefficient."""
    with torch.no_grad():
        for p in net.parameters():
            if p.ndim > 1:
                p.mul_(20)
    return net


def rule_of_others(block: Residual, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    x, previous, count = y - block.branch(y), y, 1
    while not bool(((x - previous) ** 2 / (1e-5 + 1e-5 * y.abs()) < 1).all()) and count < 1000:
        x, previous, count = y - block.branch(x), x, count + 1
    return x, count


@torch.no_grad()
def measure(make, repeats: int, seed: int) -> dict:
    torch.manual_seed(seed)
    block, y = make()
    block.eval()
    exact = Residual(Declared(float64_copy(block.g), lipschitz=block.contraction()), max_evaluations=20_000).solve(
        y.double(), tolerance=1e-12
    )
    ways = {
        "rule of others": lambda: rule_of_others(block, y),
        "bilip 1e-3": lambda: block.solve(y, tolerance=1e-3),
        "bilip, best of dtype": lambda: block.solve(y),
        "bilip plain, best of dtype": lambda: block.solve(y, method="plain"),
    }
    times = in_turns(ways, device="cpu", repeats=repeats, warmup=1)
    results = {name: way() for name, way in ways.items()}
    rows = {}
    for name, result in results.items():
        x, count = result if isinstance(result, tuple) else (result.x, float(result.evaluations.double().mean()))
        error = (x.double() - exact.x).flatten(1).norm(dim=1)
        rows[name] = {
            "evaluations": count,
            "largest_error": float(error.max()),
            "largest_stated_error": None if isinstance(result, tuple) else float(result.error_bound.max()),
            "time_over_rule_of_others": round(
                statistics.median(a / b for a, b in zip(times[name], times["rule of others"], strict=True)), 3
            ),
        }
    return rows


def main() -> None:
    parser = options(__doc__, device=None, out="results/inverse/cpu.json", repeats=7, seed=0, threads=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = {
        name: measure(make, args.repeats, args.seed) for name, make in track(CASES.items(), description="inverting")
    }
    document = {
        "question": "error and cost of the inverse of residual blocks, float32",
        "command": f"python benchmarks/inverse.py --repeats {args.repeats} --seed {args.seed} --threads {args.threads}",
        "environment": about("cpu"),
        "cases": cases,
    }
    write(args.out, document)
    print(f"{'case':30}{'way':28}{'evaluations':>12}{'largest error':>15}{'stated':>10}{'time / rule':>13}")
    for case, rows in cases.items():
        for name, row in rows.items():
            stated = "none" if row["largest_stated_error"] is None else f"{row['largest_stated_error']:.1e}"
            print(
                f"{case:30}{name:28}{row['evaluations']:>12.1f}{row['largest_error']:>15.1e}{stated:>10}{row['time_over_rule_of_others']:>13.2f}"
            )
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
