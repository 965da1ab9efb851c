"""Did a change of the house change anything else? Numbers of two checkouts, held against each other bit for bit.

`--write` records, with the checkout it runs in: bounds of every block of the catalogue over several domains, reports and gradients of
guarded memory-saving steps, audit records of the demo's flows, and small runs of the recipes. `--against` does the same and lists what is
not equal; seconds, dates, versions and the bytes of the interpreter's addresses are left out. Exit code 1 where something differs.

    git worktree add ../before d4499dc
    (cd ../before && PYTHONPATH=src:tests python ../main/benchmarks/unchanged.py --write /tmp/before.json)
    PYTHONPATH=src:tests python benchmarks/unchanged.py --against /tmp/before.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bilip

BOXES = {"all": None, "4": 4.0, "1e3": 1e3, "1e-6": 1e-6}
MOVING = re.compile(
    r"(^|_)(seconds|ms|time|times|created|date|environment|command|device|load|path|version|duration)(_|$)"
)
DATA = {"images": 600, "test": 200}
SMALL = {  # of each recipe: parts and settings that end within seconds
    "coupling_depth": ("", ()),
    "checkerboard": ("", ("steps=6", "residual_steps=4")),
    "regression_2d": ("", ("steps=6",)),
    "cifar10_classifier": (
        "affine-conv1x1-none,affine-conv1x1-fd,additive-conv1x1-nf,affine-conv1x1-guarded",
        ("epochs=1", "images=256", "test=200"),
    ),
    "cifar10_flow": (
        "affine,residual",
        ("steps=6", "residual_steps=4", "looks=2", "residual_looks=2", "images=256", "test=64"),
    ),
    "flow_gan": ("additive-mle,affine-flowgan", ("steps=4", "looks=2", "images=256", "test=64", "samples=100")),
    "dequantization_attack": ("", ("steps=6", "residual_steps=4", "images=128", "test=64")),
}


def crc(*tensors: Tensor | None) -> list[str]:
    """A checksum of each tensor's bytes."""
    plain = (None if t is None else np.ascontiguousarray(t.detach().cpu().numpy()) for t in tensors)
    return ["none" if a is None else f"{zlib.crc32(a.tobytes()):08x}" for a in plain]


def said(work: Callable[[], Any]) -> Any:
    """What comes back, or the error in words."""
    try:
        return work()
    except bilip.BilipError as error:
        return f"{type(error).__name__}: {error}"


# ---- what is recorded


def bounds() -> Iterator[tuple[str, Any]]:
    """Both constants of every block over each domain, and its values both ways."""
    from catalogue import CATALOGUE

    for entry in CATALOGUE:
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(0)
            block = entry.make().to(dtype)
            x, context = entry.batch(dtype=dtype), entry.contexts(dtype=dtype)
            block(x, context)

            def constants(size: float | None, block: Any = block, shape: Any = entry.shape) -> list[str]:
                found = block.bounds() if size is None else block.bounds(bilip.Box(-size, size, shape=shape))
                return [float(found.forward).hex(), float(found.inverse).hex()]

            row: dict[str, Any] = {name: said(lambda s=size: constants(s)) for name, size in BOXES.items()}
            torch.manual_seed(1)
            z, log_det = block.forward_and_log_det(x, context)
            back = said(lambda b=block, z=z, c=context: crc(b.inverse(z, c)))
            yield f"{entry.name}, {dtype}", row | {"values": crc(z, log_det), "back": back}


def guarded() -> Iterator[tuple[str, Any]]:
    """Reports and gradients of three steps, healthy and broken."""
    trunks = {
        "glow": lambda: bilip.models.glow((3, 8, 8), levels=2, blocks=2, hidden=8),
        "glow, factored out": lambda: bilip.models.glow((3, 8, 8), levels=2, blocks=2, hidden=8, factor_out=True),
        "additive": lambda: bilip.models.glow((3, 8, 8), levels=1, blocks=3, hidden=8, coupling="additive"),
        "real_nvp": lambda: bilip.models.real_nvp(6, blocks=12, hidden=(16,)),
        "residual": lambda: bilip.models.residual_flow((3, 4, 4), blocks=(2,), hidden=8),
    }
    for name, make in trunks.items():
        for size in (1.0, 1e4):
            torch.manual_seed(0)
            trunk = make()
            shape = {"real_nvp": (6,), "residual": (3, 4, 4)}.get(name, (3, 8, 8))
            x = size * torch.randn(8, *shape)
            trunk(x.sigmoid() if name == "residual" else x)
            wrapped = bilip.Reversible(trunk)
            optimizer = torch.optim.Adam(trunk.parameters(), 1e-2)
            rows = []
            for _ in range(3):
                z, log_det = wrapped.forward_and_log_det(x)
                (z.square().flatten(1).sum(1) - log_det).mean().backward()
                rows.append([crc(z, log_det), crc(*(p.grad for p in trunk.parameters()))])
                optimizer.step()
                optimizer.zero_grad()
            yield f"{name}, inputs of size {size:g}", {"steps": rows, "report": asdict(wrapped.report())}


def audits() -> Iterator[tuple[str, Any]]:
    """Records of the demo's flows, whole."""
    rooms = ("bilip.demo", "bilip.demo_flows")
    room = next(importlib.import_module(name) for name in rooms if importlib.util.find_spec(name))  # type: ignore[attr-defined]
    for name in ("affine_sigmoid", "affine_half", "residual"):
        data = {"checkerboard": bilip.data.checkerboard(2000, seed=1)}
        record = bilip.audit(room.load_demo_flow(name), data, ood=["uniform:2", "scaled:3"], budget="quick", name=name)
        yield name, json.loads(record.to_json())


def recipes(wanted: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Small runs, as a user types them."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rng = np.random.default_rng(0)
        for split, count in (("train", DATA["images"]), ("test", DATA["test"])):
            x = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
            np.savez(root / f"cifar10_{split}.npz", x=x, y=rng.integers(0, 10, count, dtype=np.uint8))
        np.savez(root / "celeba64.npz", x=rng.integers(0, 256, (400, 64, 64, 3), dtype=np.uint8))
        for name, (parts, settings) in ((name, SMALL[name]) for name in wanted):
            command = [sys.executable, "-m", "bilip", "reproduce", name, "--size", "quick"]
            command += ["--device", "cpu", "--jobs", "1"]
            command += ["--data", str(root), "--out", str(root / name)] + (["--parts", parts] if parts else [])
            for setting in settings:
                command += ["--set", setting]
            done = subprocess.run(command, capture_output=True, text=True)
            files = [root / name / "ours.json", *sorted((root / name / "parts").glob("*.json"))]
            found = {path.name: json.loads(path.read_text()) for path in files if path.exists()}
            failed = {"exit": done.returncode, "said": done.stderr[-400:].replace(folder, "")}
            yield name, failed if done.returncode else found


SECTIONS = ("bounds", "guard", "audits", "recipes")


# ---- how it is compared


def still(value: Any) -> Any:
    """The value without what differs between any two runs."""
    if isinstance(value, dict):
        return {key: still(v) for key, v in value.items() if not MOVING.search(str(key))}
    return [still(v) for v in value] if isinstance(value, list | tuple) else value


def differences(before: Any, after: Any, where: str) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}, key=str):
            place = f"{where} / {key}"
            if key not in before or key not in after:
                yield f"{place}: only {'after' if key in after else 'before'}"
            else:
                yield from differences(before[key], after[key], place)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for k, (a, b) in enumerate(zip(before, after, strict=True)):
            yield from differences(a, b, f"{where}[{k}]")
    elif before != after and not (before != before and after != after):
        yield f"{where}: {str(before)[:120]} -> {str(after)[:120]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="record here")
    parser.add_argument("--against", type=Path, help="compare with what was recorded")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--recipes", nargs="+", choices=list(SMALL), default=list(SMALL))
    args = parser.parse_args()
    if (args.write is None) == (args.against is None):
        parser.error("give --write FILE or --against FILE")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    sections = {"bounds": bounds, "guard": guarded, "audits": audits, "recipes": lambda: recipes(args.recipes)}
    for name in args.only:
        found[name] = {}
        for what, value in sections[name]():
            found[name][what] = json.loads(json.dumps(still(value)))
            print(f"{name}: {what}", file=sys.stderr, flush=True)
    if args.write:
        args.write.write_text(json.dumps(found))
        return
    before = json.loads(args.against.read_text())
    before["recipes"] = {name: row for name, row in before.get("recipes", {}).items() if name in args.recipes}
    lines = [line for name in args.only for line in differences(before[name], found[name], name)]
    by_item: dict[str, list[str]] = {}
    for line in lines:
        by_item.setdefault(" / ".join(line.split(" / ")[:2]).split(":")[0], []).append(line)
    for item, several in by_item.items():
        print(f"{item}: {len(several)} differences", *several[:4], sep="\n    ")
    counts = ", ".join(f"{len(rows)} {name}" for name, rows in found.items())
    print(f"{counts} compared: {len(lines)} differences")
    raise SystemExit(bool(lines))


if __name__ == "__main__":
    main()
