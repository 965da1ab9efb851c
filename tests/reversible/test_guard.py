"""The guard: no wrong gradient without a word, within its memory, with a report that names the blocks."""

import contextlib
import copy
import itertools
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bilip import Chain, blocks, models, nets
from bilip.blocks import Bijection
from bilip.errors import CheckpointError, DriftError
from bilip.reversible import DriftWarning, Guard, Reversible, angle, call
from bilip.reversible.fingerprint import Fingerprint, Print, drifts_of, scales
from bilip.reversible.function import hold
from bilip.reversible.guard import APART, REST, Drift, anchors_for
from bilip.reversible.reversible import make_units
from bilip.reversible.units import Kept
from catalogue import overflowing, squash
from walks import TOLERANCE, gradient, loss_of, off, planted

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("places", [(0,), (3,), (2, 3, 6), (7,)])
@pytest.mark.parametrize("sigma", [1e-3, 1e-6, 1e-9, 1e-12])
def test_planted_near_zero_scales(sigma, places):
    model, x = planted(sigma, places)
    guarded, bare = Reversible(model), Reversible(model, guard=None)
    for _ in range(3):
        stored = gradient(model, model, x)
        broken = off(gradient(bare, model, x), stored)
        found = off(gradient(guarded, model, x), stored)
        assert found < 1e-3  # so wherever the bare walk is wrong, and elsewhere
    report = guarded.report()
    if places == (0,):  # what enters the first block is kept: nothing is lost
        assert report.repaired == 0
    elif sigma <= 1e-6:
        assert report.worst[str(places[-1])] > TOLERANCE  # the block that squashes does not get its input back
        assert report.repaired >= 1
    if sigma <= 1e-9 and 0 not in places:
        assert broken > 1e-2


def test_the_block_is_named_and_anchored():
    model, x = planted(1e-9, (5,))
    guarded = Reversible(model)
    gradient(guarded, model, x)
    report = guarded.report()
    later = {name: drift for name, drift in report.drift.items() if int(name) > 5}
    assert later
    assert max(later.values()) < TOLERANCE < report.drift["5"]
    assert report.anchors == {"5": x.numel() * 4}
    assert report.tolerance == TOLERANCE
    assert (report.steps, report.repaired, report.warned) == (1, 1, 0)
    gradient(guarded, model, x)
    after = guarded.report()
    assert (after.steps, after.repaired) == (2, 1)  # the anchor carries the next walk over the bad block
    assert "5" not in after.drift


def test_driven_to_instability_by_training():
    torch.manual_seed(0)
    model = models.real_nvp(8, blocks=6, hidden=(16,))
    guarded, bare = Reversible(model), Reversible(model, guard=None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(64, 8)
    y = torch.randn(64, 8)

    def loss(f, x):  # nothing keeps the scales away from zero
        return (f(x) - y).square().mean()

    broken = 0
    for _ in range(150):
        stored = gradient(model, model, x, loss)
        walked = off(gradient(bare, model, x, loss), stored)
        found = off(gradient(guarded, model, x, loss), stored)
        broken += walked > 1e-2
        assert found < 1e-3 if walked > 1e-2 else found < 1e-2
        for p, g in zip(model.parameters(), stored, strict=True):
            p.grad = g
        optimizer.step()
    assert broken > 10  # the bare walk did break
    assert guarded.report().repaired < broken  # anchors took over


class Waves(nn.Module):
    """A bounded shift that turns very fast."""

    def __init__(self, size, speed):
        super().__init__()
        self.inner, self.outer = nn.Linear(size, 32), nn.Linear(32, size)
        with torch.no_grad():
            self.inner.weight.mul_(speed)

    def forward(self, x):
        return self.outer(torch.sin(self.inner(x)))


def test_drift_that_peaks_in_the_middle_and_vanishes_at_the_input():
    torch.manual_seed(0)
    there = Waves(4, 1e4)
    back = copy.deepcopy(there)
    with torch.no_grad():
        back.outer.weight.neg_()
        back.outer.bias.neg_()
    contract = blocks.AffineCoupling(nets.MLP(4, 8, hidden=(8,)), partition=blocks.Split(swap=True))
    squash(contract, 1e-3)
    # The second shift takes the first away again; the contraction leaves an error of 1e-4 in what both of them look at.
    model = Chain(blocks.AdditiveCoupling(there), blocks.AdditiveCoupling(back), contract, shape=(8,))
    x = torch.randn(16, 8)

    def loss(f, x):
        return (f(x) * torch.linspace(-1, 1, 8)).sum()

    stored = gradient(model, model, x, loss)
    assert off(gradient(Reversible(model, guard=None), model, x, loss), stored) > 1e-2
    watching = Reversible(model, Guard(action="warn"))
    with pytest.warns(DriftWarning):
        gradient(watching, model, x, loss)
    drift = watching.report().drift
    assert "0" not in drift  # the input is kept, and it would come back right: comparing it alone would miss this
    assert drift["1"] > 10 * TOLERANCE
    guarded = Reversible(model)
    assert off(gradient(guarded, model, x, loss), stored) < 1e-3
    assert guarded.report().guilty == "1"


# ---- memory


def test_anchors_stay_within_the_budget():
    model, x = planted(1e-9, tuple(range(8)))
    one = x.numel() * 4
    for budget in (0, one - 1, one, 3 * one, 100 * one):
        guarded = Reversible(model, Guard(budget=budget))
        for _ in range(12):
            assert off(gradient(guarded, model, x), gradient(model, model, x)) < 1e-3
            assert sum(guarded.report().anchors.values()) <= budget
        report = guarded.report()
        assert report.steps == 12
        if budget < one:
            assert report.anchors == {}
            assert report.repaired == 12
        if budget == 100 * one:
            assert report.repaired < 12  # enough of them, and no step has to be repaired


def test_zero_budget_goes_straight_to_recomputing(monkeypatch):
    model, x = planted(1e-9)
    guarded = Reversible(model, Guard(budget=0))
    walks = []
    walk = call.Call._walk
    monkeypatch.setattr(call.Call, "_walk", lambda self, back, **o: walks.append(1) or walk(self, back, **o))
    for _ in range(REST + 2):
        assert off(gradient(guarded, model, x), gradient(model, model, x)) < 1e-3
    assert len(walks) == 2  # the first step, and the one that looks again
    assert guarded.report().repaired == REST + 2


# ---- actions


def test_warn_and_raise():
    model, x = planted(1e-9, (5,))
    guarded = Reversible(model, Guard(action="warn"))
    with pytest.warns(DriftWarning, match="first at the input of block 5; this gradient may be wrong"):
        gradient(guarded, model, x)
    assert (guarded.report().warned, guarded.report().repaired) == (1, 0)
    with pytest.raises(DriftError, match="allowed 1.0e-03"):
        gradient(Reversible(model, Guard(action="raise")), model, x)


def test_a_healthy_model_is_left_alone():
    model, x = planted(0.5)
    guarded = Reversible(model, Guard(spot_check=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            gradient(guarded, model, x)
    report = guarded.report()
    assert (report.steps, report.repaired, report.warned, report.spot_checks) == (4, 0, 0, 2)
    assert report.worst_angle < 1e-4
    assert report.anchors == {}
    assert max(report.worst.values()) < TOLERANCE


def test_spot_check_finds_what_the_fingerprints_cannot_see(monkeypatch):
    model, x = planted(1e-7)
    stored = gradient(model, model, x)
    monkeypatch.setattr(call, "drifts_of", lambda before, after, sensitivities: torch.zeros(len(before)))
    guarded = Reversible(model, Guard(spot_check=2))
    assert off(gradient(guarded, model, x), stored) > 1e-2  # blind
    with pytest.warns(DriftWarning, match="spot check"):
        assert off(gradient(guarded, model, x), stored) < 1e-3
    report = guarded.report()
    assert report.warned == 1
    assert report.spot_checks == 1
    assert report.worst_angle > 1e-2


@pytest.mark.parametrize(("weight", "repaired"), [(1e-3, 1), (1.0, 2)], ids=["little cancels", "most cancels"])
def test_the_last_call_of_a_difference_may_drift_as_far_as_leaves_the_sum_right(monkeypatch, weight, repaired):
    """The other call, whose backward pass comes first, is held to a share of the tolerance: nobody knows yet what will cancel."""
    model, x = planted(0.5)
    drift = torch.tensor([0.3 * TOLERANCE], dtype=torch.float64)
    monkeypatch.setattr(
        call, "drifts_of", lambda before, after, sensitivities: torch.cat([drift, drift.new_zeros(len(before) - 1)])
    )
    guarded = Reversible(model, Guard(spot_check=0))
    z = guarded(x)
    difference = (guarded(x + 1e-3) - z).sum(1)
    assert hold(difference, 0.1) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ((1e-3 if weight == 1 else 1.0) * z.square().sum(1) + weight * difference).mean().backward()
    assert guarded.report().repaired == repaired


@pytest.mark.parametrize("halves", [True, False], ids=["halves", "neighbours"])
def test_spot_check_sees_both_sides_of_a_loss_that_subtracts_within_a_batch(monkeypatch, halves):
    model, x = planted(1e-6)
    near, sign = x + 1e-2 * torch.randn_like(x), torch.ones(len(x))
    pairs, signs = torch.stack([x, near]), torch.stack([sign, -sign])
    pairs, signs = (t.flatten(0, 1) if halves else t.transpose(0, 1).flatten(0, 1) for t in (pairs, signs))

    def difference(f, x):
        z, log_det = f.forward_and_log_det(x)
        return ((z.tanh().sum(1) - log_det / 8) * signs).mean()

    stored = gradient(model, model, pairs, difference)
    monkeypatch.setattr(call, "drifts_of", lambda before, after, sensitivities: torch.zeros(len(before)))
    guarded = Reversible(model, Guard(spot_check=1))
    with pytest.warns(DriftWarning, match="spot check"):
        assert off(gradient(guarded, model, pairs, difference), stored) < 1e-3


def test_a_loss_that_subtracts_within_a_batch_and_says_so():
    """Without `hold` the guard compares drift with the gradients of the samples, not with what they leave."""
    model, x = planted(1e-3)
    pairs = torch.cat([x, x + 1e-3 * torch.randn_like(x)])

    def difference(f, x):
        z, log_det = f.forward_and_log_det(x)
        value = z.tanh().sum(1) - log_det / 8
        value = value[:16].mean() - value[16:].mean()
        if f is guarded:
            assert hold(value, 1e-3) == 1
        return value

    guarded = Reversible(model, Guard(spot_check=0))
    assert off(gradient(guarded, model, pairs, difference), gradient(model, model, pairs, difference)) < 1e-3
    assert guarded.report().repaired == 1


def test_spot_check_where_one_context_serves_all_samples():
    class Shifted(nn.Linear):
        def forward(self, x, context):
            return super().forward(x + context)

    torch.manual_seed(0)
    model = Chain(*(blocks.AdditiveCoupling(Shifted(2, 2), blocks.Split(swap=bool(k))) for k in range(3)), shape=(4,))
    guarded = Reversible(model, Guard(spot_check=1))
    guarded(torch.randn(16, 4), torch.randn(1, 2)).square().sum().backward()
    assert guarded.report().spot_checks == 1
    assert guarded.report().worst_angle < 1e-4


def test_spot_check_looks_at_the_gradients_that_are_wanted(monkeypatch):
    model, x = planted(1e-6)
    near = x + 1e-2 * torch.randn_like(x)
    monkeypatch.setattr(call, "drifts_of", lambda before, after, sensitivities: torch.zeros(len(before)))
    found = []
    for wanted in (False, True):
        guarded = Reversible(model, Guard(spot_check=1, action="warn"))
        both = torch.cat([x, near]).requires_grad_(wanted)
        z = guarded(both)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (z[:16] - z[16:]).sum().backward()
        found.append(guarded.report().worst_angle)
    # Beside the gradient of the inputs, which does not cancel, little is seen of the others.
    assert found[0] > 3 * found[1]


@pytest.mark.parametrize("options", [{}, {"memory": "checkpoint"}, {"guard": Guard(budget=0)}])
def test_outputs_that_overflow_step_after_step(options):
    model, x = overflowing()
    guarded = Reversible(model, **options)

    def loss(f, x):
        return f.forward_and_log_det(x)[1].mean()

    stored = gradient(model, model, x, loss)
    for _ in range(5):  # also when anchors stand where it drifted
        assert off(gradient(guarded, model, x, loss), stored) < 1e-3


@pytest.mark.parametrize("action", ["warn", "raise"])
def test_what_is_not_finite_is_said(action, monkeypatch):
    model, x = overflowing()
    monkeypatch.setattr(call, "drifts_of", lambda before, after, sensitivities: torch.zeros(len(before)))
    guarded = Reversible(model, Guard(action=action))
    with (
        pytest.warns(DriftWarning, match="not finite")
        if action == "warn"
        else pytest.raises(DriftError, match="not finite")
    ):
        gradient(guarded, model, x, lambda f, x: f.forward_and_log_det(x)[1].mean())


def test_a_loss_that_is_not_finite_is_not_repaired():
    model, x = planted(1.0)
    guarded = Reversible(model)
    gradient(guarded, model, x, lambda f, x: f(x).sum() * math.inf)
    assert guarded.report().repaired == 0


# ---- fingerprints


def print_of(x, step=1, block=0):
    return Fingerprint(torch.tensor(step), block).of(x)


def seen(taken, y):
    """By sample: the drift that a fingerprint shows."""
    return torch.linalg.vector_norm(taken.again(y) - taken.sums, dim=-1).amax(1)


def shown(x, y):
    """The drift of a whole batch that its fingerprint shows."""
    taken = print_of(x)
    return float(drifts_of([taken], [taken.again(y)]))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 400),
    where=st.sampled_from(["one", "all", "alternating", "random", "pairs"]),
    step=st.integers(0, 2**40),
    place=st.integers(0, 10**6),
)
def test_fingerprints_see_drift_wherever_it_sits(size, where, step, place):
    """Of a drift e in units of the scales a fingerprint shows |(w_1 . e, w_2 . e)|, whose square has the mean |e|^2 / size.

    A sum with random signs exceeds a tenth of its root mean square with a probability of at least (1 - 1/100)^2 / 3 = 0.32 (Paley
    and Zygmund, fourth moment at most 3 times the squared second). The weights of the samples are drawn apart: that 64 samples
    drifting alike hide in both sums has a chance below 0.68^128 = 1e-21, whatever the pattern.
    """
    generator = torch.Generator().manual_seed(place)
    x = torch.randn(64, size, generator=generator, dtype=torch.float64)
    taken = print_of(x, step)
    e = torch.zeros(64, size, dtype=torch.float64)
    if where == "one":
        e[:, place % size] = 1
    elif where == "all":
        e[:] = 1
    elif where == "alternating":
        e[:] = 1 - 2.0 * (torch.arange(size) % 2)
    elif where == "pairs":
        e[:, [place % size, (place // 7) % size]] = 1
    else:
        e = torch.randn(64, size, generator=generator, dtype=torch.float64)
    e *= 1e-6 * taken.scale
    small = x.abs() < 30 * taken.scale  # where entries count by their scale, not by their own size
    e *= small
    if not bool(e.any(1).all()):
        return
    true = (e / taken.scale).square().mean(1).sqrt()
    found = seen(taken, x + e)
    assert float((found / true).max()) > 0.1
    assert float((found / true).max()) < 1.5 * 2**0.5 * size**0.5
    if where == "one":
        assert bool((found / true > 0.4).all())  # one entry cannot cancel


def test_fingerprints_have_the_right_mean_square():
    generator = torch.Generator().manual_seed(0)
    x = 0.1 * torch.randn(2000, 99, generator=generator, dtype=torch.float64)
    e = 1e-6 * torch.randn(2000, 99, generator=generator, dtype=torch.float64)
    taken = Print(Fingerprint(torch.tensor(1)), torch.ones(99, dtype=torch.float64), torch.empty(0))
    taken = Print(taken.fingerprint, taken.scale, taken.again(x))
    squares = seen(taken, x + e).square() / e.square().mean(1)
    # Each square is half the sum of two of mean 1 and variance below 2, so a mean over 2000 is within 0.1 by 4 deviations.
    assert abs(float(squares.mean()) - 1) < 0.1


def test_no_two_states_and_samples_share_their_weights():
    x = torch.zeros(16, 64)
    drawn = [Fingerprint(torch.tensor(step), block).weights(x) for step in (1, 2, 2**33) for block in (0, 1, 40)]
    rows = torch.cat([weights.transpose(1, 2).flatten(0, 1) for weights in drawn])
    assert float(rows.abs().min()) >= 0.5
    assert float(rows.abs().max()) <= 1.5
    alike = torch.nn.functional.normalize(rows, dim=1) @ torch.nn.functional.normalize(rows, dim=1).T
    alike.fill_diagonal_(0)
    assert float(alike.abs().max()) < 0.8  # independent rows of 64: a deviation of 1/8, of 41,000 pairs


@pytest.mark.parametrize("size", [2, 3, 1000])
def test_equal_drifts_of_two_coordinates_do_not_cancel(size):
    x = torch.randn(1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[:, :2] += 1e-6 * x[:, :2].abs()
    found = torch.stack([seen(print_of(x, step), y)[0] for step in range(300)]) / (1e-6 * (2 / size) ** 0.5)
    # Two weights of random sign and of magnitudes in [0.5, 1.5] sum to less than 0.1 in 5 % of all draws, both pairs in 0.25 %.
    assert float((found < 0.05).double().mean()) < 0.02


class Homogeneous(nn.Module):
    """A net whose outputs are as large as its inputs, with a fixed raw scale."""

    def __init__(self, size, raw):
        super().__init__()
        self.first, self.second = nn.Linear(2, 8, bias=False), nn.Linear(8, 2, bias=False)
        self.size, self.raw = size, raw

    def forward(self, x):
        shift = self.size * self.second(torch.tanh(self.first(x / self.size)))
        return torch.cat((shift, torch.full_like(shift, self.raw)), 1)


@pytest.mark.parametrize("size", [1.0, 1e-60, 1e-120, 1e-200, 1e100])
def test_drift_of_states_of_any_size_is_seen(size):
    torch.manual_seed(0)
    nets = [Homogeneous(size, -37.0 if k in (2, 3) else 0.0) for k in range(8)]
    parts = [
        blocks.AffineCoupling(net, scale="exp", partition=blocks.Split(swap=k % 2 == 1)) for k, net in enumerate(nets)
    ]
    model = Chain(*parts).double()
    x = size * torch.randn(16, 4, dtype=torch.float64)

    def loss(f, x):
        return (f(x) / size).square().sum()

    stored = gradient(model, model, x, loss)
    assert off(gradient(Reversible(model, guard=None), model, x, loss), stored) > 1e-3
    assert off(gradient(Reversible(model), model, x, loss), stored) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outlier", [1.0, 1e5, 1e12, 1e25])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e12])
def test_an_outlier_in_the_batch_hides_nothing(outlier, scale, dtype):
    x = scale * torch.randn(32, 64, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x[0] *= outlier
    y = x.clone()
    y[5] *= 1 + 100 * TOLERANCE
    taken = [print_of(x, step) for step in range(8)]
    assert float(drifts_of(taken, [one.again(y) for one in taken]).max()) > 5 * TOLERANCE


ROWS = [(4, 1), (8, 1), (16, 1), (64, 6), (256, 25)]  # samples, and how many of them a loss leaves out


def left_out(rows, count):
    chosen = torch.zeros(rows, dtype=torch.bool)
    chosen[rows // 2 :: max(1, rows // (2 * count))][:count] = True
    return chosen


@pytest.mark.parametrize(("rows", "count"), ROWS)
@pytest.mark.parametrize("outlier", [1e4, 1e10, 1e20, 1e30])
def test_outliers_leave_the_scales_of_coordinates(rows, count, outlier):
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))
    moved = (scales(x.masked_fill(left_out(rows, count)[:, None], outlier)) / scales(x)).log().mean().exp()
    assert 0.5 < float(moved) < 20


@pytest.mark.parametrize(("rows", "count"), ROWS)
@pytest.mark.parametrize("sigma", [1e-5, 1e-6, 1e-7])
def test_samples_that_the_loss_leaves_out_hide_nothing(rows, count, sigma):
    """Rows that stand for missing data, say: they may be as large as they like, and most of the differences in a small batch."""
    torch.manual_seed(0)
    model = models.real_nvp(4, blocks=6, hidden=(16,), activation="tanh")
    squash(model[2], sigma)
    ignored = left_out(rows, count)
    x = torch.randn(rows, 4).masked_fill(ignored[:, None], 1e30)

    def loss(f, x):
        z, log_det = f.forward_and_log_det(x)
        return (z.square().sum(1) / 2 - log_det)[~ignored].mean()

    guarded, stored = Reversible(model), gradient(model, model, x, loss)
    for _ in range(2):
        assert off(gradient(guarded, model, x, loss), stored) < 1e-3


@pytest.mark.parametrize("large", [1e2, 1e5, 1e7, 1e10])
@pytest.mark.parametrize("share", [1, 3, 7])
def test_large_features_hide_no_drift_of_small_ones(large, share):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    x[:, :share] = large * (1 + 0.1 * x[:, :share])
    y = x.clone()
    y[:, -1] += 0.1
    assert shown(x, y) > 10 * TOLERANCE


@pytest.mark.parametrize("size", [300, 4099, 40_000])
def test_one_coordinate_is_not_lost_among_thousands(size):
    """Each part of 128 coordinates is judged by itself: of a drift of one unit in one place it shows at least 0.4 / 11.4, see above."""
    x = torch.randn(4, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for place in (0, 127, 128, size - 1):
        y = x.clone()
        y[:, place] += print_of(x).scale[place]
        assert shown(x, y) > 0.03


def looks_at_one_feature(size, weight, shift, outputs):
    """Angles to the stored gradient of a bare and a guarded walk.

    The last block adds `shift` to one feature, which comes back rounded; a net before it looks at nothing else, through this weight, and
    moves so many features, at which the loss looks.
    """
    torch.manual_seed(0)
    half, width = size // 2, 16
    first, look, add = (nn.Sequential(nn.Linear(half, width), nn.Tanh(), nn.Linear(width, half)) for _ in range(3))
    with torch.no_grad():
        look[0].weight.zero_()
        look[0].weight[:, 0] = weight * torch.randn(width)
        look[2].weight[outputs:] = 0
        add[2].weight.zero_()
        add[2].bias.zero_()
        add[2].bias[0] = shift
    swapped = blocks.Split(swap=True)
    model = Chain(
        blocks.AdditiveCoupling(first, swapped), blocks.AdditiveCoupling(look), blocks.AdditiveCoupling(add, swapped)
    )
    x = torch.randn(64, size)

    def gradients(f):
        return torch.autograd.grad(f(x)[:, half : half + outputs].square().sum(1).mean(), list(look.parameters()))

    stored = gradients(model)
    return off(gradients(Reversible(model, guard=None)), stored), off(gradients(Reversible(model)), stored)


def test_a_net_that_looks_at_one_feature_of_thousands():
    bare, guarded = looks_at_one_feature(2**15, 10.0, 2.5e5, outputs=4)
    assert bare > 5e-3
    assert guarded < 1e-3


@pytest.mark.soak
@pytest.mark.parametrize("size", [64, 256, 1024, 4096, 16384])
def test_nets_that_look_at_one_feature(size):
    """What is left of the promise of 1e-3 rad where one coordinate of a part decides all: docs/reversible.md states it."""
    cases = itertools.product((3.0, 10.0, 30.0, 100.0), (1e4, 3e4, 1e5, 3e5, 1e6), (1, 16, size // 2))
    found = [looks_at_one_feature(size, *case)[1] for case in cases]
    assert sum(angle > 1e-3 for angle in found) <= 4
    assert max(found) < 3e-3


def test_the_spread_of_a_feature_counts_and_not_its_offset():
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    x[:, 0] += 20.0
    y = x.clone()
    y[:, 0] += 0.02  # a thousandth of its size, a fiftieth of its spread
    assert shown(x, y) > 10 * TOLERANCE


def test_zeros_in_the_batch_raise_no_alarm():
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 0  # always
    x[:30, 1] = 0  # mostly
    y = x + 1e-7
    assert shown(x, y) < TOLERANCE / 10


def test_a_value_that_is_not_finite_is_a_drift():
    x = torch.randn(3, 6)
    for value in (math.nan, math.inf, -math.inf):
        y = x.clone()
        y[1, 2] = value
        for before, after in ((x, y), (y, x), (y, y)):
            assert shown(before, after) == math.inf


# ---- randomness


class Noisy(Bijection):
    """Scales by random numbers, and does not say so."""

    def _gain(self, x):
        return torch.rand_like(x) + 0.5

    def forward(self, x, context=None):
        return x * self._gain(x)

    def inverse(self, z, context=None):
        return z / self._gain(z)

    def forward_and_log_det(self, x, context=None):
        gain = self._gain(x)
        return x * gain, gain.log().sum(1)

    def inverse_and_log_det(self, z, context=None):
        gain = self._gain(z)
        return z / gain, -gain.log().sum(1)


class Marked(Noisy):
    stochastic = True


class Hidden(Noisy):
    """Draws from a generator that nobody can see."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def _gain(self, x):
        return torch.rand(x.shape, generator=self.generator, dtype=x.dtype) + 0.5


def noisy_chain(kind):
    torch.manual_seed(0)
    return Chain(
        blocks.AdditiveCoupling(nets.MLP(2, 2)), kind(), blocks.AdditiveCoupling(nets.MLP(2, 2)), shape=(4,)
    ).double()


@pytest.mark.parametrize("memory", ["reversible", "checkpoint"])
def test_a_block_with_a_generator_of_its_own_is_noticed(memory):
    model, x = noisy_chain(Hidden), torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(DriftError, match="stochastic"):
        gradient(Reversible(model, memory=memory), model, x)


@pytest.mark.parametrize("block", ["Noisy", "Marked"])
@pytest.mark.parametrize("memory", ["reversible", "checkpoint"])
def test_a_stochastic_block_whether_it_says_so_or_not(memory, block):
    model, x = noisy_chain(globals()[block]), torch.randn(8, 4, dtype=torch.float64)
    found = []
    for f in (model, Reversible(model, memory=memory)):
        torch.manual_seed(7)
        point = x.clone().requires_grad_()
        found.append(torch.autograd.grad(loss_of(f, point), [point, *model.parameters()]))
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(*found, strict=True))


def test_parameters_changed_before_backward_are_noticed():
    model, x = planted(0.5)
    loss = loss_of(Reversible(model), x)
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- blocks that have changed, where their input was kept and no drift shows it


def anchored(model, places, guard=Guard(), *, inverse=False):  # noqa: B008 - frozen
    """A `Reversible` that stores what enters these blocks, as after repairs."""
    saving = Reversible(model, guard)
    for k in places:
        saving._watch.anchors[inverse, k], saving._watch.names[inverse, k] = 0, str(k)
    return saving


@pytest.mark.parametrize("places", [(1,), (2,), (1, 2)])
def test_a_generator_of_its_own_behind_an_anchor_is_noticed(places):
    model, x = noisy_chain(Hidden), torch.randn(8, 4, dtype=torch.float64)
    saving = anchored(model, places)
    with warnings.catch_warnings(), pytest.raises(DriftError, match="stochastic"):
        warnings.simplefilter("ignore", DriftWarning)
        gradient(saving, model, x)


class Iterative(Hidden):
    closed_form = False


@pytest.mark.parametrize("memory", ["reversible", "checkpoint"])
@pytest.mark.parametrize("kinds", [(Hidden, None), (None, Iterative, None), (Iterative, Iterative)])
def test_a_generator_of_its_own_where_the_input_is_always_kept_is_noticed_at_once(kinds, memory):
    """In the first block, whose input is that of the network, and in blocks that store theirs."""
    torch.manual_seed(0)
    parts = [blocks.AdditiveCoupling(nets.MLP(2, 2)) if kind is None else kind() for kind in kinds]
    model, x = Chain(*parts, shape=(4,)), torch.randn(8, 4, requires_grad=True)
    with warnings.catch_warnings(), pytest.raises(DriftError, match="stochastic"):
        warnings.simplefilter("ignore", DriftWarning)
        loss_of(Reversible(model, memory=memory), x).backward()


FLAT = {
    "additive": lambda: blocks.AdditiveCoupling(nets.MLP(2, 2), blocks.Split(swap=True)),
    "affine": lambda: blocks.AffineCoupling(nets.MLP(2, 4), partition=blocks.Split(swap=True)),
    "generic": lambda: blocks.ActNorm(4),
}


def changing(kind):
    """A model, the number of one of its units, and points; every block does something."""
    torch.manual_seed(0)
    if kind in FLAT:
        ends = [blocks.AffineCoupling(nets.MLP(2, 4)) for _ in range(2)]
        model, x = Chain(ends[0], FLAT[kind](), ends[1], shape=(4,)), torch.randn(16, 4)
    else:
        model = models.glow((2, 4, 4), levels=2, blocks=1, hidden=4, factor_out=True)
        x = torch.randn(16, 2, 4, 4)
    model(x)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    units = make_units(model.parts(), inverse=False)
    of = [k for k, unit in enumerate(units) if type(unit) is Kept and type(unit.inner).__name__ == kind]
    return model, 1 if kind in FLAT else of[-1], x


@pytest.mark.parametrize("kind", [*FLAT, "Mixing", "Coupling"])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("next_too", [False, True])
def test_a_block_that_has_changed_behind_an_anchor_is_noticed(kind, inverse, next_too):
    model, k, x = changing(kind)
    units = make_units(model.parts(), inverse=inverse)
    k, x = (len(units) - 1 - k, model(x).detach()) if inverse else (k, x)
    name, parameter = units[k].name, list(units[k].block.parameters())[-1]
    places = (k, k + 1) if next_too else (k,)

    def step(saving, change):
        z, log_det = saving.inverse_and_log_det(x) if inverse else saving.forward_and_log_det(x)
        loss = (z.flatten(1).square().sum(1) / 2 - log_det).mean()
        parameter.data += change  # which moves no counter
        loss.backward()

    for action in ("repair", "warn", "raise"):
        saving = anchored(model, places, Guard(action=action), inverse=inverse)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                step(saving, 0.0)
        assert saving.report().repaired == 0
        said = f"block {name}, evaluated again from its stored input"
        warns, raises = contextlib.nullcontext(), contextlib.nullcontext()
        if action != "raise":
            warns = pytest.warns(DriftWarning, match=said)
        if action != "warn":
            raises = pytest.raises(DriftError, match=said if action == "raise" else "have changed since")
        with warns, raises:
            step(saving, 0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_anchors_everywhere_accuse_no_healthy_block(rows, dtype):
    """Features that are constant, zero, huge and tiny."""
    torch.manual_seed(0)
    model, x = models.real_nvp(8, blocks=6, hidden=(16,)).to(dtype), torch.randn(rows, 8)
    x[:, 0], x[:, 1] = 3.0, 0.0
    x[:, 2:4] *= 1e7
    x[:, 4:6] *= 1e-30
    x = x.to(dtype)
    saving, stored = anchored(model, range(6)), gradient(model, model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            assert off(gradient(saving, model, x), stored) < 10 * torch.finfo(dtype).eps
    assert (saving.report().steps, saving.report().repaired) == (5, 0)


def test_a_walk_that_drifts_between_anchors_accuses_no_block():
    """What the walk has behind an anchor is further off than a block that has changed would make it, and the block is the same."""
    model, x = planted(1e-5, (2, 4, 6))
    saving = anchored(model, (0, 2, 4), Guard(tolerance=0.9, action="raise"))
    for _ in range(5):
        gradient(saving, model, x)
    assert max(saving.report().worst.values()) > 10 * TOLERANCE


def test_outputs_are_compared_where_there_are_anchors_and_in_first_calls_alone(monkeypatch):
    compared = []
    apart = Print.apart
    monkeypatch.setattr(Print, "apart", lambda self, x: compared.append(1) or apart(self, x))
    model, x = planted(0.5)
    saving = Reversible(model)
    taken = []
    of = Fingerprint.of
    monkeypatch.setattr(Fingerprint, "of", lambda self, x: taken.append(1) or of(self, x))
    for _ in range(3):
        gradient(saving, model, x)
    assert len(compared) == 1
    assert len(taken) == 3 * 7  # of what enters all blocks but the first
    saving._watch.anchors[False, 3] = 0
    gradient(saving, model, x)
    assert len(compared) == 2
    assert len(taken) == 3 * 7 + 6  # and what the anchored block gives, which enters the next


def test_what_was_not_finite_has_not_changed():
    state = torch.tensor([[1.0, 2.0], [math.inf, 1.0]])
    taken = Fingerprint(torch.tensor(1)).of(state)
    assert taken.apart(state) == 0
    assert taken.apart(state + torch.tensor([[0.0], [1.0]])) == 0
    assert taken.apart(state + torch.tensor([[1.0], [0.0]])) > 0.1
    assert taken.apart(state * math.nan) == math.inf


def test_a_repair_of_a_step_whose_output_overflows_is_the_stored_gradient():
    """The loss looks at the log-determinant alone: autograd never meets the infinite output, block by block zero times infinity would."""
    model, x = overflowing()
    assert not bool(torch.isfinite(model(x)).all())

    def gradient(f):
        return torch.autograd.grad(f.forward_and_log_det(x)[1].mean(), list(model.parameters()), allow_unused=True)

    guarded = Reversible(model, Guard(spot_check=0))
    stored, walked = gradient(model), gradient(guarded)
    assert guarded.report().repaired == 1
    for a, b in zip(stored, walked, strict=True):
        if a is None:
            assert b is None or not bool(b.any())
        else:
            assert bool(torch.isfinite(a).all())
            assert torch.equal(a, b)


def test_small_drifts_of_a_deep_chain_add_up(monkeypatch):
    monkeypatch.setattr(
        call, "drifts_of", lambda before, after, sensitivities: torch.full((len(before),), TOLERANCE / 10).double()
    )
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    repaired = {}
    for depth in (4, 64):
        model = models.real_nvp(4, blocks=depth, hidden=(4,))
        guarded = Reversible(model)
        gradient(guarded, model, x)
        repaired[depth] = guarded.report().repaired
    assert repaired == {4: 0, 64: 1}


def test_drift_counts_by_the_gradients_it_reaches():
    drift = torch.tensor([0.0, 0.0, 5 * TOLERANCE])
    before, after = torch.ones(3), torch.full((3,), 1e-3)
    sizes = [(1, before), (3, after)]  # next to no gradient is found after the drift
    assert float(Drift.of([3, 2, 1], drift, sizes, everywhere=False).total) < TOLERANCE
    assert float(Drift.of([3, 2, 1], drift, sizes, everywhere=True).total) == pytest.approx(5 * TOLERANCE)
    assert float(Drift.of([3, 2, 1], drift, [(1, after), (3, before)], everywhere=False).total) > 4 * TOLERANCE
    assert float(Drift.of([3, 2, 1], 100 * drift, sizes, everywhere=False).total) > TOLERANCE  # sizes may be wrong
    for useless in (torch.zeros(3), torch.full((3,), torch.inf), torch.full((3,), torch.nan)):
        assert float(Drift.of([3, 2, 1], drift, [(1, useless), (3, useless)], everywhere=False).total) > TOLERANCE


def test_gradients_of_any_size_are_weighed():
    drift = torch.tensor([0.0, 5 * TOLERANCE])
    for size in (1e-30, 1e30):  # their squares are no float32
        sizes = [(1, torch.full((3,), size)), (2, torch.full((3,), 1e-3 * size))]
        assert float(Drift.of([2, 1], drift, sizes, everywhere=False).total) < TOLERANCE


def test_drift_where_a_net_is_steep_counts_more():
    x = torch.randn(4, 8)
    taken = [print_of(x, block=k) for k in range(2)]
    again = [one.again(x + 1e-5) for one in taken]
    flat, steep = (
        drifts_of(taken, again, [torch.ones(4).double(), growth * torch.ones(4).double()]) for growth in (0.1, 100.0)
    )
    assert steep[0] == flat[0]
    assert float(steep[1] / flat[1]) == pytest.approx(100)
    nothing = drifts_of(taken, again, [torch.zeros(4).double(), torch.ones(4).double()])
    assert torch.equal(nothing, flat)


def test_growth_counts_in_full_beside_samples_with_larger_gradients():
    """Their gradient of the state may be large, and reach no parameter."""
    prints = [Print(Fingerprint(torch.tensor(0)), torch.ones(2), torch.zeros(4, 1, 2)) for _ in range(2)]
    after, before = [torch.full((4, 1, 2), 1e-4)] * 2, torch.tensor([1.0, 1e6, 1e6, 1e6])
    found = drifts_of(prints, after, [before, torch.tensor([1e3, 1e6, 1e6, 1e6])])
    assert float(found[1] / found[0]) == pytest.approx(1e3)


def test_anchors_leave_most_of_the_limit():
    slowly = [k * 1e-4 for k in range(1, 41)]
    places = anchors_for(slowly, 1e-3, 1e-6)
    assert places[0] == 1  # not where the limit was passed
    assert len(places) < 5  # from there on drift begins afresh
    assert anchors_for([1e-7, 1e-2, math.inf, math.inf], 1e-3, 1e-6) == [1]
    assert anchors_for([math.inf, math.inf], 1e-3, 1e-6) == [0]
    assert anchors_for([1e-7, 2e-7], 1e-3, 1e-6) == []


def there_and_back(f, x):
    z = f(x)
    return (f.inverse(z + 1e-6) * torch.linspace(-1, 1, x.shape[1])).sum()  # parameters have next to nothing to say


def test_gradients_that_nearly_cancel_are_told():
    torch.manual_seed(0)
    model, x = models.real_nvp(4, blocks=8, hidden=(16,)), torch.randn(16, 4)
    guarded = Reversible(model)
    with pytest.warns(DriftWarning, match="nearly cancel"):
        gradient(guarded, model, x, there_and_back)
    with warnings.catch_warnings():  # the next step is made without a walk
        warnings.simplefilter("error")
        found = gradient(guarded, model, x, there_and_back)
    without = gradient(Reversible(model, memory="checkpoint"), model, x, there_and_back)
    assert off(found, without) < 1e-6
    with pytest.raises(DriftError, match="nearly cancel"):
        gradient(Reversible(model, Guard(action="raise")), model, x, there_and_back)


@pytest.mark.parametrize("calls", [1, 2])
def test_gradients_that_nearly_cancel_in_a_later_pass_over_a_graph_that_was_kept_are_told(calls):
    """A call whose graph is kept may have its part in another backward pass."""
    model, x = planted(1e-3)
    guarded, parameters = Reversible(model, Guard(spot_check=0)), list(model.parameters())
    apart = 1e-3 * torch.randn_like(x)
    ends = guarded(x), guarded(x + apart)
    for z in ends[:calls]:
        torch.autograd.grad(z.square().mean(), parameters, retain_graph=True)
    with pytest.warns(DriftWarning, match="nearly cancel"):
        torch.autograd.grad((ends[0] - ends[1]).tanh().mean(), parameters, retain_graph=True)
    assert not guarded._watch.together.found


def test_gradients_are_held_no_longer_than_their_backward_pass():
    """An output that is kept, and whose backward pass never comes, keeps nothing of every step alive."""
    model, x = planted(1)
    guarded = Reversible(model)
    kept = guarded(x)
    for _ in range(3):
        (loss_of(guarded, x) + loss_of(guarded, x.flip(1))).backward()
        assert not guarded._watch.together.found
    assert kept.requires_grad


@pytest.mark.parametrize("action", ["repair", "raise"])
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_several_calls_of_a_loss_that_overflows_do_not_cancel(factor, action):
    """As where the scale of a loss in 16 bits is too large for a step."""
    model, x = planted(1)
    guarded = Reversible(model, Guard(action=action))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((guarded(x).square().mean() + guarded(x + 1).square().mean()) * factor).backward()
        gradient(guarded, model, x)
    assert guarded.report().repaired == 0


def around_frozen(kind):
    """A frozen flow, one of whose blocks is squashed, what is trained around it, and the output of a call for the first or second time."""
    torch.manual_seed(0)
    model = models.real_nvp(8, blocks=8, hidden=(16,), activation="tanh", context=8).requires_grad_(False)
    squash(model[3], 1e-3)
    x, c, dx, dc = torch.randn(16, 8), torch.randn(16, 8), 1e-2 * torch.randn(16, 8), 1e-2 * torch.randn(16, 8)
    first = nn.Linear(8, 8) if "encoder" in kind else nn.ParameterList([x.clone() if kind == "input" else c.clone()])

    def run(f, k):
        if kind == "encoder of the input":
            return f(first(x + k * dx), c)
        if kind == "encoder of the context":
            return f(x, first(c + k * dc))
        return f(first[0], c + k * dc) if kind == "input" else f(x + k * dx, first[0])

    return model, first, run


AROUND = ["encoder of the input", "encoder of the context", "input", "context"]


@pytest.mark.parametrize("kind", AROUND)
def test_gradients_that_nearly_cancel_around_a_frozen_flow_are_told(kind):
    """They meet in what is trained before it, or makes its context."""
    model, first, run = around_frozen(kind)

    def loss(f, _):
        return (run(f, 1) - run(f, 0)).tanh().mean()

    guarded = Reversible(model, Guard(spot_check=0))
    with pytest.warns(DriftWarning, match="nearly cancel"):
        gradient(guarded, first, None, loss)
    with warnings.catch_warnings():  # the next step is made without a walk
        warnings.simplefilter("error")
        assert off(gradient(guarded, first, None, loss), gradient(model, first, None, loss)) < 1e-3
    assert not guarded._watch.together.found


@pytest.mark.parametrize("kind", AROUND)
def test_several_calls_of_a_frozen_flow_that_do_not_cancel_are_left_alone(kind):
    model, first, run = around_frozen(kind)

    def loss(f, _):
        return run(f, 0).square().mean() + (run(f, 30) - 1).square().mean()

    guarded = Reversible(model, Guard(spot_check=0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert off(gradient(guarded, first, None, loss), gradient(model, first, None, loss)) < 1e-3
    assert guarded.report().repaired == 0
    assert not guarded._watch.together.found


@pytest.mark.parametrize("action", ["repair", "raise"])
def test_gradients_of_several_calls_that_are_zero_are_right(action):
    """As those of a triplet loss whose margins are kept."""
    model, x = planted(0.5)
    guarded = Reversible(model, Guard(action=action))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradient(guarded, model, x, lambda f, x: 0 * (f(x) - f(x + 1)).square().sum())
    assert not any(g.any() for g in found)
    assert guarded.report().repaired == 0
    assert guarded.drift_flag() <= 1


def test_a_loss_that_subtracts_rests_apart_from_the_steps_between():
    torch.manual_seed(0)
    model, x = models.real_nvp(4, blocks=8, hidden=(16,)), torch.randn(16, 4)
    guarded = Reversible(model)

    def subtracts(f, x):
        loss = there_and_back(f, x)
        hold(loss, 1.0)
        return loss

    with pytest.warns(DriftWarning, match="nearly cancel"):
        gradient(guarded, model, x, subtracts)
    before = guarded.report().repaired
    assert off(gradient(guarded, model, x), gradient(model, model, x)) < 1e-3
    assert guarded.report().repaired == before  # an ordinary step walks
    restored = Reversible(model)
    restored._watch.load(guarded._watch.state())
    without = gradient(Reversible(model, memory="checkpoint"), model, x, there_and_back)
    for f in (guarded, restored):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert off(gradient(f, model, x, subtracts), without) < 1e-6
        assert f.report().repaired == before + 2
    assert guarded._watch.apart == APART - 2


def test_where_only_one_of_the_calls_that_cancel_has_said_so_all_rest():
    torch.manual_seed(0)
    model, x = models.real_nvp(4, blocks=8, hidden=(16,)), torch.randn(16, 4)
    guarded = Reversible(model)

    def loss(f, x):
        first = f(x).square().sum()
        hold(first, 1.0)  # made first, so that its backward pass comes last
        return first - f(x + 1e-6).square().sum()

    with pytest.warns(DriftWarning, match="nearly cancel"):
        gradient(guarded, model, x, loss)
    assert guarded._watch.rest == REST
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradient(guarded, model, x, loss)


class Padded(Bijection):
    """Twice as many features, the new ones zero: injective, and states of two sizes in one chain."""

    def forward(self, x, context=None):
        return torch.cat((x, 0 * x), 1)

    def inverse(self, z, context=None):
        return z[:, : z.shape[1] // 2]

    def forward_and_log_det(self, x, context=None):
        return self(x), x.new_zeros(len(x))

    def inverse_and_log_det(self, z, context=None):
        return self.inverse(z), z.new_zeros(len(z))


def test_states_of_several_sizes():
    torch.manual_seed(0)
    model = Chain(models.real_nvp(100, blocks=2, hidden=(8,)), Padded(), models.real_nvp(200, blocks=2, hidden=(8,)))
    x = torch.randn(4, 100)
    guarded = Reversible(model)
    for _ in range(2):
        assert off(gradient(guarded, model, x), gradient(model, model, x)) < 1e-5


def test_several_calls_that_do_not_cancel_are_left_alone():
    torch.manual_seed(0)
    model, x = models.real_nvp(4, blocks=8, hidden=(16,)), torch.randn(16, 4)
    guarded = Reversible(model)

    def loss(f, x):
        return loss_of(f, x) + loss_of(f, x.flip(1)) + f.inverse(f(x) + 1).square().sum()

    kept = guarded(x)  # a call that nobody pulls back
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert off(gradient(guarded, model, x, loss), gradient(model, model, x, loss)) < 1e-3
    assert guarded.report().repaired == 0
    del kept
    gradient(guarded, model, x, loss)
    assert not guarded._watch.together.found  # nothing is held on to


def test_a_copy_is_made_between_call_and_backward_pass():
    torch.manual_seed(0)
    model, x = models.real_nvp(4, blocks=4, hidden=(8,)), torch.randn(8, 4)
    guarded = Reversible(model)
    waiting = loss_of(guarded, x)
    gradient(guarded, model, x)
    for other in (copy.deepcopy(guarded), pickle.loads(pickle.dumps(guarded))):
        stored = gradient(other.bijection, other, x)
        assert off(gradient(other, other, x), stored) < 1e-3
    waiting.backward()
    assert not guarded._watch.together.found


class Looked(nn.Module):
    """A shift with a table whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x) + self.table(torch.arange(len(x)) % 2)


@pytest.mark.parametrize("spot_check", [0, 1])
def test_sparse_gradients(spot_check):
    torch.manual_seed(0)
    model = Chain(
        blocks.AdditiveCoupling(Looked()), blocks.AdditiveCoupling(Looked(), blocks.Split(swap=True)), shape=(6,)
    )
    x = torch.randn(8, 6)

    def dense(f):
        model.zero_grad()
        (loss_of(f, x) + loss_of(f, x.flip(1))).backward()
        return [p.grad.to_dense() for p in model.parameters()]

    guarded = Reversible(model, Guard(spot_check=spot_check))
    assert off(dense(guarded), dense(model)) < 1e-5
    assert guarded.report().spot_checks == 2 * spot_check


def test_no_false_alarm_of_the_spot_check(recwarn):
    model = models.real_nvp(4, blocks=2).requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    (Reversible(model, Guard(spot_check=1))(x).sum() * 0).backward()
    assert not [w for w in recwarn if "spot check" in str(w.message)]


def test_anchors_keep_to_the_budget_for_any_batch():
    wrapped = Reversible(models.real_nvp(4, blocks=4), Guard(budget=4 * 4 * 4 * 3))
    watch = wrapped._watch
    watch.anchors = {(False, k): 64 for k in (1, 2, 3)}
    watch.names = {(False, k): str(k) for k in (1, 2, 3)}
    assert len(watch.places(False, 64)) == 3
    assert not watch.places(False, 4096 * 16)


def stacked(net, depth=4):
    parts = [p for _ in range(depth) for p in (blocks.AffineCoupling(net()), blocks.Permutation.reverse(4))]
    return Chain(*parts, shape=(4,))


def test_calls_made_while_resting_are_recomputed():
    torch.manual_seed(0)
    model = stacked(lambda: nets.MLP(2, 4), 6)
    with torch.no_grad():
        for block in model:
            if isinstance(block, blocks.AffineCoupling):
                list(block.parameters())[-2].mul_(20)
    wrapped = Reversible(model, Guard(budget=0, spot_check=0))
    x = torch.randn(2, 16, 4)
    for _ in range(45):
        model.zero_grad()
        (wrapped(x[0]).square().sum() + wrapped(x[1]).square().sum()).backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        (model(x[0]).square().sum() + model(x[1]).square().sum()).backward()
        assert angle(found, [p.grad for p in model.parameters()]) < 1e-2


class Timed(Bijection):
    """A scale that depends on a time, one number for all samples."""

    closed_form = True

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(0.1 * torch.randn(4))

    def forward_and_log_det(self, x, context=None):
        return x * (self.rate * context).exp(), (self.rate * context).sum().expand(len(x))

    def inverse_and_log_det(self, z, context=None):
        return z * (-self.rate * context).exp(), -(self.rate * context).sum().expand(len(z))

    def forward(self, x, context=None):
        return self.forward_and_log_det(x, context)[0]

    def inverse(self, z, context=None):
        return self.inverse_and_log_det(z, context)[0]


@pytest.mark.parametrize("wanted", [False, True])
def test_a_spot_check_with_a_context_without_dimensions(wanted):
    torch.manual_seed(0)
    model, time = Chain(*(Timed() for _ in range(4)), shape=(4,)), torch.tensor(0.7, requires_grad=wanted)
    guarded, x, leaves = Reversible(model, Guard(spot_check=1)), torch.randn(16, 4), [*model.parameters()]
    leaves += [time] * wanted

    def found(f):
        z, log_det = f.forward_and_log_det(x, time)
        return torch.autograd.grad((z.square().sum(1) / 2 - log_det).mean(), leaves)

    assert off(found(guarded), found(model)) < 1e-6
    assert guarded.report().spot_checks == 1


class Centred(nn.Module):
    """A net that looks at the whole batch, and is no BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        return self.last(hidden - hidden.mean(0))


def test_a_spot_check_of_nets_that_look_at_the_whole_batch(recwarn):
    torch.manual_seed(0)
    parts = [blocks.AffineCoupling(Centred(), partition=blocks.Split(swap=k % 2 == 1)) for k in range(4)]
    model, x = Chain(*parts), torch.randn(32, 4)
    guarded = Reversible(model, Guard(spot_check=2))
    for _ in range(4):
        assert off(gradient(guarded, model, x), gradient(model, model, x)) < 1e-4
    report = guarded.report()
    assert (report.spot_checks, report.repaired) == (2, 0)
    assert not recwarn


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 10**30},
        {"steps": math.inf},
        {"drift": [1]},
        {"anchors": [[0, 1e999, 1, "x"]]},
        {"within": [[0, [1.0]]]},
    ],
)
def test_what_is_no_state_of_a_guard_is_refused(wrong):
    guarded = Reversible(planted(1.0)[0])
    before = guarded.guard_state()
    with pytest.raises(CheckpointError, match="not the state of a guard"):
        guarded.load_guard_state({**before, **wrong})
    assert str(guarded.guard_state()) == str(before)
