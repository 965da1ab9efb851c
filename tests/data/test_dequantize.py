import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilip.data import cell, dequantize
from bilip.errors import InputError


@given(bits=st.integers(1, 16), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_dequantized_levels_stay_in_their_cell(bits, seed):
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(2**bits, (64, 3), generator=generator)
    levels[0, 0], levels[0, 1] = 0, 2**bits - 1
    x = dequantize(levels, bits, generator)
    assert x.dtype == torch.float32
    assert torch.equal((x.double() * 2**bits).floor().long(), levels)
    found = cell(x, bits)
    assert found.half == 0.5 / 2**bits
    assert torch.equal(found.center.double(), (levels.double() + 0.5) / 2**bits)
    assert bool(((x - found.center).abs() <= found.half).all())


def test_noise_that_would_round_into_the_next_cell(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 1 - 2**-24))
    levels = torch.tensor([[65535.0]])
    assert float(dequantize(levels, 16)) < 1


def test_noise_is_uniform_and_seeded():
    levels = torch.zeros(100_000, 1, dtype=torch.uint8)
    x = dequantize(levels, 8, torch.Generator().manual_seed(0)) * 256
    assert abs(float(x.mean()) - 0.5) < 5 / math.sqrt(12 * len(x))
    assert torch.equal(x, dequantize(levels, 8, torch.Generator().manual_seed(0)) * 256)


@pytest.mark.parametrize(
    ("levels", "bits", "message"),
    [
        (torch.tensor([256]), 8, "expected 0 to 255"),
        (torch.tensor([-1]), 8, "levels run from -1"),
        (torch.tensor([200], dtype=torch.uint8), 5, "pixels // 8"),
        (torch.tensor([0.5]), 8, "whole numbers"),
        (torch.tensor([math.nan]), 8, "whole numbers"),
        (torch.tensor([True]), 8, "torch.bool"),
        (torch.tensor([0]), 0, "from 1 to 16"),
        (torch.tensor([0]), 2.0, "from 1 to 16"),
    ],
)
def test_bad_levels(levels, bits, message):
    with pytest.raises(InputError, match=message):
        dequantize(levels, bits)


@pytest.mark.parametrize("x", [torch.tensor([1.0]), torch.tensor([-1e-9]), torch.tensor([math.nan]), torch.tensor([0])])
def test_cell_wants_the_unit_interval(x):
    with pytest.raises(InputError, match=r"\[0, 1\)"):
        cell(x)
