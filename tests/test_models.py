"""Ready-made networks, and those with published weights."""

import argparse
import importlib
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bilip import Box, models
from bilip.blocks import AdditiveCoupling, AffineCoupling, Exact, InvertibleConv1x1, Permutation, Residual
from bilip.errors import CheckpointError, InputError, NotAContraction
from bilip.nets import log_lipschitz
from bilip.testing import assert_invertible


@pytest.mark.parametrize(
    ("coupling", "mixing", "millions"),
    [
        ("additive", "conv1x1", 6.08),
        ("additive", "shuffle", 5.46),
        ("affine", "conv1x1", 8.41),
        ("affine", "shuffle", 7.78),
    ],
)
def test_trunks_have_the_papers_parameter_counts(coupling, mixing, millions):
    trunk = models.glow((3, 32, 32), levels=3, blocks=16, hidden=128, coupling=coupling, mixing=mixing)
    assert round(sum(p.numel() for p in trunk.parameters()) / 1e6, 2) == millions
    head = models.classifier(trunk).head
    assert sum(p.numel() for p in head.parameters()) == 36_874


def test_classifier_gives_everything_in_one_pass():
    trunk = models.glow((3, 8, 8), levels=2, blocks=1, hidden=4)
    model = models.classifier(trunk, classes=7)
    x = torch.randn(6, 3, 8, 8)
    model(x)
    model.eval()
    out = model.detailed(x)
    assert out.logits.shape == (6, 7)
    assert torch.allclose(out.logits, model(x))
    assert torch.allclose(trunk.inverse(out.latent), x, atol=1e-4)
    assert out.log_det.shape == (6,)


@pytest.mark.parametrize("mixing", ["reverse", "shuffle", "conv1x1"])
def test_mixing(mixing):
    trunk = models.glow((2, 4, 4), levels=1, blocks=2, hidden=4, mixing=mixing)
    kinds = [type(block) for block in trunk]
    assert (InvertibleConv1x1 if mixing == "conv1x1" else Permutation) in kinds


def test_lipschitz_holds_every_net_and_bounds_the_network():
    trunk = models.glow(
        (3, 8, 8), levels=2, blocks=2, hidden=8, coupling="additive", mixing="shuffle", actnorm=None, lipschitz=0.25
    )
    with torch.no_grad():
        for p in trunk.parameters():
            p.mul_(30)
    for block in trunk:
        if hasattr(block, "t"):
            assert log_lipschitz(block.t) <= torch.tensor(0.25).log().item()
    limit = ((0.25 + (0.25**2 + 4) ** 0.5) / 2) ** 4
    assert trunk.bounds().inverse <= limit * 1.0001


def test_multi_scale_latent_is_flat_and_complete():
    flow = models.glow((3, 16, 16), levels=3, blocks=1, hidden=4, factor_out=True)
    x = torch.randn(2, 3, 16, 16)
    z, log_det = flow.forward_and_log_det(x)
    assert z.shape == (2, 3 * 256)
    assert log_det.shape == (2,)
    assert torch.allclose(flow.inverse(z), x, atol=1e-3)
    plain = models.glow((3, 16, 16), levels=3, blocks=1, hidden=4)
    assert plain(x).shape == (2, 192, 2, 2)


def test_the_learned_prior_can_be_bounded():
    from bilip.blocks.scale import EXP, TanhExpScale

    def prior(**options):
        chain = models.glow((3, 8, 8), levels=2, blocks=1, hidden=4, factor_out=True, **options)
        return [block for block in chain if hasattr(block, "scale")][-1].scale, chain

    assert prior()[0] == EXP
    scale, chain = prior(prior_scale=TanhExpScale(clamp=3.0))
    assert scale == TanhExpScale(clamp=3.0)
    x = torch.randn(4, 3, 8, 8)
    z, log_det = chain.forward_and_log_det(x)
    assert torch.allclose(chain.inverse(z), x, atol=1e-4)
    assert log_det.shape == (4,)
    again = models.checkpoint.build(chain.config, tensors=100, numbers=10**6)
    assert [block.scale for block in again if hasattr(block, "scale")][-1] == scale


def test_odd_channels():
    trunk = models.glow((1, 6, 6), levels=1, blocks=1, hidden=4)
    assert trunk(torch.randn(2, 1, 6, 6)).shape == (2, 4, 3, 3)
    vectors = models.real_nvp(5, blocks=3, actnorm=True)
    assert vectors(torch.randn(8, 5)).shape == (8, 5)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: models.glow((3, 30, 32), levels=2), "divisible by 4"),
        (lambda: models.glow((3, 32), levels=1), r"expected \(C, H, W\)"),
        (lambda: models.glow((3, 8, 8), coupling="cubic"), "'affine' or 'additive'"),
        (lambda: models.glow((3, 8, 8), mixing="stir"), "'conv1x1', 'shuffle' or 'reverse'"),
        (lambda: models.glow((3, 8, 8), actnorm="maybe"), "'data', 'identity' or None"),
        (lambda: models.glow((3, 8, 8), blocks=0), "blocks=0"),
        (lambda: models.glow((3, 8, 8), hidden=(64, 64)), r"hidden=\(64, 64\): expected a whole number"),
        (lambda: models.real_nvp(4, hidden=64), "sizes of the hidden layers"),
        (lambda: models.glow((3, 8, 8), context=1), "levels=1"),
        (lambda: models.real_nvp(1), "2 features or more"),
        (lambda: models.real_nvp(4, scale="abs"), "is not known"),
        (lambda: models.classifier(torch.nn.Linear(2, 2)), "must be a Bijection"),
        (lambda: models.classifier(models.real_nvp(2), classes=1), "2 or more"),
    ],
)
def test_bad_input(call, says):
    with pytest.raises(InputError, match=says):
        call()


@pytest.mark.parametrize("make", [models.residual_flow, models.real_nvp])
def test_a_vector_is_given_by_its_size_or_its_shape(make, tmp_path):
    torch.manual_seed(0)
    one = make(2, blocks=2, hidden=(8,))
    torch.manual_seed(0)
    other = make((2,), blocks=2, hidden=(8,)).eval()
    x = torch.randn(5, 2)
    assert torch.equal(one.eval()(x), other(x))
    models.save(other, tmp_path / "saved")
    assert torch.equal(models.load(tmp_path / "saved").eval()(x), other(x))
    with pytest.raises(InputError):
        make((2, 3))


# ---- imported weights give what the published codes gave for them


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


def unread(name, weights):
    """Names of tensors after whose change the importer neither reads the rest nor says what is wrong."""
    make = models.import_glow if name == "glow" else models.import_residual_flow
    kinds = {re.sub(r"\d+", "0", key): key for key in weights}  # one of each kind
    for key in kinds.values():
        value = weights[key]
        for other in (value.flatten(), value.new_zeros(0), torch.cat((value, value)) if value.ndim else value):
            if other.shape != value.shape:
                try:
                    make({**weights, key: other})
                except (CheckpointError, InputError):
                    continue
                except Exception as error:
                    yield key, type(error).__name__


@pytest.mark.parametrize("name", ["glow", "residual"])
def test_tensors_of_another_shape_are_refused(name):
    assert not list(unread(name, recorded(name)[0]))


def without_swish(weights):
    for name in [name for name in weights if name.endswith(".beta")]:
        del weights[name]


def without_logit(weights):
    moved = {name.replace("transforms.0.chain.1.", "transforms.0.chain.0."): weights[name] for name in weights}
    weights.clear()
    weights.update(moved)


def with_factor_out(weights):
    """The second scale has half of the channels that the first one leaves."""
    first = next(name for name in weights if re.match(r"transforms\.1\.chain\.\d+\.bias", name))
    weights[first] = weights[first][: len(weights[first]) // 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_swish, "no beta of a Swish"),
        (without_logit, "expected the logit there"),
        (with_factor_out, "features, and .* come in"),
    ],
)
def test_residual_flows_that_would_be_read_wrongly_are_refused(change, said):
    weights, _ = recorded("residual")
    change(weights)
    with pytest.raises(CheckpointError, match=said):
        models.import_residual_flow(weights)


def test_other_things_are_refused():
    with pytest.raises(CheckpointError, match=r"expected the tensors transforms\.0\.chain"):
        models.import_residual_flow(recorded("glow")[0])
    with pytest.raises(InputError, match="expected a state_dict or its file, got list"):
        models.import_glow([1, 2])
    with pytest.raises(InputError, match="expected 'declared', 'certified' or 'held'"):
        models.import_residual_flow(recorded("residual")[0], contraction="proved")
    with pytest.raises(InputError, match="between 0 and 1"):
        models.import_residual_flow(recorded("residual")[0], coefficient=3.0)


@pytest.mark.parametrize(
    "name",
    [
        "blocks.squeeze.Squeeze",
        "blocks.flatten.Flatten",
        "blocks.permutation.Permutation",
        "blocks.actnorm.ActNorm",
        "blocks.diagonal_scaling.DiagonalScaling",
        "blocks.invert.Invert",
        "blocks.on_kept.OnKept",
        "blocks.reach.Reach",
        "nets.mlp.MLP",
        "nets.conv.ConvNet",
        "nets.cache.EvalCache",
        "models.glow.glow",
        "models.real_nvp.real_nvp",
        "probes.lanczos.largest_singular_value",
    ],
)
def test_pickles_and_imports_of_0_1_find_their_modules(name):
    """A model that was pickled whole names the modules of its classes."""
    module, attribute = f"bilip.{name}".rsplit(".", 1)
    assert callable(getattr(importlib.import_module(module), attribute))
