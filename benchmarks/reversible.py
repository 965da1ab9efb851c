"""What do memory-saving gradients cost in time, and what do they save in memory?

The model is the paper's CIFAR-10 classifier, additive or affine: 3 levels of [squeeze, blocks x (ActNorm, 1x1 convolution,
coupling)], 128 hidden channels, then BatchNorm, ReLU and a linear layer; a step is cross-entropy (`--loss flow`: negative log-
likelihood), backward pass and Adam. `--loss multiscale` takes the step of a Glow instead: half of the channels leave after each level, with
a Gaussian of their own. The contenders, all with the same weights and the same batch:

* stored: ordinary backpropagation.
* checkpoint, checkpoint sqrt: torch.utils.checkpoint around every block, and around the square root of their number.
* memcnn: MemCNN's InvertibleModuleWrapper around every block. It knows no log-determinant; with `--loss flow` that travels through
  its blocks as a second tensor, whose value the inverse leaves as it is: no gradient depends on it.
* reversible: bilip.Reversible, guard on. bare: the same with guard=None.
* penalised (where asked for): reversible with the bi-directional finite-difference penalty, original scaling. A penalty every K steps costs
  ((K - 1) plain + 1 with) / K. The paper reports 3.04, 1.45 and 1.26 for K = 1, 5, 10 over its own memory-saving base, which evaluates
  every net twice in the backward pass; the operation count here is 12 against 4 net passes.
* normflows (where asked for, with `--loss multiscale`): its `MultiscaleFlow` of `GlowBlock`s, with weights of its own.

revlib is not here: it splits the channels into two streams for good, and has no place for a 1x1 convolution or a squeeze.

Time: every repetition runs each contender once, in rotating order. Mode `captured` (CUDA) is the whole step in one CUDA graph for
every contender that can be captured; `--kernels` profiles one replay of each and says where its time goes. Graphs may run kernels side by
side, so that the sum over kernels can exceed the time of the step. Memory: in a process of its own, forward and backward pass without the
optimizer. `peak` is all that the two allocate beyond model and data. `activations` leaves out the gradients of the parameters, which every
method has to hold in the end: the larger of the peak of the forward pass and that of the backward pass less the gradients. On the CPU
these are resident bytes of the process, so that libraries and the allocator add some noise; on CUDA those of torch's allocator.

    python benchmarks/reversible.py --out results/reversible/cpu.json
    PYTHONPATH=src:.rivals python benchmarks/reversible.py --device cuda --batch 128 --hidden 128 --depths 4 16 64 \
        --modes eager captured --repeats 20 --out results/reversible/h200.json
    python benchmarks/reversible.py --device cuda --batch 512 --hidden 128 --depths 16 --couplings affine --modes captured \
        --contenders stored reversible penalised --out results/reversible/h200_penalty.json
    python benchmarks/reversible.py --device cuda --batch 64 --hidden 512 --depths 8 16 32 --couplings affine --loss multiscale \
        --contenders stored reversible normflows --modes eager captured --out results/throughput/glow_h200.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from _measure import Meter, about, in_turns, options, release, training_step, write
from bilip import Flow as Density
from bilip.blocks import Bijection, Chain, Squeeze
from bilip.models import Classifier, classifier, glow
from bilip.regularizers import FiniteDifference
from bilip.reversible import Reversible, angle

SHAPE, LEVELS = (3, 32, 32), 3
CONTENDERS = ("stored", "checkpoint", "checkpoint sqrt", "memcnn", "reversible", "bare")
OTHERS = ("penalised", "normflows")  # another loss, other weights: their gradients are not held against the stored one
FOREIGN = ("memcnn", "normflows")
PAPER = {"1": 3.04, "5": 1.45, "10": 1.26}
KINDS = {
    "one-pass kernels of the walk": ("_sums", "_shift", "_couple", "_uncouple"),
    "optimizer": ("multi_tensor_apply",),
    "convolutions": ("fprop", "dgrad", "wgrad", "winograd", "cudnn"),
    "matrix products": ("gemm", "cutlass", "splitK"),
    "sums": ("reduce_kernel",),
    "copies": ("Cat", "copy", "Memcpy", "memset", "Memset"),
}
Flow = Callable[[Tensor], tuple[Tensor, Tensor | None]]  # to the latent and, with the flow's loss, the log-determinant


# ---- the contenders


def make_model(settings: Mapping[str, Any], blocks: int, coupling: str) -> tuple[Classifier, Tensor, Tensor]:
    """The classifier, a batch and its labels, the same ones in every process."""
    torch.manual_seed(settings["seed"])
    trunk = glow(SHAPE, levels=LEVELS, blocks=blocks, hidden=settings["hidden"], coupling=coupling)
    model = classifier(trunk).to(settings["device"]).train()
    generator = torch.Generator().manual_seed(settings["seed"])
    x = torch.randn(settings["batch"], *SHAPE, generator=generator).to(settings["device"])
    labels = torch.randint(10, (settings["batch"],), generator=generator).to(settings["device"])
    with torch.no_grad():
        wake(trunk, generator)
        trunk(x[:16])  # starts ActNorm
    return model, x, labels


def wake(model: nn.Module, generator: torch.Generator) -> None:
    """Nothing may be trivial: what starts at zero gets small numbers."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.copy_(0.01 * torch.randn(parameter.shape, generator=generator))


def make_multiscale(settings: Mapping[str, Any], contender: str, blocks: int, coupling: str) -> tuple[Any, Tensor]:
    """A Glow that gives up half of its channels after each level, and a batch."""
    torch.manual_seed(settings["seed"])
    if contender == "normflows":
        model: Any = normflows_glow(blocks, settings["hidden"])
    else:
        trunk = glow(
            SHAPE,
            levels=LEVELS,
            blocks=blocks,
            hidden=settings["hidden"],
            coupling=coupling,
            factor_out=True,
            learned_prior=True,
        )
        model = Density(trunk)
    generator = torch.Generator().manual_seed(settings["seed"])
    x = (torch.rand(settings["batch"], *SHAPE, generator=generator) - 0.5).to(settings["device"])
    model.to(settings["device"])
    with torch.no_grad():
        model.log_prob(x, None)  # starts ActNorm
        wake(model, generator)
    if contender in ("reversible", "bare"):
        guard = {} if contender == "reversible" else {"guard": None}
        model = Density(Reversible(model.bijection, **guard), model.base)
    return model, x


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


def blocks_of(trunk: Chain) -> list[Chain]:
    """ActNorm, 1x1 convolution and coupling together; a squeeze stands alone."""
    groups: list[list[Bijection]] = []
    for part in trunk:
        if isinstance(part, Squeeze) or not groups or len(groups[-1]) == 3 or isinstance(groups[-1][0], Squeeze):
            groups.append([])
        groups[-1].append(part)
    return [Chain(*group) for group in groups]


def run(part: Bijection, x: Tensor, *, log_det: bool) -> tuple[Tensor, Tensor | None]:
    return part.forward_and_log_det(x) if log_det else (part(x), None)


def through(maps: Sequence[Flow], x: Tensor, *, log_det: bool) -> tuple[Tensor, Tensor | None]:
    total = x.new_zeros(len(x)) if log_det else None
    for each in maps:
        x, log = each(x)
        total = log if total is None or log is None else total + log
    return x, total


def saved(inner: Flow, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return checkpoint(inner, x, use_reentrant=False, preserve_rng_state=False)


class ForMemCNN(nn.Module):
    """What MemCNN wraps: forward and inverse, of x, or of x and a log-determinant that adds up."""

    def __init__(self, block: Bijection) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, total: Tensor | None = None):
        if total is None:
            return self.block(x)
        z, log_det = self.block.forward_and_log_det(x)
        return z, total + log_det

    def inverse(self, z: Tensor, total: Tensor | None = None):
        return self.block.inverse(z) if total is None else (self.block.inverse(z), total.clone())


def make_flow(contender: str, trunk: Chain, *, log_det: bool) -> Flow:
    """The trunk as this contender runs it."""
    if contender == "stored":
        return partial(run, trunk, log_det=log_det)
    if contender in ("reversible", "bare"):
        wrapped = Reversible(trunk) if contender == "reversible" else Reversible(trunk, guard=None)
        return partial(run, wrapped, log_det=log_det)
    blocks = blocks_of(trunk)
    if contender == "memcnn":
        from memcnn import InvertibleModuleWrapper

        parts = [b if isinstance(b[0], Squeeze) else InvertibleModuleWrapper(ForMemCNN(b)) for b in blocks]

        def flow(x: Tensor) -> tuple[Tensor, Tensor | None]:
            total = x.new_zeros(len(x)) if log_det else None
            for part in parts:
                if total is None or isinstance(part, Chain):
                    x = part(x)
                else:
                    x, total = part(x, total)
            return x, total

        return flow
    size = 1 if contender == "checkpoint" else math.isqrt(len(blocks))
    maps = [partial(run, block, log_det=log_det) for block in blocks]
    segments = [partial(through, maps[k : k + size], log_det=log_det) for k in range(0, len(maps), size)]
    return partial(through, [partial(saved, segment) for segment in segments], log_det=log_det)


def make_loss(settings: Mapping[str, Any], contender: str, blocks: int, coupling: str):
    """The model, its loss as a function without arguments, and its map."""
    if settings["loss"] == "multiscale":
        density, x = make_multiscale(settings, contender, blocks, coupling)
        flow = lambda x: (density.log_prob(x, None), None)  # noqa: E731
        return density, lambda: -flow(x)[0].mean() / math.prod(SHAPE), flow
    model, x, labels = make_model(settings, blocks, coupling)
    likelihood = settings["loss"] == "flow"
    penalty, inner = FiniteDifference(weight=1e-4, scaling="original"), Reversible(model.trunk)
    if penalised := contender == "penalised":
        flow = partial(run, inner, log_det=likelihood)
    else:
        flow = make_flow(contender, model.trunk, log_det=likelihood)  # type: ignore[arg-type]

    def loss() -> Tensor:
        z, log_det = flow(x)
        more = penalty(inner, x, latent=(z, log_det), step=0) if penalised else 0.0
        if log_det is not None:
            return (0.5 * z.flatten(1).square().sum(1) - log_det).mean() / math.prod(SHAPE) + more
        return nn.functional.cross_entropy(model.head(z), labels) + more

    return model, loss, flow


# ---- time


def make_step(settings: Mapping[str, Any], contender: str, blocks: int, coupling: str, mode: str) -> Callable[[], None]:
    """A whole training step."""
    model, loss, _ = make_loss(settings, contender, blocks, coupling)
    parameters = [p for p in model.parameters() if settings["loss"] != "flow" or not _in_head(model, p)]
    return training_step(loss, parameters, settings["device"], mode)


def _in_head(model: Classifier, parameter: Tensor) -> bool:
    return any(parameter is p for p in model.head.parameters())


def kernels_of(step: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Launches and milliseconds of one replay, by kind of kernel."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    launches, spent = Counter(), Counter()
    for event in record.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            names = (kind for kind, parts in KINDS.items() if any(part in event.name for part in parts))
            kind = next(names, "elementwise and other")
            launches[kind] += 1
            spent[kind] += event.time_range.elapsed_us() / 1e3
    return {kind: {"launches": launches[kind], "milliseconds": spent[kind]} for kind in sorted(spent)}


def penalty_every(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What the penalty costs every K steps, computed from the times of steps with and without it."""
    middle = {name: statistics.median(each) for name, each in times.items()}
    mean = {k: ((int(k) - 1) * middle["reversible"] + middle["penalised"]) / int(k) for k in PAPER}
    over = {f"over_{base}": {k: value / middle[base] for k, value in mean.items()} for base in ("reversible", "stored")}
    return over | {"paper": PAPER}


# ---- memory


def measure_memory(settings: Mapping[str, Any], contender: str, blocks: int, coupling: str) -> dict[str, int]:
    """Bytes of one forward and backward pass; run in a process of its own."""
    meter = Meter(settings["device"])
    model, loss, flow = make_loss(settings, contender, blocks, coupling)
    guarded = [m for m in getattr(flow, "args", ()) if isinstance(m, Reversible)]
    states = [each.guard_state() for each in guarded]
    for _ in range(2):  # libraries load, workspaces come to stay, convolutions are chosen
        if settings["device"] == "cuda":
            loss().backward()
        else:  # little memory, so that the allocator has nothing to hand out again
            flow(torch.randn(2, *SHAPE))[0].sum().backward()
        model.zero_grad()
    for each, state in zip(guarded, states, strict=True):
        each.load_guard_state(state)  # two samples may drift where a batch does not: their anchors are not the batch's
    release(settings["device"])
    meter.reset()
    before = meter.now()
    value = loss()
    forward = meter.peak() - before
    meter.reset()
    value.backward()
    backward = meter.peak() - before
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None)
    return {
        "peak": max(forward, backward),
        "activations": max(forward, backward - gradients),
        "forward_peak": forward,
        "backward_peak": backward,
        "gradients": gradients,
    }


def work(task: Mapping[str, Any]) -> dict[str, Any]:
    """What a subprocess does."""
    prepare(task["settings"])
    if task["kind"] == "capture":
        make_step(task["settings"], task["contenders"][0], task["blocks"], task["coupling"], "captured")()
        torch.cuda.synchronize()
        return {"captured": True}
    found = {}
    for contender in task["contenders"]:
        found[contender] = measure_memory(task["settings"], contender, task["blocks"], task["coupling"])
        release(task["settings"]["device"])
    return found


def in_subprocess(**task: Any) -> dict[str, Any]:
    """Run `work` there; what went wrong, if it did."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--work", json.dumps(task)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def memory(settings: Mapping[str, Any], contenders: Sequence[str], blocks: int, coupling: str) -> dict[str, Any]:
    """By contender. On the CPU each has a process of its own; on CUDA torch counts exactly, and they share one."""
    ask = partial(in_subprocess, kind="memory", settings=dict(settings), blocks=blocks, coupling=coupling)
    if settings["device"] == "cuda":
        together = ask(contenders=list(contenders))
        return together if "error" not in together else dict.fromkeys(contenders, together)
    return {name: (one := ask(contenders=[name])).get(name, one) for name in contenders}


# ---- the run


def gradient_angles(settings: Mapping[str, Any], contenders: Sequence[str], blocks: int, coupling: str):
    """Is it the same gradient? Radians from the stored one."""
    found = {}
    for name in (name for name in contenders if name not in OTHERS):
        model, loss, _ = make_loss(settings, name, blocks, coupling)
        loss().backward()
        found[name] = [p.grad for p in model.parameters() if p.grad is not None]
    return {name: angle(gradient, found["stored"]) for name, gradient in found.items()}


def available(settings: Mapping[str, Any], wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """The contenders that can be imported, and those of them that can be captured."""
    contenders = list(wanted)
    for name in FOREIGN:
        if name in contenders and importlib.util.find_spec(name) is None:
            contenders.remove(name)
            print(f"{name} is left out: it is not installed")
    capturable = list(contenders)
    for name in FOREIGN if "captured" in settings["modes"] else ():
        if name in contenders:
            task = {"kind": "capture", "settings": settings, "blocks": 1, "coupling": "affine", "contenders": [name]}
            answer = in_subprocess(**task)
            if "error" in answer:
                capturable.remove(name)
                print(f"{name} cannot be captured: {answer['error']}")
    return contenders, capturable


def measure(settings: Mapping[str, Any], blocks: int, coupling: str, contenders: list[str], capturable: list[str]):
    """One row: memory, angles and times of all contenders."""
    row: dict[str, Any] = {"depth": f"{LEVELS}x{blocks}", "coupling": coupling}
    row["memory"] = memory(settings, contenders, blocks, coupling)
    row["gradient_angle"] = gradient_angles(settings, contenders, blocks, coupling)
    release(settings["device"])
    row["time"] = {}
    for mode in settings["modes"]:
        names = capturable if mode == "captured" else contenders
        steps = {name: make_step(settings, name, blocks, coupling, mode) for name in names}
        times = in_turns(steps, device=settings["device"], repeats=settings["repeats"], warmup=settings["warmup"])
        if mode == "captured" and settings["kernels"]:
            row["kernels"] = {name: kernels_of(step) for name, step in steps.items()}
        del steps
        release(settings["device"])
        row["time"][mode] = {
            name: {
                "median_ms": statistics.median(each),
                "over_stored": statistics.median(a / b for a, b in zip(each, times["stored"], strict=True)),
                "times_ms": [round(ms, 3) for ms in each],
            }
            for name, each in times.items()
        }
        if {"penalised", "reversible"} <= set(times):
            row.setdefault("penalty_every", {})[mode] = penalty_every(times)
    return row


def show(row: Mapping[str, Any]) -> None:
    modes = list(row["time"])
    print(f"\n{row['coupling']} {row['depth']}")
    print(f"{'':16}{'activations':>12}{'peak':>10}{'angle':>10}" + "".join(f"{mode:>20}" for mode in modes))
    for name, facts in row["memory"].items():
        cells = [row["time"][mode].get(name) for mode in modes]
        bytes_ = [f"{facts[key] / 2**20:.1f}" if key in facts else "?" for key in ("activations", "peak")]
        times = "".join(f"{c['median_ms']:11.1f} ms {c['over_stored']:4.2f}x" if c else f"{'-':>20}" for c in cells)
        print(
            f"{name:16}{bytes_[0]:>8} MiB{bytes_[1]:>10}{row['gradient_angle'].get(name, math.nan):10.1e}{times}",
            flush=True,
        )


def prepare(settings: Mapping[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings["tf32"]
    torch.backends.cudnn.benchmark = True
    if settings["device"] == "cpu":
        torch.set_num_threads(settings["threads"])
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # memcnn


def main() -> None:
    parser = options(__doc__, hidden=32, batch=8, repeats=7, warmup=2, seed=0, threads=1)
    parser.add_argument("--loss", choices=("classifier", "flow", "multiscale"), default="classifier")
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 16], help="blocks in each of the 3 levels")
    parser.add_argument("--couplings", nargs="+", default=["additive", "affine"], choices=("additive", "affine"))
    parser.add_argument("--modes", nargs="+", default=["eager"], choices=("eager", "captured"))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=(*CONTENDERS, *OTHERS))
    parser.add_argument("--tf32", action="store_true", help="let CUDA round the inputs of products to TF32")
    parser.add_argument("--kernels", action="store_true", help="say where the time of captured steps goes")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.work)))
        return
    if "captured" in args.modes and args.device != "cuda":
        parser.error("--modes captured needs --device cuda")
    if args.loss == "multiscale" and (odd := set(args.contenders) - {"stored", "reversible", "bare", "normflows"}):
        parser.error(f"--loss multiscale is not for {', '.join(sorted(odd))}")
    if "normflows" in args.contenders and (args.loss != "multiscale" or args.couplings != ["affine"]):
        parser.error("--contenders normflows needs --loss multiscale --couplings affine")
    if "stored" not in args.contenders:
        args.contenders.insert(0, "stored")

    settings = {name: value for name, value in vars(args).items() if name not in ("out", "work")}
    prepare(settings)
    contenders, capturable = available(settings, args.contenders)
    report = {
        "command": "python benchmarks/reversible.py " + " ".join(map(option, settings, settings.values())).strip(),
        "settings": settings,
        "environment": about(args.device),
        "precision": "float32, TF32 " + ("on" if args.tf32 else "off"),
        "results": [],
    }
    for coupling in args.couplings:
        for blocks in args.depths:
            row = measure(settings, blocks, coupling, contenders, capturable)
            report["results"].append(row)
            show(row)
            write(args.out, report)  # after every row: a run that is cut short keeps what it has


def option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else ""
    return f"--{name} " + (
        " ".join(f"'{v}'" if " " in str(v) else str(v) for v in value) if isinstance(value, list) else str(value)
    )


if __name__ == "__main__":
    main()
