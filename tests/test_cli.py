import json
import subprocess
import sys

import pytest

from bilip import models


def run(*args, cwd=None):
    return subprocess.run([sys.executable, "-m", "bilip", *args], capture_output=True, text=True, cwd=cwd, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("work")
    (path / "mine.py").write_text(
        "import bilip\n"
        "def additive():\n    return bilip.models.real_nvp(4, blocks=3, coupling='additive')\n"
        "def affine():\n    return bilip.Flow(bilip.models.real_nvp(4, blocks=3))\n"
        "def nothing():\n    return 3\n"
        "def residual():\n    return bilip.models.residual_flow(2, blocks=2, hidden=(8,), coefficient=0.5)\n"
        "def broken():\n    return 1 / 0\n"
    )
    models.save(models.real_nvp(4, blocks=3, coupling="additive"), path / "saved")
    return path


def test_global_bounds_of_a_function_and_of_a_checkpoint(folder):
    for target in ("mine:additive", "saved"):
        result = run("bounds", target, cwd=folder)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("AdditiveCoupling") == 3
        assert "total F" in result.stdout


def test_bounds_of_a_residual_flow(folder):
    result = run("bounds", "mine:residual", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Residual") == 2


def test_boxes_formulas_and_json(folder):
    result = run("bounds", "mine:affine", "--box", "-4", "4", "--formula", "paper", "--out", "b.json", cwd=folder)
    assert result.returncode == 0, result.stderr
    document = json.loads((folder / "b.json").read_text())
    assert len(document["blocks"]) == 3
    assert document["formula"] == "paper"
    assert "passes 1/eps" in result.stdout
    assert run("bounds", "mine:affine", "--latent", "-1", "1", cwd=folder).returncode == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["bounds", "mine:affine"], "no Lipschitz constant that holds on all of space"),
        (["bounds", "mine:absent"], "has no 'absent'"),
        (["bounds", "absent:model"], "cannot be imported"),
        (["bounds", "nowhere"], "neither a folder nor"),
        (["bounds", "mine:nothing"], "gave a int"),
        (["bounds", "mine:affine", "--box", "4", "-4"], "Swap the two"),
        (["bounds", "mine:affine", "--formula", "best"], "'sharp', 'paper'"),
        (["bounds", "mine:broken"], "mine:broken raised ZeroDivisionError"),
        (["bounds", "mine:additive", "--out", "nowhere/b.json"], "cannot write nowhere/b.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(folder, args, says):
    result = run(*args, cwd=folder)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().count("\n") == 0


def test_demo_and_version(folder):
    result = run("demo")
    assert result.returncode == 0, result.stderr
    assert "additive, held nets" in result.stdout
    assert "none" in result.stdout
    assert run("--version").stdout.startswith("bilip 0.")


def test_help_starts_without_torch():
    code = "import sys; import bilip, bilip.cli.app; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
