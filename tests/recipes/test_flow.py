"""The image flows' recipe and the OOD table at a size of seconds, on images that are written here."""

import math
from dataclasses import replace

import pytest
import torch

from bilip import Flow, models
from bilip.blocks import Bijection, Chain, DiagonalScaling, Poisson, Residual, Roulette, Series
from bilip.blocks.scale import HALF_SIGMOID, SIGMOID
from bilip.data import Images
from bilip.errors import CheckpointError, InputError
from bilip.recipes import Measured, cifar10_flow, configured, flow_probes, ood, reproduce
from bilip.recipes.cifar10_flow import RECIPE
from bilip.recipes.flow_probes import Inputs, Trip, auroc, round_trip, sampled, summary
from bilip.recipes.flow_runs import SETS, SOURCES, Run, flow_lines, percent
from bilip.recipes.images import PRIOR, skipped_steps
from bilip.recipes.parts import kept
from bilip.recipes.recipe import Work
from bilip.recipes.residual_flows import by_series, decode, solved_inverse
from bilip.record import read_json, write_json
from bilip.training import Draw, read_state
from recorded import check_captured, numbers_of, stop_and_resume, write_images

TINY = """
side=8 images=48 test=32 levels=2 blocks=1 hidden=4 batch=8 steps=12 warmup=2 lr=1e-3 start=16 looks=3 looked=8
test_looked=16 conditions=1 lanczos=4 samples=12 ood=16 referenced=12 pictures=2 points=1 optimizer=adam
mixing=conv1x1 residual_blocks=1,1 residual_hidden=4 residual_dense=1 residual_steps=6 residual_warmup=2
residual_looks=1 residual_ood=16 residual_loose=12 residual_repeats=16
"""
CHANGES = TINY.split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images of a few sets in the files that people have; two sets are not there."""
    folder = tmp_path_factory.mktemp("data")
    write_images(folder, {"cifar10_train": 64, "cifar10_test": 40, "svhn": 20, "textures": 20})
    return folder


@pytest.fixture
def tiny():
    return configured(cifar10_flow.Config(), CHANGES)


@pytest.fixture(scope="module")
def measured(data, tmp_path_factory):
    """A run of all three flows."""
    folder = tmp_path_factory.mktemp("runs") / "cifar10_flow"
    outcome = reproduce("cifar10_flow", out=folder, changes=CHANGES, data=data)
    return folder, outcome


def test_everything_is_measured_and_drawn(measured):
    folder, outcome = measured
    numbers = read_json(folder / "ours.json")["runs"]["quick"]["measured"]["0"]
    assert set(numbers) == {"additive", "affine", "modified"}
    for found in numbers.values():
        assert found["missing"] == ["places", "tiny_imagenet"]
        assert set(found["sets"]) == set(SETS) - {"places", "tiny_imagenet"}
        assert 2 < found["test_bits"] < 12
        assert max(found["log_det"]["float64"]) < 1e-10
        assert found["samples"]["reliable"] == 1
        assert found["skipped"] == 0
        assert found["sets"]["cifar10"]["auroc"] == 0.5
        assert (
            found["sets"]["rademacher"]["auroc"] == found["sets"]["rademacher"]["auroc_trusted"] == 1
        )  # extreme everywhere
        assert all(found["sets"][name]["share_trusted"] == 1 for name in found["sets"])
    names = {path.name for path in outcome.figures}
    assert "likelihood-quick.png" in names
    assert {f"{what}-{kind}-quick.png" for what in ("stability", "reconstructions") for kind in numbers} < names
    assert sum("log-determinant" in line.what and line.holds for line in outcome.lines) == 3
    assert [line.ours for line in outcome.lines if "not there" in line.what] == ["Places, tinyImageNet"]


def test_a_log_determinant_that_is_not_known_at_some_point_is_not_right(measured):
    folder, _ = measured
    found, _ = kept(folder / "parts", "quick", RECIPE)
    numbers = found[0]["affine"].numbers
    numbers["log_det"]["float64"][:] = [1e-12, math.nan]
    lines = {line.what: line.holds for line in flow_lines(found, RECIPE.paper()) if "log-determinant" in line.what}
    assert [holds for what, holds in lines.items() if what.startswith("affine")] == [False]


def test_the_ood_table_takes_what_the_flows_measured(measured, data, monkeypatch):
    folder, _ = measured

    def never(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(type(RECIPE), "run", never)
    glows = ["affine", "modified", "additive"]
    outcome = reproduce("ood", out=folder.parent / "ood", changes=CHANGES, parts=glows, data=data)
    lines = {line.what: line for line in outcome.lines}
    cifar = lines["affine, 12 steps: CIFAR-10 test (16 images of 10,000)"]
    assert cifar.paper == "0 % Inf, error 6.3e-5"
    assert cifar.holds
    assert lines["affine, 12 steps: rademacher (16 images)"].holds is False  # nothing has exploded after 12 steps
    assert lines["modified affine, 12 steps: rademacher (16 images)"].holds is None
    assert lines["affine, 12 steps: Places"].ours == "not there"
    assert lines["residual flow"].ours == "not run"
    assert {path.name for path in outcome.figures} == {
        f"panels-{k}-quick.png" for k in ("additive", "affine", "modified")
    }
    (folder.parent / "ood" / "ours.json").unlink()
    again = reproduce("ood", out=folder.parent / "ood", collect=True)  # of the small files alone
    assert [line.ours for line in again.lines] == [line.ours for line in outcome.lines]
    monkeypatch.setattr(type(RECIPE), "run", lambda *args: Measured({"trained": True}))
    other = [change.replace("lr=1e-3", "lr=2e-3") for change in CHANGES]
    with pytest.raises(CheckpointError, match="has no"):  # another configuration is another run
        reproduce("ood", out=folder.parent / "ood2", changes=other, parts=["affine"], data=data)


def test_what_is_taken_says_where_and_when_it_was_measured(measured, data, tmp_path):
    folder, _ = measured
    origin = {"device": "A GPU", "environment": {"torch": "1.0"}, "date": "2020-02-02", "seconds": 1234.5}
    source = read_json(folder / "parts" / "quick-seed0-affine.json") | origin
    (tmp_path / "cifar10_flow" / "parts").mkdir(parents=True)
    write_json(tmp_path / "cifar10_flow" / "parts" / "quick-seed0-affine.json", source)
    reproduce("ood", out=tmp_path / "ood", changes=CHANGES, parts=["affine"], data=data)
    taken = read_json(tmp_path / "ood" / "parts" / "quick-seed0-affine.json")
    assert {name: taken[name] for name in origin} == origin
    assert taken["recipe"] == "ood"
    run = read_json(tmp_path / "ood" / "ours.json")["runs"]["quick"]
    assert (run["device"], run["environment"], run["seconds_of_work"]) == ("A GPU", {"torch": "1.0"}, 1234.5)


@pytest.fixture(scope="module")
def residual(data, tmp_path_factory):
    """A run of the residual flow, and the OOD table that takes it."""
    folder = tmp_path_factory.mktemp("residual")
    return folder, [
        reproduce(name, out=folder / name, changes=CHANGES, parts=["residual"], data=data)
        for name in ("cifar10_flow", "ood")
    ]


def test_the_residual_flow_comes_back_and_the_loose_stop_does_not(residual):
    folder, (_, outcome) = residual
    found = read_json(folder / "ood" / "ours.json")["runs"]["quick"]["measured"]["0"]["residual"]
    assert found["model"] == "1-1 blocks and 1 dense, width 4, c = 0.98"
    for numbers in found["sets"].values():
        assert numbers["share_non_finite"] == 0
        assert numbers["error_worst"] < 1e-4
        assert numbers["unconverged"] == 0
        assert numbers["unsquashed"] < 1e-3
        assert numbers["share_log_prob_wrong"] == 0  # the float64 copy has the same random probes
        assert numbers["loose_worst"] > 10 * numbers["error_worst"]
    lines = {line.what: line for line in outcome.lines}
    assert lines["residual flow, 6 steps: rademacher (16 images)"].holds
    assert lines["residual flow, 6 steps: rademacher (16 images)"].paper == "0 % Inf, error 1.9e-3"
    assert lines["residual flow, 6 steps: mean errors, from set to set, with the original's loose stop"].holds
    assert not [line for line in outcome.lines if line.what == "residual flow"]
    assert [path.name for path in outcome.figures] == ["panels-residual-quick.png"]


def test_estimated_log_determinants_agree_with_the_jacobian_in_the_mean(residual):
    folder, (outcome, _) = residual
    assert [line.holds for line in outcome.lines if "estimated" in line.what] == [True]
    found, _ = kept(folder / "cifar10_flow" / "parts", "quick", RECIPE)
    numbers = dict(found[0]["residual"].numbers) | {"log_det_spread": {"apart": [0.1], "standard_error": [1e-3]}}
    wrong = {0: {"residual": Measured(numbers, found[0]["residual"].arrays)}}
    assert [line.holds for line in flow_lines(wrong, RECIPE.paper()) if "estimated" in line.what] == [False]


def test_evaluations_draw_no_terms_at_random_and_training_does(tiny):
    flow = cifar10_flow.make_flow(Run.of("residual"), tiny)
    blocks = [part for part in flow.modules() if isinstance(part, Residual)]
    with by_series(flow):
        assert {part.estimator for part in blocks} == {Series(20)}
    assert {part.estimator for part in blocks} == {Roulette(Poisson(2.0), exact_terms=2, shared=True)}


def test_a_sample_that_misses_its_tolerance_is_lost_and_no_other():
    flow = models.residual_flow(2, blocks=2, hidden=(8,)).eval()
    z = torch.randn(4, 2)
    z[2] = math.nan
    found = solved_inverse(flow, z)
    assert found.converged.tolist() == [True, True, False, True]
    assert torch.isfinite(found.x).all(1).tolist() == [True, True, False, True]
    assert not bool(torch.isfinite(decode(flow, z)[2]).any())


def test_captured_steps_end_as_eager_ones(tiny, data, tmp_path, device, monkeypatch):
    check_captured(RECIPE, "affine", tiny, tmp_path, data, device, monkeypatch, replays=5)


@pytest.mark.slow
def test_captured_steps_of_the_residual_flow_end_as_eager_ones(tiny, data, tmp_path, device, monkeypatch):
    config = replace(tiny, residual_steps=14)
    check_captured(RECIPE, "residual", config, tmp_path, data, device, monkeypatch, replays=3)


def test_stopped_and_resumed_it_ends_as_if_it_was_not(measured, data, tmp_path, monkeypatch):
    stop_and_resume("cifar10_flow", "affine", tmp_path, monkeypatch, steps=7, changes=CHANGES, data=data)
    assert numbers_of(tmp_path, "affine") == numbers_of(measured[0], "affine")


def test_an_average_of_the_weights_is_what_is_measured(tiny, data, tmp_path):
    config = cifar10_flow.replace(tiny, ema=0.5)
    found = RECIPE.run("additive", config, Work(tmp_path, 0, "cpu", data=data))
    log = found.arrays["log_test_bits"]
    inputs = cifar10_flow.load(config, Work(tmp_path, 0, "cpu", data=data))[1]
    flow = cifar10_flow.make_flow(Run.of("additive"), config)
    tensors = read_state(tmp_path / "last.safetensors")[0]
    flow.load_state_dict({name: tensors[f"model.{name}"] for name in flow.state_dict()})
    plain = flow_probes.bits_per_dim(flow.eval(), inputs, "cifar10", 16)
    with torch.no_grad():
        for name, p in flow.named_parameters():
            p.copy_(tensors[f"average.{name}"])
    averaged = flow_probes.bits_per_dim(flow, inputs, "cifar10", 16)
    assert log[-1] == pytest.approx(averaged, rel=1e-6)
    assert abs(plain - averaged) > 1e-4
    assert found.numbers["test_bits"] == pytest.approx(flow_probes.bits_per_dim(flow, inputs, "cifar10", 32), rel=1e-6)


def test_a_run_that_diverges_says_where_and_the_table_goes_on(tiny, data, tmp_path):
    config = cifar10_flow.replace(tiny, lr=1e12, warmup=0, skip=0)
    found = RECIPE.run("affine", config, Work(tmp_path, 0, "cpu", data=data))
    assert "training diverged" in found.numbers["diverged"]
    assert "step " in found.numbers["diverged"]
    assert "checkpoint" in found.numbers["diverged"]
    lines = flow_lines({0: {"affine": found}}, RECIPE.paper())
    assert lines[0].ours == found.numbers["diverged"]
    assert ood.RECIPE.lines(config, {0: {"affine": found}})[0].ours == "training diverged: see cifar10_flow"
    assert list(RECIPE.figures(config, {0: {"affine": found}}))


def test_other_data_is_refused(tiny, data, tmp_path):
    work = Work(tmp_path / "part", data=data)
    cifar10_flow.load(tiny, work)
    with pytest.raises(CheckpointError, match="begun with other data: images was 48, now it is 40"):
        cifar10_flow.load(cifar10_flow.replace(tiny, images=40), work)


def test_a_set_that_is_damaged_is_not_a_set_that_is_missing(tiny, data, tmp_path):
    for path in data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "svhn.npz").write_bytes(b"PK nothing")
    with pytest.raises(InputError, match="svhn"):
        cifar10_flow.load(tiny, Work(tmp_path / "part", data=tmp_path))


def test_what_parts_mean(tiny):
    assert Run.of("affine").scale == SIGMOID
    assert Run.of("modified").scale == HALF_SIGMOID
    assert Run.of("affine-eps0.01").scale == SIGMOID.floored(0.01)
    assert Run.of("modified-shuffle-steps7") == Run("modified", 0.0, "shuffle", 7)
    scales = {
        kind: {block.scale for block in cifar10_flow.make_flow(Run.of(kind), tiny).modules() if hasattr(block, "scale")}
        for kind in ("additive", "affine", "modified")
    }
    assert scales == {
        "additive": {PRIOR},
        "affine": {PRIOR, SIGMOID},
        "modified": {PRIOR, HALF_SIGMOID},
    }
    standard = cifar10_flow.make_flow(Run.of("additive"), cifar10_flow.replace(tiny, prior=False))
    assert not [block for block in standard.modules() if hasattr(block, "scale")]


def test_batches_are_dequantized_images(tiny, data, tmp_path):
    train, inputs, _ = cifar10_flow.load(cifar10_flow.replace(tiny, bits=5), Work(tmp_path, data=data))
    (x,) = train(Draw(0, 3))
    assert x.shape == (8, 3, 8, 8)
    assert -0.5 <= float(x.min()) < float(x.max()) < 0.5
    assert x.equal(train(Draw(0, 3))[0])
    cells = ((inputs.first("svhn", 4) + 0.5) * 32).floor()
    assert cells.equal((inputs.images["svhn"].x[:4] // 8).float())
    assert inputs.first("svhn", 3).equal(inputs.first("svhn", 16)[:3])
    assert inputs.first("gaussian", 3).equal(inputs.first("gaussian", 600)[:3])
    assert float(inputs.first("gaussian", 500).abs().max()) == pytest.approx(0.49)


def flow_of(scales):
    """Each dimension times a number, and that number beneath float32's reach is lost."""
    return Flow(Chain(*(DiagonalScaling(torch.tensor(s, dtype=torch.float32)) for s in scales), shape=(2,)))


def test_images_that_do_not_come_back_are_told_apart():
    x = torch.zeros(5, 3, 2, 2)
    back = x.clone()
    back[1, 0, 0, 0] = math.nan
    back[2, 1, 0, 0] = math.inf
    back[3, 0, 1, 1] = 5 / 256
    back[4, 0, 1, 1] = 3 / 256
    trip = flow_probes._trip(x, back, torch.zeros(5))
    assert trip.nan.tolist() == [False, True, False, False, False]
    assert trip.inf.tolist() == [False, False, True, False, False]
    assert trip.wrong.tolist() == [False, False, False, True, False]
    found = summary(trip)
    assert (found["share_nan"], found["share_inf"], found["share_wrong"]) == (0.2, 0.2, 0.2)
    assert found["error"] == pytest.approx(1.5 / 256)
    assert found["error_finite"] == pytest.approx(8 / 3 / 256)
    nothing = summary(Trip.cat([trip.first(3)]))
    assert nothing["error"] == 0
    assert math.isinf(nothing["square"])
    # what lies outside of the picture cannot be seen
    assert not bool(flow_probes._trip(torch.full((1, 1), 7.0), torch.full((1, 1), 8.0), torch.zeros(1)).wrong)


def test_a_flow_that_loses_numbers_is_seen_on_images_and_samples():
    flow = flow_of([[1e-30, 1.0], [1e-30, 1.0]])
    trip = round_trip(flow, torch.tensor([[0.25, 0.25]]))
    assert not bool(trip.back)
    several, _ = sampled(flow, 20, bits=8, seed=0)
    assert several.numbers()["reliable"] == 0
    assert several.numbers()["visible"] == 1
    several, x = sampled(flow_of([[0.5, 2.0]]), 600, bits=8, seed=0)
    assert several.numbers()["reliable"] == 1
    assert several.numbers()["bits_apart"] < 1e-5
    assert len(x) == flow_probes.CHUNK
    assert len(several.drawn) == 600


def test_condition_numbers_of_some_that_can_be_had():
    found = flow_probes.conditions(flow_of([[4.0, 0.5]]), torch.tensor([[0.1, 0.1], [math.inf, 0.1]]), steps=5)
    assert found[0] == pytest.approx(8)
    assert math.isinf(found[1])


def test_one_image_without_a_linear_inverse_does_not_cost_the_others_theirs():
    class Folded(Bijection):
        """A diagonal that nobody knows for one. Its inverse is none where numbers are negative."""

        def __init__(self, diagonal):
            super().__init__()
            self.diagonal = torch.nn.Parameter(diagonal)

        def forward(self, x, context=None):
            return x * self.diagonal

        def inverse(self, z, context=None):
            return torch.where(z < 0, 3 * z, z / self.diagonal)

    wide = 1100  # smaller Jacobians would be inverted themselves
    flow = Flow(Folded(torch.linspace(1, 4, wide)), shape=(wide,))
    x = torch.stack((torch.full((wide,), 0.3), torch.full((wide,), -0.3), torch.full((wide,), 0.2)))
    found = flow_probes.conditions(flow, x, steps=30)
    assert found[0] == pytest.approx(4, rel=0.05)
    assert found[2] == pytest.approx(4, rel=0.05)
    assert math.isnan(found[1])


def test_likelihoods_are_held_against_float64():
    flow = flow_of([[1.0, 1.0]])
    x = torch.tensor([[0.1, 0.2], [2.0, 3.0], [0.3, 0.3]])
    right = flow.log_prob(x).double()
    wrong = right + torch.tensor([0.0, 1.0, math.nan])
    assert flow_probes.trusted(flow, iter([x]), wrong).tolist() == [True, False, False]
    assert flow_probes.trusted(flow, iter([x[:1], x[1:]]), right).tolist() == [True, True, True]


def test_auroc():
    inside, outside = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.0])
    assert auroc(inside, outside) == pytest.approx((1 + 0 + 1 + 0.5 + 1 + 1) / 6)
    assert auroc(inside, torch.tensor([math.nan, -math.inf])) == 1
    assert auroc(inside, inside) == 0.5
    assert math.isnan(auroc(inside, outside[:0]))


def test_pictures_show_the_worst_first():
    class Third(DiagonalScaling):
        """Loses what is above 0.4."""

        def inverse(self, z, context=None):
            return torch.where((z > 0.4).flatten(1).any(1)[:, None, None, None], math.nan, super().inverse(z))

    flow = Flow(Third(torch.ones(3, 2, 2)), shape=(3, 2, 2))
    x = torch.zeros(6, 3, 2, 2)
    x[4] = 0.45
    kept = flow_probes.pictures(flow, x, 3)
    assert kept["images"].shape == (3, 2, 2, 2, 3)
    assert kept["broken"][0].tolist() == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]
    assert not kept["broken"][1:].any()
    assert (kept["images"][1:] == 128).all()


def test_skipped_steps_are_counted_from_the_log():
    log = {"train_step": [10.0, 20.0, 25.0], "train_skipped": [0.0, 0.3, 0.2]}
    assert skipped_steps(log) == 4
    assert skipped_steps({}) == 0


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (1, "100 %"), (0.0002, "0.02 %"), (0.00001, "0.001 %"), (0.998, "99.80 %"), (0.25, "25 %")],
)
def test_shares_in_words(share, text):
    assert percent(share) == text


def test_inputs_of_images_take_what_there_is():
    inputs = Inputs(
        {"svhn": Images(torch.zeros(7, 3, 4, 4, dtype=torch.uint8))}, (3, 4, 4), bits=8, seed=0, device="cpu"
    )
    assert inputs.count("svhn", 100) == 7
    assert inputs.count("uniform", 100) == 100
    assert set(SOURCES) - {"samples"} < set(SETS)


def test_pictures_are_of_the_pass_in_which_the_worst_was_seen():
    class Odd(DiagonalScaling):
        """Loses everything in large batches alone, as rounding may."""

        def inverse(self, z, context=None):
            back = super().inverse(z)
            return back * math.nan if len(z) > 3 else back

    flow = Flow(Odd(torch.ones(3, 2, 2)), shape=(3, 2, 2))
    assert flow_probes.pictures(flow, torch.zeros(6, 3, 2, 2), 2)["broken"][:, 1].all()


@pytest.mark.parametrize("most", [4096, 8])
def test_condition_numbers_of_large_matrices_are_those_of_their_singular_values(most):
    """By Lanczos' method, and by all singular values, of a matrix that is neither symmetric nor diagonal."""
    torch.manual_seed(0)
    matrix = torch.eye(60, dtype=torch.float64) + 0.08 * torch.randn(60, 60, dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    assert flow_probes.condition_of(matrix, most=most) == pytest.approx(float(values[0] / values[-1]), rel=1e-6)


def test_the_whole_jacobian_of_a_residual_flow_is_built_where_the_device_allows(monkeypatch):
    """Each of Lanczos' steps would invert every block by iteration."""
    torch.manual_seed(0)
    flow, x = Flow(models.residual_flow((3, 4, 4), blocks=(1,), hidden=4)), torch.rand(2, 3, 4, 4)
    flow.bijection.train()(x)
    flow.eval()
    expected = flow_probes.conditions(flow, x, steps=40)
    monkeypatch.setattr(flow_probes, "WHOLE", {"cpu": 47})
    assert flow_probes.conditions(flow, x, steps=40) == pytest.approx(expected, rel=1e-3)
    monkeypatch.setattr(flow_probes, "WHOLE", {"cpu": 48})
    monkeypatch.setattr(flow_probes, "condition_numbers", None)  # it would be called
    assert flow_probes.conditions(flow, x, steps=1) == pytest.approx(expected)


def test_the_residual_flow_computes_fewer_likelihoods(tiny, data, tmp_path, monkeypatch):
    """Each of them takes twenty products for every block."""
    asked = []
    monkeypatch.setattr(
        flow_probes, "bits_per_dim", lambda flow, inputs, which, most: asked.append((which, most)) or 1.0
    )
    config = replace(tiny, likelihoods=30, residual_likelihoods=5, test_looked=7)
    RECIPE.run("residual", config, Work(tmp_path, data=data))
    assert asked[-2:] == [("train", 5), ("cifar10", 5)]
    assert cifar10_flow.as_residual(RECIPE.sizes["gpu"]).likelihoods == 2000
