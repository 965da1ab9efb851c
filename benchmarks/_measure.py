"""What the benchmarks share: their options, steps in turns, captured steps, bytes in use, the JSON that is left, and searches in several
processes.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import gc
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from bilip.record import environment, write_json

__all__ = [
    "Found",
    "Meter",
    "about",
    "capture",
    "command_line",
    "cpu_name",
    "in_turns",
    "options",
    "release",
    "search",
    "search_main",
    "training_step",
    "wait",
    "write",
]

Step = Callable[[], object]


def options(
    text: str | None, *, device: str | None = "cpu", out: str | None = None, **numbers: int
) -> argparse.ArgumentParser:
    """A parser that shows the text: whole numbers with their defaults, `--device` unless it is None, and where the JSON goes."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    if device is not None:
        parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--out", type=Path, default=out and Path(out), help="write the numbers here, as JSON")
    return parser


# ---- time


def wait(device: str) -> None:
    """Until the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def in_turns(
    steps: Mapping[str, Step],
    *,
    device: str,
    repeats: int,
    warmup: int = 3,
    shown: Callable[[range], Iterable[int]] = iter,
) -> dict[str, list[float]]:
    """Milliseconds of each repetition of each step. In every repetition each runs once, in rotating order, so that a slow moment of the
    machine falls on all of them; the first `warmup` do not count.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for turn in shown(range(-warmup, repeats)):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            wait(device)
            begin = time.perf_counter()
            steps[name]()
            wait(device)
            if turn >= 0:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def training_step(
    loss: Callable[[], Tensor], parameters: Iterable[Tensor], device: str, mode: str
) -> Callable[[], None]:
    """Gradients and Adam, as it comes or, in the mode `captured`, as one CUDA graph."""
    capturable = {"capturable": True} if device == "cuda" else {}
    optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=True, **capturable)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss().backward()
        optimizer.step()

    return capture(step, optimizer) if mode == "captured" else step


def capture(step: Callable[[], None], optimizer: torch.optim.Optimizer, *, warmup: int = 3) -> Callable[[], None]:
    """The step as one CUDA graph; its inputs are static buffers."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            step()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()

    replay.keep = step  # type: ignore[attr-defined]  # the tensors of the graph live as long as it
    return replay


# ---- memory


def release(device: str) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    elif platform.system() == "Linux":
        ctypes.CDLL(None).malloc_trim(0)


class Meter:
    """Bytes in use, and their peak since the last reset: of torch on CUDA, of the process on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device

    def now(self) -> int:
        return torch.cuda.memory_allocated() if self.device == "cuda" else self._status("VmRSS")

    def reset(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else self._status("VmHWM")

    @staticmethod
    def _status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


# ---- the file


def about(device: str) -> dict[str, Any]:
    """The environment, the threads of a CPU, and the GPU where there is one."""
    used = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {"threads": torch.get_num_threads()}
    return environment() | used


def cpu_name() -> str:
    """The processor, as the system calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def write(path: Path | None, document: Mapping[str, Any]) -> None:
    """Write the numbers as JSON, all or nothing; nowhere without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, document)


def command_line(*hidden: str) -> str:
    """The command that runs, without options that say where files lie on this machine: `--out`, and those given."""
    words, kept = iter(sys.argv), []
    for word in words:
        if word.split("=")[0] not in ("--out", *hidden):
            kept.append(word)
        elif "=" not in word:
            next(words, None)
    several = os.environ.get("LOCAL_WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    return " ".join([f"torchrun --nproc-per-node {several}" if several else "python", *kept])


# ---- searches for counterexamples


@dataclass
class Found:
    """What some cases gave: numbers that add up, counters, how close it was at most, and what was found."""

    counted: ClassVar[str]  # the number that is searched up to
    closest: float = -math.inf
    findings: list[dict] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many comparisons they were."""
        return getattr(self, self.counted)

    def add(self, other: Self) -> None:
        """Take the results of other cases in."""
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, max(mine, theirs) if name == "closest" else mine + theirs)


F = TypeVar("F", bound=Found)


def search(
    run: Callable[[Any], F],
    tasks: Iterable[Any],
    total: F,
    enough: int,
    *,
    jobs: int = 1,
    progress: Callable[[F], None] = lambda found: None,
) -> F:
    """Run tasks until there are enough comparisons; the same ones whatever the number of processes."""
    left = iter(tasks)
    if jobs == 1:
        while total.count < enough:
            total.add(run(next(left)))
            progress(total)
        return total
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = collections.deque(pool.submit(run, next(left)) for _ in range(4 * jobs))
        while total.count < enough:
            total.add(waiting.popleft().result())
            progress(total)
            waiting.append(pool.submit(run, next(left)))
        for task in waiting:
            task.cancel()
    return total


def search_main(
    what: str,
    question: str,
    text: str | None,
    out: str,
    find: Callable[..., F],
    describe: Callable[[F], dict[str, Any]],
    versions: dict[str, str] | None = None,
) -> int:
    """The command line of a search; the exit code is 1 if something was found.

    Args:
        what: What is counted, as in comparisons.
        question: The question, for the file.
        text: What `--help` shows.
        out: The file that is written by default.
        find: Called with the number, `seed`, `jobs` and `progress`.
        describe: What the file says of the results.
        versions: Of libraries that matter beside torch.
    """
    parser = options(text, device=None, out=out, seed=0)
    parser.add_argument(f"--{what}", dest="number", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    args = parser.parse_args()
    start, shown, told = time.time(), 0.0, 0

    def progress(found: F) -> None:
        nonlocal shown, told
        if time.time() - shown > 10:
            for finding in found.findings[told:]:
                print(finding)
            shown, told = time.time(), len(found.findings)
            print(f"{found.count} {what}, {told} findings, {shown - start:.0f} s", flush=True)

    found = find(args.number, seed=args.seed, jobs=args.jobs, progress=progress)
    script = Path(sys.argv[0]).name
    document = {
        "question": question,
        "command": f"python benchmarks/{script} --{what} {args.number} --seed {args.seed}",
        "environment": about("cpu") | (versions or {}),
        "seconds": round(time.time() - start),
        "jobs": args.jobs,
        what: found.count,
        **describe(found),
        "found": len(found.findings),
        "findings": found.findings[:200],
    }
    write(args.out, document)
    print(f"{found.count} {what} in {document['seconds']} s: {len(found.findings)} findings; wrote {args.out}")
    for finding in found.findings[:20]:
        print(finding)
    return 1 if found.findings else 0
