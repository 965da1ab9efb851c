"""Does the guard ever let a wrong gradient pass without a word?

Random models, most of them badly conditioned: vectors and images, additive and affine couplings, every scale function, 1 to 24 blocks,
weights far from their start, near-zero scales, features and samples of very different sizes, four losses, float32. A model counts if its
stored gradient is finite and not zero. For each: the angle between the stored gradient and the bare walk's, and between the
stored and the guarded one. A gradient more than 1e-2 rad off (or not a number) is wrong; wrong with neither repair nor warning is
silent, and one silent gradient, or one that is wrong after a repair, makes the exit code 1.

    python benchmarks/guard_soak.py --out results/guard/soak.json
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bilip import Chain, blocks, models, nets
from bilip.blocks import Bijection
from bilip.record import environment
from bilip.reversible import Guard, Reversible, angle

WRONG = 1e-2
SCALES = ("sigmoid", "exp", "tanh_exp", "half_sigmoid")
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "likelihood": lambda z, log_det: (z.flatten(1).square().sum(1) / 2 - log_det).mean(),
    "log_det": lambda z, log_det: log_det.mean(),
    "sine": lambda z, log_det: z.sin().sum(),
    "bounded": lambda z, log_det: z.tanh().square().mean() + 0.1 * log_det.mean(),
}


# ---- models


def shrink_scales(model: Bijection, rng: random.Random, share: float) -> None:
    """Push the raw scales of some affine couplings far down: sigma_min to 1e-12."""
    for block in model.modules():
        if isinstance(block, blocks.AffineCoupling) and rng.random() < share:
            last = [layer for layer in block.t.modules() if getattr(layer, "bias", None) is not None][-1]
            with torch.no_grad():
                last.bias[len(last.bias) // 2 :] -= rng.uniform(2, 28)


def disturb(model: Bijection, rng: random.Random) -> None:
    """Weights of nets times one factor; what starts at zero gets numbers; scales of ActNorm spread."""
    factor, spread = 10 ** rng.uniform(-0.5, 1.0), rng.choice((0.1, 1.0, 2.0))
    mixing = {p for m in model.modules() if isinstance(m, blocks.InvertibleConv1x1) for p in m.parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("log_scale"):
                p.normal_(0, spread)
            elif not p.any():
                p.normal_(0, 0.3)
            elif p.ndim > 1 and p not in mixing:
                p.mul_(factor)
    if rng.random() < 0.4:
        shrink_scales(model, rng, 0.4)


def coupling_options(rng: random.Random) -> dict[str, Any]:
    return {"coupling": rng.choice(("affine", "affine", "affine", "additive")), "scale": rng.choice(SCALES)}


def vectors(rng: random.Random) -> tuple[Bijection, Tensor]:
    size = rng.choice((2, 3, 5, 8, 16, 32))
    hidden = (rng.choice((8, 32)),) * rng.randint(1, 2)
    options = coupling_options(rng) | {"activation": rng.choice(("relu", "elu", "tanh"))}
    model = models.real_nvp(size, blocks=rng.randint(1, 24), hidden=hidden, **options)
    disturb(model, rng)
    return model, torch.randn(rng.choice((1, 4, 32)), size) * 10 ** rng.uniform(-1, 1)


def images(rng: random.Random) -> tuple[Bijection, Tensor]:
    shape = (rng.choice((1, 3)), 8, 8)
    options = coupling_options(rng) | {
        "actnorm": rng.choice((None, "identity")),
        "mixing": rng.choice(("conv1x1", "conv1x1", "reverse")),
        "factor_out": rng.random() < 0.3,
    }
    model = models.glow(shape, levels=rng.randint(1, 2), blocks=rng.randint(1, 6), hidden=8, **options)
    disturb(model, rng)
    return model, torch.rand(rng.choice((1, 4, 16)), *shape)


def uneven(rng: random.Random) -> tuple[Bijection, Tensor]:
    """Couplings between diagonal maps whose entries differ by orders of magnitude; features of the input too, half of the time."""
    size, width, parts = rng.choice((2, 4, 8, 16)), rng.uniform(0.5, 4), []
    for k in range(rng.randint(2, 12)):
        if rng.random() < 0.5:
            parts.append(blocks.DiagonalScaling(10 ** ((2 * torch.rand(size) - 1) * width)))
        additive, half = rng.random() < 0.3, blocks.Split(swap=k % 2 == 1)
        net = nets.MLP(size // 2, size // 2 * (1 if additive else 2), hidden=(16,))
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(10 ** rng.uniform(-0.5, 0.7))
        if additive:
            parts.append(blocks.AdditiveCoupling(net, half))
        else:
            parts.append(blocks.AffineCoupling(net, scale=rng.choice(SCALES), partition=half))
    model = Chain(*parts, shape=(size,))
    x = torch.randn(rng.choice((1, 4, 16)), size)
    if rng.random() < 0.5:
        x = x * 10 ** (8 * torch.rand(size) - 4)
        for block in model:
            if isinstance(block, blocks.AffineCoupling):
                with torch.no_grad():
                    next(p for p in block.t.parameters() if p.ndim > 1).mul_(rng.choice((1e-4, 1e-2)))
        shrink_scales(model, rng, 0.4)
    return model, x


def outliers(rng: random.Random) -> tuple[Bijection, Tensor]:
    """A batch in which one sample, or some, are far larger than the others."""
    model, x = rng.choice((vectors, images))(rng)
    if len(x) < 4:
        x = x[:1] + 0.1 * torch.randn(8, *x.shape[1:])
    if rng.random() < 0.5:
        sizes = 10 ** (rng.uniform(1, 4) * torch.rand(len(x)))
    else:
        sizes = torch.ones(len(x))
        sizes[0] = 10 ** rng.uniform(1, 5)
    return model, x * sizes.view(-1, *[1] * (x.ndim - 1))


FAMILIES = (vectors, images, uneven, outliers)


# ---- one model


def gradient(f: Bijection, model: Bijection, x: Tensor, loss: str) -> list[Tensor]:
    parameters = list(model.parameters())
    value = LOSSES[loss](*f.forward_and_log_det(x))
    if not value.requires_grad:  # the log-determinant of an additive model
        return [torch.zeros_like(p) for p in parameters]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def off(found: list[Tensor], stored: list[Tensor]) -> float:
    """The angle; infinite if it is not a number."""
    value = angle(found, stored)
    return value if math.isfinite(value) else math.inf


def examine(seed: int) -> dict[str, Any] | None:
    """One random model; `None` if its stored gradient is not finite, or zero."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    family, loss = rng.choice(FAMILIES), rng.choice(list(LOSSES))
    model, x = family(rng)
    stored = gradient(model, model, x, loss)
    if not all(bool(torch.isfinite(g).all()) for g in stored) or not any(bool(g.any()) for g in stored):
        return None
    with torch.no_grad():
        overflowed = not bool(torch.isfinite(model(x)).all())
    guarded = Reversible(model, Guard(spot_check=0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        walked = gradient(guarded, model, x, loss)
    report = guarded.report()
    return {
        "seed": seed,
        "family": family.__name__,
        "loss": loss,
        "bare": off(gradient(Reversible(model, guard=None), model, x, loss), stored),
        "guarded": off(walked, stored),
        "drift": max(report.drift.values(), default=0.0),
        "spoke": bool(report.repaired or report.warned or caught),
        "repaired": bool(report.repaired),
        "overflowed": overflowed,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    wrong = [row for row in rows if row["bare"] > WRONG]
    quiet = [row for row in rows if not row["spoke"]]
    silent = [row for row in quiet if row["guarded"] > WRONG]
    false = [row for row in rows if row["repaired"] and row["bare"] <= WRONG]
    mended = [row["guarded"] for row in rows if row["repaired"]]
    return {
        "models": len(rows),
        "bare_wrong": len(wrong),
        "bare_not_a_number": sum(math.isinf(row["bare"]) for row in rows),
        "guarded_wrong": sum(row["guarded"] > WRONG for row in rows),
        "the_output_overflowed": sum(row["overflowed"] for row in rows),
        "silently_wrong": len(silent),
        "silent_seeds": [row["seed"] for row in silent],
        "repaired": sum(row["repaired"] for row in rows),
        "false_repairs": len(false),
        "false_repairs_share": len(false) / max(1, len(rows) - len(wrong)),
        "largest_angle_without_repair": max((row["guarded"] for row in quiet), default=0.0),
        "largest_angle_after_repair": max(mended, default=0.0),  # where the output is finite
    }


def calibration(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """For several tolerances: the largest angle of a bare walk within it, and the repairs that nobody needed."""
    result = []
    for tolerance in (3.5e-6, 3.5e-5, 1e-4, 3.5e-4, 1e-3, 3.5e-3, 3.5e-2):
        within = [row["bare"] for row in rows if row["drift"] <= tolerance]
        false = sum(row["bare"] <= WRONG for row in rows if not row["drift"] <= tolerance)
        result.append({"tolerance": tolerance, "largest_angle": max(within, default=0.0), "false_repairs": false})
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)

    rows: list[dict[str, Any]] = []
    left_out, begin = 0, time.perf_counter()
    while len(rows) < args.models:
        row = examine(args.seed + len(rows) + left_out)
        if row is None:
            left_out += 1
        else:
            rows.append(row)
    found = summary(rows)
    report = {
        "command": f"python benchmarks/guard_soak.py --models {args.models} --seed {args.seed}",
        "settings": {
            "models": args.models,
            "seed": args.seed,
            "wrong": WRONG,
            "tolerance": Guard().limit(torch.float32),
        },
        "environment": environment(),
        "seconds": round(time.perf_counter() - begin, 1),
        "left_out": left_out,
        "summary": found,
        "families": {f.__name__: summary([r for r in rows if r["family"] == f.__name__]) for f in FAMILIES},
        "calibration": calibration(rows),
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(finite(report), indent=1) + "\n")
    print(
        f"{found['models']} models: the bare walk is wrong in {found['bare_wrong']}, the guarded one silently in "
        f"{found['silently_wrong']}; {found['repaired']} repaired, {found['false_repairs']} of them without need; largest angle "
        f"{found['largest_angle_without_repair']:.1e} rad without repair, {found['largest_angle_after_repair']:.1e} after one."
    )
    return 1 if found["silently_wrong"] or found["guarded_wrong"] else 0


def finite(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
