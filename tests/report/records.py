"""Synthetic records for rendering only: shaped as docs/record.md says, but made up. No number here was measured on a model."""

from __future__ import annotations

import base64
import math
import struct
import zlib

import numpy as np

from bilip.record import AuditRecord, Histogram, Measurement, Picture, Status, Verdict

EPS = 2.0**-23
WRONG = math.sqrt(EPS)
INVENTED = "This record is invented to test the rendering."
ENVIRONMENT = {"python": "3.11.9", "system": "Linux", "machine": "x86_64", "cores": "8"}
ENVIRONMENT |= {"bilip": "0.1.0", "torch": "2.13.0"}
THRESHOLDS = {"relative_p999": 3.5e-4, "share_non_finite": 0.0, "gradient_relative": 1e-2, "antisymmetry_p999": 1e-3}


def settings(**more) -> dict:
    command = (
        "bilip audit my_package.models:load_flow --data x.npy --ood uniform,gaussian --out run.json --html run.html"
    )
    known = {"seed": 0, "budget": "normal", "thresholds": THRESHOLDS, "seconds": 41.7, "tf32": False}
    return known | {"command": command} | more


def errors(rng, count: int, log_mean: float, spread: float, broken: float) -> np.ndarray:
    values = 10 ** rng.normal(log_mean, spread, count)
    values[-1] *= 1e4 ** (spread > 1)  # a far outlier
    values[: int(broken * count)] = np.inf
    values[: int(broken * count) // 3] = np.nan
    return values


def reconstruction(rng, source: str, log_mean: float, spread=0.4, broken=0.0, count=4096, pictures=()) -> Measurement:
    first, back, after = (errors(rng, count, log_mean + shift, spread, broken) for shift in (0.0, 0.3, 1.1))
    finite = np.isfinite(first)
    worst = np.argsort(np.where(np.isnan(first), np.inf, first))[::-1][:5]
    h, hb, ha = Histogram.of(first), Histogram.of(back), Histogram.of(after)
    values = {"count": count, "share_nan": float(np.isnan(first).mean()), "share_inf": float(np.isinf(first).mean())}
    wrong = float((first[finite] > WRONG).sum() / count)
    values |= {"share_failed": 0.0, "share_wrong": wrong, "wrong_limit": WRONG, "eps": EPS}
    for name, scale in (("l2", 8.0), ("relative", 1.0), ("max", 2.0)):
        for label, q in (("median", 0.5), ("p99", 0.99), ("p999", 0.999)):
            values[f"{name}_{label}"] = scale * h.quantile(q)
        values[f"{name}_max"] = scale * h.largest
    values |= {"latent_relative_median": hb.quantile(0.5), "latent_relative_p999": hb.quantile(0.999)}
    values |= {"latent_relative_max": hb.largest, "latent_share_non_finite": hb.share_non_finite, "rounds": 10}
    values |= {"after_relative_median": ha.quantile(0.5), "after_relative_max": ha.largest}
    values |= {"after_share_non_finite": ha.share_non_finite, "failure": ""}
    rows = tuple(
        {"sample": int(i), "l2": 8 * float(first[i]), "relative": float(first[i]), "finite": bool(finite[i])}
        for i in worst
    )
    histograms = {"relative": h, "latent_relative": hb, "after_relative": ha}
    return Measurement("reconstruction", source, values, rows=rows, histograms=histograms, pictures=tuple(pictures))


def blame(rng, source: str, blocks: list, start: float, growth: float, guilty: int | None, broken=0.0) -> Measurement:
    rows, carried = [], start
    for index in reversed(range(len(blocks))):
        bad = guilty is not None and index <= guilty
        jump = 3.0 if index == guilty else 0.0
        carried += growth + jump
        value = math.inf if bad and broken > 0.5 and index < guilty - 3 else 10.0**carried
        local = 10 ** (-7 + 0.3 * rng.random() + jump)
        grown = 10 ** (growth + jump)
        rows.append(
            {"block": blocks[index]["name"], "kind": blocks[index]["kind"], "gain": grown, "sigma_min": 1 / grown}
            | {"local_median": local, "local_max": 5 * local, "carried_median": value, "carried_max": 20 * value}
            | {"share_non_finite": broken if bad else 0.0, "forward_non_finite": 0.0}
            | {"sigma_max": 3.0 + rng.random(), "condition": 4 * grown, "log_det_error": 1e-6}
        )
    values = {"samples": 256, "guilty": "", "guilty_kind": "", "why": "", "first_non_finite": ""}
    if guilty is not None:
        values |= {"guilty": blocks[guilty]["name"], "guilty_kind": blocks[guilty]["kind"]}
        values |= {
            "why": "its inverse magnifies the error 5.0e3 times: the scale reaches 2.1e-4",
            "first_non_finite": blocks[guilty]["name"],
        }
    return Measurement("blame", source, values, rows=tuple(reversed(rows)))


def spectrum(source: str, dimension: int, decades: float) -> Measurement:
    sigma = 10 ** np.linspace(decades / 3, -2 * decades / 3, dimension) * (1 + 0.05 * np.sin(np.arange(dimension)))
    sigma = np.sort(sigma)[::-1]
    resolved = (sigma > sigma[0] * 2.0**-52 * dimension).astype(float)
    condition = float(sigma[0] / sigma[-1])
    values = {"method": "exact", "dimension": dimension, "samples": 16}
    values |= {"sigma_max": float(sigma[0]), "sigma_min": float(sigma[-1])}
    values |= {"condition": condition, "sigma_max_error": 1e-15, "sigma_min_error": 1e-4, "eps": 2.0**-52}
    values |= {"sigma_max_status": "measured", "sigma_min_status": "measured" if resolved[-1] else "one-sided"}
    series = {"singular_values": tuple(map(float, sigma)), "resolved": tuple(map(float, resolved))}
    return Measurement("spectrum", source, values, series)


def bounds(source: str, blocks: list, each: float) -> Measurement:
    rows = tuple(
        {"block": b["name"], "kind": b["kind"], "log10_forward": 0.4, "log10_inverse": each * (1 + 0.3 * math.sin(i))}
        | {"total_forward": 0.4 * (i + 1), "total_inverse": each * (i + 1), "magnitude": 4.0 * 1.3**i}
        for i, b in enumerate(blocks)
    )
    total = each * len(blocks)
    values = {"log10_forward": 0.4 * len(blocks), "log10_inverse": total, "measured_log10_forward": 0.1 * len(blocks)}
    values |= {"measured_log10_inverse": 0.3 * total, "domain": "[-3.8, 4.1]"}
    values["first_beyond_precision"] = blocks[int(7 / each)]["name"] if total > 7 else ""
    return Measurement("bounds", source, values, rows=rows)


def log_det(rng, source: str, log_mean: float, broken=0.0) -> Measurement:
    h = Histogram.of(errors(rng, 1024, log_mean, 0.5, broken))
    values = {"count": 1024, "antisymmetry_median": h.quantile(0.5), "antisymmetry_p999": h.quantile(0.999)}
    values |= {"antisymmetry_max": h.largest, "share_non_finite": h.share_non_finite, "slogdet_samples": 16}
    values |= {"slogdet_error_max": 10 ** (log_mean + 1), "claimed": -212.4471, "measured": -212.4468}
    return Measurement("log_det", source, values, histograms={"antisymmetry": h})


def sampling(rng, log_mean: float, broken: float, pictures=()) -> Measurement:
    h = Histogram.of(errors(rng, 2048, log_mean, 0.5, broken))
    values = {"count": 2048, "share_non_finite": broken, "share_failed": 0.0}
    values["reencode_share_non_finite"] = h.share_non_finite
    values |= {"reencode_relative_median": h.quantile(0.5), "reencode_relative_p999": h.quantile(0.999)}
    values |= {"reencode_relative_max": h.largest, "sample_bits_median": 3.61, "data_bits_median": 3.44}
    values["sample_bits_share_non_finite"] = broken
    return Measurement("sampling", "base", values, histograms={"reencode_relative": h}, pictures=tuple(pictures))


def precision(source: str, condition: float) -> Measurement:
    rungs = {"float64": 2.0**-52, "float32": EPS, "tf32": 2.0**-10, "bfloat16": 2.0**-7, "float16": 2.0**-10}
    rows = []
    for rung, eps in rungs.items():
        error = eps * condition / 30
        broken = 0.0 if error < 1e2 else 0.4
        rows.append(
            {"rung": rung, "eps": eps, "error_median": error, "error_max": math.inf if broken else 30 * error}
            | {"share_non_finite": broken, "predicted": eps * condition, "delta": 2 * eps, "delta_2": 3 * eps}
            | {"lip_inverse": condition / 50, "right_side": eps * condition / 20, "left_side": error, "holds": True}
        )
    cure = next((row["rung"] for row in rows if row["error_max"] < WRONG), "none")
    return Measurement("precision", source, {"cure": cure, "own": "float32", "samples": 256}, rows=tuple(rows))


def attack(source: str, start: float, ends: dict, pictures=()) -> Measurement:
    rows, series = [], {}
    for method, end in ends.items():
        curve = [10 ** (start + (min(end, 6) - start) * (1 - math.exp(-i / 25))) for i in range(100)]
        if math.isinf(end):
            curve = curve[:70] + [math.inf] * 30
        series[method] = tuple(curve)
        rows.append(
            {"method": method, "success": curve[-1] > WRONG, "steps": 100, "start_error": curve[0]}
            | {"end_error": curve[-1]}
            | {"worst_error": max(curve), "worst_relative": max(curve) / 4, "left_box": False, "samples": 64}
        )
    worst = max(rows, key=lambda row: row["worst_relative"])
    values = {"box": "[-3.8, 4.1]", "radius": 0.1, "step": 0.01, "steps": 100, "success": bool(worst["success"])}
    values |= {"worst_relative": worst["worst_relative"], "method": worst["method"]}
    return Measurement("attack", source, values, series, tuple(rows), pictures=tuple(pictures))


def trust(source: str, trusted: float) -> Measurement:
    lost = 1 - trusted
    values = {"count": 1024, "share_trusted": trusted, "share_round_trip": lost, "share_log_det": 0.8 * lost}
    values |= {"share_condition": 0.9 * lost, "trusted_log_prob_median": -812.3, "untrusted_log_prob_median": -15530.0}
    return Measurement("trust", source, values)


def named_blocks(count: int, kinds: tuple[str, ...]) -> list[dict]:
    return [{"name": str(i), "kind": kinds[i % len(kinds)]} for i in range(count)]


def source(name: str, role: str, count=4096, shape=(16,), description="") -> dict:
    return {"name": name, "role": role, "count": count, "shape": list(shape), "description": description}


def judged(use: str, status: str, why: str, *more) -> Verdict:
    """`more`: the quantity, its value, its limit, the source, and the remedy."""
    return Verdict(use, Status(status), why, *more)


def record(model: dict, sources, measurements, verdicts, created: str, **options) -> AuditRecord:
    """With what is the same in all of them."""
    shape = sources[0]["shape"]
    dimension = math.prod(shape)
    model = {"library": "bilip", "dtype": "float32", "device": "cpu", "base": True} | model
    model |= {"shape": shape, "latent_shape": [dimension], "dimension": dimension}
    verdicts = {verdict.use: verdict for verdict in verdicts}
    about = ENVIRONMENT | {"note": INVENTED}
    return AuditRecord(model, sources, tuple(measurements), verdicts, settings(**options), about, created)


def unsafe() -> AuditRecord:
    """A deep affine flow whose inverse explodes off the data."""
    rng = np.random.default_rng(0)
    blocks = named_blocks(32, ("ActNorm", "InvertibleConv1x1", "AffineCoupling"))
    sources = (
        source("test", "data", description="held-out rows of x.npy"),
        source("uniform", "ood"),
        source("gaussian", "ood"),
    )
    measurements = [
        reconstruction(rng, "test", -4.8, 0.5),
        reconstruction(rng, "uniform", -1.0, 1.6, 0.126),
        reconstruction(rng, "gaussian", -2.6, 1.2, 0.013),
        blame(rng, "test", blocks, -6.9, 0.05, None),
        blame(rng, "uniform", blocks, -6.9, 0.12, 17, 0.6),
        blame(rng, "gaussian", blocks, -6.9, 0.1, 17, 0.1),
        spectrum("test", 16, 6),
        spectrum("uniform", 16, 19),
        spectrum("gaussian", 16, 12),
        *(bounds(s["name"], blocks, each) for s, each in zip(sources, (1.9, 2.7, 2.2), strict=True)),
        log_det(rng, "test", -5),
        log_det(rng, "uniform", -2, 0.1),
        log_det(rng, "gaussian", -4, 0.02),
        sampling(rng, -3.4, 0.02),
        precision("test", 8e5),
        attack("test", -5, {"roundtrip": math.inf, "gain": -1.2, "random": -4.6, "singular": 0.7}),
        trust("test", 0.995),
        trust("uniform", 0.08),
        trust("gaussian", 0.41),
        Measurement("map", "", reason="the model has 16 dimensions; a map needs 2"),
    ]
    verdicts = (
        judged(
            "sampling",
            "unsafe",
            "2 % of the samples are not finite.",
            *("share_non_finite", 0.02, 0.0, "base"),
            "Bound the scale away from 0 (scale='half_sigmoid') or use additive coupling.",
        ),
        judged(
            "likelihood",
            "safe",
            "On 'test' the relative error is 7.1e-5 at the 99.9th percentile, below 3.5e-4.",
            *("relative_p999", 7.1e-5, 3.5e-4, "test"),
        ),
        judged(
            "ood-likelihood",
            "unsafe",
            "On 'uniform' 12.6 % of the reconstructions are Inf or NaN: their likelihood means nothing.",
            *("share_non_finite", 0.126, 0.0, "uniform"),
            "Use blocks with a global bound: additive coupling with held nets, or residual blocks.",
        ),
        Verdict(
            "reversible-gradients",
            Status.NOT_MEASURED,
            "The probe 'gradients' was not asked for.",
            remedy="Add it: --probes gradients.",
        ),
    )
    model = {"name": "affine flow, 32 blocks", "parameters": 182432, "blocks": blocks}
    return record(model, sources, measurements, verdicts, "2026-01-05T10:11:12Z")


def safe() -> AuditRecord:
    """A flow of additive couplings with held nets."""
    rng = np.random.default_rng(1)
    blocks = named_blocks(8, ("AdditiveCoupling", "Permutation"))
    sources = (source("test", "data"), source("uniform", "ood"), source("gaussian", "ood"))
    measurements = []
    for s in sources:
        name = s["name"]
        measurements += [
            reconstruction(rng, name, -6.9, 0.15),
            blame(rng, name, blocks, -7.2, 0.03, None),
            spectrum(name, 16, 1.1),
        ]
        measurements += [bounds(name, blocks, 0.08), log_det(rng, name, -7), trust(name, 1.0)]
    measurements += [
        sampling(rng, -6.8, 0.0),
        precision("test", 12.0),
        attack("test", -6.8, {"roundtrip": -6.4, "gain": -6.5, "random": -6.7}),
    ]
    verdicts = [
        judged(use, "safe", "All relative errors stay below 3.5e-4.", "relative_p999", 2.4e-7, 3.5e-4, where)
        for use, where in zip(
            ("sampling", "likelihood", "ood-likelihood", "reversible-gradients"),
            ("base", "test", "uniform", "test"),
            strict=True,
        )
    ]
    model = {"name": "additive flow, held nets", "parameters": 20480, "blocks": blocks}
    return record(model, sources, measurements, verdicts, "2026-01-05T10:13:00Z", seed=1)


def plane() -> AuditRecord:
    """A two-dimensional flow with a map of its errors: fine on the data, Inf in two corners."""
    rng = np.random.default_rng(2)
    blocks = named_blocks(16, ("AffineCoupling", "Permutation"))
    points, low, high = 81, -10.0, 10.0
    axis = np.linspace(low, high, points)
    x, y = np.meshgrid(axis, axis)
    log = (
        -6.6
        + 0.05 * np.maximum(np.abs(x) - 3, 0) ** 2
        + 0.09 * np.maximum(np.abs(y) - 4, 0) ** 2
        + 0.15 * np.sin(3 * x) * np.cos(2 * y)
    )
    error = np.where((x * y > 70) | (np.hypot(x + 8, y - 8) < 1.5), np.inf, 10**log)
    values = {"low": low, "high": high, "points": points, "data_low": -4.0, "data_high": 4.0}
    values["share_non_finite"] = float(np.isinf(error).mean())
    sources = (source("checkerboard", "data", shape=(2,)), source("uniform", "ood", shape=(2,)))
    measurements = (
        reconstruction(rng, "checkerboard", -6.3, 0.4),
        reconstruction(rng, "uniform", -4.4, 1.5, 0.03),
        Measurement(
            "map",
            "",
            values,
            {"error": tuple(map(float, error.ravel()))},
            notes=("The grid is finer than the training data.",),
        ),
        blame(rng, "checkerboard", blocks, -7, 0.04, None),
        blame(rng, "uniform", blocks, -7, 0.3, 9, 0.03),
        spectrum("checkerboard", 2, 2.2),
        spectrum("uniform", 2, 9),
        sampling(rng, -5.8, 0.0),
        precision("checkerboard", 400.0),
    )
    ood = ("share_non_finite", 0.03, 0.0, "uniform", "Use blocks with a global bound.")
    verdicts = (
        judged("sampling", "safe", "All samples are finite.", "share_non_finite", 0.0, 0.0, "base"),
        judged("likelihood", "safe", "Errors on the data are small.", "relative_p999", 8.3e-6, 3.5e-4, "checkerboard"),
        judged("ood-likelihood", "unsafe", "On 'uniform' 3 % of the reconstructions are Inf.", *ood),
        judged("reversible-gradients", "safe", "Gradients agree.", "gradient_relative", 3e-6, 1e-2, "checkerboard"),
    )
    model = {"name": "RealNVP on the checkerboard", "device": "cuda", "parameters": 52100, "blocks": blocks}
    return record(model, sources, measurements, verdicts, "2026-01-05T10:20:00Z", seed=2)


def png(pixels: np.ndarray) -> str:
    """A PNG of (height, width, 3) bytes, base64."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + row.astype(np.uint8).tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()


def pair(rng, group: str, broken: float) -> list[Picture]:
    """An image and its reconstruction, a share of whose pixels is cyan."""
    y, x = np.mgrid[0:32, 0:32] / 31
    phase = rng.uniform(0, 6, 3)
    image = np.stack([127 + 120 * np.sin(4 * x + 5 * y + p) for p in phase], -1)
    again = image + rng.normal(0, 60 * broken, image.shape)
    again[rng.random((32, 32)) < broken] = (0, 255, 255)
    return [
        Picture(f"{group}: input", f"{group}, a 32 by 32 image", png(np.clip(image, 0, 255)), group),
        Picture(
            "reconstruction",
            f"{group}, its reconstruction; {100 * broken:.0f} % of the pixels are broken",
            png(np.clip(again, 0, 255)),
            group,
        ),
    ]


def images() -> AuditRecord:
    """A Glow on small images, with pictures; the spectrum by Lanczos."""
    rng = np.random.default_rng(3)
    blocks = [
        {"name": f"level{i // 16}.{i % 16}", "kind": ("ActNorm", "InvertibleConv1x1", "AffineCoupling")[i % 3]}
        for i in range(48)
    ]
    shape = (3, 32, 32)
    sources = (
        source("cifar10 test", "data", 512, shape),
        source("svhn", "ood", 512, shape),
        source("uniform", "ood", 512, shape),
    )
    pictures = [p for i in range(4) for p in pair(rng, f"sample {17 * i}", 0.12 * i)]
    lanczos = {"method": "lanczos", "dimension": 3072, "samples": 4, "eps": EPS, "condition": 2.6e8}
    lanczos |= {"sigma_max": 812.0, "sigma_max_error": 1e-6, "sigma_max_status": "measured"}
    lanczos |= {"sigma_min": 3.1e-6, "sigma_min_error": 0.02, "sigma_min_status": "one-sided"}
    measurements = (
        reconstruction(rng, "cifar10 test", -3.9, 0.5, 0.002, 512, pictures),
        reconstruction(rng, "svhn", -2.5, 1.0, 0.05, 512),
        reconstruction(rng, "uniform", -1.0, 1.0, 0.91, 512, pair(rng, "sample 3", 0.7)),
        blame(rng, "cifar10 test", blocks, -6.9, 0.06, 40, 0.002),
        blame(rng, "uniform", blocks, -6.9, 0.2, 32, 0.91),
        Measurement("spectrum", "cifar10 test", lanczos, notes=("3072 dimensions: Lanczos, not an exact SVD.",)),
        sampling(rng, -3.0, 0.004, [p for i in range(6) for p in pair(rng, f"draw {i}", 0.0)[:1]]),
        attack("cifar10 test", -4, {"roundtrip": 2.0, "random": -3.6}, pair(rng, "found", 0.4)),
        Measurement("precision", "cifar10 test", reason="the budget 'quick' leaves it out"),
        Measurement("log_det", "cifar10 test", reason="the model states no log-determinant"),
    )
    sampled = ("share_non_finite", 0.004, 0.0, "base", "Regularize: FiniteDifference(weight=1e-4).")
    likely = ("relative_p999", math.inf, 3.5e-4, "cifar10 test", "Regularize, or hold the scale above 0.5.")
    ood = ("share_non_finite", 0.91, 0.0, "uniform", "Use blocks with a global bound.")
    turned = ("gradient_angle", 87.0, 10.0, "cifar10 test", "Use Guard, or float64 anchors.")
    verdicts = (
        judged("sampling", "unsafe", "0.4 % of the samples are not finite.", *sampled),
        judged("likelihood", "unsafe", "Errors reach Inf on the data.", *likely),
        judged("ood-likelihood", "unsafe", "91 % of the reconstructions are Inf or NaN.", *ood),
        judged("reversible-gradients", "unsafe", "The angle is 87 degrees.", *turned),
    )
    model = {"name": "Glow 3x16", "library": "normflows", "device": "cuda", "parameters": 44_235_000, "blocks": blocks}
    return record(model, sources, measurements, verdicts, "2026-01-05T11:00:00Z", budget="quick")


def nearly_empty() -> AuditRecord:
    """A record of an audit that measured nothing."""
    verdicts = {use: Verdict(use, Status.NOT_MEASURED, "The audit was stopped.") for use in ("sampling", "likelihood")}
    lost = Measurement(
        "reconstruction", "test", reason="the model raised RuntimeError('out of memory') on the first batch"
    )
    return AuditRecord(model={"name": "unnamed"}, measurements=(lost,), verdicts=verdicts)


ALL = {"unsafe": unsafe, "safe": safe, "plane": plane, "images": images, "nearly_empty": nearly_empty}
