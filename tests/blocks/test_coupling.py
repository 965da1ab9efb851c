"""Couplings: their partitions, their scales, and their inverses on the image of a box."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bilip.adapters._proofs import AtanExpScale, SoftclipExpScale
from bilip.blocks import (
    EXP,
    HALF_SIGMOID,
    SIGMOID,
    AdditiveCoupling,
    AffineCoupling,
    Chain,
    Checkerboard,
    ExpScale,
    Indices,
    Invert,
    SigmoidScale,
    Split,
    Streams,
    TanhExpScale,
    scale_from,
)
from bilip.bounds import Box
from bilip.errors import InputError, PartitionError
from bilip.nets import MLP
from bilip.testing import search_gains

# ---- the inverse of affine coupling on the image of a box: a constant that needs no box around that image


F64 = torch.float64


def coupling(scale, *, joint=True, weights=1.0):
    torch.manual_seed(3)
    nets = [MLP(2, 4, hidden=(6,), activation="tanh")] if joint else [MLP(2, 2, hidden=(6,)) for _ in range(2)]
    block = AffineCoupling(*nets, scale=scale_from(scale)).double()
    with torch.no_grad():
        for p in block.parameters():
            p.mul_(weights)
    return block


@pytest.mark.parametrize("scale", ["sigmoid", "half_sigmoid", "exp"])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("weights", [1.0, 3.0])
def test_no_gain_of_the_inverse_is_above_it(scale, joint, weights):
    block = coupling(scale, joint=joint, weights=weights)
    for low, high in ((-1.0, 1.0), (-0.01, 4.0), (5.0, 6.0)):
        box = Box(low, high, shape=(4,))
        log = block.log_lip_inverse_on_image(box)
        x = torch.cat((box.sample(400), torch.where(torch.rand(400, 4, dtype=F64) < 0.5, box.low, box.high)))
        y = x[torch.randperm(800)]
        near = x + 1e-3 * (y - x)
        for other in (y, near):
            ratio = (x - other).norm(dim=1) / (block(x) - block(other)).norm(dim=1)
            assert float(ratio.nan_to_num(0.0).max()) <= math.exp(log) * (1 + 1e-9)
        bound = block.bounds(box)
        assert bound.log_inverse <= min(log, block.log_lip_inverse(block.enclose(box))) + 1e-12


def test_it_is_attained_where_the_scale_is_linear_in_its_input():
    """One entry each, s(x) = x and t = 0: at x2 = 1 the inverse is (z1, z2 e^-z1), whose Jacobian there is [[1, 0], [-x2, 1/g]]."""
    t, s = nn.Linear(1, 1, bias=False).double(), nn.Linear(1, 1, bias=False).double()
    t.weight.data.zero_()
    s.weight.data.fill_(1.0)
    block = AffineCoupling(t, s, scale="exp")
    low = 1e-9  # a box around (0, 1), so that g is 1 all over
    box = Box(torch.tensor([-low, 1 - low], dtype=F64), torch.tensor([low, 1 + low], dtype=F64))
    true = math.log((1 + math.sqrt(5)) / 2)
    assert true <= block.log_lip_inverse_on_image(box) <= true + 1e-7


def test_it_sharpens_deep_chains_in_both_directions_of_asking():
    torch.manual_seed(0)
    chain = Chain(*(coupling("half_sigmoid") for _ in range(4)), shape=(4,))
    box = Box(-4, 4, shape=(4,))
    sharp = chain.bounds(box)
    plain = sum(
        block.log_lip_inverse(chain[: k + 1].enclose(box)) for k, block in enumerate(chain)
    )  # what each block says about the box around what reaches it
    assert sharp.log_inverse < plain - 0.5
    turned = Invert(chain).bounds(latent=box)
    assert turned.log_forward == pytest.approx(sharp.log_inverse)
    found = search_gains(chain, box, points=8, steps=10)
    assert found.inverse <= sharp.inverse


def test_no_box_no_better_constant():
    block = coupling("sigmoid")
    assert block.log_lip_inverse_on_image(Box.everything((4,))) == math.inf
    assert block.log_lip_inverse_on_image(Box(-1, 1, shape=(4,)), formula="paper") == math.inf


@given(total=st.integers(2, 9), data=st.data())
def test_indices_merge_what_they_split(total, data):
    order = data.draw(st.permutations(range(total)))
    cut = data.draw(st.integers(1, total - 1))
    partition = Indices(order[:cut], order[cut:], total=total, dim=-1)
    x = torch.randn(2, 3, total)
    first, second = partition.split(x)
    assert torch.equal(first, x[..., order[:cut]])
    assert torch.equal(partition.merge(first, second), x)


@given(height=st.integers(1, 5), width=st.integers(2, 5), swap=st.booleans())
def test_checkerboards_cover_every_pixel_once(height, width, swap):
    x = torch.rand(2, 3, height, width) + 1
    partition = Checkerboard(swap=swap)
    seen, moved = partition.split(x)
    assert torch.equal(partition.merge(seen, moved), x)
    assert int((seen != 0).sum()) + moved.numel() == x.numel()
    other, _ = Checkerboard(swap=not swap).split(x)
    assert torch.equal(seen + other, x)


@pytest.mark.parametrize("dim", [1, 2, -1])
@pytest.mark.parametrize("swap", [False, True])
def test_splits_along_any_dimension(dim, swap):
    x = torch.randn(2, 5, 4, 3)
    partition = Split(dim=dim, swap=swap)
    assert torch.equal(partition.merge(*partition.split(x)), x)


def test_a_checkerboard_may_be_swapped_after_its_first_use():
    part, x = Checkerboard(), torch.arange(16.0).view(1, 1, 4, 4)
    first = part.split(x)[1]
    part.swap = True
    assert torch.equal(part.split(x)[1], Checkerboard(swap=True).split(x)[1])
    assert not torch.equal(part.split(x)[1], first)


def test_streams():
    x = torch.randn(4, 2, 3, 8, 8)
    first, second = Streams(swap=True).split(x)
    assert torch.equal(first, x[:, 1])
    assert torch.equal(Streams(swap=True).merge(first, second), x)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Indices([], total=3), "a part is empty"),
        (lambda: Indices([0, 1, 2], total=3), "a part is empty"),
        (lambda: Indices([0, 1], [1, 2], total=3), r"overlap or repeat at \[1\]"),
        (lambda: Indices([0], [2], total=3), r"missing \[1\]"),
        (lambda: Indices([0], [1, 5], total=2), r"out of range \[5\]"),
        (lambda: Split(dim=0), "dim=0 is the batch"),
        (lambda: Split(size=0), "at least one entry"),
        (lambda: Split().split(torch.ones(2, 1)), r"shape \(2, 1\) cannot be divided"),
        (lambda: Split(size=4).split(torch.ones(2, 3)), "cannot be divided"),
        (lambda: Split(dim=3).split(torch.ones(2, 3)), "cannot be divided"),
        (lambda: Indices([0], total=2).split(torch.ones(2, 3)), "does not have 2 entries"),
        (lambda: Checkerboard().split(torch.ones(2, 3)), "expected images"),
        (lambda: Streams().split(torch.ones(2, 3, 4)), "two streams"),
    ],
)
def test_bad_partitions(make, says):
    with pytest.raises(PartitionError, match=says):
        make()


@pytest.mark.parametrize("change", ["first", "second", "order"])
def test_nothing_is_proved_with_indices_that_were_overwritten(change):
    """As by `to_empty()`, which leaves buffers that no checkpoint holds."""
    block = AdditiveCoupling(MLP(2, 2), Indices([0, 3], total=4))
    assert block.bounds().forward > 1
    getattr(block.partition, change).zero_()
    with pytest.raises(PartitionError, match="no longer hold each of"):
        block.bounds()


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


def _sigmoid_of(low, high, shift):
    return lambda s: low + (mpmath.mpf(high) - low) / (1 + mpmath.exp(-s - shift))


@pytest.mark.parametrize(
    ("scale", "exact"),
    [
        (SigmoidScale(0.0, 1e10, -300.0), _sigmoid_of(0, 1e10, -300)),
        (SigmoidScale(1e-300, 1e10, -300.0), _sigmoid_of(mpmath.mpf(1e-300), 1e10, -300)),
        (TanhExpScale(699.0), lambda s: mpmath.exp(699 * mpmath.tanh(s))),
        (AtanExpScale(440.0), lambda s: mpmath.exp(440 * mpmath.atan(s))),
        (SoftclipExpScale(600.0), lambda s: mpmath.exp(s / (1 + abs(s) / 600))),
    ],
    ids=["underflow", "underflow above a floor", "tanh", "atan", "softclip"],
)
def test_values_of_any_size_lie_in_their_interval(scale, exact):
    raw = torch.cat(
        (torch.linspace(-440, -400, 200), torch.linspace(-6, 6, 400), torch.linspace(200, 2000, 400))
    ).double()
    box, log = scale.enclose(Box.point(raw)), scale.suprema(raw, raw).value
    with mpmath.workdps(60):
        for k, s in enumerate(raw.tolist()):
            value = exact(mpmath.mpf(s))
            assert float(box.low[k]) <= value <= float(box.high[k])
            assert mpmath.log(value) <= float(log[k])
