"""The tolerance of a round trip, argued from eps and the condition of a model."""

import math

import pytest
import torch

import bilip
from bilip.auditing.round_trip import distances
from bilip.errors import InputError
from bilip.models import real_nvp, residual_flow
from bilip.testing import rounding_tolerance

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
