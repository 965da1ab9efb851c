"""What does `bilip.cure` repair, by which rung, and at what cost?

Small flows of six libraries, trained in haste until they lose what lies outside their data (CPU):

    OMP_NUM_THREADS=1 python benchmarks/cure.py --jobs 2

The paper's affine CIFAR-10 classifier and an affine Glow, trained until they explode; every rung beside as many plain steps (one GPU):

    python benchmarks/cure.py --classifier --device cuda --data FOLDER
    python benchmarks/cure.py --glow --device cuda --data FOLDER

Results go to `results/cure/` as JSON with the command and the environment, and as figures drawn from them (`--figures` draws them again).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import copy
import json
import math
import multiprocessing
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import bilip
from _measure import command_line
from bilip.cures import Attempt
from bilip.cures.treated import copied
from bilip.cures.tuning import Tuning, tuned
from bilip.errors import said_by
from bilip.record import environment, read_json, to_plain, write_json

USES = ("inversion", "sampling", "likelihood", "ood-inversion")
WRONG = math.sqrt(2.0**-23)
COLOURS = ("#009E73", "#0072B2", "#D55E00", "#CC79A7")
FACTS = ("rung", "outcome", "reason", "verdicts", "cost", "repair_seconds", "audit_seconds")  # of an attempt
# Of the big models: first what has to be known, so that a run whose time is over has it.
ORDER = ("settings", "re-range", "arithmetic", "penalties", "replacements")


# ---- small flows


def small(name: str, steps: int, every: bool) -> dict[str, Any]:
    """Train one flow, cure it, and check what was handed over by other means."""
    from flow_zoo.flows import EXPLODING, train

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    spec = EXPLODING[name]
    view, about = train(spec)
    view.settle()
    model = view.audited()
    data = spec.set.draw(3000, seed=2)[0]
    began = time.monotonic()
    result = bilip.cure(
        model,
        {"data": data},
        ood=["uniform", "scaled:10"],
        uses=USES,
        train=spec.set.draw(20_000, seed=3)[0],
        steps=steps,
        rate=1e-3,
        all_rungs=every,
        name=name,
    )
    row = {
        "library": spec.library,
        "data": spec.data,
        "trained": about,
        "dimension": data[0].numel(),
        "status": result.status,
        "rung": None if result.chosen is None else result.chosen.rung,
        "done": result.done,
        "seconds": round(time.monotonic() - began, 1),
        "unsafe_before": [use for use in USES if _unsafe(result, use)],
        "held_out_before": result.held_out,
        "cost": result.cost,
        "tried": [attempt.plain() for attempt in result.tried],
        "errors": {"before": errors(model, spec, result.before), "after": {}},
        "independent": {},
    }
    if result.status == "cured":
        row["errors"]["after"] = errors(result.model, spec, result.after)
        row["independent"] = independent(result, spec)
    return row


def _unsafe(result: bilip.cures.Cure, use: str) -> bool:
    if use != "ood-inversion":
        return result.before.verdicts[use].status == "unsafe"
    return any(m.measured and m["share_bad"] > 0.01 for m in result.before.find("reconstruction"))


def noise(data: Tensor, seed: int, count: int = 4096) -> dict[str, Tensor]:
    """Sources of this script's own: nothing of bilip's draws them."""
    generator = torch.Generator().manual_seed(seed)
    low, high = data.amin(0), data.amax(0)
    centre = data.mean(0)
    return {
        "data": data[:count],
        "uniform": low + (high - low) * torch.rand(count, *data.shape[1:], generator=generator),
        "scaled:10": centre + 10 * (data[:count] - centre),
    }


@torch.no_grad()
def trip(model: Any, x: Tensor) -> Tensor:
    """Relative errors of round trips, in float64, infinite where something is not finite or raises."""
    bijection = bilip.as_bijection(model)
    found = []
    for part in x.split(256):
        try:
            back = bijection.inverse(bijection(part).clone()).double()
        except Exception:  # a library that asserts: sample by sample
            rows = []
            for one in part.split(1):
                try:
                    rows.append(bijection.inverse(bijection(one).clone()).double())
                except Exception:
                    rows.append(torch.full_like(one, torch.nan, dtype=torch.float64))
            back = torch.cat(rows)
        size = part.double().flatten(1).norm(dim=1)
        error = (back - part.double()).flatten(1).norm(dim=1) / size.clamp_min(float(size.median()))
        found.append(torch.where(torch.isfinite(error), error, torch.inf))
    return torch.cat(found)


def errors(model: Any, spec: Any, record: Any) -> dict[str, dict[str, float]]:
    """Quantiles of the errors of each source, other samples than those of the audits."""
    found = {}
    for name, x in noise(spec.set.draw(4096, seed=11)[0], 12, 2048).items():
        error = trip(model, x)
        found[name] = {
            "median": float(error.median()),
            "q99": float(error.sort().values[int(0.99 * (len(error) - 1))]),
            "bad": float((error > WRONG).double().mean()),
            "not_finite": float(torch.isinf(error).double().mean()),
        }
    return found


@torch.no_grad()
def independent(result: Any, spec: Any) -> dict[str, Any]:
    """Is what was handed over sound? Round trips, samples and likelihoods against a float64 copy, other seeds and other samples.

    A share is called broken where more than 1 % and three standard errors of 1 % in 4,096 are bad.
    """
    limit = 0.01 + 3 * math.sqrt(0.01 / 4096)
    model, treated = result.model, result.chosen.treated
    shares = {
        f"round trip {n}": float((trip(model, x) > WRONG).double().mean())
        for n, x in noise(spec.set.draw(4096, seed=77)[0], 78).items()
    }
    exact = copy.deepcopy(treated.adapted).bijection.double()
    base = treated.adapted.base
    torch.manual_seed(79)
    z = base.sample(4096)
    own, wide = treated.bijection.inverse(z.clone()).double(), exact.inverse(z.double())
    away = (own - wide).norm(dim=1) / wide.norm(dim=1).clamp_min(float(wide.norm(dim=1).median()))
    shares["samples"] = float((~(away < WRONG)).double().mean())
    x = spec.set.draw(4096, seed=80)[0]
    ours = _log_prob(treated.bijection, base, x)
    theirs = _log_prob(exact, base, x.double())
    allowed = 1e-3 * (x[0].numel() + theirs.abs())
    shares["log p"] = float((~((ours - theirs).abs() < allowed)).double().mean())
    return {"bad": shares, "limit": limit, "broken": [name for name, share in shares.items() if share > limit]}


def _log_prob(bijection: Any, base: Any, x: Tensor) -> Tensor:
    z, log_det = bijection.forward_and_log_det(x)
    return (base.log_prob(z) + log_det).double()


def run_small(args: argparse.Namespace) -> None:
    from flow_zoo.flows import EXPLODING

    path = args.out / "small.json"
    rows: dict[str, Any] = read_json(path)["flows"] if path.exists() and args.resume else {}
    names = [n for n in (args.only or EXPLODING) if n not in rows]
    started = time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(small, name, args.steps or 300, args.every): name for name in names}
        for done in concurrent.futures.as_completed(waiting):
            name = waiting[done]
            try:
                rows[name] = done.result()
            except Exception as error:
                rows[name] = {"status": "error", "error": f"{type(error).__name__}: {error}"[:300]}
            row = rows[name]
            rise = row.get("cost", {}).get("rise", math.nan)
            broken = row.get("independent", {}).get("broken", row.get("error"))
            said = f"{row['status']:12} {row.get('rung') or '':12} {rise:+.3f} {row.get('seconds')} s {broken}"
            print(f"{name:28} {said}", flush=True)
            found = {"flows": dict(sorted(rows.items())), "summary": summary(rows)}
            write(path, args, {**found, "seconds": round(time.monotonic() - started)})
    print(json.dumps(summary(rows), indent=1))


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    exploded = {name: row for name, row in rows.items() if row.get("unsafe_before")}
    by_rung: dict[str, int] = {}
    for row in exploded.values():
        if row["status"] == "cured":
            by_rung[row["rung"]] = by_rung.get(row["rung"], 0) + 1
    rises = [
        row["cost"]["rise"] / row["dimension"] / math.log(2)
        for row in exploded.values()
        if row.get("cost", {}).get("rise") is not None and row["status"] == "cured"
    ]
    return {
        "flows": len(rows),
        "exploded": len(exploded),
        "libraries": sorted({row["library"] for row in exploded.values()}),
        "cured": sum(by_rung.values()),
        "cured_by": by_rung,
        "remain": [name for name, row in exploded.items() if row["status"] != "cured"],
        "handed_over_and_broken": [name for name, row in exploded.items() if row.get("independent", {}).get("broken")],
        "largest_cost_bits_per_dim": max(rises, default=None),
        "median_cost_bits_per_dim": sorted(rises)[len(rises) // 2] if rises else None,
        "median_seconds": sorted(row["seconds"] for row in exploded.values())[len(exploded) // 2] if exploded else None,
    }


# ---- the classifier and Glow on CIFAR-10


class Batches:
    """The batches of a recipe, by step, as an endless stream."""

    def __init__(self, batches: Any, seed: int, single: bool) -> None:
        self.batches, self.seed, self.single = batches, seed, single

    def __iter__(self) -> Iterator[Any]:
        from bilip.training import Draw

        step = 0
        while True:
            batch = self.batches(Draw(self.seed, step))
            yield batch[0] if self.single else batch
            step += 1


class Said:
    """Progress, one line for each thing that begins."""

    last = ""

    def __call__(self, text: str, share: float) -> None:
        if text != self.last:
            print(f"  {text}", flush=True)
        self.last = text


def images(args: argparse.Namespace) -> tuple[Any, Any]:
    """Training and test images, as the recipes load them; without --data, random ones, to try the script out."""
    from bilip.data import Images, image_set
    from bilip.recipes.images import shrunk

    if args.data is None:
        draw = partial(torch.randint, generator=torch.Generator().manual_seed(0))
        first, second = (
            Images(draw(256, (n, 3, args.side, args.side), dtype=torch.uint8), draw(10, (n,))) for n in (512, 768)
        )
        return first, second
    train, test = (image_set("cifar10", split, args.data) for split in ("train", "test"))
    return shrunk(train, min(args.images, len(train)), args.side), shrunk(test, len(test), args.side)


def cut(source: Any, start: int, stop: int) -> Any:
    from bilip.data import Images

    return Images(source.x[start:stop], None if source.y is None else source.y[start:stop], source.classes)


def fitted(task: Any, args: argparse.Namespace, steps: int, lr: float) -> float:
    """Train, captured on a GPU, and say how long it took."""
    from bilip.training import Settings, train

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        more = {"warmup": min(100, steps), "save_every": 0, "clip": args.clip}
        settings = Settings(steps=steps, lr=lr, device=args.device, seed=args.seed, **more)
        train(task, settings, folder, progress=lambda *_: None)
    return time.monotonic() - started


class Classifying:
    """The classifier: its batches, its loss, and what it is good for.

    Args:
        trunk: Of the model.
        learning: Training images.
        valid: Images that no step sees.
        tested: Test images.
        args: The command line.
    """

    lr, uses, ood, single = 1e-4, ("inversion",), (), False

    def __init__(self, trunk: Any, learning: Any, valid: Any, tested: Any, args: argparse.Namespace) -> None:
        from bilip.data import ImageBatches
        from bilip.models import classifier
        from bilip.objectives import Classification
        from bilip.recipes.cifar10_classifier import MEAN, STD
        from bilip.training import Draw, Task

        self.steps, self.tune_steps = args.train_steps or 1600, args.steps or 200
        options = {"device": args.device, "mean": MEAN, "std": STD, "pad": 4 if args.side == 32 else 1}
        self.batches = ImageBatches(learning, min(128, len(learning)), **options)
        self.model: Any = classifier(trunk).to(args.device)
        validated, plain, held = ImageBatches(valid, 64, **options), ImageBatches(tested, 64, **options), len(valid)
        self.held_out = [validated.plain(k, min(k + 256, held)) for k in range(0, held, 256)]
        self.test = [plain.plain(k, k + 500) for k in range(0, len(tested), 500)]
        self.x_test = torch.cat([x for x, _ in self.test])
        self.task = Task(self.model, self.batches, Classification())
        self.model.trunk.train()(torch.cat([self.batches(Draw(args.seed + 1, k))[0] for k in range(2)]))

    @staticmethod
    def loss(model: Any, given: Any) -> dict[str, Tensor]:
        x, y = given
        logits = model(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).double().mean()}

    @torch.no_grad()
    def quality(self, model: Any) -> dict[str, float]:
        """Accuracy on all test images."""
        right = [(model(x).argmax(1) == y).double().sum() for x, y in self.test]
        return {"accuracy": float(torch.stack(right).sum()) / len(self.x_test), "images": len(self.x_test)}

    def sources(self) -> dict[str, Tensor]:
        return {"test": self.x_test[:1024]}


class Likely:
    """The flow, likewise."""

    lr, uses, ood, single = 1e-3, USES, ("uniform", "gaussian", "rademacher"), True

    def __init__(self, trunk: Any, learning: Any, valid: Any, tested: Any, args: argparse.Namespace) -> None:
        from bilip.data import dequantize
        from bilip.models import flow
        from bilip.objectives import Likelihood
        from bilip.recipes.images import Dequantized
        from bilip.training import Draw, Task

        def fixed(source: Any, seed: int) -> Tensor:
            generator = torch.Generator(args.device).manual_seed(seed)
            return dequantize(source.x.to(args.device), 8, generator) - 0.5

        self.steps, self.tune_steps, self.device = args.train_steps or 2600, args.steps or 400, args.device
        size = argparse.Namespace(batch=min(64, len(learning)), bits=8)
        self.batches = Dequantized(learning, size, args.device, pad=3 if args.side == 32 else 1, offset=0.5)
        self.model: Any = flow(trunk).to(args.device)
        self.held_out = list(fixed(valid, 1).split(128))
        self.x_test = fixed(tested, 2)
        self.test = list(self.x_test.split(256))
        self.task = Task(self.model, self.batches, Likelihood())
        self.model.bijection.train()(torch.cat([self.batches(Draw(args.seed + 1, k))[0] for k in range(4)]))

    @staticmethod
    def loss(model: Any, given: Any) -> Tensor:
        return -model.log_prob(given).mean()

    @torch.no_grad()
    def quality(self, model: Any) -> dict[str, float]:
        """Bits per dimension on all test images."""
        log_p = torch.cat([model.log_prob(x) for x in self.test]).double()
        size = self.x_test[0].numel() * math.log(2)
        return {"bits_per_dim": float(8 - log_p.mean() / size), "images": len(log_p)}

    def sources(self) -> dict[str, Tensor]:
        x = self.x_test
        low, high, shape = float(x.min()), float(x.max()), (256, *x.shape[1:])
        options: Any = {"device": self.device, "generator": torch.Generator(self.device).manual_seed(5)}
        return {
            "test": x[:1024],
            "uniform": low + (high - low) * torch.rand(shape, **options),
            "gaussian": float(x.mean()) + float(x.std()) * torch.randn(shape, **options),
            "rademacher": torch.where(torch.rand(shape, **options) < 0.5, low, high),
        }


def broken(model: Any, sources: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """How each source comes back."""
    found = {}
    for name, x in sources.items():
        error = trip(model, x)
        finite = error[torch.isfinite(error)]
        found[name] = {
            "bad": float((error > WRONG).double().mean()),
            "not_finite": float(torch.isinf(error).double().mean()),
            "median": float(error.median()),
            "largest_finite": float(finite.max()) if len(finite) else math.inf,
        }
    return found


def big(args: argparse.Namespace, kind: str) -> None:
    """Explode, cure with every rung, and hold each against as many plain steps; what is known is written after each."""
    from bilip.models import glow

    device, started = args.device, time.monotonic()
    train_set, test_set = images(args)
    held = max(64, len(train_set) // 20)
    torch.manual_seed(args.seed)
    trunk_options: dict[str, Any] = {
        "levels": args.levels,
        "blocks": args.blocks,
        "hidden": args.hidden or (128 if kind == "classifier" else 256),
        "coupling": "affine",
        "mixing": "conv1x1",
    }
    trunk = glow((3, args.side, args.side), **trunk_options)
    learning, valid = cut(train_set, 0, len(train_set) - held), cut(train_set, len(train_set) - held, len(train_set))
    subject = (Classifying if kind == "classifier" else Likely)(trunk, learning, valid, test_set, args)
    model = subject.model
    with bilip_tf32():
        seconds = fitted(subject.task, args, subject.steps, subject.lr)
    model.eval()
    print(f"{kind}: trained {subject.steps} steps in {seconds:.0f} s", flush=True)
    found: dict[str, Any] = {
        "model": {
            **trunk_options,
            "side": args.side,
            "trained_steps": subject.steps,
            "training_images": len(learning),
            "data": "CIFAR-10" if args.data else "random",
            "training_seconds": round(seconds),
        },
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "uses": list(subject.uses),
        "status": "not ended",
    }
    rows: list[dict[str, Any]] = []

    def measured(name: str, model: Any = None, **more: Any) -> None:
        measures: dict[str, Any] = {}
        if model is not None:
            try:
                measures = {**subject.quality(model), "sources": broken(model, subject.sources())}
            except Exception as error:  # what one way made of the model must not end the others
                measures = {"error": said_by(error)}
        rows.append({"what": name, **more, **measures})
        print(f"{time.monotonic() - started:4.0f} s {json.dumps(to_plain(rows[-1]))[:600]}", flush=True)
        write(args.out / f"{kind}.json", args, {**found, "rows": rows})

    def attempted(attempt: Attempt) -> None:
        model = None if attempt.treated is None else attempt.treated.model
        facts = {name: getattr(attempt, name) for name in FACTS}
        measured(attempt.what or attempt.rung, model, **facts, steps=attempt.facts.get("steps"))

    measured("as trained", model)
    stream = Batches(subject.batches, args.seed + 2, subject.single)
    common: dict[str, Any] = {"steps": subject.tune_steps, "rate": args.rate or subject.lr}
    control, began = copied(model), time.monotonic()
    options = {"tf32": device == "cuda", **common}
    tuned(control, Tuning(subject.loss, lambda: iter(stream), subject.held_out, "held-out images", **options))
    repair = round(time.monotonic() - began, 1)
    measured(f"control: {subject.tune_steps} more plain steps", control.model, repair_seconds=repair)
    result = bilip.cure(
        model,
        {"test": subject.x_test[:2560].cpu()},
        uses=subject.uses,
        ood=subject.ood,
        loss=subject.loss,
        train=stream,
        held_out=subject.held_out,
        all_rungs=not args.first,
        others=kind == "glow",
        rungs=args.rungs or ORDER,
        tune_tf32=device == "cuda",
        seed=args.seed,
        name=kind,
        time=args.time,
        progress=Said(),
        each=attempted,
        **common,
    )
    print(result.summary(), flush=True)
    rows[0]["verdicts"] = {use: verdict.status.value for use, verdict in result.before.verdicts.items()}
    found.update(
        status=result.status,
        rung=None if result.chosen is None else result.chosen.rung,
        done=result.done,
        must_show=shown(rows, result.done) if result.status == "cured" else {},
        seconds=round(time.monotonic() - started),
    )
    write(args.out / f"{kind}.json", args, {**found, "rows": rows})


def shown(rows: list[dict[str, Any]], done: str) -> dict[str, Any]:
    """What a cure is held to: its cost in points of accuracy or bits per dimension, and the seconds of repair without audits."""
    before, after = rows[0], next(row for row in rows if row["what"] == done)
    cost = (
        {"accuracy_points_lost": 100 * (before["accuracy"] - after["accuracy"]), "allowed": 0.5}
        if "accuracy" in before
        else {"bits_per_dim_more": after["bits_per_dim"] - before["bits_per_dim"], "allowed": 0.02}
    )
    return {
        **cost,
        "images": after["images"],
        "verdicts": after["verdicts"],
        "repair_seconds": after["repair_seconds"],
        "repair_seconds_allowed": 60,
    }


def bilip_tf32() -> Any:
    from bilip.auditing.float32 import float32_products

    return float32_products("tf32")


# ---- what comes out


def write(path: Path, args: argparse.Namespace, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"command": command_line("--data"), "seed": args.seed, "environment": environment(), **found})


def figures(folder: Path) -> None:
    """The figures for which there are results."""
    for name, draw in (("small", scatter), ("classifier", bars), ("glow", bars)):
        if (folder / f"{name}.json").exists():
            draw(folder, name)


def bars(folder: Path, name: str) -> None:
    """A big model: what is lost of each source by each way that was measured."""
    from matplotlib.figure import Figure

    from bilip.recipes.figures.style import save
    from bilip.report.plot import house

    found = read_json(folder / f"{name}.json")
    rows = [row for row in found["rows"] if row.get("sources")]
    sources, unit = list(rows[0]["sources"]), "accuracy" if "accuracy" in rows[0] else "bits_per_dim"
    with house():
        sheet = Figure(figsize=(6.6, 0.9 + 0.18 * len(rows) * (1 + len(sources))), layout="constrained")
        axes = sheet.subplots()
        for k, source in enumerate(sources):
            places = [-(n + 0.8 * (k + 0.5) / len(sources)) for n in range(len(rows))]
            shares = [100 * row["sources"][source]["bad"] for row in rows]
            axes.barh(places, shares, 0.7 / len(sources), color=COLOURS[k], label=source)
            for place, share in zip(places, shares, strict=True):
                axes.text(share + 1, place, f"{share:.3g} %", va="center", fontsize=7)
        labels = [f"{textwrap.fill(row['what'], 44)}\n{_quality(row, unit)}" for row in rows]
        axes.set_yticks([-(n + 0.4) for n in range(len(rows))], labels)
        axes.set(xlim=(0, 112), xlabel="share of samples that do not come back (%)")
        axes.grid(axis="y", visible=False)
        if len(sources) > 1:
            sheet.legend(loc="outside upper right", ncols=len(sources))
        save(sheet, folder / f"{name}.png")


def _quality(row: dict[str, Any], unit: str) -> str:
    return f"accuracy {100 * row[unit]:.2f} %" if unit == "accuracy" else f"{row[unit]:.3f} bits per dimension"


def scatter(folder: Path, name: str) -> None:
    """Errors of the small flows before and after, per source."""
    from matplotlib.figure import Figure

    from bilip.recipes.figures.style import save
    from bilip.report.plot import house

    path = folder / f"{name}.json"
    rows = [row for row in read_json(path)["flows"].values() if row.get("unsafe_before") and row["status"] == "cured"]
    colours = dict(zip(("data", "uniform", "scaled:10"), COLOURS, strict=False))
    top, bottom = 1e8, 1e-8

    def held(value: Any) -> float:
        value = math.inf if value is None else float(value)
        return min(max(value, bottom), top)

    with house():
        sheet = Figure(figsize=(3.4, 3.4), layout="constrained")
        axes = sheet.subplots()
        for source, colour in colours.items():
            before = [held(row["errors"]["before"][source]["q99"]) for row in rows]
            after = [held(row["errors"]["after"][source]["q99"]) for row in rows]
            axes.scatter(before, after, s=16, color=colour, label=source, alpha=0.8, linewidths=0)
        axes.plot([bottom, top], [bottom, top], color="#999999", lw=0.7)
        axes.axhline(WRONG, color="#999999", lw=0.7, ls=":")
        ends = (bottom / 2, 2 * top)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set(xlabel="error of 99 % before", ylabel="error of 99 % after")
        axes.set_title(f"{len(rows)} flows, cured: error of round trips\n(right edge: above 1e8 or not finite)")
        axes.legend(loc="upper left")
        save(sheet, folder / "small.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classifier", action="store_true", help="the affine CIFAR-10 classifier")
    parser.add_argument("--glow", action="store_true", help="the affine Glow")
    parser.add_argument("--figures", action="store_true", help="draw the figures again")
    parser.add_argument(
        "--data", type=Path, help="folder with CIFAR-10, as `bilip data` leaves it or as it is published"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of small flows")
    parser.add_argument("--resume", action="store_true", help="keep the small flows that are measured already")
    parser.add_argument("--every", action="store_true", help="small flows: go on after the first cure")
    parser.add_argument("--first", action="store_true", help="classifier and Glow: stop at the first cure")
    parser.add_argument("--rungs", default="")
    parser.add_argument("--steps", type=int, help="steps of fine-tuning: 300, 200 and 400 by default")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--train-steps", type=int, help="steps until it has exploded: 1600 and 2600 by default")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--time", type=float, default=300, help="seconds for the cure of a big model, audits included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/cure"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if args.classifier:
        big(args, "classifier")
    if args.glow:
        big(args, "glow")
    if not (args.classifier or args.glow or args.figures):
        run_small(args)
    figures(args.out)


if __name__ == "__main__":
    main()
