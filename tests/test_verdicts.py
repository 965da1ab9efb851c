"""Two small flows of `benchmarks/verdicts.py`, from training to the table, and the rules by which the truth is told."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import verdicts
from flow_zoo import truth as zoo_truth
from flow_zoo.flows import FLOWS

PLANTED, SOUND = "nflows-planted-inverse-2", "bilip-additive-8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("nflows")
    place = tmp_path_factory.mktemp("verdicts")
    for name in (PLANTED, SOUND):
        verdicts.examine(name, place, steps=10, samples=1024, given=700, budgets=["quick"])
    return place


def test_a_sound_flow_and_a_broken_one_are_judged_as_they_are(folder):
    found = verdicts.summary(folder)
    assert found["flows"] == 2
    assert found["planted"] == 1
    here = found["table"]["quick"]["all"]
    assert (here["false_safe"], here["called_unsafe"]) == (0, 0)
    assert here["safe"] >= 8
    assert here["unsafe"] >= 2  # the planted inverse: inversion and sampling
    assert "| quick | all |" in verdicts.markdown(found)


def test_the_page_is_filled_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- verdicts -->\nold\n<!-- end -->\nafter\n")
    verdicts._fill(page, "new\n")
    verdicts._fill(page, "newer\n")
    assert page.read_text() == "before\n<!-- verdicts -->\n\nnewer\n\n<!-- end -->\nafter\n"
    (tmp_path / "bare.md").write_text("nothing")
    with pytest.raises(SystemExit, match="expected the lines"):
        verdicts._fill(tmp_path / "bare.md", "new")


def test_a_finished_flow_is_not_repeated(folder, monkeypatch):
    monkeypatch.setattr(verdicts, "audited", None)
    monkeypatch.setattr(verdicts, "truth", None)
    monkeypatch.setattr(verdicts, "train", None)
    before = json.loads((folder / f"{SOUND}.json").read_text())
    assert verdicts.examine(SOUND, folder, budgets=["quick"])["truth"] == before["truth"]
    assert not verdicts._done(SOUND, SimpleNamespace(out=folder, seeds=0))  # standard is still to do


def test_verdicts_over_seeds_are_counted(folder):
    verdicts.repeated(SOUND, folder, 2, given=700)
    found = verdicts.steadiness(folder)
    assert found["verdicts"] == 2 * 6
    assert found["same_share"] == 1.0


def test_the_truth_does_not_import_bilip():
    for module in ("truth", "views", "data"):
        text = (Path(zoo_truth.__file__).parent / f"{module}.py").read_text()
        lines = [line for line in text.splitlines() if line.startswith(("import bilip", "from bilip"))]
        assert not lines
    assert "bilip" not in vars(zoo_truth)


def test_the_zoo_is_as_large_as_it_says():
    honest = [spec for spec in FLOWS.values() if not spec.defect]
    assert len(honest) >= 40
    assert len(FLOWS) - len(honest) >= 10
    families = [kind for spec in honest for kind in spec.families]
    solved = families.count("residual") + families.count("CNF")
    assert solved >= 3
    for kind in (
        "affine coupling",
        "additive",
        "autoregressive",
        "spline",
        "conditional",
        "multi-scale",
        "mixture base",
    ):
        assert families.count(kind) >= 3
    assert {spec.library for spec in honest} == {"FrEIA", "nflows", "normflows", "zuko", "pyro", "bilip"}
    assert {torch.Size(spec.set.shape).numel() for spec in honest} == {2, 8, 64, 784}
    assert 0.2 < sum(spec.held_out for spec in FLOWS.values()) / len(FLOWS) < 0.47


@pytest.mark.parametrize(
    ("true", "said", "outcome"),
    [
        ("unsafe", "safe", "false safe"),
        ("safe", "unsafe", "called unsafe"),
        ("safe", "not-measured", "not measured"),
        ("unsafe", "unsafe", "right"),
        ("borderline", "safe", "borderline"),
    ],
)
def test_outcomes(true, said, outcome):
    assert verdicts._outcome(true, said) == outcome


def test_an_error_that_float64_cannot_resolve_is_told_apart():
    error = torch.tensor([0.0, 1.0, 1.0, 10.0, 0.1])
    moved = torch.tensor([0.0, 0.0, 0.2, 0.0, 5.0])
    bad, unknown, beyond = zoo_truth._judge(error, moved, torch.tensor(1.0))
    assert bad.tolist() == [False, False, False, True, True]
    assert unknown.tolist() == [False, False, True, False, False]
    assert beyond.tolist() == [False, False, False, False, True]


def test_steps_of_a_model_give_the_log_determinant_of_its_jacobian():
    torch.manual_seed(0)  # with other weights this one may have no digit to compare: exponential scales, not trained
    view = FLOWS["bilip-exp-64-hasty"].build().double().eval()
    x = torch.randn(1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = zoo_truth._log_det_of_jacobian(view, x, None)
    jacobian = torch.autograd.functional.jacobian(lambda x: view.encode(x)[0][0], x)[:, 0]
    rounding = 64 * torch.finfo(torch.float64).eps * float(torch.linalg.cond(jacobian))
    assert rounding < 1e-3
    assert found == pytest.approx(float(torch.linalg.slogdet(jacobian)[1]), abs=1e-10 + rounding)


def test_the_noise_behind_a_truth_has_the_range_of_the_samples_that_an_audit_is_given(monkeypatch):
    """Of heavy tails, more samples have a wider range: noise over it would be another source than the audit's."""
    spec = FLOWS["bilip-additive-8"]
    seen = {}
    for name, found in {"inversion": {}, "sampling": {}, "gradients": None, "same_again": True}.items():
        monkeypatch.setattr(zoo_truth.Judge, name, lambda self, *_, found=found: found)
    told = {"points": 1, "status": "safe"}
    monkeypatch.setattr(zoo_truth.Judge, "log_det", lambda self, *_: dict(told))

    def likelihood(self, x, context, seconds):
        seen[len(seen)] = x
        return dict.fromkeys(zoo_truth.LIMITS, "safe")

    monkeypatch.setattr(zoo_truth.Judge, "likelihood", likelihood)
    zoo_truth.truth(spec, spec.build().eval(), samples=40_000)
    given, _ = spec.set.draw(verdicts.GIVEN, seed=2)
    assert (seen[0].amax(0) > given.amax(0)).any()  # the data behind the truth go further
    assert (seen[1] <= given.amax(0)).all()
    assert (seen[1] >= given.amin(0)).all()
