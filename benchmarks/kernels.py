"""Where does the time of a captured training step go on a GPU?

The steps of `benchmarks/reversible.py`, each as one CUDA graph, replayed ten times for its time and once under torch's profiler for its
kernels. Graphs may run kernels side by side, so that the sum over kernels can exceed the time of the step.

    PYTHONPATH=src:benchmarks python benchmarks/kernels.py --batch 128 --out results/reversible/h200_kernels_128.json
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from _measure import about, command_line, release, write
from reversible import make_step, prepare

CONTENDERS = ("stored", "checkpoint", "bare", "reversible")
KINDS = {
    "one-pass kernels of the walk": ("_sums", "_shift", "_couple", "_uncouple"),
    "optimizer": ("multi_tensor_apply",),
    "convolutions": ("fprop", "dgrad", "wgrad", "winograd", "cudnn"),
    "matrix products": ("gemm", "cutlass", "splitK"),
    "sums": ("reduce_kernel",),
    "copies": ("Cat", "copy", "Memcpy", "memset", "Memset"),
}


def kind_of(kernel: str) -> str:
    names = (kind for kind, parts in KINDS.items() if any(part in kernel for part in parts))
    return next(names, "elementwise and other")


def measure(settings: dict, contender: str) -> dict:
    """Time, and kernels by kind."""
    step = make_step(settings, contender, settings["blocks"], settings["coupling"], "captured")
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    found = {"milliseconds": (time.perf_counter() - begin) * 100}
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    events = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return found | summarized([(e.name, e.time_range.elapsed_us() / 1e3) for e in events])


def summarized(kernels: list[tuple[str, float]]) -> dict:
    """Launches and milliseconds by kind."""
    count, spent = Counter(), Counter()
    for name, milliseconds in kernels:
        count[kind_of(name)] += 1
        spent[kind_of(name)] += milliseconds
    return {"kernels": {kind: {"launches": count[kind], "milliseconds": spent[kind]} for kind in sorted(spent)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 128), ("batch", 128), ("blocks", 16), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--coupling", default="affine", choices=["affine", "additive"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = {**vars(args), "device": "cuda", "loss": "classifier", "tf32": False, "threads": 1}
    prepare(settings)
    document = {
        "question": "where does the time of a captured step go?",
        "command": command_line(),
        "environment": about("cuda"),
        "precision": "float32, TF32 off",
        "seed": args.seed,
        "contenders": {},
    }
    for contender in CONTENDERS:
        document["contenders"][contender] = found = measure(settings, contender)
        print(f"{contender:12}{found['milliseconds']:8.2f} ms")
        release("cuda")
        write(args.out, document)


if __name__ == "__main__":
    main()
