"""What cancels within one call: no wrong gradient without a word where a loss subtracts samples of a batch, or positions of a sample."""

import copy
import json
import math
import warnings
import weakref

import pytest
import torch
from torch import nn

from bilip import Chain, blocks, models
from bilip.errors import DriftError
from bilip.reversible import DriftWarning, Guard, Reversible, call
from bilip.reversible.function import hold
from bilip.reversible.guard import SETS
from bilip.reversible.within import CALLS, NOTHING, ODD, PARTS, TAKEN_OVER, Within, cancelled, places, weights
from catalogue import squash
from walks import TOLERANCE, gradient, loss_of, off, planted

pytestmark = pytest.mark.numeric


def stays_right(model, x, loss, leaves=None):
    """Three steps; what float32 cannot tell of the stored gradient is allowed, where the model is all that is trained."""
    stored = gradient(model, leaves or model, x, loss)
    noise = 0.0
    if leaves is None:
        reference = copy.deepcopy(model).double()
        noise = off(gradient(reference, reference, x.double(), loss), stored)
    guarded = Reversible(model, Guard(spot_check=0))
    for _ in range(3):
        assert off(gradient(guarded, leaves or model, x, loss), stored) < max(1e-3, 3 * noise)


def halves_apart(f, x):
    return difference(f(x))


def difference(z):
    return (z[:16] - z[16:]).tanh().mean()


@pytest.mark.parametrize("layout", ["halves", "neighbours", "shuffled"])
@pytest.mark.parametrize("squared", [False, True], ids=["difference", "squared"])
@pytest.mark.parametrize("step", [1e-2, 1e-3, 1e-4])
def test_a_loss_that_subtracts_within_a_batch_and_says_nothing(step, squared, layout):
    """Drift counts relative to what the gradients of the samples leave, not to them."""
    model, x = planted(1e-3)
    pairs = torch.cat([x, x + step * torch.randn_like(x)])
    order = torch.arange(32)
    if layout != "halves":
        order = order.view(2, -1).T.flatten() if layout == "neighbours" else torch.randperm(32)

    def difference(f, pairs):
        z, log_det = f.forward_and_log_det(pairs[order])
        value = (z.tanh() - log_det[:, None] / 8)[order.argsort()]
        apart = (value[16:] - value[:16]) / step
        return (apart.square() if squared else apart).mean()

    stays_right(model, pairs, difference)


@pytest.mark.parametrize("how", ["autograd.grad", "inputs"])
@pytest.mark.parametrize("calls", ["one call", "two calls"])
def test_gradients_that_nobody_asks_for_hide_nothing(how, calls):
    """Those of the last block are 1e5 times larger than those that are asked for, and do not cancel."""
    torch.manual_seed(0)
    trunk = models.real_nvp(8, blocks=6, hidden=(32,), activation="tanh", coupling="additive")
    with torch.no_grad():
        [p for p in trunk[4].t.parameters() if p.ndim > 1][-1].mul_(3e4)
    model, x = Chain(*trunk, blocks.ActNorm(8), shape=(8,)), torch.randn(64, 8)
    model(x)
    wanted, near = [p for block in list(model)[:5] for p in block.parameters()], x + 1e-2 * torch.randn_like(x)

    def asked(f):
        if calls == "one call":
            z, log_det = f.forward_and_log_det(torch.cat([x, near]))
            first, second = z.chunk(2)
        else:
            (first, log_det), second = f.forward_and_log_det(x), f(near)
        loss = 100 * (first.sin() - second.sin()).mean() - 1e4 * log_det.mean()
        if how == "autograd.grad":
            return torch.autograd.grad(loss, wanted)
        loss.backward(inputs=wanted)
        found = [p.grad for p in wanted]
        model.zero_grad(set_to_none=True)
        return found

    stored, guarded = asked(model), Reversible(model, Guard(spot_check=0))
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = asked(guarded)
        assert off(found, stored) < 1e-3 or any(issubclass(one.category, DriftWarning) for one in caught)


def test_a_flow_that_was_frozen_at_its_call_alone_is_judged_as_frozen():
    """As a critic is whose parameters ask for gradients again before the backward pass: what it would get hides nothing."""
    torch.manual_seed(0)
    trunk = models.real_nvp(8, blocks=6, hidden=(32,), activation="tanh", coupling="additive")
    with torch.no_grad():
        [p for p in trunk[4].t.parameters() if p.ndim > 1][-1].mul_(300)
    model, encoder, x = Chain(*trunk, blocks.ActNorm(8), shape=(8,)), nn.Linear(8, 8), torch.randn(64, 8)
    model(x)
    pairs = torch.cat([x, x + 1e-4 * torch.randn_like(x)])

    def repaired(again):
        guarded = Reversible(model, Guard(spot_check=0))
        for _ in range(3):
            model.requires_grad_(False)
            z, log_det = guarded.forward_and_log_det(encoder(pairs))
            model.requires_grad_(again)
            (1e4 * (z[:64].sin() - z[64:].sin()).mean() - 1e4 * log_det.mean()).backward()
        return guarded.report().repaired

    assert repaired(again=False) == repaired(again=True) == 3


def pixelwise(size=1, mode="zeros"):
    """Couplings of images, one of them squashed, whose nets look at `size` pixels."""
    torch.manual_seed(0)
    parts = []
    for k in range(8):
        net = nn.Sequential(
            nn.Conv2d(2, 16, size, padding="same", padding_mode=mode),
            nn.ELU(),
            nn.Conv2d(16, 4, size, padding="same", padding_mode=mode),
        )
        parts.append(blocks.AffineCoupling(net, partition=blocks.Split(swap=k % 2 == 1)))
    with torch.no_grad():
        parts[3].t[-1].bias[2:] -= 8
    return Chain(*parts, shape=(4, 8, 8))


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("flat", [False, True], ids=["image", "flat"])
def test_a_loss_that_subtracts_pixels_of_one_sample(flat, samples):
    model = pixelwise()
    x = torch.randn(samples, 4, 8, 4).repeat_interleave(2, dim=3)
    x[..., 1::2] += 1e-3 * torch.randn(samples, 4, 8, 4)

    def difference(f, x):
        z = f(x).unflatten(1, (4, 8, 8)) if flat else f(x)
        return (z[..., 1::2] - z[..., ::2]).tanh().mean()

    stays_right(Chain(*model, blocks.Flatten((4, 8, 8)), shape=(4, 8, 8)) if flat else model, x, difference)


class Shared(nn.Module):
    """A net that looks at the entries of a flat state one by one, with the same weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 16, 1), nn.Tanh(), nn.Conv1d(16, 2, 1))

    def forward(self, x):
        return self.net(x.unsqueeze(1)).flatten(1)


@pytest.mark.parametrize("squared", [False, True], ids=["difference", "squared"])
@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("step", [1e-2, 1e-3])
def test_a_loss_that_subtracts_entries_of_a_flat_state(step, samples, squared):
    """The ends do not tell: each entry may have parameters of its own."""
    torch.manual_seed(0)
    parts = [blocks.AffineCoupling(Shared(), partition=blocks.Split(swap=k % 2 == 1)) for k in range(8)]
    with torch.no_grad():
        parts[3].t.net[-1].bias[1:] -= 9
    x = torch.randn(samples, 32).repeat_interleave(2, dim=1)
    x[:, 1::2] += step * torch.randn(samples, 32)

    def difference(f, x):
        z = f(x)
        apart = z[:, 1::2] - z[:, ::2]
        return (apart.square() if squared else apart.tanh()).mean()

    stays_right(Chain(*parts, shape=(64,)), x, difference)


@pytest.mark.parametrize("samples", [1, 4])
def test_a_loss_that_subtracts_tokens_whose_features_come_last(samples):
    torch.manual_seed(0)
    parts = []
    for k in range(8):
        net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6))
        parts.append(blocks.AffineCoupling(net, partition=blocks.Split(dim=-1, swap=k % 2 == 1)))
    with torch.no_grad():
        parts[3].t[-1].bias[3:] -= 8
    x = torch.randn(samples, 4, 6).repeat_interleave(2, dim=1)
    x[:, 1::2] += 1e-3 * torch.randn(samples, 4, 6)
    stays_right(Chain(*parts, shape=(8, 6)), x, lambda f, x: f(x).unflatten(1, (4, 2)).diff(dim=2).tanh().mean())


def test_a_loss_that_asks_for_the_same_of_shifted_images():
    model = pixelwise(size=3, mode="circular")
    x = torch.randn(4, 4, 8, 8)
    pairs = torch.cat([x, x.roll(1, 3) + 1e-3 * torch.randn_like(x)])

    def consistency(f, pairs):
        z = f(pairs)
        return (z[:4].roll(1, 3) - z[4:]).square().mean()

    stays_right(model, pairs, consistency)


@pytest.mark.parametrize("where", ["input", "context"])
def test_what_is_trained_before_a_frozen_flow(where):
    """The gradients of the samples meet in the parameters of what comes before."""
    torch.manual_seed(0)
    if where == "input":
        model, first = models.real_nvp(8, blocks=8, hidden=(16,), activation="tanh"), nn.Linear(8, 8)
    else:
        model, first = models.real_nvp(8, blocks=8, hidden=(16,), activation="tanh", context=8), nn.Linear(8, 8)
    squash(model[3], 1e-3)
    model.requires_grad_(False)
    x = torch.randn(16, 8)
    pairs = torch.cat([x, x + 1e-3 * torch.randn_like(x)])

    def difference(f, pairs):
        z = f(first(pairs)) if where == "input" else f(x.repeat(2, 1), first(pairs))
        return (z[16:] - z[:16]).tanh().mean()

    stays_right(model, pairs, difference, first)


class Lifted(nn.Module):
    """A net of images that adds the same context to every pixel."""

    def __init__(self, context):
        super().__init__()
        self.into, self.lift, self.out = nn.Conv2d(2, 16, 1), nn.Linear(context, 16), nn.Conv2d(16, 4, 1)

    def forward(self, x, context):
        return self.out((self.into(x) + self.lift(context)[:, :, None, None]).tanh())


@pytest.mark.parametrize("kind", ["encoded", "own", "one for all"])
def test_a_context_adds_up_the_pixels_of_a_frozen_flow(kind):
    """Of each sample, so that a loss that subtracts pixels leaves little of its gradient."""
    torch.manual_seed(0)
    parts = [blocks.AffineCoupling(Lifted(4), partition=blocks.Split(swap=k % 2 == 1)) for k in range(8)]
    with torch.no_grad():
        parts[3].t.out.bias[2:] -= 8
    model = Chain(*parts, shape=(4, 8, 8)).requires_grad_(False)
    x = torch.randn(4, 4, 8, 4).repeat_interleave(2, dim=3)
    x[..., 1::2] += 1e-3 * torch.randn(4, 4, 8, 4)
    first, h = nn.Linear(4, 4), torch.randn(4, 4)
    prompt = nn.ParameterList([torch.randn(4 if kind == "own" else 1, 4)])

    def difference(f, x):
        z = f(x, {"encoded": first(h), "own": prompt[0], "one for all": prompt[0].expand(4, 4)}[kind])
        return (z[..., 1::2] - z[..., ::2]).tanh().mean()

    stays_right(model, x, difference, first if kind == "encoded" else prompt)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_context_that_is_trained_and_serves_all_samples(frozen):
    class Prompted(nn.Sequential):
        def forward(self, x, context):
            return super().forward(x + context)

    torch.manual_seed(0)
    parts = [
        blocks.AffineCoupling(
            Prompted(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)), partition=blocks.Split(swap=k % 2 == 1)
        )
        for k in range(8)
    ]
    model = Chain(*parts, shape=(8,))
    squash(model[3], 1e-3)
    model.requires_grad_(not frozen)
    prompt, x = nn.ParameterList([torch.randn(1, 4)]), torch.randn(16, 8)
    pairs = torch.cat([x, x + 1e-3 * torch.randn_like(x)])

    def difference(f, pairs):
        z = f(pairs, prompt[0])
        return (z[16:] - z[:16]).tanh().mean()

    stays_right(model, pairs, difference, prompt)


@pytest.mark.parametrize("seed", range(3))
def test_a_prompt_near_its_optimum(seed):
    """Little is left of the gradients of the samples there, and nothing cancels at the ends."""
    torch.manual_seed(seed)
    model = models.real_nvp(8, blocks=8, hidden=(32,), activation="tanh", context=4).requires_grad_(False)
    squash(model[3], 1e-3)
    prompt, x = nn.ParameterList([torch.randn(1, 4)]), torch.randn(64, 8) * torch.linspace(0.5, 2, 8) + 1

    def loss(f, prompt):
        z, log_det = f.forward_and_log_det(x.to(prompt[0]), prompt[0].expand(64, 4))
        return (z.square().sum(1) / 2 - log_det).mean()

    optimizer = torch.optim.LBFGS(prompt.parameters(), lr=1, max_iter=2, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = loss(model, prompt)
        value.backward()
        return value

    guarded, reference = Reversible(model, Guard(spot_check=0)), copy.deepcopy(model).double()
    for _ in range(3):
        for _ in range(10):
            optimizer.step(closure)
        exact = copy.deepcopy(prompt).double()
        stored = gradient(model, prompt, prompt, loss)
        noise = off(gradient(reference, exact, exact, loss), stored)
        assert off(gradient(guarded, prompt, prompt, loss), stored) < max(1e-3, 3 * noise)


@pytest.mark.parametrize("where", ["input", "context"])
def test_a_frozen_flow_between_an_encoder_and_a_batch_norm_is_left_alone(where):
    """Behind it gradients cancel to the last digit; what comes before adds up those at the input, or at the context."""
    torch.manual_seed(0)
    context = 8 if where == "context" else 0
    model = models.real_nvp(8, blocks=8, activation="tanh", context=context).requires_grad_(False)
    first, head = nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 5))
    x, labels = torch.randn(64, 8), torch.randint(5, (64,))

    def loss(f, x):
        z = f(first(x)) if where == "input" else f(x, first(x))
        return nn.functional.cross_entropy(head(z), labels)

    guarded = Reversible(model, Guard(spot_check=0))
    stored = gradient(model, first, x, loss)
    for _ in range(3):
        assert off(gradient(guarded, first, x, loss), stored) < 1e-3
    assert guarded.report().repaired == 0


@pytest.mark.parametrize("squared", [False, True], ids=["difference", "squared"])
def test_a_healthy_loss_between_does_not_speak_for_one_that_subtracts(squared):
    """At the output the gradients of both cancel to the last digit; at the input a steep front makes them alike."""
    torch.manual_seed(1)
    parts = list(models.real_nvp(8, blocks=6, hidden=(32,), activation="tanh"))
    squash(parts[2], 1e-3)
    model = Chain(blocks.Logit(1e-4), *parts, shape=(8,))
    guarded, spread = Reversible(model, Guard(spot_check=0)), torch.rand(32, 8)
    spread[0, 0] = 0.003
    pairs = torch.cat([spread, (spread + 1e-3 * torch.rand(32, 8)).clamp(1e-3, 1)])

    def difference(f, x):
        z = f(x)
        apart = z[:32] - z[32:]
        return (apart.square() if squared else apart.tanh()).mean()

    reference = copy.deepcopy(model).double()
    stored = gradient(model, model, pairs, difference)
    noise = off(gradient(reference, reference, pairs.double(), difference), stored)
    for _ in range(5):
        gradient(guarded, model, torch.rand(64, 8), lambda f, x: (f(x) - f(x).detach().mean(0)).square().mean())
        assert off(gradient(guarded, model, pairs, difference), stored) < max(1e-3, 3 * noise)


def test_a_difference_that_is_held_is_not_held_twice():
    """Both `hold` and what is measured speak of the same: the stricter counts, not the product."""
    torch.manual_seed(0)
    model, x = models.real_nvp(8, blocks=6, hidden=(16,)), torch.randn(32, 8)
    pairs = torch.cat([x, x + 3e-3 * torch.randn_like(x)])

    def difference(f, pairs):
        z = f(pairs)
        value = (z[32:] - z[:32]).tanh().mean()
        assert hold(value, 0.03) == 1
        return value

    guarded = Reversible(model, Guard(spot_check=0))
    gradient(guarded, model, pairs, difference)
    assert guarded.report().tolerance > TOLERANCE * 3e-3 / 3
    assert guarded.report().repaired == 0


def test_a_walk_that_is_good_enough_is_kept_however_much_is_asked():
    """A tolerance close to what the dtype gives, and gradients whose biases are near zero: drift counts, not what it might be."""
    torch.manual_seed(0)
    model, x = models.real_nvp(4, blocks=2, actnorm=True, activation="tanh"), torch.randn(64, 4)
    guarded = Reversible(model, Guard(tolerance=1e-5, spot_check=0))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss_of(guarded, x).backward()
        optimizer.step()
    assert guarded.report().repaired < 15


@pytest.mark.parametrize("action", ["warn", "raise"])
def test_what_cancels_within_a_batch_is_said(action):
    model, x = planted(1e-3)
    pairs = torch.cat([x, x + 1e-3 * torch.randn_like(x)])
    guarded = Reversible(model, Guard(action=action, spot_check=0))
    said = (
        pytest.warns(DriftWarning, match="drifted") if action == "warn" else pytest.raises(DriftError, match="drifted")
    )
    with said:
        gradient(guarded, model, pairs, halves_apart)


def test_gradients_that_a_bias_has_brought_to_zero_are_not_held_to_more():
    """At the output they cancel as those of a loss that subtracts do, at the parameters they do not."""
    torch.manual_seed(0)
    model, x = models.real_nvp(4, blocks=6, actnorm=True), torch.randn(256, 4)
    model(x)
    walks = []

    class Counted(Reversible):
        def _run(self, *args):
            found, made = super()._run(*args)
            walk = made._walk
            made._walk = lambda *a, **k: walks.append(1) or walk(*a, **k)
            return found, made

    guarded = Counted(model, Guard(spot_check=0))

    def centred(f, x):
        z = f(x)
        return (z - z.detach().mean(0)).square().mean()

    gradient(guarded, model, x, centred)
    assert len(walks) == 2  # looked at
    assert guarded.report().tolerance > TOLERANCE / 3
    assert guarded.report().repaired == 0
    walks.clear()
    gradient(guarded, model, x)
    assert len(walks) in (1, 2)


def test_what_is_looked_at_needs_no_memory_for_the_gradients_of_all_blocks(monkeypatch):
    """The second walk tells how large gradients are, and keeps none of them."""
    model, x = planted(1e-3, count=12)
    pairs = torch.cat([x, x + 1e-3 * torch.randn_like(x)])
    seen, alive, walk, back = [], [], call.Call._walk, call.Call._back

    def watched_back(self, *args, **kwargs):
        found = back(self, *args, **kwargs)
        seen[-1].extend(map(weakref.ref, found.parameters.values()))
        alive[-1].append(sum(one() is not None for one in seen[-1]))
        return found

    def watched_walk(self, *args, **kwargs):
        seen.append([])
        alive.append([])
        return walk(self, *args, **kwargs)

    monkeypatch.setattr(call.Call, "_back", watched_back)
    monkeypatch.setattr(call.Call, "_walk", watched_walk)
    gradient(Reversible(model, Guard(spot_check=0)), model, pairs, halves_apart)
    of_one = len(list(model[0].parameters()))
    first, second = alive[:2]
    assert first[-1] == 12 * of_one
    assert max(second[:12]) <= 2 * of_one  # what comes after is the repair


@pytest.mark.parametrize("break_at", [1, 4])
def test_a_resumed_training_looks_where_one_without_a_break_does(break_at, monkeypatch):
    """What was measured within calls decides which steps are measured again, and so which are repaired."""
    model, x = planted(1e-2)
    pairs = torch.cat([x, x + 1e-2 * torch.randn_like(x)])
    walks, walk = [], call.Call._walk
    monkeypatch.setattr(call.Call, "_walk", lambda *a, **k: walks.append("result" in k) or walk(*a, **k))
    losses = [halves_apart, loss_of]

    def steps(guarded, begin, end):
        walks.clear()
        return [g for k in range(begin, end) for g in gradient(guarded, model, pairs, losses[k % 3 == 0])], walks.copy()

    one, other = Reversible(model), Reversible(model)
    steps(one, 0, break_at)
    carried = json.loads(json.dumps(one.guard_state()))
    uncut, looked = steps(one, break_at, 12)
    other.load_guard_state(carried)
    resumed, looked_again = steps(other, break_at, 12)
    assert looked == looked_again
    assert all(torch.equal(a, b) for a, b in zip(uncut, resumed, strict=True))
    assert one.guard_state() == other.guard_state()
    older = Reversible(model)
    older.load_guard_state({k: v for k, v in carried.items() if k != "within"})
    assert older.report().steps == break_at


@pytest.mark.parametrize("how", ["frozen", "left out"])
def test_what_cancelled_where_a_part_was_trained_says_nothing_of_the_whole(how):
    """The last block has next to nothing to say, and was trained alone before."""
    torch.manual_seed(1)
    model = models.real_nvp(8, blocks=8, hidden=(16,))
    squash(model[3], 3e-3)
    with torch.no_grad():
        for p in model[-1].parameters():
            if p.ndim > 1:
                p.mul_(1e-5)
    part, x = next(p for p in model[-1].parameters() if p.ndim > 1), torch.randn(16, 8)
    pairs, guarded = torch.cat([x, x + 1e-3 * torch.randn_like(x)]), Reversible(model, Guard(spot_check=0))
    for p in model.parameters():
        p.requires_grad_(how == "left out" or p is part)
    for _ in range(CALLS):
        torch.autograd.grad(difference(guarded(pairs)), part)
    model.requires_grad_()
    stored = gradient(model, model, pairs, halves_apart)
    for _ in range(3):
        assert off(gradient(guarded, model, pairs, halves_apart), stored) < 1e-3


def test_as_much_is_known_of_many_parts_as_of_a_few():
    """Where another part is trained in every step; what captured steps read is never let go."""
    watch = Reversible(models.real_nvp(4, blocks=2))._watch
    read = watch.within_of(False, ["captured"])
    read.captured = True
    for k in range(2 * SETS):
        watch.within_of(False, [str(k)])
    assert len(watch.within) == SETS + 1
    assert watch.within_of(False, ["captured"]) is read
    assert watch.within_of(True, ["captured"]) is not read


def test_a_step_that_rests_makes_the_number_that_captured_steps_read():
    """Made while a step is captured it would be nothing again in every replay, and each of them run again."""
    model, x = planted(1e-3)
    guarded = Reversible(model, Guard(spot_check=0))
    guarded._watch.rest = 1
    gradient(guarded, model, x)
    (within,) = guarded._watch.within.values()
    gain = within.gain
    gradient(guarded, model, torch.cat([x, x + 0.1]), halves_apart)
    gradient(guarded, model, torch.cat([x, x + 0.1]), halves_apart)
    assert gain is not None
    assert within.gain is gain
    assert gain > 0


def test_captured_steps_go_on_with_the_numbers_of_a_state_that_is_loaded():
    """They read and write the tensors that they were recorded with, whatever is loaded behind them."""
    model, x = planted(1e-2)
    pairs = torch.cat([x, x + 1e-2 * torch.randn_like(x)])
    one, other, fresh = (Reversible(model, Guard(spot_check=0)) for _ in range(3))
    for f, steps in ((one, 2), (other, 5)):
        for _ in range(steps):
            gradient(f, model, pairs, halves_apart)
    watch = one._watch
    (within,) = watch.within.values()
    counter, gain = watch.counters[x.device], within.gain
    for source in (other, fresh):
        state = source.guard_state()
        one.load_guard_state(state)
        assert watch.counters[x.device] is counter
        (within,) = watch.within.values()
        assert within.gain is gain
        assert int(counter) == state["count"]
        loaded = [*source._watch.within.values()]
        assert float(gain) == max(loaded[0].gains if loaded else [0.0])
        assert one.guard_state()["count"] == state["count"]
        gradient(one, model, pairs, halves_apart)
        assert float(gain) == max(within.gains)


@pytest.mark.parametrize("step", [1e-3, 1e-4])
def test_a_captured_step_is_held_as_those_before_it_were_and_asks_for_more(step, monkeypatch):
    """It cannot stop to look; its flag says that it has to be run again."""
    model, x = planted(1e-3)
    near = torch.randn_like(x)

    def within(f, x):
        z = f(x)
        return (z[:16] - z[16:]).square().mean()  # at the output they cancel to the last digit, whatever the step

    guarded = Reversible(model, Guard(spot_check=0))
    for _ in range(3):
        gradient(guarded, model, torch.cat([x, x + 0.1 * near]), within)
    pairs = torch.cat([x, x + step * near])
    monkeypatch.setattr(call, "capturing", lambda x: True)
    guarded.drift_flag().zero_()
    gradient(guarded, model, pairs, within)
    assert guarded.drift_flag() > 1


def test_a_captured_step_before_which_none_was_looked_at_asks_for_a_look(monkeypatch):
    """As where the steps that warm up have rested. The step that is run again looks, and the next replay knows."""
    model, x = planted(1e-3)
    pairs = torch.cat([x, x + 1e-3 * torch.randn_like(x)])
    guarded = Reversible(model, Guard(spot_check=0))

    def flag_of(loss):
        with monkeypatch.context() as patched:
            patched.setattr(call, "capturing", lambda x: True)
            gradient(guarded, model, pairs, loss)
        return float(guarded.drift_flag())

    assert flag_of(halves_apart) > 1
    gradient(guarded, model, pairs)
    guarded.drift_flag().zero_()
    assert flag_of(loss_of) <= 1


@pytest.mark.parametrize("squared", [False, True], ids=["difference", "squared"])
@pytest.mark.parametrize("step", [4e-3, 2e-3])
def test_a_captured_step_expects_more_to_cancel_where_less_is_left(step, squared, monkeypatch):
    """Of two views that come closer; at the ends nothing has changed."""
    for seed in range(6):
        torch.manual_seed(seed)
        parts = list(models.real_nvp(8, blocks=6, hidden=(32,), activation="tanh"))
        squash(parts[2], 1e-3)
        model = Chain(blocks.Logit(1e-4), *parts, shape=(8,))
        x, apart = torch.rand(32, 8), torch.rand(32, 8)
        far, near = (torch.cat([x, (x + s * apart).clamp(1e-3, 1)]) for s in (0.1, step))

        def difference(f, x):
            z = f(x)
            found = z[:32] - z[32:]
            return (found.square() if squared else found.tanh()).mean()

        guarded, reference = Reversible(model, Guard(spot_check=0)), copy.deepcopy(model).double()
        for _ in range(3):
            gradient(guarded, model, far, difference)
        stored = gradient(model, model, near, difference)
        noise = off(gradient(reference, reference, near.double(), difference), stored)
        with monkeypatch.context() as patched:
            patched.setattr(call, "capturing", lambda x: True)
            guarded.drift_flag().zero_()
            found = gradient(guarded, model, near, difference)
        assert guarded.drift_flag() > 1 or off(found, stored) < max(1e-3, 3 * noise)


# ---- its parts


@pytest.mark.parametrize("shape", [(6, 5), (6, 4, 5), (6, 3, 4, 4)])
def test_independent_gradients_do_not_cancel(shape):
    torch.manual_seed(0)
    assert cancelled(torch.randn(shape)) < ODD


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_differences_cancel_wherever_they_are(dim):
    torch.manual_seed(0)
    half = torch.randn(4, 4, 4, 4)
    pairs = torch.cat([half, 1e-3 * torch.randn_like(half) - half], dim=dim)
    assert cancelled(pairs) > 100
    assert cancelled(None, pairs, torch.ones(len(pairs))) == cancelled(pairs)
    assert cancelled(torch.zeros(4, 2)) == 0
    assert cancelled(torch.tensor([[1.0], [-1.0]])) > NOTHING


def test_weights_are_drawn_for_samples_and_positions():
    samples, each = weights(torch.zeros(500, 2, 6, 6), 0, entries=False)
    assert abs(float(samples.mean())) < 1e-12
    assert float(samples.square().mean()) == pytest.approx(1)
    assert each.shape == (500, 2, 6, 6)
    assert float(each.square().mean()) == pytest.approx(3, rel=0.15)
    assert weights(torch.zeros(5, 4), 0, entries=False)[1].shape == (5, 1)
    assert weights(torch.zeros(5, 4), 0, entries=True)[1].shape == (5, 4)
    assert weights(torch.zeros(2, 4), 3, entries=False)[0].abs().tolist() == pytest.approx(
        [1, 1]
    )  # one pair: subtracted
    assert not weights(torch.zeros(1, 4), 0, entries=False)[0].any()


def test_what_is_taken_over_and_what_is_not():
    within, here, elsewhere = Within(), [0.8, 0.6], [-0.6, 0.8]
    assert within.like(1.0, here) is None
    assert within.measured(1.0, 7.0, here) == 7.0
    assert within.like(0.9, here) == 7.0
    assert within.like(0.5, here) is None  # less is left
    assert within.like(0.0, here) is None
    assert within.like(2.0, here) is None  # more is left
    assert within.like(1.0, elsewhere) is None
    assert [within.like(1.0, here) for _ in range(TAKEN_OVER)].count(7.0) == TAKEN_OVER - 5
    assert within.measured(1.0, 2.0, here) == 1.0  # as chance has it
    assert within.like(3.0, here) == 1.0
    assert within.like(0.5, here) is None
    assert within.measured(0.0, 0.0, here) == 1.0
    assert within.like(1.0, here) is None


def test_what_is_known_of_some_outputs_says_nothing_of_others():
    within = Within()
    assert not within.knows([1.0, 0.0])
    within.measured(1.0, 7.0, [1.0, 0.0])
    assert within.knows([0.8, 0.6])
    assert not within.knows([0.0, 1.0])
    assert not within.knows([math.nan, math.nan])
    again = Within.of(*within.state())
    assert again.knows([0.8, 0.6])
    assert again.like(1.0, [0.8, 0.6]) == 7.0
    older = Within.of(*within.state()[:3])
    assert not older.knows([0.8, 0.6])
    assert older.like(1.0, [0.8, 0.6]) is None


def test_places_of_images_are_parts_of_them():
    found = places(torch.randn(4, 3, 10, 10), None)
    assert len(found) == 60 + 1 <= PARTS + 1  # parts of 5 entries, and the log-determinant
    assert float(found.square().sum()) == pytest.approx(1)
    assert float(found[-1]) == 0
    assert bool(places(torch.zeros(4, 2), None).isnan().all())


@pytest.mark.parametrize("unit", [-12.0, -7.0, -3.0])
def test_a_loss_in_other_units_does_not_speak_for_one_that_subtracts(unit):
    """Two losses in turn: one of features in small units, and a difference of the others."""
    model, x = planted(5e-3)
    norm = blocks.ActNorm(8, start="identity")
    with torch.no_grad():
        norm.log_scale[:4] = unit
    model = Chain(*model, norm)
    pairs = torch.cat([x, x + 1e-3 * torch.randn_like(x)])

    def small(f, x):
        return f(x)[:, :4].square().mean()

    def difference(f, x):
        z = f(x)[:, 4:]
        return ((z[:16] - z[16:]) / 1e-3).square().mean()

    stored, saving = gradient(model, model, pairs, difference), Reversible(model)
    reference = copy.deepcopy(model).double()
    noise = off(gradient(reference, reference, pairs.double(), difference), stored)
    for _ in range(3):
        gradient(saving, model, pairs, small)
        assert off(gradient(saving, model, pairs, difference), stored) < max(1e-3, 3 * noise)


def test_a_first_look_at_one_sample_does_not_hide_what_cancels_later():
    """Weighed at random, a log-determinant of one sample has no gradient: that says nothing of other losses."""
    model, x = planted(5e-3)
    pairs = torch.cat([x, x + 1e-3 * torch.randn_like(x)])
    stored = gradient(model, model, pairs, halves_apart)
    reference = copy.deepcopy(model).double()
    noise = off(gradient(reference, reference, pairs.double(), halves_apart), stored)
    guarded = Reversible(model, Guard(spot_check=0))
    gradient(guarded, model, x[:1], lambda f, x: f.forward_and_log_det(x)[1].sum())
    assert off(gradient(guarded, model, pairs, halves_apart), stored) < max(1e-3, 3 * noise)


class Scaled(nn.Module):
    """A net with one number to train: the gradients of all samples lie on one line."""

    def __init__(self, net):
        super().__init__()
        self.net, self.gain = net.requires_grad_(False), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.gain * self.net(x)


def test_one_draw_of_weights_that_cancels_by_chance_does_not_decide(monkeypatch):
    """Gradients on a line, weighed at random, add up to less than a tenth of their usual sum in 8 of 100 draws."""
    model, x = planted(1e-2)
    model.requires_grad_(False)
    model[3].t = Scaled(model[3].t)
    pairs = torch.cat([x, x + 1e-2 * torch.randn_like(x)])
    gain, known = model[3].t.gain, []
    keep = torch.eye(len(pairs)).unsqueeze(-1)
    z = model(pairs)
    alone = [one * z + (1 - one) * z.detach() for one in keep]
    each = torch.stack([torch.autograd.grad(difference(latents), gain, retain_graph=True)[0] for latents in alone])
    lost = float(each.norm() / each.sum().abs())
    assert lost > 2 * ODD
    monkeypatch.setattr(Within, "measured", lambda *a: known.append(a[2] / a[1]) or 1.0)
    for step in range(60):
        guarded = Reversible(model, Guard(spot_check=0))
        guarded._watch.steps = step
        torch.autograd.grad(halves_apart(guarded, pairs), gain)
    assert len(known) == 60
    assert min(known) > lost / 5


class Narrow(nn.Module):
    """A net in 16 bits behind a state in 32, as autocast runs it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.net(x).float()


@pytest.mark.parametrize("below", [1, 2, 4])
def test_a_loss_that_is_scaled_to_what_16_bits_hold_is_looked_at_all_the_same(below):
    """As a `GradScaler` scales it. What cancels is small beside it, and does not cancel as weighed at random: that is not held."""
    torch.manual_seed(0)
    model = models.real_nvp(8, blocks=8, hidden=(16,), activation="tanh")
    squash(model[3], 1e-3)
    for block in model:
        block.t = Narrow(block.t)
    x = torch.randn(16, 8)
    pairs = torch.cat([x, x + 1e-3 * torch.randn_like(x)])

    def scaled(scale):
        return lambda f, pairs: scale * halves_apart(f, pairs)

    def is_finite(scale):
        return all(g.isfinite().all() for g in gradient(model, model, pairs, scaled(scale)))

    most = max(2.0**k for k in range(40) if is_finite(2.0**k))
    loss = scaled(most / below)
    guarded = Reversible(model, Guard(spot_check=0))
    found = gradient(guarded, model, pairs, loss)
    assert off(found, gradient(model, model, pairs, loss)) < 1e-3
    (within,) = guarded._watch.within.values()
    assert within.gains  # measured: no guess that rests


def test_what_is_expected_follows_what_is_left_of_the_gradients():
    within, one = Within(), torch.ones((), dtype=torch.float64)
    assert within.expected(one, one) == 1  # unknown
    assert within.expected(one, one, NOTHING) == NOTHING
    within.measured(1.0, 2.0, [1.0])
    assert within.expected(one, one, NOTHING) == 1
    assert within.expected(one / 10, one) == pytest.approx(20)
    assert within.expected(0 * one, 0 * one) == 1
    assert within.expected(0 * one, one) == float("inf")
    for _ in range(CALLS):
        within.measured(1.0, 0.1, [1.0])
    assert within.expected(one / 10, one) == 1  # the first is forgotten
    within.measured(1.0, float("nan"), [1.0])
    assert within.expected(one / 100, one) == pytest.approx(10)
    assert copy.deepcopy(within).expected(one / 100, one) == pytest.approx(10)
