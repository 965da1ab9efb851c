"""Stacks of matrices: right after torch.set_num_threads, as torch.linalg everywhere else."""

import os
import subprocess
import sys

import pytest
import torch

from bilip import _linalg

pytestmark = pytest.mark.numeric

NAMES = ["inv", "inv_ex", "lu", "slogdet", "det", "solve", "solve_ex"]
TWO_THREADS = """
import math
import torch
torch.set_num_threads(2)
import bilip
from bilip import _linalg
from bilip.blocks.log_det import Exact

for rows in (160, 192):
    for dtype in (torch.float32, torch.float64):
        a = torch.linalg.qr(torch.randn(4, rows, rows, dtype=dtype))[0] + torch.eye(rows, dtype=dtype) / 2
        b = torch.randn(4, rows, 3, dtype=dtype)
        for name in ("inv", "inv_ex", "lu", "slogdet", "det", "solve", "solve_ex"):
            stacks = (a, b) if name.startswith("solve") else (a,)
            found, ones = getattr(_linalg, name)(*stacks), [getattr(torch.linalg, name)(*one) for one in zip(*stacks)]
            if isinstance(found, torch.Tensor):
                found, ones = (found,), [(one,) for one in ones]
            for part, expected in zip(found, zip(*ones)):
                assert torch.equal(part, torch.stack(expected)), (name, rows, dtype)

x = torch.rand(4, 3, 16, 16)
glow = bilip.models.glow((3, 16, 16), levels=3, blocks=4, hidden=8)
with torch.no_grad():
    glow(x)
    for model in (glow.train(), glow.eval()):
        z, log_det = model.forward_and_log_det(x)
        assert (model.inverse(z) - x).abs().max() < 1e-4
        assert log_det.isfinite().all()
        assert torch.allclose(model.inverse_and_log_det(z)[1], -log_det, rtol=1e-3)
grads = []
for model in (glow.train(), bilip.Reversible(glow)):
    glow.zero_grad()
    z, log_det = model.forward_and_log_det(x)
    (z.square().flatten(1).sum(1) / 2 - log_det).sum().backward()
    grads.append(torch.cat([p.grad.flatten() for p in glow.parameters()]))
assert torch.allclose(*grads, rtol=1e-3, atol=1e-3 * float(grads[0].abs().max()))

slope = torch.randn(160, 160, dtype=torch.float64) / 40
found = Exact()(lambda x: x @ slope.T, torch.randn(3, 160, dtype=torch.float64))
assert torch.allclose(found, torch.linalg.slogdet(torch.eye(160, dtype=torch.float64) + slope)[1].expand(3), atol=1e-9)
print("right")
"""


@pytest.mark.process
@pytest.mark.slow
def test_stacks_are_right_after_set_num_threads():
    """The faulty calls return wrong numbers, raise, or never return."""
    patient = os.environ | {"OMP_WAIT_POLICY": "passive"}  # threads that wait do not spin, where others need the cores
    command = [sys.executable, "-c", TWO_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=patient)
    assert done.stdout == "right\n", done.stderr[-2000:]


def stacks_for(name, dtype=torch.float64, rows=40):
    a = torch.randn(2, 3, rows, rows, dtype=dtype) + 4 * torch.eye(rows, dtype=dtype)
    return (a, torch.randn(3, rows, 2, dtype=dtype)) if name.startswith("solve") else (a,)


def tensors(value):
    return [value] if isinstance(value, torch.Tensor) else [part for part in value if part.is_floating_point()]


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("name", NAMES)
def test_as_in_torch(name, rows, device):
    """Values, shapes and names of one call for the stack, with leading dimensions that are broadcast; gradients; forward mode."""
    ours, torchs = getattr(_linalg, name), getattr(torch.linalg, name)
    stacks = [stack.to(device) for stack in stacks_for(name, rows=rows)]
    found, expected = ours(*stacks), torchs(*stacks)
    assert type(found) is type(expected)
    for a, b in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

    a = stacks[0].requires_grad_()
    grads = []
    for function in (ours, torchs):
        value = tensors(function(a, *stacks[1:]))[-1]
        weights = torch.linspace(0, 1, value.numel(), dtype=value.dtype, device=device).view_as(value)
        first = torch.autograd.grad((value.log() if name == "det" else value).mul(weights).sum(), a, create_graph=True)
        grads.append((*first, *torch.autograd.grad(first[0].square().sum(), a)))
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-9)

    a = a.detach()
    tangents = [
        tensors(torch.func.jvp(lambda a, f=f: tensors(f(a, *stacks[1:]))[-1], (a,), (torch.ones_like(a),))[1])
        for f in (ours, torchs)
    ]
    torch.testing.assert_close(*tangents, rtol=1e-6, atol=1e-9)


def test_a_singular_matrix_is_named_or_reported():
    stack = torch.eye(40).repeat(3, 1, 1)
    stack[1] = 0
    assert _linalg.inv_ex(stack).info.tolist() == [0, 1, 0]
    assert _linalg.solve_ex(stack, torch.ones(40, 1)).info.tolist() == [0, 1, 0]
    assert _linalg.slogdet(stack).logabsdet.tolist() == [0, -torch.inf, 0]
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        _linalg.inv(stack)


def test_stacks_without_matrices():
    assert _linalg.inv(torch.zeros(0, 40, 40)).shape == (0, 40, 40)
    assert _linalg.slogdet(torch.zeros(0, 40, 40)).logabsdet.shape == (0,)
    assert _linalg.solve(torch.zeros(0, 40, 40), torch.zeros(0, 40, 1)).shape == (0, 40, 1)
