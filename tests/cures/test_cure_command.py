"""`bilip cure`: one command from a broken model to a folder with one that holds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bilip
from bilip import models

sys.path.insert(0, str(Path(__file__).parent))  # exploded.py is the user's module here
sys.path.insert(0, str(Path(__file__).parents[1]))
from cures.exploded import bilip_flow
from in_process import command_line


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", torch.randn(700, 4, generator=torch.Generator().manual_seed(5)).numpy())
    torch.manual_seed(0)
    models.save(bilip_flow(), "broken")
    return command_line(monkeypatch, capfd)


def test_a_checkpoint_is_cured_and_comes_back(run):
    code, out, _ = run("cure", "broken", "--data", "x.npy", "--uses", "inversion", "--out", "cured", "--ood", "")
    assert code == 0, out
    assert "Cured: inversion safe now" in out
    document = json.loads(Path("cured/cure.json").read_text())
    assert document["status"] == "cured"
    assert document["steps"][0]["rung"] == "arithmetic"
    assert bilip.AuditRecord.load("cured/before.json").verdicts["inversion"].status == "unsafe"
    assert bilip.AuditRecord.load("cured/after.json").verdicts["inversion"].status == "safe"
    model = bilip.cures.restore(models.load("broken"), "cured")
    x = torch.from_numpy(np.load("x.npy"))
    with torch.no_grad():
        back = model.bijection.inverse(model.bijection(x))
    assert float(((back - x).norm(dim=1) > 3.5e-4 * x.norm(dim=1)).double().mean()) < 0.01


def test_what_is_not_cured_ends_with_code_1_and_one_line(run):
    torch.manual_seed(0)
    models.save(bilip_flow(-15.0), "worse")
    code, out, err = run("cure", "worse", "--data", "x.npy", "--uses", "inversion", "--out", "cured", "--ood", "")
    assert code == 1
    assert "Not cured" in out
    assert "Fine-tuning needs --train" in out
    assert err.strip() == "bilip: not cured: inversion"
    assert not Path("cured/model.safetensors").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("cure", "broken"), "there is no data"),
        (("cure", "broken", "--data", "missing.npy"), "missing.npy"),
        (("cure", "broken", "--data", "x.npy", "--uses", "flying"), "expected some of inversion"),
        (("cure", "broken", "--data", "x.npy", "--out", "x.npy"), "it is a file"),
        (("cure", "broken", "--data", "x.npy", "--train", "nothing.npy"), "--train nothing.npy"),
        (("cure", "broken", "--data", "x.npy", "--rungs", "prayer"), "unknown rung"),
        (("cure", "broken", "--data", "x.npy", "--time", "-3"), "expected a positive number"),
        (("cure", "broken", "--data", "x.npy", "--loss", "math:pi"), "expected a function"),
    ],
)
def test_bad_input_is_one_line_and_code_2(run, args, said):
    code, _, err = run(*args)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_ctrl_c_leaves_the_best_so_far(run):
    from bilip.cures import RUNGS
    from bilip.cures.rung import Rung

    class Endless(Rung):
        name = "endless"
        place = 90

        def options(self, case):
            raise KeyboardInterrupt

    torch.manual_seed(0)
    models.save(bilip_flow(-12.0), "worse")
    try:
        code, out, _ = run(
            "cure", "worse", "--data", "x.npy", "--out", "cured", "--rungs", "arithmetic,endless", "--ood", ""
        )
    finally:
        RUNGS.pop("endless")
    assert code == 130
    assert "best so far" in out or "Not cured" in out
    assert Path("cured/cure.json").exists()
