"""Are residual blocks suited to memory-saving gradients? The paper says no, for the cost of their iterative inverse.

A residual network without log-determinants, as in a classifier, trained by a loss on its latent, beside additive couplings of the same
image size. The ways to compute the same gradients:

* stored: ordinary backpropagation.
* kept inputs: `bilip.Reversible`, which keeps the input of a block whose inverse is iterative, and evaluates the block again.
* inverted: nothing but the latent is kept; each block's input is found by its inverse, to the tolerance that the dtype allows.
* inverted loosely: the same to a tolerance of 1e-2 for each block.
* couplings stored, couplings reversible: additive Glow, for which the inverse is a formula.

Time: every repetition runs each way once, in rotating order; the median, and its ratio to stored. Memory: what is saved for the backward
pass, counted tensor by tensor; on CUDA also the peak of the allocator. The weights are large, so that every branch uses up its constant, as
in a trained model.

    PYTHONPATH=src python benchmarks/residual_memory.py --out results/residual_memory/cpu.json
    PYTHONPATH=src python benchmarks/residual_memory.py --device cuda --side 32 --blocks 16 --hidden 512 --batch 64 \
        --out results/residual_memory/h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from _measure import about, command_line, in_turns, options, wait, write
from bilip import Chain, Reversible
from bilip.blocks import Bijection, Residual, inverting
from bilip.models import glow, residual_flow
from bilip.reversible import angle

SCALES, LOOSE = 3, 1e-2


def residual_network(args: argparse.Namespace) -> Chain:
    torch.manual_seed(args.seed)
    model = residual_flow(
        (3, args.side, args.side), blocks=(args.blocks,) * SCALES, hidden=args.hidden, coefficient=args.coefficient
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.mul_(20.0 if name.endswith("weight") else 1.0)
    return model.to(args.device)


def couplings(args: argparse.Namespace) -> Chain:
    torch.manual_seed(args.seed)
    shape = (3, args.side, args.side)
    return glow(shape, levels=SCALES, blocks=args.blocks, hidden=args.hidden, coupling="additive").to(args.device)


class Inverted(torch.autograd.Function):
    """A chain that keeps its latent alone, and goes back block by block."""

    @staticmethod
    def forward(ctx, chain: Chain, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.chain = chain
        with torch.no_grad():
            z = chain(x)
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (z,), (grad,) = ctx.saved_tensors, grads
        found: dict[nn.Parameter, Tensor] = {}
        for block in reversed(list(ctx.chain)):
            with torch.no_grad():
                x = block.inverse(z)
            own = [p for p in block.parameters() if p.requires_grad]
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                grad, *rest = torch.autograd.grad(block(inner), [inner, *own], grad)
            found |= dict(zip(own, rest, strict=True))
            z = x
        return (None, grad, *(found.get(p) for p in ctx.chain.parameters()))


def by_inverse(chain: Chain) -> Callable[[Tensor], Tensor]:
    return lambda x: Inverted.apply(chain, x, *chain.parameters())  # type: ignore[return-value]


def gradient(model: Bijection | Callable[[Tensor], Tensor], chain: Chain, x: Tensor) -> list[Tensor]:
    loss = model(x).flatten(1).square().sum(1).mean()
    return list(torch.autograd.grad(loss, list(chain.parameters())))


def saved_bytes(work: Callable[[], object]) -> int:
    """Bytes of the tensors that are saved for a backward pass, each storage once."""
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return sum(seen.values())


@dataclass(frozen=True)
class Way:
    """One way to compute gradients: what gives the latent, the chain with the parameters, and the tolerance of its inverses."""

    model: Callable[[Tensor], Tensor]
    chain: Chain
    tolerance: float | None = None

    def gradient(self, x: Tensor) -> list[Tensor]:
        with nullcontext() if self.tolerance is None else inverting(self.chain, tolerance=self.tolerance):
            return gradient(self.model, self.chain, x)

    def measured(self, x: Tensor, device: str) -> dict[str, float | None]:
        """How far its gradient is from the stored one, and what it keeps."""
        exact = gradient(self.chain, self.chain, x)
        wait(device)
        before = 0
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        found = self.gradient(x)
        wait(device)
        weights = sum(p.numel() * p.element_size() for p in self.chain.parameters())
        return {
            "angle_to_stored_rad": float(angle(found, exact)),
            "saved_MiB": saved_bytes(lambda: self.model(x)) / 2**20,
            "of_which_weights_up_to_MiB": weights / 2**20,
            "peak_MiB": (torch.cuda.max_memory_allocated() - before) / 2**20 if device == "cuda" else None,
        }


@torch.no_grad()
def evaluations(chain: Chain, x: Tensor, tolerance: float | None) -> float:
    """Evaluations of a residual branch for its inverse, the most that a sample took, in the mean over the blocks."""
    state, counts = chain(x), []
    for block in reversed(list(chain)):
        if isinstance(block, Residual):
            solution = block.solve(state, tolerance=tolerance)
            counts.append(int(solution.evaluations.max()))
            state = solution.x
        else:
            state = block.inverse(state)
    return statistics.fmean(counts)


def main() -> None:
    parser = options(__doc__, side=16, hidden=32, batch=16, repeats=5, seed=0)
    parser.add_argument("--blocks", type=int, default=4, help="of each of the three scales")
    parser.add_argument("--coefficient", type=float, default=0.9, help="of the residual branches")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; use --device cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    x = torch.randn(args.batch, 3, args.side, args.side, generator=torch.Generator().manual_seed(1)).to(args.device)
    residual, coupled = residual_network(args), couplings(args)
    with torch.no_grad():
        for chain in (residual, coupled):
            chain.train()(x)  # starts ActNorm
    ways = {
        "stored": Way(residual, residual),
        "kept inputs": Way(Reversible(residual), residual),
        "inverted": Way(by_inverse(residual), residual),
        "inverted loosely": Way(by_inverse(residual), residual, LOOSE),
        "couplings, stored": Way(coupled, coupled),
        "couplings, reversible": Way(Reversible(coupled), coupled),
    }
    rows: dict[str, dict] = {name: way.measured(x, args.device) for name, way in ways.items()}
    for name, tolerance in (("inverted", None), ("inverted loosely", LOOSE)):
        rows[name]["evaluations_of_a_branch_for_its_inverse"] = evaluations(residual, x, tolerance)
    steps = {name: partial(way.gradient, x) for name, way in ways.items()}
    times = in_turns(steps, device=args.device, repeats=args.repeats, warmup=1)
    for name in ways:
        base = "couplings, stored" if name.startswith("couplings") else "stored"
        rows[name]["median_ms"] = statistics.median(times[name])
        rows[name]["times_stored"] = statistics.median(times[name]) / statistics.median(times[base])
        print(name, json.dumps(rows[name]), flush=True)
    document = {
        "command": command_line(),
        "environment": about(args.device),
        "ways": rows,
    }
    write(args.out, document)


if __name__ == "__main__":
    main()
