"""Inputs within the dequantization cell of a training image that a flow cannot reconstruct.

Parts are those of `face_flows`. A part trains its flow, draws samples from it along the way and in the end, for the recipe
`celeba_samples`, and attacks it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bilip import Flow
from bilip.auditing.round_trip import norms
from bilip.errors import NotMeasured
from bilip.probes import Attack, AttackResult, AttackRun
from bilip.recipes import face_flows, figures
from bilip.recipes.face_flows import PARTS, TITLES, Config, Faces
from bilip.recipes.flow_probes import conditions, fixed_draws
from bilip.recipes.recipe import Figures, Found, Line, Measured, Recipe, Topic, Work, largest, percent, short, sizes_of
from bilip.recipes.residual_flows import by_series, cut_after, is_residual, solved_inverse

__all__ = ["RECIPE"]

CHUNK = 64
BROKEN = 1.0  # L2 error of an image in [0, 1] from which on it counts as broken
CONVERGED = 1e-3  # largest L2 error of an image that comes back from the residual flow
METHODS = {"roundtrip": "the paper's attack", "gain": "true-gradient attack", "random": "gradient-free attack"}
POINTS = ("points", "back", "errors")  # what is kept of an attack until condition numbers are computed
WITHIN = 100  # times eps * condition number * |x|: how far an error may be from what rounding can do


class DequantizationAttack(Recipe):
    """The reconstruction error against the iteration of three attacks, of three flows, on many images, within their cells."""

    name = "dequantization_attack"
    where = "figures on the invertibility attack on CelebA64"
    claim = "Within the dequantization cell of a training image both affine flows are driven to NaN; the residual flow stays invertible."
    sizes: Mapping[str, Config] = sizes_of(Config)
    cost: Mapping[str, str] = {
        "quick": "minutes on two cores; the residual flow takes most of it",
        "gpu": "a quarter of an hour on one H200, three flows side by side under CUDA's MPS, and other runs beside them",
        "paper": "90,000 steps of three flows; days on one GPU; not timed yet",
    }
    matched = (
        "Signed steps of 5e-4 from the centre of the cell, 200 of them, clipped to the cell; loss the L2 norm of the error; training "
        "images at 5 bits. A logit, squeezed first, scales of 3x3-1x1-3x3 couplings with ELU and ActNorm, masked ones in the first scale, "
        "no factor-out, fully connected ones in the end; the residual flow with the same scales and c = 0.98.",
        "The residual flow is attacked through an inverse of 5 iterations first, as in the paper.",
    )
    corrected = (
        "Many images, not one. The cell is [k/32, (k+1)/32) exactly, in float32 and in the training data alike: the original's centre "
        "is random, so that its box leaves the cell by up to half, and its training cells overlap.",
        "In the modified flow every coupling is on (0.5, 1); the original leaves the masked ones of the first scale on (0, 1). That model "
        "is the part modified-unmasked.",
        "The exact gradient of |x - F^-1(F(x))| is zero, so the paper's attack follows rounding noise. Beside it stand a true gradient, "
        "that of |x - F^-1(F(x) + d)| / |d| in float64, and a search without gradients, both also on the converged inverse of the "
        "residual flow, which the paper leaves to future work.",
        "Inf before the sigmoid that ends the inverse is not Inf after it: an error above 1 counts as broken, as NaN does.",
    )
    partial = True
    pictures_apart = True

    def parts(self, config: Config) -> Sequence[str]:
        return PARTS

    def has(self, part: str, config: Config) -> bool:
        return part in TITLES

    def run(self, part: str, config: Config, work: Work) -> Measured:
        if part == "residual":
            config = face_flows.as_residual(config)
        faces, facts = face_flows.load(config, work)
        looks = Looks(faces, config, work)
        flow, numbers, arrays = face_flows.trained(part, config, faces, looks.during, work)
        if not work.main:
            return Measured({})
        if numbers["diverged"]:
            return Measured(numbers | facts, arrays)
        with by_series(flow):
            after = work.once("looks", lambda: looks.after(flow))
            attack = attack_residual if part == "residual" else attack_coupling
            attacked = attack(flow, faces, config, work)
        found = {**after.numbers, "attack": attacked.numbers}
        return Measured(numbers | facts | found, arrays | {**after.arrays, **attacked.arrays})

    def lines(self, config: Config, found: Found) -> list[Line]:
        said, lines = self.paper(), []
        for part, name, runs in face_flows.runs_of(found, lines):
            good, topic = [m.numbers for m in runs], Topic(name, lines)
            count = good[0]["attack"]["count"]
            bits = [
                f"{n['test_bits']:.2f} ({n['model']}; {n['images']:,} images of {n['side']} x {n['side']})"
                for n in good
            ]
            topic.add(f"test bits per dimension at {good[0]['bits']} bits", "", bits, key=True)
            plain = [f"{percent(n['plain']['broken'])}, worst {short(n['plain']['worst'])}" for n in good]
            topic.add(f"broken without an attack, of {good[0]['plain']['count']} images", "", plain)
            if part == "residual":
                _add_residual(topic, count, good, said["residual"])
                continue
            ours = [
                f"{percent(n['attack']['broken'])} ("
                + ", ".join(f"{METHODS[m]} {percent(found['broken'])}" for m, found in n["attack"]["methods"].items())
                + ")"
                for n in good
            ]
            # The paper's flows were driven to NaN from the one image that was tried: here from most of them.
            explodes = [n["attack"]["broken"] > 0.5 for n in good] if part in said else ()
            topic.add(f"broken within the cell, of {count} images", said.get(part, ""), ours, explodes, key=True)
            _add_methods(topic, good)
            _add_conditions(topic, good)
        return lines

    def figures(self, config: Config, found: Found) -> Figures:
        first = {part: m for part, m in next(iter(found.values()), {}).items() if not m.numbers["diverged"]}
        first = {part: first[part] for part in TITLES if part in first}
        drawn: dict[str, Any] = {}
        for what, label, linear in (("median", "median L2 error", False), ("broken", "share broken", True)):
            panels: dict[str, dict[str, Any]] = {}
            for method, title in METHODS.items():
                curves = {}
                for part, m in first.items():
                    cut = part == "residual" and method == "roundtrip"
                    more = f", {m.numbers['attack']['iterations']} iterations" if cut else ""
                    if f"{method}_{what}" in m.arrays:
                        values = m.arrays[f"{method}_{what}"].tolist()
                        curves[f"{TITLES[part]}{more}"] = list(range(len(values))), values
                if curves:
                    panels[f"{label}, {title}"] = curves
            lost = any(max(y) > 0 for curves in panels.values() for _, y in curves.values())
            if panels and (lost or not linear):
                drawn[f"iterations-{what}"] = figures.curves(
                    panels, xlabel="iteration", linear=list(panels) if linear else ()
                )
        for part, m in first.items():
            rows = {
                title: (m.arrays[f"shown_{name}"], m.arrays[f"hidden_{name}"])
                for name, title in ROWS.items()
                if f"shown_{name}" in m.arrays
            }
            if rows:
                drawn[f"panels-{part}"] = figures.image_rows(rows)
        return drawn


ROWS = {
    "image": "image",
    "point": "in its cell",
    "back": "reconstruction",
    "cut": "5 iterations",
    "converged": "converged",
}


# ---- measuring


def unsquashed(flow: Flow, z: Tensor) -> Tensor:
    """What the inverse has before the sigmoid that ends it; NaN where a residual block did not converge."""
    if is_residual(flow.bijection):
        return solved_inverse(flow.bijection, z).before
    return flow.bijection[1:].inverse(z)  # type: ignore[index]


def shown(x: Tensor, broken: Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of images in [0, 1], channels last, and where a pixel is not finite."""
    broken = ~torch.isfinite(x) if broken is None else broken
    levels = (x.nan_to_num(0.0, 1.0, 0.0) * 256).floor().clamp(0, 255).to(torch.uint8)
    return levels.movedim(1, -1).cpu().numpy(), broken.any(1).to(torch.uint8).cpu().numpy()


class Looks:
    """What is measured of a flow besides attacks: likelihood, samples, plain reconstructions.

    The samples of the look at which most were lost are kept in a file of the part's folder, for the figure.
    """

    def __init__(self, faces: Faces, config: Config, work: Work) -> None:
        self.faces, self.config, self.work = faces, config, work
        self.path = work.folder / "worst_samples.npz"

    @torch.no_grad()
    def during(self, model: Any, done: int) -> dict[str, float]:
        """A row of the log."""
        with by_series(model):
            samples = self._samples(model)
            if done and self._is_worst(samples["share_lost"]):
                self.work.folder.mkdir(parents=True, exist_ok=True)
                aside = self.path.with_name(f".{self.path.name}")  # a kill leaves the file of the look before
                with open(aside, "wb") as file:
                    np.savez(file, share=samples["share_lost"], step=done, **samples["pictures"])
                os.replace(aside, self.path)
            return {
                "test_bits": self._bits(model, self.config.test_looked),
                "samples_lost": samples["share_lost"],
                "pixels_lost": samples["share_pixels"],
                "plain_broken": self._plain(model, min(CHUNK, self.config.plain))["broken"],
            }

    @torch.no_grad()
    def after(self, flow: Flow) -> Measured:
        """What is said of the trained flow, and pictures."""
        self.work.progress("samples and reconstructions", 0.71)
        samples = self._samples(flow)
        worst: dict[str, Any] = {"share": samples["share_lost"], "step": self.config.steps, **samples["pictures"]}
        if self.path.exists():
            with np.load(self.path) as stored:
                if float(stored["share"]) > samples["share_lost"]:
                    worst = dict(stored)
        pictures = {name: worst[name] for name in samples["pictures"]}
        count = self.config.shown
        for name, value in zip(("data", "data_broken"), shown(self.faces.first("train", count)), strict=True):
            pictures[name] = value
        numbers = {
            "test_bits": self._bits(flow, len(self.faces.test)),
            "samples": {
                "count": self.config.samples,
                "share_lost": samples["share_lost"],
                "share_pixels": samples["share_pixels"],
                "share_nan": samples["share_nan"],
                "worst_share": float(worst["share"]),
                "worst_step": int(worst["step"]),
            },
            "plain": self._plain(flow, self.config.plain),
        }
        return Measured(numbers, pictures)

    def _is_worst(self, share: float) -> bool:
        if not self.path.exists():
            return True
        with np.load(self.path) as stored:
            return share >= float(stored["share"])

    def _bits(self, flow: Flow, count: int) -> float:
        x = self.faces.first("test", count)
        with fixed_draws():
            total = sum(flow.bits_per_dim(some, bits=self.faces.bits).double().sum() for some in x.split(CHUNK))
        return float(total) / len(x)

    def _samples(self, flow: Flow) -> dict[str, Any]:
        """Shares of samples and of pixels that are not finite before the last sigmoid, and of samples with NaN after it."""
        generator = torch.Generator().manual_seed(face_flows.seed_of(self.work.seed, 0, "samples"))
        z = torch.randn(self.config.samples, *(flow.latent_shape or ()), generator=generator).to(self.faces.device)
        before = torch.cat([unsquashed(flow, some) for some in z.split(CHUNK)])
        broken = ~torch.isfinite(before)
        x = flow.bijection[0].inverse(before)  # type: ignore[index]
        lost = broken.flatten(1).any(1)
        count = self.config.shown
        order = torch.argsort(lost.to(torch.int8), descending=True, stable=True)[:count].to(x.device)
        pictures = {}
        for name, rows in (("samples", torch.arange(min(count, len(x)), device=x.device)), ("lost", order)):
            pictures[name], pictures[f"{name}_broken"] = shown(x[rows], broken[rows])
        return {
            "share_lost": float(lost.double().mean()),
            "share_pixels": float(broken.any(1).double().mean()),
            "share_nan": float(torch.isnan(x).flatten(1).any(1).double().mean()),
            "pictures": pictures,
        }

    def _plain(self, flow: Flow, count: int) -> dict[str, float]:
        """Dequantized training images, reconstructed."""
        x = self.faces.first("train", count)
        last = flow.bijection[0]  # type: ignore[index]
        back = torch.cat([last.inverse(unsquashed(flow, flow.bijection(some))) for some in x.split(CHUNK)])
        errors = _l2(back, x)
        return {
            "count": len(x),
            "broken": float((~(errors <= BROKEN)).double().mean()),
            "median": float(errors.median()),
            "worst": float(errors.nan_to_num(math.inf).max()),
        }


def attack_coupling(flow: Flow, faces: Faces, config: Config, work: Work) -> Measured:
    """All three attacks on a flow whose inverse is a formula."""

    def measure() -> Measured:
        attack, count = Attacked(flow, faces, config, work), config.attacked
        result = attack.search(flow, tuple(METHODS), count, 0.75, 0.95)
        attack.keep("point", result.points, "back", result.back, result.errors)
        found = attack.found(result, count) | attack.conditions(result.points, result.errors, result.back)
        return Measured(found, attack.arrays)

    return work.once("attack", measure)


def attack_residual(flow: Flow, faces: Faces, config: Config, work: Work) -> Measured:
    """The paper's attack through a cut inverse, then the others through the converged one."""
    count, chain = config.residual_attacked, flow.bijection

    def through_cut() -> Measured:
        attack = Attacked(flow, faces, config, work)
        cut = cut_after(chain, config.iterations).eval()  # type: ignore[arg-type]
        result = attack.search(cut, ("roundtrip",), count, 0.72, 0.78)
        run = result.runs["roundtrip"]
        with torch.no_grad():
            solved = solved_inverse(chain, chain(run.points))
        converged = _l2(solved.x, run.points)
        attack.keep("point", run.points, "cut", run.back, run.errors)
        attack.keep("point", run.points, "converged", solved.x, run.errors)
        found = attack.found(result, count) | {
            "iterations": config.iterations,
            "cut": {"median": float(run.l2.median()), "worst": float(run.l2.max())},
            "cut_converged": {
                "median": float(converged.median()),
                "worst": float(converged.nan_to_num(math.inf).max()),
                "not_converged": int((~solved.converged).sum()),
            },
        }
        return Measured(found, attack.arrays)

    def through_converged(method: str, start: float, end: float) -> Measured:
        attack = Attacked(flow, faces, config, work)
        result = attack.search(flow, (method,), count, start, end, steps=config.converged_steps)
        points = {name: getattr(result, name).double().cpu().numpy() for name in POINTS}
        return Measured(attack.found(result, count), attack.arrays | points)

    cut = work.once("cut", through_cut)
    gain = work.once("gain", lambda: through_converged("gain", 0.78, 0.88))
    random = work.once("random", lambda: through_converged("random", 0.88, 0.96))

    def at_the_worst() -> Measured:
        """Of the points that both attacks found."""
        points, back, errors = (
            torch.from_numpy(np.concatenate([m.arrays[name] for m in (gain, random)])) for name in POINTS
        )
        points, back = (some.to(faces.device, torch.get_default_dtype()) for some in (points, back))
        return Measured(Attacked(flow, faces, config, work).conditions(points, errors, back))

    several = [cut.numbers, gain.numbers, random.numbers]
    found = {
        **cut.numbers,
        **{name: max(one[name] for one in several[1:]) for name in ("broken", "worst")},
        "methods": {name: value for one in several for name, value in one["methods"].items()},
        "notes": [note for one in several for note in one["notes"]],
        **work.once("conditions", at_the_worst).numbers,
    }
    arrays = {**cut.arrays, **gain.arrays, **random.arrays}
    return Measured(found, {name: value for name, value in arrays.items() if name not in POINTS})


class Attacked:
    """Attacks on the dequantization cells of the first training images."""

    def __init__(self, flow: Flow, faces: Faces, config: Config, work: Work) -> None:
        self.flow, self.faces, self.config, self.work = flow, faces, config, work
        self.arrays: dict[str, np.ndarray] = {}
        self.methods: dict[str, dict[str, float]] = {}

    def search(
        self, model: Any, methods: tuple[str, ...], count: int, start: float, end: float, *, steps: int | None = None
    ) -> AttackResult:
        names = ", ".join(METHODS[method] for method in methods)
        steps = self.config.attack_steps if steps is None else steps
        attack = Attack(self.config.bits, box="cell", steps=steps, samples=count, methods=methods, seed=self.work.seed)
        attack.progress = lambda share: self.work.progress(f"{names} on {count} images", start + (end - start) * share)
        result = attack.search(model, self.faces.first("train", count))
        for method, run in result.runs.items():
            self._log(method, run, result)
        return result

    def _log(self, method: str, run: AttackRun, result: AttackResult) -> None:
        errors = run.trajectory.double().cpu()
        broken = ~(errors <= BROKEN)
        self.arrays[f"{method}_median"] = errors.nan_to_num(math.inf, math.inf).median(1).values.numpy()
        self.arrays[f"{method}_worst"] = errors.nan_to_num(math.inf, math.inf).max(1).values.numpy()
        self.arrays[f"{method}_broken"] = broken.double().mean(1).numpy()
        l2, levels = run.l2.double().cpu(), self.faces.levels("train", len(run.l2)).double()
        outside = (run.points.double() * 2**self.faces.bits).floor().cpu() != levels
        finite = l2[torch.isfinite(l2)]
        self.methods[method] = {
            "broken": float((~(l2 <= BROKEN)).double().mean()),
            "non_finite": float((~torch.isfinite(l2)).double().mean()),
            "start_median": float(errors[0].median()),
            "median": float(l2.nan_to_num(math.inf, math.inf).median()),
            "worst_finite": float(finite.max()) if len(finite) else math.nan,
            "outside_cell": int(outside.flatten(1).any(1).sum()) + int((~result.region.contains(run.points)).sum()),
            "random_steps": run.random_steps,
        }

    def found(self, result: AttackResult, count: int) -> dict[str, Any]:
        l2 = torch.stack([run.l2.double().cpu() for run in result.runs.values()]).nan_to_num(math.inf, math.inf)
        return {
            "count": count,
            "broken": float((~(l2.amax(0) <= BROKEN)).double().mean()),
            "worst": float(l2.max()),
            "methods": self.methods,
            "notes": list(result.notes),
        }

    def conditions(self, points: Tensor, errors: Tensor, back: Tensor) -> dict[str, Any]:
        """Condition numbers at the worst points found, and the errors there over what rounding can do: eps * condition number * |x|."""
        self.work.progress("condition numbers", 0.96)
        worst = errors.nan_to_num(math.inf).argsort(descending=True)[: self.config.conditions]
        x = points[worst]
        try:
            values = conditions(self.flow, x, steps=self.config.lanczos)
        except NotMeasured as why:
            return {"conditions": [], "over_prediction": [], "conditions_note": str(why)}
        limit = (
            torch.finfo(x.dtype).eps * torch.tensor(values, dtype=torch.float64) * norms(x.double().flatten(1)).cpu()
        )
        return {"conditions": values, "over_prediction": (_l2(back[worst], x) / limit).tolist()}

    def keep(self, point: str, points: Tensor, back: str, images: Tensor, errors: Tensor) -> None:
        """Pictures of the worst found."""
        worst = errors.nan_to_num(math.inf).argsort(descending=True)[: self.config.shown]
        centre = (self.faces.levels("train", len(points)).to(points) + 0.5) / 2**self.faces.bits
        for name, value in (("image", centre), (point, points), (back, images)):
            self.arrays[f"shown_{name}"], self.arrays[f"hidden_{name}"] = shown(value[worst])


def _l2(back: Tensor, x: Tensor) -> Tensor:
    return norms((back.double() - x.double()).flatten(1)).cpu()


# ---- tables


def _add_methods(topic: Topic, good: Sequence[Mapping[str, Any]]) -> None:
    """Each attack by itself: errors before and after it."""
    for method, title in METHODS.items():
        found = [n["attack"]["methods"][method] for n in good if method in n["attack"]["methods"]]
        ours = [
            f"{short(f['start_median'])} before, {short(f['median'])} after, worst finite {short(f['worst_finite'])}, "
            f"{percent(f['non_finite'])} not finite, {f['outside_cell']} outside of the cell"
            for f in found
        ]
        if found:
            topic.add(f"{title}, median error", "", ours)


def _add_conditions(topic: Topic, good: Sequence[Mapping[str, Any]], *, judged: bool = False) -> None:
    ours, holds = [], []
    for n in good:
        values, over = n["attack"]["conditions"], n["attack"]["over_prediction"]
        ours.append(
            f"condition numbers {', '.join(map(short, values)) or 'not measured'}; error over prediction {', '.join(map(short, over))}"
        )
        holds.append(bool(over) and largest(over) <= WITHIN)
    topic.add(f"errors of the worst points within {WITHIN} eps cond |x|", "", ours, holds if judged else ())


def _add_residual(topic: Topic, count: int, good: Sequence[Mapping[str, Any]], said: Mapping[str, str]) -> None:
    attacks = [n["attack"] for n in good]
    worst = [largest(a["methods"][m]["worst_finite"] for m in ("gain", "random") if m in a["methods"]) for a in attacks]
    lost = [max(a["methods"][m]["non_finite"] for m in ("gain", "random") if m in a["methods"]) for a in attacks]
    cut = [
        f"median {short(a['cut']['median'])}, worst {short(a['cut']['worst'])}; the same points converged: median "
        f"{short(a['cut_converged']['median'])}, worst {short(a['cut_converged']['worst'])}"
        for a in attacks
    ]
    due = [a["cut_converged"]["worst"] < 0.01 * a["cut"]["worst"] for a in attacks]
    iterated = f"the paper's attack on {attacks[0]['iterations']} iterations, {count} images, then converged"
    topic.add(iterated, said["cut"], cut, due)
    topic.add(
        "worst error of the true-gradient and the gradient-free attack, converged inverse",
        said["stable"],
        [f"{short(w)}, {percent(share)} not finite" for w, share in zip(worst, lost, strict=True)],
        [w < CONVERGED and not share for w, share in zip(worst, lost, strict=True)],
    )
    _add_methods(topic, good)
    _add_conditions(topic, good, judged=True)


RECIPE = DequantizationAttack()
