"""Does the guard ever let a wrong gradient pass without a word?

Random models, most of them badly conditioned, three steps each, in float32:

* tables: couplings of every scale function, 4 to 200 blocks deep, with and without ActNorm, weights far from their start, near-zero scales;
  features and offsets up to 1e7, samples that dominate their batch;
* images: Glow, up to three levels, with and without factoring out;
* uneven: couplings between diagonal maps whose entries differ by orders of magnitude.

The loss looks at the forward map, at the inverse, at a cycle of both, or at a finite-difference penalty. A model counts if its stored
gradient is finite and not zero.

The yardstick of a model is max(1e-3 rad, 3 times the angle between its stored gradient in float32 and the one in float64). A step whose
guarded gradient is further than that from the stored one is wrong; wrong with neither repair nor warning is silent. With ReLU, rounding may
choose the other side of a kink: a step counts as a kink, not as wrong, if it is within the yardstick when the signs of the forward pass
are used. A healthy model is one whose bare walk is within the yardstick: a repair there was not needed.

Where the gradients of several calls nearly cancel, what the first of them gave is out before anybody can know: the guard mends the last
one, says so in a `DriftWarning`, and computes the next steps without a walk. A step above the yardstick with such a warning is counted
apart: it is wrong, and not silent.

A step above the yardstick counts as rounding, not as wrong, if the walk is not to blame and the model is that sensitive: its angle is
at most twice that of the same gradient without any walk (`memory="checkpoint"`: every state evaluated again from the input; ActNorm and
1x1 convolution are one matrix there, which rounds differently from one after the other), and that is at most three times the largest angle
between the float32 and the float64 gradient of the stored model when each parameter is moved by less than half a unit in its last place,
eight times at random (`moved`). Such steps are counted and listed apart, in the report and in what is printed at the end.

The exit code is 1 if a step is wrong, or if more repairs were needless than promised: 25 % of healthy first steps, 15 % of all steps of
healthy models. With `--ways` other losses are asked for: those that subtract samples of one batch. Nothing is promised of needless repairs
there; each of them leaves a small part of its gradients, and many walks cannot be as exact as that.

    python benchmarks/guard_soak.py --models 10000 --jobs 2 --out results/guard/soak.json
    python benchmarks/guard_soak.py --models 3000 --ways subtracting "squared difference" --jobs 2 --out results/guard/within.json
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import multiprocessing
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from _measure import about, command_line, options, write
from bilip import Chain, blocks, models, nets
from bilip.blocks import Bijection
from bilip.regularizers import FiniteDifference
from bilip.reversible import DriftWarning, Guard, Reversible, angle

STEPS, FLOOR, NOISE, MOVES = 3, 1e-3, 3.0, 8
FIRST, ALL = 0.25, 0.15  # the most repairs that may be needless: of healthy first steps, of all
SCALES = ("sigmoid", "sigmoid", "exp", "tanh_exp", "half_sigmoid")
SMOOTH = ("elu", "tanh")
WAYS = ("forward", "inverse", "cycle", "finite differences")
WITHIN = ("subtracting", "squared difference")  # of pairs of samples that are in one batch, asked for by name
Task = tuple[Bijection, Tensor, str]  # the model, its batch, its activation


# ---- models


def shrink_scales(model: Bijection, rng: random.Random, count: int) -> None:
    """Move the raw scales of some affine couplings far away: gains to 1e-12."""
    affine = [block for block in model.modules() if isinstance(block, blocks.AffineCoupling)]
    for block in rng.sample(affine, min(count, len(affine))):
        bias: Any = [layer.bias for layer in block.t.modules() if getattr(layer, "bias", None) is not None][-1]
        grows = isinstance(block.scale, blocks.ExpScale)
        with torch.no_grad():
            bias[len(bias) // 2 :] -= rng.uniform(2, 18) * (rng.choice((-0.5, 0.7)) if grows else 1)


def activation(rng: random.Random) -> str:
    return rng.choice((*SMOOTH, *SMOOTH, "relu"))


def tables(rng: random.Random) -> Task:
    size, act = rng.choice((2, 3, 4, 8, 16, 32)), activation(rng)
    depth = 200 if rng.random() < 0.02 else rng.choice((4, 8, 16, 24, 40))
    additive = rng.random() < 0.2
    model = models.real_nvp(
        size,
        blocks=depth,
        hidden=(32,),
        activation=act,
        actnorm=rng.random() < 0.3,
        coupling="additive" if additive else "affine",
        scale=rng.choice(SCALES),
    )
    x = torch.randn(rng.choice((4, 16, 64, 256)), size)
    if rng.random() < 0.4:  # raw features: salaries, years, pressures
        for k in rng.sample(range(size), rng.choice((1, 1, 2, size - 1))):
            x[:, k] = (x[:, k] + rng.choice((0, 0, 3, 30))) * 10 ** rng.uniform(1, 7)
    if rng.random() < 0.3:
        x[rng.randrange(len(x))] *= 10 ** rng.uniform(1, 3)
    with torch.no_grad():
        model(x)  # starts ActNorm
        factor = rng.choice((0.3, 0.6, 1.0))
        for p in model.parameters():
            p.mul_(factor)
        if rng.random() < 0.7:
            if additive:
                block = rng.choice([block for block in model.modules() if isinstance(block, blocks.AdditiveCoupling)])
                [p for p in block.t.parameters() if p.ndim > 1][-1].mul_(rng.choice((10, 100, 1000)))
            else:
                shrink_scales(model, rng, rng.choice((1, 1, 2, 3)))
    return model, x, act


def images(rng: random.Random) -> Task:
    shape, act = (rng.choice((1, 3)), 8, 8), activation(rng)
    model = models.glow(
        shape,
        levels=rng.randint(1, 3),
        blocks=rng.randint(1, 4),
        hidden=8,
        activation=act,
        coupling=rng.choice(("affine", "affine", "affine", "additive")),
        scale=rng.choice(SCALES),
        actnorm=rng.choice((None, "identity")),
        mixing=rng.choice(("conv1x1", "conv1x1", "reverse")),
        factor_out=rng.random() < 0.5,
    )
    factor, spread = 10 ** rng.uniform(-0.5, 0.7), rng.choice((0.1, 0.5, 1.0))
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
        shrink_scales(model, rng, rng.randint(1, 3))
    x = torch.rand(rng.choice((4, 16)), *shape)
    if rng.random() < 0.2:
        x[0] *= 10 ** rng.uniform(1, 3)
    return model, x, act


def uneven(rng: random.Random) -> Task:
    size, width, parts, act = rng.choice((2, 4, 8, 16)), rng.uniform(0.5, 4), [], activation(rng)
    for k in range(rng.randint(2, 12)):
        if rng.random() < 0.5:
            parts.append(blocks.DiagonalScaling(10 ** ((2 * torch.rand(size) - 1) * width)))
        additive, half = rng.random() < 0.3, blocks.Split(swap=k % 2 == 1)
        net = nets.MLP(size // 2, size // 2 * (1 if additive else 2), hidden=(16,), activation=act)
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(10 ** rng.uniform(-0.5, 0.7))
        if additive:
            parts.append(blocks.AdditiveCoupling(net, half))
        else:
            parts.append(blocks.AffineCoupling(net, scale=rng.choice(SCALES), partition=half))
    model = Chain(*parts, shape=(size,))
    x = torch.randn(rng.choice((4, 16)), size)
    if rng.random() < 0.5:
        x = x * 10 ** (8 * torch.rand(size) - 4)
        for block in model:
            if isinstance(block, blocks.AffineCoupling):
                with torch.no_grad():
                    next(p for p in block.t.parameters() if p.ndim > 1).mul_(rng.choice((1e-4, 1e-2)))
        shrink_scales(model, rng, rng.randint(0, 3))
    return model, x, act


FAMILIES: dict[str, Callable[[random.Random], Task]] = {"tables": tables, "images": images, "uneven": uneven}
WEIGHTS = (0.7, 0.15, 0.15)
TARGETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "likelihood": lambda z, log_det: (z.flatten(1).square().sum(1) / 2 - log_det).mean(),
    "bounded": lambda z, log_det: (z.flatten(1).tanh().sum(1) - log_det / 8).mean(),
    "one": lambda z, log_det: z.flatten(1)[:, 0].sin().mean(),
}


# ---- one model


def loss_of(f: Bijection, x: Tensor, way: str, target: str) -> Tensor:
    goal = TARGETS[target]
    if way == "inverse":
        return goal(*f.inverse_and_log_det(x))
    if way in WITHIN:
        return within(f, x, way, goal)
    z, log_det = f.forward_and_log_det(x)
    value = goal(z, log_det)
    if way == "cycle":
        return value + (f.inverse(z + 0.1) - x).tanh().square().mean()
    if way == "finite differences":
        return value + FiniteDifference(1e-3)(f, x, latent=(z, log_det), step=0)
    return value


def within(f: Bijection, x: Tensor, way: str, goal: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A loss that subtracts samples of one batch: each, and one that is a step apart, as halves, as neighbours or shuffled."""
    rng = random.Random(repr((x.shape, float(x.double().sum()))))
    generator, step = torch.Generator().manual_seed(rng.getrandbits(32)), 10 ** rng.uniform(-4, -1)
    plain = x.float()  # the same samples in float64
    moved = plain + step * (plain.std(0) + 1e-3 * plain.abs().mean()) * torch.empty(x.shape).normal_(
        generator=generator
    )
    order = torch.arange(2 * len(x))
    order = rng.choice((order, order.view(2, -1).T.flatten(), torch.randperm(2 * len(x), generator=generator)))
    z, log_det = f.forward_and_log_det(torch.cat([x, moved.to(x)])[order])
    back = order.argsort()
    (a, b), (log_a, log_b) = z[back].chunk(2), log_det[back].chunk(2)
    if way == "subtracting":
        return (goal(b, log_b) - goal(a, log_a)) / step
    return ((b - a) / step).square().mean()


def gradient(f: Bijection, model: Bijection, x: Tensor, way: str, target: str) -> list[Tensor]:
    parameters, randn = list(model.parameters()), torch.randn
    # Directions of finite differences are the same ones in float32 and float64.
    same = mock.patch.object(torch, "randn", lambda *size, dtype, **o: randn(*size, dtype=torch.float32, **o).to(dtype))
    with same, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NaN or Inf")  # the penalty leaves such samples out
        value = loss_of(f, x, way, target)
    if not value.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def off(found: list[Tensor], stored: list[Tensor]) -> float:
    """The angle; infinite if it is not a number."""
    value = angle(found, stored)
    return value if math.isfinite(value) else math.inf


def usable(grads: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(g).all()) for g in grads) and any(bool(g.any()) for g in grads)


def draw(seed: int, index: int, attempt: int, ways: Sequence[str] = WAYS) -> tuple[Task, dict[str, Any]]:
    rng = random.Random(f"{seed} {index} {attempt}")
    torch.manual_seed(rng.getrandbits(32))
    family = rng.choices(list(FAMILIES), WEIGHTS)[0]
    way, target = rng.choice(ways), rng.choice(list(TARGETS))
    model, x, act = FAMILIES[family](rng)
    if family == "images" and way == "inverse":
        x = torch.randn(len(x), *model.out_shape(x.shape[1:]))
    return (model, x, act), {"family": family, "way": way, "target": target, "activation": act}


def steps(model: Bijection, x: Tensor, stored: list[Tensor], what: tuple[str, str], **options: Any):
    """By step: the angle of the guarded gradient, whether it was repaired, whether anything was said."""
    guarded, found = Reversible(model, Guard(spot_check=0), **options), []
    for _ in range(STEPS):
        before = guarded.report().repaired
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = off(gradient(guarded, model, x, *what), stored)
        repaired = guarded.report().repaired > before
        warned = any(issubclass(one.category, DriftWarning) for one in caught)
        found.append({"angle": value, "repaired": repaired, "warned": warned, "spoke": repaired or warned})
    return found


def moved(model: Bijection, x: Tensor, what: tuple[str, str]) -> float:
    """The largest angle between stored float32 and float64 gradients when parameters are moved by less than rounding."""
    largest, generator = 0.0, torch.Generator().manual_seed(0)
    for _ in range(MOVES):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1 + (torch.rand(p.shape, generator=generator) - 0.5) * torch.finfo(p.dtype).eps)
        exact = copy.deepcopy(other).double()
        found = off(gradient(exact, exact, x.double(), *what), gradient(other, other, x, *what))
        largest = max(largest, found if math.isfinite(found) else 0.0)
    return largest


def examine(seed: int, index: int, ways: Sequence[str] = WAYS) -> dict[str, Any]:
    """The first model of a row of random ones whose stored gradient is finite and not zero."""
    torch.set_num_threads(1)
    for attempt in range(100):
        (model, x, act), facts = draw(seed, index, attempt, ways)
        what = facts["way"], facts["target"]
        stored = gradient(model, model, x, *what)
        if usable(stored):
            break
    else:
        raise RuntimeError(f"no usable model in 100 for seed {seed}, index {index}")
    reference = copy.deepcopy(model).double()
    noise = off(gradient(reference, reference, x.double(), *what), stored)
    yardstick = max(FLOOR, NOISE * noise)
    found = steps(model, x, stored, what)
    wrong = [k for k, step in enumerate(found) if not step["angle"] <= yardstick]
    kinks: list[int] = []
    if wrong and act not in SMOOTH:
        again = steps(model, x, stored, what, keep_signs=True)
        kinks = [k for k in wrong if again[k]["angle"] <= yardstick]
    wrong = [k for k in wrong if k not in kinks]
    warned = [k for k in wrong if found[k]["warned"]]
    wrong = [k for k in wrong if k not in warned]
    rounding: list[int] = []
    sensitive = math.nan
    if wrong:
        apart = off(gradient(Reversible(model, memory="checkpoint"), model, x, *what), stored)
        sensitive = moved(model, x, what)
        if apart <= NOISE * sensitive:
            rounding = [k for k in wrong if found[k]["angle"] <= 2 * apart]
    return {
        "seed": seed,
        "index": index,
        "left_out": attempt,
        **facts,
        "yardstick": yardstick,
        "bare": off(gradient(Reversible(model, guard=None), model, x, *what), stored),
        "steps": found,
        "wrong": [k for k in wrong if k not in rounding],
        "kinks": kinks,
        "warned": warned,
        "rounding": rounding,
        "moved": sensitive,
    }


# ---- all of them


def listed(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The models with steps of a kind, each with its largest angle and what moves within rounding do to its stored gradient."""
    return [
        {
            "index": row["index"],
            "steps": row[kind],
            "angle": max(row["steps"][k]["angle"] for k in row[kind]),
            "yardstick": row["yardstick"],
            "moved": row["moved"],
        }
        for row in rows
        if row[kind]
    ]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    healthy = [row for row in rows if row["bare"] <= row["yardstick"]]
    quiet = [(row, k) for row in rows for k in range(STEPS) if not row["steps"][k]["spoke"]]
    silent = [(row, k) for row, k in quiet if k in row["wrong"]]
    mended = [(row, k) for row in rows for k in range(STEPS) if row["steps"][k]["repaired"]]
    first = sum(row["steps"][0]["repaired"] for row in healthy)
    every = sum(step["repaired"] for row in healthy for step in row["steps"])

    def worst(pairs: list[tuple[dict[str, Any], int]]) -> float:
        """Of the angle over the yardstick, kinks and rounding left out."""
        judged = [(r, k) for r, k in pairs if k not in (*r["kinks"], *r["warned"], *r["rounding"])]
        return max((r["steps"][k]["angle"] / r["yardstick"] for r, k in judged), default=0.0)

    return {
        "models": len(rows),
        "steps": STEPS * len(rows),
        "left_out": sum(row["left_out"] for row in rows),
        "bare_wrong": len(rows) - len(healthy),
        "bare_not_a_number": sum(math.isinf(row["bare"]) for row in rows),
        "yardstick_above_its_floor": sum(row["yardstick"] > FLOOR for row in rows),
        "wrong_steps": sum(len(row["wrong"]) for row in rows),
        "silently_wrong_steps": len(silent),
        "wrong": listed(rows, "wrong"),
        "kink_steps": sum(len(row["kinks"]) for row in rows),
        "steps_with_a_warning": sum(step["warned"] for row in rows for step in row["steps"]),
        "wrong_steps_with_a_warning": sum(len(row["warned"]) for row in rows),
        "warned": listed(rows, "warned"),
        "rounding_steps": sum(len(row["rounding"]) for row in rows),
        "rounding": listed(rows, "rounding"),
        "repaired_steps": len(mended),
        "healthy": len(healthy),
        "needless_first": first / max(1, len(healthy)),
        "needless": every / max(1, STEPS * len(healthy)),
        "worst_over_yardstick_without_repair": worst(quiet),
        "worst_over_yardstick_after_repair": worst(mended),
    }


def run(seed: int, count: int, jobs: int, kept: Path | None, ways: Sequence[str] = WAYS) -> list[dict[str, Any]]:
    """What was found of each model, in their order; those whose rows are kept already are not examined again."""
    rows, begin = known(kept, seed, count), time.perf_counter()
    left = [index for index in range(count) if index not in rows]
    with (
        ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool,
        kept.open("a") if kept else contextlib.nullcontext() as file,
    ):
        waiting = [pool.submit(examine, seed, index, ways) for index in left]
        for one in as_completed(waiting):
            row = {**one.result(), "torch": torch.__version__}
            rows[row["index"]] = row
            if file:
                print(json.dumps(row), file=file, flush=True)
            if len(rows) % 100 == 0 or len(rows) == count:
                wrong = sum(len(row["wrong"]) for row in rows.values())
                seconds = time.perf_counter() - begin
                print(
                    f"{len(rows)} of {count} models, {wrong} wrong steps, {seconds:.0f} s", file=sys.stderr, flush=True
                )
    return [rows[index] for index in range(count)]


def known(kept: Path | None, seed: int, count: int) -> dict[int, dict[str, Any]]:
    """The rows that an earlier run has kept, by model; a line that was cut off is left out."""
    if kept is None or not kept.exists():
        return {}
    found = {}
    for line in kept.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if row["seed"] == seed and row["index"] < count:
                found[row["index"]] = row
    return found


def main() -> int:
    parser = options(__doc__, device=None, models=10_000, seed=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--rows", type=Path, help="keep what is found of each model here; the same command goes on")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, *WITHIN), default=WAYS, help="what losses look at")
    args = parser.parse_args()

    begin, before = time.perf_counter(), len(known(args.rows, args.seed, args.models))
    rows = run(args.seed, args.models, args.jobs, args.rows, args.ways)
    found = summary(rows)
    kinds = {
        "smooth": [r for r in rows if r["activation"] in SMOOTH],
        "relu": [r for r in rows if r["activation"] == "relu"],
    }
    report = {
        "command": command_line("--rows"),
        "settings": {
            "models": args.models,
            "steps": STEPS,
            "seed": args.seed,
            "floor": FLOOR,
            "times_noise": NOISE,
            "tolerance": Guard().limit(torch.float32),
        },
        "environment": about("cpu"),
        "torch": {version: sum(r["torch"] == version for r in rows) for version in sorted({r["torch"] for r in rows})},
        "seconds": round(time.perf_counter() - begin, 1),
        "kept_from_earlier_runs": before,
        "summary": found,
        "activations": {name: summary(some) for name, some in kinds.items()},
        "families": {name: summary([r for r in rows if r["family"] == name]) for name in FAMILIES},
        "ways": {name: summary([r for r in rows if r["way"] == name]) for name in args.ways},
    }
    write(args.out, report)
    print(
        f"{found['models']} models, {found['steps']} steps: wrong {found['wrong_steps']}, of these silently "
        f"{found['silently_wrong_steps']}; above the yardstick besides: {found['kink_steps']} kinks, "
        f"{found['wrong_steps_with_a_warning']} with a warning (of {found['steps_with_a_warning']} warnings), {found['rounding_steps']} by "
        f"rounding without any walk (models {[one['index'] for one in found['rounding']]}); "
        f"the bare walk is wrong in {found['bare_wrong']} models; "
        f"repaired {found['repaired_steps']} steps, needlessly {found['needless_first']:.1%} of healthy first steps and "
        f"{found['needless']:.1%} of all; the worst step is {found['worst_over_yardstick_without_repair']:.2f} of its yardstick without "
        f"repair, {found['worst_over_yardstick_after_repair']:.2f} after one."
    )
    few = args.ways != WAYS or (found["needless_first"] <= FIRST and found["needless"] <= ALL)
    return 0 if few and not found["wrong_steps"] else 1


if __name__ == "__main__":
    sys.exit(main())
