"""How do the proven bound on Lip(F^-1), the largest gain found, and the float32 reconstruction error grow with depth?

Coupling networks on R^4 with weights at twice torch's initialisation, on the box [-4, 4]^4. Writes JSON and draws the
figure from it.

    python benchmarks/depth.py
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from rich.progress import track

from _measure import about, options, write
from bilip import Box, Chain, models
from bilip.testing import search_gains

DEPTHS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32)
BOX = Box(-4, 4, shape=(4,))
KINDS = {
    "additive, nets held to 0.5": {"coupling": "additive", "lipschitz": 0.5},
    "additive": {"coupling": "additive"},
    "affine, scale in (0.5, 1)": {"scale": "half_sigmoid"},
    "affine, scale in (0, 1)": {"scale": "sigmoid"},
}


def build(kind: str, seed: int) -> Chain:
    torch.manual_seed(seed)
    model = models.real_nvp(4, blocks=max(DEPTHS), hidden=(16,), **KINDS[kind])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    return model


def measure(model: Chain, depth: int, points: int) -> dict:
    part = model[:depth]
    gains = search_gains(part, BOX, points=32, steps=15)
    x = BOX.sample(points, generator=torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        back = part.inverse(part(x))
    error = (back.double() - x.double()).norm(dim=1)
    finite = error[torch.isfinite(error)]
    return {
        "depth": depth,
        "log10_bound": part.bounds(BOX).log_inverse / math.log(10),
        "log10_gain": math.log10(gains.inverse),
        "largest_error": float(finite.max()) if len(finite) else None,
        "share_not_finite": 1 - len(finite) / points,
    }


def draw(document: dict, path: Path) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    colours = ("#1b7837", "#5aae61", "#d9842b", "#b2182b")
    for (kind, rows), colour in zip(document["curves"].items(), colours, strict=True):
        depth = [row["depth"] for row in rows]
        left.plot(depth, [row["log10_bound"] for row in rows], color=colour, label=kind)
        left.plot(depth, [row["log10_gain"] for row in rows], "o", ms=3.5, color=colour)
        right.plot(depth, [row["largest_error"] for row in rows], "-o", ms=3.5, color=colour)
        lost = [row for row in rows if row["share_not_finite"]]
        right.plot([row["depth"] for row in lost], [row["largest_error"] for row in lost], "x", ms=8, color=colour)
    left.axhline(math.log10(2**23), color="grey", lw=0.8, ls="--")
    left.text(32, math.log10(2**23), "1/eps of float32", ha="right", va="bottom", color="grey", fontsize=8)
    left.set(
        xlabel="coupling blocks",
        ylabel="log10 Lip(F⁻¹)",
        ylim=(-1, 31),
        title="proven bound (line), largest gain found (dot)",
    )
    figure.legend(*left.get_legend_handles_labels(), frameon=False, fontsize=9, loc="outside lower center", ncols=4)
    right.set(
        yscale="log",
        xlabel="coupling blocks",
        ylabel="|x − F⁻¹(F(x))|",
        title=f"largest float32 error, {document['points']} points (×: some not finite)",
    )
    for axis in (left, right):
        axis.title.set_fontsize(10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = options(__doc__, device=None, out="results/depth/ours.json", seed=0, points=20_000)
    parser.add_argument("--figure", type=Path, default=Path("docs/assets/depth.png"))
    args = parser.parse_args()
    curves: dict[str, list[dict]] = {}
    for kind in track(KINDS, description="measuring"):
        model = build(kind, args.seed)
        curves[kind] = [measure(model, depth, args.points) for depth in DEPTHS]
    document = {
        "question": "proven bound, best gain and float32 error against depth",
        "command": f"python benchmarks/depth.py --seed {args.seed} --points {args.points}",
        "environment": about("cpu"),
        "points": args.points,
        "curves": curves,
    }
    write(args.out, document)
    draw(document, args.figure)
    for kind, rows in curves.items():
        last = rows[-1]
        print(
            f"{kind:28} depth {last['depth']}: bound 10^{last['log10_bound']:.4g}, gain "
            f"10^{last['log10_gain']:.3g}, error {last['largest_error']}"
        )


if __name__ == "__main__":
    main()
