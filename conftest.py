"""Options and fixtures of all tests and doctests: device, dtype, seed and threads."""

import os
import random

import hypothesis
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton: kernels for GPUs are played on the CPU

# The same examples on every run, so that one commit is either green or red; `make soak` searches with fresh ones.
hypothesis.settings.register_profile("same", max_examples=40, derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", max_examples=1000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


TUTORIALS = ("nan.md", "choosing.md", "memory.md", "gate.md")  # they train models and start processes


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device the maps run on")
    parser.addoption("--soak", action="store_true", help="the longest tests too, as `make soak` and `make soak-cpu` do")
    parser.addoption("--dtype", default="float32", choices=["float32", "float64"], help="dtype of the round-trip tests")
    parser.addoption("--seed", default=0, type=int, help="seed of tests and doctests that do not set one")
    parser.addoption("--threads", default=None, type=int, help="call torch.set_num_threads with this number first")


def pytest_configure(config):
    if (threads := config.getoption("--threads")) is not None:
        torch.set_num_threads(threads)


def pytest_collection_modifyitems(config, items):
    """The examples of the guides print numbers; what takes half a minute and starts processes waits for `--soak`."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.numeric)
        if item.path.name in TUTORIALS:
            item.add_marker(pytest.mark.soak)
    long = [] if config.getoption("--soak") else [item for item in items if item.get_closest_marker("soak")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def dtype(request):
    return getattr(torch, request.config.getoption("--dtype"))


@pytest.fixture(autouse=True)
def _seed(request):
    seed = request.config.getoption("--seed")
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
