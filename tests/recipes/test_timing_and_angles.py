"""What regularizers cost, and how far memory-saving gradients turn, at a size of seconds."""

import dataclasses
import json
import math

import numpy as np
import pytest

from bilip.recipes import Measured, cifar10_classifier, gradient_angles, regularizer_timing, reproduce
from bilip.recipes.recipe import Work
from bilip.record import read_json
from recipes.test_classifier import CHANGES, data  # noqa: F401 - a fixture
from recorded import play_graphs_on_the_cpu

TIMING = regularizer_timing.Config(side=8, levels=1, blocks=1, hidden=4, batch=4, warm=2, steps=2, rounds=1)


def test_every_row_is_timed_and_shown(tmp_path):
    changes = [f"{name}={value}" for name, value in dataclasses.asdict(TIMING).items()]
    outcome = reproduce("regularizer_timing", out=tmp_path, changes=changes)
    rows = read_json(tmp_path / "ours.json")["runs"]["quick"]["measured"]["0"]["timing"]["rows"]
    assert set(rows) == set(regularizer_timing.ROWS)
    assert all(row["milliseconds"] > 0 for row in rows.values())
    assert [line.paper for line in outcome.lines[:4]] == ["281.0 s", "854.1 s", "406.6 s", "354.6 s"]
    assert [path.name for path in outcome.figures] == ["overhead-quick.png"]


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


def measured(angles, lost):
    steps = np.array([0.0, 10.0, 20.0, 30.0])
    arrays = {"log_step": steps, "log_angle": np.array(angles), "log_angle_lost": np.array(lost)}
    return Measured({"epochs": 3, "steps": 30}, arrays)


def test_what_is_said_of_angles():
    found = {
        0: dict.fromkeys(gradient_angles.TITLES, measured([1e-6, math.nan, 1e-5, 1e-4], [0.0, math.nan, 0.0, 0.0]))
    }
    lines = gradient_angles.RECIPE.lines(None, found)
    assert [line.holds for line in lines] == [True, False, True, True]  # affine is expected to fail
    assert lines[0].ours == "up to 1.0e-04, never NaN"
    found[0]["affine-conv1x1-none"] = measured([1e-6, 1e-3, math.nan, math.nan], [0.0, 0.0, 0.5, 1.0])
    found[0]["affine-conv1x1-nf"] = measured([1e-6, 1e-3, 0.5, 1e-3], [0.0, 0.0, 0.0, 0.0])
    lines = gradient_angles.RECIPE.lines(None, found)
    assert [line.holds for line in lines] == [True, True, True, False]
    assert lines[1].ours == "up to 1.0e-03, NaN from epoch 2 on"
    assert set(gradient_angles.RECIPE.figures(None, found)) == {"introduction", "regularized"}


def test_angles_are_taken_from_the_classifiers_beside(data, tmp_path, monkeypatch):  # noqa: F811
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
