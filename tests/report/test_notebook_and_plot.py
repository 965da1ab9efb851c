"""A record where people look at it: a few lines, a table in a notebook, figures of matplotlib."""

import subprocess
import sys
from html.parser import HTMLParser

import pytest

from bilip.errors import InputError
from bilip.record import AuditRecord, Histogram, Measurement, Status, Verdict
from bilip.report import notebook_html, plot
from report import chromium, records

SECTIONS = ("errors", "map", "blame", "spectrum", "precision", "attack", "sampling", "log-det")


class Checked(HTMLParser):
    """Fails on a tag that is closed in the wrong order."""

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_repr_is_a_few_lines(record):
    lines = repr(record).splitlines()
    assert len(lines) == 1 + len(record.verdicts)
    assert len(repr(record)) < 1500


def test_repr_of_many_uses_and_odd_names_stays_short():
    verdicts = {f"use {k}": Verdict(f"use {k}", Status.SAFE, "x" * 5000) for k in range(50)}
    text = repr(AuditRecord(model={"name": "a\n\x1b[31mb" * 100}, verdicts=verdicts))
    assert len(text) < 3000
    assert "and 39 more uses" in text
    assert "\x1b" not in text


def test_a_notebook_shows_verdict_number_reason_and_remedy(record):
    shown = record._repr_html_()
    parser = Checked()
    parser.feed(shown)
    assert parser.open == []
    text = " ".join(parser.texts)
    for verdict in record.verdicts.values():
        assert verdict.reason[:30] in text
        assert verdict.remedy[:30] in text
    assert "<script" not in shown


def test_a_notebook_says_what_is_lost_outside():
    lost = Measurement("reconstruction", "far", {"share_bad": 0.25, "relative_max": 3.0})
    source = {"name": "far", "role": "ood", "description": "data times 10"}
    shown = notebook_html(AuditRecord(sources=(source,), measurements=(lost,)))
    assert "25 % of far (data times 10) does not come back; relative errors reach 3." in shown


def test_a_notebook_reads_no_tags_in_names():
    evil = "<img src=x onerror=alert(1)>'\""
    shown = notebook_html(
        AuditRecord(model={"name": evil}, verdicts={evil: Verdict(evil, Status.UNSAFE, evil, remedy=evil)})
    )
    assert "<img" not in shown


def test_records_do_not_import_the_report_until_shown():
    unwanted = ("torch", "jinja2", "matplotlib")
    code = "import sys, bilip.record; r = bilip.record.AuditRecord(); repr(r); assert 'bilip.report' not in sys.modules; r._repr_html_()"
    code += f"; assert 'bilip.report' in sys.modules and not set({unwanted}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


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


@pytest.mark.browser
@pytest.mark.process
@pytest.mark.skipif(chromium.find() is None, reason=f"none of {', '.join(chromium.NAMES)} is installed")
def test_the_table_fits_a_narrow_notebook(tmp_path):
    path = tmp_path / "cell.html"
    ready = "<script>window.bilipReady = Promise.resolve()</script>"
    path.write_text(f"<!doctype html><meta charset=utf-8>{records.unsafe()._repr_html_()}{ready}", encoding="utf-8")
    with chromium.Chromium() as browser:
        page = browser.open(path, width=700)
        assert page.evaluate("document.querySelectorAll('tbody tr').length") == 4
        assert page.evaluate("document.documentElement.scrollWidth") <= 700
