"""The plugin in a pytest of its own."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bilip.record import AuditRecord

pytestmark = pytest.mark.process

TESTS = '''
import pytest
import torch
import bilip


class Wrong(torch.nn.Module):
    """Comes back within the limits of an audit, and not within rounding."""

    def forward(self, x):
        return 2 * x

    def inverse(self, z):
        return z / 2 * (1 + 1e-4)


@pytest.fixture
def flow():
    torch.manual_seed(0)
    return bilip.Flow(bilip.models.real_nvp(2, blocks=2, hidden=(8,)))


@pytest.fixture
def x():
    return torch.randn(700, 2, generator=torch.Generator().manual_seed(0))


PROBES = ["consistency", "reconstruction"]


def test_good(audit_flow, flow, x):
    record = audit_flow(flow, x, probes=PROBES)
    assert record.passed("inversion")
    assert record.settings["thresholds"]["relative"] < 3.4e-4


def test_wrong_by_more_than_rounding(audit_flow, x):
    audit_flow(Wrong(), x, probes=PROBES)


def test_good_enough(audit_flow, x):
    audit_flow(Wrong(), {"test": x}, "inversion", tolerance=1e-3, probes=PROBES)


def test_not_measured(audit_flow, flow, x):
    audit_flow(flow, x, "inversion", "sampling", probes=PROBES)


def test_not_measured_may_pass(audit_flow, flow, x):
    audit_flow(flow, x, "inversion", "sampling", probes=PROBES, not_measured="pass")


def test_bad_input(audit_flow, flow):
    audit_flow(flow, torch.zeros(5, 3), probes=PROBES)


def test_bad_use(audit_flow, flow, x):
    audit_flow(flow, x, "samplin", probes=PROBES)
'''


def run(folder, *args, plugin=True):
    """Pytest without the plugins that are installed, so that the one beside us is tested."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *(["-p", "bilip._pytest_plugin"] if plugin else []),
        *args,
    ]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_flows.py").write_text(TESTS)
    (folder / "pyproject.toml").write_text("[tool.bilip]\ntime = 300\n[tool.pytest.ini_options]\n")
    return folder, run(folder, "-rA", "--junit-xml=run.xml", "--bilip-out=kept")


def test_what_passes_and_what_fails(ran):
    folder, result = ran
    cases = {c.get("name"): c for c in ElementTree.parse(folder / "run.xml").iter("testcase")}
    failed = {name for name, case in cases.items() if case.find("failure") is not None}
    assert failed == {"test_wrong_by_more_than_rounding", "test_not_measured", "test_bad_input", "test_bad_use"}, (
        result.stdout
    )
    assert len(cases) == 7
    told = {p.get("name"): p.get("value") for p in cases["test_good"].iter("property")}
    assert told["bilip.inversion"] == "safe"


def test_a_failure_reads_as_a_verdict(ran):
    out = ran[1].stdout
    assert "Wrong is not safe for inversion" in out
    assert "inversion: unsafe" in out
    assert "what rounding explains, from the model's eps and condition" in out
    assert "sampling: not-measured" in out
    assert (
        "bilip could not audit the model: source 'data': RealNVP takes no batch" in out
        or "takes no batch of shape (4, 3)" in out
    )
    assert "Did you mean 'sampling'?" in out
    assert "Traceback" not in out
    assert "_pytest_plugin.py" not in out


def test_records_are_kept(ran):
    folder, result = ran
    kept = sorted(path.name for path in (folder / "kept").iterdir())
    assert "test_flows.py-test_good.json" in kept
    record = AuditRecord.load(folder / "kept" / "test_flows.py-test_good.json")
    assert record.settings["command"] == "test_flows.py::test_good"
    assert (record.settings["budget"], record.settings["time"]) == ("quick", 300)
    assert "bilip report" in result.stdout


def test_it_costs_other_suites_nothing(tmp_path):
    (tmp_path / "test_other.py").write_text(
        "import sys\n\ndef test_nothing_is_imported():\n"
        "    assert not {'torch', 'numpy', 'bilip.auditing', 'bilip.record', 'bilip.report'} & set(sys.modules)\n"
    )
    assert run(tmp_path).returncode == 0
    assert "--bilip-budget" in run(tmp_path, "--help").stdout


def test_the_entry_point_is_the_plugin():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module = import_module(project["entry-points"]["pytest11"]["bilip"])
    assert callable(module.pytest_addoption)
    assert hasattr(module, "audit_flow")
