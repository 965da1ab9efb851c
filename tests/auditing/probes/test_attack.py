import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilip.auditing.probes.attack import Attack
from bilip.auditing.probes.attack_methods import METHODS, Route
from bilip.auditing.probes.region import PAPER_STEP, Region
from bilip.auditing.round_trip import distances, typical_norm
from bilip.blocks import AffineCoupling
from bilip.data import as_source
from bilip.errors import InputError, NotMeasured
from bilip.models import glow, real_nvp, residual_flow
from catalogue import Map, scaled, zeros

pytestmark = pytest.mark.numeric

EVERY_METHOD = tuple(METHODS)
LIMIT = math.sqrt(torch.finfo(torch.float32).eps)


def plain_round_trip(model, x, like=None):
    with torch.no_grad():
        typical = typical_norm(x if like is None else like)
        return distances(x, model.eval().inverse(model(x).clone()), typical).relative


class Planted(Map):
    """The identity, but for what `back` does to it."""

    def __init__(self, back, out=torch.clone):
        super().__init__(out, back, zeros)
        self.weight = torch.nn.Parameter(torch.zeros(1))


# ---- the box


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=6),
    moves=st.lists(st.floats(-2, 2, width=32) | st.just(math.nan) | st.just(math.inf), min_size=6, max_size=6),
    bits=st.integers(1, 8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_clamped_point_has_the_level_of_its_sample(values, moves, bits, dtype):
    x = torch.tensor([values], dtype=dtype)
    region = Region.cell(x, bits)
    y = region.clamp(x + torch.tensor([moves[: len(values)]], dtype=dtype))
    levels = (x.double() * 2**bits).floor().clamp_max(2**bits - 1)  # 1 belongs to the last cell
    assert y.dtype == dtype
    assert bool(region.contains(y).all())
    assert (y.double() * 2**bits).floor().equal(levels)
    assert ((region.start.double() - (levels + 0.5) / 2**bits).abs() == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3, width=16), min_size=1, max_size=4),
    move=st.floats(-1e4, 1e4, width=16),
    radius=st.floats(1e-3, 10),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_clamped_point_is_within_the_radius(values, move, radius, dtype):
    x = torch.tensor([values], dtype=dtype)
    y = Region.ball(x, radius).clamp(x + move)
    # the ends are rounded to the dtype once
    slack = torch.finfo(dtype).eps * (x.double().abs() + radius)
    assert bool(((y.double() - x.double()).abs() <= radius + slack).all())


def test_cells_may_start_elsewhere_and_refuse_other_data():
    shifted = Region.cell(torch.tensor([[-0.5, 0.49]]), 5, origin=-0.5)
    assert shifted.start.tolist() == [[-0.5 + 0.5 / 32, 0.5 - 0.5 / 32]]
    with pytest.raises(NotMeasured, match="radius="):
        Region.cell(torch.tensor([[-0.1]]), 5)
    m = Attack(bits=5).measure(real_nvp(2, blocks=1), torch.randn(50, 2))
    assert "for data in [0, 1]" in m.reason


def test_default_box_is_the_papers_share_of_the_range():
    x = torch.tensor([[-4.0, 0.0], [4.0, 1.0]])
    region = Attack()._region(_subject(real_nvp(2)), as_source("x", x), x)
    assert region.radius == 8 / 64
    assert float(region.low.min()) == -4  # cut to the range
    assert float(region.high.max()) == 4
    alike = Attack()._region(_subject(real_nvp(2)), as_source("x", torch.ones(3, 2)), torch.ones(3, 2))
    assert float((alike.high - alike.low).min()) == 2 / 64  # no range: the radius itself, and no cut
    assert Region.cell(x.abs() / 8, 5).step == pytest.approx(PAPER_STEP)
    assert region.step / region.radius == pytest.approx(5e-4 * 64)


def test_a_ball_stays_in_the_natural_domain():
    model = residual_flow(2, blocks=1, hidden=(8,), logit=0.05)
    x = torch.tensor([[0.01, 0.99]])
    region = Attack(radius=0.1)._region(_subject(model), as_source("x", x), x)
    assert float(region.low.min()) == 0
    assert float(region.high.max()) == 1


def _subject(model):
    from bilip.auditing.subject import Subject

    return Subject.of(model)


@pytest.mark.parametrize("method", EVERY_METHOD)
@pytest.mark.parametrize("step", [None, 1.0])
def test_no_point_that_a_method_looks_at_leaves_its_cell(method, step, monkeypatch):
    model, x = scaled(real_nvp(4, blocks=6, hidden=(16,)), 2.0), torch.rand(3, 4)
    seen, judge = [], Route.judge
    monkeypatch.setattr(Route, "judge", lambda self, x: seen.append(x.clone()) or judge(self, x))
    result = Attack(bits=5, step=step, steps=24, methods=[method]).search(model, x)
    levels = (x * 32).floor()
    assert len(seen) >= 20
    assert all((y * 32).floor().equal(levels) for y in seen)
    assert all(bool(result.region.contains(y).all()) and y.dtype == torch.float32 for y in seen)


# ---- what is found


def test_gain_breaks_an_affine_flow_that_is_fine_on_its_data():
    torch.manual_seed(0)
    model, x = scaled(real_nvp(64, blocks=12), 2.05), torch.rand(4, 64)
    assert float(plain_round_trip(model, x).max()) < LIMIT / 4
    attack = Attack(radius=0.25, step=0.25 / 16, steps=32, methods=("gain", "random"))
    result = attack.search(model, x)
    assert int(result.runs["gain"].success.sum()) >= 2
    # 64 dimensions: a search without gradients does not keep up
    assert float(result.runs["gain"].errors.median()) > 10 * float(result.runs["random"].errors.median())
    # success is what the plain round trip says, sample by sample; batches of one size round alike
    again = plain_round_trip(model, result.points, x)
    assert result.errors.equal(torch.where(again.isfinite(), again, torch.inf))
    assert result.success.equal(result.errors > LIMIT)
    assert result.trajectory.shape == (33, 4)


def test_random_search_breaks_a_small_affine_flow_without_gradients():
    """z2 = x2 / 2 + 1 on the data; where x1 > 0.9 the scale goes to 0, and the 1 swallows the digits of x2."""
    net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 2))
    values = [[[1.0]], [-0.9], [[0.0], [-200.0]], [1.0, 0.0]]
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), values, strict=True):
            parameter.copy_(torch.tensor(value))
    model, x = AffineCoupling(net, scale="sigmoid"), 0.75 + 0.1 * torch.rand(8, 2)
    assert float(plain_round_trip(model, x).max()) < LIMIT / 100
    m = Attack(radius=0.25, steps=40, methods=["random"]).measure(model, x)
    assert m["success"]
    assert m.rows[0]["worst_relative"] > 10 * LIMIT
    assert m["worst_relative"] == m.rows[0]["worst_relative"]
    errors = m.series["random"]
    assert all(a <= b for a, b in itertools.pairwise(errors))  # it keeps what is worse


@pytest.mark.parametrize("box", [{"bits": 5}, {"radius": 0.5}, {"box": "latent"}])
def test_no_method_breaks_an_additive_flow(box):
    model = scaled(real_nvp(4, blocks=8, hidden=(16, 16), coupling="additive"), 1.5)
    m = Attack(**box, steps=20, samples=4, methods=EVERY_METHOD).measure(model, torch.rand(16, 4))
    assert [row["method"] for row in m.rows] == list(EVERY_METHOD)
    assert not m["success"]
    # 8 blocks and their inverses round 16 times; nets with weights of a few units may multiply that by some ten
    assert m["worst_relative"] < 16 * 30 * torch.finfo(torch.float32).eps
    assert not any(row["left_box"] for row in m.rows)


def test_gain_goes_through_the_implicit_inverse_of_a_residual_flow():
    model = residual_flow(2, blocks=2, hidden=(16, 16))
    m = Attack(bits=5, steps=12, samples=4, methods=("gain", "roundtrip", "singular")).measure(model, torch.rand(4, 2))
    assert [row["method"] for row in m.rows] == ["gain", "roundtrip", "singular"]
    assert not m["success"]
    assert not any("gain" in note for note in m.notes)  # every step had a gradient
    assert any("rounding noise" in note for note in m.notes)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_gain_climbs_the_exact_gain():
    """F = (x1, x2 exp(x1)): the inverse's gain grows towards smaller x1, and only there."""
    model = Planted(lambda z: _shear(z, -1), lambda x: _shear(x, 1))
    assert float(_last_point(model, torch.tensor([[-4.0, 0.0]]), radius=1.0, step=0.1)[0, 0]) == -5.0


def _shear(x, sign):
    return torch.stack([x[:, 0], x[:, 1] * torch.exp(sign * x[:, 0])], 1)


def _last_point(model, x, **options):
    """Where the search went: the points found are the worst by rounding."""
    seen, judge = [], Route.judge
    try:
        Route.judge = lambda self, x: seen.append(x.clone()) or judge(self, x)
        result = Attack(**options, steps=15, methods=["gain"]).search(model, x)
    finally:
        Route.judge = judge
    assert result.runs["gain"].random_steps == 0
    return seen[-1]


def test_gain_follows_the_direction_that_the_inverse_stretches_most():
    """One coordinate is stretched most, and more towards larger x0; fourteen less, together more than it, towards smaller x0."""
    rates = torch.tensor([-1.0] + [1.0] * 14)
    logs = torch.tensor([-5.0] + [-3.9] * 14)

    def move(x, sign):
        return torch.cat([x[:, :1], x[:, 1:] * torch.exp(sign * (logs + rates * x[:, :1]))], 1)

    model, start = Planted(lambda z: move(z, -1), lambda x: move(x, 1)), torch.zeros(1, 16)
    assert float(_last_point(model, start, radius=0.2, step=0.04, every=1000)[0, 0]) == pytest.approx(0.2)


def test_latents_are_attacked_the_other_way_round():
    """The latents lie around 5; a hole in the way back sends 5.3 to 7 astray, and data around 5 never come near it."""
    model = Planted(lambda z: torch.where((z > 5.3) & (z < 7), z - 4, z - 5), lambda x: x + 5)
    m = Attack(radius=0.5, box="latent", steps=20, methods=["random"]).measure(model, torch.zeros(2, 2))
    assert m["success"]
    assert m["box"] == "latents ± 0.5"
    assert m["worst_relative"] > 0.1


def test_success_is_relative():
    model = Planted(lambda z: z + 1e-2)
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1e3, 0.0]])
    found = Attack(radius=0.1, steps=2, methods=["random"]).search(model, x).success.tolist()
    assert found == [True, True, True, False]
    assert not Attack(radius=0.1, steps=2, methods=["random"], fail_at=0.1).search(model, x).success.any()


def test_images_come_with_pictures():
    model = glow((3, 8, 8), levels=1, blocks=1, hidden=8, actnorm="identity")
    m = Attack(bits=8, steps=8, samples=2, methods=["gain", "singular"]).measure(model, torch.rand(2, 3, 8, 8))
    assert [p.title for p in m.pictures] == ["start", "point found", "its reconstruction"]
    assert not m["success"]
    assert m["radius"] == 0.5 / 256
    assert m["step"] == pytest.approx(5e-4 / 8)


# ---- models that misbehave


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reconstruction_that_is_not_finite_ends_the_search_and_keeps_the_point(bad):
    model = Planted(lambda z: torch.where(z > 0.2, torch.full_like(z, bad), z))
    result = Attack(radius=0.5, step=0.05, steps=40, methods=["random"]).search(model, torch.zeros(3, 2))
    assert bool(result.success.all())
    assert bool(torch.isinf(result.errors).all())
    assert bool((result.points > 0.2).any(1).all())
    errors = result.trajectory
    assert len(errors) < 41  # nothing is searched once all have ended
    assert bool((errors[1:] >= errors[:-1]).all())


def test_samples_for_which_the_model_raises_are_found_and_the_others_searched_on():
    def picky(z):
        if bool((z[:, 0] > 0.4).any()):
            raise ValueError("too large")
        return z

    x = torch.tensor([[0.0, 0.0], [-9.0, 0.0]])
    result = Attack(radius=0.5, steps=24, methods=["random"]).search(Planted(picky), x)
    assert result.success.tolist() == [True, False]
    assert float(result.points[0, 0]) > 0.4


def test_without_gradients_the_search_without_gradients_still_runs():
    def raises(z):
        if z.requires_grad:
            raise RuntimeError("no autograd here")
        return z

    for model in (Planted(raises), Planted(lambda z: z.detach())):
        m = Attack(radius=0.1, steps=8, methods=("gain", "roundtrip", "random")).measure(model, torch.randn(3, 2))
        assert [row["method"] for row in m.rows] == ["random"]
        assert sum("not measured: " in note for note in m.notes) == 2
    m = Attack(radius=0.1, steps=8, methods=["gain"]).measure(Planted(raises), torch.randn(3, 2))
    assert "no autograd here" in m.reason


def test_gradients_that_are_nan_become_counted_random_moves():
    model = Planted(lambda z: z + 0 * torch.sqrt(torch.relu(z - 1e9)))
    m = Attack(radius=0.1, steps=5, methods=["gain"]).measure(model, torch.randn(3, 2))
    assert any("15 moves at random" in note for note in m.notes)
    assert not m["success"]


def test_samples_that_fail_before_any_attack_are_counted():
    model = Planted(lambda z: torch.where(z > 0.5, z + 1, z))
    m = Attack(radius=1e-3, steps=4, methods=["random"]).measure(model, torch.tensor([[0.0, 0.0], [0.9, 0.0]]))
    assert m["share_success"] == 0.5
    assert any(note.startswith("1 of 2 samples fail at their start") for note in m.notes)


# ---- manners


def test_contexts_seeds_and_modes():
    model = real_nvp(2, blocks=2, hidden=(8,), context=1).train()
    source = (torch.randn(6, 2), torch.randn(6, 1))
    one, two = (Attack(steps=8, samples=4, methods=EVERY_METHOD).search(model, source) for _ in range(2))
    assert set(one.runs) == set(EVERY_METHOD)
    assert one.points.equal(two.points)
    assert model.training


@pytest.mark.parametrize(
    "arguments",
    [
        {"box": "sphere"},
        {"objective": "x"},
        {"methods": ["fgsm"]},
        {"methods": []},
        {"steps": 0},
        {"box": "cell"},
        {"step": -1.0},
        {"samples": 0},
    ],
)
def test_arguments_that_make_no_sense_get_a_sentence(arguments):
    with pytest.raises(InputError, match=f"Attack\\({next(iter(arguments))}="):
        Attack(**arguments)


def test_bad_radius_and_bits():
    for attack in (Attack(radius=-1.0), Attack(bits=99)):
        with pytest.raises(InputError):
            attack.search(real_nvp(2), torch.rand(2, 2))


def test_methods_that_other_processes_ran_give_the_measurement_of_one():
    class Noisy(Planted):  # draws from torch's own generator
        def forward(self, x, context=None):
            return x + 1e-3 * torch.rand_like(x)

    for model, broken in ((real_nvp(2), ()), (Noisy(lambda z: z), ()), (Planted(lambda z: z.detach()), ("gain",))):
        attack, x = Attack(steps=8, samples=4, seed=3), torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        alone = attack.measure(model, x)
        found = [attack.find(model, x, piece=k) for k in reversed(range(attack.pieces))][::-1]
        pieces = pickle.loads(pickle.dumps([one.piece for one in found]))  # they travel
        joined = attack.find(model, x, pieces=pieces).measurement
        assert joined == alone
        assert [note.split()[0] for note in joined.notes if "not measured" in note] == list(broken)
    nothing = Attack(methods=["gain"], steps=4)
    refuses = Planted(lambda z: z.detach())
    pieces = [nothing.find(refuses, x, piece=0).piece]
    assert nothing.find(refuses, x, pieces=pieces).measurement.reason == nothing.measure(refuses, x).reason != ""
