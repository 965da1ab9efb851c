"""Figures: nothing is lost without a trace, bad input gets a sentence, and the user's matplotlib stays as it was."""

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from bilip import figures
from bilip.errors import InputError, MissingExtra
from bilip.recipes.figures import style
from bilip.recipes.figures.style import linear_ticks, log_ticks, number

NAN, INF = float("nan"), float("inf")
MINUS = "\N{MINUS SIGN}"


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def lane_counts(axes) -> dict[str, int]:
    """How many marks stand in each lane."""
    counts: dict[str, int] = {}
    for line in axes.lines:
        if str(line.get_gid()).startswith("lane "):
            name = line.get_gid().removeprefix("lane ")
            counts[name] = counts.get(name, 0) + len(line.get_xdata())
    return counts


def drawn(axes) -> int:
    """How many finite points the lines of a panel hold."""
    return sum(int(np.isfinite(line.get_ydata()).sum()) for line in axes.lines if line.get_gid() is None)


def visible(axes) -> np.ndarray:
    """Which points of the first curve lie on a segment or under a marker: all others leave no ink."""
    line = next(line for line in axes.lines if line.get_gid() is None)
    there = np.isfinite(line.get_ydata())
    pairs = there[:-1] & there[1:]
    ink = np.r_[pairs, False] | np.r_[False, pairs]
    ink[line.get_markevery()] = True
    return ink & there


def names(figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def note(axes) -> str:
    return " ".join(axes.texts[0].get_text().split())


def rendered(figure) -> None:
    """Draw it for good."""
    assert isinstance(figure, Figure)
    figure.savefig(io.BytesIO(), format="png", dpi=40, pil_kwargs={"compress_level": 0})


def on_the_page(figure) -> None:
    """Draw it for good; nothing is cut off."""
    rendered(figure)
    page, box = figure.bbox_inches, figure.get_tightbbox()
    assert box.x0 >= -0.05
    assert box.y0 >= -0.05
    assert box.x1 <= page.x1 + 0.05
    assert box.y1 <= page.y1 + 0.05


# -- lanes: curves and depth_panels ------------------------------------------------------------------------------------

ODD = [1.0, NAN, INF, -INF, 0.0, -3.0, 1e-300, 1.7e308, NAN]


@pytest.mark.parametrize(
    ("linear", "lanes"),
    [
        ([], {"NaN": 2, "Inf": 1, f"{MINUS}Inf": 1, "0": 1, "< 0": 1}),
        (["y"], {"NaN": 2, "Inf": 1, f"{MINUS}Inf": 1, "> 1e300": 1}),
    ],
    ids=["logarithmic", "linear"],
)
def test_a_panel_keeps_every_number(linear, lanes):
    figure = figures.curves({"y": {"odd": (range(9), ODD)}}, linear=linear)
    on_the_page(figure)
    axes = figure.axes[0]
    assert lane_counts(axes) == lanes
    assert sum(lanes.values()) + drawn(axes) == len(ODD)
    assert {label.get_text() for label in axes.get_yticklabels()} >= set(lanes)


def test_lanes_hold_no_finite_number():
    """Marks lie inside their strips and the curve lies outside of them."""
    figure = figures.curves({"y": {"a": (range(6), [1e-5, 1e5, INF, NAN, 0, 1]), "b": ([0, 1], [INF, 0])}})
    axes = figure.axes[0]
    strips = [patch for patch in axes.patches if patch.get_width() == 1]
    assert len(strips) == 3
    spans = [(s.get_y(), s.get_y() + s.get_height()) for s in strips]
    low, high = axes.get_ylim()
    for line in axes.lines:
        heights = np.asarray(line.get_ydata(), dtype=float)
        in_lane = line.get_gid() is not None
        heights = heights if in_lane else (heights[np.isfinite(heights)] - low) / (high - low)
        for height in heights:
            assert any(a < height < b for a, b in spans) == in_lane
    levels = [line.get_ydata()[0] for line in axes.lines if line.get_gid() == "lane Inf"]
    assert len(set(levels)) == 2, "two curves cover each other in a lane"


def test_a_point_alone_between_gaps_is_drawn():
    values = [NAN if i % 2 else 10.0**i for i in range(41)]
    figure = figures.curves({"y": {"a": (range(41), values)}})
    assert visible(figure.axes[0]).sum() == 21


@pytest.mark.parametrize(
    ("x", "y"),
    [([], []), ([3], [7.0]), ([1, 2], [NAN, NAN]), ([1, 2], [0, 0]), ([1, 2], [5, 5]), ([0, 1], [1e307, 1.7e308])],
    ids=["empty", "single", "all-nan", "zeros", "constant", "huge"],
)
@pytest.mark.parametrize("linear", [False, True])
def test_odd_curves_render(x, y, linear):
    figure = figures.curves({"y": {"a": (x, y)}}, linear=["y"] if linear else [])
    rendered(figure)
    axes = figure.axes[0]
    assert drawn(axes) + sum(lane_counts(axes).values()) == len(x)
    if not x:
        assert names(figure) == ["a (no points)"]
    if drawn(axes) == 0:
        assert [text.get_text() for text in axes.texts] == ["no finite value"]


def test_seeds_become_a_median_and_a_band():
    seeds = [(range(3), [1.0, 10.0, 4.0]), (range(3), [2.0, 1000.0, 4.0]), (range(3), [3.0, 100.0, 4.0])]
    figure = figures.curves({"y": {"a": seeds}}, linear=["y"])
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [2, 100, 4])
    band = axes.collections[0].get_paths()[0].vertices
    assert (band[:, 1].min(), band[:, 1].max()) == (1, 1000)
    assert "range of the seeds on the axis; lines: median" in names(figure)


def test_a_long_curve_is_faint_with_its_running_median_on_top():
    values = np.where(np.arange(200) % 20 == 10, 1e6, 1.0)
    values[[50, 51]] = NAN
    figure = figures.curves({"y": {"a": (range(200), values), "b": (range(100), np.ones(100))}})
    faint, bold, other = (line for line in figure.axes[0].lines if line.get_gid() is None)
    np.testing.assert_allclose(faint.get_ydata(), np.log10(values))
    np.testing.assert_array_equal(np.isnan(bold.get_ydata()), np.isnan(values))
    assert np.nanmax(bold.get_ydata()) == 0, "a spike of one point is no more than faint"
    assert faint.get_alpha() < 1 < bold.get_linewidth() / faint.get_linewidth()
    assert len(other.get_xdata()) == 100
    assert names(figure) == ["a", "b", "each point; bold: median of 11"]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_failed_seeds_are_not_left_out_of_the_median(bad):
    """Two of three seeds fail: the line ends, the lanes show both, the third stays visible in the band."""
    seeds = [([0, 1], [1.0, bad]), ([0, 1], [1.0, NAN]), ([0, 1], [1.0, 5.0])]
    axes = figures.curves({"y": {"a": seeds}}).axes[0]
    middle = next(line for line in axes.lines if line.get_gid() is None).get_ydata()
    np.testing.assert_array_equal(np.isfinite(middle), [True, False])
    assert sum(lane_counts(axes).values()) == 2
    assert max(path.vertices[:, 1].max() for path in axes.collections[0].get_paths()) == pytest.approx(np.log10(5))
    assert axes.collections[0].get_linewidth()[0] > 0, "a band of one seed has no height: only its edge shows"


def test_a_seed_that_stopped_early_is_absent_not_failed():
    axes = figures.curves({"y": {"a": [([0, 1, 2], [1.0, 2.0, 4.0]), ([0, 1], [1.0, 2.0])]}}).axes[0]
    assert lane_counts(axes) == {}
    np.testing.assert_allclose(axes.lines[0].get_ydata(), np.log10([1, 2, 4]))


def test_a_pair_and_a_list_of_pairs_are_told_apart():
    x, y = [0.0, 1.0], [2.0, 3.0]
    for item in ((x, y), [x, y], np.array([x, y]), [(x, y)], [[x, y]]):
        axes = figures.curves({"y": {"a": item}}, linear=["y"]).axes[0]
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), y)
        assert not axes.collections


def test_curves_look_the_same_in_all_panels_and_differ_in_one():
    figure = figures.curves({"u": {"a": ([0], [1]), "b": ([0], [1])}, "v": {"b": ([0], [1])}})
    a, b = figure.axes[0].lines
    assert figure.axes[1].lines[0].get_color() == b.get_color() != a.get_color()
    looks = [style.look(i) for i in range(280)]
    assert len(set(looks)) == 280
    assert len({k.colour for k in looks[:7]}) == len({k.marker for k in looks[:7]}) == 7


def test_depth_panels():
    depths = list(range(1, 61))
    affine = {
        "error": [min(1e-8 * 10.0**n, INF) if n < 40 else INF for n in depths],
        "sigma_min": [0.1**n for n in depths],
        "sigma_max": [1.0] * 60,
        "condition": [10.0**n if n < 55 else NAN for n in depths],
    }
    additive = {"error": [0.0] * 60, "sigma_min": [0.4] * 60, "sigma_max": [2.4] * 60, "condition": [6.0] * 60}
    figure = figures.depth_panels(depths, {"affine float32": affine, "additive": additive})
    on_the_page(figure)
    error, low, high, condition = figure.axes
    assert lane_counts(error) == {"Inf": 21, "0": 60}
    assert lane_counts(low) == lane_counts(high) == {}
    assert lane_counts(condition) == {"NaN": 6}
    for axes in figure.axes:
        assert drawn(axes) + sum(lane_counts(axes).values()) == 120
        assert axes.get_xlabel() == "number of blocks"
    assert names(figure) == ["affine float32", "additive"]


def test_depth_panels_with_many_networks_and_few_quantities():
    curves = {f"network {i}": {"error": [10.0**i], "condition": [NAN]} for i in range(9)}
    figure = figures.depth_panels([1], curves, labels={"error": "my error"})
    on_the_page(figure)
    assert [axes.get_ylabel() for axes in figure.axes] == ["my error", "condition number"]
    assert drawn(figure.axes[0]) == lane_counts(figure.axes[1])["NaN"] == len(names(figure)) == 9


# -- maps --------------------------------------------------------------------------------------------------------------

PLANE = {"low": -8, "high": 8, "label": "error"}


def test_maps_count_and_mask_what_is_not_finite():
    values = np.full((10, 20), 1e-3)
    values[0, :3], values[1, 0] = NAN, INF
    figure = figures.plane_maps({"a": values, "b": np.ones((4, 4))}, vmin=1e-8, vmax=1, **PLANE)
    rendered(figure)
    assert [note(axes) for axes in figure.axes[:2]] == ["Inf/NaN: 2.0 % (4 points)", "Inf/NaN: none"]
    assert figure.axes[0].images[0].get_array().mask.sum() == 4
    assert any("Inf/NaN" in name for name in names(figure))
    values = np.ones((100, 100))
    values[5, 5] = NAN  # one lost point is not rounded away
    assert note(figures.plane_maps({"a": values}, **PLANE).axes[0]) == "Inf/NaN: <0.1 % (1 point)"


def test_rows_are_the_second_coordinate():
    """The pixel at the lower right of the page is [first row, last column]."""
    values = np.zeros((2, 2))
    values[0, 1] = NAN
    figure = figures.plane_maps({"a": values}, box=None, log=False, **PLANE)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    content.seek(0)
    pixels = np.asarray(Image.open(content).convert("RGB")).astype(int)
    x, y = figure.axes[0].transData.transform([(5.1, -4.9), (-4.9, 5.1)]).T * 100 / figure.dpi
    lower_right, upper_left = pixels[pixels.shape[0] - y.astype(int), x.astype(int)]
    assert lower_right[0] > lower_right[1] + 20, "pink, hatched in dark red"
    np.testing.assert_array_equal(upper_left, matplotlib.colormaps["viridis"].resampled(32)(0.5, bytes=True)[:3])


def test_what_exceeds_the_colours_is_marked_on_the_bar():
    def ends(values, **more):
        bar = figures.plane_maps({"a": values}, **PLANE, **more).axes[-1]
        return bar._colorbar.extend

    assert ends([[0.0, 0.5]], vmin=1e-8, vmax=1) == "min"
    assert ends([[0.1, 2.0]], vmin=1e-8, vmax=1) == "max"
    assert ends([[1e-8, 1.0]], vmin=1e-8, vmax=1) == "neither"


@pytest.mark.parametrize(
    ("values", "log"),
    [
        (np.full((3, 3), NAN), True),
        (np.zeros((2, 2)), True),
        ([[4.0]], False),
        ([[5e-324, 1.7e308], [0, INF]], True),
        ([[-1.7e308, 1.7e308], [0, INF]], False),
    ],
    ids=["all-nan", "zeros", "single", "huge", "huge-linear"],
)
def test_odd_maps_render(values, log):
    figure = figures.plane_maps({"a": values}, log=log, **PLANE)
    rendered(figure)
    lost = int((~np.isfinite(values)).sum())
    assert note(figure.axes[0]).startswith("Inf/NaN: none" if not lost else "Inf/NaN: ")
    assert f"({lost} point" in note(figure.axes[0]) or not lost


def test_one_and_five_models_share_one_bar():
    for count in (1, 5):
        title = "a model with quite a long name"
        figure = figures.plane_maps({f"{title} {i}": np.eye(3) for i in range(count)}, **PLANE)
        on_the_page(figure)
        assert len(figure.axes) == count + 1
        titles = [axes.title.get_window_extent() for axes in figure.axes[:-1]]
        assert all(left.x1 <= right.x0 for left, right in zip(titles, titles[1:], strict=False))


# -- scatters ----------------------------------------------------------------------------------------------------------


def test_scatters_count_what_is_not_drawn():
    points = np.zeros((50, 2))
    points[:7], points[7:10, 1], points[10, 0] = 99, NAN, -INF
    figure = figures.scatters({"a": [("x", points), ("y", points[:3])], "b": [("x", points[20:])]}, limit=(-4, 4))
    on_the_page(figure)
    assert [note(axes) for axes in figure.axes] == ["53 points, 10 beyond the axes, 4 Inf/NaN", "30 points"]
    assert [drawn(axes) for axes in figure.axes] == [53 - 14, 30]


@pytest.mark.parametrize(
    ("points", "text"),
    [
        ([], "0 points"),
        ([[NAN, NAN]], "1 point, 1 Inf/NaN"),
        ([[3, 3]], "1 point"),
        ([[0, 0], [0, 0]], "2 points"),
        ([[1e308, -1e308], [1, 2], [3, 4]], "3 points, 1 beyond the axes"),
        ([[1e-310, 0], [2e-310, 0]], "2 points"),
        ([[1e38, -1e38], [1, 2]], "2 points"),
    ],
    ids=["empty", "all-nan", "single", "zeros", "huge", "tiny", "large"],
)
def test_odd_scatters_render(points, text):
    figure = figures.scatters({"a": [("x", points)]})
    rendered(figure)
    assert note(figure.axes[0]) == text
    assert drawn(figure.axes[0]) == sum(np.isfinite(p).all() and np.abs(p).max() < 1e100 for p in np.array(points))


def test_shared_axes_and_the_box():
    panels = {f"t{i}": [("x", np.array([[0, 0], [10.0**i, 1]]))] for i in range(5)}
    own = figures.scatters(panels)
    shared = figures.scatters(panels, shared=True, box=(-4, 4))
    on_the_page(shared)
    assert len({axes.get_xlim() for axes in own.axes}) == 5
    assert len({(*axes.get_xlim(), *axes.get_ylim()) for axes in shared.axes}) == 1
    assert shared.axes[0].get_xlim()[0] < -4
    assert all(len(axes.patches) == 1 for axes in shared.axes)
    assert names(shared) == [f"training domain [{MINUS}4, 4]\N{SUPERSCRIPT TWO}"]


# -- bad input ---------------------------------------------------------------------------------------------------------

PAIRS = [(2, 2, 8, 8), (2, 3, 8, 8, 3), (2, 2, 8, 8, 1)]
ROWS = [(4, 8, 8), (4, 8, 8, 1), (0, 8, 8, 3), (4, 8, 9, 3)]


def reconstructed(*shape):
    return lambda: figures.reconstructions({"set": (np.zeros(shape, np.uint8), np.zeros(shape[:4], np.uint8))})


def in_rows(*shape):
    return lambda: figures.image_rows({"data": (np.zeros(shape, np.uint8), np.zeros((4, 8, 8), np.uint8))})


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: figures.curves({}), "panels is empty"),
        (lambda: figures.curves([1]), "panels is a list; expected a mapping"),
        (lambda: figures.curves({"y": {}}), r"panels\['y'\] is empty"),
        (lambda: figures.curves({"y": {3: ([0], [1])}}), "has the key 3; expected text"),
        (lambda: figures.curves({"y": {"a": ([0, 1], [1])}}), "2 numbers in x and 1 in y"),
        (lambda: figures.curves({"y": {"a": [([0], [1]), ([0, 1], [1])]}}), r"\['a'\]\[1\] has 2 numbers in x and 1"),
        (lambda: figures.curves({"y": {"a": ([NAN], [1])}}), "x of .* holds Inf or NaN"),
        (lambda: figures.curves({"y": {"a": [([0, 0], [1, 2]), ([0], [1])]}}), "same x twice"),
        (lambda: figures.curves({"y": {"a": 5}}), "is not a pair"),
        (lambda: figures.curves({"y": {"a": (["p"], [1])}}), "is not an array of numbers"),
        (lambda: figures.curves({"y": {"a": ([0], [1])}}, linear=["z"]), r"linear is \['z'\]"),
        (lambda: figures.curves({"y": {"a": ([0], [1])}}, linear="y"), "expected a list"),
        (lambda: figures.depth_panels([], {"a": {"error": []}}), "expected at least one number of blocks"),
        (lambda: figures.depth_panels([INF], {"a": {"error": [1]}}), "all finite"),
        (lambda: figures.depth_panels([1, 2], {}), "curves is empty"),
        (lambda: figures.depth_panels([1, 2], {"a": {"error": [1]}}), "has 1 numbers for 2 depths"),
        (lambda: figures.depth_panels([1], {"a": {"eror": [1]}}), "'eror'; expected one of error, sigma_min"),
        (lambda: figures.plane_maps({}, **PLANE), "maps is empty"),
        (lambda: figures.plane_maps({"a": [1, 2]}, **PLANE), r"shape \(2,\); expected \(any, any\)"),
        (lambda: figures.plane_maps({"a": np.ones((0, 3))}, **PLANE), "expected at least one point"),
        (lambda: figures.plane_maps({"a": [[-1.0]]}, **PLANE), "1 negative numbers.*log=False"),
        (lambda: figures.plane_maps({"a": [[1.0]]}, low=1, high=1, label=""), "low, high.*smaller one first"),
        (lambda: figures.plane_maps({"a": [[1.0]]}, box=(4, -4), **PLANE), r"box is \(4, -4\)"),
        (lambda: figures.plane_maps({"a": [[1.0]]}, vmin=0, vmax=2, **PLANE), "vmin is 0; a logarithmic"),
        (lambda: figures.plane_maps({"a": [[1.0]]}, vmin=3, vmax=2, **PLANE), "vmin, vmax"),
        (lambda: figures.plane_maps({"a": [[1.0]]}, cmap="nope", **PLANE), "cmap is 'nope'"),
        (lambda: figures.scatters({}), "panels is empty"),
        (lambda: figures.scatters({"a": []}), "expected at least one pair"),
        (lambda: figures.scatters({"a": [np.ones((3, 2))]}), r"expected pairs \(label, points\)"),
        (lambda: figures.scatters({"a": [("x", np.ones((2, 3)))]}), r"shape \(2, 3\); expected \(any, 2\)"),
        (lambda: figures.scatters({"a": [("x", [[1, 2]])]}, limit=(1, 0)), r"limit is \(1, 0\)"),
        *((reconstructed(*shape), r"expected \(count, 2, height, width, 3\)") for shape in PAIRS),
        *((in_rows(*shape), r"rows\['data'\] has shapes .* expected \(count, height, width, 3\)") for shape in ROWS),
    ],
)
def test_bad_input_gets_a_sentence(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'bilip\[train\]'"):
        figures.curves({"y": {"a": ([0], [1])}})


# -- ticks -------------------------------------------------------------------------------------------------------------


def test_ticks():
    assert log_ticks(-8, 0).names == [f"$10^{{{k}}}$" for k in (-8, -6, -4, -2, 0)]
    assert log_ticks(-300, 308).names[0] == "$10^{-300}$"
    assert log_ticks(np.log10(1.01), np.log10(1.06)).names == ["1.02", "1.04", "1.06"]
    assert linear_ticks(-5, 5).names == [f"{MINUS}4", f"{MINUS}2", "0", "2", "4"]
    assert number(1e30) == "1e30"
    for low, high in ((0, 1e-12), (-1e300, 1e300), (1e6, 1e6 + 1e-3)):
        ticks = linear_ticks(low, high)
        assert 2 <= len(ticks.major) == len(set(ticks.names))
        assert low <= ticks.major.min() <= ticks.major.max() <= high


# -- files and settings ------------------------------------------------------------------------------------------------


def two_curves():
    return figures.curves({"loss": {"a": ([0, 1, 2], [1.0, 0.1, NAN]), "b": [([0, 1], [1, 2]), ([0, 1], [2, 3])]}})


@pytest.fixture
def figure():
    return two_curves()


def test_the_same_figure_gives_the_same_bytes(figure, tmp_path):
    figures.save(figure, tmp_path / "a.png")
    figures.save(figure, tmp_path / "b.png")
    figures.save(two_curves(), tmp_path / "c.png")
    first = (tmp_path / "a.png").read_bytes()
    assert first == (tmp_path / "b.png").read_bytes() == (tmp_path / "c.png").read_bytes()
    with Image.open(tmp_path / "a.png") as picture:
        assert set(picture.info) <= {"dpi"}, "a date or a version in the file"
        inches = np.array(picture.size) / np.array(picture.info["dpi"])
    np.testing.assert_allclose(inches, figure.get_size_inches(), atol=0.01)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png", "c.png"]


def test_broken_pixels_are_cyan_and_rows_are_named():
    images = np.full((2, 2, 16, 16, 3), 100, np.uint8)
    broken = np.zeros((2, 2, 16, 16), np.uint8)
    broken[1, 1, 3, 4] = 1
    groups = {f"set {k}": (images, broken) for k in range(5)}
    figure = figures.reconstructions(groups, notes={"set 0": "half of it"})
    assert len(figure.axes) == 5
    mosaic = figure.axes[0].images[0].get_array()
    assert mosaic.shape == (33, 33, 3)
    assert mosaic[17 + 3, 17 + 4].tolist() == [0, 255, 255]
    assert (mosaic == [0, 255, 255]).all(-1).sum() == 1
    assert mosaic[16, 0].tolist() == [255, 255, 255]  # the gap
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["input", "reconstr."]
    assert len(figure.legends) == 1
    whole = figures.reconstructions({"set": (images, 0 * broken)})
    assert not whole.legends


@pytest.mark.parametrize(
    "title", ["affine, Flow-GAN, scale + 0.01", "a set whose name is much longer than its panel is wide"]
)
def test_titles_of_several_lines_do_not_cover_the_panels_above(title):
    images, broken = np.zeros((8, 2, 32, 32, 3), np.uint8), np.ones((8, 2, 32, 32), np.uint8)
    titles = [*(f"set {k}" for k in range(7)), title]
    groups = dict.fromkeys(titles, (images, broken))
    figure = figures.reconstructions(groups, notes=dict.fromkeys(titles, "a note"), rows="")
    renderer = FigureCanvasAgg(figure).get_renderer()
    above, below = figure.axes[3], figure.axes[7]
    assert "\n" in below.get_title()
    gap = above.get_window_extent(renderer).y0 - below.title.get_window_extent(renderer).y1
    assert gap > 0.02 * figure.dpi


@pytest.mark.parametrize("step", ["write_bytes", "replace"])
def test_a_failed_write_leaves_the_old_file(figure, tmp_path, monkeypatch, step):
    target = tmp_path / "a.png"
    target.write_bytes(b"old")

    def fail(path, content):
        if step == "write_bytes":
            with open(path, "wb") as half:
                half.write(content[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((Path, "write_bytes", fail) if step == "write_bytes" else (os, "replace", fail)))
    with pytest.raises(InputError, match="No space left"):
        figures.save(figure, target)
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_save_refuses_what_is_no_png_and_no_figure(figure, tmp_path):
    for name in ("a.pdf", "a", ""):
        with pytest.raises(InputError, match=r"ends in \.png"):
            figures.save(figure, tmp_path / name)
    with pytest.raises(InputError, match="expected a matplotlib Figure"):
        figures.save("text", tmp_path / "a.png")
    with pytest.raises(InputError, match="No such file"):
        figures.save(figure, tmp_path / "missing" / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_files_are_small(tmp_path):
    """The worst case: rounding noise in every pixel, and many points."""
    random = np.random.default_rng(0)
    noise = {f"model {i}": 10 ** random.normal(-6, 0.5, (400, 400)) for i in range(3)}
    figures.save(figures.plane_maps(noise, vmin=1e-8, vmax=1, **PLANE), tmp_path / "maps.png")
    points = {f"model {i}": [("x", random.uniform(-4, 4, (10_000, 2)))] for i in range(2)}
    figures.save(figures.scatters(points), tmp_path / "points.png")
    assert (tmp_path / "maps.png").stat().st_size < 300_000
    assert (tmp_path / "points.png").stat().st_size < 250_000


def test_settings_of_the_user_neither_change_nor_matter(tmp_path):
    def draw(name):
        figures.save(two_curves(), tmp_path / name)
        return (tmp_path / name).read_bytes()

    plain = draw("plain.png")
    loud = {"font.size": 20, "axes.grid": False, "lines.linewidth": 9, "savefig.bbox": "tight", "ytick.labelsize": 30}
    with matplotlib.rc_context(loud):
        before = matplotlib.rcParams.copy()
        assert draw("loud.png") == plain
        assert matplotlib.rcParams.copy() == before
        with pytest.raises(InputError):
            figures.plane_maps({"a": [[1.0]]}, cmap="nope", **PLANE)
        assert matplotlib.rcParams.copy() == before


def test_a_figure_is_finished_when_it_is_returned():
    """Drawn later under other settings, its ticks and places stay: they are not made anew."""
    figure = figures.curves({"loss": {"a": ([0, 1, 2], [1.0, 0.1, NAN])}})
    axes = figure.axes[0]
    place, sizes = axes.get_position().bounds, {label.get_fontsize() for label in axes.get_yticklabels()}
    with matplotlib.rc_context({"ytick.labelsize": 30, "font.size": 30}):
        rendered(figure)
    assert axes.get_position().bounds == place
    assert {label.get_fontsize() for label in axes.get_yticklabels()} == sizes == {style.SMALL}


def test_text_is_legible_in_print():
    figure = figures.plane_maps({"a": [[1.0, NAN]]}, **PLANE)
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
    assert len(texts) > 8
    assert min(text.get_fontsize() for text in texts) >= 7
    assert figure.get_figwidth() == style.SINGLE


@pytest.mark.process
def test_neither_torch_nor_pyplot_is_imported(tmp_path):
    program = """
import sys
import bilip.figures as figures
assert "matplotlib" not in sys.modules, "matplotlib is imported where it is used"
figures.save(figures.curves({"y": {"a": ([0], [1])}}), sys.argv[1])
print(sorted({"torch", "matplotlib.pyplot", "tkinter"} & set(sys.modules)))
"""
    arguments = [sys.executable, "-c", program, str(tmp_path / "a.png")]
    run = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=900)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr


def test_rows_of_images_show_broken_pixels_in_cyan():
    draw = np.random.default_rng(0)
    images = draw.integers(0, 200, (4, 8, 8, 3)).astype(np.uint8)
    broken = np.zeros((4, 8, 8), np.uint8)
    broken[1, 2:4] = 1
    figure = figures.image_rows({"data": (images, 0 * broken), "samples": (images[:3], broken[:3])})
    assert [axes.get_ylabel() for axes in figure.axes] == ["data", "samples"]
    above, below = (np.asarray(axes.get_images()[0].get_array()) for axes in figure.axes)
    assert above.shape == (8, 4 * 9 - 1, 3)
    assert below.shape == (8, 3 * 9 - 1, 3)
    assert below[3, 10].tolist() == [0, 255, 255]
    assert below[0, 0].tolist() == images[0, 0, 0].tolist()
    wide = [axes.get_position().width / image.shape[1] for axes, image in zip(figure.axes, (above, below), strict=True)]
    assert wide[0] == pytest.approx(wide[1])  # columns stand under each other
    figure.draw_without_rendering()
    assert min(axes.get_tightbbox().x0 for axes in figure.axes) >= 0  # names are not cut off
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Inf or NaN"]
    assert not figures.image_rows({"data": (images, 0 * broken)}).legends
