"""What a CI server reads: JUnit files, step summaries and the project's own settings."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bilip._project import LIMITS, find_project
from bilip.errors import InputError
from bilip.record import AuditRecord, Status, Verdict
from bilip.report import to_junit
from in_process import command_line

TARGETS = """
import torch
import bilip

def flow():
    torch.manual_seed(0)
    return bilip.Flow(bilip.models.real_nvp(4, blocks=2, hidden=(8,), coupling="additive"))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("project")
    (path / "ci_targets.py").write_text(TARGETS)
    (path / "inside").mkdir()
    np.save(path / "x.npy", np.random.default_rng(0).standard_normal((700, 4)).astype(np.float32))
    return path


@pytest.fixture
def bilip_(made, monkeypatch, capfd):
    """Run the command line in the project's folder; what comes back is the exit code, stdout and stderr."""
    monkeypatch.chdir(made)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    yield command_line(monkeypatch, capfd)
    (made / "pyproject.toml").unlink(missing_ok=True)


BARE = ["audit", "ci_targets:flow", "--probes", "consistency,reconstruction"]
QUICK = [*BARE, "--data", "x.npy", "--ood", "", "--budget", "quick"]


def judged(**states):
    verdicts = {
        use: Verdict(use, Status(state), f"Why {use} & <so>.", remedy="" if state == "safe" else "Do this.")
        for use, state in states.items()
    }
    return AuditRecord(
        model={"name": "a <flow>\x00"},
        verdicts=verdicts,
        settings={"seconds": 1.5},
        created="2026-01-05T10:11:12+00:00",
    )


def cases(xml):
    root = ElementTree.fromstring(xml.encode())
    found = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    counts = {tag: sum(tag in kinds for kinds in found.values()) for tag in ("failure", "error", "skipped")}
    for element in (root, root.find("testsuite")):
        assert int(element.get("tests")) == len(found)
        assert [int(element.get(k)) for k in ("failures", "errors", "skipped")] == list(counts.values())
    return {name: kinds[0] if kinds else "passed" for name, kinds in found.items()}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("passed", "failure", "skipped")),
        ({"require": ["likelihood"]}, ("passed", "failure", "skipped")),
        ({"require": ["sampling"]}, ("passed", "skipped", "skipped")),
        ({"require": ["inversion", "likelihood"]}, ("passed", "failure", "error")),
        ({"require": ["inversion"], "not_measured": "pass"}, ("passed", "skipped", "skipped")),
    ],
)
def test_one_test_case_for_each_use(options, expected):
    record = judged(sampling="safe", likelihood="unsafe", inversion="not-measured")
    assert cases(to_junit(record, **options)) == dict(
        zip(("sampling", "likelihood", "inversion"), expected, strict=True)
    )
    required = options.get("require")
    if required:  # what the server shows is what the exit code says
        gate = record.passed(*required, not_measured=options.get("not_measured", "fail"))
        assert gate == (not {"failure", "error"} & set(expected))


def test_a_failure_says_why_and_what_to_do():
    root = ElementTree.fromstring(to_junit(judged(likelihood="unsafe")).encode())
    failure = root.find("testsuite/testcase/failure")
    assert failure.get("message") == "Why likelihood & <so>."
    assert failure.text.splitlines()[-1] == "Do this."


def test_a_model_that_ended_the_program_is_an_error():
    record = judged(sampling="safe")
    record.settings["ended"] = "the model ended the program"
    assert cases(to_junit(record, require=["sampling"])) == {"sampling": "error"}
    with pytest.raises(InputError, match="'samplin'.*Did you mean 'sampling'"):
        to_junit(record, require=["samplin"])


def test_the_file_has_what_those_of_pytest_have(tmp_path):
    """The readers of CI servers are made for these."""
    (tmp_path / "test_it.py").write_text(
        "def test_fails():\n    assert 0\n\nimport pytest\n\ndef test_skips():\n    pytest.skip('x')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml=theirs.xml", "test_it.py"]
    clean = {
        name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"
    }  # --seed is known here alone
    subprocess.run(command, cwd=tmp_path, capture_output=True, env=clean)
    theirs = ElementTree.parse(tmp_path / "theirs.xml").getroot()
    ours = ElementTree.fromstring(to_junit(judged(sampling="unsafe", likelihood="not-measured")).encode())
    for place in ("testsuite", "testsuite/testcase", "testsuite/testcase/failure", "testsuite/testcase/skipped"):
        wanted, found = theirs.find(place), ours.find(place)
        assert found is not None
        assert set(wanted.keys()) - {"hostname"} <= set(found.keys()), place
    assert theirs.tag == ours.tag


def test_an_audit_leaves_a_junit_file_and_a_summary(bilip_, made, monkeypatch):
    (made / "steps.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(made / "steps.md"))
    code, out, err = bilip_(
        *QUICK, "--junit", "run.xml", "--require", "inversion,sampling", "--limit", "bad_share=0.02"
    )
    assert (code, err) == (1, "bilip: required, but sampling is not-measured\n")
    assert cases((made / "run.xml").read_text(encoding="utf-8")) == {
        "inversion": "passed",
        "sampling": "error",
        "likelihood": "skipped",
        "ood-likelihood": "skipped",
        "reversible-gradients": "skipped",
    }
    text = (made / "steps.md").read_text(encoding="utf-8")
    assert text.startswith("before\n## Audit of ci\\_targets:flow")
    assert "2 % allowed" in text or "(limit 2 %)" in text
    assert f"added to {made / 'steps.md'}" in out
    code, _, err = bilip_(*QUICK, "--summary", "own.md", "--require", "inversion,sampling", "--not-measured", "pass")
    assert (code, err) == (0, "")
    assert (made / "own.md").read_text(encoding="utf-8").startswith("## Audit of")
    assert (made / "steps.md").read_text(encoding="utf-8") == text


def test_a_record_becomes_a_junit_file_later_on(bilip_, made):
    judged(sampling="safe", likelihood="unsafe").save(made / "kept.json")
    code, _, err = bilip_("report", "kept.json", "--junit", "later.xml")
    assert (code, err) == (0, "wrote later.xml\n")
    assert cases((made / "later.xml").read_text(encoding="utf-8")) == {"sampling": "passed", "likelihood": "failure"}


def test_a_project_says_it_once(bilip_, made, monkeypatch):
    (made / "pyproject.toml").write_text(
        """[tool.bilip]
sources = {held-out = "x.npy"}
ood = ["scaled:3"]
require = ["inversion"]
budget = "quick"
time = 500

[tool.bilip.limits]
relative = 1e-12
"""
    )
    monkeypatch.chdir(made / "inside")
    monkeypatch.syspath_prepend(str(made))
    code, out, err = bilip_(*BARE, "--out", "run.json")
    assert (code, err) == (1, "bilip: required, but inversion is unsafe\n")
    assert f"settings of {made / 'pyproject.toml'} [tool.bilip]" in out
    record = AuditRecord.load("run.json")
    assert {s["name"]: s["role"] for s in record.sources} == {"held-out": "data", "scaled:3": "ood"}
    assert (record.settings["budget"], record.settings["time"]) == ("quick", 500)
    assert record.settings["thresholds"]["relative"] == 1e-12
    more = ["--limit", "relative=0.1", "--ood", "", "--data", "other=../x.npy", "--time", "400"]
    gate = ["--require", "likelihood", "--not-measured", "pass"]
    assert bilip_(*BARE, *more, *gate, "--out", "run.json")[0] == 0  # the command line wins
    record = AuditRecord.load("run.json")
    assert [s["name"] for s in record.sources] == ["other"]
    assert (record.settings["thresholds"]["relative"], record.settings["time"]) == (0.1, 400)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("requires = ['sampling']", "[tool.bilip] has an unknown key 'requires'; the known ones are sources, ood, limits, require, "
         "not_measured, budget, time. Did you mean 'require'?"),
        ("limits = {bad-share = 1}", "[tool.bilip.limits] has an unknown key 'bad-share'"),
        ("limits = {bad-share = 1}", "Did you mean 'bad_share'?"),
        ("limits = {relative = 'x'}", "Thresholds(relative='x'): expected a number >= 0."),
        ("limits = {more = 3}", "Thresholds(more=3): expected a table of names and numbers."),
        ("limits = 3", "[tool.bilip.limits] is 3; expected a table"),
        ("sources = 'x.npy'", "sources = 'x.npy'; expected a table of names and files"),
        ("sources = {a = 'gone.npy'}", "gone.npy"),
        ("require = ['samplin']", "require: samplin: expected inversion, sampling"),
        ("require = [1]", "require = [1]; expected a list of names"),
        ("time = true", "time = True; expected a number of seconds."),
        ("time = -1", "audit(time=-1)"),
        ("budget = 7", "budget = 7; expected a text."),
        ("budget = 'quik'", "quik"),
        ("not_measured = 'skip'", "not_measured = 'skip'; expected 'fail' or 'pass'."),
        ("ood =", "pyproject.toml cannot be read"),
    ],
)  # fmt: skip
def test_bad_settings_are_one_line(bilip_, made, text, says):
    known = "" if text.startswith("sources") else "sources = {x = 'x.npy'}\n"
    (made / "pyproject.toml").write_text(f"[tool.bilip]\n{known}{text}\n")
    code, out, err = bilip_(*BARE)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--limit", "relativ=1"], "Did you mean 'relative'?"),
        (["--limit", "relative"], "expected a number after the equals sign"),
        (["--not-measured", "skip"], "--not-measured skip: expected fail or pass."),
        (["--junit", "no/such/run.xml"], "the folder no/such does not exist"),
        (["--summary", "inside"], "it is a folder"),
        (["--require", "sampl"], "Did you mean 'sampling'?"),
    ],
)
def test_bad_options_are_one_line(bilip_, more, says):
    code, _, err = bilip_(*QUICK, *more)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


def test_without_data_anywhere(bilip_):
    code, _, err = bilip_(*BARE)
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no data: pass --data FILE" in err


def test_the_nearest_file_with_the_table_counts(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.bilip]\nbudget = 'thorough'\n")
    (inner.parent / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert find_project(inner).budget == "thorough"
    (inner / "pyproject.toml").write_text("[tool.bilip]\n")
    assert find_project(inner).budget is None
    assert find_project(inner).path == Path(inner, "pyproject.toml")


def test_limits_are_the_fields_of_thresholds():
    from bilip.auditing import Thresholds

    assert set(LIMITS) == set(Thresholds.__dataclass_fields__)
