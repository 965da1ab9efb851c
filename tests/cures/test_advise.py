"""`bilip.advise`: what it allows is proved by bilip's own bounds for the code that it gives."""

from __future__ import annotations

import pytest
import torch

import bilip
from bilip.errors import InputError


@pytest.mark.parametrize(
    ("depth", "dtype", "box"),
    [(2, "float32", 4.0), (6, "float64", 4.0), (16, "float32", 1.0), (23, "float32", [-3.0, 2.0]), (1, "float16", 4.0)],
)
def test_the_code_it_gives_has_no_larger_bound_than_it_states(depth, dtype, box):
    torch.manual_seed(0)
    advice = bilip.advise(depth, dtype, box)
    for design in advice.designs:
        model = eval(design.code, {"bilip": bilip})
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(50.0)  # whatever the weights: nets at the constant that they are held to
        if design.blocks == "affine":  # where values stay in the box, block by block
            bound = model[0].bounds(bilip.Box(-advice.box, advice.box, shape=(2,)))
            stated = design.condition ** (1 / depth)
            assert model[0].scale.low == design.constants["scale from"]
        else:
            bound, stated = model.bounds(), design.condition
        assert bound.forward * bound.inverse <= stated * (1 + 1e-6), design
        assert design.error <= advice.tolerance


def test_the_tolerance_is_that_of_audits():
    assert bilip.advise(1, "float16").tolerance == pytest.approx(2.0**-5)
    assert bilip.advise(1, "float64").tolerance == bilip.advise(1).tolerance == pytest.approx(2.0**-11.5)


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
        ((8, "float32", "wide"), "positive number"),
        ((8, "float32", [1.0]), "positive number"),
    ],
)
def test_bad_input_is_one_line(given, said):
    with pytest.raises(InputError, match=said):
        bilip.advise(*given)
    with pytest.raises(InputError, match="between 0 and 1"):
        bilip.advise(8, tolerance=2.0)
    with pytest.raises(InputError, match="2 or more"):
        bilip.advise(8, features=1)
