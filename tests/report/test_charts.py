"""Figures hold all that was measured, also zeros, outliers and what is not finite."""

import json
import math

import pytest

from bilip.record import Histogram, Measurement
from bilip.report import charts
from bilip.report.charts import LogScale
from bilip.report.format import number, power, share
from bilip.report.sections import attack, blame, precision, spectrum
from bilip.report.sections import map as error_map
from report import records


def found(record, probe, source=None):
    return record.find(probe, source)


def test_bars_add_up_to_all_samples():
    h = Histogram.of([0.0, 0.0, 1e-7, 1e-6, 1e-3, 2.0, 1e40, math.inf, math.nan])
    figure = charts.distribution_figure(
        [Measurement("reconstruction", "s", histograms={"relative": h})], "relative", "t", "u", 3.5e-4
    )
    bars = figure.data[0]
    assert sum(bars["y"]) == pytest.approx(100)
    assert bars["x"] == sorted(bars["x"])
    assert bars["marker"]["color"][0] == "@c1"
    assert bars["marker"]["color"][-3:] == ["@bad"] * 3  # 2.0, beyond the ceiling, not finite
    assert "Inf/NaN" in figure.layout["xaxis"]["ticktext"]
    assert "> 1000" in figure.layout["xaxis"]["ticktext"]
    low, high = figure.layout["xaxis"]["range"]
    assert all(low < x < high for x in bars["x"])


@pytest.mark.parametrize(
    "values", [[], [0.0], [math.inf], [math.nan, None], [5e-324, 1.7e308], [1.0], [None, "x", True]]
)
def test_axes_hold_their_values(values):
    scale = LogScale(values)
    axis = scale.axis("t")
    low, high = axis["range"]
    assert low < high
    assert len(axis["tickvals"]) == len(axis["ticktext"]) == len(set(axis["tickvals"]))
    for place in filter(None, map(scale.place, values)):
        assert low <= place <= high


def test_guilty_block_is_marked():
    figure = blame.blame_figure(found(records.unsafe(), "blame", "uniform")[0])
    band = next(s for s in figure.layout["shapes"] if s.get("fillcolor") == "@guilty")
    assert (band["x0"], band["x1"]) == (16.5, 17.5)
    assert "guilty: 17" in figure.layout["annotations"][0]["text"]
    assert "Guilty: block 17 (AffineCoupling)." in figure.summary
    innocent = blame.blame_figure(found(records.safe(), "blame", "test")[0])
    assert innocent.layout["annotations"] == []


def test_unresolved_singular_values_are_open():
    figure = spectrum.spectrum_figure(found(records.unsafe(), "spectrum"))
    symbols = figure.data[1]["marker"]["symbol"]
    assert symbols[0] == "square"
    assert symbols[-1] == "square-open"
    assert len([s for s in figure.layout["shapes"] if s["type"] == "line"]) == 2


def test_broken_cells_of_the_map_are_counted():
    m = found(records.plane(), "map")[0]
    figure = error_map.map_figure(m)
    broken = sum(map(math.isinf, m.series["error"]))
    assert sum(v == 1 for row in figure.data[1]["z"] for v in row) == broken
    assert sum(v is None for row in figure.data[0]["z"] for v in row) == broken
    assert share(m["share_non_finite"]) in figure.summary
    assert figure.layout["shapes"][0]["x0"] == m["data_low"]
    assert error_map.map_figure(Measurement("map", "", m.values, {"error": m.series["error"][:-1]})) is None


def test_figures_are_strict_json(record):
    made = [blame.blame_figure(m) for m in record.find("blame")]
    made += [attack.attack_figure(m) for m in record.find("attack")]
    made += [precision.precision_figure(m) for m in record.find("precision")]
    made += [error_map.map_figure(m) for m in record.find("map")]
    made += [spectrum.spectrum_figure(record.find("spectrum"))]
    for figure in filter(None, made):
        json.dumps([figure.data, figure.layout], allow_nan=False)
        assert figure.summary.endswith(".")


def test_numbers_are_never_rounded_into_lies():
    assert share(1 - 1e-9) == "> 99.9 %"
    assert share(1e-9) == "< 0.01 %"
    assert share(math.nan) == "NaN"
    assert number(9999.9) == "10000"
    assert number(-3e-9) == "-3e-9"
    assert number(10**400) == "Inf"
    assert power(-400.5) == "10^-400.5"
