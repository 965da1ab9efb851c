"""The recipes measure what they say."""

import math

import numpy as np
import pytest
import torch

from bilip.blocks import AffineCoupling, DiagonalScaling, Split
from bilip.errors import InputError, NotConverged
from bilip.recipes import Measured, Work, checkerboard, configured, coupling_depth, find, regression_2d, reproduce
from bilip.recipes.plane import condition, grid, round_trip_errors
from bilip.record import read_json
from catalogue import Map


@pytest.fixture(scope="module")
def depth():
    recipe = find("coupling_depth")
    config = recipe.sizes["quick"]
    return {part: recipe.run(part, config, Work(None)).numbers for part in recipe.parts(config)}


def test_coupling_depth_float32(depth):
    affine, additive = depth["float32"]["affine"]["error"], depth["float32"]["additive"]["error"]
    assert affine[0] == pytest.approx(1.2e-7, rel=0.02)
    assert affine[4] == pytest.approx(6e-4, rel=0.1)
    assert affine[9] == pytest.approx(6e1, rel=0.1)
    assert affine[19] == pytest.approx(6.6e11, rel=0.02)
    assert not any(map(math.isfinite, affine[49:]))
    assert max(additive) <= 1.2e-7


def test_coupling_depth_float64(depth):
    affine = depth["float64"]["affine"]
    assert affine["error"][9] == pytest.approx(7e-8, rel=0.02)
    assert affine["error"][19] == pytest.approx(6.2e2, rel=0.02)
    assert affine["sigma_max"] == pytest.approx([1.0] * 60)
    for k in (0, 9, 59):
        assert affine["sigma_min"][k] == pytest.approx(0.1 ** (k + 1), rel=1e-9)
        assert affine["condition"][k] == pytest.approx(10.0 ** (k + 1), rel=1e-9)
    assert depth["float64"]["additive"]["condition"] == pytest.approx([1.0] * 60)


def test_the_blocks_of_coupling_depth_scale_by_exactly_g():
    for dtype in (torch.float32, torch.float64):
        model = coupling_depth.chain("affine", 1, coupling_depth.Config(), dtype)
        x = torch.tensor([[1.0, 0.0]], dtype=dtype)
        assert model(x)[0, 1] == torch.tensor(0.123456789, dtype=dtype)
        far = model(torch.tensor([[1.0, 1e6]], dtype=dtype))[0, 1] - model(x)[0, 1]
        assert float(far) == pytest.approx(1e5, rel=1e-6)


def test_condition_of_a_product_that_one_decomposition_would_lose():
    blocks = [DiagonalScaling(torch.tensor([1.0, 1e-8], dtype=torch.float64)) for _ in range(4)]
    from bilip import Chain

    assert float(condition(Chain(*blocks, shape=(2,)), torch.zeros(1, 2))[0]) == pytest.approx(1e32, rel=1e-9)


def test_condition_against_the_jacobian():
    torch.manual_seed(0)
    model, x = checkerboard.make_flow("half", checkerboard.QUICK).bijection, torch.randn(5, 2)
    twin = model.double()
    expected = [torch.linalg.cond(torch.func.jacrev(lambda v: twin(v[None])[0])(v.double())).item() for v in x]
    assert condition(model, x.double()).tolist() == pytest.approx(expected, rel=1e-6)


SMALL = """
couplings=4 blocks=2 hidden=8 residual_hidden=8 activation=swish preactivate=False batch=32 lr=5e-3 steps=20
residual_lr=5e-3 residual_steps=5 evaluate_every=5 test=200 spacing=1.0
"""
TINY = configured(checkerboard.Config(), SMALL.split())


@pytest.mark.parametrize("part", ["sigmoid", "half", "residual"])
def test_checkerboard_measures_flows(tmp_path, part):
    m = checkerboard.RECIPE.run(part, TINY, Work(tmp_path))
    assert m.arrays["error"].shape == m.arrays["density"].shape == (17, 17)
    assert m.numbers["inside"]["points"] == 81
    assert m.numbers["outside"]["points"] == 17 * 17 - 81
    assert m.numbers["outside"]["worst_finite"] < 1e-3  # hardly trained
    assert m.numbers["best"]["step"] in (5, 10, 15, 20)
    assert m.numbers["attack"]["samples"] == 64
    assert math.isfinite(m.numbers["log10_inverse_bound"])
    assert read_json(tmp_path / "audit.json")["verdicts"]
    assert np.isfinite(m.arrays["samples"]).all()
    density = m.arrays["density"].astype(float).sum()
    assert 0.5 < density < 1.5  # spacing 1: the sum is about the integral


def test_checkerboard_sees_a_broken_inverse():
    flow = checkerboard.make_flow("sigmoid", TINY)
    with torch.no_grad():
        for block in flow.bijection:
            block.t.layers[-1].bias[1] = -60.0  # every block multiplies by about 1e-26
    numbers, arrays = checkerboard.measure(flow.eval(), torch.zeros(3, 2), TINY)
    assert numbers["outside"]["share_above_1"] == 1
    assert checkerboard._worst(numbers) > 1
    assert not checkerboard._holds("residual", numbers)
    assert np.isnan(arrays["error"]).any() or (arrays["error"] > 1).all()


def test_summary_counts_what_is_not_finite_as_lost():
    found = checkerboard.summary(torch.tensor([0.0, 2.0, torch.inf, torch.nan]))
    lost = {"share_above_1": 0.75, "share_non_finite": 0.5}
    assert found == {"points": 4, "median": 2.0, "worst_finite": 2.0} | lost


def test_the_nets_of_the_paper():
    flow = checkerboard.make_flow("sigmoid", checkerboard.Config(couplings=2))
    assert isinstance(flow.bijection[0], AffineCoupling)
    nets = [type(layer).__name__ for layer in flow.bijection[0].t[1].layers]
    assert type(flow.bijection[0].t[0]).__name__ == "ScaledSwish"
    assert nets == ["Linear", "ScaledSwish"] * 4 + ["Linear"]


def flow_numbers(outside, inside=1e-6, broken=0.0, density=0.0, ratio=3.0):
    """What a flow with these worst errors would have measured."""

    def where(worst, broken):
        lost = {"share_above_1": max(broken, float(worst > 1) / 2), "share_non_finite": broken}
        return {"points": 10, "median": 1e-7, "worst_finite": worst} | lost

    numbers = {"inside": where(inside, 0.0), "outside": where(outside, broken), "error_over_predicted": ratio}
    numbers |= {"density_lost_outside": density, "test_nll": 3.9, "log10_inverse_bound": 5.0}
    numbers |= {"attack": {"samples": 64, "share_success": 0.25}, "evaluations_lost": (1, 4)}
    return {**numbers, "best": numbers}


def judged(*seeds):
    found = {
        k: {part: Measured(numbers) for part, numbers in zip(checkerboard.TITLES, seed, strict=True)}
        for k, seed in enumerate(seeds)
    }
    return [line.holds for line in checkerboard.RECIPE.lines(checkerboard.QUICK, found) if line.holds is not None]


def test_the_rules_of_the_checkerboard():
    good = (flow_numbers(5.0, broken=0.1, density=0.1), flow_numbers(2.0), flow_numbers(1e-5))
    assert judged(good) == [True] * 5
    tame = (flow_numbers(0.5), *good[1:])  # nothing is lost, and nothing is the largest
    assert judged(good, tame) == [False, True, True, False, False]  # every seed has to agree
    assert judged((good[0], flow_numbers(0.5), good[2]))[1] is False
    assert judged((*good[:2], flow_numbers(2e-3)))[2] is False
    assert judged((*good[:2], flow_numbers(1e-5, inside=1e5)))[2] is False
    assert judged((good[0], flow_numbers(1e-6), flow_numbers(1e-5)))[3] is False
    assert judged((good[0], flow_numbers(2.0, density=0.1), good[2]))[4] is False


def test_the_rules_of_the_regression():
    recipe, config = regression_2d.RECIPE, regression_2d.RECIPE.sizes["quick"]

    def holds(plain, regularized):
        numbers = {"mse": 1e-6, "error_mean": 1e-6, "condition": 10.0, "share_above_1": 0.25}
        parts = {part: Measured(numbers) for part in recipe.parts(config)}
        parts["plain-10"] = Measured(numbers | {"error_mean": plain[0], "condition": plain[1]})
        parts["nf1e-08-10"] = Measured(numbers | {"error_mean": regularized[0], "condition": regularized[1]})
        lines = recipe.lines(config, {0: parts})
        assert [line.ours for line in lines if "points lost" in line.what] == 4 * ["25 %"]
        return [line.holds for line in lines if line.holds is not None]

    assert holds((1.0, 1e10), (1e-5, 1e3)) == [True, True]
    assert holds((1.0, 1e10), (1e-3, 1e5)) == [False, False]
    assert holds((math.inf, math.nan), (1.0, 1e3)) == [True, True]
    assert holds((1.0, 1e10), (math.nan, math.inf)) == [False, False]
    for a, b, expected in ((0.0, 0.0, 0), (1.0, 0.0, math.inf), (0.0, 1.0, -math.inf), (1e200, 1e-200, 400)):
        assert regression_2d._orders({"e": a}, {"e": b}, "e") == pytest.approx(expected)


def test_the_rules_of_coupling_depth(depth):
    recipe, config = find("coupling_depth"), coupling_depth.Config()
    found = {0: {part: Measured(numbers) for part, numbers in depth.items()}}
    assert [line.holds for line in recipe.lines(config, found)] == [True, True, True, None]
    still = coupling_depth.Config(depth=12, g=1.0)
    numbers = {part: recipe.run(part, still, Work(None)) for part in recipe.parts(still)}
    assert [line.holds for line in recipe.lines(still, {0: numbers})][:2] == [False, False]


def test_the_sizes_of_the_paper_are_those_it_states():
    stated = checkerboard.RECIPE.paper()["setting"]
    paper = checkerboard.RECIPE.sizes["paper"]
    assert {name: getattr(paper, name) for name in ("batch", "lr", "blocks")}.items() <= stated.items()
    assert list(paper.hidden) == stated["hidden"]
    assert paper.coefficient == stated["residual_coefficient"]
    assert paper.couplings == 2 * stated["blocks"]
    stated, paper = regression_2d.RECIPE.paper()["setting"], regression_2d.RECIPE.sizes["paper"]
    assert {name: getattr(paper, name) for name in ("points", "lr", "steps")}.items() <= stated.items()
    assert paper.batch == paper.points
    assert stated["hidden"] == [paper.widths[0]] * 2
    assert stated["nf_coefficient"] == paper.nf[0]


def test_an_inverse_that_misses_its_tolerance_costs_its_own_point_only():
    def picky(z):
        if bool((z[:, 0] > 7).any()):
            raise NotConverged("no")
        return z

    errors = round_trip_errors(Map(inverse=picky), grid(8.0, 1.0))
    assert int(errors.isnan().sum()) == 17
    assert int((errors == 0).sum()) == 16 * 17


def test_regression_data_and_model():
    x, y = regression_2d.make_data(10_000, 0)
    assert torch.equal(y[:, 1], x[:, 1])
    assert float(y[:, 0].double().std()) == pytest.approx(1e-12, rel=0.05)
    model = regression_2d.make_model(regression_2d.Config(), 10)
    couplings = [block for block in model if isinstance(block, AffineCoupling)]
    assert len(couplings) == 24
    assert float(couplings[0].scale(torch.tensor(-200.0))) == pytest.approx(1e-6)
    assert isinstance(couplings[0].partition, Split)


def test_regression_measures_what_a_contraction_does():
    x, y = regression_2d.make_data(500, 0)
    block = DiagonalScaling(torch.tensor([1e-5, 1.0]))
    found = regression_2d.evaluate(block, x, y)
    assert found["condition"] == pytest.approx(1e5, rel=1e-5)
    assert found["mse"] == pytest.approx(float((1e-5 * x[:, 0]).square().mean() / 2), rel=1e-3)
    assert found["share_non_finite"] == 0


@pytest.mark.parametrize("part", ["plain-10", "nf1e-06-10", "fd-10"])
def test_regression_runs(tmp_path, part):
    config = regression_2d.Config(widths=(10,), blocks=3, points=300, batch=100, lr=2e-3, steps=30, evaluate_every=10)
    m = regression_2d.RECIPE.run(part, config, Work(tmp_path))
    assert m.arrays["log_step"].tolist() == [10, 20, 30]
    assert m.numbers["mse"] < m.arrays["log_mse"][0] * 2
    assert m.arrays["back"].shape == (300, 2)
    assert ("FiniteDifference" in m.numbers["skipped"]) == (part == "fd-10")


@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        (
            "cifar10_flow",
            ["afine", "additive-eps0.01", "affine-eps", "modified-conv", "affine-steps", "residual-reverse"],
        ),
        ("flow_gan", ["additive", "affin-gan", "affine-vae", "additive-gan-steps"]),
        (
            "cifar10_classifier",
            ["affine-conv1x1", "affine-conv1x1-none1e-3", "affine-conv1x1-nf-inverse", "affin-shuffle-fd"],
        ),
    ],
)
def test_parts_that_do_not_exist(recipe, parts, tmp_path):
    for part in parts:
        with pytest.raises(InputError, match=f"--parts {part}: there is no such part"):
            reproduce(recipe, out=tmp_path, parts=[part])


@pytest.mark.parametrize(
    ("recipe", "change", "said"),
    [
        ("cifar10_flow", "steps=0", "expected positive"),
        ("cifar10_flow", "skip=-1", "expected 0 or more"),
        ("cifar10_flow", "mixing=none", "conv1x1, reverse, shuffle"),
        ("cifar10_flow", "optimizer=sgd", "adam, adamax"),
        ("cifar10_flow", "bits=9", "at most 8 bits"),
        ("cifar10_flow", "side=12", "divides 32"),
        ("cifar10_flow", "coefficient=1", "between 0 and 1"),
        ("cifar10_flow", "residual_blocks=", "one or more"),
        ("flow_gan", "steps=0", "expected positive"),
        ("flow_gan", "penalty=-1", "expected 0 or more"),
        ("flow_gan", "critic=64,64", "seven numbers"),
        ("flow_gan", "small=1,2", "levels, blocks and channels"),
        ("flow_gan", "side=4", "expected 8, 16 or 32"),
        ("flow_gan", "pictures=3", "even number"),
        ("flow_gan", "mixing=none", "conv1x1, reverse or shuffle"),
    ],
)
def test_configurations_that_are_refused(recipe, change, said, tmp_path):
    with pytest.raises(InputError, match=said):
        reproduce(recipe, out=tmp_path, changes=[change])
