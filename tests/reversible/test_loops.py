"""In loops of one's own: two processes with half a batch each, and a captured step as docs/reversible.md has it, on a CPU played."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bilip import models
from bilip.reversible import Reversible, angle
from catalogue import squash, wake
from recorded import play_graphs_on_the_cpu


def make():
    torch.manual_seed(0)
    model = wake(models.glow((3, 8, 8), levels=2, blocks=2, hidden=8), 0.1).double()
    return model, torch.rand(8, 3, 8, 8, dtype=torch.float64)


class Loss(torch.nn.Module):
    def __init__(self, flow):
        super().__init__()
        self.flow = flow

    def forward(self, x):
        z, log_det = self.flow.forward_and_log_det(x)
        return (z.flatten(1).square().sum(1) / 2 - log_det).mean()


def half(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        model, x = make()
        parallel = DistributedDataParallel(Loss(Reversible(model)))
        for _ in range(2):  # twice: the second pass is that of a training run under way
            model.zero_grad()
            parallel(x.chunk(2)[rank]).backward()
        torch.save([p.grad for p in model.parameters()], f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="torch was built without gloo")
@pytest.mark.process
@pytest.mark.slow
def test_two_processes_have_the_gradient_of_one(tmp_path):
    model, x = make()
    Loss(model)(x).backward()
    stored = [p.grad for p in model.parameters()]
    torch.multiprocessing.spawn(half, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    scale = max(float(g.abs().max()) for g in stored)
    for a, b in zip(first, stored, strict=True):
        assert float((a - b).abs().max()) <= 1e-10 * scale


MODELS = {
    "vectors": ((4,), lambda: models.real_nvp(4, blocks=6)),
    "images": ((2, 4, 4), lambda: models.glow((2, 4, 4), levels=1, blocks=3, hidden=8)),
}


@pytest.mark.numeric
@pytest.mark.parametrize("name", MODELS)
def test_replayed_gradients_and_the_flag(name, device, monkeypatch):
    if device.type != "cuda":
        play_graphs_on_the_cpu(monkeypatch)
    shape, build = MODELS[name]
    trunk = build().to(device)
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
