"""How long does an audit take, and does it give the same record on several processes, in a part of the time?

Each flow is trained briefly, then audited whole, with every probe, on one data source and two of noise. 8-D flows, a Glow of 3 levels x 4
blocks of width 64 at 3x32x32 and 784-D coupling flows stand at `quick`; the trunk of the paper's 3x16 classifier of width 128, trained
as a classifier, at `standard`, on a GPU. Times are those of the calls of `bilip.audit`; run it on an idle machine.

With `--processes`, a Glow with random weights is audited by `bilip audit` in one process and under `torchrun` in several, one thread each,
one command after the other on the same cores. Times are those of the whole commands, with the start of Python; beside them stand the CPU
seconds of each process, which say how well the work is divided where the cores are busy with other work too. With `--device cuda` each
process takes a GPU of its own, as far as there are any.

    PYTHONPATH=src:benchmarks python benchmarks/audit_time.py --threads 2 --out results/audit_time/cpu.json
    PYTHONPATH=src:benchmarks python benchmarks/audit_time.py --device cuda --images x.npy --out results/audit_time/h200.json
    PYTHONPATH=src:benchmarks python benchmarks/audit_time.py --processes 2 --out results/audit_scale/cpu.json

An audit on a GPU waits for the host that starts its kernels. Several processes share one GPU, and the audit, as they share several:

    PYTHONPATH=src:benchmarks torchrun --nproc-per-node 3 benchmarks/audit_time.py --device cuda --images x.npy --out three.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import bilip
from _measure import about, command_line, options, wait, write
from flow_zoo.flows import FLOWS, Spec, nflows_coupling, nflows_maf, real_nvp, train, zuko

OOD = ["uniform", "gaussian"]


@dataclass(frozen=True)
class Case:
    """What is audited: `make(steps)` trains it and gives the model and its data."""

    name: str
    make: Callable[[int], tuple[Any, Tensor]]
    limit: float  # seconds that it may take
    budget: str = "quick"
    device: str = "cpu"


# ---- flows of the zoo and others of its kind


def _spec(name: str, data: str, build: Callable[[], Any], **options: Any) -> Spec:
    return Spec(name, ("",), data, build, **options)


def of_the_zoo(spec: Spec, limit: float) -> Case:
    def make(steps: int) -> tuple[Any, Tensor]:
        view, _ = train(spec, steps=steps)
        return view.audited(), spec.set.draw(25_600, seed=2)[0]

    return Case(spec.name, make, limit)


EIGHT = [
    _spec("bilip-affine-8", "table", lambda: real_nvp(8, blocks=8)),
    _spec("bilip-additive-8", "table", FLOWS["bilip-additive-8"].build),
    _spec("nflows-affine-8", "table", lambda: nflows_coupling("affine", 8, 6, 64)),
    _spec("nflows-rqs-8", "table", lambda: nflows_coupling("rqs", 8, 4, 64, tails="linear", tail_bound=5.0)),
    _spec("nflows-maf-8", "table", lambda: nflows_maf(8, 5, 64)),
    _spec("zuko-realnvp-8", "table", lambda: zuko("RealNVP", 8, transforms=6)),
    _spec("zuko-maf-8", "table", lambda: zuko("MAF", 8, transforms=5)),
    _spec("zuko-nsf-8", "table", lambda: zuko("NSF", 8, transforms=3)),
]
IMAGES = [FLOWS[name] for name in ("nflows-affine-784", "normflows-exp-784", "freia-allinone-784", "zuko-realnvp-784")]
IMAGES += [
    _spec("bilip-affine-784", "flat images", lambda: real_nvp(784, blocks=6, hidden=(256,)), batch=128),
]


# ---- image models


def pictures(count: int, seed: int = 0) -> Tensor:
    """Smooth random images of 3x32x32 in [0, 1), with the noise of dequantization, where none are given."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    fine = torch.nn.functional.interpolate(coarse, (32, 32), mode="bicubic", align_corners=True).clamp(0, 1)
    return ((255 * fine).floor() + torch.rand(fine.shape, generator=generator)) / 256


def glow_case(images: Tensor) -> Case:
    def make(steps: int) -> tuple[Any, Tensor]:
        flow = bilip.Flow(bilip.models.glow((3, 32, 32), levels=3, blocks=4, hidden=64))
        optimizer = torch.optim.Adam(flow.parameters(), 1e-4)
        for step in range(max(1, min(steps, 20))):
            x = images[32 * step :][:32]
            loss = -flow.log_prob(x).mean() / x[0].numel()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return flow.eval(), images

    return Case("bilip-glow-3x4-64", make, 30)


def trunk_case(images: Tensor, labels: Tensor, device: str) -> Case:
    def make(steps: int) -> tuple[Any, Tensor]:
        trunk = bilip.models.glow((3, 32, 32), levels=3, blocks=16, hidden=128)
        model = bilip.models.classifier(trunk).to(device)
        x, y = images.to(device), labels.to(device)
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
        for _ in range(max(1, min(steps, 40))):
            rows = torch.randint(0, len(x), (128,), device=device)
            loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return _same_everywhere(trunk.eval()), images

    return Case("bilip-classifier-trunk-3x16-128", make, 60, budget="standard", device=device)


def _same_everywhere(model: torch.nn.Module) -> torch.nn.Module:
    """The model with the weights of the first process: a GPU does not train to the same bit twice."""
    if dist.is_initialized():
        weights = [{name: value.cpu() for name, value in model.state_dict().items()}]
        dist.broadcast_object_list(weights)
        model.load_state_dict(weights[0])
    return model


def read_images(path: Path | None) -> tuple[Tensor, Tensor]:
    """Images and ten classes: uint8 (N, 32, 32, 3) from `.npy`, or `x` and `y` of an `.npz`; else drawn, classes by brightness."""
    y = None
    if path is None:
        x = pictures(4096)
    else:
        found = np.load(path)
        pixels, y = (found, None) if isinstance(found, np.ndarray) else (found["x"], found.get("y"))
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (32, 32, 3):
            raise SystemExit(f"--images {path}: expected uint8 (N, 32, 32, 3), got {pixels.dtype} {pixels.shape}.")
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
        x = (x + torch.rand(x.shape, generator=torch.Generator().manual_seed(0))) / 256
    level = x.mean((1, 2, 3))
    classes = torch.bucketize(level, level.quantile(torch.linspace(0.1, 0.9, 9)))
    return x, classes if y is None else torch.from_numpy(np.asarray(y)).long()


def cases(args: argparse.Namespace) -> list[Case]:
    images, labels = read_images(args.images)
    if args.device != "cpu":
        return [trunk_case(images, labels, args.device)]
    return [
        *(of_the_zoo(spec, 10) for spec in EIGHT),
        glow_case(images),
        *(of_the_zoo(spec, 60) for spec in IMAGES),
    ]


def measure(case: Case, args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """One row of the table: seconds of the audit, those of each probe, and what the verdicts are.

    `keep` is given the row so far whenever a probe has ended, so that an audit that is stopped leaves its part.
    """
    torch.manual_seed(0)
    model, x = case.make(args.steps)
    wait(case.device)
    if dist.is_initialized():
        dist.barrier()
    load, started, used = os.getloadavg()[0], time.perf_counter(), time.process_time()
    rank = dist.get_rank() if dist.is_initialized() else None
    spent: dict[str, float] = {}  # by this process
    last, since = "start", started
    row: dict[str, Any] = {
        "name": case.name,
        "budget": case.budget,
        "device": case.device,
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "dimension": x[0].numel(),
        "seconds": math.nan,
        "cpu_seconds": math.nan,  # of all threads; on a busy machine the fairer number
        "limit": case.limit,
        "kept": False,
        "ended": False,
        "load_before": round(load, 2),
    }

    def so_far() -> dict[str, Any]:
        row["seconds"] = round(time.perf_counter() - started, 2)
        row["cpu_seconds"] = round(time.process_time() - used, 2)
        row["probes"] = {name: round(value, 2) for name, value in sorted(spent.items(), key=lambda pair: -pair[1])}
        return row

    def progress(text: str, share: float) -> None:
        nonlocal last, since
        if text == last:
            return
        now = time.perf_counter()
        probe = last.split(" ")[0]
        spent[probe] = spent.get(probe, 0.0) + now - since
        print(f"{'' if rank is None else rank:3} {last:40s} {now - since:8.2f} s", flush=True)
        last, since = text, now
        keep(so_far())

    record = bilip.audit(
        model, {"test": x}, ood=OOD, budget=case.budget, progress=progress, distributed=dist.is_initialized()
    )
    row = so_far() | {
        "ended": True,
        "verdicts": {use: verdict.status.value for use, verdict in record.verdicts.items()},
    }
    row["kept"] = row["seconds"] <= case.limit
    return row


# ---- several processes

MODEL = """
import atexit, os, pathlib, time
import torch
import bilip

name = os.environ.get("WORLD_SIZE", "1") + "-" + os.environ.get("RANK", "0") + ".seconds"
atexit.register(lambda: pathlib.Path(name).write_text(str(time.process_time())))

def flow():
    torch.manual_seed(0)
    trunk = bilip.models.glow((3, SIDE, SIDE), levels=2, blocks=BLOCKS, hidden=HIDDEN, actnorm="identity")
    with torch.no_grad():
        for p in trunk.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return bilip.Flow(trunk)
"""


def audited(folder: Path, processes: int, args: argparse.Namespace) -> tuple[dict, float, list[float]]:
    """The record without its times, the seconds of the command, and the CPU seconds of each process."""
    out = folder / f"{processes}.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [
        *(torchrun if processes > 1 else []),
        *("-m", "bilip", "audit", "model_to_scale:flow", "--data", "x.npy", "--out", str(out)),
        *("--budget", "standard", "--device", args.device),
    ]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"the audit on {processes} processes failed:\n{done.stderr[-2000:]}")
    record = json.loads(out.read_text())
    del record["created"], record["settings"]["seconds"], record["settings"]["command"]
    used = [float((folder / f"{processes}-{rank}.seconds").read_text()) for rank in range(processes)]
    return record, seconds, used


def on_several(args: argparse.Namespace) -> dict[str, Any]:
    """The record of one process held against that of several, and what both took."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        model = MODEL
        for name in ("side", "blocks", "hidden"):
            model = model.replace(name.upper(), str(getattr(args, name)))
        (folder / "model_to_scale.py").write_text(model)
        np.save(
            folder / "x.npy", np.random.default_rng(0).uniform(size=(2000, 3, args.side, args.side)).astype("float32")
        )
        one, alone, whole = audited(folder, 1, args)
        several, together, parts = audited(folder, args.processes, args)
    pairs = zip(one["measurements"], several["measurements"], strict=False)
    return {
        "question": "does an audit on several processes give the record of one, in a part of the time?",
        "command": command_line(),
        "environment": about(args.device),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "processes": args.processes,
        "measurements": len(one["measurements"]),
        "equal": one == several,
        "different": [f"{a['probe']} on {a['source']}" for a, b in pairs if a != b],
        "seconds": {"one process": round(alone, 2), "together": round(together, 2)},
        "ratio": round(together / alone, 3),
        "cpu_seconds": {"one process": round(whole[0], 2), "each": [round(part, 2) for part in parts]},
        "cpu_ratio": round(max(parts) / whole[0], 3),
    }


def main() -> None:
    parser = options(__doc__, threads=2, steps=200)  # cuda: the trunk of the classifier alone, at standard
    parser.add_argument("--images", type=Path, help="uint8 images (N, 32, 32, 3), .npy or .npz with x and y")
    parser.add_argument("--only", action="append", metavar="PART", help="cases whose name holds this")
    parser.add_argument("--side", type=int, default=32, help="of the images, with --processes")
    parser.add_argument("--blocks", type=int, default=8, help="of a level, with --processes")
    parser.add_argument("--hidden", type=int, default=64, help="width of the nets, with --processes")
    parser.add_argument("--processes", type=int, help="compare one process with so many, and nothing else")
    args = parser.parse_args()
    if args.processes:
        document = on_several(args)
        print(json.dumps(document, indent=1))
        write(args.out, document)
        return
    torch.set_num_threads(args.threads)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    warnings.simplefilter("ignore")
    wanted = [c for c in cases(args) if not args.only or any(part in c.name for part in args.only)]
    if not wanted:
        raise SystemExit(f"--only {' '.join(args.only)}: there is no such case.")
    document: dict[str, Any] = {
        "question": "how long does an audit take, with one data source and two of noise?",
        "command": command_line("--images"),
        "environment": about(args.device),
        "steps": args.steps,
        "cases": [],
    }
    for case in wanted:
        others = list(document["cases"])

        def keep(row: dict[str, Any], others: list[dict[str, Any]] = others) -> None:
            document["cases"] = [*others, row]
            if first:
                write(args.out, document)

        row = measure(case, args, keep)
        keep(row)
        if first:
            print(f"{row['name']:34s} {row['budget']:9s} {row['seconds']:8.1f} s of {row['limit']:.0f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
