"""The parts of a map, applied one after the other, are the map."""

import pytest
import torch

from bilip import Chain, Invert, models
from catalogue import CATALOGUE, wake


@pytest.mark.parametrize("entry", CATALOGUE, ids=[e.name for e in CATALOGUE])
def test_parts_compose_to_the_map(entry):
    model = wake(entry.make()).double().eval()
    x, context = entry.batch(), entry.contexts()
    walk = x
    for _, part in model.parts():
        walk = part(walk, context)
    z = model(x, context)
    assert torch.allclose(walk, z.reshape(walk.shape), atol=1e-10)


def test_parts_reach_into_the_multi_scale_architecture():
    model = wake(models.glow((3, 8, 8), levels=3, blocks=2, hidden=8, factor_out=True)).double().eval()
    names = [name for name, _ in model.parts()]
    assert len(names) == len(set(names)) > 18
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    z, total = x, 0
    for _, part in model.parts():
        z, log_det = part.forward_and_log_det(z)
        total = total + log_det
    expected, log_det = model.forward_and_log_det(x)
    assert torch.allclose(z, expected)
    assert torch.allclose(total, log_det)
    for _, part in reversed(model.parts()):
        z = part.inverse(z)
    assert torch.allclose(z, x, atol=1e-8)


def test_parts_of_an_inverted_chain():
    chain = models.real_nvp(4, blocks=3).eval()
    inverted = Chain(Invert(chain), shape=(4,))
    z = torch.randn(5, 4)
    walk = z
    for _, part in inverted.parts():
        walk = part(walk)
    assert torch.allclose(walk, chain.inverse(z), atol=1e-6)
