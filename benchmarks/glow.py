"""What does a training step of a multi-scale Glow cost, beside normflows' Glow, and what do memory-saving gradients cost there?

Three levels of K blocks (ActNorm, 1x1 convolution, affine coupling) on 3x32x32 images, half of the channels leaving after each level, a
Gaussian with mean and scale of its own for the channels that leave; a step is negative log-likelihood, backward pass and Adam. The
contenders: normflows' `MultiscaleFlow` of `GlowBlock`s, eager, as its own examples run it, and `bilip.models.glow`, stored and in
`bilip.Reversible`, each eager and as one CUDA graph. Each repetition runs every contender once, in rotating order. Memory: bytes that torch
allocates beyond model and data in one forward and backward pass, without the gradients of the parameters.

    PYTHONPATH=src:benchmarks python benchmarks/glow.py --blocks 32 --hidden 512 --batch 64 --out results/throughput/glow_h200.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

import bilip
from _measure import Meter, about, command_line, in_turns, release, training_step, write

SHAPE, LEVELS = (3, 32, 32), 3
Loss = Callable[[], Tensor]


def normflows_glow(blocks: int, hidden: int) -> nn.Module:
    """The Glow of its examples, without classes."""
    import normflows as nf

    channels, side = SHAPE[:2]
    bases, parts, merges = [], [], []
    for level in range(LEVELS):  # from the latent to the data
        inner = [nf.flows.GlowBlock(channels * 2 ** (LEVELS + 1 - level), hidden) for _ in range(blocks)]
        parts.append([*inner, nf.flows.Squeeze()])
        if level:
            merges.append(nf.flows.Merge())
        left = LEVELS - level
        shape = (channels * 2 ** (left + (level == 0)), side // 2**left, side // 2**left)
        bases.append(nf.distributions.DiagGaussian(shape))
    return nf.MultiscaleFlow(bases, parts, merges, class_cond=False)


def bilip_glow(blocks: int, hidden: int) -> bilip.Flow:
    return bilip.Flow(
        bilip.models.glow(SHAPE, levels=LEVELS, blocks=blocks, hidden=hidden, factor_out=True, learned_prior=True)
    )


def make(contender: str, blocks: int, args: argparse.Namespace) -> tuple[nn.Module, Loss]:
    """The model with its ActNorms started, and its loss in nats per dimension as a function without arguments."""
    torch.manual_seed(args.seed)
    x = (torch.rand(args.batch, *SHAPE) - 0.5).to(args.device)
    if contender == "normflows":
        model = normflows_glow(blocks, args.hidden).to(args.device)
        loss = partial(model.forward_kld, x)  # type: ignore[operator]
    else:
        model = bilip_glow(blocks, args.hidden).to(args.device)
        if contender == "reversible":
            model = bilip.Flow(bilip.Reversible(model.bijection), model.base)
        loss = lambda: -model.log_prob(x).mean()  # noqa: E731
    with torch.no_grad():
        loss()  # starts ActNorm
        for parameter in model.parameters():  # nothing may be trivial: what starts at zero gets small numbers
            if not parameter.any():
                parameter.normal_(std=0.01)
    return model, lambda: loss() / x[0].numel()


def make_step(contender: str, mode: str, args: argparse.Namespace) -> Callable[[], None]:
    model, loss = make(contender, args.blocks, args)
    return training_step(loss, model.parameters(), args.device, mode)


def memory(contender: str, blocks: int, args: argparse.Namespace) -> dict[str, int]:
    meter = Meter(args.device)
    model, loss = make(contender, blocks, args)
    for _ in range(2):
        loss().backward()
        model.zero_grad()
    release(args.device)
    meter.reset()
    before = meter.now()
    loss().backward()
    peak = meter.peak() - before
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    return {"peak": peak, "activations": peak - gradients}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("blocks", 32), ("hidden", 512), ("batch", 64), ("repeats", 10), ("warmup", 2), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 16, 32], help="blocks whose memory is measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    report: dict[str, Any] = {
        "command": command_line(),
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "environment": about(args.device),
        "precision": "float32, TF32 off",
        "memory": {},
    }
    for contender in ("normflows", "stored", "reversible"):
        report["memory"][contender] = {}
        for blocks in args.depths:
            report["memory"][contender][str(blocks)] = memory(contender, blocks, args)
            release(args.device)
    modes = ("eager", "captured") if args.device == "cuda" else ("eager",)
    steps = {f"{name} {mode}": make_step(name, mode, args) for name in ("stored", "reversible") for mode in modes}
    steps["normflows eager"] = make_step("normflows", "eager", args)
    shown = partial(track, description="steps")
    found = in_turns(steps, device=args.device, repeats=args.repeats, warmup=args.warmup, shown=shown)
    best = found["stored captured"] if "stored captured" in found else found["stored eager"]
    report["time"] = {
        name: {
            "median_ms": statistics.median(each),
            "over_stored": statistics.median(a / b for a, b in zip(each, best, strict=True)),
            "times_ms": [round(ms, 2) for ms in each],
        }
        for name, each in found.items()
    }
    write(args.out, report)
    for name, row in report["time"].items():
        print(f"{name:22}{row['median_ms']:10.1f} ms {row['over_stored']:6.2f}x of stored")
    for name, rows in report["memory"].items():
        print(f"{name:22}" + "".join(f"  K={k}: {row['activations'] / 2**20:,.0f} MiB" for k, row in rows.items()))


if __name__ == "__main__":
    main()
