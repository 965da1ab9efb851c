import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilip.blocks import EXP, HALF_SIGMOID, SIGMOID, ExpScale, SigmoidScale, TanhExpScale, scale_from
from bilip.errors import InputError

SCALES = {
    "sigmoid": SIGMOID,
    "half": HALF_SIGMOID,
    "range": SigmoidScale(0.2, 3.0, -1.0),
    "floored sigmoid": SIGMOID.floored(1e-3),
    "exp": EXP,
    "floored exp": EXP.floored(0.1),
    "tanh": TanhExpScale(2.0),
    "strong tanh": TanhExpScale(5.0),
    "floored tanh": TanhExpScale(2.0).floored(0.01),
}


@pytest.mark.parametrize("name", SCALES)
@settings(max_examples=60, deadline=None)
@given(low=st.floats(-12, 12), width=st.floats(0, 10))
def test_suprema_are_upper_bounds_and_attained(name, low, width):
    scale = SCALES[name]
    s = torch.linspace(low, low + width, 4001, dtype=torch.float64, requires_grad=True)
    g = scale(s)
    (slope,) = torch.autograd.grad(g.sum(), s, retain_graph=True)
    (fall,) = torch.autograd.grad((1 / g).sum(), s)
    ends = (torch.tensor([low], dtype=torch.float64), torch.tensor([low + width], dtype=torch.float64))
    sup = [float(v.exp()) for v in scale.suprema(*ends)]
    found = [float(v.detach().abs().max()) for v in (g, slope, 1 / g, fall)]
    for k, (bound, value) in enumerate(zip(sup, found, strict=True)):
        # Autograd multiplies by 1 - tanh^2 and 1 - sigmoid, which cancel where the function is flat: that is its
        # rounding.
        assert bound >= value * (1 - 1e-12) - 1e-14 * found[0 if k < 2 else 2]
    loose = {3} if name == "floored tanh" else set()  # its |(1/g)'| is the smaller of two bounds, not exact
    for k, (bound, value) in enumerate(zip(sup, found, strict=True)):
        if k not in loose:
            assert bound <= value * (1 + 1e-4) + 1e-12 * (1 + found[0] + found[2])


@pytest.mark.parametrize("name", SCALES)
def test_suprema_on_the_whole_line_and_far_out(name):
    scale = SCALES[name]
    everywhere = scale.suprema(
        torch.tensor([-math.inf], dtype=torch.float64), torch.tensor([math.inf], dtype=torch.float64)
    )
    far = scale.suprema(torch.tensor([-5000.0], dtype=torch.float64), torch.tensor([-4000.0], dtype=torch.float64))
    for whole, part in zip(everywhere, far, strict=True):
        assert not torch.isnan(whole).any()
        assert not torch.isnan(part).any()
        assert float(whole) >= float(part)
    if name in ("sigmoid", "exp"):  # logs reach where the numbers themselves overflow
        assert 4990 < float(far.reciprocal) < 5010


@pytest.mark.parametrize("name", SCALES)
def test_log_is_the_log(name):
    s = torch.linspace(-15, 15, 101, dtype=torch.float64)
    assert torch.allclose(SCALES[name].log(s), SCALES[name](s).log(), atol=1e-10)
    assert bool((SCALES[name](s) > 0).all())


def test_log_survives_underflow():
    assert SIGMOID.log(torch.tensor(-1000.0)).item() == -998.0


@pytest.mark.parametrize("name", SCALES)
def test_specs_round_trip(name):
    assert scale_from(SCALES[name].spec()) == SCALES[name]


def test_bad_scales():
    with pytest.raises(InputError, match="Pass a Scale or one of: sigmoid, half_sigmoid"):
        scale_from("relu")
    with pytest.raises(InputError, match="0 <= low < high"):
        SigmoidScale(2.0, 1.0)
    with pytest.raises(InputError, match="floored at -1"):
        EXP.floored(-1)
    with pytest.raises(InputError, match=r"floored at -0.5"):
        ExpScale(-0.5)
    with pytest.raises(InputError, match="clamp"):
        TanhExpScale(0.0)
    with pytest.raises(InputError, match="does not fit ExpScale"):
        scale_from({"kind": "ExpScale", "wrong": 1})
    assert isinstance(scale_from("exp"), ExpScale)
