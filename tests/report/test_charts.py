"""Figures hold all that was measured, also zeros, outliers and what is not finite; matplotlib draws the same ones."""

import json
import math

import pytest

from bilip.errors import InputError
from bilip.record import AuditRecord, Histogram, Measurement
from bilip.report import charts, plot
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


SECTIONS = ("errors", "map", "blame", "spectrum", "precision", "attack", "sampling", "log-det")


@pytest.mark.parametrize(("name", "shown"), [("unsafe", SECTIONS[2:]), ("plane", ("errors", "map"))])
def test_every_kind_of_figure_is_drawn_by_matplotlib(name, shown):
    made = records.ALL[name]()
    for section in shown:
        figure = plot(made, section)
        assert any(axes.has_data() for axes in figure.axes), section


def test_bars_are_those_of_the_histogram():
    h = Histogram.of([1e-7, 1e-7, 1e-1, float("inf")])
    figure = plot(
        AuditRecord(
            measurements=(Measurement("reconstruction", "test", {"wrong_limit": 1e-3}, histograms={"relative": h}),)
        )
    )
    assert sorted(bar.get_height() for bar in figure.axes[0].patches if bar.get_height() > 1) == [25.0, 25.0, 50.0]
    assert sum(bar.get_hatch() is not None for bar in figure.axes[0].patches) == 2


def test_a_probe_of_ones_own_is_plotted_by_its_name():
    own = Measurement("reach", "test", histograms={"distance": Histogram.of([1.0, 2.0])})
    assert plot(AuditRecord(measurements=(own,)), "reach").axes
    assert plot(records.unsafe(), "log_det").axes
    assert plot(records.unsafe(), "reconstruction", which=0).axes


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda r: plot(r, "spectrun"), r"Did you mean 'spectrum'\?"),
        (lambda r: plot(r, "errors", which=7), "there are 1, counted from 0"),
        (lambda r: plot("run.json"), "expected an AuditRecord"),
    ],
)
def test_bad_calls_are_answered_in_one_line(call, said):
    with pytest.raises(InputError, match=said) as caught:
        call(records.unsafe())
    assert "\n" not in str(caught.value)
