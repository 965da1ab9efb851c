"""What is said of classifiers, on runs that are made up."""

import math

import numpy as np
import pytest

from bilip.recipes.cifar10_classifier import RECIPE
from bilip.recipes.classifier_runs import Run, classifier_figures, classifier_lines, curve, shown
from bilip.recipes.recipe import Measured

PAPER = RECIPE.paper()


def measured(*, epochs=20, accuracy=0.8, condition=100.0, lost=0.0, loss=0.5, **more):
    numbers = {
        "epochs": epochs,
        "steps": 10 * epochs,
        "diverged": "",
        "test_accuracy": accuracy,
        "error_mean": math.inf if lost else 1e-3,
        "share_non_finite": lost,
        "invertible": not lost,
        "condition": condition,
        "sigma_min": 1 / condition,
        "sigma_max": 1.0,
        "spectra": {"condition": [condition, 1.0], "sigma_min": [1 / condition, 1.0], "sigma_max": [1.0, 1.0]},
        "train": {"cross_entropy": loss},
        "guard": {"worst_angle": 1e-4, "repaired": 3, "steps": 200},
    }
    columns = ("condition", "sigma_min", "sigma_max", "test_accuracy", "error_mean", "share_non_finite")
    curves = {f"log_{name}": np.array([1.0, math.nan if name in columns[:3] else 0.5, 2.0]) for name in columns}
    return Measured(numbers | more, {"log_step": np.array([0.0, 50.0, 100.0]), **curves})


def judged(parts, *words):
    """The one line that begins so."""
    lines = classifier_lines({0: parts}, PAPER)
    (line,) = [line for line in lines if all(word in line.what for word in words)]
    return line


AS_IN_THE_PAPER = {
    "affine-conv1x1-none": measured(lost=0.3, condition=1e16),
    "affine-conv1x1-fd": measured(accuracy=0.79),
    "affine-conv1x1-nf": measured(condition=1e4, loss=0.55),
    "affine-conv1x1-guarded": measured(lost=0.2, accuracy=0.805),
    "additive-conv1x1-none": measured(condition=1e5),
}


def test_rows_stand_beside_those_of_the_paper():
    line = judged(AS_IN_THE_PAPER, "affine conv, none, 20 epochs")
    assert line.paper.startswith("not invertible, 89.07 %, error inf, cond 8.6e14, SV 1.9e-12 to 1.7e3")
    assert line.ours.startswith("not invertible, 80.00 %, error inf (30 % not finite), cond 1.0e16")
    assert line.holds is True
    assert judged({"affine-conv1x1-none": measured()}, "affine conv, none").holds is False
    line = judged(AS_IN_THE_PAPER, "affine conv, none, guarded, 20")
    assert (line.paper, line.holds) == ("", None)
    assert judged({"affine-conv1x1-nf1e-3-e10": measured(epochs=10)}, "NF 1e-3, 10 epochs").paper.startswith(
        "invertible, 83.28 %"
    )


def test_what_regularizers_cost_and_gain():
    line = judged(AS_IN_THE_PAPER, "FD against none", "accuracy")
    assert (line.paper, line.ours, line.holds) == ("+0.40 points", "-1.00", True)
    assert not judged(
        AS_IN_THE_PAPER | {"affine-conv1x1-fd": measured(accuracy=0.78)}, "FD against none", "accuracy"
    ).holds
    line = judged(AS_IN_THE_PAPER, "FD against none", "condition")
    assert (line.paper, line.ours, line.holds) == ("12.7", "14.0", True)
    line = judged(
        AS_IN_THE_PAPER | {"affine-conv1x1-none": measured(lost=1.0, condition=math.inf)},
        "NF against none",
        "condition",
    )
    assert (line.ours, line.holds) == ("inf", True)
    weak = AS_IN_THE_PAPER | {"affine-conv1x1-none": measured(condition=1e4)}
    assert not judged(weak, "FD against none", "condition").holds
    assert not [
        line for line in classifier_lines({0: AS_IN_THE_PAPER}, PAPER) if "additive conv, FD against" in line.what
    ]


def test_only_runs_of_one_length_are_compared():
    parts = {"affine-conv1x1-none": measured(epochs=20), "affine-conv1x1-fd1e-4-e10": measured(epochs=10)}
    assert not [line for line in classifier_lines({0: parts}, PAPER) if "against none" in line.what]
    parts["affine-conv1x1-none-e10"] = measured(epochs=10, condition=1e16, lost=0.1)
    assert judged(parts, "FD against none", "accuracy").what.endswith("10 epochs")


@pytest.mark.parametrize(
    ("part", "made", "words", "holds"),
    [
        ("affine-conv1x1-fd5e-5", measured(lost=0.1), ("FD at 5e-5",), True),
        ("affine-conv1x1-fd5e-5", measured(), ("FD at 5e-5",), False),
        ("affine-conv1x1-nf1e-3", measured(accuracy=0.75), ("NF at 1e-3",), True),
        ("affine-conv1x1-nf1e-3", measured(accuracy=0.79), ("NF at 1e-3",), False),
        ("affine-conv1x1-fd-every5", measured(), ("FD every 5 steps",), True),
        ("affine-conv1x1-fd-inverse", measured(lost=0.5), ("FD of the inverse alone",), False),
        ("affine-conv1x1-nf", measured(loss=0.6), ("training loss",), True),
        ("affine-conv1x1-nf", measured(loss=0.3), ("training loss",), False),
    ],
)
def test_what_the_paper_says_in_prose(part, made, words, holds):
    assert judged(AS_IN_THE_PAPER | {part: made}, *words).holds is holds


def test_the_guarded_run_is_shown():
    line = judged(AS_IN_THE_PAPER, "guarded memory-saving gradients")
    assert line.ours == "+0.50; 1.0e-04, nan; 3 of 200"
    found = measured(lost=0.2, accuracy=0.805)
    found.arrays["log_angle_guarded"] = np.array([math.nan, 1e-6, 5e-4])
    found.arrays["log_angle_remaining"] = np.array([math.nan, 1e-6, 2e-6])
    line = judged(AS_IN_THE_PAPER | {"affine-conv1x1-guarded": found}, "guarded memory-saving gradients")
    assert line.ours == "+0.50; 5.0e-04, 2.0e-06; 3 of 200"
    assert line.key


def test_a_run_that_diverged_is_a_row():
    parts = AS_IN_THE_PAPER | {
        "affine-conv1x1-fd": Measured({"epochs": 20, "steps": 200, "diverged": "training diverged"})
    }
    line = judged(parts, "affine conv, FD 1e-4, 20 epochs")
    assert (line.ours, line.holds) == ("training diverged", None)
    assert not [line for line in classifier_lines({0: parts}, PAPER) if "FD against none" in line.what]


def test_seeds_stand_side_by_side():
    lines = classifier_lines({0: AS_IN_THE_PAPER, 1: {"affine-conv1x1-none": measured()}}, PAPER)
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


def test_runs_in_words():
    names = (
        "affine-conv1x1-fd",
        "additive-shuffle-nf1e-3-e5",
        "affine-conv1x1-fd-inverse-every5",
        "affine-conv1x1-guarded",
    )
    assert [shown(Run.of(name)) for name in names] == [
        "affine conv, FD 1e-4",
        "additive shuffle, NF 1e-3",
        "affine conv, FD 1e-4 inverse every 5",
        "affine conv, none, guarded",
    ]
