import math
import sys

import pytest
import torch
from torch import nn

from bilip import Box, blocks
from bilip.blocks import NeuralODE
from bilip.errors import InputError, SolverFailed
from bilip.nets import MLP, spectral
from bilip.nets.spectral import held_layers, held_together
from bilip.testing import search_gains


def linear(matrix: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(2, 2, bias=False).double()
    layer.weight.data.copy_(matrix)
    return layer


def test_a_linear_field_gives_the_matrix_exponential():
    matrix = torch.tensor([[0.3, -1.0], [0.5, -0.2]], dtype=torch.float64)
    block = NeuralODE(linear(matrix), time=1.5, rtol=1e-10, atol=1e-10)
    x = torch.randn(5, 2, dtype=torch.float64)
    z, log_det = block.forward_and_log_det(x)
    assert torch.allclose(z, x @ torch.matrix_exp(1.5 * matrix).T, atol=1e-8)
    assert torch.allclose(log_det, torch.full((5,), 1.5 * float(matrix.trace()), dtype=torch.float64), atol=1e-8)
    back, minus = block.inverse_and_log_det(z)
    assert torch.allclose(back, x, atol=1e-8)
    assert torch.allclose(minus, -log_det, atol=1e-8)


def test_bound_of_the_exact_flow_is_reached_and_never_passed():
    stretch = NeuralODE(linear(torch.diag(torch.tensor([0.8, -0.8], dtype=torch.float64))), rtol=1e-10, atol=1e-10)
    bound = stretch.bounds()
    assert bound.forward == pytest.approx(math.exp(0.8))
    assert bound.inverse == pytest.approx(math.exp(0.8))
    torch.manual_seed(0)
    net = MLP(3, 3, hidden=(16,), activation="tanh", context=1).double()
    block = NeuralODE(net, method="rk4", options={"step_size": 0.05})
    gains = search_gains(block, Box(-1, 1, shape=(3,)), points=8, steps=5)
    assert gains.forward <= block.bounds().forward
    assert gains.inverse <= block.bounds().inverse


def test_discretisation_error_is_measured_apart():
    torch.manual_seed(0)
    net = MLP(2, 2, hidden=(32,), activation="tanh", context=1)
    x = torch.randn(20, 2)
    coarse = NeuralODE(net, method="euler", options={"step_size": 0.25}).discretisation_error(x)
    fine = NeuralODE(net, method="euler", options={"step_size": 0.025}).discretisation_error(x)
    assert 4 < float(coarse.median() / fine.median()) < 25  # first order
    assert float(NeuralODE(net).discretisation_error(x).max()) < 1e-3


def test_a_first_call_in_inference_mode_leaves_gradients_possible(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchdiffeq"]:
        monkeypatch.delitem(sys.modules, name)
    block, x = NeuralODE(MLP(2, 2, activation="tanh", context=1)).double(), torch.randn(4, 2, dtype=torch.float64)
    with torch.inference_mode():
        block(x)
    block(x).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


@pytest.mark.parametrize("adjoint", [False, True])
def test_gradients_with_and_without_the_adjoint(adjoint):
    torch.manual_seed(0)
    net = MLP(2, 2, hidden=(16,), activation="tanh", context=1).double()
    x = torch.randn(4, 2, dtype=torch.float64)
    plain = NeuralODE(net, method="rk4", options={"step_size": 0.02})
    block = NeuralODE(net, rtol=1e-9, atol=1e-9, adjoint=adjoint)
    for model in (plain, block):
        z, log_det = model.forward_and_log_det(x)
        model.loss = (z.square().sum() - log_det.sum(), list(net.parameters()))
    a, b = (torch.autograd.grad(*model.loss) for model in (plain, block))
    for one, other in zip(a, b, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_hutchinson_traces_are_right_in_the_mean():
    torch.manual_seed(0)
    net = MLP(3, 3, hidden=(16,), activation="tanh").double()
    x = torch.randn(1, 3, dtype=torch.float64)
    exact = NeuralODE(net, method="rk4", options={"step_size": 0.1})
    noisy = NeuralODE(net, trace="hutchinson", method="rk4", options={"step_size": 0.1})
    with torch.no_grad():
        draws = noisy.forward_and_log_det(x.expand(4000, 3))[1]
        value = float(exact.forward_and_log_det(x)[1])
    assert abs(float(draws.mean()) - value) < 4 * float(draws.std()) / math.sqrt(4000)


class Square(nn.Module):
    def forward(self, x):
        return 100 * x.square()


def test_solver_failures_are_reported():
    with pytest.raises(SolverFailed, match=r"the solver 'dopri5' failed|are not finite"):
        NeuralODE(Square())(torch.full((2, 2), 50.0))
    with pytest.raises(SolverFailed, match="2 of 2 samples are not finite"):
        NeuralODE(Square(), method="euler", options={"step_size": 0.05})(torch.full((2, 2), 50.0))
    with pytest.raises(SolverFailed, match="'magic' failed"):
        NeuralODE(nn.Linear(2, 2), method="magic")(torch.ones(1, 2))


def test_bad_input():
    with pytest.raises(InputError, match="positive time"):
        NeuralODE(nn.Linear(2, 2), time=-1)
    with pytest.raises(InputError, match=r"f\(x, t\) has shape"):
        NeuralODE(nn.Linear(2, 3))(torch.ones(1, 2))


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_held_layers_are_certified_once_for_all_evaluations(monkeypatch, training, adjoint):
    """Of one integration, and of its backward pass; the gradient is that of the weights that act."""
    torch.manual_seed(0)
    net = MLP(2, 2, hidden=(8,), activation="tanh", lipschitz=0.8)
    options = {"method": "rk4", "options": {"step_size": 0.25}, "adjoint": adjoint}
    block, x = NeuralODE(net, **options).double().train(training), torch.randn(4, 2, dtype=torch.float64)
    with torch.no_grad():
        for p in block.parameters():
            p.mul_(4)
    looks, original = [], spectral._known
    monkeypatch.setattr(spectral, "_known", lambda *args, **given: looks.append(1) or original(*args, **given))
    for _ in range(3):
        looks.clear()
        found = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
        assert len(looks) == 1
        with held_together(held_layers(block)):
            value = x
            for _ in range(4):
                k1 = net(value)
                k2 = net(value + 0.25 * k1 / 3)
                k3 = net(value + 0.25 * (k2 - k1 / 3))
                k4 = net(value + 0.25 * (k1 - k2 + k3))
                value = value + 0.25 * (k1 + 3 * (k2 + k3) + k4) / 8
        expected = torch.autograd.grad(value.square().sum(), list(block.parameters()))
        torch.testing.assert_close(found, expected, rtol=5e-2 if adjoint else 1e-9, atol=1e-2 if adjoint else 1e-12)
        with torch.no_grad():
            for p in block.parameters():
                p.add_(1e-3 * p.norm() * torch.randn_like(p) / p.numel() ** 0.5)


@pytest.mark.numeric
def test_contexts_of_neural_odes():
    field = MLP(2, 2, context=3, activation="tanh")
    block = blocks.NeuralODE(field)
    assert block.bounds(Box(-1, 1, shape=(2,)), context=Box(-1, 1)).image.is_bounded
    assert block.bounds(Box(-1, 1, shape=(2,)), context=Box(-1, 1, shape=(2,))).image.is_bounded
