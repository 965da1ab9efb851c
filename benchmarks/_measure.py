"""What the benchmarks share: their options, steps in turns, captured steps, bytes in use, and the JSON that is left."""

from __future__ import annotations

import argparse
import ctypes
import gc
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilip.record import environment, write_json

__all__ = [
    "Meter",
    "about",
    "capture",
    "command_line",
    "in_turns",
    "options",
    "release",
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
    return " ".join(["python", *kept])
