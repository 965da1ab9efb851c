"""States of training: written while it goes on; damage is found, what is wrong is said in one line, the last good state is named."""

import json
import math
import os
import random
import shutil
import threading
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from bilip import Flow, models
from bilip.data import checkerboard
from bilip.errors import CheckpointError, InputError
from bilip.nets.spectral import held_layers, restore_certificate
from bilip.objectives import Likelihood
from bilip.record.files import UNSEALED, seal
from bilip.training import Settings, Task, load_weights, read_log, read_state, save_state, train
from training.runs import make_settings, make_task, silent

CHANGES = {"ema": 0.9, "save_every": 3, "log_every": 2}


@pytest.fixture(scope="module")
def run_of_six(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(make_task("all"), make_settings(steps=6, **CHANGES), folder, progress=silent)
    return folder


@pytest.fixture
def run(run_of_six, tmp_path):
    shutil.copytree(run_of_six, tmp_path / "run")
    return tmp_path / "run"


def go_on(folder, steps=7):
    train(make_task("all"), make_settings(steps=steps, **CHANGES), folder, progress=silent)


def rewrite(path, change, version=2):
    """The file with other facts or tensors, with a checksum that fits, or as bilip 0.1 wrote it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors, facts = read_state(path)
    change(tensors, facts)
    facts = {**facts, "version": version, **({"sha256": UNSEALED} if version > 1 else {})}
    data = save_tensors(tensors, metadata={"bilip": json.dumps(facts)})
    path.write_bytes(seal(data) if version > 1 else data)


def test_a_flipped_bit_is_found_wherever_it_is(run):
    path, rng = run / "last.safetensors", random.Random(0)
    whole = path.read_bytes()
    places = [*range(64), *range(8 * len(whole) - 64, 8 * len(whole)), *rng.sample(range(8 * len(whole)), 120)]
    for place in places:
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        path.write_bytes(broken)
        with pytest.raises(CheckpointError):
            read_state(path)


@pytest.mark.parametrize(
    ("place", "flipped", "says"),
    [
        (b'"bilip":', b'"bilix":', "or its header is damaged"),
        (rb"\"version\": 2", rb"\"version\": 3", "its checksum is another one"),
    ],
    ids=["name", "version"],
)
def test_a_flipped_bit_in_the_header_hides_no_good_state_beside_it(run, place, flipped, says):
    path = run / "last.safetensors"
    whole = path.read_bytes()
    assert place in whole
    path.write_bytes(whole.replace(place, flipped, 1))
    with pytest.raises(CheckpointError, match=rf"{says}\. The last good state is .*previous"):
        read_state(path)


@pytest.mark.parametrize("cut", [1, 1000])
def test_a_damaged_state_names_the_last_good_one_and_it_can_be_used(run, cut):
    path = run / "last.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 64]) if cut == 1 else whole[:-cut])
    with pytest.raises(
        CheckpointError, match=r"The last good state is .*previous\.safetensors, after 3 steps: rename it"
    ) as caught:
        go_on(run)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    (run / "previous.safetensors").replace(path)
    go_on(run, 6)
    assert path.read_bytes() == whole  # exactly the run that was never damaged


def test_the_best_weights_are_named_where_nothing_else_is_whole(run):
    save_state(run / "best.safetensors", {"model.a": torch.ones(1)}, {"step": 5})
    for name in ("last", "previous"):
        (run / f"{name}.safetensors").write_bytes((run / f"{name}.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"best\.safetensors, after 5 steps: it holds weights alone"):
        go_on(run)
    (run / "best.safetensors").unlink()
    with pytest.raises(CheckpointError, match="Copy it again, or delete it to begin anew"):
        go_on(run)


def test_where_there_are_no_links_training_goes_on_without_a_previous_state(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    train(make_task("flow"), make_settings(steps=6, **CHANGES), tmp_path, progress=silent)
    assert read_state(tmp_path / "last.safetensors")[1]["step"] == 6
    assert not (tmp_path / "previous.safetensors").exists()


def test_states_without_checksum_go_on_with_a_note(run, run_of_six):
    rewrite(run / "last.safetensors", lambda tensors, facts: None, version=1)
    with pytest.warns(UserWarning, match="has no checksum, as in bilip 0.1"):
        go_on(run, 6)
    with pytest.warns(UserWarning, match="has no checksum"):
        go_on(run, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_state(run / "last.safetensors")


def test_a_state_whose_checksum_was_removed_is_damaged(run):
    path = run / "last.safetensors"
    tensors, facts = read_state(path)
    path.write_bytes(save_tensors(tensors, metadata={"bilip": json.dumps(facts)}))
    with pytest.raises(CheckpointError, match="its checksum is another one"):
        read_state(path)


def put(name, value):
    return lambda tensors, facts: facts.__setitem__(name, value)


def tensor(name, change):
    def apply(tensors, facts):
        key = next(key for key in tensors if key.startswith(name))
        new = change(tensors[key])
        tensors.pop(key)
        tensors.update({} if new is None else {key: new})

    return apply


@pytest.mark.parametrize(
    "change",
    [
        *(put("step", value) for value in (-1, "3", None, 2.5, True, [], 2**70)),
        *(put("settings", value) for value in (None, [], {}, {"lr": []})),
        *(put("trainable", value) for value in (None, [1], "abc", [])),
        *(put("optimizer", value) for value in (None, {}, [3], [{}], [{"parameter": -1}], [{"parameter": "0"}], [{"parameter": 10**9}])),
        put("optimizer", [{"parameter": 0}, {"parameter": 0}]),
        put("optimizer", [{"parameter": 0, "step": "x"}]),
        *(put("scaler", value) for value in (3, "x", {"scale": "x"})),
        *(put("best_step", value) for value in (None, -1, "x")),
        *(put("best_loss", value) for value in (None, "x", [])),
        *(put("guards", value) for value in (None, [], {"bijection": 3}, {"bijection": {"steps": "x"}})),
        *(put("penalties", value) for value in (None, [], [3], [{"kind": "FiniteDifference"}], [{"kind": []}])),
        *(put("log", value) for value in (None, [], {"train": -1}, {"train": "x"}, {"train": 10**9}, {"train": True})),
        *(put("sums", value) for value in (None, [3], ["nothing"], {})),
        *(put("summed", value) for value in (None, -1, "x", 3)),
        *(put("skipped_in_a_row", value) for value in (None, -1, "x")),
        tensor("optimizer.0.exp_avg", lambda t: None),
        tensor("optimizer.0.exp_avg", lambda t: t[:0]),
        tensor("optimizer.0.exp_avg", lambda t: t.to(torch.int64)),
        tensor("optimizer.0.step", lambda t: t.repeat(2)),
        tensor("average.", lambda t: None),
        tensor("average.", lambda t: t.flatten()[:1].clone().repeat(77)),
        tensor("average.", lambda t: t.bool()),
        tensor("model.", lambda t: t.to(torch.complex64)),
        tensor("model.", lambda t: t.to(torch.float8_e4m3fn)),
        tensor("model.", lambda t: t.to(torch.int32)),
        tensor("model.", lambda t: None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.filterwarnings("ignore:.*has no checksum")
def test_what_is_wrong_inside_a_state_is_one_line(run, change, version):
    path = run / "last.safetensors"
    rewrite(path, change, version)
    with pytest.raises(CheckpointError) as caught:
        go_on(run)
    assert "\n" not in str(caught.value)
    assert str(run) in str(caught.value)


def test_a_state_without_a_fault_is_the_control(run):
    rewrite(run / "last.safetensors", lambda tensors, facts: None)
    go_on(run)
    assert read_state(run / "last.safetensors")[1]["step"] == 7


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2], ids=str)
def test_weights_that_are_no_floats_are_refused(dtype):
    model = torch.nn.Linear(2, 2)
    weights = {name: value.to(dtype) for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="expected float32 of shape"):
        load_weights(model, weights)
    load_weights(model, {name: value.double() for name, value in model.state_dict().items()})


@pytest.mark.parametrize("text", ["step,loss\n1,x\n", "step,loss\n1\n", "step\n\x00\n"])
def test_logs_that_are_no_logs(tmp_path, text):
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(CheckpointError, match=r"train\.csv is not a log of this loop"):
        read_log(tmp_path, "train")
    (tmp_path / "train.csv").write_text("")
    assert read_log(tmp_path, "train") == {}


def test_a_state_of_numbers_that_are_not_finite_is_still_a_state(tmp_path):
    save_state(tmp_path / "s", {"a": torch.tensor([math.nan, math.inf])}, {"best_loss": math.inf})
    tensors, facts = read_state(tmp_path / "s")
    assert tensors["a"].isfinite().sum() == 0
    assert facts["best_loss"] == math.inf
    assert len(load_tensors((tmp_path / "s").read_bytes())) == 1  # a plain safetensors file for everybody else


def test_a_residual_flow_goes_on_from_its_certificates(tmp_path):
    """The weights that act depend on when they were certified: a run that was stopped is the one that was not, bit for bit."""

    def make():
        torch.manual_seed(0)
        trunk = models.residual_flow(2, blocks=2, hidden=(8,), coefficient=0.7)
        with torch.no_grad():
            for layer in held_layers(trunk):
                layer.weight *= 5
        return Task(Flow(trunk), lambda draw: (checkerboard(16, draw("data")),), Likelihood())

    settings = Settings(steps=12, lr=1e-4, seed=1, device="cpu")
    train(make(), settings, tmp_path / "whole", progress=silent)
    for steps in (5, 6, 12):
        task = make()
        train(task, replace(settings, steps=steps), tmp_path / "parts", progress=silent)
    whole, parts = (read_state(tmp_path / name / "last.safetensors")[0] for name in ("whole", "parts"))
    assert any(name.startswith("certificate.") for name in whole)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    layer = held_layers(task.model)[0]
    assert not torch.equal(layer._certificate.weight, layer.weight)  # it is from an earlier step
    before = layer._certificate
    restore_certificate(layer, before.tensors() | {"bound": before.bound / 2})  # what is not true is not taken over
    assert layer._certificate is None


def saving_often(steps):
    return Settings(steps=steps, device="cpu", save_every=2, log_every=1)


def test_steps_do_not_wait_for_a_state_to_be_written(tmp_path, monkeypatch):
    went_on = threading.Event()

    def slow(path, tensors, facts):
        assert went_on.wait(60), "the steps waited for the file"
        save_state(path, tensors, facts)

    def progress(done, steps, latest):
        if done == 3:
            went_on.set()

    monkeypatch.setattr("bilip.training.run.save_state", slow)
    train(make_task(), saving_often(4), tmp_path, progress=progress)
    assert read_state(tmp_path / "last.safetensors")[1]["step"] == 4
    assert read_state(tmp_path / "previous.safetensors")[1]["step"] == 2


def test_a_state_is_that_of_its_step_whatever_later_steps_do(tmp_path, monkeypatch):
    train(make_task(), saving_often(2), tmp_path / "two", progress=silent)
    expected, _ = read_state(tmp_path / "two" / "last.safetensors")
    went_on, kept = threading.Event(), {}

    def slow(path, tensors, facts):
        assert went_on.wait(60)
        kept.setdefault(facts["step"], {name: value.clone() for name, value in tensors.items()})

    monkeypatch.setattr("bilip.training.run.save_state", slow)
    train(
        make_task(), saving_often(4), tmp_path / "four", progress=lambda done, *_: went_on.set() if done == 3 else None
    )
    assert all((kept[2][name] == value).all() for name, value in expected.items() if name.startswith("model."))


def test_a_disk_that_is_full_ends_the_run_with_a_line(tmp_path, monkeypatch):
    def full(path, tensors, facts):
        raise InputError(f"cannot write {path} (No space left on device).")

    monkeypatch.setattr("bilip.training.run.save_state", full)
    with pytest.raises(InputError, match="No space left on device"):
        train(make_task(), saving_often(4), tmp_path, progress=silent)
