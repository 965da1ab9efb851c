"""The terminal, Markdown and notebooks: the numbers are there, and 80 columns are enough."""

import io
import math
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from rich.cells import cell_len
from rich.console import Console

from bilip.record import AuditRecord, Measurement, Quantity, Status, Verdict
from bilip.report import compare, comparison_markdown, notebook_html, print_comparison, print_terminal, to_markdown
from report import chromium, records


def terminal(show, thing, width=80) -> str:
    stream = io.StringIO()
    show(thing, Console(file=stream, width=width))
    return stream.getvalue()


def test_eighty_columns_without_colour(record):
    text = terminal(print_terminal, record)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert len(text.splitlines()) < 45


def test_terminal_says_what_matters():
    text = " ".join(terminal(print_terminal, records.unsafe()).split())
    for part in (
        "UNSAFE",
        "not measured",
        "12.6%",
        "≥ 9.7e18",
        "block 17 (AffineCoupling)",
        "half_sigmoid",
        "7.1e-5",
        "Inf",
    ):
        assert part in text


def test_terminal_without_unicode():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_terminal(records.unsafe(), Console(file=stream, width=80))
    stream.seek(0)
    text = stream.read()
    assert "x UNSAFE" in text
    assert "+ safe" in text


def test_many_sources_are_cut():
    many = tuple(Measurement("reconstruction", f"s{i}", {"relative_median": 1e-6}) for i in range(40))
    text = terminal(print_terminal, AuditRecord(measurements=many))
    assert "and 28 more sources" in text


def test_markdown_says_what_matters():
    text = to_markdown(records.unsafe())
    assert "| Sampling | ❌ UNSAFE | share of Inf/NaN 2 % (limit 0 %) on base |" in text
    assert "| uniform | ood | 4,096 | 12.6 % | 82.3 % | 0.211 | Inf | ≥ 9.7e18 |" in text
    assert "bilip audit my_package.models:load_flow" in text


def test_markdown_tables_stay_tables():
    record = AuditRecord(model={"name": "a|b\n<script>"}, measurements=(Measurement("reconstruction", "x | y\n| z"),))
    text = to_markdown(record)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {9}
    assert "<script>" not in text


def test_comparison_of_unsafe_and_safe():
    comparison = compare(records.unsafe(), records.safe())
    assert comparison.word == "better"
    assert compare(records.safe(), records.unsafe()).word == "worse"
    assert {v.use: v.word for v in comparison.verdicts}["reversible-gradients"] == "unknown"
    lost = next(c for c in comparison.changes if (c.source, c.name) == ("uniform", "relative_p999"))
    assert math.isinf(lost.before)
    assert lost.word == "better"
    text = terminal(print_comparison, comparison)
    assert max(map(cell_len, text.splitlines())) <= 80
    assert "better" in comparison_markdown(comparison)


def test_a_record_equals_itself(record):
    comparison = compare(record, record)
    assert comparison.word == "same"
    assert comparison.warnings == ()


def test_comparison_warns():
    warnings = " ".join(compare(records.unsafe(), records.images()).warnings)
    for part in ("library", "shape", "source test is only in the first record", "budget", "count of source uniform"):
        assert part in warnings


def test_fewer_wrong_because_more_are_lost_is_not_better():
    def made(lost, wrong):
        values = {"share_nan": lost, "share_inf": 0.0, "share_wrong": wrong}
        return AuditRecord(measurements=(Measurement("reconstruction", "test", values),))

    assert {c.word for c in compare(made(0.1, 0.8), made(0.9, 0.1)).changes} == {"worse", "same"}


@pytest.mark.parametrize(
    ("before", "after", "word"), [("safe", "unsafe", "worse"), ("unsafe", "safe", "better"), ("safe", "safe", "same")]
)
def test_verdicts_decide(before, after, word):
    one, two = (AuditRecord(verdicts={"sampling": Verdict("sampling", Status(s), "")}) for s in (before, after))
    assert compare(one, two).word == word


def test_a_comparison_names_every_source_in_80_columns():
    """However long the labels of the numbers are."""
    q = Quantity(
        "share",
        "a share of something with a very long label that would not fit on one line",
        "share",
        "lower",
        "bad_share",
        ("x",),
    )

    def record(value, same=0.5):
        one = Measurement("probe", "uniform:2", {"share": value}, quantities=(q,))
        return AuditRecord(measurements=(one, Measurement("probe", "test", {"share": same}, quantities=(q,))))

    console = Console(width=80, record=True, file=io.StringIO())
    print_comparison(compare(record(0.5), record(0.01)), console)
    text = console.export_text()
    assert "uniform:2" in text
    assert "better" in text
    assert "1 other number: the same" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("still", "said"),
    [
        (0, "In float64 all of them come back."),
        (3, "In float64 3 of these 10 still fail."),
        (10, "In float64 none of them comes back."),
    ],
)
def test_the_news_name_the_block_and_what_was_tried(still, said):
    values = {"share_bad": 0.1, "relative_max": 6.6, "float64_tried": 10, "float64_bad": still}
    blame = Measurement("blame", "far", {"guilty": "3", "guilty_kind": "AffineCoupling"})
    record = AuditRecord(measurements=(Measurement("reconstruction", "far", values), blame))
    line = f"10 % of far does not come back; relative errors reach 6.6. It breaks at block 3 (AffineCoupling). {said}"
    assert line in " ".join(terminal(print_terminal, record, 200).split()).replace("\N{NO-BREAK SPACE}", " ").replace(
        "10%", "10 %"
    )
    assert line in to_markdown(record)


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
