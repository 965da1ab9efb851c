"""How fast are forward, inverse and training step of a CIFAR-size Glow, next to FrEIA, nflows and normflows?

Every model is the trunk of the paper's CIFAR-10 classifier: 3 levels of [squeeze, blocks x (ActNorm, 1x1 mixing of the
channels, affine coupling of one half)] on 3x32x32 images, nothing factored out, with the net conv3x3 - ReLU - conv1x1 -
ReLU - conv3x3 in each coupling, the same module wherever a library takes one. On the CPU bilip runs that module in the
channels-last layout (from a batch times pixels of 2,048 on) and the others do not: much of its lead there. What else is
not the same is said with each model and stored beside its numbers. Each repetition runs every library once, in rotating
order, so that a slow moment of the machine falls on all of them.

    python benchmarks/throughput.py --batch 32 --threads 1 --out results/throughput/cpu.json
    PYTHONPATH=src python benchmarks/throughput.py --device cuda --batch 128 --rivals .rivals
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from _measure import cpu_name, in_turns, options, write
from bilip.models import glow
from bilip.nets import ConvNet

SHAPE, LEVELS = (3, 32, 32), 3
CHANNELS = [SHAPE[0] * 4 ** (level + 1) for level in range(LEVELS)]
TASKS = ("forward", "inverse", "train")


@dataclass
class Contestant:
    model: nn.Module
    forward: Callable[[Tensor], tuple[Tensor, Tensor]]  # to the latent and the log-determinant
    inverse: Callable[[Tensor], tuple[Tensor, Tensor]]
    differs: str


def build_bilip(blocks: int, hidden: int, device: str, *, permute: bool = False) -> Contestant:
    mixing = "shuffle" if permute else "conv1x1"
    model = glow(SHAPE, levels=LEVELS, blocks=blocks, hidden=hidden, actnorm="identity", mixing=mixing)
    way = "a fixed random permutation" if permute else "a learned full matrix, inverted in float64"
    return Contestant(model, model.forward_and_log_det, model.inverse_and_log_det, f"mixing by {way}")


def build_freia(blocks: int, hidden: int, device: str, *, permute: bool = False) -> Contestant:
    from FrEIA.framework import SequenceINN
    from FrEIA.modules import ActNorm, AffineCouplingOneSided, Fixed1x1Conv, IRevNetDownsampling, PermuteRandom

    model = SequenceINN(*SHAPE)
    for channels in CHANNELS:
        model.append(IRevNetDownsampling)
        for _ in range(blocks):
            model.append(ActNorm)
            model[-1].init_on_next_batch = False  # pyright: ignore
            if permute:
                model.append(PermuteRandom)
            else:
                model.append(Fixed1x1Conv, M=torch.linalg.qr(torch.randn(channels, channels))[0])
            model.append(AffineCouplingOneSided, subnet_constructor=lambda a, b: ConvNet(a, b, hidden=hidden))
    way = "random permutation" if permute else "matrix: no gradient, determinant or solve, so less work"
    return Contestant(model, model, lambda z: model(z, rev=True), f"mixing by a fixed {way}; scale exp(1.27 atan s)")


def build_nflows(blocks: int, hidden: int, device: str) -> Contestant:
    from nflows import transforms

    chain: list[nn.Module] = []
    for channels in CHANNELS:
        chain.append(transforms.SqueezeTransform())
        mask = (torch.arange(channels) >= channels // 2).int()
        for _ in range(blocks):
            chain.append(transforms.ActNorm(channels))
            chain[-1].register_buffer("initialized", torch.tensor(True))
            chain.append(transforms.OneByOneConvolution(channels, using_cache=device == "cpu"))
            chain.append(transforms.AffineCouplingTransform(mask, lambda a, b: ConvNet(a, b, hidden=hidden)))
    model = transforms.CompositeTransform(chain)
    differs = "mixing by a learned PLU matrix with a bias; evaluation on the CPU from its cache, which fails on CUDA"
    return Contestant(model, model, model.inverse, differs)


def build_normflows(blocks: int, hidden: int, device: str) -> Contestant:
    import normflows

    flows: list[nn.Module] = []  # from the latent to the data: its `inverse` is everybody's forward
    for channels in reversed(CHANNELS):
        flows += [normflows.flows.GlowBlock(channels, hidden, use_lu=False) for _ in range(blocks)]
        flows.append(normflows.flows.Squeeze())
    model = normflows.NormalizingFlow(None, flows)
    for module in model.modules():
        if isinstance(module, normflows.flows.ActNorm):
            module.data_dep_init_done.fill_(1.0)
    differs = "mixing by a learned full matrix, inverted in float64 on every pass; its own net: leaky ReLU of slope 0, no gain"
    return Contestant(model, model.inverse_and_log_det, model.forward_and_log_det, differs)


BUILDERS = {
    "bilip": build_bilip,
    "FrEIA": build_freia,
    "nflows": build_nflows,
    "normflows": build_normflows,
    "bilip, shuffle": partial(build_bilip, permute=True),
    "FrEIA, shuffle": partial(build_freia, permute=True),
}
# FrEIA has no learned 1x1 convolution. It enters twice: with a fixed matrix, which does less work than the learned one of bilip that it is
# compared with, and with a permutation, where both sides do the same.
REFERENCE = {"FrEIA, shuffle": "bilip, shuffle", "bilip, shuffle": "bilip, shuffle"}


def build(blocks: int, hidden: int, device: str, seed: int) -> dict[str, Contestant]:
    contestants = {}
    for name, builder in BUILDERS.items():
        torch.manual_seed(seed)
        try:
            contestant = builder(blocks, hidden, device)
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        with torch.no_grad():  # nothing may be trivial: what starts at zero gets small numbers
            for parameter in contestant.model.parameters():
                if parameter.requires_grad and not parameter.any():
                    parameter.normal_(std=0.01)
        contestant.model.to(device)
        contestants[name] = contestant
    return contestants


@torch.no_grad()
def describe(name: str, contestant: Contestant, x: Tensor) -> dict[str, Any]:
    contestant.model.eval()
    z, log_det = contestant.forward(x)
    back, log_det_back = contestant.inverse(z)
    return {
        "version": next((d.version for d in importlib.metadata.distributions(name=name.split(",")[0])), "from source"),
        "differs": contestant.differs,
        "parameters": sum(p.numel() for p in contestant.model.parameters() if p.requires_grad),
        "round_trip_error": float((back - x).abs().max()),
        "log_det_error": float((log_det + log_det_back).abs().max()),
    }


def work_of(contestant: Contestant, task: str, x: Tensor) -> Callable[[], object]:
    model = contestant.model.train(task == "train")
    if task == "train":
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            z, log_det = contestant.forward(x)
            (0.5 * z.flatten(1).square().sum(1) - log_det).mean().backward()
            optimizer.step()

        return step
    with torch.no_grad():
        given, act = (x, contestant.forward) if task == "forward" else (contestant.forward(x)[0], contestant.inverse)
    return torch.no_grad()(lambda: act(given))


def measure(contestants: dict[str, Contestant], task: str, x: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Median times, and bilip's time over each."""
    works = {name: work_of(contestant, task, x) for name, contestant in contestants.items()}
    times = in_turns(works, device=args.device, repeats=args.repeats, warmup=args.warmup)
    ours = {name: times[REFERENCE.get(name, "bilip")] for name in times}
    return {
        name: {
            "median_ms": statistics.median(theirs),
            "compared_with": REFERENCE.get(name, "bilip"),
            "ratio_of_medians": statistics.median(ours[name]) / statistics.median(theirs),
            "median_of_ratios": statistics.median(a / b for a, b in zip(ours[name], theirs, strict=True)),
            "times_ms": [round(ms, 3) for ms in theirs],
        }
        for name, theirs in times.items()
    }


def environment(device: str) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "precision": "float32, TF32 off",
    }


def show(report: dict[str, Any]) -> None:
    print(
        f"batch {report['settings']['batch']} on {report['environment']['device']}: median ms (time of bilip "
        "with the same mixing over it)"
    )
    print(f"{'':16}{'parameters':>12}{'round trip':>12}" + "".join(f"{task:>20}" for task in TASKS))
    for name, facts in report["models"].items():
        cells = [report["results"][task][name] for task in TASKS]
        row = "".join(f"{cell['median_ms']:12.2f} ({cell['median_of_ratios']:.3f})" for cell in cells)
        print(f"{name:16}{facts['parameters']:12,}{facts['round_trip_error']:12.1e}{row}")


def main() -> None:
    parser = options(__doc__, blocks=16, hidden=128, batch=32, repeats=20, warmup=3, seed=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch on the CPU")
    parser.add_argument("--rivals", type=Path, help="import the rivals from this folder, where they are not installed")
    args = parser.parse_args()
    if args.rivals:
        sys.path.insert(0, str(args.rivals.resolve()))
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    warnings.filterwarnings("ignore", "torch.triangular_solve is deprecated")  # nflows

    settings = {name: value for name, value in vars(args).items() if name not in ("out", "rivals")}
    contestants = build(args.blocks, args.hidden, args.device, args.seed)
    x = torch.randn(args.batch, *SHAPE, generator=torch.Generator().manual_seed(args.seed)).to(args.device)
    report = {
        "command": "python benchmarks/throughput.py "
        + " ".join(f"--{name} {value}" for name, value in settings.items()),
        "settings": settings,
        "environment": environment(args.device),
        "models": {name: describe(name, contestant, x) for name, contestant in contestants.items()},
        "results": {task: measure(contestants, task, x, args) for task in TASKS},
    }
    write(args.out, report)
    show(report)


if __name__ == "__main__":
    main()
