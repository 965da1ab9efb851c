"""CUDA graphs played on a CPU, so that captured steps are tested where there is no GPU; and what tests of recorded runs share.

A graph is the list of the operators that ran while it was recorded, with the very tensors they read and wrote. A replay runs them
again on those tensors: whatever Python had computed in between is frozen, as on a GPU. What a GPU forbids while it records raises
here too: looking at numbers, copying from the host, generators it does not know, work on another stream that nobody has waited for.
Not played: memory that a graph uses twice, and that streams run at the same time.
"""

import contextlib
import json
import math
import sys
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from bilip.errors import Stopped
from bilip.recipes import reproduce
from bilip.recipes.recipe import Work
from bilip.record import read_json
from bilip.training import read_state

aten = torch.ops.aten
FORBIDDEN = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
    "aten::lift_fresh",
    "aten::linalg_inv_ex",  # its library allocates
}


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self):
        self.calls = []

    def replay(self):
        assert self.calls, "this graph was never recorded"
        with torch.no_grad():
            for function, args, kwargs, outputs in self.calls:
                again = function(*args, **kwargs)
                for old, new in zip(outputs, tree_flatten(again)[0], strict=True):
                    if old is not None:
                        old.copy_(new)


class Recorder(TorchDispatchMode):
    def __init__(self, graph):
        super().__init__()
        self.graph = graph
        self.before = {}  # what was written while recording, and what was there: a GPU records without running
        self.state = torch.get_rng_state()

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.set_rng_state(self.state)
        with torch.no_grad():
            for storage, content in self.before.values():
                storage.copy_(content)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tree_flatten((args, kwargs))[0]
        name = function.name().split(".")[0]
        masks = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
            isinstance(t, torch.Tensor) and t.dtype == torch.bool for t in tree_flatten(args[1])[0]
        )
        if name in FORBIDDEN or masks:
            raise RuntimeError(f"operation not permitted when stream is capturing ({name})")
        if any(isinstance(value, torch.Generator) for value in given):
            raise RuntimeError("attempt to capture with a generator that is not registered")
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.is_write:
                for tensor in tree_flatten(value)[0]:
                    self.keep(tensor)
        outputs = function(*args, **kwargs)
        inputs = {t.untyped_storage().data_ptr() for t in given if isinstance(t, torch.Tensor)}
        fresh = [
            t if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in inputs else None
            for t in tree_flatten(outputs)[0]
        ]
        if function._schema.is_mutable or any(t is not None for t in fresh):
            self.graph.calls.append(
                (function, *detached(args, kwargs), [None if t is None else t.detach() for t in fresh])
            )
        return outputs

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.before:
            self.before[storage.data_ptr()] = storage, storage.clone()


def detached(args, kwargs):
    """The same memory, without the history."""
    return tree_map_only(torch.Tensor, lambda t: t.detach(), (args, kwargs))


class Stream:
    """Work runs when it is asked for; what is watched is that a recording ends with none that nobody has waited for."""

    busy: ClassVar = set()

    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, other):
        Stream.busy.discard(other)


@contextlib.contextmanager
def on_stream(stream):
    yield
    Stream.busy.add(stream)


def play_graphs_on_the_cpu(monkeypatch):
    """Let `bilip` believe that this CPU can capture."""
    recording = []

    @contextlib.contextmanager
    def graph(graph, pool=None):
        recording.append(graph)
        Stream.busy.clear()
        try:
            with Recorder(graph):
                yield
                if Stream.busy:
                    raise RuntimeError("capture ended with unjoined work")
        except BaseException:
            graph.calls.clear()
            raise
        finally:
            recording.pop()

    def refuse(name):
        original = getattr(torch.Tensor, name)

        def looked(self, *args):
            if recording:
                raise RuntimeError(f"operation not permitted when stream is capturing ({name})")
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, looked)

    for name in ("tolist", "numpy"):
        refuse(name)
    for name, value in {
        "CUDAGraph": Graph,
        "graph": graph,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": on_stream,
        "set_stream": lambda stream: None,
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: (0, 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.backends.cuda, "preferred_linalg_library", lambda *name: None)
    adamax = sys.modules["torch.optim.adamax"]  # torch.optim hides the module behind the class
    monkeypatch.setattr(adamax, "_get_capturable_supported_devices", lambda **options: ["cpu"])
    from bilip._torch import capturing
    from bilip.training.settings import Settings

    for module in [module for name, module in sys.modules.items() if name.startswith("bilip.")]:
        if vars(module).get("capturing") is capturing:
            monkeypatch.setattr(module, "capturing", lambda x: bool(recording))
    monkeypatch.setattr(
        Settings, "captures", lambda self, device, processes: True if self.capture is None else self.capture
    )


def watched_captures(monkeypatch, device):
    """The captured steps of trainings to come, in the order they are made; played on the CPU where there is no GPU."""
    from bilip.training import run
    from bilip.training.step import CapturedStep

    seen = []

    class Seen(CapturedStep):
        def __init__(self, *args):
            super().__init__(*args)
            seen.append(self)

    monkeypatch.setattr(run, "CapturedStep", Seen)
    if device.type != "cuda":
        play_graphs_on_the_cpu(monkeypatch)
    return seen


def write_images(folder, counts, side=32):
    """Smooth random images with labels, as the files that people have: so many in each, by name."""
    draw = np.random.default_rng(0)
    for name, count in counts.items():
        x = np.clip(draw.normal(128, 40, (count, 8, 8, 3)), 0, 255).repeat(side // 8, 1).repeat(side // 8, 2)
        np.savez(folder / f"{name}.npz", x=x.astype(np.uint8), y=np.arange(count) % 10)


# ---- small runs of recipes


def numbers_of(folder, part):
    """What a run of the size `quick` has measured for a part, as text: NaN equals itself there."""
    return json.dumps(read_json(folder / "ours.json")["runs"]["quick"]["measured"]["0"][part])


def stop_and_resume(recipe, part, folder, monkeypatch, *, steps, **options):
    """Run a part until its time is up after so many steps, and let the same command go on."""
    clock = iter([0.0] * (steps - 1) + [math.inf])
    monkeypatch.setattr("bilip.training.run.Run._shared_clock", lambda run: (next(clock),))
    with pytest.raises(Stopped, match=r"time is up.* 0 of 1 parts are measured; the same command goes on"):
        reproduce(recipe, out=folder, parts=[part], minutes=1e6, **options)
    monkeypatch.undo()
    piece = folder / "pieces" / "quick" / "seed0" / part
    assert read_state(piece / "last.safetensors")[1]["step"] == steps
    assert not (piece / "measured.json").exists()
    reproduce(recipe, out=folder, parts=[part], **options)


def check_captured(recipe, part, config, folder, data, device, monkeypatch, *, replays):
    """Captured steps of a flow, more than `replays` of them replayed, end as eager ones."""
    eager = recipe.run(part, config, Work(folder / "eager", 1, "cpu", data=data))
    seen = watched_captures(monkeypatch, device)
    captured = recipe.run(part, config, Work(folder / "captured", 1, device.type, data=data))
    assert seen[0].replays > replays
    assert not seen[0].failed
    assert sorted(captured.numbers) == sorted(eager.numbers)
    if device.type == "cpu":
        assert captured.numbers["test_bits"] == pytest.approx(eager.numbers["test_bits"], rel=1e-3)
