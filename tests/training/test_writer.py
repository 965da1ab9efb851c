"""States are written while training goes on, and an error in that is an error of the run."""

import threading

import pytest

from bilip.errors import InputError
from bilip.training import Settings, read_state, run, save_state, train
from training.runs import make_task, silent


def settings(steps):
    return Settings(steps=steps, device="cpu", save_every=2, log_every=1)


def test_steps_do_not_wait_for_a_state_to_be_written(tmp_path, monkeypatch):
    went_on = threading.Event()

    def slow(path, tensors, facts):
        assert went_on.wait(60), "the steps waited for the file"
        save_state(path, tensors, facts)

    def progress(done, steps, latest):
        if done == 3:
            went_on.set()

    monkeypatch.setattr(run, "save_state", slow)
    train(make_task(), settings(4), tmp_path, progress=progress)
    assert read_state(tmp_path / "last.safetensors")[1]["step"] == 4
    assert read_state(tmp_path / "previous.safetensors")[1]["step"] == 2


def test_a_state_is_that_of_its_step_whatever_later_steps_do(tmp_path, monkeypatch):
    train(make_task(), settings(2), tmp_path / "two", progress=silent)
    expected, _ = read_state(tmp_path / "two" / "last.safetensors")
    went_on, kept = threading.Event(), {}

    def slow(path, tensors, facts):
        assert went_on.wait(60)
        kept.setdefault(facts["step"], {name: value.clone() for name, value in tensors.items()})

    monkeypatch.setattr(run, "save_state", slow)
    train(make_task(), settings(4), tmp_path / "four", progress=lambda done, *_: went_on.set() if done == 3 else None)
    assert all((kept[2][name] == value).all() for name, value in expected.items() if name.startswith("model."))


def test_a_disk_that_is_full_ends_the_run_with_a_line(tmp_path, monkeypatch):
    def full(path, tensors, facts):
        raise InputError(f"cannot write {path} (No space left on device).")

    monkeypatch.setattr(run, "save_state", full)
    with pytest.raises(InputError, match="No space left on device"):
        train(make_task(), settings(4), tmp_path, progress=silent)
