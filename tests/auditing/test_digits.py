"""More digits than float64 has, where float64 cannot be trusted."""

import math

import mpmath
import pytest
import torch
from torch import nn

import bilip
from bilip.auditing.digits import Digits
from bilip.auditing.subject import Subject
from bilip.errors import NotMeasured
from bilip.models import real_nvp


class Chaos(nn.Module):
    """(a, b) -> (b, a + sin(w b)), again and again: volume is kept, and the last bits of x decide everything."""

    def __init__(self, layers: int, gain: float) -> None:
        super().__init__()
        self.w = nn.Parameter(gain * torch.linspace(0.9, 1.1, layers))

    def forward(self, x):
        a, b = x.chunk(2, 1)
        for w in self.w:
            a, b = b, a + torch.sin(w * b)
        return torch.cat((a, b), 1), x.new_zeros(len(x))

    def inverse(self, z):
        a, b = z.chunk(2, 1)
        for w in self.w.flip(0):
            a, b = b - torch.sin(w * a), a
        return torch.cat((a, b), 1)


def chaos(size=2, layers=60, gain=10.0):
    return bilip.Flow(bilip.as_bijection(Chaos(layers, gain), shape=(size,)), shape=(size,))


def by_hand(flow, x):
    """The same in mpmath, written out: log p of one sample."""
    with mpmath.workdps(150):
        a, b = (mpmath.mpf(float(v)) for v in x)
        for w in flow.bijection.module.module.w.tolist():
            a, b = b, a + mpmath.sin(mpmath.mpf(w) * b)
        return float(-(a * a + b * b) / 2 - mpmath.log(2 * mpmath.pi))


def test_they_are_those_of_a_formula_written_out():
    torch.manual_seed(0)
    flow, x = chaos(), torch.randn(3, 2)
    with torch.no_grad():
        wide = Subject.of(flow).copy_in(torch.float64)
        found = [Digits(wide).log_prob(x[k : k + 1]) for k in range(3)]
        plain = flow.double().log_prob(x.double())
    assert found == pytest.approx([by_hand(flow, row) for row in x], rel=1e-6)
    assert any(abs(a - b) > 0.1 for a, b in zip(found, plain.tolist(), strict=True))  # float64 has lost it


@pytest.mark.parametrize(
    "model",
    [
        real_nvp(4, blocks=3, hidden=(8,)),
        real_nvp(4, blocks=3, hidden=(8,), coupling="additive", activation="softplus"),
        real_nvp(4, blocks=2, hidden=(8,), scale="exp", activation="elu"),
    ],
    ids=["affine", "additive", "exp"],
)
def test_where_float64_is_right_they_agree_with_it(model):
    flow, x = bilip.Flow(model).double(), torch.randn(1, 4, dtype=torch.float64)
    assert Digits(Subject.of(flow)).log_prob(x) == pytest.approx(float(flow.log_prob(x).detach()), rel=1e-12)


def test_splines_indices_and_writing_in_place_are_followed():
    nflows = pytest.importorskip("nflows.transforms")
    torch.manual_seed(0)
    from nflows.distributions import StandardNormal
    from nflows.flows import Flow

    spline = nflows.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
        3, 8, tails="linear", tail_bound=2.0, num_blocks=1
    )
    model = Flow(spline, StandardNormal([3])).double().eval()
    x = torch.tensor([[0.3, -1.9, 2.5]], dtype=torch.float64)  # the last one is outside
    with torch.no_grad():
        expected = float(model.log_prob(x))
    assert Digits(Subject.of(model)).log_prob(x) == pytest.approx(expected, rel=1e-12)


def test_a_chaotic_flow_is_unsafe_although_float64_is_no_reference():
    torch.manual_seed(0)
    record = bilip.audit(
        chaos(8), torch.randn(1300, 8), budget="quick", probes=["consistency", "likelihood", "log_det"]
    )
    m, verdict = record.find("likelihood")[0], record.verdicts["likelihood"]
    assert m["unknown"] > 0.95 * m["count"]
    assert m["bad"] < 0.02 * m["count"]  # two orders of float64 agree by chance: that decides nothing
    assert m["digits_tried"] == 4
    assert m["digits_bad"] >= 3
    assert verdict.status.value == "unsafe", verdict.reason
    assert "with more digits" in verdict.reason
    assert verdict.interval[0] > 0.01


def test_what_is_not_known_is_said():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.special.erfcx(x), x.new_zeros(len(x))

        def inverse(self, z):
            return z

    model = bilip.Flow(bilip.as_bijection(Odd(), shape=(2,)), shape=(2,))
    with pytest.raises(NotMeasured, match="erfcx"):
        Digits(Subject.of(model)).log_prob(torch.ones(1, 2, dtype=torch.float64))


def test_a_number_that_leaves_the_tensors_is_rounded_and_that_is_said():
    class Leaves(nn.Module):
        def forward(self, x):
            return x * math.exp(float(x[0, 0]) / 3), x.new_zeros(len(x))

        def inverse(self, z):
            return z

    x = torch.full((1, 2), 0.1, dtype=torch.float64)
    model = bilip.as_bijection((lambda x: Leaves()(x / 3), lambda z: z), shape=(2,))
    with pytest.raises(NotMeasured, match="takes a number out of a tensor"):
        Digits(Subject.of(bilip.Flow(model, shape=(2,)))).log_prob(x)
