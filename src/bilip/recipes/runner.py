"""Running a recipe: parts and seeds, one after the other or side by side, resumed where they were stopped.

Side by side, each part has a process of its own. `concurrent.futures` is not used for it: there a part that has begun cannot be asked to
save and stop, one process that dies ends all the others and nobody says which part it was, and children outlive a parent that is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import shlex
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from bilip.errors import BilipError, CheckpointError, InputError, Stopped, nearest
from bilip.recipes.parts import SCHEMA, About, Piece, device_name, do, is_measured, keep, kept, loaded, today
from bilip.recipes.recipe import SIZES, Figures, Found, Line, Recipe, configured, differences
from bilip.record import environment, read_json, to_plain, write_json

__all__ = ["Outcome", "find", "names", "reproduce", "side_by_side"]

MODULES = {
    "coupling_depth": "bilip.recipes.coupling_depth",
    "checkerboard": "bilip.recipes.checkerboard",
    "regression_2d": "bilip.recipes.regression_2d",
    "cifar10_classifier": "bilip.recipes.cifar10_classifier",
    "regularizer_timing": "bilip.recipes.regularizer_timing",
    "gradient_angles": "bilip.recipes.gradient_angles",
    "cifar10_flow": "bilip.recipes.cifar10_flow",
    "ood": "bilip.recipes.ood",
    "dequantization_attack": "bilip.recipes.dequantization_attack",
    "celeba_samples": "bilip.recipes.celeba_samples",
    "flow_gan": "bilip.recipes.flow_gan",
}
Progress = Callable[[str, str, float], None]  # which part, what it does, the share that is done
PATIENCE = 300.0  # seconds in which pieces that are asked to end may do so; under CUDA's MPS the end of one that is killed ends others
GRACE = 5.0  # seconds after Ctrl-C in which pieces may end by themselves, before they are asked to
Do = Callable[[Any, Callable[[str, float], None]], None]


@dataclass(frozen=True)
class Outcome:
    """What a run of a recipe left behind.

    Attributes:
        recipe: The recipe.
        size: Its size.
        folder: With `ours.json` and the figures.
        lines: The paper's numbers beside ours.
        figures: Files.
        differences: In what the configuration differs from that of the size `paper`, and which parts that were measured before have
            another one.
        seconds: Wall time of this call; parts that were measured before are not done again.
        diverged: What is said of trainings that diverged and stands in no line in full: the step, what was not finite first, and the
            last good checkpoint.
    """

    recipe: Recipe
    size: str
    folder: Path
    lines: Sequence[Line]
    figures: Sequence[Path]
    differences: Sequence[str]
    seconds: float
    diverged: Sequence[str] = ()


def names() -> list[str]:
    """The recipes there are.

    Example:
        >>> names()[0]
        'coupling_depth'
    """
    return list(MODULES)


def find(name: str) -> Recipe:
    """A recipe by its name.

    Example:
        >>> find("coupling_depth").name
        'coupling_depth'
    """
    import importlib

    if name not in MODULES:
        raise InputError(f"there is no recipe {name!r}.{nearest(name, MODULES)} There are {', '.join(MODULES)}.")
    return importlib.import_module(MODULES[name]).RECIPE


def reproduce(
    name: str,
    size: str = "quick",
    *,
    seeds: Sequence[int] = (0,),
    device: str = "auto",
    devices: int = 1,
    out: str | Path | None = None,
    changes: Sequence[str] = (),
    jobs: int = 1,
    parts: Sequence[str] | None = None,
    minutes: float | None = None,
    data: str | Path | None = None,
    collect: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Run a recipe and write `ours.json` and its figures. What is measured already is not measured again.

    Args:
        name: Of the recipe.
        size: `"quick"`, `"gpu"` or `"paper"`.
        seeds: Whole numbers; each is a run of its own.
        device: `"auto"`, `"cpu"` or `"cuda"`.
        devices: Processes that share each batch.
        out: The folder of this recipe, `runs/<name>` by default.
        changes: Changes of the configuration, as in `("steps=100",)`.
        jobs: Parts that run side by side, each in a process of its own.
        parts: Some parts of the recipe alone; by default all. Of a recipe that is not `partial`, the others must have been measured.
        minutes: After so many minutes training saves and stops, and so do measurements that are kept stage by stage (`Work.once`); the
            same call goes on. Other measurements are not cut short.
        data: The folder with prepared data, by default `BILIP_DATA` or `.data`.
        collect: Measure nothing; make table and figures of the parts that there are. For recipes that are `partial`.
        progress: Called with the name of a part, what it does, and the share of it that is done.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     outcome = reproduce("coupling_depth", out=folder, changes=["depth=10"])
        ...     [path.name for path in outcome.figures]
        ['depth-quick.png']
    """
    recipe = find(name)
    if size not in SIZES:
        raise InputError(f"--size {size}: expected {', '.join(SIZES)}.{nearest(size, SIZES)}")
    config = configured(recipe.sizes[size], changes)
    device = "cpu" if collect else _device(recipe, size, device)
    if not seeds or any(not isinstance(seed, int) or seed < 0 for seed in seeds):
        raise InputError(f"--seeds {seeds}: expected whole numbers, 0 or more.")
    if devices < 1 or jobs < 1 or (devices > 1 and jobs > 1):
        raise InputError(f"--devices {devices} --jobs {jobs}: expected 1 or more, and one of them 1.")
    began, folder = time.perf_counter(), Path(out) if out is not None else Path("runs") / name
    document = _open(folder, recipe)
    fabric = _fabric(device, devices)
    chosen = [] if collect else _chosen(recipe, config, parts)
    folders = _folders(folder / "pieces" / size, seeds, chosen)
    show = progress or (lambda which, what, share: None)
    files = {key: folder / "parts" / f"{size}-seed{key[1]}-{key[0]}.json" for key in folders if recipe.partial}
    _work(recipe, config, device, folders, files, jobs, _deadline(minutes), data, show, fabric)
    if fabric is not None and not fabric.is_global_zero:
        return Outcome(recipe, size, folder, (), (), (), time.perf_counter() - began)
    if recipe.partial:
        found, about = kept(folder / "parts", size, recipe)
    else:
        folders = _folders(folder / "pieces" / size, seeds, recipe.parts(config))
        done = sum((place / "measured.json").exists() for place in folders.values())
        if done < len(folders):
            raise Stopped(
                f"{done} of {len(folders)} parts are measured; the table needs them all: run without --parts or --collect."
            )
        found, about = loaded(folders)
    show(name, "drawing the figures", 1.0)
    from bilip.recipes import figures

    drawn, lines = _shown(recipe, config, found, f"a part of size {size} in {folder}")
    files = [folder / f"{title}-{size}.png" for title in drawn]
    for file, figure in zip(files, drawn.values(), strict=True):
        figures.save(figure, file)
    if recipe.pictures_apart:  # figures of pictures that are not here stay as they were drawn
        before = (folder / name for name in document["runs"].get(size, {}).get("figures", ()))
        files += [file for file in before if file not in files and file.is_file()]
    every = [facts for parts in about.values() for facts in parts.values()]
    other = differences(config, recipe.sizes["paper"]) + _set_otherwise(about, recipe, config)
    document["runs"][size] = {
        "command": _command(name, size, seeds, device, devices, changes, collect=recipe.partial),
        "config": asdict(config),
        "other_than_paper": other,
        "date": today(),
        "device": _devices(every) if recipe.partial else device_name(device),
        "environment": max(every, key=lambda facts: facts["date"])["environment"] if recipe.partial else environment(),
        "seconds": round(time.perf_counter() - began, 1),
        "jobs": jobs,
        "seconds_of_work": round(sum(facts["seconds"] for facts in every), 1),
        "lines": [asdict(line) for line in lines],
        "figures": [file.name for file in files],
        "measured": {str(seed): {part: m.numbers for part, m in parts.items()} for seed, parts in found.items()},
    }
    if recipe.partial:
        document["runs"][size]["parts"] = {
            str(seed): {
                part: {key: facts[key] for key in ("date", "device", "seconds")}
                | {"torch": facts["environment"].get("torch"), "changed": _changed(facts["config"], recipe, size)}
                for part, facts in parts.items()
            }
            for seed, parts in about.items()
        }
    latest = _open(folder, recipe)  # another size may have been finished in the meantime
    latest["runs"][size] = document["runs"][size]
    write_json(folder / "ours.json", latest)
    return Outcome(recipe, size, folder, lines, files, other, time.perf_counter() - began, _diverged(found, lines))


def _diverged(found: Found, lines: Sequence[Line]) -> list[str]:
    """What is said of trainings that diverged, where no line says it in full."""
    several = {
        f"{part}, seed {seed}": measured.numbers.get("diverged")
        for seed, parts in found.items()
        for part, measured in parts.items()
    }
    return [
        f"{which}: {why}"
        for which, why in several.items()
        if isinstance(why, str) and why and not any(why in line.ours for line in lines)
    ]


def _shown(recipe: Recipe, config: Any, found: Found, where: str) -> tuple[Figures, list[Line]]:
    """Figures and lines of what was measured; a `CheckpointError` if some of it is not there."""
    try:
        return recipe.figures(config, found), recipe.lines(config, found)
    except KeyError as error:
        raise CheckpointError(
            f"{where} has no {error}: another bilip wrote it, or it is damaged. Measure it again, or delete it."
        ) from error


# ---- the parts


def _chosen(recipe: Recipe, config: Any, parts: Sequence[str] | None) -> list[str]:
    known = list(recipe.parts(config))
    if parts is None:
        return known
    for part in parts:
        if not recipe.has(part, config):
            hint = nearest(part, known) + _why_not(recipe, part)
            raise InputError(f"--parts {part}: there is no such part.{hint} There are {', '.join(known)}.")
    if not parts:
        raise InputError(f"--parts: expected one or more of {', '.join(known)}.")
    return list(dict.fromkeys(parts))


def _why_not(recipe: Recipe, part: str) -> str:
    """What a recipe says of a name that names none of its runs, where it has more of them than it lists."""
    try:
        if recipe.named is not None:
            recipe.named(part)
    except InputError as error:
        return f" {error}"
    return ""


def _folders(folder: Path, seeds: Sequence[int], parts: Sequence[str]) -> dict[tuple[str, int], Path]:
    """The folder of each part and seed."""
    return {(part, seed): folder / f"seed{seed}" / part for seed in dict.fromkeys(seeds) for part in parts}


def _deadline(minutes: float | None) -> float | None:
    if minutes is not None and not 0 < minutes < float("inf"):
        raise InputError(f"--minutes {minutes}: expected a positive number.")
    return None if minutes is None else time.time() + 60 * minutes


def _work(recipe, config, device, folders, files, jobs, deadline, data, show, fabric) -> None:
    """Measure what is not measured yet; `Stopped` if the time is up before."""
    missing = [key for key in folders if not is_measured(folders[key], recipe, config)]
    if fabric is None or fabric.is_global_zero:
        for key in files.keys() - missing:  # a process that was killed may have had no time for it
            keep(folders[key], files[key], apart=recipe.pictures_apart)
    place = None if data is None else Path(data)
    pieces = [
        Piece(recipe, part, seed, config, folders[part, seed], device, deadline, place, files.get((part, seed)))
        for part, seed in missing
    ]
    before = _on_sigterm(_ended)  # in training, the loop's own
    try:
        if jobs > 1 and len(pieces) > 1:
            side_by_side(do, pieces, jobs, show, deadline)
            return
        for piece in pieces:
            if deadline is not None and time.time() >= deadline:
                raise Stopped("the time is up.")
            do(piece, lambda what, share, piece=piece: show(piece.title, what, share), fabric)
    except Stopped as why:
        done = sum((place / "measured.json").exists() for place in folders.values())
        raise Stopped(
            f"{why} {done} of {len(folders)} parts are measured; the same command goes on with the others."
        ) from why
    finally:
        _on_sigterm(before)


def _devices(every: Sequence[dict[str, Any]]) -> str:
    return "; ".join(dict.fromkeys(facts["device"] for facts in every))


def _changed(config: dict[str, Any], recipe: Recipe, size: str) -> dict[str, Any]:
    """In what the configuration of a part is not that of its size."""
    usual = to_plain(recipe.defining(recipe.sizes[size]))
    return {key: value for key, value in to_plain(config).items() if usual.get(key) != value}


def _set_otherwise(about: About, recipe: Recipe, config: Any) -> list[str]:
    """Parts that come in with another configuration than this one: the difference, and which they are."""
    now, found = to_plain(recipe.defining(config)), {}
    for seed, parts in about.items():
        for part, facts in parts.items():
            then = to_plain(facts["config"])
            text = ", ".join(
                f"{key}={value} ({now[key]})" for key, value in then.items() if now.get(key, value) != value
            )
            if text:
                found.setdefault(text, []).append(f"{part} of seed {seed}")
    return [f"in {', '.join(which)}: {text}" for text, which in found.items()]


# ---- where, and on what


def _open(folder: Path, recipe: Recipe) -> dict[str, Any]:
    path = folder / "ours.json"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder} is not a folder.")
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {folder}: {error.strerror}. Choose another folder.") from error
        document = {"recipe": recipe.name, "schema": SCHEMA, "runs": {}}
        write_json(path, document)
        return document
    document = read_json(path)
    if not isinstance(document, dict) or document.get("recipe") != recipe.name:
        other = document.get("recipe") if isinstance(document, dict) else None
        raise InputError(f"--out {folder} holds the recipe {other!r}, not {recipe.name!r}. Choose another folder.")
    if document.get("schema") != SCHEMA or not isinstance(document.get("runs"), dict):
        raise InputError(
            f"{path} has schema {document.get('schema')!r}; this bilip writes {SCHEMA}. Choose another folder."
        )
    return document


def _device(recipe: Recipe, size: str, device: str) -> str:
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device}: expected auto, cpu or cuda.")
    here = torch.cuda.is_available()
    if device == "cuda" and not here:
        raise InputError("--device cuda: torch sees no GPU here. Use --device cpu.")
    if size == "gpu" and device == "auto" and not here:
        raise InputError(
            f"--size gpu: torch sees no GPU here. Use --size quick ({recipe.cost['quick']}), or --device cpu and patience."
        )
    return ("cuda" if here else "cpu") if device == "auto" else device


def _fabric(device: str, devices: int) -> Any:
    if devices == 1:
        return None
    from bilip.training import Settings, launch

    return launch(Settings(steps=1, device=device, devices=devices))


def _command(
    name: str, size: str, seeds: Sequence[int], device: str, devices: int, changes: Sequence[str], *, collect: bool
) -> str:
    if collect:
        return shlex.join(["bilip", "reproduce", name, "--size", size, "--collect"])
    words = ["bilip", "reproduce", name, "--size", size, "--seeds", ",".join(map(str, seeds)), "--device", device]
    words += ["--devices", str(devices)] if devices > 1 else []
    return shlex.join(words + [word for change in changes for word in ("--set", change)])


# ---- side by side


def side_by_side(
    do: Do,
    pieces: Sequence[Any],
    jobs: int,
    show: Progress,
    deadline: float | None = None,
) -> None:
    """Run `do(piece, progress)` for every piece, so many at a time.

    The first error ends the other pieces and is raised here; Ctrl-C, SIGTERM and errors let them save first.

    Args:
        do: A function at the top level of a module.
        pieces: Each with a `title`.
        jobs: How many at a time.
        show: Called here with title, text and share whenever a piece reports.
        deadline: When no piece is begun any more, in the seconds of `time.time()`.

    Raises:
        Stopped: Some pieces have stopped at the deadline, or were not begun.
    """
    context = multiprocessing.get_context("spawn")
    reports, waiting, running = context.Queue(), list(pieces), {}
    stopped = ""
    before = _on_sigterm(_ended)
    try:
        while waiting or running:
            if waiting and deadline is not None and time.time() >= deadline:
                waiting, stopped = [], stopped or "the time is up."
            while waiting and len(running) < jobs:
                piece = waiting.pop(0)
                running[piece.title] = context.Process(target=_one, args=(do, piece, reports))
                running[piece.title].start()
            dead = [title for title, process in running.items() if not process.is_alive()]  # before their last words
            if _listen(reports, running, show):
                stopped = "the time is up."
            for title in dead:
                if title in running:
                    raise BilipError(
                        f"the process of {title!r} ended with exit code {running[title].exitcode}, perhaps for want of memory. "
                        "Run the command again: it goes on from the last checkpoint. --jobs 1 needs less at once."
                    )
    except KeyboardInterrupt:
        end = time.monotonic() + GRACE
        for process in running.values():  # by a terminal they were interrupted too, and save
            process.join(timeout=max(0.0, end - time.monotonic()))
        raise
    finally:
        _on_sigterm(before)
        for process in running.values():
            process.terminate()  # a piece in training saves first, once what it measures is measured
        for process in running.values():
            process.join(timeout=PATIENCE)
            process.kill()
            process.join()
    if stopped:
        raise Stopped(stopped)


def _listen(reports: Any, running: dict[str, Any], show: Progress) -> bool:
    """Show all that was reported, after a moment at most, and take leave of what has ended; whether some piece stopped at the deadline."""
    stopped = False
    for title, kind, *words in _heard(reports):
        if kind == "failed":
            running.pop(title).join(timeout=20)  # killed as it leaves, it would take the lock of the queue along
            raise words[0]
        show(title, *words)
        if kind in ("done", "stopped"):
            stopped = stopped or kind == "stopped"
            running.pop(title).join()
    return stopped


def _ended(number: int, frame: object) -> None:
    raise Stopped("stopped by SIGTERM.")


def _on_sigterm(handler: Any) -> Any:
    """Set what SIGTERM does here, in the main thread, and give back what it did."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def _one(do: Do, piece: Any, reports: Any) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _on_sigterm(_ended)  # in training, the loop's own
    last = 0.0

    def progress(text: str, share: float) -> None:
        nonlocal last
        if time.monotonic() - last > 0.3:
            last = time.monotonic()
            reports.put((piece.title, "working", text, share))

    try:
        do(piece, progress)
    except KeyboardInterrupt:
        return
    except Stopped as why:
        reports.put((piece.title, "stopped", str(why), 0.0))
        return
    except BilipError as error:
        reports.put((piece.title, "failed", error))
        return
    except Exception as error:
        reports.put((piece.title, "failed", BilipError(f"{piece.title} failed: {type(error).__name__}: {error}")))
        raise
    reports.put((piece.title, "done", "done", 1.0))


def _leave_with_parent() -> None:
    """A piece whose parent was killed must not go on beside the one that takes its place."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _heard(reports: Any) -> list[tuple]:
    """All that was reported, after a moment at most."""
    found = []
    try:
        found.append(reports.get(timeout=0.2))
        while True:
            found.append(reports.get_nowait())
    except queue.Empty:
        return found
