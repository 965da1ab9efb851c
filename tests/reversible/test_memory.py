"""Activation memory: flat in depth, in what a graph keeps and in what a process occupies; what is written in place harms nobody."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bilip import Chain, blocks, models
from bilip.reversible import Guard, Reversible
from catalogue import wake

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "reversible.py"


def kept(wrap, blocks, *, inverse=False, log_det=True):
    """Bytes that a graph keeps for its backward pass: storages, each once, other than parameters."""
    torch.manual_seed(0)
    model = wake(models.glow((3, 8, 8), levels=2, blocks=blocks, hidden=8), 0.01)
    f, x = wrap(model), torch.rand(4, 3, 8, 8)
    x = model(x).detach() if inverse else x
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    alive = []  # so that no address is used again

    def pack(t):
        alive.append(t)
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        method = (
            f"{'inverse' if inverse else 'forward'}_and_log_det" if log_det else ("inverse" if inverse else "forward")
        )
        value = getattr(f, method)(x)
    z = value[0] if log_det else value
    (z.square().sum() + (value[1].sum() if log_det else 0)).backward()
    assert all(p.grad is not None for p in model.parameters())
    return sum(found.values())


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("log_det", [False, True], ids=["value", "log_det"])
def test_a_graph_keeps_the_two_ends(inverse, log_det):
    options = {"inverse": inverse, "log_det": log_det}
    for wrap in (Reversible, lambda m: Reversible(m, guard=None), lambda m: Reversible(m, memory="checkpoint")):
        shallow, deep = kept(wrap, 3, **options), kept(wrap, 12, **options)
        assert shallow == deep == 2 * 4 * 3 * 8 * 8 * 4  # x and z
    shallow, deep = (kept(lambda m: m, blocks, **options) for blocks in (3, 12))
    assert 3.5 < deep / shallow < 4.5


def test_anchors_are_kept_and_counted():
    one = 4 * 3 * 8 * 8 * 4

    def anchored(model):
        f = Reversible(model, Guard(budget=2 * one))
        f._watch.anchors = {(False, 5): one, (False, 9): one}
        f._watch.names = {(False, 5): "5", (False, 9): "9"}
        return f

    assert kept(anchored, 4) == (2 + 2) * one


def resident(contender, blocks):
    """Resident bytes of forward and backward pass in a process of its own, less the gradients of the parameters."""
    settings = {"seed": 0, "hidden": 32, "device": "cpu", "batch": 128, "loss": "flow", "tf32": False, "threads": 1}
    task = {"kind": "memory", "settings": settings, "blocks": blocks, "coupling": "affine", "contenders": [contender]}
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(BENCHMARK), "--work", json.dumps(task)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])[contender]["activations"]


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc to read the peak of a process")
@pytest.mark.process
@pytest.mark.slow
def test_a_process_occupies_the_same_at_any_depth():
    shallow, deep = resident("reversible", 16), resident("reversible", 32)  # below 16, fewer 1x1 matrices are at hand
    assert deep < 1.15 * shallow  # pages, allocator and a fingerprint for each block: 3 % with torch 2.13
    assert resident("stored", 16) > 4 * deep


class Added(nn.Module):
    """A net with a parameter of the whole shape of its output: for one sample its gradient is the very one that comes in."""

    def __init__(self, channels, outputs):
        super().__init__()
        self.conv = nn.Conv2d(channels, outputs, 1)
        self.whole = nn.Parameter(torch.zeros(1, outputs, 4, 4))
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach())
        return self.conv(x) + self.whole


def mixed(kind):
    torch.manual_seed(0)
    parts = []
    for _ in range(4):
        coupling = blocks.AdditiveCoupling(Added(2, 2)) if kind == "additive" else blocks.AffineCoupling(Added(2, 4))
        parts += [blocks.ActNorm(4, start="identity"), blocks.InvertibleConv1x1(4), coupling]
    return Chain(*parts).double()


@pytest.mark.numeric
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("kind", ["additive", "affine"])
def test_a_gradient_that_is_handed_on_is_not_written_to(kind, inverse):
    model, x = mixed(kind), torch.randn(1, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    weights, found = torch.randn(1, 4, 4, 4, dtype=torch.float64), []
    for bijection in (model, Reversible(model)):
        z, log_det = (bijection.inverse_and_log_det if inverse else bijection.forward_and_log_det)(x)
        found.append(torch.autograd.grad((z * weights).sum() + log_det.sum(), [x, *model.parameters()]))
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", ["additive", "affine"])
def test_what_nets_have_seen_stays_as_it_was(kind):
    model, x = mixed(kind), torch.randn(3, 4, 4, 4, dtype=torch.float64)
    model(x)
    nets = [part.t for part in model if hasattr(part, "t")]
    true = [net.seen.pop().clone() for net in nets]
    saving = Reversible(model)
    z = saving(x)
    z.sum().backward()
    for net, value in zip(nets, true, strict=True):
        assert len(net.seen) == 2  # on the way there and on the way back
        assert all(torch.allclose(seen.detach(), value, atol=1e-12) for seen in net.seen)


@pytest.mark.numeric
@pytest.mark.parametrize("kind", ["additive", "affine"])
@pytest.mark.parametrize("inverse", [False, True])
def test_anchors_are_not_written_to(kind, inverse):
    model, x = mixed(kind), torch.randn(3, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    saving = Reversible(model)
    run = (lambda b: b.inverse_and_log_det(x)) if inverse else (lambda b: b.forward_and_log_det(x))
    stored = torch.autograd.grad(run(model)[0].square().sum(), [x, *model.parameters()])
    for k in range(1, 8):  # ActNorm and convolution are one unit
        saving._watch.anchors, saving._watch.names = {(inverse, k): 0}, {(inverse, k): str(k)}
        z, _ = run(saving)
        first, again = (
            torch.autograd.grad(z.square().sum(), [x, *model.parameters()], retain_graph=True) for _ in range(2)
        )
        for a, b, c in zip(stored, first, again, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
            assert torch.equal(b, c)
