"""Does any gain exceed a proven bound, at any magnitude?

Draws blocks of `tests/catalogue.py`, random chains of them, couplings with any layers of torch that can be read, and the provable
blocks of other libraries, each with its weights
multiplied by 1e-30 to 1e4 and its linear blocks stirred, in float16, bfloat16, float32 or float64. Asks for bounds in both formulas
on boxes with sides from 1e-300 to 1e290, around the origin or beside it, of inputs or of latents, and everywhere where there is such a
bound. Against each finite bound stands the largest gain found at corners, random points and points of all magnitudes of the box:
singular values of float64 Jacobians of a copy with the very weights that act, and pairs of points far apart. A comparison is one
finite bound against one finite gain. A gain above its bound counts only by what it exceeds the error of its own measurement: that of
the decomposition, and of the Jacobian as it differs when it is built from the rows of a random rotation. Images of points have to lie
in the box that is said to hold them, likewise.

Vector fields of neural ODEs keep their weights up to a factor of 3, because the bound is about the exact flow and the gain about what
the solver computes. Writes JSON; a finding ends the run with exit code 1.

    python benchmarks/soundness.py --comparisons 100000 --jobs 2 --out results/soundness/search.json
"""

from __future__ import annotations

import collections
import copy
import math
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from _measure import Found as AnyFound
from _measure import search as search_for
from _measure import search_main
from adapters.test_proofs import PROVEN
from bilip import Box
from bilip.adapters import as_bijection
from bilip.blocks import ActNorm, AdditiveCoupling, Bijection, Chain, DiagonalScaling, Invert, InvertibleConv1x1
from bilip.bounds import EPS, norms
from bilip.errors import BilipError, NoGlobalBound
from bilip.nets.activations import KNOWN
from bilip.nets.certify import float64_copy
from bilip.testing.gains import jacobian
from catalogue import CATALOGUE, Entry
from tightness import scaled

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FORMULAS = ("sharp", "paper")
FLAT = [entry for entry in CATALOGUE if entry.shape == (4,) and entry.context is None and not entry.unit]
PADDINGS = ("zeros", "circular", "reflect", "replicate")
SAFETY = 16  # over the measured rounding of a Jacobian: one draw of it may be small by chance
NEAR_UNDERFLOW = math.log(1e-280)  # below, differences may consist of a few of the smallest numbers, rounded
CASES = 25  # of one task of a process


@dataclass
class Found(AnyFound):
    """What some cases gave; `closest`: the largest log10 of gain over bound."""

    counted = "comparisons"
    comparisons: int = 0
    images: int = 0
    cases: int = 0
    by: collections.Counter = field(default_factory=collections.Counter)
    refused: collections.Counter = field(default_factory=collections.Counter)


@dataclass(frozen=True)
class Case:
    """A map, the copy of it that is measured, and what is asked."""

    name: str
    kind: str
    model: Bijection
    exact: Bijection
    box: Box
    context: Tensor | None
    dtype: torch.dtype
    weights: float
    latent: bool

    def where(self) -> dict:
        """The case in words and numbers."""
        low, high = self.box.low, self.box.high
        return {
            "map": self.name,
            "kind": self.kind,
            "dtype": str(self.dtype).removeprefix("torch."),
            "weights": self.weights,
            "box": [float(low.min()), float(high.max())],
            "latent": self.latent,
        }


def draw(seed: int, index: int) -> Case | str:
    """Case number `index`, or why there is none."""
    rng = random.Random(f"{seed}/{index}")
    torch.manual_seed(rng.randrange(2**31))
    dtype = rng.choice(DTYPES)
    weights = rng.choice((1.0, 3.0)) if rng.random() < 0.3 else 10 ** rng.uniform(-30, 4)
    kind = rng.choices(("block", "chain", "adapter", "layers"), (5, 3, 2, 3))[0]
    context, unit = None, False
    if kind == "adapter":
        name = rng.choice(sorted(PROVEN))
        try:
            block: Bijection = as_bijection(PROVEN[name]())
        except pytest.skip.Exception:
            return f"not installed: {name}"
        shape = block.shape or ((4,) if block.library == "memcnn" else (5,))  # type: ignore[attr-defined]
    elif kind == "layers":
        net, name = layers_of(rng)
        shape, block = (2, 3, 3), AdditiveCoupling(net)
    elif kind == "chain":
        entries = [rng.choice(FLAT) for _ in range(rng.randint(2, 6))]
        name, shape = " > ".join(entry.name for entry in entries), (4,)
        block = Chain(*(entry.make() for entry in entries), shape=shape)
    else:
        entry: Entry = rng.choice(CATALOGUE)
        name, shape, unit, block = entry.name, entry.shape, entry.unit, entry.make()
        contexts = entry.contexts(1, dtype)
        context = None if contexts is None else contexts[0].double()
    if "ode" in name:
        weights = min(weights, 3.0)
    model = stirred(rng, scaled(block, weights)).to(dtype).eval()
    limit = torch.finfo(dtype).max / 2
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.clamp_(-limit, limit)
    exact = copy.deepcopy(model).double().eval() if kind == "adapter" else float64_copy(model)
    latent = rng.random() < 0.2 and not unit
    return Case(name, kind, model, exact, _box(rng, shape, unit), context, dtype, weights, latent)  # type: ignore[arg-type]


# Every layer of torch that can be read, from images of one channel with 3x3 pixels to such images.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{f"conv {mode}": partial(nn.Conv2d, 1, 1, 3, padding=1, padding_mode=mode) for mode in PADDINGS},
    "strided conv": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 2, stride=2, padding=1), nn.PixelShuffle(2), nn.Conv2d(1, 1, 2)
    ),
    "grouped conv": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.Conv2d(4, 2, 3, padding=1, groups=2), nn.Conv2d(2, 1, 1)
    ),
    "dilated conv": lambda: nn.Conv2d(1, 1, 2, padding=1, dilation=2),
    "transposed conv": lambda: nn.ConvTranspose2d(1, 1, 3, padding=1),
    "wide transposed conv": lambda: nn.Sequential(nn.ConvTranspose2d(1, 1, 2, stride=2), nn.Conv2d(1, 1, 4)),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(9, 9), nn.Unflatten(1, (1, 3, 3))),
    "max pool": lambda: nn.MaxPool2d(3, 1, 1),
    "average pool": lambda: nn.AvgPool2d(3, 1, 1),
    "average pool of fewer": lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
    "reflection": lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(1, 1, 3)),
    "replication": lambda: nn.Sequential(nn.ReplicationPad2d((2, 1, 0, 1)), nn.MaxPool2d((2, 4), 1)),
    "constant pad": lambda: nn.Sequential(nn.ConstantPad2d(1, 3.5), nn.AvgPool2d(3, 1)),
    "batch norm": lambda: nn.BatchNorm2d(1),
    "group norm": lambda: nn.GroupNorm(1, 1),
    "layer norm": lambda: nn.LayerNorm([3, 3]),
    "dropout": lambda: nn.Dropout(0.5),
    **{kind.__name__: kind for kind in KNOWN if kind.__module__.startswith("torch.nn.modules.activation")},
}


def layers_of(rng: random.Random) -> tuple[nn.Module, str]:
    """A few layers of torch in a row, those of a normalisation with statistics of any size, and their names."""
    names = [rng.choice(sorted(LAYERS)) for _ in range(rng.randint(1, 4))]
    net = nn.Sequential(nn.Conv2d(1, 1, 1), *(LAYERS[name]() for name in names))
    for layer in net:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.fill_(rng.gauss(0, 1) * 10 ** rng.uniform(-6, 3))  # type: ignore[union-attr]
            layer.running_var.fill_(10 ** rng.uniform(-12, 3))  # type: ignore[union-attr]
    return net, " > ".join(names)


@torch.no_grad()
def stirred(rng: random.Random, model: Bijection) -> Bijection:
    """Half of the time, linear blocks with other matrices and scales than they start with."""
    for part in model.modules() if rng.random() < 0.5 else ():
        if isinstance(part, (ActNorm, DiagonalScaling)):
            part.log_scale.add_(torch.randn_like(part.log_scale) * 10 ** rng.uniform(-2, 2))
        elif isinstance(part, InvertibleConv1x1) and part.kind == "plu":
            size = 10 ** rng.uniform(-3, 3)
            for factor in (part.lower, part.upper):
                factor.mul_(size)
            part.log_diagonal.add_(torch.randn_like(part.log_diagonal) * 10 ** rng.uniform(-2, 1))
        elif isinstance(part, InvertibleConv1x1) and part.kind == "full":
            part.weight.mul_(torch.logspace(0, rng.uniform(-8, 0), part.channels)[:, None] * 10 ** rng.uniform(-30, 4))
        elif isinstance(part, InvertibleConv1x1):
            part.parametrizations["weight"].original.mul_(10 ** rng.uniform(-3, 2))
    return model


def _box(rng: random.Random, shape: tuple[int, ...], unit: bool) -> Box:
    if unit:
        low = rng.uniform(0, 0.9) if rng.random() < 0.5 else 10 ** rng.uniform(-300, -1)
        return Box(low, min(0.999, low + 10 ** rng.uniform(-300, 0)), shape)
    side = 10 ** (rng.uniform(-3, 3) if rng.random() < 0.4 else rng.uniform(-300, 290))
    middle = 0.0
    if rng.random() < 0.5:
        middle = rng.choice((-1, 1)) * min(1e290, side * 10 ** rng.uniform(-2, 6))
    mixed = torch.full(shape, side, dtype=torch.float64)
    if rng.random() < 0.3:  # sides of very different lengths
        mixed = side * 10 ** (torch.rand(shape, dtype=torch.float64) * -rng.uniform(0, 200))
    return Box(middle - mixed, middle + mixed)


def points_of(box: Box, count: int = 3) -> Tensor:
    """Random points, corners, and points of all magnitudes, `count` of each, with the centre: all of them in the box."""
    shape = (count, *box.shape)
    inside = torch.rand(shape, dtype=torch.float64)
    corners = (torch.rand(shape) < 0.5).double()
    size = 10 ** (torch.rand(count, *[1] * len(box.shape), dtype=torch.float64) * -12)
    away = (size * torch.randn(shape, dtype=torch.float64)).clamp(-1, 1)
    near = box.center + away * (box.high / 2 - box.low / 2)
    between = [box.low * (1 - share) + box.high * share for share in (inside, corners)]
    return torch.clamp(torch.cat((*between, near, box.center[None])), box.low, box.high)


def largest_gains(case: Case) -> tuple[dict[str, float], Tensor]:
    """Logs of the largest certain gains of the map and of its inverse, and images of points; NaN where they are not known."""
    act = Invert(case.exact) if case.latent else case.exact
    x = points_of(case.box).requires_grad_()
    rows = None if case.context is None else case.context.expand(len(x), *case.context.shape)
    z = act(x, rows)
    slopes = jacobian(z, x)
    turn = torch.linalg.qr(torch.randn(slopes.shape[1], slopes.shape[1], dtype=torch.float64))[0]
    known = torch.isfinite(slopes).flatten(1).all(1) & torch.isfinite(z.detach()).flatten(1).all(1)
    logs = {"forward": -math.inf, "inverse": -math.inf}
    if bool(known.any()):
        again = _turned(act, x.detach()[known], None if rows is None else rows[known], turn)
        slopes = slopes[known].detach()
        unit = slopes.abs().amax((1, 2)).clamp_min(1e-300)
        wide = unit[:, None, None]
        error = SAFETY * torch.linalg.matrix_norm(again / wide - slopes / wide).nan_to_num(math.inf)
        values = torch.linalg.svdvals(slopes / wide)
        error = error + 8 * values.shape[1] * EPS * values[:, 0]
        top, bottom = values[:, 0] - error, values[:, -1] + error
        logs["forward"] = float((top.clamp_min(0).log() + unit.log()).max())
        logs["inverse"] = float((-bottom.log() - unit.log()).max())
    images = z.detach()
    if case.latent and not case.exact.closed_form:
        # preimages up to a tolerance only, which in a small box is all there is
        return logs, images.fill_(math.nan)
    for name, log in _pairs(x.detach(), images).items():
        logs[name] = max(logs[name], log)
    return logs, images


def _turned(act: Bijection, x: Tensor, rows: Tensor | None, turn: Tensor) -> Tensor:
    """The Jacobians from the rows of a rotation, turned back: equal but for rounding."""
    x = x.requires_grad_()
    z = act(x, rows).flatten(1)
    found = [torch.autograd.grad((z * row).sum(), x, retain_graph=True)[0].flatten(1) for row in turn]
    return torch.einsum("ki,bkj->bij", turn, torch.stack(found, 1)).detach()


def _pairs(x: Tensor, z: Tensor) -> dict[str, float]:
    """Logs of the gains between points whose images are far enough apart for rounding and underflow not to matter; 1e-9 is taken off."""
    found = {"forward": -math.inf, "inverse": -math.inf}
    for shift in range(1, len(x)):
        other, image = x.roll(shift, 0), z.roll(shift, 0)
        steps, moves = norms(x / 2 - other / 2).log(), norms(z / 2 - image / 2).log()
        sizes = [torch.maximum(norms(a / 2), norms(b / 2)).log() for a, b in ((x, other), (z, image))]
        sure = (steps > sizes[0] - 13) & (moves > sizes[1] - 13) & torch.isfinite(steps) & torch.isfinite(moves)
        sure &= torch.minimum(steps, moves) > NEAR_UNDERFLOW
        if bool(sure.any()):
            ratio = (moves - steps)[sure]
            found["forward"] = max(found["forward"], float(ratio.max()) - 1e-9)
            found["inverse"] = max(found["inverse"], float(-ratio.min()) - 1e-9)
    return found


def compare(case: Case) -> Found:
    """All bounds of one case against the gains."""
    found = Found(cases=1)
    logs, images = largest_gains(case)
    given = None if case.context is None else Box.point(case.context)
    for formula in FORMULAS:
        for where in ("box", "everywhere"):
            if where == "everywhere" and case.latent:
                continue
            domain = {"latent" if case.latent else "domain": case.box} if where == "box" else {}
            try:
                bound = case.model.bounds(**domain, context=given, formula=formula)
            except NoGlobalBound:
                if where == "box":
                    found.refused["no bound"] += 1
                continue
            bound = bound.swap() if case.latent else bound
            for direction in ("forward", "inverse"):
                proven, gain = getattr(bound, f"log_{direction}"), logs[direction]
                if not math.isfinite(gain) or proven == math.inf:
                    found.refused["gain or bound not finite"] += 1
                    continue
                found.comparisons += 1
                found.by[f"{case.kind}, {case.dtype}"] += 1
                found.closest = max(found.closest, (gain - proven) / math.log(10))
                if gain > proven:
                    row = {"what": f"{formula} bound {where}, {direction}", "log10_bound": proven / math.log(10)}
                    found.findings.append({**case.where(), **row, "log10_gain": gain / math.log(10)})
            if where == "box":
                good = torch.isfinite(images).flatten(1).all(1)
                slack = 1e-9 * images.abs().flatten(1).amax(1)[good]
                wide = slack.view(-1, *[1] * (images.ndim - 1))
                inside = (images[good] >= bound.image.low - wide) & (images[good] <= bound.image.high + wide)
                found.images += int(good.sum())
                if not bool(inside.all()):
                    found.findings.append({**case.where(), "what": f"{formula} image outside of its box"})
    return found


def run(task: tuple[int, int, int]) -> Found:
    """Some cases of one seed."""
    seed, start, stop = task
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    total = Found()
    for index in range(start, stop):
        case = draw(seed, index)
        if isinstance(case, str):
            total.refused[case] += 1
            continue
        try:
            found = compare(case)
            found.findings = [finding | {"seed": seed, "index": index} for finding in found.findings]
            total.add(found)
        except BilipError as error:
            total.refused[f"{type(error).__name__}: {case.name}"[:80]] += 1
    return total


def search(comparisons: int, *, seed: int = 0, jobs: int = 1, progress=lambda found: None) -> Found:
    """Draw cases until there are so many comparisons; the same ones whatever the number of processes."""
    tasks = ((seed, start, start + CASES) for start in range(0, 10**9, CASES))
    return search_for(run, tasks, Found(), comparisons, jobs=jobs, progress=progress)


def describe(found: Found) -> dict:
    """What the file says."""
    return {
        "images_of_points_held_against_their_boxes": found.images,
        "cases": found.cases,
        "comparisons_by_kind_and_dtype": dict(sorted(found.by.items())),
        "left_out": dict(found.refused.most_common()),
        "largest_log10_of_gain_over_bound": found.closest,
    }


if __name__ == "__main__":
    question = "does any gain exceed a proven bound, at any magnitude"
    sys.exit(search_main("comparisons", question, __doc__, "results/soundness/search.json", search, describe))
