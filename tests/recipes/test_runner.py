"""Running recipes: configuration, folders, resume, processes, and what is refused."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bilip.errors import BilipError, CheckpointError, InputError, Stopped
from bilip.recipes import Measured, Recipe, configured, find, names, reproduce, runner
from bilip.recipes.page import BEGIN, END, results_table, status, write_table
from bilip.recipes.recipe import Work
from bilip.record import read_json, write_json
from bilip.training import read_state
from in_process import command_line

TINY = ["steps=40", "points=200", "batch=100", "blocks=3", "evaluate_every=10", "nf=1e-6"]


def cli(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bilip", "reproduce", *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-2000:]
    return out


def tiny(out, *more):
    return ("regression_2d", "--out", out, *(word for change in TINY for word in ("--set", change)), *more)


def measured(folder):
    """What was found, without what differs from one run to the next."""
    run = read_json(folder / "ours.json")["runs"]["quick"]
    return json.dumps({"measured": run["measured"], "lines": run["lines"]})


@pytest.mark.parametrize("name", names())
def test_every_recipe_states_what_it_does(name):
    recipe = find(name)
    assert recipe.name == name
    assert recipe.claim.endswith(".")
    assert set(recipe.sizes) == set(recipe.cost) == {"quick", "gpu", "paper"}
    assert recipe.paper()["statements"]
    assert len({type(config) for config in recipe.sizes.values()}) == 1
    for config in recipe.sizes.values():
        parts = recipe.parts(config)
        assert len(set(parts)) == len(parts) >= 1
        assert json.loads(json.dumps(dataclasses.asdict(config)))


# ---- configuration


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 1
    lr: float = 0.1
    flag: bool = False
    clip: float | None = None
    hidden: tuple[int, ...] = (1,)
    word: str = "a"


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("steps=5", 5),
        ("steps=1e3", 1000),
        ("lr=1e-4", 1e-4),
        ("lr=2", 2.0),
        ("flag=true", True),
        ("flag=no", False),
        ("clip=3", 3.0),
        ("clip=none", None),
        ("hidden=8, 8", (8, 8)),
        ("word=b", "b"),
    ],
)
def test_values_are_read_as_the_type_of_their_field(change, value):
    found = getattr(configured(Config(), [change]), change.partition("=")[0])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("stps=5", "Did you mean 'steps'"),
        ("steps", "expected key=value"),
        ("steps=1.5", "expected a whole number"),
        ("lr=fast", "expected a number"),
        ("flag=maybe", "true or false"),
        ("hidden=8,x", "expected a whole number"),
        ("steps=inf", "expected a whole number"),
    ],
)
def test_bad_changes(change, said):
    with pytest.raises(InputError, match=said):
        configured(Config(), [change])


# ---- folders


def test_what_a_run_leaves_behind(tmp_path):
    outcome = reproduce("coupling_depth", out=tmp_path, changes=["depth=12"])
    document = read_json(tmp_path / "ours.json")
    run = document["runs"]["quick"]
    assert document["recipe"] == "coupling_depth"
    assert run["config"]["depth"] == 12
    assert run["command"] == "bilip reproduce coupling_depth --size quick --seeds 0 --device cpu --set depth=12"
    assert [file.name for file in outcome.figures] == run["figures"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in outcome.figures)
    assert str(tmp_path) not in (tmp_path / "ours.json").read_text()
    reproduce("coupling_depth", "paper", out=tmp_path, changes=["depth=5"])
    assert set(read_json(tmp_path / "ours.json")["runs"]) == {"quick", "paper"}


class Counting(Recipe):
    """Counts how often its parts run; the second part fails when told to."""

    name, claim, where = "counting", "One.", "nowhere"

    def __init__(self):
        self.sizes, self.cost = {"quick": Config(), "paper": Config()}, {"quick": "nothing", "paper": "nothing"}
        self.ran, self.fail = [], False

    def parts(self, config):
        return ("a", "b")

    def run(self, part, config, work):
        self.ran.append((part, work.seed))
        if part == "b" and self.fail:
            raise KeyboardInterrupt
        return Measured({"value": float("inf"), "threads": torch.get_num_threads()})

    def lines(self, config, found):
        return []

    def figures(self, config, found):
        return {}


@pytest.fixture
def counting(monkeypatch):
    recipe = Counting()
    monkeypatch.setattr(runner, "find", lambda name: recipe)
    return recipe


def test_what_is_measured_is_not_measured_again(tmp_path, counting):
    counting.fail = True
    with pytest.raises(KeyboardInterrupt):
        reproduce("counting", out=tmp_path, seeds=[3])
    counting.fail = False
    reproduce("counting", out=tmp_path, seeds=[3])
    reproduce("counting", out=tmp_path, seeds=[3, 4])
    assert counting.ran == [("a", 3), ("b", 3), ("b", 3), ("a", 4), ("b", 4)]
    seeds = read_json(tmp_path / "ours.json")["runs"]["quick"]["measured"]
    assert set(seeds) == {"3", "4"}
    assert seeds["3"]["a"] == {"value": float("inf"), "threads": 1}


def test_the_file_of_a_part_is_there_before_the_next_one_ends(tmp_path, counting, monkeypatch):
    counting.partial, there, run = True, [], counting.run

    def looking(part, config, work):
        there.append([path.name for path in (tmp_path / "parts").glob("*")])
        return run(part, config, work)

    monkeypatch.setattr(counting, "run", looking)
    reproduce("counting", out=tmp_path)
    assert there == [[], ["quick-seed0-a.json"]]
    for path in (tmp_path / "parts").iterdir():  # as if a process had been killed between measurement and file
        path.unlink()
    counting.fail = True
    with pytest.raises(KeyboardInterrupt):
        reproduce("counting", out=tmp_path, seeds=[0, 1])
    assert [sorted(names) for names in there[2:]] == [
        ["quick-seed0-a.json", "quick-seed0-b.json"],
        ["quick-seed0-a.json", "quick-seed0-b.json", "quick-seed1-a.json"],
    ]


def test_what_follows_training_is_kept_stage_by_stage(tmp_path):
    asked = []

    def measure():
        asked.append(1)
        return Measured({"worst": math.inf, "count": 3}, {"picture": np.arange(6, dtype=np.uint8)})

    first = Work(tmp_path).once("samples", measure)
    again = Work(tmp_path, deadline=0.0).once("samples", measure)  # known: no time is needed
    assert len(asked) == 1
    assert dict(again.numbers) == dict(first.numbers)
    assert np.array_equal(again.arrays["picture"], first.arrays["picture"])
    with pytest.raises(Stopped, match="time is up"):
        Work(tmp_path, deadline=0.0).once("attack", measure)
    assert len(asked) == 1


class Staged(Recipe):
    """Two stages, of which the second fails once."""

    name, claim, where, cost = "staged", "Nothing is lost.", "nowhere", dict.fromkeys(("quick", "gpu", "paper"), "")
    sizes = dict.fromkeys(("quick", "gpu", "paper"), Config())

    def parts(self, config):
        return ("one",)

    def run(self, part, config, work):
        found = [work.once(name, lambda name=name: self.stage(name, work)).numbers for name in ("first", "second")]
        return Measured({key: value for one in found for key, value in one.items()})

    def stage(self, name, work):
        path = work.folder.parent / f"asked-{name}"
        path.write_text(f"{path.read_text() if path.exists() else ''}x")
        if (name, path.read_text()) == ("second", "x"):
            raise KeyboardInterrupt
        return Measured({name: path.read_text()})

    def lines(self, config, found):
        return []

    def figures(self, config, found):
        return {}


def test_an_interrupt_after_training_loses_the_stage_that_it_meets_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "find", lambda name: Staged())
    with pytest.raises(KeyboardInterrupt):
        reproduce("staged", out=tmp_path)
    found = read_json(reproduce("staged", out=tmp_path).folder / "ours.json")["runs"]["quick"]["measured"]["0"]["one"]
    assert found == {"first": "x", "second": "xx"}
    assert not list(tmp_path.rglob("found"))  # what was kept until the part was finished


def test_some_parts_alone(tmp_path, counting):
    with pytest.raises(Stopped, match="1 of 2 parts are measured"):
        reproduce("counting", out=tmp_path, parts=["b"])
    with pytest.raises(Stopped, match="1 of 2 parts are measured"):
        reproduce("counting", out=tmp_path, collect=True)
    reproduce("counting", out=tmp_path, parts=["a", "a"])
    assert counting.ran == [("b", 0), ("a", 0)]
    assert set(read_json(tmp_path / "ours.json")["runs"]["quick"]["measured"]["0"]) == {"a", "b"}
    with pytest.raises(InputError, match="--parts c: there is no such part. There are a, b"):
        reproduce("counting", out=tmp_path, parts=["c"])
    with pytest.raises(InputError, match="--minutes 0"):
        reproduce("counting", out=tmp_path, minutes=0)


def standing(now):
    """A clock that stands still."""
    return SimpleNamespace(time=lambda: now, perf_counter=lambda: now)


def test_the_time_is_up_before_the_next_part(tmp_path, counting, monkeypatch):
    original = counting.run

    def slow(part, config, work):
        monkeypatch.setattr(runner, "time", standing(1e18))
        return original(part, config, work)

    monkeypatch.setattr(counting, "run", slow)
    monkeypatch.setattr(runner, "time", standing(0.0))
    with pytest.raises(Stopped, match="1 of 2 parts are measured; the same command goes on"):
        reproduce("counting", out=tmp_path, minutes=1)
    assert counting.ran == [("a", 0)]
    reproduce("counting", out=tmp_path)
    assert counting.ran == [("a", 0), ("b", 0)]


def test_sigterm_while_the_only_part_is_measured_is_answered_as_beside_others(tmp_path, counting, monkeypatch):
    monkeypatch.setattr(counting, "run", lambda part, config, work: os.kill(os.getpid(), signal.SIGTERM))
    given = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with pytest.raises(Stopped, match=r"stopped by SIGTERM. 0 of 2 parts are measured; the same command goes on"):
            reproduce("counting", out=tmp_path)
        assert signal.getsignal(signal.SIGTERM).__name__ == "<lambda>"
    finally:
        signal.signal(signal.SIGTERM, given)


def test_a_gpu_that_is_full(tmp_path, counting, monkeypatch):
    def full(part, config, work):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(counting, "run", full)
    with pytest.raises(BilipError, match=r"a, seed 0: the GPU is out of memory.*--jobs.*bilip.Reversible"):
        reproduce("counting", out=tmp_path)


def test_a_folder_begun_otherwise(tmp_path, counting):
    reproduce("counting", out=tmp_path)
    with pytest.raises(CheckpointError, match="begun with steps=1, now it is 2"):
        reproduce("counting", out=tmp_path, changes=["steps=2"])
    path = tmp_path / "pieces" / "quick" / "seed0" / "a" / "config.json"
    write_json(path, {**read_json(path), "schema": 0})
    with pytest.raises(CheckpointError, match="another bilip"):
        reproduce("counting", out=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "chekerboard"}, "Did you mean 'checkerboard'"),
        ({"size": "qick"}, "Did you mean 'quick'"),
        ({"changes": ["dept=3"]}, "Did you mean 'depth'"),
        ({"seeds": []}, "expected whole numbers"),
        ({"seeds": [-1]}, "expected whole numbers"),
        ({"device": "tpu"}, "expected auto, cpu or cuda"),
        ({"jobs": 0}, "expected 1 or more"),
        ({"devices": 2, "jobs": 2}, "one of them 1"),
        ({"changes": ["depth=0"]}, "--set"),
        ({"name": "checkerboard", "changes": ["spacing=0"]}, "--set"),
        ({"name": "checkerboard", "changes": ["spacing=0.3"]}, "--set"),
        ({"name": "checkerboard", "changes": ["spacing=nan"]}, "--set"),
        ({"name": "checkerboard", "changes": ["hidden="]}, "--set"),
        ({"name": "regression_2d", "changes": ["batch=0"]}, "--set"),
        ({"name": "regression_2d", "changes": ["widths="]}, "--set"),
        ({"name": "regression_2d", "changes": ["nf=1e-6,1e-6"]}, "--set"),
        ({"name": "regression_2d", "changes": ["lr=-1"]}, "--set"),
    ],
)
def test_bad_arguments(tmp_path, arguments, said):
    with pytest.raises(InputError, match=said):
        reproduce(**{"name": "coupling_depth", "out": tmp_path / "a", **arguments})
    assert not (tmp_path / "a").exists()


def test_what_was_measured_and_then_damaged(tmp_path, counting):
    reproduce("counting", out=tmp_path)
    folder = tmp_path / "pieces" / "quick" / "seed0" / "a"
    whole = (folder / "measured.json").read_text()
    (folder / "config.json").unlink()  # measured.json knows its configuration too
    with pytest.raises(CheckpointError, match="begun with steps=1"):
        reproduce("counting", out=tmp_path, changes=["steps=2"])
    for path, text in (
        (folder / "measured.json", "{}"),
        (folder / "measured.json", whole.replace('"arrays": []', '"arrays": ["x"]')),
        (folder / "config.json", "[]"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match="[Dd]elete"):
            reproduce("counting", out=tmp_path)
        (folder / "measured.json").write_text(whole)
        (folder / "config.json").unlink(missing_ok=True)
    write_json(tmp_path / "ours.json", {"recipe": "counting", "schema": 1})
    with pytest.raises(InputError, match="ours.json"):
        reproduce("counting", out=tmp_path)


def test_folders_of_others(tmp_path):
    write_json(tmp_path / "ours.json", {"recipe": "checkerboard", "schema": 1, "runs": {}})
    with pytest.raises(InputError, match="holds the recipe 'checkerboard'"):
        reproduce("coupling_depth", out=tmp_path)
    write_json(tmp_path / "ours.json", {"recipe": "coupling_depth", "schema": 7, "runs": {}})
    with pytest.raises(InputError, match="schema 7"):
        reproduce("coupling_depth", out=tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not a folder"):
        reproduce("coupling_depth", out=tmp_path / "file")
    with pytest.raises(InputError, match="Choose another folder"):
        reproduce("coupling_depth", out=tmp_path / "file" / "below")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu_here(tmp_path):
    with pytest.raises(InputError, match=r"no GPU here. Use --size quick"):
        reproduce("checkerboard", "gpu", out=tmp_path)
    with pytest.raises(InputError, match="--device cuda: torch sees no GPU here"):
        reproduce("checkerboard", device="cuda", out=tmp_path)


# ---- the command line, and processes


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.slow
def test_side_by_side_killed_and_resumed_it_ends_as_one_after_the_other(tmp_path):
    reproduce("regression_2d", out=tmp_path / "whole", changes=[*TINY, "steps=120"], jobs=1)
    more = ("--set", "steps=120", "--jobs", "2")
    process = cli(*tiny(tmp_path / "killed", *more))
    part = tmp_path / "killed" / "pieces" / "quick" / "seed0"
    began = time.monotonic()
    while len(list(part.glob("*/last.safetensors"))) < 2 and time.monotonic() - began < 600:
        time.sleep(0.02)
    process.kill()  # the parent alone: its children have to notice
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert read_json(tmp_path / "killed" / "ours.json")["runs"] == {}
    begun = [read_state(path)[1]["step"] for path in part.glob("*/last.safetensors")]
    assert any(0 < step < 120 for step in begun)  # there is something to go on from
    reached = {path: path.stat().st_mtime_ns for path in part.glob("*/measured.json")}
    out = finish(cli(*tiny(tmp_path / "killed", *more)))
    assert measured(tmp_path / "killed") == measured(tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == when for path, when in reached.items())  # finished parts are left alone
    assert "NF 1e-6" in out
    assert "wrote" in out


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks for processes in /proc")
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.soak
def test_children_leave_with_their_parent(tmp_path):
    process = cli(*tiny(tmp_path, "--set", "steps=100000", "--jobs", "2"))
    began = time.monotonic()
    while len(list(tmp_path.glob("pieces/quick/seed0/*/train.csv"))) < 2 and time.monotonic() - began < 600:
        time.sleep(0.05)
    children = [pid for pid in _processes() if _parent(pid) == process.pid]
    assert len(children) >= 2
    process.kill()
    process.communicate()
    began = time.monotonic()
    while any(pid in _processes() for pid in children) and time.monotonic() - began < 120:
        time.sleep(0.1)
    assert not any(pid in _processes() for pid in children)


def _processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(int(name)) is not None]


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.slow
def test_two_processes_share_the_batches_of_a_recipe(tmp_path):
    reproduce("regression_2d", out=tmp_path / "one", changes=TINY)
    finish(cli(*tiny(tmp_path / "two", "--devices", "2")))
    for part in ("plain-10", "nf1e-06-10"):
        one, two = (
            read_json(tmp_path / name / "ours.json")["runs"]["quick"]["measured"]["0"][part] for name in ("one", "two")
        )
        assert two["mse"] == pytest.approx(one["mse"], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("regresion_2d",), "Did you mean 'regression_2d'"),
        (("coupling_depth", "--seeds", "a"), "expected whole numbers"),
        (("coupling_depth", "--set", "g"), "expected key=value"),
        ((), "which recipe"),
    ],
)
def test_bad_words(tmp_path, monkeypatch, capfd, words, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = command_line(monkeypatch, capfd)("reproduce", *words)
    assert code == 2
    assert said in " ".join(err.split())
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_the_list(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code, out, _ = command_line(monkeypatch, capfd)("reproduce", "--list")
    assert code == 0
    for name in names():
        assert name in out
    assert "not run" in out


# ---- parts side by side: the clock, SIGTERM, and errors


@dataclass(frozen=True)
class Piece:
    title: str
    folder: Path
    deadline: float


def work(piece, progress):
    """Ends, or fails, or goes on until the deadline or SIGTERM and then saves: in a process of its own."""
    if piece.title == "short":
        (piece.folder / "short").write_text("done")
        return
    if piece.title == "wrong":
        while not (piece.folder / "long").exists():
            time.sleep(0.01)
        raise InputError("this one is wrong")
    ended = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    (piece.folder / piece.title).write_text("began")
    while not ended and time.time() < piece.deadline:
        time.sleep(0.01)
    (piece.folder / piece.title).write_text("saved")
    raise Stopped("stopped")


def run(folder, titles, deadline=None, shown=lambda *words: None):
    pieces = [Piece(title, folder, deadline or time.time() + 100) for title in titles]
    runner.side_by_side(work, pieces, 2, shown, deadline)


def test_at_the_deadline_all_save_and_none_is_begun(tmp_path):
    with pytest.raises(Stopped, match="the time is up"):
        run(tmp_path, ["long", "short", "longer"], deadline=time.time() + 6)
    assert (tmp_path / "short").read_text() == "done"
    assert (tmp_path / "long").read_text() == "saved"
    if (tmp_path / "longer").exists():  # on a slow machine it is not begun
        assert (tmp_path / "longer").read_text() == "saved"
    with pytest.raises(Stopped):
        run(tmp_path, ["last"], deadline=time.time() - 1)
    assert not (tmp_path / "last").exists()


def test_sigterm_lets_all_save(tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    def end():
        while not all((tmp_path / name).exists() for name in ("long", "longer")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(Stopped, match="SIGTERM"):
        run(tmp_path, ["long", "longer"])
    assert [(tmp_path / name).read_text() for name in ("long", "longer")] == ["saved", "saved"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_of_one_lets_the_others_save(tmp_path):
    with pytest.raises(BilipError, match="this one is wrong"):
        run(tmp_path, ["long", "wrong"])
    assert (tmp_path / "long").read_text() == "saved"


def test_an_interrupt_of_the_first_process_alone_lets_the_others_save(tmp_path, monkeypatch):
    """Ctrl-C in a terminal reaches all of them; `kill -INT` and a notebook reach one."""
    monkeypatch.setattr("bilip.recipes.runner.GRACE", 0.1)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def end():
        while not (tmp_path / "long").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=end, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, ["long"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "long").read_text() == "saved"


# ---- the table


def test_the_docs_show_the_results_that_are_committed(request):
    root = request.config.rootpath
    text = (root / "docs" / "recipes.md").read_text()
    shown = text.partition(BEGIN)[2].partition(END)[0].strip()
    assert shown == results_table(root / "results")
    for name in names():
        assert f"`{name}`" in shown
        assert status(name, "quick", root / "results") != "not run"


def test_the_table_has_the_smallest_and_the_largest_size_and_goes_between_its_marks(tmp_path):
    folder = tmp_path / "results" / "coupling_depth"
    reproduce("coupling_depth", out=folder, changes=["depth=10"])
    document = read_json(folder / "ours.json")
    quick = document["runs"]["quick"]
    for size in ("gpu", "paper"):
        lines = [line | {"ours": f"as {size}"} for line in quick["lines"]]
        document["runs"] = {size: quick | {"lines": lines}, **document["runs"]}
    write_json(folder / "ours.json", document)
    table = results_table(tmp_path / "results")
    assert "as paper" in table
    assert "as gpu" not in table
    assert table.index("`coupling_depth`, quick") < table.index("`coupling_depth`, paper")
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(tmp_path / "README.md", tmp_path / "results")
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "`coupling_depth`" in text
    (tmp_path / "README.md").write_text("no place")
    with pytest.raises(InputError, match="no place for the table"):
        write_table(tmp_path / "README.md", tmp_path / "results")
