"""How far are memory-saving gradients from stored ones while a classifier trains? The figure of the paper's introduction.

Additive, affine and affine models with a penalty are trained with stored gradients on the same synthetic images; every so
many steps the angle between the stored and the memory-saving gradient of the training loss is measured in float32 on fixed
batches. Where memory-saving gradients are NaN or Inf, the mean is over the others and the first such step is marked. Writes
JSON and draws the figure from it.

    python benchmarks/gradient_angle.py                             # minutes on one CPU core
    python benchmarks/gradient_angle.py --size medium --device cuda
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor, nn

from bilip import models
from bilip.auditing.probes.gradient_angle import GradientAngle
from bilip.record import environment, write_aside
from bilip.regularizers import FiniteDifference, FlowLikelihood, Penalty


@dataclass(frozen=True)
class Size:
    side: int
    levels: int
    blocks: int
    hidden: int
    images: int
    batch: int
    steps: int
    every: int
    rate: float


SIZES = {
    "small": Size(side=8, levels=2, blocks=4, hidden=16, images=512, batch=64, steps=240, every=20, rate=5e-3),
    "medium": Size(side=32, levels=3, blocks=16, hidden=128, images=8192, batch=128, steps=4000, every=100, rate=1e-3),
}
CLASSES, BATCHES = 10, 8
RUNS: dict[str, tuple[str, Callable[[int], Penalty | None]]] = {
    "additive": ("additive", lambda d: None),
    "affine": ("affine", lambda d: None),
    "affine + finite differences": ("affine", lambda d: FiniteDifference(0.3, every=10)),
    "affine + flow likelihood": ("affine", lambda d: FlowLikelihood(0.2 / d)),
}


def images(size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Smooth random images with random labels: a task that asks for steep functions, as late training does."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(size.images, 3, size.side // 4, size.side // 4, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=size.side, mode="bilinear")
    x = smooth + 0.3 * torch.randn(size.images, 3, size.side, size.side, generator=generator)
    y = torch.randint(CLASSES, (size.images,), generator=generator)
    return (x / x.std()).to(device), y.to(device)


def measure(trunk: nn.Module, head: nn.Module, x: Tensor, y: Tensor, batch: int) -> dict:
    """Angles on fixed batches, of the loss that is trained. The probe visits the batches in order, twice each: stored, walked."""
    trunk.eval()
    head.eval()
    found = []
    for k in range(BATCHES):
        rows = slice(k * batch, (k + 1) * batch)
        probe = GradientAngle(
            batch, batch=batch, loss=lambda z, _, rows=rows: nn.functional.cross_entropy(head(z), y[rows])
        )
        found.append(probe.measure(trunk, x[rows]))
    with torch.no_grad():
        some = x[: BATCHES * batch]
        error = (trunk.inverse(trunk(some)) - some).flatten(1).norm(dim=1).double()  # type: ignore[operator]
        accuracy = float((head(trunk(some)).argmax(1) == y[: len(some)]).float().mean())
    trunk.train()
    head.train()
    angles = [m["angle"] for m in found if m["batches"] > m["stored_non_finite"]]
    finite = [a for a in angles if not math.isnan(a)]
    return {
        "mean_angle": sum(finite) / len(finite) if finite else None,
        "max_angle": max(finite, default=None),
        "share_non_finite": 1 - len(finite) / len(angles) if angles else None,
        "median_error": float(error.nan_to_num(math.inf).median()) if bool(error.isfinite().any()) else None,
        "accuracy": accuracy,
    }


def train(kind: str, size: Size, device: torch.device, seed: int, tick: Callable[[], None]) -> list[dict]:
    coupling, make = RUNS[kind]
    torch.manual_seed(seed)
    shape = (3, size.side, size.side)
    model = models.classifier(
        models.glow(shape, levels=size.levels, blocks=size.blocks, hidden=size.hidden, coupling=coupling),
        classes=CLASSES,
    ).to(device)
    x, y = images(size, device)
    penalty = make(math.prod(shape))
    with torch.no_grad():
        model(x)  # the ActNorms start
    optimizer = torch.optim.Adam(model.parameters(), lr=size.rate)
    order = torch.Generator().manual_seed(seed)
    curve = []
    for step in range(size.steps + 1):
        if step % size.every == 0:
            curve.append({"step": step} | measure(model.trunk, model.head, x, y, size.batch))
        rows = torch.randint(len(x), (size.batch,), generator=order).to(device)
        out = model.detailed(x[rows])
        loss = nn.functional.cross_entropy(out.logits, y[rows])
        if penalty is not None:
            loss = loss + penalty(model.trunk, x[rows], latent=(out.latent, out.log_det), step=step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()
    return curve


def draw(document: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axis = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    # Okabe and Ito's colours, and a line style each, so that neither colour nor print is needed to tell them apart.
    looks = (("#0072B2", "-", "o"), ("#D55E00", "-", "s"), ("#009E73", "--", "^"), ("#CC79A7", "-.", "D"))
    marked = False
    for (kind, curve), (colour, line, marker) in zip(document["curves"].items(), looks, strict=True):
        lost = next((k for k, row in enumerate(curve) if row["share_non_finite"]), len(curve))
        some = [row for row in curve if row["mean_angle"] is not None]
        steps, angles = [row["step"] for row in some], [max(row["mean_angle"], 1e-9) for row in some]
        axis.plot(steps, angles, line, marker=marker, ms=5, lw=1.8, color=colour, label=kind)
        partly = [k for k, row in enumerate(some) if row["share_non_finite"]]
        hollow = {"marker": marker, "ms": 5, "ls": "", "color": colour, "mfc": "white", "mew": 1.5}
        axis.plot([steps[k] for k in partly], [angles[k] for k in partly], **hollow)
        if lost < len(curve):
            axis.axvline(curve[lost]["step"], color=colour, lw=1.2, ls=":")
            if not marked:
                axis.text(
                    curve[lost]["step"],
                    1.02,
                    " first NaN (hollow: mean of the batches that are finite)",
                    color=colour,
                    fontsize=9,
                    transform=axis.get_xaxis_transform(),
                )
            marked = True
    axis.axhline(1e-2, color="grey", lw=0.8)
    axis.text(0, 1.1e-2, "limit of the verdict, 1e-2 rad", ha="left", va="bottom", color="0.35", fontsize=9)
    axis.set(yscale="log", xlabel="training step", ylabel="angle to the stored gradient, rad")
    figure.legend(*axis.get_legend_handles_labels(), frameon=False, fontsize=10, loc="outside lower center", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="instead of the size's own")
    parser.add_argument("--out", type=Path, default=Path("results/gradient_angle/ours.json"))
    parser.add_argument("--figure", type=Path, default=Path("results/gradient_angle/gradient_angle.png"))
    parser.add_argument("--redraw", action="store_true", help="draw the figure from the JSON that is there")
    args = parser.parse_args()
    if args.redraw:
        draw(json.loads(args.out.read_text()), args.figure)
        return
    given = SIZES[args.size]
    size = Size(**{**asdict(given), "steps": args.steps or given.steps})
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    curves: dict[str, list[dict]] = {}
    with Progress() as progress:
        bar = progress.add_task("training", total=len(RUNS) * (size.steps + 1))
        for kind in RUNS:
            progress.update(bar, description=kind)
            curves[kind] = train(kind, size, device, args.seed, lambda: progress.advance(bar))
    document = {
        "question": "angle between stored and memory-saving gradients over training",
        "command": f"python benchmarks/gradient_angle.py --size {args.size} --device {device.type} --seed {args.seed}",
        "environment": environment() | {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"},
        "size": asdict(size),
        "batches": BATCHES,
        "curves": curves,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_aside(args.out, json.dumps(document, indent=1, allow_nan=False) + "\n")
    draw(json.loads(args.out.read_text()), args.figure)
    for kind, curve in curves.items():
        last = curve[-1]
        print(
            f"{kind:28} step {last['step']}: mean angle {last['mean_angle']}, not finite {last['share_non_finite']}, "
            f"round trip {last['median_error']}, accuracy {last['accuracy']:.2f}"
        )


if __name__ == "__main__":
    main()
