"""A loop of one's own with a captured step, as docs/reversible.md has it. On a CPU the graph is played (`recorded.py`)."""

import copy

import pytest
import torch

from bilip import models
from bilip.reversible import Reversible, angle
from recorded import play_graphs_on_the_cpu
from squashed import squash

pytestmark = pytest.mark.numeric

MODELS = {
    "vectors": ((4,), lambda: models.real_nvp(4, blocks=6)),
    "images": ((2, 4, 4), lambda: models.glow((2, 4, 4), levels=1, blocks=3, hidden=8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_replayed_gradients_and_the_flag(name, device, monkeypatch):
    if device.type != "cuda":
        play_graphs_on_the_cpu(monkeypatch)
    shape, make = MODELS[name]
    trunk = make().to(device)
    trunk(torch.randn(16, *shape, device=device))  # ActNorms look at their first batch
    saving, x = Reversible(trunk), torch.empty(16, *shape, device=device)

    def gradients(f=saving):
        z, log_det = f.forward_and_log_det(x)
        (z.flatten(1).square().sum(1) / 2 - log_det).mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            x.normal_()
            gradients()
    torch.cuda.current_stream().wait_stream(side)
    trunk.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients()
    flag, couplings = saving.drift_flag(), [part for part in trunk if hasattr(part, "t")]
    coupling = couplings[len(couplings) // 2]

    def apart():
        """From the stored gradients of the same batch."""
        twin = copy.deepcopy(trunk)
        twin.zero_grad(set_to_none=True)
        gradients(twin)
        pairs = [
            (p.grad, q.grad) for p, q in zip(trunk.parameters(), twin.parameters(), strict=True) if q.grad is not None
        ]
        return angle(*zip(*pairs, strict=True))

    for sigma in (None, None, 1e-9):
        if sigma:
            squash(coupling, sigma)  # in place, which the graph sees
        x.normal_()
        flag.zero_()
        graph.replay()
        assert (float(flag) > 1) == bool(sigma)
        if sigma:
            assert apart() > 1e-2
            flag.zero_()
            trunk.zero_grad(set_to_none=False)
            gradients()
        assert apart() < 1e-3
    assert saving.report().repaired == 1
