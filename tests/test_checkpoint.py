import json
import os
import pickle

import pytest
import torch

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
