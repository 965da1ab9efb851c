"""`bilip.advise`: what it allows is proved by bilip's own bounds for the code that it gives."""

from __future__ import annotations

import pytest
import torch

import bilip
from bilip.errors import InputError


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("depth", [2, 6])
def test_the_code_it_gives_has_no_larger_bound_than_it_states(depth, dtype):
    torch.manual_seed(0)
    for design in bilip.advise(depth, dtype, 4.0).designs:
        model = eval(design.code, {"bilip": bilip})
        if design.blocks == "affine":  # where values stay in the box, block by block
            bound = model[0].bounds(bilip.Box(-4, 4, shape=(2,)))
            stated = design.condition ** (1 / depth)
        else:
            bound, stated = model.bounds(), design.condition
        assert bound.forward * bound.inverse <= stated * (1 + 1e-6), design
        assert design.error <= 3.46e-4


def test_more_bits_and_fewer_blocks_allow_more():
    def constants(*given):
        return [
            next(iter(d.constants.values())) if d.blocks != "affine" else d.constants["nets"]
            for d in bilip.advise(*given).designs
        ]

    for more, less in ((("float64",), ("float32",)),):
        assert all(a > b for a, b in zip(constants(16, *more), constants(16, *less), strict=True))
    assert all(a > b for a, b in zip(constants(4), constants(16), strict=True))


def test_a_round_trip_keeps_what_is_advised():
    torch.manual_seed(0)
    advice = bilip.advise(24)
    model = eval(advice.designs[0].code, {"bilip": bilip})
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(50.0)  # whatever the weights: the nets are held
        x = torch.rand(500, 2) * 8 - 4
        error = (model.inverse(model(x)) - x).abs().max()
    assert float(error) <= 4 * advice.tolerance


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0,), "whole number of blocks"),
        ((8, "int32"), "floating dtype"),
        ((8, "float32", -1.0), "positive number"),
        ((8, "float32", (2.0, 1.0)), "positive number"),
        ((64, "float16"), "more bits or fewer blocks"),
    ],
)
def test_bad_input_is_one_line(given, said):
    with pytest.raises(InputError, match=said):
        bilip.advise(*given)
    with pytest.raises(InputError, match="between 0 and 1"):
        bilip.advise(8, tolerance=2.0)
