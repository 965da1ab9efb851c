"""How fast are forward, inverse and training step of a CIFAR-size Glow, next to FrEIA, nflows and normflows?

Every model is 3 levels of [squeeze, blocks x (ActNorm, 1x1 mixing of channels, affine coupling of one half)] on 3x32x32 images, with
the net conv3x3 - ReLU - conv1x1 - ReLU - conv3x3 of plain `nn.Conv2d` inside each coupling and nothing factored out: the paper's
CIFAR-10 classifier trunk. What is not the same is said beside each rival below and stored with the numbers.

Each repetition runs every library once, in rotating order, so that a slow moment of the machine falls on all of them.

    python benchmarks/throughput.py --batch 32 --repeats 20 --out throughput.json
    PYTHONPATH=src python benchmarks/throughput.py --device cuda --batch 128 --rivals .rivals
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import bilip
from bilip.models import glow

SHAPE, LEVELS = (3, 32, 32), 3
TASKS = ("forward", "inverse", "train")
Pass = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class Contestant:
    """A model, its two maps with log-determinants, and how it departs from the others."""

    model: nn.Module
    forward: Pass
    inverse: Pass
    differs: str


class Net(nn.Sequential):
    """The net inside every coupling; nflows passes a context along."""

    def __init__(self, inputs: int, outputs: int, hidden: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, hidden, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 1),
            nn.ReLU(),
            nn.Conv2d(hidden, outputs, 3, padding=1),
        )
        nn.init.zeros_(self[-1].weight)  # as bilip's and normflows' do

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return super().forward(x)


def bilip_glow(blocks: int, hidden: int, device: str) -> Contestant:
    model = glow(SHAPE, levels=LEVELS, blocks=blocks, hidden=hidden, coupling="affine", mixing="conv1x1", actnorm="identity")
    differs = "1x1 convolution learned as a full matrix, its inverse solved for in float64; a learned gain on the last layer of each net"
    return Contestant(model, model.forward_and_log_det, model.inverse_and_log_det, differs)


def freia(blocks: int, hidden: int, device: str) -> Contestant:
    from FrEIA.framework import SequenceINN
    from FrEIA.modules import ActNorm, AffineCouplingOneSided, Fixed1x1Conv, IRevNetDownsampling

    model = SequenceINN(*SHAPE)
    for level in range(LEVELS):
        channels = SHAPE[0] * 4 ** (level + 1)
        model.append(IRevNetDownsampling)
        for _ in range(blocks):
            model.append(ActNorm)
            model[-1].init_on_next_batch = False
            model.append(Fixed1x1Conv, M=torch.linalg.qr(torch.randn(channels, channels))[0])
            model.append(AffineCouplingOneSided, subnet_constructor=lambda a, b: Net(a, b, hidden))
    differs = "1x1 convolution fixed, so no gradient, determinant or solve for it; scale exp(2 x 0.636 atan s) instead of a sigmoid"
    return Contestant(model, model, lambda z: model(z, rev=True), differs)


def nflows(blocks: int, hidden: int, device: str) -> Contestant:
    from nflows import transforms as T

    chain: list[nn.Module] = []
    for level in range(LEVELS):
        channels = SHAPE[0] * 4 ** (level + 1)
        chain.append(T.SqueezeTransform())
        for _ in range(blocks):
            actnorm = T.ActNorm(channels)
            actnorm.initialized.fill_(True)
            mixing = T.OneByOneConvolution(channels, using_cache=device == "cpu")
            mask = (torch.arange(channels) >= channels // 2).int()
            chain += [actnorm, mixing, T.AffineCouplingTransform(mask, lambda a, b: Net(a, b, hidden))]
    model = T.CompositeTransform(chain)
    differs = "1x1 convolution learned as PLU with a bias; cached matrices in evaluation on the CPU (its cache fails on CUDA)"
    return Contestant(model, model, model.inverse, differs)


def normflows(blocks: int, hidden: int, device: str) -> Contestant:
    import normflows as nf

    flows: list[nn.Module] = []  # from the latent to the data: its `inverse` is everybody's forward
    for level in reversed(range(LEVELS)):
        channels = SHAPE[0] * 4 ** (level + 1)
        flows += [nf.flows.GlowBlock(channels, hidden, use_lu=False) for _ in range(blocks)]
        flows.append(nf.flows.Squeeze())
    model = nf.NormalizingFlow(None, flows)
    for module in model.modules():
        if isinstance(module, nf.flows.ActNorm):
            module.data_dep_init_done.fill_(1.0)
    differs = "leaky ReLU of slope 0 in the nets; the inverse matrix is solved for in float64 on every pass"
    return Contestant(model, model.inverse_and_log_det, model.forward_and_log_det, differs)


BUILDERS: dict[str, tuple[str, Callable[[int, int, str], Contestant]]] = {
    "bilip": ("bilip", bilip_glow),
    "FrEIA": ("FrEIA", freia),
    "nflows": ("nflows.transforms", nflows),
    "normflows": ("normflows", normflows),
}


def build(args: argparse.Namespace) -> dict[str, Contestant]:
    contestants = {}
    for name, (package, builder) in BUILDERS.items():
        try:
            importlib.import_module(package)
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        torch.manual_seed(args.seed)
        contestant = builder(args.blocks, args.hidden, args.device)
        with torch.no_grad():  # what starts at zero would make the coupling trivial
            for parameter in contestant.model.parameters():
                if parameter.requires_grad and not parameter.any():
                    parameter.normal_(std=0.01)
        contestant.model.to(args.device)
        contestants[name] = contestant
    return contestants


def timed(work: Callable[[], object], device: str) -> float:
    """Milliseconds of one call."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def work_of(contestant: Contestant, task: str, x: Tensor) -> Callable[[], object]:
    contestant.model.train(task == "train")
    if task == "train":
        optimizer = torch.optim.Adam([p for p in contestant.model.parameters() if p.requires_grad], lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            z, log_det = contestant.forward(x)
            (0.5 * z.flatten(1).square().sum(1) - log_det).mean().backward()
            optimizer.step()

        return step
    act = contestant.forward if task == "forward" else contestant.inverse
    with torch.no_grad():
        given = x if task == "forward" else contestant.forward(x)[0]
    return torch.no_grad()(lambda: act(given))


def measure(contestants: dict[str, Contestant], x: Tensor, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    times: dict[str, dict[str, list[float]]] = {}
    names = list(contestants)
    for task in TASKS:
        works = {name: work_of(contestants[name], task, x) for name in names}
        for _ in range(args.warmup):
            for work in works.values():
                timed(work, args.device)
        times[task] = {name: [] for name in names}
        for turn in range(args.repeats):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                times[task][name].append(timed(works[name], args.device))
    return times


@torch.no_grad()
def describe(contestant: Contestant, package: str, x: Tensor) -> dict[str, object]:
    contestant.model.eval()
    z, log_det = contestant.forward(x)
    back, log_det_back = contestant.inverse(z)
    root = package.split(".")[0]
    try:
        version = importlib.metadata.version(root)
    except importlib.metadata.PackageNotFoundError:
        version = getattr(importlib.import_module(root), "__version__", "unknown")
    return {
        "version": version,
        "parameters": sum(p.numel() for p in contestant.model.parameters() if p.requires_grad),
        "differs": contestant.differs,
        "round_trip_error": float((back - x).abs().max()),
        "log_det_error": float(((log_det + log_det_back) / log_det.abs().clamp_min(1)).abs().max()),
        "latent_deviation": float(z.std()),
    }


def summarize(times: dict[str, list[float]]) -> dict[str, dict[str, object]]:
    """Medians, and bilip's time over each rival's: below 1 bilip is faster."""
    ours = times["bilip"]
    return {
        name: {
            "median_ms": statistics.median(theirs),
            "bilip_over_this_of_medians": statistics.median(ours) / statistics.median(theirs),
            "bilip_over_this_median_of_ratios": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
            "times_ms": [round(t, 4) for t in theirs],
        }
        for name, theirs in times.items()
    }


def machine(args: argparse.Namespace) -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "tf32": False,
        "dtype": "float32",
    }


def show(report: dict) -> None:
    print(f"{report['environment']['device']}, batch {report['settings']['batch']}: median ms (bilip's time over it; below 1 bilip is faster)")
    print(f"{'':10}{'parameters':>12}{'round trip':>12}" + "".join(f"{task:>20}" for task in TASKS))
    for name, facts in report["models"].items():
        cells = (report["results"][task][name] for task in TASKS)
        row = "".join(f"{c['median_ms']:12.2f} ({c['bilip_over_this_median_of_ratios']:.3f})" for c in cells)
        print(f"{name:10}{facts['parameters']:12,}{facts['round_trip_error']:12.1e}{row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=16, help="blocks a level")
    parser.add_argument("--hidden", type=int, default=128, help="hidden channels of the nets")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="threads of torch on the CPU")
    parser.add_argument("--rivals", type=Path, help="a folder to import the rivals from, where they are not installed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    args = parser.parse_args()
    if args.rivals:
        sys.path.insert(0, str(args.rivals.resolve()))
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    warnings.filterwarnings("ignore", "torch.triangular_solve is deprecated")

    contestants = build(args)
    torch.manual_seed(args.seed)
    x = torch.randn(args.batch, *SHAPE, device=args.device)
    report = {
        "command": ["benchmarks/throughput.py", *sys.argv[1:]],
        "settings": {name: value for name, value in vars(args).items() if name not in ("out", "rivals")},
        "environment": machine(args),
        "models": {name: describe(c, BUILDERS[name][0], x) for name, c in contestants.items()},
        "results": {task: summarize(times) for task, times in measure(contestants, x, args).items()},
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


if __name__ == "__main__":
    main()
