"""The inverse of affine coupling on the image of a box: a constant that needs no box around that image."""

import math

import pytest
import torch
from torch import nn

from bilip.blocks import AffineCoupling, Chain, Invert, scale_from
from bilip.bounds import Box
from bilip.nets import MLP
from bilip.testing import search_gains

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
