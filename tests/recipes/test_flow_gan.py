"""Flow-GAN at a size of seconds, on images that are written here."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bilip import Flow
from bilip.errors import CheckpointError, InputError
from bilip.recipes import Measured, configured, flow_gan, reproduce, sample_quality
from bilip.recipes.flow_gan import RECIPE, Batches, Config, Loss, make_model
from bilip.recipes.gan_runs import Run, exploded, gan_lines
from bilip.recipes.images import Dequantized, shrunk
from bilip.recipes.recipe import Work
from bilip.recipes.sample_quality import (
    FeatureNet,
    frechet_distance,
    kernel_distance,
    load_features,
    quality,
    sliced_wasserstein,
)
from bilip.record import read_json
from bilip.training import Draw
from recorded import check_captured, numbers_of, stop_and_resume, write_images

TINY = """
side=8 images=48 test=32 levels=2 blocks=1 hidden=4 small=1,1,4 critic=2,2,2,2,2,2,2 batch=8 steps=8 lr=1e-3
start=16 looks=1 looked=8 test_looked=16 conditions=1 lanczos=3 samples=12 pictures=4 feature_steps=4
feature_batch=16
"""
CHANGES = TINY.split()
CONFIG = configured(Config(), CHANGES)
PARTS = ["additive-mle", "additive-gan", "additive-gan-plain", "affine-flowgan"]
TITLES = ["additive, MLE", "additive, GAN", "additive, Flow-GAN", "affine, MLE", "affine, GAN", "affine, Flow-GAN"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_images(folder, {"cifar10_train": 64, "cifar10_test": 40})
    return folder


@pytest.fixture(scope="module")
def measured(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "flow_gan"
    return folder, reproduce("flow_gan", out=folder, changes=CHANGES, parts=PARTS, data=data)


@pytest.fixture
def batches(data):
    images = shrunk(flow_gan.image_set("cifar10", "train", data), 48, 8)

    def of(model):
        return Batches(Dequantized.centred(images, CONFIG, "cpu"), model, CONFIG, "cpu")

    return of


def test_every_run_is_measured_judged_and_drawn(measured):
    folder, outcome = measured
    numbers = read_json(folder / "ours.json")["runs"]["quick"]["measured"]["0"]
    assert set(numbers) == set(PARTS) < set(RECIPE.parts(CONFIG))
    for part, found in numbers.items():
        assert 2 < found["test_bits"] < 14
        assert found["data"]["share_non_finite"] == 0
        assert found["condition"] >= 1
        assert math.isfinite(found["samples"]["fid"])
        assert found["samples"]["share_non_finite"] == 0
        assert found["floor"]["count"] == 12
        assert found["features"]["accuracy"] > 0.5  # of the network that comes with bilip
        assert found["guard"]["passes"] == 8 * (2 if "flowgan" in part else 1)
        assert found["diverged"] == ""
    assert {path.name for path in outcome.figures} == {
        f"{name}-quick.png" for name in ("training-additive", "training-affine", "samples", "reconstructions")
    }
    lines = {line.what: line for line in outcome.lines}
    assert lines["additive, GAN: test bits per dimension"].paper == "Inf"
    assert lines["additive: GAN alone explodes"].holds is False  # after eight steps
    assert lines["affine: likelihood beside the GAN keeps it finite"].holds
    assert lines["ActNorm adds instability to the GAN"].holds is not None
    assert "of 10,000 test images right" in lines["feature network"].ours


def test_training_images_have_no_borders_that_test_images_lack(tmp_path):
    """A discriminator would tell images from samples by them, and samples would be compared with images without."""
    for split, count in (("train", 64), ("test", 40)):
        white = np.full((count, 32, 32, 3), 255, np.uint8)
        np.savez(tmp_path / f"cifar10_{split}.npz", x=white, y=np.arange(count) % 10)
    train, inputs, facts = flow_gan.load(CONFIG, Work(tmp_path / "work", data=tmp_path))
    assert min(float(train(Draw(0, step))[0].min()) for step in range(4)) > 0.49
    assert float(inputs.first("cifar10", 8).min()) > 0.49
    assert facts == {"images": 48, "test_images": 32}


def test_each_player_is_reached_by_its_own_terms_alone(batches):
    """One sum, and yet the gradients that two optimizers would see."""
    torch.manual_seed(0)
    model = make_model(Run("affine", "flowgan"), CONFIG)
    batch = batches(model)(Draw(0, 0))
    model.bijection.train()(batch[0])
    model.eval()  # the power iteration rests, so that both passes see the same weights
    loss = Loss("flowgan", CONFIG)
    found = loss(model, 0, *batch)
    found["loss"].backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(together) == len(list(model.parameters()))

    def alone(value, parameters):
        return torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)

    found = loss(model, 0, *batch)
    generator = 16 * CONFIG.weight * found["nll"] + found["fool"]  # images have a sixteenth of the usual pixels
    critic = found["critic"] + CONFIG.penalty * found["slope"]
    for value, other, prefix in ((generator, critic, "flow."), (critic, generator, "critic.")):
        own = [(name, p) for name, p in model.named_parameters() if name.startswith(prefix)]
        for (name, _), grad in zip(own, alone(value, [p for _, p in own]), strict=True):
            torch.testing.assert_close(together[name], grad, rtol=1e-4, atol=1e-5)  # sums in another order
        assert all(grad is None for grad in alone(other, [p for _, p in own]))


def test_the_generators_gradient_is_that_of_stored_activations(batches):
    torch.manual_seed(0)
    model = make_model(Run("affine", "gan"), CONFIG).double()
    x, z, between = (part.double() for part in batches(model)(Draw(0, 0)))
    model.bijection.train()(x)
    model.eval()
    loss = Loss("gan", CONFIG)
    loss(model, 0, x, z, between)["loss"].backward()
    saved = [p.grad.clone() for p in model.flow.parameters() if p.grad is not None]
    model.zero_grad()
    model.walk.memory = "stored"
    loss(model, 0, x, z, between)["loss"].backward()
    stored = [p.grad for p in model.flow.parameters() if p.grad is not None]
    assert len(saved) == len(stored) > 4
    torch.testing.assert_close(saved, stored, rtol=1e-8, atol=1e-12)


def test_the_slope_of_the_critic_is_that_of_its_score():
    torch.manual_seed(0)
    critic = flow_gan.Critic(8, (2,) * 7).double().eval()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    penalty = flow_gan._slope_penalty(critic, critic.weights(), x)
    rows = torch.autograd.functional.jacobian(lambda x: critic(x), x)
    slopes = torch.stack([rows[k, k].norm() for k in range(3)])
    torch.testing.assert_close(penalty, (slopes - 1).square().mean(), rtol=1e-6, atol=0)
    norms = [torch.linalg.matrix_norm(layer.weight.flatten(1), 2) for layer in critic.layers]
    assert all(0.9 < norm.item() < 1.1 for norm in norms)


def test_captured_steps_end_as_eager_ones(data, tmp_path, device, monkeypatch):
    config = replace(CONFIG, steps=10)
    check_captured(RECIPE, "affine-flowgan", config, tmp_path, data, device, monkeypatch, replays=2)


def test_stopped_and_resumed_it_ends_as_if_it_was_not(measured, data, tmp_path, monkeypatch):
    stop_and_resume("flow_gan", "affine-flowgan", tmp_path, monkeypatch, steps=5, changes=CHANGES, data=data)
    assert numbers_of(tmp_path, "affine-flowgan") == numbers_of(measured[0], "affine-flowgan")


def test_a_run_that_diverges_is_measured_with_the_weights_before(data, tmp_path):
    config = replace(CONFIG, lr=1e8, skip=0)
    found = RECIPE.run("additive-gan", config, Work(tmp_path, 0, "cpu", data=data))
    assert "training diverged" in found.numbers["diverged"]
    assert f"in step {found.numbers['measured_at'] + 1}" in found.numbers["diverged"]
    assert exploded(found.numbers, found.arrays)
    lines = {line.what: line for line in gan_lines({0: {"additive-gan": found}}, RECIPE.paper())}
    assert lines["additive, GAN: training"].ours == found.numbers["diverged"]
    assert f"at step {found.numbers['measured_at']:,}" in lines["additive, GAN: test bits per dimension"].ours


def made(bits, condition, kid, *, lost=0.0):
    """What a run found, in as many numbers as are judged."""
    samples = {"fid": 100 * kid, "kid": kid, "kid_error": 0.01, "sliced": 1.0}
    data = {"share_non_finite": lost, "share_wrong": 0.0, "error": 1e-6}
    numbers = {"test_bits": bits, "share_bits_non_finite": 0.0, "measured_at": 8, "condition": condition, "data": data}
    numbers |= {"samples": samples, "floor": samples, "diverged": "", "skipped": 0}
    numbers |= {"guard": {"passes": 8, "repaired": 0}, "features": {"accuracy": 0.7, "test_images": 10}}
    ends = {"test_bits": (8.0, bits), "condition": (2.0, condition), "non_finite": (0.0, lost)}
    return Measured(numbers, {f"log_{name}": np.array(value) for name, value in ends.items()})


def test_statements_are_judged_by_what_was_measured():
    mle, both, gan = made(4.0, 1e3, 0.5), made(4.5, 1e3, 0.3), made(math.inf, 1e9, 0.9)
    runs = {"additive-mle": mle, "additive-flowgan": both, "additive-gan": gan}
    runs |= {"additive-gan-plain": made(30.0, 1e4, 0.8), "additive-gan-small": made(50.0, 10.0, 0.7)}
    held = {line.what: line.holds for line in gan_lines({0: runs}, RECIPE.paper()) if line.holds is not None}
    assert len(held) == 7
    assert all(held.values())
    worse = runs | {"additive-flowgan": made(20.0, 1e3, 0.7), "additive-gan": made(8.0, 10.0, 0.2)}
    worse |= {"additive-gan-small": made(50.0, 10.0, 0.7, lost=0.5)}
    held = {line.what: line.holds for line in gan_lines({0: worse}, RECIPE.paper()) if line.holds is not None}
    assert not any(held.values())


def test_runs_are_compared_seed_by_seed():
    good, bad = made(4.0, 1e3, 0.3), made(4.0, 1e3, 0.9)
    found = {0: {"additive-flowgan": bad}, 1: {"additive-flowgan": good, "additive-mle": made(4.0, 1e3, 0.5)}}
    lines = {line.what: line for line in gan_lines(found, RECIPE.paper())}
    better = lines["additive: better samples than MLE alone"]
    assert (better.ours, better.holds) == ("KID 0.3 ± 0.01 against 0.5 ± 0.01", True)
    found = {0: {"additive-flowgan": bad}, 1: {"additive-mle": good}}
    assert not any("better samples" in line.what for line in gan_lines(found, RECIPE.paper()))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (made(7.0, 10.0, 1), False),
        (made(math.nan, 10.0, 1), True),
        (made(7.0, math.inf, 1), True),
        (made(17.0, 2, 1), True),
    ],
)
def test_what_counts_as_exploded(found, expected):
    assert exploded(found.numbers, found.arrays) is expected


# ---- the feature network


def test_the_network_that_comes_with_bilip_is_small_and_good(tmp_path):
    assert sample_quality.PACKAGED.stat().st_size < 2e6
    net, facts = load_features(Work(tmp_path))
    assert not net.training
    assert facts["accuracy"] > 0.7
    assert facts["images"] == 50_000


def test_a_missing_network_says_how_to_train_it(data, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_quality, "PACKAGED", tmp_path / "none.safetensors")
    with pytest.raises(InputError, match="missing.*bilip reproduce flow_gan --parts features"):
        reproduce("flow_gan", out=tmp_path / "out", changes=CHANGES, parts=["additive-mle"], data=data)
    outcome = reproduce("flow_gan", out=tmp_path / "out", changes=CHANGES, parts=["features"], data=data)
    assert [line.what for line in outcome.lines] == ["feature network"]
    net, facts = load_features(Work(tmp_path / "out/pieces/quick/seed0/additive-mle"))  # trained once, for every part
    assert facts["steps"] == 4
    assert len(net.features(torch.zeros(2, 3, 8, 8))) == 2


def test_a_network_of_another_kind_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "other.safetensors"
    sample_quality.save_state(path, {"weight": torch.ones(2)}, {})
    monkeypatch.setattr(sample_quality, "PACKAGED", path)
    with pytest.raises(CheckpointError, match="not the feature network.*--parts features"):
        load_features(Work(tmp_path))


# ---- distances


def test_frechet_distance_of_known_distributions():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(4000, 3))
    assert frechet_distance(x, x) == pytest.approx(0, abs=1e-9)
    whitened = (x - x.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(x, rowvar=False))).T
    assert frechet_distance(whitened, 3 * whitened) == pytest.approx(3 * (3 - 1) ** 2)  # d (a - b)²
    assert frechet_distance(whitened, whitened[:, ::-1]) == pytest.approx(0, abs=1e-9)
    flat = np.concatenate([x, x[:, :1]], axis=1)  # a covariance of lower rank
    assert frechet_distance(flat, flat) == pytest.approx(0, abs=1e-6)


def test_kernel_distance_is_without_bias_and_sees_a_shift():
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(2, 1000, 16))
    same, error = kernel_distance(x, y, 0)
    assert abs(same) < 6 * error + 1e-3
    assert kernel_distance(x + 0.5, y, 0)[0] > 10 * abs(same)
    assert kernel_distance(100 * x, 100 * y, 0)[0] == pytest.approx(same)
    with pytest.raises(InputError, match="expected 2 or more"):
        kernel_distance(x[:1], y, 0)


def test_sliced_wasserstein_distance_is_in_the_unit_of_a_coordinate():
    x = torch.randn(500, 12, generator=torch.Generator().manual_seed(0))
    assert sliced_wasserstein(x, x.flip(0), 32, 0) == 0
    assert sliced_wasserstein(x, x + 2, 4096, 0) == pytest.approx(2, rel=0.1)


def test_samples_that_are_not_finite_are_counted_and_left_out():
    net, x = FeatureNet().eval(), torch.rand(40, 3, 8, 8) - 0.5
    broken = x.clone()
    broken[:10] = math.nan
    found = quality(net, broken, x, 0)
    assert found["share_non_finite"] == 0.25
    assert math.isfinite(found["kid"])
    assert quality(net, x, x, 0)["fid"] == pytest.approx(0, abs=1e-6)
    assert quality(net, 3 * x.sign(), x.sign() / 2, 0)["sliced"] == 0  # both are cut to what a picture can show
    broken[:21] = math.inf
    assert quality(net, broken, x, 0)["fid"] == math.inf


# ---- names


def test_what_parts_mean():
    assert Run.of("affine-flowgan") == Run("affine", "flowgan")
    assert Run.of("additive-gan-plain-small-steps7") == Run("additive", "gan", False, True, steps=7)
    assert Run.of("additive-gan-steps1000").title == "additive, GAN, 1,000 steps"  # another curve than the usual run's
    assert [RECIPE.has(p, CONFIG) for p in ("affine-gan-eps0.01", "additive-gan-eps0.01", "features")] == [
        True,
        False,
        True,
    ]
    bounds = {p: make_model(Run.of(p), CONFIG).bijection for p in ("modified-gan", "affine-gan", "affine-gan-eps0.01")}
    scales = {p: next(b.scale for b in m.modules() if hasattr(b, "scale")) for p, m in bounds.items()}
    least = [float(scale(torch.tensor(-50.0))) for scale in scales.values()]
    assert least == pytest.approx([0.5, 0, 0.01], abs=1e-6)
    assert [Run.of(part).title for part in RECIPE.parts(CONFIG)[:6]] == TITLES
    paper = RECIPE.sizes["paper"]
    model = make_model(Run("additive", "gan"), paper)
    assert [layer.weight.shape[0] for layer in model.critic.layers] == [64, 64, 128, 128, 256, 256, 512, 1]
    assert (paper.levels, paper.blocks, paper.hidden) == (3, 8, 128)
    assert (paper.batch, paper.lr, paper.weight) == (32, 5e-5, 1e-3)
    assert isinstance(model.plain, Flow)
    kinds = {type(block).__name__ for block in make_model(Run("additive", "gan", actnorm=False), CONFIG).modules()}
    assert "ActNorm" not in kinds
