"""The whole contract over the whole catalogue, and hypothesis-driven shapes, partitions and weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilip import blocks
from bilip.blocks import Bijection, Indices, Split
from bilip.bounds import Box
from bilip.errors import ContractViolation
from bilip.nets import MLP, ConvNet
from bilip.testing import assert_invertible, check_contract
from catalogue import CATALOGUE, IDS, wake


@pytest.mark.parametrize("entry", CATALOGUE, ids=IDS)
def test_contract(entry, device):
    block = entry.make().to(device)
    context = entry.contexts()
    domain = Box(0.01, 0.99) if entry.unit else Box(-1.5, 1.5)
    check_contract(
        block, entry.batch().to(device), context=None if context is None else context.to(device), domain=domain
    )


@pytest.mark.parametrize("entry", [e for e in CATALOGUE if e.stable], ids=[e.name for e in CATALOGUE if e.stable])
def test_round_trip_in_single_precision(entry, device, dtype):
    block = entry.make().to(device, dtype).eval()
    context = entry.contexts(64, dtype)
    assert_invertible(
        block,
        entry.batch(64, dtype).to(device),
        tolerance=1e-4,
        context=None if context is None else context.to(device),
    )


@settings(max_examples=25, deadline=None)
@given(data=st.data(), total=st.integers(2, 7), scale=st.sampled_from(["sigmoid", "half_sigmoid", "exp", "tanh_exp"]))
@pytest.mark.slow
def test_any_index_partition(data, total, scale):
    order = data.draw(st.permutations(range(total)))
    cut = data.draw(st.integers(1, total - 1))
    partition = Indices(order[:cut], order[cut:], total=total)
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    net = MLP(
        cut, 2 * (total - cut), hidden=(6,), activation=data.draw(st.sampled_from(["tanh", "elu", "softplus", "swish"]))
    )
    check_contract(
        blocks.AffineCoupling(net, scale=scale, partition=partition), torch.randn(2, total, dtype=torch.float64)
    )


@settings(max_examples=12, deadline=None)
@given(
    channels=st.integers(2, 5),
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    swap=st.booleans(),
    weight=st.sampled_from([1.0, 3.0]),
    seed=st.integers(0, 10**6),
)
def test_any_image_shape(channels, height, width, swap, weight, seed):
    torch.manual_seed(seed)
    first = channels // 2
    seen, moved = (channels - first, first) if swap else (first, channels - first)
    block = wake(blocks.AdditiveCoupling(ConvNet(seen, moved, hidden=3, activation="elu"), Split(swap=swap)), weight)
    check_contract(block, torch.randn(2, channels, height, width, dtype=torch.float64))


class Shifted(Bijection):
    """A block with one flaw, to show that each promise is checked."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw

    def forward(self, x, context=None):
        return 2 * x

    def inverse(self, z, context=None):
        return z / (2.1 if self.flaw == "inverse" else 2)

    def forward_and_log_det(self, x, context=None):
        log = 0.0 if self.flaw == "log_det" else torch.log(torch.tensor(2.0, dtype=x.dtype)) * x[0].numel()
        return (self(x).detach() if self.flaw == "gradient" else self(x)), x.new_zeros(len(x)) + log

    def log_lip(self, box, context=None, formula="sharp"):
        return 0.5 if self.flaw == "bound" else 0.6931471805599454

    def log_lip_inverse(self, box, context=None, formula="sharp"):
        return -0.7 if self.flaw == "inverse bound" else -0.6931471805599452

    def interval(self, box, context=None):
        return self._scaled(box, 2.0, flawed=self.flaw == "interval")

    def interval_inverse(self, box, context=None):
        return self._scaled(box, 0.5, flawed=self.flaw == "interval_inverse")

    def _scaled(self, box, factor, *, flawed):
        width = factor * (box.high - box.low)
        return Box(factor * box.low, factor * box.low + width / 2 if flawed else factor * box.high)


@pytest.mark.parametrize(
    ("flaw", "says"),
    [
        ("inverse", "round trip"),
        ("log_det", "slogdet"),
        ("gradient", "gradients of forward"),
        ("bound", "forward map"),
        ("inverse bound", "inverse map"),
        ("interval", "enclose"),
        ("interval_inverse", "enclose_inverse"),
    ],
)
def test_the_contract_can_fail(flaw, says):
    x = torch.randn(3, 2, dtype=torch.float64)
    check_contract(Shifted("none"), x)
    with pytest.raises(ContractViolation, match=says):
        check_contract(Shifted(flaw), x)


def test_assert_invertible_names_the_worst_sample():
    block = blocks.AffineCoupling(MLP(1, 2, hidden=(8,)), scale="sigmoid")
    with torch.no_grad():
        block.t.layers[-1].bias.copy_(torch.tensor([0.0, -200.0]))
    x = torch.ones(4, 2)
    with pytest.raises(ContractViolation, match="4 of 4 samples do not come back"):
        assert_invertible(block, x)
