"""Does an audit on two processes give the record of one, in half of the time?

A Glow with random weights is audited by `bilip audit` in one process and under `torchrun` in several, one thread each, one command
after the other on the same cores. Times are those of the whole commands, with the start of Python; beside them stand the CPU seconds of
each process, which say how well the work is divided where the cores are busy with other work too. With `--device cuda` each
process takes a GPU of its own, as far as there are any.

    python benchmarks/audit_scale.py --out results/audit_scale/cpu.json
    python benchmarks/audit_scale.py --device cuda --processes 2 --out results/audit_scale/h200.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from _measure import about, command_line, options, write

MODEL = """
import atexit, os, pathlib, time
import torch
import bilip

name = os.environ.get("WORLD_SIZE", "1") + "-" + os.environ.get("RANK", "0") + ".seconds"
atexit.register(lambda: pathlib.Path(name).write_text(str(time.process_time())))

def flow():
    torch.manual_seed({seed})
    trunk = bilip.models.glow((3, {side}, {side}), levels=2, blocks={blocks}, hidden={hidden}, actnorm="identity")
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
        *("--budget", args.budget, "--seed", str(args.seed), "--device", args.device),
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


def main() -> None:
    parser = options(__doc__, processes=2, seed=0, side=16, blocks=4, hidden=32, samples=2000)
    parser.add_argument("--budget", default="standard")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "model_to_scale.py").write_text(MODEL.format(**vars(args)))
        x = np.random.default_rng(args.seed).uniform(size=(args.samples, 3, args.side, args.side))
        np.save(folder / "x.npy", x.astype("float32"))
        one, alone, whole = audited(folder, 1, args)
        several, together, parts = audited(folder, args.processes, args)
    different = [
        f"{a['probe']} on {a['source']}"
        for a, b in zip(one["measurements"], several["measurements"], strict=False)
        if a != b
    ]
    document = {
        "question": "does an audit on several processes give the record of one, in a part of the time?",
        "command": command_line(),
        "environment": about(args.device),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "processes": args.processes,
        "measurements": len(one["measurements"]),
        "equal": one == several,
        "different": different,
        "seconds": {"one process": round(alone, 2), "together": round(together, 2)},
        "ratio": round(together / alone, 3),
        "cpu_seconds": {"one process": round(whole[0], 2), "each": [round(part, 2) for part in parts]},
        "cpu_ratio": round(max(parts) / whole[0], 3),
    }
    print(json.dumps(document, indent=1))
    write(args.out, document)


if __name__ == "__main__":
    main()
