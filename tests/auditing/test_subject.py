"""The model under test: finding the samples that make it raise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilip.auditing.subject import run_guarded
from bilip.errors import InputError, NotConverged

pytestmark = pytest.mark.numeric


class Picky:
    """Doubles its input, and raises when any sample has a marked first entry."""

    def __init__(self, error=ValueError):
        self.calls, self.error, self.shapes = 0, error, set()

    def __call__(self, x, context):
        self.calls += 1
        self.shapes.add(tuple(x.shape))
        if bool((x[:, 0] != 0).any()):
            raise self.error("marked")
        return (2 * x, x.sum(1) + (0 if context is None else context[:, 0]))


def batch(guilty, count):
    x = torch.arange(1.0, 1 + 2 * count).reshape(count, 2)
    x[:, 0] = 0
    for k in guilty:
        x[k, 0] = 1e-6
    return x


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 16).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))), st.booleans())
def test_any_set_of_guilty_samples_is_found(case, conditional):
    count, guilty = case
    x, call = batch(guilty, count), Picky()
    context = torch.arange(count)[:, None] * 100.0 if conditional else None
    outcome = run_guarded(call, x, context)
    assert set(outcome.failed.nonzero().flatten().tolist()) == guilty
    assert outcome.exact
    assert outcome.message == ("ValueError: marked" if guilty else "")
    assert call.shapes == {(count, 2)}  # smaller batches round differently
    good = ~outcome.failed
    assert torch.equal(outcome.value[good], 2 * x[good])
    expected = x.sum(1) + (0 if context is None else context[:, 0])
    assert torch.equal(outcome.values[1][good], expected[good])
    assert outcome.value[~good].isnan().all()
    assert outcome.values[1][~good].isnan().all()


@pytest.mark.parametrize("guilty", [{3}, set(range(0, 256, 2)), set(range(1, 256)), set(range(30))])
def test_large_batches_within_the_budget(guilty):
    call = Picky()
    outcome = run_guarded(call, batch(guilty, 256))
    assert outcome.exact
    assert set(outcome.failed.nonzero().flatten().tolist()) == guilty
    assert call.calls <= 530


def test_when_the_budget_ends_nobody_guilty_goes_free():
    guilty = set(range(0, 64, 2))
    call = Picky()
    outcome = run_guarded(call, batch(guilty, 64), budget=10)
    assert not outcome.exact
    assert guilty <= set(outcome.failed.nonzero().flatten().tolist())
    assert call.calls <= 10 + 16 + 3
    assert torch.isfinite(outcome.value[~outcome.failed]).all()


def test_everybody_fails():
    outcome = run_guarded(Picky(), batch(range(5), 5))
    assert outcome.failed.all()
    assert outcome.exact
    assert outcome.value.shape == (5, 2)
    assert outcome.values[1].shape == (5,)
    assert all(v.isnan().all() for v in outcome.values)
    outcome = run_guarded(Picky(), batch(range(100), 100))  # too many to try each as the good one
    assert outcome.failed.all()
    assert not outcome.exact


def test_samples_that_fail_only_together():
    def crowded(x, context):
        if len(x.unique(dim=0)) > 3:
            raise RuntimeError("too many kinds")
        return x

    outcome = run_guarded(crowded, batch((), 8))
    assert not outcome.exact
    assert outcome.message == "RuntimeError: too many kinds"


def test_a_model_that_raises_at_random():
    calls = []

    def moody(x, context):
        calls.append(1)
        if len(calls) != 2:
            raise RuntimeError("no")
        return x, x.sum(1)

    outcome = run_guarded(moody, batch((), 4))
    assert outcome.failed.all()
    assert len(outcome.values) == 2


@pytest.mark.parametrize("error", [InputError, NotImplementedError, torch.OutOfMemoryError])
def test_complaints_about_the_whole_call_are_raised(error):
    with pytest.raises(error, match="marked"):
        run_guarded(Picky(error), batch({1}, 4))


def test_an_inverse_that_does_not_converge_is_about_samples():
    outcome = run_guarded(Picky(NotConverged), batch({1}, 4))
    assert outcome.failed.tolist() == [False, True, False, False]
    assert outcome.message == "NotConverged: marked"


def test_an_exception_without_words_names_its_place():
    def bare(x, context):
        assert (x[:, 0] == 0).all()
        return x

    outcome = run_guarded(bare, batch({0}, 2))
    assert outcome.message.startswith("AssertionError")
    assert outcome.failed.tolist() == [True, False]


def test_interrupts_pass():
    with pytest.raises(KeyboardInterrupt):
        run_guarded(Picky(KeyboardInterrupt), batch({0}, 2))
