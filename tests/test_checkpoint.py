import json
import os
import pickle
import random
import time
import warnings

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from bilip import Chain, Flow, blocks, models
from bilip.blocks import SigmoidScale
from bilip.errors import CheckpointError

MODELS = {
    "real_nvp": lambda: models.real_nvp(4, blocks=3, actnorm=True, scale=SigmoidScale(0.1, 2.0)),
    "glow": lambda: models.glow((3, 8, 8), levels=2, blocks=1, hidden=4, mixing="shuffle"),
    "plu": lambda: models.glow((3, 8, 8), levels=2, blocks=1, hidden=4, matrix="plu", factor_out=True),
    "orthogonal": lambda: models.glow((3, 8, 8), levels=1, blocks=1, hidden=4, matrix="orthogonal"),
    "double": lambda: models.real_nvp(4, blocks=2).double(),
    "classifier": lambda: models.classifier(models.glow((3, 8, 8), levels=1, blocks=1, hidden=4)),
    "residual_flow": lambda: models.residual_flow(4, blocks=2, hidden=(8,), actnorm=True),
    "residual images": lambda: models.residual_flow((3, 8, 8), blocks=(1, 1), hidden=4, factor_out=True),
    "flow": lambda: Flow(models.real_nvp(4, blocks=2, lipschitz=0.5)),
}


def batch(name):
    x = torch.randn(8, 4) if name in ("real_nvp", "double", "flow", "residual_flow") else torch.randn(8, 3, 8, 8)
    return x.double() if name == "double" else x


def output(model, x):
    return model.log_prob(x) if isinstance(model, Flow) else model(x)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, tmp_path):
    model, x = MODELS[name](), batch(name)
    output(model, x)  # starts ActNorm
    model.eval()
    models.save(model, tmp_path / "run")
    loaded = models.load(tmp_path / "run").eval()
    assert type(loaded) is type(model)
    assert torch.equal(output(model, x), output(loaded, x))
    models.save(loaded, tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "run" / "config.json").read_text()
    assert sorted(os.listdir(tmp_path / "run")) == ["config.json", "model.safetensors"]


@pytest.fixture
def saved(tmp_path):
    models.save(models.real_nvp(4, blocks=2), tmp_path)
    return tmp_path


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1, **changes}))


@pytest.mark.filterwarnings("ignore:.*has no checksums")
@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "does not exist; a checkpoint is a folder"),
        (lambda f: (f / "model.safetensors").unlink(), "does not exist; a checkpoint is a folder"),
        (lambda f: (f / "config.json").write_text('{"format": "bil'), "truncated"),
        (lambda f: (f / "config.json").write_text('{"model_type": "bert"}'), "was not written by bilip"),
        (lambda f: (f / "config.json").write_text("[]"), "was not written by bilip"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:200]), "truncated"),
        (lambda f: (f / "model.safetensors").write_bytes(pickle.dumps({"a": 1})), "not a readable safetensors"),
        (lambda f: edit(f, version=99), "version 99"),
        (lambda f: edit(f, model="os.system"), "names the model 'os.system'"),
        (lambda f: edit(f, arguments={"features": 4, "shell": "ls"}), "do not fit real_nvp"),
        (lambda f: edit(f, arguments=None), "does not describe a model"),
        (lambda f: edit(f, arguments={"features": 4, "blocks": 3}), "does not fit its config: missing"),
        (lambda f: edit(f, arguments={"features": 6, "blocks": 2}), "shapes"),
    ],
)
def test_broken_and_foreign_checkpoints(saved, break_it, says):
    break_it(saved)
    with pytest.raises(CheckpointError, match=says):
        models.load(saved)


def test_hand_made_chains_say_why_they_cannot_be_saved(tmp_path):
    with pytest.raises(CheckpointError, match="was not built by a function of bilip.models"):
        models.save(Chain(blocks.Squeeze()), tmp_path)
    with pytest.raises(CheckpointError, match="was not built by"):
        models.save(Flow(Chain(blocks.Permutation.reverse(2))), tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_an_interrupted_save_leaves_the_old_file(saved, monkeypatch):
    before = (saved / "model.safetensors").read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        models.save(models.real_nvp(4, blocks=2), saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(saved)) == ["config.json", "model.safetensors"]


# ---- checksums


def as_in_version_1(folder):
    """The same files as bilip 0.1 wrote them."""
    document = json.loads((folder / "config.json").read_text())
    document.pop("sha256", None)
    (folder / "config.json").write_text(json.dumps({**document, "version": 1}, indent=2) + "\n")
    state = load_tensors((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").write_bytes(save_tensors(state, metadata={"format": "pt"}))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_flipped_bit_is_found_wherever_it_is(saved, name):
    whole, rng = (saved / name).read_bytes(), random.Random(0)
    places = [*range(64), *range(8 * len(whole) - 64, 8 * len(whole)), *rng.sample(range(8 * len(whole)), 120)]
    for place in places:
        broken = bytearray(whole)
        broken[place // 8] ^= 1 << place % 8
        (saved / name).write_bytes(broken)
        with pytest.raises(CheckpointError):
            models.load(saved)
    (saved / name).write_bytes(whole)
    models.load(saved)


def test_a_changed_weight_is_said_to_be_damage_and_the_file_is_named(saved):
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: its checksum is another one"):
        models.load(saved)


def test_files_without_checksum_load_with_a_note(saved):
    before = models.load(saved).state_dict()
    as_in_version_1(saved)
    with pytest.warns(UserWarning, match="has no checksums, as in bilip 0.1"):
        after = models.load(saved).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    models.save(models.load(saved), saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.load(saved)


def test_weights_of_another_config_are_refused_even_if_they_fit(saved, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    models.save(models.real_nvp(4, blocks=2, scale="half_sigmoid"), other)  # the same names and shapes
    (other / "model.safetensors").replace(saved / "model.safetensors")
    with pytest.raises(CheckpointError, match="belongs to another config.json"):
        models.load(saved)


def test_a_save_stopped_between_its_two_files_can_be_loaded(saved, monkeypatch):
    """Training saves the same architecture again and again; new weights fit the config that stands there."""
    again = models.real_nvp(4, blocks=2)
    replace = os.replace

    def stop_at_config(source, target):
        if str(target).endswith("config.json"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop_at_config)
    with pytest.raises(KeyboardInterrupt):
        models.save(again, saved)
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in models.load(saved).state_dict().items())


# ---- what is looked at before a model is built


@pytest.mark.filterwarnings("ignore:.*has no checksums")
@pytest.mark.parametrize(
    ("model", "arguments", "says"),
    [
        ("real_nvp", {"features": 4, "blocks": 10**7}, "far larger than its weights"),
        ("real_nvp", {"features": 10**12}, "far larger than its weights"),
        ("real_nvp", {"features": 10**400}, "far larger than its weights"),
        ("real_nvp", {"features": 4, "hidden": [10**6, 10**6]}, "far larger than its weights"),
        ("real_nvp", {"features": 4, "hidden": [1] * 10**5}, "far larger than its weights"),
        ("residual_flow", {"shape": 4, "blocks": 10**9, "hidden": 1}, "far larger than its weights"),
        ("glow", {"shape": [10**9, 8, 8]}, "far larger than its weights"),
        ("glow", {"shape": [3, 8, 8], "levels": 10**12}, "levels=1000000000000"),
        ("real_nvp", {"features": 4, "blocks": 1e7}, "do not fit real_nvp"),
        ("real_nvp", {"features": 4, "scale": {"a": 1}}, "do not fit real_nvp"),
        ("real_nvp", {"features": 4, "activation": []}, "do not fit real_nvp"),
        ("real_nvp", {"features": -3}, "do not fit real_nvp"),
        ([], {}, r"names the model \[\]"),
        (None, {}, "names the model None"),
        ("flow", {"trunk": []}, "does not describe a model"),
        ("flow", {"trunk": {"model": {}, "arguments": {}}}, "names the model"),
    ],
)
def test_a_config_is_checked_before_it_costs_anything(saved, model, arguments, says):
    edit(saved, model=model, arguments=arguments)
    before = time.process_time()
    with pytest.raises(CheckpointError, match=says) as caught:
        models.load(saved)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.process_time() - before < 60  # hours, if it were built


@pytest.mark.filterwarnings("ignore:.*has no checksums")
@pytest.mark.parametrize("depth", [30, 600, 50_000])
def test_a_config_within_a_config_within_a_config(saved, depth):
    inner = '{"model": "flow", "arguments": {"trunk": '
    text = '{"format": "bilip-model", "version": 1, "model": "flow", "arguments": {"trunk": '
    (saved / "config.json").write_text(text + inner * depth + "{}" + "}}" * (depth + 1))
    with pytest.raises(CheckpointError, match="nested deeper"):
        models.load(saved)


@pytest.mark.filterwarnings("ignore:.*has no checksums")
@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8], ids=str
)
def test_weights_that_are_no_floats(saved, dtype):
    as_in_version_1(saved)
    state = load_tensors((saved / "model.safetensors").read_bytes())
    name = min(state)
    state[name] = state[name].to(dtype)
    (saved / "model.safetensors").write_bytes(save_tensors(state))
    with pytest.raises(CheckpointError, match=f"tensor '{name}', holds .*; expected floats"):
        models.load(saved)


@pytest.mark.filterwarnings("ignore:.*has no checksums")
def test_a_header_that_lies(saved):
    as_in_version_1(saved)
    whole = (saved / "model.safetensors").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, numbers = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    name = next(name for name in header if name != "__metadata__")
    for change, says in (
        ({"dtype": "F4"}, "does not fill its place"),
        ({"dtype": "F512"}, "unknown dtype"),
        ({"dtype": ["F32"]}, "unknown dtype"),
        ({"shape": [True, 2]}, "shape or place"),
        ({"shape": [2.0, 2]}, "shape or place"),
        ({"shape": [10**30]}, "shape or place"),
        ({"data_offsets": [0]}, "does not fill its place"),
        ({"data_offsets": [8, 4]}, "does not fill its place"),
        ({"more": 1}, "lacks dtype"),
    ):
        text = json.dumps({**header, name: {**header[name], **change}}).encode()
        (saved / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + numbers)
        with pytest.raises(CheckpointError, match=says):
            models.load(saved)
    for text in (b"[]", b"{}", b'{"__metadata__": 3}', b"[" * 5000, b"\xff\xff"):
        (saved / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + numbers)
        with pytest.raises(CheckpointError, match="not a readable safetensors file"):
            models.load(saved)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda file: models.save(lambda x: x, file.parent / "new"),
            "expected a model built by bilip.models, got function",
        ),
        (lambda file: models.save(models.real_nvp(2, blocks=1), file), "cannot write to the folder"),
        (lambda file: models.save(models.real_nvp(2, blocks=1), None), "expected the name of a folder, got NoneType"),
        (lambda file: models.load(None), "expected the name of a folder, got NoneType"),
    ],
)
def test_what_is_no_model_or_no_folder(tmp_path, call, says):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=says):
        call(tmp_path / "file")
