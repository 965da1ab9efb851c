import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton: kernels for GPUs are played on the CPU

# The same examples on every run, so that one commit is either green or red; `make soak` searches with fresh ones.
hypothesis.settings.register_profile("same", max_examples=40, derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", max_examples=1000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device the maps run on")
    parser.addoption("--dtype", default="float32", choices=["float32", "float64"], help="dtype of the round-trip tests")


@pytest.fixture
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def dtype(request):
    return getattr(torch, request.config.getoption("--dtype"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
