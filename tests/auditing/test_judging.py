"""From measurements to verdicts: intervals for shares that stay valid when one looks repeatedly, limits, remedies and sentences."""

import math

import numpy as np
import pytest

from bilip.auditing.looks import Looks, SequentialTest, share_interval
from bilip.auditing.verdicts import Thresholds, judge
from bilip.record import Measurement

EPS = 2.0**-23


def counted(probe, source="x", *, bad=0, count=10_000, look=1, **values):
    known = {"count": count, "bad": bad, "share_bad": bad / count, "look": look}
    return Measurement(probe, source, values=known | values)


def reconstruction(source="x", **values):
    return counted("reconstruction", source, **values)


def likelihood(source="x", **values):
    return counted("likelihood", source, unknown=values.pop("unknown", 0), **values)


def log_det(source="x", *, error=1e-6, uncertainty=0.0, samples=4, notes=()):
    values = {
        "slogdet_samples": samples,
        "slogdet_error_max": error,
        "slogdet_error_max_uncertainty": uncertainty,
        "claimed": 2.0,
        "measured": 1.0,
    }
    return Measurement("log_det", source, values=values, notes=notes)


def consistency(**flags):
    values = {"stochastic": False, "batch_dependent": False, "cached": False, "cache_hides": False}
    return Measurement("consistency", "x", values=values | flags)


def sampling(**values):
    return counted("sampling", "base", bits_gap=values.pop("bits_gap", 0.0), **values)


def blame(source="x", **values):
    known = {"guilty": "", "guilty_kind": "", "why": "", "guilty_log_det": "", "broken_weight": "", "cause": ""}
    return Measurement("blame", source, values=known | values)


def verdict(*measurements, use="likelihood", thresholds=None, ood=False):
    sources = [{"name": "x", "role": "ood" if ood else "data"}]
    if not any(m.probe == "consistency" for m in measurements):
        measurements = (*measurements, consistency())
    return judge(measurements, sources, thresholds or Thresholds(), EPS)[use]


NEXT = math.nextafter(1e-3, 1)


@pytest.mark.parametrize(
    ("measurements", "status", "number"),
    [
        ([likelihood(), log_det()], "safe", ""),
        ([likelihood(bad=30), log_det()], "unsafe", "share_bad"),
        ([likelihood(bad=10), log_det()], "not-measured", "share_bad"),  # 0.1 % of 10,000: borderline
        ([likelihood(bad=1), log_det()], "safe", ""),
        ([likelihood(count=100), log_det()], "not-measured", "share_bad"),  # too few to exclude 0.1 %
        ([likelihood(count=100, bad=50), log_det()], "unsafe", "share_bad"),
        ([likelihood(unknown=40), log_det()], "not-measured", "share_bad"),
        ([likelihood(bad=60, unknown=40), log_det()], "unsafe", "share_bad"),
        ([likelihood(), log_det(error=1e-3)], "safe", "slogdet_error_max"),
        ([likelihood(), log_det(error=NEXT)], "unsafe", "slogdet_error_max"),
        ([likelihood(), log_det(error=math.nan)], "unsafe", "slogdet_error_max"),
        ([likelihood(), log_det(error=5e-3, uncertainty=0.1)], "not-measured", "slogdet_error_max"),
        ([likelihood(), log_det(error=0.0, uncertainty=2e-3)], "not-measured", "slogdet_error_max"),
        ([likelihood(), log_det(error=0.5, uncertainty=0.1)], "unsafe", "slogdet_error_max"),
        ([likelihood(), log_det(error=math.nan, samples=0)], "not-measured", ""),
        ([likelihood(), log_det(), consistency(stochastic=True)], "unsafe", "stochastic"),
        ([likelihood(), log_det(), consistency(batch_dependent=True)], "unsafe", "batch_dependent"),
        ([likelihood(), log_det(), consistency(cached=True)], "safe", ""),
        ([likelihood(), log_det(), consistency(cached=True, cache_hides=True)], "unsafe", "cache_hides"),
        ([likelihood()], "not-measured", ""),
        ([log_det()], "not-measured", ""),
        ([], "not-measured", ""),
        ([likelihood(bad=5000)], "unsafe", "share_bad"),
        ([log_det(error=1.0)], "unsafe", "slogdet_error_max"),
        ([likelihood("other", bad=5000), likelihood(), log_det()], "safe", ""),
        ([reconstruction(bad=5000), likelihood(), log_det()], "safe", ""),  # a likelihood needs no inverse
    ],
)
@pytest.mark.parametrize("ood", [False, True])
def test_rules_of_likelihood(measurements, status, number, ood):
    found = verdict(*measurements, use="ood-likelihood" if ood else "likelihood", ood=ood)
    assert found.status == status
    if number:
        assert found.number == number
        assert found.quantity is not None
    assert bool(found.remedy) == (status == "unsafe")
    other = verdict(*measurements, use="likelihood" if ood else "ood-likelihood", ood=ood)
    assert other.status == "not-measured"
    assert "there is no" in other.reason


@pytest.mark.parametrize(
    ("measurement", "status"),
    [
        (sampling(), "safe"),
        (sampling(bad=40), "unsafe"),
        (sampling(bits_gap=6.0), "safe"),
        (Measurement("sampling", "x", reason="the model has no base distribution"), "not-measured"),
    ],
)
def test_rules_of_sampling(measurement, status):
    found = verdict(measurement, use="sampling")
    assert found.status == status
    if status == "not-measured":
        assert found.reason == "the model has no base distribution"
    assert verdict(measurement, consistency(stochastic=True), use="sampling").status == "unsafe"


def test_inversion_is_judged_on_data_and_says_where_it_fails_elsewhere():
    sources = [{"name": "x", "role": "data"}, {"name": "noise", "role": "ood"}]
    measured = [reconstruction(), reconstruction("noise", bad=10_000), consistency()]
    found = judge(measured, sources, Thresholds(), EPS)["inversion"]
    assert found.status == "safe"
    assert "100 % of noise" in found.reason
    found = judge([reconstruction(bad=10_000), consistency()], sources, Thresholds(), EPS)["inversion"]
    assert found.status == "unsafe"
    assert found.interval[0] > 0.99


@pytest.mark.parametrize(
    ("thresholds", "measurements", "use", "status"),
    [
        (Thresholds(share=0.9), [likelihood(bad=500), log_det()], "likelihood", "safe"),
        (Thresholds(bad_share=0.1), [likelihood(bad=500), log_det()], "likelihood", "safe"),
        (Thresholds(share=0.96), [likelihood(bad=500), log_det()], "likelihood", "unsafe"),
        (Thresholds(share=1.0), [likelihood(bad=1), log_det()], "likelihood", "unsafe"),
        (Thresholds(share=1.0), [likelihood(), log_det()], "likelihood", "safe"),
        (Thresholds(log_det=1e-7), [likelihood(), log_det()], "likelihood", "unsafe"),
        (Thresholds(log_det=0.1), [likelihood(), log_det(error=0.05)], "likelihood", "safe"),
        (Thresholds(sample_gap=1.0), [sampling(bits_gap=0.9)], "sampling", "safe"),
        (Thresholds(sample_gap=1.0), [sampling(bits_gap=1.1)], "sampling", "unsafe"),
        (Thresholds(sample_gap=1.0), [sampling(bits_gap=math.nan)], "sampling", "unsafe"),
    ],
)
def test_the_users_thresholds_decide(thresholds, measurements, use, status):
    assert verdict(*measurements, use=use, thresholds=thresholds).status == status


def test_a_relative_limit_of_float64_is_that_of_float32():
    """What a user can bear does not shrink when a model is converted."""
    assert Thresholds().limit(2.0**-52) == Thresholds().limit(2.0**-23)
    assert Thresholds().limit(2.0**-7) > Thresholds().limit(2.0**-23)


def test_missing_log_determinants_are_said_to_be_missing():
    missing = Measurement("log_det", "x", reason="the model states no log-determinant")
    found = verdict(likelihood(), missing)
    assert (found.status, found.reason) == ("not-measured", "the model states no log-determinant")
    assert verdict(log_det()).reason == "likelihood was not probed"
    assert verdict(likelihood()).reason == "log_det was not probed"
    assert "not held against the Jacobian" in verdict(likelihood(), log_det(samples=0, error=math.nan)).reason
    found = judge([likelihood(), log_det()], [{"name": "x", "role": "data"}], Thresholds(), EPS)["likelihood"]
    assert (found.status, "consistency" in found.reason) == ("not-measured", True)


WRONG = reconstruction(bad=5000)


@pytest.mark.parametrize(
    ("use", "measurements", "says"),
    [
        ("inversion", [consistency(stochastic=True)], ["Remove dropout"]),
        ("inversion", [consistency(batch_dependent=True)], ["Use running statistics"]),
        ("inversion", [consistency(cached=True, cache_hides=True)], ["Switch the cache off"]),
        ("likelihood", [likelihood(), log_det(error=1.0)], ["is 2, that of the Jacobian 1", "Check the sign"]),
        ("likelihood", [log_det(error=1.0), blame(guilty_log_det="3")], ["Block 3 claims"]),
        ("inversion", [WRONG, blame()], ["No block stands out"]),
        (
            "inversion",
            [WRONG, blame(broken_weight="net.0.weight (3 of 64 entries are NaN)")],
            ["net.0.weight (3 of 64"],
        ),
        (
            "inversion",
            [WRONG, blame(guilty="7", guilty_kind="Exp", why="it grows")],
            ["Look at block 7 (Exp): it grows."],
        ),
        ("inversion", [WRONG, blame(guilty="7", guilty_kind="Mine", why="off", cause="bug")], ["a bug"]),
        ("inversion", [reconstruction(bad=5000, float64_tried=512, float64_bad=0)], ["in float64 0 of 10,000 fail"]),
        ("inversion", [reconstruction(bad=5000, float64_tried=512, float64_bad=512)], ["More bits do not cure it"]),
        (
            "inversion",
            [reconstruction(bad=5000, failure="InputOutsideDomain in rational_quadratic.py")],
            ["A spline without tails"],
        ),
        ("sampling", [sampling(bad=100, out_of_range=100, wrong=0, largest=3e22, data_largest=46.0)], ["3e+22", "46"]),
        ("inversion", [WRONG, blame(guilty="2", guilty_kind="iResBlock", why="off")], ["Its inverse iterates"]),
        (
            "inversion",
            [WRONG, blame(guilty="2", guilty_kind="PiecewiseRationalQuadratic", why="x")],
            ["wider tail bound"],
        ),
    ],
)
def test_remedies(use, measurements, says):
    found = verdict(*measurements, use=use)
    assert found.status == "unsafe"
    for sentence in says:
        assert sentence in found.remedy
    if use != "reversible-gradients":  # docs/regularizers.md: a penalty on data does not reach other input
        assert "add a" not in found.remedy
    if "a bug" not in says:
        assert "a bug" not in found.remedy


def test_sentences_hold_the_number_and_its_limit():
    found = verdict(WRONG, use="inversion")
    assert found.reason == (
        "Share that does not come back on x: 5,000 of 10,000, 49 % to 51 % with 99 % confidence (0.1 % allowed)."
    )
    assert verdict(likelihood(), log_det(error=0.5)).reason == (
        "Nats per dimension between the claimed log-determinant and that of the Jacobian on x: 0.5 (at most 0.001 allowed)."
    )
    assert "Borderline" in verdict(likelihood(bad=10), log_det()).reason
    assert "too few samples to exclude 0.1 %" in verdict(likelihood(count=100), log_det()).reason


def test_the_errors_of_all_looks_add_up_to_no_more_than_one_percent():
    from bilip.auditing.looks import _error

    assert sum(_error(k) for k in range(60)) == pytest.approx(0.005)
    assert _error(None) == pytest.approx(0.005)


@pytest.mark.parametrize("allowed", [0.01, 0.001])
def test_clean_samples_decide_at_the_second_look(allowed):
    test = SequentialTest(Looks(allowed), 10**6, 256)
    for _ in test:
        pass
    assert test.look == 1
    assert share_interval(0, test.count, test.look)[1] <= allowed
    assert test.count <= 1.15 * np.log(0.0025) / np.log1p(-allowed) + 64


def test_a_share_just_above_the_limit_is_rarely_called_safe():
    """At a true 1.2 %, looking at 128, 640, 1280, ... 10,240 samples: `safe` in less than one of a hundred trials."""
    rng, looks, wrong = np.random.default_rng(0), Looks(0.01, most=10_240), 0
    for _ in range(2000):
        draws = rng.random(10_240) < 0.012
        test = SequentialTest(looks, len(draws), 4096)
        for start, stop in test:
            test.bad += int(draws[start:stop].sum())
        wrong += share_interval(test.bad, test.count, test.look)[1] <= 0.01
    assert wrong <= 20


def test_many_bad_samples_decide_at_once():
    test = SequentialTest(Looks(0.01), 10**6, 64)
    for start, stop in test:
        test.bad += stop - start
    assert (test.count, test.look) == (128, 0)


def test_short_sources_are_read_whole_and_once():
    test = SequentialTest(Looks(0.01), 300, 128)
    assert list(test) == [(0, 128), (128, 256), (256, 300)]
    assert share_interval(0, 300, test.look)[1] > 0.01
