"""Models that once got a false answer from an audit."""

import pytest
import torch
from torch import nn

import bilip
from bilip.probes import jacobian, singular_values

pytestmark = pytest.mark.numeric


def model(forward, inverse):
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return forward(self, x)

        def inverse(self, z):
            return inverse(self, z)

    return Made()


def zeros(x):
    return x.new_zeros(len(x))


def likelihood(made, x, **options):
    return bilip.audit(
        made, x, budget="quick", probes=["consistency", "reconstruction", "log_det"], **options
    ).verdicts["likelihood"]


def test_an_exploding_inverse_is_not_called_a_cache():
    made = model(lambda s, x: (torch.tanh(20 * x), zeros(x)), lambda s, z: (torch.atanh(z) / 20, zeros(z)))
    verdict = likelihood(made, torch.randn(300, 3))
    assert verdict.status == "unsafe"
    assert "NaN, Inf" in verdict.reason


def test_a_model_that_works_in_place():
    x = torch.randn(300, 3)
    before = x.clone()
    clamped = model(lambda s, x: (x.clamp_(-1, 1), zeros(x)), lambda s, z: (z, zeros(z)))
    assert likelihood(clamped, x).status == "unsafe"
    assert torch.equal(x, before)
    log = 3 * torch.log(torch.tensor(2.0))
    doubled = model(lambda s, x: (x.mul_(2), zeros(x) + log), lambda s, z: (z.div_(2), zeros(z) - log))
    assert likelihood(doubled, x).status == "safe"
    assert torch.equal(x, before)


@pytest.mark.parametrize("claim", [-999.0, 192 * 0.6931471805599453])
def test_a_log_det_beyond_the_limit_of_slogdet_is_held_against_an_estimate(claim):
    made = model(lambda s, x: (x * s.w, x.new_full((len(x),), claim)), lambda s, z: z / s.w)
    assert likelihood(made, torch.randn(64, 3, 8, 8)).status == ("safe" if claim > 0 else "unsafe")


def test_small_data_with_a_wrong_inverse():
    made = model(lambda s, x: (x.clone(), zeros(x)), lambda s, z: (0 * z, zeros(z)))
    assert likelihood(made, 1e-5 * torch.randn(300, 3)).status == "unsafe"


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad.detach()


def test_the_jacobian_through_a_backward_pass_that_cannot_be_differentiated():
    made = model(lambda s, x: (x + Triple.apply(x), zeros(x)), lambda s, z: (z / 4, zeros(z)))
    x = torch.randn(1, 3, dtype=torch.float64)
    assert torch.allclose(jacobian(made, x), 4 * torch.eye(3, dtype=torch.float64))
    assert torch.allclose(singular_values(made, x).values, torch.full((3,), 4.0, dtype=torch.float64))


def test_a_model_with_a_stray_float64_parameter():
    normflows = pytest.importorskip("normflows")
    torch.manual_seed(0)
    net = normflows.nets.LipschitzMLP([4, 32, 4], init_zeros=False, lipschitz_const=0.9)
    flow = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(4), [normflows.flows.Residual(net)])
    assert likelihood(flow, torch.randn(50, 4)).status == "safe"


def test_an_estimated_log_det_is_not_accused():
    made = model(
        lambda s, x: (2 * x, zeros(x) + 3 * 0.6931471805599453 + 0.1 * torch.randn(len(x))),
        lambda s, z: (z / 2, zeros(z) - 3 * 0.6931471805599453 + 0.1 * torch.randn(len(z))),
    )
    assert likelihood(made, torch.randn(100, 3)).status == "safe"


def test_without_the_consistency_probe_nothing_is_safe():
    made = model(lambda s, x: (2 * x, zeros(x)), lambda s, z: (z / 2, zeros(z)))
    record = bilip.audit(made, torch.randn(50, 3), budget="quick", probes=["reconstruction"])
    assert record.verdicts["likelihood"].status == "not-measured"


def test_a_reversible_model_shows_its_blocks_to_an_audit():
    record = bilip.audit(
        bilip.Reversible(bilip.models.real_nvp(4, blocks=5)), torch.randn(64, 4), budget="quick", probes=["blame"]
    )
    assert len(record.find("blame")[0].rows) == 5
