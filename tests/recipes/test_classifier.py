"""Classifiers at a size of seconds, on images that are written here: their recipe, what is said of them, gradient angles, and timing."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bilip.errors import CheckpointError, InputError
from bilip.recipes import Measured, cifar10_classifier, configured, gradient_angles, regularizer_timing, reproduce
from bilip.recipes.cifar10_classifier import RECIPE, make_penalties
from bilip.recipes.classifier_runs import GRID, TABLE, Run, classifier_figures, classifier_lines, curve, shown
from bilip.recipes.images import start_actnorms
from bilip.recipes.page import _belongs, read_claims
from bilip.recipes.recipe import Work
from bilip.record import read_json
from bilip.training import read_log
from bilip.training.run import Run as Training
from in_process import command_line
from recorded import numbers_of, play_graphs_on_the_cpu, stop_and_resume, watched_captures

TINY = """
side=8 images=48 test=200 levels=2 blocks=1 hidden=4 batch=8 epochs=3 start=16 fd_every=3 evaluate_every=1
inverted=16 spectra=1 spectra_end=2 angle_batches=2
"""
CHANGES = TINY.split()
PAPER = RECIPE.paper()
RESULTS = Path(__file__).parents[2] / "results"
TIMING = regularizer_timing.Config(side=8, levels=1, blocks=1, hidden=4, batch=4, warm=2, steps=2, rounds=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images in which a class has a colour of its own, in the files that people have."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, count in (("train", 64), ("test", 220)):
        y = np.arange(count) % 10
        x = draw.integers(0, 120, (count, 32, 32, 3)) + (12 * y)[:, None, None, None]
        np.savez(folder / f"cifar10_{split}.npz", x=x.astype(np.uint8), y=y)
    return folder


@pytest.fixture
def tiny():
    return configured(cifar10_classifier.Config(), CHANGES)


@pytest.mark.parametrize(
    "part", ["affine-conv1x1-none", "affine-conv1x1-fd", "additive-shuffle-nf", "affine-conv1x1-guarded"]
)
def test_captured_steps_end_as_eager_ones(part, tiny, data, device, tmp_path, monkeypatch):
    eager = (
        RECIPE.run(part, tiny, Work(tmp_path / "eager", 1, device.type, data=data)) if device.type == "cpu" else None
    )
    seen = watched_captures(monkeypatch, device)
    captured = RECIPE.run(part, tiny, Work(tmp_path / "captured", 1, device.type, data=data))
    assert seen[0].replays > 5
    assert not seen[0].failed
    assert captured.numbers["steps"] == 18
    if eager is None:
        return
    found = [m.numbers for m in (eager, captured)]
    if "fd" not in part:  # a captured step draws its directions from the device's own generator
        assert found[1]["test_cross_entropy"] == pytest.approx(found[0]["test_cross_entropy"], rel=1e-3)
        assert found[1]["condition"] == pytest.approx(found[0]["condition"], rel=1e-2)
    assert json.dumps(sorted(found[0])) == json.dumps(sorted(found[1]))


def test_stopped_and_resumed_it_ends_as_if_it_was_not(data, tmp_path, monkeypatch):
    part, options = "affine-conv1x1-fd", {"changes": CHANGES, "data": data}
    reproduce("cifar10_classifier", out=tmp_path / "whole", parts=[part], **options)
    stop_and_resume("cifar10_classifier", part, tmp_path / "cut", monkeypatch, steps=10, **options)
    assert numbers_of(tmp_path / "cut", part) == numbers_of(tmp_path / "whole", part)
    pieces = (tmp_path / name / "pieces" / "quick" / "seed0" / part for name in ("whole", "cut"))
    whole, cut = (json.dumps(read_log(piece, "evaluation")) for piece in pieces)
    assert cut == whole


def test_a_run_that_is_killed_loses_no_more_than_an_epoch(tiny, data, tmp_path, monkeypatch):
    saved, save = [], Training.save
    monkeypatch.setattr(Training, "save", lambda state: saved.append(state.done) or save(state))
    rare = dataclasses.replace(tiny, evaluate_every=3)
    RECIPE.run("affine-conv1x1-none", rare, Work(tmp_path, device="cpu", data=data))
    assert saved == [6, 12, 18]


def test_parts_come_in_one_by_one_and_are_collected(data, tmp_path):
    for part in ("affine-conv1x1-none", "affine-conv1x1-nf1e-4-e1"):
        reproduce("cifar10_classifier", out=tmp_path, changes=CHANGES, parts=[part], data=data)
    for name in ("ours.json", "pieces"):
        path = tmp_path / name
        path.rename(tmp_path / f"old-{name}")
    outcome = reproduce("cifar10_classifier", out=tmp_path, collect=True)
    now, before = (read_json(tmp_path / name)["runs"]["quick"] for name in ("ours.json", "old-ours.json"))
    assert set(now["measured"]["0"]) == {"affine-conv1x1-none", "affine-conv1x1-nf1e-4-e1"}
    assert json.dumps(now["measured"]) == json.dumps(before["measured"])
    assert now["lines"] == before["lines"]
    assert now["parts"]["0"]["affine-conv1x1-none"]["changed"]["batch"] == 8
    assert now["measured"]["0"]["affine-conv1x1-nf1e-4-e1"]["epochs"] == 1
    assert not [text for text in before["other_than_paper"] if "seed" in text]  # all of them have these settings
    (mixed,) = [text for text in now["other_than_paper"] if "seed" in text]
    assert mixed.startswith("in affine-conv1x1-nf1e-4-e1 of seed 0, affine-conv1x1-none of seed 0: images=48 (512)")
    assert mixed in outcome.differences
    assert outcome.figures
    with pytest.raises(InputError, match="holds no part of size paper"):
        reproduce("cifar10_classifier", "paper", out=tmp_path, collect=True)
    broken = tmp_path / "parts" / "quick-seed0-affine-conv1x1-none.json"
    facts = read_json(broken)
    copied = broken.with_name("quick-seed7-affine-conv1x1-none.json")
    copied.write_bytes(broken.read_bytes())
    with pytest.raises(CheckpointError, match="seed 0: expected that in its name"):
        reproduce("cifar10_classifier", out=tmp_path, collect=True)
    copied.unlink()
    less = {"numbers": {key: value for key, value in facts["numbers"].items() if key != "invertible"}}
    for change, said in (
        ({"arrays": list(facts["arrays"])}, "not a part that a recipe wrote"),  # as measured.json has it
        ({"environment": None}, "environment is None"),
        (less, "has no 'invertible'"),
        (dict.fromkeys(facts), "not a part that a recipe wrote"),
    ):
        broken.write_text(json.dumps(facts | change))
        with pytest.raises(CheckpointError, match=said):
            reproduce("cifar10_classifier", out=tmp_path, collect=True)


def test_other_data_is_refused(tiny, data, tmp_path):
    work = Work(tmp_path / "part", data=data)
    (tmp_path / "part").mkdir()
    cifar10_classifier.load(tiny, work)
    with pytest.raises(CheckpointError, match="begun with other data: images was 48, now it is 40"):
        cifar10_classifier.load(cifar10_classifier.replace(tiny, images=40), work)


def test_what_is_no_list_of_data_is_one_line(tiny, data, tmp_path):
    (tmp_path / "data.json").write_text("[]")
    with pytest.raises(CheckpointError, match="data.json is not what a recipe writes"):
        cifar10_classifier.load(tiny, Work(tmp_path, data=data))


def test_fewer_images_than_a_batch(tiny, data, tmp_path):
    few = cifar10_classifier.replace(tiny, images=5)
    with pytest.raises(InputError, match="--set images=5 batch=8: expected a batch of images or more"):
        cifar10_classifier.load(few, Work(tmp_path, data=data))


def test_why_a_part_is_none_is_said(tmp_path):
    with pytest.raises(InputError, match="there is no such part.* 'none' has nothing to be changed. There are affine"):
        reproduce("cifar10_classifier", out=tmp_path, parts=["affine-conv1x1-none-every5"])


def test_what_parts_mean():
    fd = make_penalties(Run.of("additive-conv1x1-fd"), RECIPE.sizes["gpu"], 0)[0]
    assert (fd.weight, fd.every, fd.mode, fd.scaling, fd.eps) == (5e-5, 10, "both", "original", 0.1)
    fd = Run.of("affine-conv1x1-fd1e-3-inverse-every5-e7")
    assert (fd.weight, fd.mode, fd.every, fd.epochs, fd.reversible) == (1e-3, "inverse", 5, 7, True)
    assert make_penalties(Run.of("affine-shuffle-nf"), RECIPE.sizes["gpu"], 0)[0].weight == 1e-5
    assert not Run.of("affine-shuffle-nf").reversible
    parts = RECIPE.parts(RECIPE.sizes["gpu"])
    assert len(parts) == 13
    assert all(RECIPE.has(part, None) for part in RECIPE.parts(cifar10_classifier.Config(grid=10)))


@pytest.mark.parametrize(
    "part",
    [
        "affine-conv1x1-fd-every0",
        "affine-conv1x1-none-e0",
        "affine-conv1x1-nf1.2.3",
        "affine-conv1x1-fd-every",
        "affine",
    ],
)
def test_names_that_mean_nothing(part):
    with pytest.raises(
        InputError, match=f"'{part}' names no run: expected, for example, .*1 or more behind -every and -e"
    ):
        Run.of(part)
    assert not RECIPE.has(part, None)


@pytest.mark.parametrize(("key", "there"), [("images", "64 train images"), ("test", "220 test images")])
def test_more_images_than_there_are(tiny, data, tmp_path, key, there):
    with pytest.raises(InputError, match=f"--set {key}=221: there are {there}; expected so many at most, or 0"):
        cifar10_classifier.load(cifar10_classifier.replace(tiny, **{key: 221}), Work(tmp_path, data=data))


def test_actnorms_start_from_so_many_augmented_images(tiny, data, tmp_path):
    train, *_ = cifar10_classifier.load(tiny, Work(tmp_path, data=data))
    model = cifar10_classifier.make_model(Run.of("affine-conv1x1-none"), tiny)
    seen = []
    trunk = model.trunk
    trunk.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    start_actnorms(cifar10_classifier.trunk_of(model), train, tiny, 0)
    assert seen[0].shape == (16, 3, 8, 8)
    z = trunk[1](trunk[0](seen[0]))  # the first ActNorm
    assert z.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (z.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-2


def test_the_worst_of_some_images():
    nan = math.nan
    found = cifar10_classifier.worst(
        {"condition": [1e3, nan, 10.0], "sigma_min": [1e-2, nan, 0.1], "sigma_max": [10.0, nan, 1.0]}
    )
    assert found == {"condition": math.inf, "sigma_min": 1e-2, "sigma_max": 10.0}
    lost = cifar10_classifier.worst({"condition": [nan], "sigma_min": [nan], "sigma_max": [nan]})
    assert lost["condition"] == math.inf
    assert math.isnan(lost["sigma_min"])


# ---- what is said of classifiers, on runs that are made up


def made_up(*, epochs=20, accuracy=0.8, condition=100.0, lost=0.0, loss=0.5, **more):
    spectrum = {"condition": condition, "sigma_min": 1 / condition, "sigma_max": 1.0}
    numbers = spectrum | {"spectra": {name: [value, 1.0] for name, value in spectrum.items()}}
    numbers |= {"epochs": epochs, "steps": 10 * epochs, "diverged": "", "test_accuracy": accuracy}
    numbers |= {"error_mean": math.inf if lost else 1e-3, "share_non_finite": lost, "invertible": not lost}
    numbers |= {"train": {"cross_entropy": loss}, "guard": {"worst_angle": 1e-4, "repaired": 3, "steps": 200}}
    columns = ("condition", "sigma_min", "sigma_max", "test_accuracy", "error_mean", "share_non_finite")
    curves = {f"log_{name}": np.array([1.0, math.nan if name in columns[:3] else 0.5, 2.0]) for name in columns}
    return Measured(numbers | more, {"log_step": np.array([0.0, 50.0, 100.0]), **curves})


def judged(parts, *words):
    """The one line that begins so."""
    lines = classifier_lines({0: parts}, PAPER)
    (line,) = [line for line in lines if all(word in line.what for word in words)]
    return line


AS_IN_THE_PAPER = {
    "affine-conv1x1-none": made_up(lost=0.3, condition=1e16),
    "affine-conv1x1-fd": made_up(accuracy=0.79),
    "affine-conv1x1-nf": made_up(condition=1e4, loss=0.55),
    "affine-conv1x1-guarded": made_up(lost=0.2, accuracy=0.805),
    "additive-conv1x1-none": made_up(condition=1e5),
}


def test_rows_stand_beside_those_of_the_paper():
    line = judged(AS_IN_THE_PAPER, "affine conv, none, 20 epochs")
    assert line.paper.startswith("not invertible, 89.07 %, error inf, cond 8.6e14, SV 1.9e-12 to 1.7e3")
    assert line.ours.startswith("not invertible, 80.00 %, error inf (30 % not finite), cond 1.0e16")
    assert line.holds is True
    assert judged({"affine-conv1x1-none": made_up()}, "affine conv, none").holds is False
    line = judged(AS_IN_THE_PAPER, "affine conv, none, guarded, 20")
    assert (line.paper, line.holds) == ("", None)
    assert judged({"affine-conv1x1-nf1e-3-e10": made_up(epochs=10)}, "NF 1e-3, 10 epochs").paper.startswith(
        "invertible, 83.28 %"
    )


def test_what_regularizers_cost_and_gain():
    line = judged(AS_IN_THE_PAPER, "FD against none", "accuracy")
    assert (line.paper, line.ours, line.holds) == ("+0.40 points", "-1.00", True)
    assert not judged(
        AS_IN_THE_PAPER | {"affine-conv1x1-fd": made_up(accuracy=0.78)}, "FD against none", "accuracy"
    ).holds
    line = judged(AS_IN_THE_PAPER, "FD against none", "condition")
    assert (line.paper, line.ours, line.holds) == ("12.7", "14.0", True)
    line = judged(
        AS_IN_THE_PAPER | {"affine-conv1x1-none": made_up(lost=1.0, condition=math.inf)},
        "NF against none",
        "condition",
    )
    assert (line.ours, line.holds) == ("inf", True)
    weak = AS_IN_THE_PAPER | {"affine-conv1x1-none": made_up(condition=1e4)}
    assert not judged(weak, "FD against none", "condition").holds
    assert not [
        line for line in classifier_lines({0: AS_IN_THE_PAPER}, PAPER) if "additive conv, FD against" in line.what
    ]


def test_only_runs_of_one_length_are_compared():
    parts = {"affine-conv1x1-none": made_up(epochs=20), "affine-conv1x1-fd1e-4-e10": made_up(epochs=10)}
    assert not [line for line in classifier_lines({0: parts}, PAPER) if "against none" in line.what]
    parts["affine-conv1x1-none-e10"] = made_up(epochs=10, condition=1e16, lost=0.1)
    assert judged(parts, "FD against none", "accuracy").what.endswith("10 epochs")


@pytest.mark.parametrize(
    ("part", "made", "words", "holds"),
    [
        ("affine-conv1x1-fd5e-5", made_up(lost=0.1), ("FD at 5e-5",), True),
        ("affine-conv1x1-fd5e-5", made_up(), ("FD at 5e-5",), False),
        ("affine-conv1x1-nf1e-3", made_up(accuracy=0.75), ("NF at 1e-3",), True),
        ("affine-conv1x1-nf1e-3", made_up(accuracy=0.79), ("NF at 1e-3",), False),
        ("affine-conv1x1-fd-every5", made_up(), ("FD every 5 steps",), True),
        ("affine-conv1x1-fd-inverse", made_up(lost=0.5), ("FD of the inverse alone",), False),
        ("affine-conv1x1-nf", made_up(loss=0.6), ("training loss",), True),
        ("affine-conv1x1-nf", made_up(loss=0.3), ("training loss",), False),
    ],
)
def test_what_the_paper_says_in_prose(part, made, words, holds):
    assert judged(AS_IN_THE_PAPER | {part: made}, *words).holds is holds


def test_every_line_that_is_judged_stands_under_a_claim():
    claims = [claim for _, some in read_claims(RESULTS) for claim in some if claim.recipe == RECIPE.name]
    kinds = (*GRID, "fd-every1", "fd-every5", "fd-inverse")
    parts = {f"{model}-{kind}-e5": made_up(epochs=5) for model in TABLE for kind in kinds}
    lines = classifier_lines({0: AS_IN_THE_PAPER | parts}, PAPER)
    under = {
        line.what: [claim.label for claim in claims if _belongs(claim, dataclasses.asdict(line))] for line in lines
    }
    judged_somewhere = [line.what for line in lines if line.holds is not None]
    assert len(judged_somewhere) > 30
    assert [what for what in judged_somewhere if not under[what]] == []
    assert "prose:every" in under["FD every step: invertible, 5 epochs"]
    for label in ("table:classification", "fig:cls-c-an1"):  # of FD every 10 steps in both directions
        rows = [what for what, labels in under.items() if label in labels and ", FD 1e-4" in what]
        assert rows == ["affine conv, FD 1e-4, 20 epochs", "affine conv, FD 1e-4, 5 epochs"]


def test_the_guarded_run_is_shown():
    line = judged(AS_IN_THE_PAPER, "guarded memory-saving gradients")
    assert line.ours == "+0.50; 1.0e-04, not measured; 3 of 200"
    found = made_up(lost=0.2, accuracy=0.805)
    found.arrays["log_angle_guarded"] = np.array([math.nan, 1e-6, 5e-4])
    found.arrays["log_angle_remaining"] = np.array([math.nan, 1e-6, 2e-6])
    line = judged(AS_IN_THE_PAPER | {"affine-conv1x1-guarded": found}, "guarded memory-saving gradients")
    assert line.ours == "+0.50; 5.0e-04, 2.0e-06; 3 of 200"
    assert line.key


def test_a_run_that_diverged_is_a_row():
    parts = AS_IN_THE_PAPER | {
        "affine-conv1x1-fd": Measured(
            {"epochs": 20, "steps": 200, "diverged": "training diverged; the last good checkpoint is x"}
        )
    }
    line = judged(parts, "affine conv, FD 1e-4, 20 epochs")
    assert (line.ours, line.holds) == ("training diverged", None)
    assert not [line for line in classifier_lines({0: parts}, PAPER) if "FD against none" in line.what]


def test_what_there_is_of_a_run_that_diverged_is_said_below_the_table(data, tmp_path, monkeypatch, capfd):
    """In a cell of the table it would be longer than all others."""
    run = command_line(monkeypatch, capfd)
    words = [
        "reproduce",
        "cifar10_classifier",
        "--parts",
        "affine-conv1x1-none",
        "--out",
        str(tmp_path),
        "--data",
        str(data),
        "--jobs",
        "1",
    ]
    code, out, _ = run(*words, *(word for change in (*CHANGES, "lr=1e12") for word in ("--set", change)))
    assert code == 0
    (line,) = read_json(tmp_path / "ours.json")["runs"]["quick"]["lines"]
    assert line["ours"].startswith("training diverged: ")
    assert ";" not in line["ours"]
    said = " ".join(out.split())
    assert said.count("affine-conv1x1-none, seed 0: training diverged: ") == 1
    assert "checkpoint" in said
    assert "The same command diverges again: change --set lr=... and --out." in said


def test_seeds_stand_side_by_side():
    lines = classifier_lines({0: AS_IN_THE_PAPER, 1: {"affine-conv1x1-none": made_up()}}, PAPER)
    line = next(line for line in lines if line.what == "affine conv, none, 20 epochs")
    assert line.ours.count(";") == 1
    assert line.holds is False


def test_curves_have_what_was_measured_and_the_end():
    epochs, values = curve(AS_IN_THE_PAPER["affine-conv1x1-none"], "condition")
    assert epochs == [0.0, 10.0, 20]
    assert values == [1.0, 2.0, 1e16]
    assert curve(AS_IN_THE_PAPER["affine-conv1x1-none"], "test_accuracy") == ([0.0, 5.0, 10.0], [1.0, 0.5, 2.0])
    drawn = classifier_figures({0: AS_IN_THE_PAPER})
    assert set(drawn) == {"nf", "fd", "affine"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("affine-conv1x1-fd", "affine conv, FD 1e-4"),
        ("additive-shuffle-nf1e-3-e5", "additive shuffle, NF 1e-3"),
        ("affine-conv1x1-fd-inverse-every5", "affine conv, FD 1e-4 inverse every 5"),
        ("affine-conv1x1-guarded", "affine conv, none, guarded"),
    ],
)
def test_runs_in_words(name, words):
    assert shown(Run.of(name)) == words


# ---- what regularizers cost, and how far memory-saving gradients turn


def test_every_row_is_timed_and_shown(tmp_path):
    changes = [f"{name}={value}" for name, value in dataclasses.asdict(TIMING).items()]
    outcome = reproduce("regularizer_timing", out=tmp_path, changes=changes)
    rows = read_json(tmp_path / "ours.json")["runs"]["quick"]["measured"]["0"]["timing"]["rows"]
    assert set(rows) == set(regularizer_timing.ROWS)
    assert all(row["milliseconds"] > 0 for row in rows.values())
    assert [line.paper for line in outcome.lines[:4]] == ["281.0 s", "854.1 s", "406.6 s", "354.6 s"]
    assert [path.name for path in outcome.figures] == ["overhead-quick.png"]


def test_no_row_is_charged_for_what_earlier_ones_left(tmp_path, monkeypatch):
    """All rows share a process; a row takes 50 MiB here, and 1, 2, ... of them stay behind."""
    taken, peak, done = [100], [0], []

    def forget():
        peak[0] = taken[0]

    def make(*args):
        taken[0] += 50
        peak[0] = max(peak[0], taken[0])
        raise StopIteration

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forget)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: taken[0] * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0] * 2**20)
    monkeypatch.setattr(regularizer_timing.gc, "collect", lambda: done.append("collected"))
    monkeypatch.setattr(regularizer_timing, "make", make)
    asked, forget_rows = [], regularizer_timing._forget
    monkeypatch.setattr(regularizer_timing, "_forget", lambda work: asked.append(forget_rows(work)) or asked[-1])
    work, row = Work(tmp_path, 0, "cuda"), next(iter(regularizer_timing.ROWS.values()))
    for measure in (regularizer_timing.through_the_loop, regularizer_timing.bare, regularizer_timing.bare):
        with pytest.raises(StopIteration):
            measure(row, TIMING, work)
        assert regularizer_timing._memory(work, asked[-1]) == {"mib": 50}
    assert done == ["collected", "emptied"] * 3


@pytest.mark.parametrize("name", list(regularizer_timing.BARE))
def test_bare_steps_are_captured(name, tmp_path, device, monkeypatch):
    if device.type != "cuda":
        play_graphs_on_the_cpu(monkeypatch)
        monkeypatch.setattr(
            regularizer_timing.torch.optim.Adam, "__init__", _plain(regularizer_timing.torch.optim.Adam)
        )
    row = regularizer_timing.BARE[name]
    assert regularizer_timing.bare(row, TIMING, Work(tmp_path, device=device.type))["milliseconds"] > 0


def _plain(kind):
    """Adam without what a CPU does not have."""
    original = kind.__init__

    def start(self, parameters, *, fused, capturable, **options):
        assert fused
        assert capturable
        original(self, parameters, fused=True, **options)

    return start


def turned(angles, lost, diverged=""):
    steps = np.array([0.0, 10.0, 20.0, 30.0])
    arrays = {"log_step": steps, "log_angle": np.array(angles), "log_angle_lost": np.array(lost)}
    return Measured({"epochs": 3, "steps": 30, "diverged": diverged}, arrays)


def test_what_is_said_of_angles():
    found = {0: dict.fromkeys(gradient_angles.TITLES, turned([1e-6, math.nan, 1e-5, 1e-4], [0.0, math.nan, 0.0, 0.0]))}
    lines = gradient_angles.RECIPE.lines(None, found)
    assert [line.holds for line in lines] == [True, False, True, True]  # affine is expected to fail
    assert lines[0].ours == "up to 1.0e-04, never NaN"
    found[0]["affine-conv1x1-none"] = turned([1e-6, 1e-3, math.nan, math.nan], [0.0, 0.0, 0.5, 1.0])
    found[0]["affine-conv1x1-nf"] = turned([1e-6, 1e-3, 0.5, 1e-3], [0.0, 0.0, 0.0, 0.0])
    lines = gradient_angles.RECIPE.lines(None, found)
    assert [line.holds for line in lines] == [True, True, True, False]
    assert lines[1].ours == "up to 1.0e-03, first NaN at epoch 2"
    assert lines[1].what == "affine: mean angle (rad), judged by NaN alone"
    assert set(gradient_angles.RECIPE.figures(None, found)) == {"introduction", "regularized"}


def test_angles_of_runs_that_diverged_or_were_not_measured_hold_nothing():
    small, lost = [1e-6] * 4, [1e-6, math.nan, math.nan, math.nan]
    found = {0: {"affine-conv1x1-fd": turned(small, [0.0] * 4, "the loss was nan in step 31")}}
    found[0]["affine-conv1x1-none"] = turned(lost, [0.0, 1.0, 1.0, 1.0], "the loss was nan in step 11")
    found[0]["affine-conv1x1-nf"] = turned([math.nan] * 4, [math.nan] * 4)
    lines = {line.what: line.holds for line in gradient_angles.RECIPE.lines(None, found)}
    assert lines == {"affine: training": None, "affine, FD: training": None, "affine, NF: mean angle (rad)": False}


def test_angles_are_taken_from_the_classifiers_beside(data, tmp_path, monkeypatch):
    part = ["affine-conv1x1-none"]
    reproduce("cifar10_classifier", out=tmp_path / "cifar10_classifier", changes=CHANGES, parts=part, data=data)
    trained = []
    original = type(cifar10_classifier.RECIPE).run
    monkeypatch.setattr(
        type(cifar10_classifier.RECIPE), "run", lambda self, *args: trained.append(args) or original(self, *args)
    )
    reproduce("gradient_angles", out=tmp_path / "gradient_angles", changes=CHANGES, parts=part, data=data)
    assert not trained
    reproduce("gradient_angles", out=tmp_path / "alone" / "gradient_angles", changes=CHANGES, parts=part, data=data)
    assert len(trained) == 1
    taken, alone = (
        json.loads((folder / "gradient_angles" / "parts" / f"quick-seed0-{part[0]}.json").read_text())
        for folder in (tmp_path, tmp_path / "alone")
    )
    assert taken["arrays"] == alone["arrays"]
    assert taken["numbers"] == alone["numbers"]
    other = [change.replace("epochs=3", "epochs=2") for change in CHANGES]
    reproduce("gradient_angles", out=tmp_path / "gradient_angles2", changes=other, parts=part, data=data)
    assert len(trained) == 2  # another configuration is another run
