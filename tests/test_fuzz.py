"""A few cases of every kind of `benchmarks/fuzz.py`, in this process."""

import functools
import os
import random

import pytest
import torch

import bilip
import fuzz


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_bad_input_ends_in_one_line(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = functools.partial(bilip.audit, probes=["reconstruction", "log_det", "sampling"])
    monkeypatch.setattr(bilip, "audit", few if kind == "record" else bilip.audit)
    before = torch.random.get_rng_state()
    torch.manual_seed(0)
    home = tmp_path / "home"
    home.mkdir()
    subject = fuzz.KINDS[kind](home)
    count = {"record": 8, "checkpoint": 50, "state": 8, "data": 50, "command": 6, "model": 2}[kind]
    found = []
    for k in range(count - 1, 2 * count - 1) if kind in ("checkpoint", "data") else range(count):
        folder = tmp_path / str(k)
        folder.mkdir()
        found.append(subject.run(k, random.Random(f"{kind} 0 {k}"), folder))
        os.chdir(tmp_path)
        if fuzz.is_whole(k):
            assert found[-1] == "accepted"
    torch.random.set_rng_state(before)
    assert set(found) <= {"accepted", "refused"}, [text for text in found if text not in ("accepted", "refused")]
    assert "refused" in found or kind == "model"
