"""Imported weights give what the published codes gave for them.

`published.npz` was recorded with y0ast/Glow-PyTorch and rtqichen/residual-flows: random state_dicts at a small size, inputs, and what
the codes computed, without dequantization noise.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bilip import Box, models
from bilip.blocks import AdditiveCoupling, AffineCoupling, Exact, InvertibleConv1x1, Permutation, Residual
from bilip.errors import CheckpointError, InputError, NotAContraction
from bilip.testing import assert_invertible

GLOWS = ("glow", "glow_full", "glow_additive")


def recorded(name):
    """The state_dict, and the other arrays by name."""
    with np.load(Path(__file__).parent / "published.npz") as file:
        arrays = {
            key.removeprefix(f"{name}/"): torch.tensor(file[key]) for key in file.files if key.startswith(f"{name}/")
        }
    weights = {key.removeprefix("w/"): value for key, value in arrays.items() if key.startswith("w/")}
    return weights, arrays


@pytest.mark.parametrize("name", GLOWS)
def test_a_published_glow_has_the_same_likelihood_and_latent(name):
    weights, found = recorded(name)
    flow = models.import_glow(weights)
    with torch.no_grad():
        bits = flow.bits_per_dim(found["x"], bits=8)
        top = flow.bijection(found["x"])[:, : found["top"].shape[1]]  # what stays longest comes first
    assert torch.allclose(bits, found["bits"], rtol=1e-5)
    assert torch.allclose(top, found["top"], atol=1e-4)
    assert_invertible(flow.bijection, found["x"])


def test_what_a_published_glow_is_made_of():
    kinds = {name: {type(part) for part in models.import_glow(recorded(name)[0]).modules()} for name in GLOWS}
    assert all(InvertibleConv1x1 in kinds[name] for name in ("glow", "glow_full"))
    assert Permutation in kinds["glow_additive"]
    flow = models.import_glow(recorded("glow")[0])
    assert {part.kind for part in flow.modules() if isinstance(part, InvertibleConv1x1)} == {"plu"}
    couplings = [type(part) for part in flow.modules() if isinstance(part, (AdditiveCoupling, AffineCoupling))]
    assert couplings == [AdditiveCoupling, AffineCoupling] * 5  # two steps and a prior, then two steps
    assert math.isfinite(flow.bijection[:4].bounds(Box(-0.5, 0.5, shape=(1, 8, 8))).inverse)


@pytest.mark.parametrize("contraction", ["declared", "held"])
def test_a_published_residual_flow_has_the_same_latent_and_log_determinant(contraction):
    weights, found = recorded("residual")
    flow = models.import_residual_flow(weights, contraction=contraction)
    for part in flow.modules():
        if isinstance(part, Residual):
            part.estimator = Exact()
    with torch.no_grad():
        z, log_det = flow.bijection.forward_and_log_det(found["x"])
    z, theirs = z.flatten(1), found["z"].flatten(1)
    # Held layers are below their constant by certificate, hence a little smaller than power iteration makes them.
    assert float((z - theirs).norm() / theirs.norm()) < (1e-5 if contraction == "declared" else 0.1)
    assert torch.allclose(log_det.double(), found["log_det"], rtol=1e-5 if contraction == "declared" else 0.1)
    assert_invertible(flow.bijection, found["x"])


def test_a_branch_that_is_not_proved_to_contract_is_refused():
    weights, found = recorded("residual")
    with pytest.raises(NotAContraction, match="certified only as"):  # norms for images of any size, of small ones
        models.import_residual_flow(weights, contraction="certified")
    small = {name: value / 10 if value.ndim in (2, 4) else value for name, value in weights.items()}
    with torch.no_grad():
        certified, declared = (
            models.import_residual_flow(small, contraction=kind).bijection(found["x"])
            for kind in ("certified", "declared")
        )
    assert certified.equal(declared)


def test_files_are_read_without_running_anything(tmp_path):
    weights, found = recorded("residual")
    torch.save({"state_dict": weights, "args": argparse.Namespace(coeff=0.98), "epoch": 3}, tmp_path / "checkpoint.pth")
    with torch.no_grad():
        z = models.import_residual_flow(tmp_path / "checkpoint.pth").bijection(found["x"])
        assert z.equal(models.import_residual_flow(weights).bijection(found["x"]))

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    torch.save({"state_dict": weights, "x": Evil()}, tmp_path / "evil.pth")
    for path in (tmp_path / "evil.pth", tmp_path / "missing.pth"):
        with pytest.raises(CheckpointError, match="read safely"):
            models.import_residual_flow(path)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("flow.layers.1.actnorm.logs"), r"no tensor 'flow\.layers\.1\.actnorm\.logs'"),
        (lambda w: w.pop("prior_h"), "no tensor 'prior_h': is it one of Glow-PyTorch"),
        (lambda w: w.update({"extra.weight": torch.zeros(1)}), "1 tensors that a model of Glow-PyTorch"),
        (lambda w: w.update({"project_ycond.logs": torch.zeros(1)}), "conditioned on classes"),
        (lambda w: w.update({"flow.layers.1.invconv.p": torch.ones(4, 4)}), "not a permutation matrix"),
        (lambda w: w.update({"flow.layers.1.block.4.conv.weight": torch.ones(3, 6, 3, 3)}), "has 3 outputs"),
        (lambda w: w.clear(), "no tensor"),
    ],
)
def test_state_dicts_of_something_else_are_refused(change, said):
    weights, _ = recorded("glow")
    change(weights)
    with pytest.raises(CheckpointError, match=said):
        models.import_glow(weights)


def test_other_things_are_refused():
    with pytest.raises(CheckpointError, match=r"expected the tensors transforms\.0\.chain"):
        models.import_residual_flow(recorded("glow")[0])
    with pytest.raises(InputError, match="expected a state_dict or its file, got list"):
        models.import_glow([1, 2])
    with pytest.raises(InputError, match="expected 'declared', 'certified' or 'held'"):
        models.import_residual_flow(recorded("residual")[0], contraction="proved")
    with pytest.raises(InputError, match="between 0 and 1"):
        models.import_residual_flow(recorded("residual")[0], coefficient=3.0)
