"""Is a verdict of the audit right? A zoo of flows of six libraries, trained, some broken on purpose, whose truth is computed apart.

Each flow is a task of its own: it is trained, it is audited at `quick` and at `standard` with the six probes that decide verdicts, and
the truth of each use is found (`flow_zoo/truth.py`, which imports nothing of bilip). Results are kept flow by flow, so that a run can be
stopped and taken up again; trained weights lie beside them.

    OMP_NUM_THREADS=1 python benchmarks/verdicts.py --jobs 2 --out results/verdicts
    OMP_NUM_THREADS=1 python benchmarks/verdicts.py --jobs 2 --out results/verdicts --seeds 20
    python benchmarks/verdicts.py --out results/verdicts --summary
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bilip
import flow_zoo.defects  # noqa: F401 - enters the planted ones
from bilip.auditing.verdicts import judge
from bilip.errors import BilipError
from bilip.record import environment, write_json
from flow_zoo.data import read_images
from flow_zoo.flows import FLOWS, Spec, train
from flow_zoo.truth import LIMITS, SAMPLES, other_sources, truth
from flow_zoo.views import View

PROBES = ["consistency", "reconstruction", "likelihood", "log_det", "sampling", "gradient_angle"]
GIVEN = 25_600  # samples that an audit may read
ALLOWED = {"standard": (0.05, 0.10), "quick": (0.05, 0.25)}  # safe uses called unsafe, uses not measured
STEADY = 0.95


# ---- one flow


def trained(spec: Spec, folder: Path, steps: int | None = None) -> tuple[View, dict[str, Any]]:
    """The flow with its defect, from the weights that lie beside the results, or trained now."""
    place = folder / "weights" / f"{spec.name}.pt"
    if place.exists():
        kept = torch.load(place, weights_only=True)
        torch.manual_seed(0)
        view = spec.build()
        view.load_state_dict(kept["weights"])
        view.eval()
        return spec.plant(view), kept["about"]
    view, about = train(spec, steps=steps)
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_suffix(".part")
    torch.save({"weights": view.state_dict(), "about": about}, aside)
    aside.replace(place)
    return spec.plant(view), about


def audited(
    spec: Spec,
    view: View,
    budget: str,
    *,
    given: int = GIVEN,
    seed: int = 0,
    draw: int = 2,
    like: Tensor | None = None,
) -> dict[str, Any]:
    """The audit's verdict on each use, `ood-likelihood` source by source, and what it took. Noise has the range of `like`."""
    x, context = spec.set.draw(given, seed=draw)
    sources: dict[str, Any] = {"test": _pair(x, context)}
    sources |= {name: _pair(*other) for name, other in other_sources(x, context, seed=draw + 3, like=like).items()}
    started = time.monotonic()
    try:
        record = bilip.audit(view.audited(), sources, budget=budget, probes=PROBES, seed=seed, progress=lambda *_: None)
    except BilipError as error:
        seconds = round(time.monotonic() - started, 1)
        return {"seconds": seconds, "refused": str(error)[:400], "uses": {}}
    uses = {use: _told(v) for use, v in record.verdicts.items() if use != "ood-likelihood"}
    limits = {k: v for k, v in record.settings["thresholds"].items() if k in bilip.Thresholds.__dataclass_fields__}
    for source in record.sources:
        if source["role"] == "ood":
            found = judge(record.measurements, [source], bilip.Thresholds(**limits), torch.finfo(torch.float32).eps)
            uses[f"ood-likelihood {source['name']}"] = _told(found["ood-likelihood"])
    return {"seconds": round(time.monotonic() - started, 1), "uses": uses}


def _pair(x: Tensor, context: Tensor | None) -> Any:
    return x if context is None else (x, context)


def _told(verdict: Any) -> dict[str, Any]:
    return {"status": str(verdict.status.value), "reason": verdict.reason[:400], "interval": verdict.interval}


def examine(
    name: str,
    folder: Path,
    *,
    steps: int | None = None,
    samples: int = SAMPLES,
    given: int = GIVEN,
    seconds: float = 130.0,
    budgets: Iterable[str] = tuple(LIMITS),
) -> dict[str, Any]:
    """All about one flow, stage by stage; each is written when it is done, and not repeated."""
    spec, place = FLOWS[name], folder / f"{name}.json"
    found: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {}
    view, about = trained(spec, folder, steps)
    found |= {
        "name": name,
        "library": spec.library,
        "families": list(spec.families),
        "data": spec.data,
        "dimension": int(torch.tensor(spec.set.shape).prod()),
        "defect": spec.defect,
        "held_out": spec.held_out,
        "training": about,
        "environment": environment(),
    }
    for budget in budgets:
        if budget not in found.setdefault("audits", {}):
            found["audits"][budget] = audited(spec, view, budget, given=given)
            write_json(place, found)
    if "truth" not in found:
        started = time.monotonic()
        found["truth"] = _rounded(truth(spec, view, samples=samples, seconds=seconds))
        found["truth_seconds"] = round(time.monotonic() - started, 1)
        write_json(place, found)
    return found


def repeated(name: str, folder: Path, seeds: int, *, steps: int | None = None, given: int = 2560) -> dict[str, Any]:
    """The same flow audited at `quick` with other seeds and other samples of its data and of noise over one range."""
    spec, place = FLOWS[name], folder / "seeds" / f"{name}.json"
    found: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {"name": name, "audits": {}}
    view, _ = trained(spec, folder, steps)
    place.parent.mkdir(parents=True, exist_ok=True)
    like, _ = spec.set.draw(GIVEN, seed=2)
    for seed in range(seeds):
        if str(seed) not in found["audits"]:
            told = audited(spec, view, "quick", given=given, seed=seed, draw=1000 + 10 * seed, like=like)
            found["audits"][str(seed)] = told
            write_json(place, found)
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, Mapping) else value


# ---- all of them


def _work(name: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if args.data:
        read_images(args.data)
    if args.seeds:
        repeated(name, args.out, args.seeds, steps=args.steps)
    else:
        examine(name, args.out, steps=args.steps, samples=args.samples, seconds=args.truth_seconds)


def run(names: Iterable[str], args: argparse.Namespace) -> None:
    """A process for each flow, `--jobs` at a time, the longest first; what is not done when the minutes are over is left."""
    context, started = multiprocessing.get_context("spawn"), time.monotonic()
    waiting = sorted((n for n in names if not _done(n, args)), key=lambda n: -FLOWS[n].cost)
    total, running, failed = len(waiting), dict[str, Any](), list[str]()
    print(f"{total} flows to do, {args.jobs} at a time", flush=True)
    while waiting or running:
        over = args.minutes is not None and time.monotonic() - started > 60 * args.minutes
        if over:
            for process, _ in running.values():
                process.terminate()
            print(f"the time is over: {len(waiting) + len(running)} flows are left", flush=True)
            break
        while waiting and len(running) < args.jobs:
            name = waiting.pop(0)
            process = context.Process(target=_work, args=(name, args))
            process.start()
            running[name] = (process, time.monotonic())
        for name, (process, since) in list(running.items()):
            if process.is_alive():
                continue
            del running[name]
            seconds = time.monotonic() - since
            if process.exitcode:
                failed.append(name)
            said = "failed" if process.exitcode else _line(name, args)
            print(f"{total - len(waiting) - len(running):3d}/{total} {name}: {seconds:.0f} s, {said}", flush=True)
        time.sleep(0.2)
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)


def _done(name: str, args: argparse.Namespace) -> bool:
    place = args.out / "seeds" / f"{name}.json" if args.seeds else args.out / f"{name}.json"
    if not place.exists():
        return False
    found = json.loads(place.read_text())
    if args.seeds:
        return len(found["audits"]) >= args.seeds
    return "truth" in found and set(found["audits"]) == set(LIMITS)


def _line(name: str, args: argparse.Namespace) -> str:
    if args.seeds:
        return f"{args.seeds} audits"
    found = json.loads((args.out / f"{name}.json").read_text())
    wrong = [f"{row['use']} at {row['budget']}: {row['outcome']}" for row in compare(found) if row["outcome"] in WRONG]
    return "; ".join(wrong) or "all as it is"


# ---- judging the judge

WRONG = ("false safe", "called unsafe")


def compare(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each use and budget: the truth, the audit's verdict, and what that amounts to."""
    for budget, audit in found["audits"].items():
        for use, known in found["truth"].items():
            true = known[budget]
            if true == "none":  # there is nothing that the use could be: no gradient, or no function
                continue
            said = audit["uses"].get(use, {"status": "not-measured", "reason": audit.get("refused", "")})
            yield {
                "flow": found["name"],
                "library": found["library"],
                "defect": found["defect"],
                "held_out": found["held_out"],
                "budget": budget,
                "use": use,
                "truth": true,
                "audit": said["status"],
                "reason": said["reason"],
                "outcome": _outcome(true, said["status"]),
            }


def _outcome(true: str, said: str) -> str:
    if true == "borderline":
        return "borderline"
    if said == "not-measured":
        return "not measured"
    if said == true:
        return "right"
    return "false safe" if said == "safe" else "called unsafe"


def counted(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A confusion table in numbers: how many uses there are, and how many verdicts are wrong in which way."""
    outcome, true = Counter(r["outcome"] for r in rows), Counter(r["truth"] for r in rows)
    decided = true["safe"] + true["unsafe"]
    return {
        "uses": len(rows),
        "safe": true["safe"],
        "unsafe": true["unsafe"],
        "borderline": true["borderline"],
        "right": outcome["right"],
        "false_safe": outcome["false safe"],
        "called_unsafe": outcome["called unsafe"],
        "called_unsafe_share": round(outcome["called unsafe"] / max(1, true["safe"]), 4),
        "not_measured": outcome["not measured"],
        "not_measured_share": round(outcome["not measured"] / max(1, decided), 4),
    }


def summary(folder: Path) -> dict[str, Any]:
    """The tables, from the files of a folder."""
    flows = [json.loads(p.read_text()) for p in sorted(folder.glob("*.json")) if p.name != "summary.json"]
    flows = [f for f in flows if "truth" in f]
    rows = [row for found in flows for row in compare(found)]
    table: dict[str, Any] = {}
    for budget in LIMITS:
        here = [r for r in rows if r["budget"] == budget]
        groups = {
            "all": here,
            "held-out third": [r for r in here if r["held_out"]],
            "the others": [r for r in here if not r["held_out"]],
            "trained honestly": [r for r in here if not r["defect"]],
            "planted": [r for r in here if r["defect"]],
        }
        groups |= {
            library: [r for r in here if r["library"] == library] for library in sorted({f["library"] for f in flows})
        }
        table[budget] = {name: counted(group) for name, group in groups.items()}
        unsafe, missing = ALLOWED[budget]
        held = table[budget]["all"]
        table[budget]["kept"] = (
            held["false_safe"] == 0 and held["called_unsafe_share"] <= unsafe and held["not_measured_share"] <= missing
        )
    return {
        "command": "python benchmarks/verdicts.py",
        "flows": len(flows),
        "planted": sum(bool(f["defect"]) for f in flows),
        "held_out": [f["name"] for f in flows if f["held_out"]],
        "families": dict(sorted(Counter(k for f in flows if not f["defect"] for k in f["families"]).items())),
        "dimensions": dict(sorted(Counter(str(f["dimension"]) for f in flows).items())),
        "table": table,
        "wrong": [r for r in rows if r["outcome"] in (*WRONG, "not measured")],
        "seconds": {
            budget: {f["name"]: f["audits"][budget]["seconds"] for f in flows if budget in f["audits"]}
            for budget in LIMITS
        },
        "seeds": steadiness(folder),
        "environment": flows[0]["environment"] if flows else environment(),
    }


def steadiness(folder: Path) -> dict[str, Any]:
    """How often a verdict is the usual one when seed and samples change, and whether the others say that they are borderline."""
    same = others = borderline = 0
    odd = []
    for place in sorted((folder / "seeds").glob("*.json")):
        found = json.loads(place.read_text())
        audits = [a["uses"] for a in found["audits"].values()]
        for use in sorted({u for a in audits for u in a}):
            told = [a[use] for a in audits if use in a]
            usual, times = Counter(t["status"] for t in told).most_common(1)[0]
            same, others = same + times, others + len(told) - times
            rest = [t for t in told if t["status"] != usual]
            open_ = [t for t in (rest if usual != "not-measured" else told) if t["reason"].startswith("Borderline")]
            borderline += min(len(open_), len(rest))
            if rest:
                said = dict(Counter(t["status"] for t in told))
                odd.append({"flow": found["name"], "use": use, "verdicts": said, "borderline": len(open_)})
    total = same + others
    return {
        "verdicts": total,
        "same_share": round(same / total, 4) if total else None,
        "others": others,
        "others_borderline": borderline,
        "kept": bool(total) and same / total >= STEADY and borderline == others,
        "odd": odd,
    }


def markdown(found: Mapping[str, Any]) -> str:
    """The tables as Markdown."""
    lines = [
        f"{found['flows']} flows, {found['planted']} of them with a planted defect; {len(found['held_out'])} are the held-out third.",
        "",
        "| budget | flows | uses | truly safe | truly unsafe | borderline | false safe | safe called unsafe | not measured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for budget, groups in found["table"].items():
        for name, c in groups.items():
            if name == "kept":
                continue
            lines.append(
                f"| {budget} | {name} | {c['uses']} | {c['safe']} | {c['unsafe']} | {c['borderline']} | {c['false_safe']} | "
                f"{c['called_unsafe']} ({100 * c['called_unsafe_share']:.1f} %) | "
                f"{c['not_measured']} ({100 * c['not_measured_share']:.1f} %) |"
            )
    wrong = [r for r in found["wrong"] if r["outcome"] in WRONG]
    lines += ["", "Wrong verdicts:" if wrong else "No verdict is wrong.", ""]
    lines += [f"* `{r['flow']}`, {r['use']} at {r['budget']}: {r['outcome']}. {r['reason']}" for r in wrong]
    seeds = found["seeds"]
    if seeds["verdicts"]:
        share = f"{100 * seeds['same_share']:.1f} %"
        lines += [
            "",
            f"Over seeds: {share} of {seeds['verdicts']} verdicts are the usual one; of the {seeds['others']} others ",
        ]
        lines[-1] += f"{seeds['others_borderline']} are borderline, or stand against a usual one that is."
    return "\n".join(lines).rstrip() + "\n"


def _fill(page: Path, text: str) -> None:
    """Put the tables between the marks of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition("<!-- verdicts -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (begin and end):
        raise SystemExit(
            f"--docs {page}: expected the lines <!-- verdicts --> and <!-- end -->, with the tables between them."
        )
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/verdicts"), help="folder of the results")
    parser.add_argument("--jobs", type=int, default=1, help="flows at a time, each on one core")
    parser.add_argument("--only", action="append", metavar="NAME", help="these flows only; may hold * and ?")
    parser.add_argument("--minutes", type=float, help="stop after so many")
    parser.add_argument("--seeds", type=int, default=0, help="audit each flow so many times at quick, with other seeds")
    parser.add_argument("--data", type=Path, help="real images for the sets of 784 dimensions, .npy or .npz")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples behind each truth")
    parser.add_argument("--truth-seconds", type=float, default=130.0, help="time for the truth of one flow, roughly")
    parser.add_argument("--steps", type=int, help="fewer steps of training, to try something")
    parser.add_argument("--list", action="store_true", help="list the zoo")
    parser.add_argument("--summary", action="store_true", help="write summary.json and summary.md from what is there")
    parser.add_argument("--docs", type=Path, help="with --summary: a page whose tables are written anew")
    args = parser.parse_args()
    wanted = args.only or ["*"]
    names = [n for n in FLOWS if any(fnmatch.fnmatch(n, pattern) for pattern in wanted)]
    if not names:
        raise SystemExit(f"--only {' '.join(wanted)}: no such flow; --list shows them.")
    if args.list:
        for name in names:
            spec = FLOWS[name]
            held = "held out" if spec.held_out else ""
            print(f"{name:32s} {', '.join(spec.families):38s} {spec.data:18s} {held:9s} {spec.defect}")
        return
    if args.summary:
        found = summary(args.out)
        write_json(args.out / "summary.json", found)
        (args.out / "summary.md").write_text(markdown(found), encoding="utf-8")
        if args.docs:
            _fill(args.docs, markdown(found))
        print(markdown(found))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    run(names, args)


if __name__ == "__main__":
    main()
