"""The classifiers' recipe at a size of seconds, on images that are written here."""

import json
import math

import numpy as np
import pytest

from bilip.errors import CheckpointError, InputError, Stopped
from bilip.recipes import cifar10_classifier, reproduce
from bilip.recipes.cifar10_classifier import RECIPE, make_penalties
from bilip.recipes.classifier_runs import Run
from bilip.recipes.recipe import Work
from bilip.record import read_json
from bilip.training import read_log, read_state, run
from bilip.training.step import CapturedStep
from recorded import play_graphs_on_the_cpu

TINY = {
    "side": 8,
    "images": 48,
    "test": 200,
    "levels": 2,
    "blocks": 1,
    "hidden": 4,
    "batch": 8,
    "epochs": 3,
    "start": 16,
    "fd_every": 3,
    "evaluate_every": 1,
    "inverted": 16,
    "spectra": 1,
    "spectra_end": 2,
    "angle_batches": 2,
}
CHANGES = [f"{name}={value}" for name, value in TINY.items()]


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
    return cifar10_classifier.Config(**TINY)


@pytest.mark.parametrize(
    "part", ["affine-conv1x1-none", "affine-conv1x1-fd", "additive-shuffle-nf", "affine-conv1x1-guarded"]
)
def test_captured_steps_end_as_eager_ones(part, tiny, data, device, tmp_path, monkeypatch):
    found, seen = [], []

    class Seen(CapturedStep):
        def __init__(self, *args):
            super().__init__(*args)
            seen.append(self)

    eager = (
        RECIPE.run(part, tiny, Work(tmp_path / "eager", 1, device.type, data=data)) if device.type == "cpu" else None
    )
    monkeypatch.setattr(run, "CapturedStep", Seen)
    if device.type != "cuda":
        play_graphs_on_the_cpu(monkeypatch)
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
    parts = ["affine-conv1x1-fd"]
    reproduce("cifar10_classifier", out=tmp_path / "whole", changes=CHANGES, parts=parts, data=data)
    clock = iter([0.0] * 9 + [math.inf])
    monkeypatch.setattr("bilip.training.run.Run._shared_clock", lambda run: (next(clock),))
    with pytest.raises(Stopped, match=r"time is up.* 0 of 1 parts are measured; the same command goes on"):
        reproduce("cifar10_classifier", out=tmp_path / "cut", changes=CHANGES, parts=parts, data=data, minutes=1e6)
    monkeypatch.undo()
    folder = tmp_path / "cut" / "pieces" / "quick" / "seed0" / "affine-conv1x1-fd"
    assert read_state(folder / "last.safetensors")[1]["step"] == 10
    assert not (folder / "measured.json").exists()
    reproduce("cifar10_classifier", out=tmp_path / "cut", changes=CHANGES, parts=parts, data=data)
    whole, cut = (read_json(tmp_path / name / "ours.json")["runs"]["quick"]["measured"] for name in ("whole", "cut"))
    assert json.dumps(cut) == json.dumps(whole)
    logs = [
        read_log(tmp_path / name / "pieces" / "quick" / "seed0" / parts[0], "evaluation") for name in ("whole", "cut")
    ]
    assert json.dumps(logs[0]) == json.dumps(logs[1])


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
    assert outcome.figures
    with pytest.raises(InputError, match="holds no part of size paper"):
        reproduce("cifar10_classifier", "paper", out=tmp_path, collect=True)
    broken = tmp_path / "parts" / "quick-seed0-affine-conv1x1-none.json"
    broken.write_text("{}")
    with pytest.raises(CheckpointError, match="not a part that a recipe wrote"):
        reproduce("cifar10_classifier", out=tmp_path, collect=True)


def test_other_data_is_refused(tiny, data, tmp_path):
    work = Work(tmp_path / "part", data=data)
    (tmp_path / "part").mkdir()
    cifar10_classifier.load(tiny, work)
    with pytest.raises(CheckpointError, match="begun with other data: images was 48, now it is 40"):
        cifar10_classifier.load(cifar10_classifier.replace(tiny, images=40), work)


@pytest.mark.parametrize(
    "part", ["affine-conv1x1", "affine-conv1x1-none1e-3", "affine-conv1x1-nf-inverse", "affin-shuffle-fd"]
)
def test_parts_that_do_not_exist(part, tmp_path):
    with pytest.raises(InputError, match=f"--parts {part}: there is no such part"):
        reproduce("cifar10_classifier", out=tmp_path, parts=[part])


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


def test_actnorms_start_from_so_many_augmented_images(tiny, data, tmp_path):
    train, *_ = cifar10_classifier.load(tiny, Work(tmp_path, data=data))
    model = cifar10_classifier.make_model(Run.of("affine-conv1x1-none"), tiny)
    seen = []
    trunk = model.trunk
    trunk.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    cifar10_classifier.start_actnorms(model, train, tiny, 0)
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
