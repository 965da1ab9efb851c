"""Products with the Jacobian of one block, and what they cost."""

import pytest
import torch

from bilip.blocks import ActNorm, DiagonalScaling, InvertibleConv1x1
from bilip.blocks.factor_out import OnKept
from bilip.linalg.linearized import LinearPart


def linear_blocks():
    torch.manual_seed(0)
    norm = ActNorm(6, start="identity")
    torch.nn.init.normal_(norm.bias, std=3.0)
    torch.nn.init.normal_(norm.log_scale)
    return {
        "actnorm": (norm, (6, 4, 4)),
        "diagonal": (DiagonalScaling(torch.randn(96).exp()), (96,)),
        "full": (InvertibleConv1x1(6), (6, 4, 4)),
        "plu": (InvertibleConv1x1(6, kind="plu"), (6, 4, 4)),
        "kept": (OnKept(InvertibleConv1x1(6), (6, 4, 4)), (130,)),
        "kept actnorm": (OnKept(norm, (6, 4, 4)), (130,)),
    }


@pytest.mark.parametrize("kind", linear_blocks())
def test_a_large_linear_block_is_differentiated_once(kind):
    block, shape = linear_blocks()[kind]
    block = block.double().eval().requires_grad_(False)
    x = torch.randn(2, *shape, dtype=torch.float64)
    part = LinearPart(block, x)
    part.solve(
        torch.randn(2, x[0].numel(), dtype=torch.float64)
    )  # the first product finds its numbers, and checks them
    calls, forward, inverse = [], block.forward, block.inverse
    block.forward = lambda *a: calls.append(1) or forward(*a)
    block.inverse = lambda *a: calls.append(1) or inverse(*a)
    size = x[0].numel()
    v = torch.randn(2, size, dtype=torch.float64)
    image, pulled = part.apply(v), part.adjoint(v)
    back, pulled_back = part.solve(image), part.solve_adjoint(pulled)
    assert calls == []
    jacobian = torch.autograd.functional.jacobian(lambda y: forward(y).flatten(), x[:1]).reshape(size, size)
    torch.testing.assert_close(image, v @ jacobian.T, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(pulled, v @ jacobian, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(back, v, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pulled_back, v, rtol=1e-10, atol=1e-10)
    assert part.residual < 1e-10
    values = torch.linalg.svdvals(jacobian)
    torch.testing.assert_close(torch.tensor(part.extremes, dtype=torch.float64), values[[0, -1]], rtol=1e-10, atol=0)


def test_a_linear_block_that_is_changed_is_no_linear_block():
    class Bent(ActNorm):
        def forward(self, x, context=None):
            return super().forward(x + 0.1 * x.sin())

    block = Bent(100, start="identity").double().eval()
    x = torch.randn(2, 100, dtype=torch.float64)
    v = torch.ones(2, 100, dtype=torch.float64)
    torch.testing.assert_close(LinearPart(block, x).apply(v), 1 + 0.1 * x.cos())
