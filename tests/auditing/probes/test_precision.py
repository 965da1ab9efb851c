import math

import pytest
import torch

from bilip import Bijection, Chain
from bilip.auditing.probes.precision import FORMATS, FormatModel, Precision, condition_numbers
from bilip.auditing.subject import Subject
from bilip.errors import BilipError, InputError
from bilip.models import glow, real_nvp, residual_flow
from catalogue import Map, scaled

pytestmark = pytest.mark.numeric

EPS = {fmt.name: fmt.eps for fmt in FORMATS}
CPU_FORMATS = ["float64", "float32", "bfloat16", "float16"]


def rows(measurement):
    return {row["rung"]: row for row in measurement.rows}


class Linear(Bijection):
    """X times a matrix with known singular values."""

    def __init__(self, *sigmas):
        super().__init__()
        n = len(sigmas)
        u, v = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))[0] for _ in range(2))
        self.matrix = torch.nn.Parameter((u * torch.tensor(sigmas, dtype=torch.float64)) @ v)

    def forward(self, x, context=None):
        return x @ self.matrix

    def inverse(self, z, context=None):
        return torch.linalg.solve(self.matrix, z, left=False)


class Broken(Bijection):
    """No map back at all."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, context=None):
        return x

    def inverse(self, z, context=None):
        return 0.9 * z


class OnlyWide(Broken):
    """Refuses parameters that are rounded to 16 bits."""

    def __init__(self):
        super().__init__()
        torch.nn.init.constant_(self.weight, 1 / 3)

    def forward(self, x, context=None):
        if abs(float(self.weight) - 1 / 3) > 1e-6:
            raise BilipError("not in 16 bits")
        return x

    def inverse(self, z, context=None):
        return z


def test_more_bits_cure_an_affine_flow_that_float32_cannot_invert():
    torch.manual_seed(0)
    model, x = scaled(real_nvp(8, blocks=16), 2.1), torch.rand(64, 8)
    m = Precision().measure(model, x)
    found = rows(m)
    assert list(found) == CPU_FORMATS
    assert m["own"] == "float32"
    assert m["cure"] == "float64"
    assert found["float32"]["error_max"] == math.inf
    assert 0 < found["float32"]["share_non_finite"] < 1
    assert found["float64"]["well"]
    assert not found["float32"]["well"]
    # a condition number beyond 1e4 is more than float32's half of the digits
    assert found["float32"]["predicted"] > 100 * math.sqrt(EPS["float32"])
    for name in ("float32", "bfloat16", "float16"):
        assert found[name]["holds"]
        assert 0 < found[name]["reference"] <= 64
        # the triangle inequality leaves room for what float64 gets wrong, at most half of its digits
        assert found[name]["left_side"] <= found[name]["right_side"] * (1 + 1e-6)
    assert found["float32"]["lip_inverse"] > 30


def test_nothing_to_cure_in_an_additive_flow():
    m = Precision(samples=16).measure(real_nvp(4, blocks=4, coupling="additive"), torch.randn(20, 4))
    assert m["cure"] == m["own"] == "float32"
    assert m["samples"] == 16
    errors = [row["error_max"] for row in m.rows]
    assert errors[0] < errors[1] < errors[3] < errors[2]  # float16 has more digits than bfloat16
    assert all(row["well"] for row in m.rows)


def test_a_linear_map_gives_the_numbers_it_has():
    model = Linear(1.0, 1.0, 1e-3).float()
    m = Precision(samples=32).measure(model, torch.randn(32, 3))
    row = rows(m)["float32"]
    # the parameters are rounded to float32: the singular values move by 1e-7 of the largest
    assert row["predicted"] == pytest.approx(1e3 * EPS["float32"], rel=1e-3)
    assert m["condition"] == pytest.approx(1e3, rel=1e-3)
    assert 1 - 1e-3 <= row["lip_inverse"] <= 1e3 * (1 + 1e-3)  # between the gains of the inverse
    # three products of numbers of size one: a forward error of a few units in the last place
    assert 0 < row["delta"] < 8 * EPS["float32"]
    assert row["holds"]


def test_delta_is_the_error_of_the_arithmetic_alone():
    """A float64 model in float32: the rounding of its parameters is no part of delta."""
    x = torch.randn(16, 3, dtype=torch.float64)
    own = Linear(1.0, 1.0, 0.5)
    m = Precision(samples=16).measure(own, x)
    assert m["own"] == "float64"
    assert m["cure"] == "float64"
    half = rows(m)["bfloat16"]
    model = FormatModel(Subject.of(own), FORMATS[3])
    rounded = own.matrix.detach().to(torch.bfloat16).double()
    assert model.reference.bijection.matrix.equal(rounded)
    # outputs are rounded once, to bfloat16: half a unit in the last place of each entry
    assert half["delta"] <= EPS["bfloat16"] / 2 * float((x @ rounded).norm(dim=1).max()) * 1.01


def test_emulated_activations_are_numbers_of_the_half_type_between_blocks():
    seen = []
    watches = [Map(lambda x: seen.append(x) or x / 3, lambda z: seen.append(z) or z * 3) for _ in range(2)]
    model = Chain(*watches, shape=(2,))
    for fmt in FORMATS[3:]:
        seen.clear()
        half = FormatModel(Subject.of(model), fmt)
        z = half.forward(torch.rand(4, 2)).value
        half.inverse(z)
        assert len(seen) == 4
        assert all(v.dtype == torch.float32 and v.equal(v.to(fmt.dtype).float()) for v in (*seen, z))


def test_float16_overflows_and_bfloat16_does_not():
    class Large(Broken):
        def forward(self, x, context=None):
            return x * 1e5

        def inverse(self, z, context=None):
            return z / 1e5

    found = rows(Precision(samples=8).measure(Large(), torch.ones(8, 2)))
    assert found["float16"]["share_non_finite"] == 1
    assert found["float16"]["holds"] is None  # nothing finite to compare
    assert found["bfloat16"]["share_non_finite"] == 0


def test_without_a_float64_reference_nothing_is_claimed():
    m = Precision(samples=8).measure(Broken(), torch.ones(8, 2))
    assert m["cure"] == "none"
    assert rows(m)["float32"]["reference"] == 0
    assert rows(m)["float32"]["holds"] is None
    assert rows(m)["float32"]["delta"] is None


def test_samples_for_which_a_rung_raises_are_counted_in_a_note():
    class Picky(Broken):
        def inverse(self, z, context=None):
            if bool((z > 2).any()):
                raise ValueError("too large")
            return z

    m = Precision(samples=4, condition_samples=0).measure(Picky(), torch.tensor([[0.0], [1.0], [2.0], [3.0]]))
    assert rows(m)["float32"]["share_non_finite"] == 0.25
    assert "float32: the model raised for 1 of 4 samples (ValueError: too large)" in m.notes


def test_a_rung_that_the_model_refuses_is_left_out_with_a_note():
    m = Precision(samples=8).measure(OnlyWide(), torch.ones(8, 2))
    assert [row["rung"] for row in m.rows] == ["float64", "float32"]
    assert sum("not measured: not in 16 bits" in note for note in m.notes) == 2
    assert m["cure"] == "float32"


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (residual_flow(2, blocks=2, hidden=(16,)), torch.rand(8, 2)),
        (glow((1, 4, 4), levels=1, blocks=1, hidden=4, actnorm="identity"), torch.rand(8, 1, 4, 4)),
        (glow((1, 8, 8), levels=2, blocks=1, hidden=4, actnorm="identity", factor_out=True), torch.rand(4, 1, 8, 8)),
    ],
    ids=["residual", "image", "factor-out"],
)
def test_other_models_have_all_rungs_too(model, x):
    m = Precision(samples=4).measure(model, x)
    assert [row["rung"] for row in m.rows] == CPU_FORMATS
    assert m["cure"] == "float32"
    assert all(row["holds"] for row in m.rows[1:])
    assert sum("emulated" in note for note in m.notes) == 2


def test_contexts_are_rounded_with_the_data():
    source = (torch.randn(6, 2), torch.randn(6, 1))
    m = Precision(samples=6).measure(real_nvp(2, blocks=2, hidden=(8,), context=1), source)
    assert all(row["holds"] for row in m.rows[1:])


def test_condition_numbers_are_those_of_the_jacobian():
    subject = Subject.of(scaled(real_nvp(4, blocks=4, hidden=(16,)), 1.5))
    x = torch.randn(3, 4)
    found = condition_numbers(subject, x)
    double = subject.copy_in(torch.float64).bijection
    for k in range(3):
        jacobian = torch.autograd.functional.jacobian(lambda v: double(v[None])[0], x[k].double())
        assert float(found[k]) == pytest.approx(float(torch.linalg.cond(jacobian)), rel=1e-6)


def test_arguments():
    with pytest.raises(InputError, match="samples=0"):
        Precision(0)
    assert Precision(4, condition_samples=0).measure(real_nvp(2), torch.randn(4, 2)).rows[0]["predicted"] is None
