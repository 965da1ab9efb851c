"""Intervals for shares that stay valid when one looks repeatedly."""

import numpy as np
import pytest

from bilip.auditing.looks import Looks, Watch, share_interval


def test_the_errors_of_all_looks_add_up_to_no_more_than_one_percent():
    from bilip.auditing.looks import _error

    assert sum(_error(k) for k in range(60)) == pytest.approx(0.005)
    assert _error(None) == pytest.approx(0.005)


@pytest.mark.parametrize("allowed", [0.01, 0.001])
def test_clean_samples_decide_at_the_second_look(allowed):
    watch = Watch(Looks(allowed), 10**6, 256)
    for _ in watch:
        pass
    assert watch.look == 1
    assert share_interval(0, watch.count, watch.look)[1] <= allowed
    assert watch.count <= 1.15 * np.log(0.0025) / np.log1p(-allowed) + 64


def test_a_share_just_above_the_limit_is_rarely_called_safe():
    """At a true 1.2 %, looking at 128, 640, 1280, ... 10,240 samples: `safe` in less than one of a hundred trials."""
    rng, looks, wrong = np.random.default_rng(0), Looks(0.01, most=10_240), 0
    for _ in range(2000):
        draws = rng.random(10_240) < 0.012
        watch = Watch(looks, len(draws), 4096)
        for start, stop in watch:
            watch.bad += int(draws[start:stop].sum())
        wrong += share_interval(watch.bad, watch.count, watch.look)[1] <= 0.01
    assert wrong <= 20


def test_many_bad_samples_decide_at_once():
    watch = Watch(Looks(0.01), 10**6, 64)
    for start, stop in watch:
        watch.bad += stop - start
    assert (watch.count, watch.look) == (128, 0)


def test_short_sources_are_read_whole_and_once():
    watch = Watch(Looks(0.01), 300, 128)
    assert list(watch) == [(0, 128), (128, 256), (256, 300)]
    assert share_interval(0, 300, watch.look)[1] > 0.01
