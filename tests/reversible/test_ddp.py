"""Two processes with half a batch each have the gradient of one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bilip import models
from bilip.reversible import Reversible
from catalogue import wake


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
