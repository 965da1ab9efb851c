"""One relative error, whoever measures it, and how much of it rounding explains."""

import math

import pytest
import torch

import bilip
from bilip.adapters import as_bijection
from bilip.auditing.round_trip import distances, typical
from bilip.errors import ContractViolation, InputError
from bilip.models import real_nvp, residual_flow
from bilip.probes import Attack, Precision, Reconstruction, StabilityMonitor
from bilip.testing import assert_invertible, rounding_tolerance


def forgetful():
    """Its inverse is 0, whatever it is given: every relative error is 1."""
    return as_bijection(lambda x: x, inverse=lambda z: 0 * z, log_det=lambda x: torch.zeros(len(x)))


@pytest.mark.parametrize("size", [1e-12, 1e-5, 1.0, 1e8])
def test_small_and_large_data_are_measured_by_their_own_size(size):
    """An inverse that returns 0 has relative error |x| / max(|x|, r): 1 for half of the samples, whatever the data's size."""
    torch.manual_seed(0)
    model, x = forgetful(), size * torch.randn(256, 4)
    assert Reconstruction().measure(model, x)["share_wrong"] == 1
    row = StabilityMonitor(model, x, spectrum=False).measure(0)
    assert row.relative_max == pytest.approx(1)
    assert Attack(radius=1e-3 * size, steps=2, methods=["random"]).measure(model, x)["share_success"] == 1
    precision = Precision(samples=16).measure(model, x)
    assert precision["cure"] == "none"
    assert next(r for r in precision.rows if r["rung"] == "float32")["error_max"] == pytest.approx(1)
    with pytest.raises(ContractViolation, match="256 of 256"):
        assert_invertible(model, x)


def test_all_measure_the_same_error():
    torch.manual_seed(0)
    x = torch.randn(64, 3) * torch.tensor([1e-3, 1.0, 1.0])
    model = as_bijection(lambda x: x, inverse=lambda z: z + 1e-2 * z.roll(1, 0), log_det=lambda x: torch.zeros(len(x)))
    expected = float(distances(x, x + 1e-2 * x.roll(1, 0), typical(x)).relative.max())
    assert Reconstruction().measure(model, x)["relative_max"] == pytest.approx(expected, rel=1e-5)
    assert StabilityMonitor(model, x, spectrum=False).measure(0).relative_max == pytest.approx(expected, rel=1e-5)
    assert_invertible(model, x, tolerance=1.001 * expected)
    with pytest.raises(ContractViolation):
        assert_invertible(model, x, tolerance=0.999 * expected)


def test_one_huge_sample_does_not_hide_the_others():
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    x[0] = 1e20
    found = distances(x, x + 1e-2)
    assert bool((found.relative[1:] > 1e-3).all())


def test_the_audit_does_not_contradict_itself_on_small_data():
    torch.manual_seed(0)
    flow = bilip.Flow(forgetful(), shape=(4,))
    record = bilip.audit(flow, 1e-5 * torch.randn(64, 4), budget="quick", probes=["reconstruction", "precision"])
    assert record.find("reconstruction")[0]["share_wrong"] == 1
    assert record.find("precision")[0]["cure"] == "none"


def test_a_feature_of_tiny_scale_is_measured_in_its_own_unit():
    """The inverse loses a column of size 1e-5 beside others of size 1: of the whole sample that is 1e-5, of the column everything."""
    torch.manual_seed(0)
    units = torch.tensor([1.0, 1.0, 1e-5])
    kept = torch.tensor([1.0, 1.0, 0.0])
    x = torch.randn(700, 3) * units
    model = as_bijection(
        lambda x: x / units, inverse=lambda z: z * units * kept, log_det=lambda x: torch.full((len(x),), 11.5129)
    )
    record = bilip.audit(bilip.Flow(model, shape=(3,)), x, budget="quick", probes=["reconstruction", "sampling"])
    assert record.find("reconstruction")[0]["share_bad"] > 0.9
    assert record.find("sampling")[0]["share_bad"] > 0.9
    assert StabilityMonitor(model, x, spectrum=False).measure(0).relative_max > 0.5
    with pytest.raises(ContractViolation):
        assert_invertible(model, x)


def test_features_that_are_zero_everywhere_do_no_harm():
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 0.0, 1e3])
    found = distances(x, x + torch.tensor([1e-6, 1e-6, 1e-3]), typical(x)).relative
    assert bool((found < 1e-5).all() and (found > 1e-7).all())


pytestmark = pytest.mark.numeric
HALF = math.sqrt(torch.finfo(torch.float32).eps)


def worst(model, x):
    with torch.no_grad():
        return float(distances(x, model.inverse(model(x))).relative.max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("coupling", ["affine", "additive"])
@pytest.mark.parametrize("gain", [1.0, 2.0])
def test_no_right_inverse_is_accused(dtype, coupling, gain):
    for seed in range(3):
        torch.manual_seed(seed)
        model = real_nvp(4, blocks=6, hidden=(16,), coupling=coupling).to(dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(gain)
        x = torch.randn(64, 4, dtype=dtype)
        tolerance = rounding_tolerance(model, x)
        assert torch.finfo(dtype).eps < tolerance <= HALF
        assert worst(model, x) < tolerance or tolerance == HALF


def test_a_solver_that_is_as_tight_as_rounding_passes():
    torch.manual_seed(0)
    model, x = residual_flow(3, blocks=2, hidden=(16,), coefficient=0.7).eval(), torch.randn(32, 3)
    assert worst(model, x) < rounding_tolerance(model, x) < HALF


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_a_wrong_inverse_is_beyond_it(dtype, error):
    torch.manual_seed(0)
    right, x = real_nvp(4, blocks=2, hidden=(8,), coupling="additive").to(dtype), torch.randn(64, 4, dtype=dtype)
    wrong = bilip.adapters.from_callables(right, lambda z: right.inverse(z) * (1 + error))
    assert worst(wrong, x) > rounding_tolerance(wrong, x)


def test_the_way_through_small_states_counts():
    """A chain that scales by 1e-6 and back is the identity, and loses digits although its condition number is 1."""

    def scaled(factor):
        return bilip.blocks.DiagonalScaling(torch.full((2,), factor)).double()

    one = rounding_tolerance(bilip.Chain(scaled(1.0), scaled(1.0)), torch.ones(4, 2, dtype=torch.float64))
    shift = bilip.adapters.from_callables(lambda x: x + 1e6, lambda z: z - 1e6)
    x = torch.randn(64, 2)
    assert rounding_tolerance(shift, x) > 1e3 * one  # what is lost in a large state is rounding
    assert one < 1e-12


def test_what_cannot_be_differentiated_or_is_large_gets_half_of_the_digits():
    opaque = bilip.adapters.from_callables(lambda x: x.detach() * 2, lambda z: z / 2)
    assert rounding_tolerance(opaque, torch.ones(3, 2)) == HALF
    assert rounding_tolerance(real_nvp(200, blocks=1, hidden=(4,)), torch.ones(2, 200)) == HALF
    lost = bilip.adapters.from_callables(lambda x: x * 0, lambda z: z)
    assert rounding_tolerance(lost, torch.ones(3, 2)) == HALF


def test_contexts_and_integers():
    flow = real_nvp(3, blocks=2, hidden=(8,), context=2)
    assert rounding_tolerance(flow, torch.randn(8, 3), context=torch.randn(8, 2)) < HALF


def test_bad_batches():
    for x in (torch.zeros(3), torch.zeros(0, 2), "x"):
        with pytest.raises(InputError, match="expected a batch of at least one sample"):
            rounding_tolerance(real_nvp(2), x)


def test_a_model_that_takes_no_such_batch_is_one_line():
    broken = bilip.adapters.from_callables(lambda x: x @ torch.ones(3, 3), lambda z: z)
    for model in (real_nvp(2), broken):
        with pytest.raises(InputError, match=r"rounding_tolerance: .* takes no batch of shape \(4, 5\)") as caught:
            rounding_tolerance(model, torch.zeros(6, 5))
        assert "\n" not in str(caught.value)
