"""The HTML page, read as text: whole, escaped, and asking nothing of the network."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest

from bilip.errors import InputError, MissingExtra
from bilip.record import AuditRecord, Measurement, Status, Verdict
from bilip.report import to_html, write_html
from report import records

EMPTY = {"meta", "link", "img", "br", "path", "circle", "input"}


class Page(HTMLParser):
    """Tags with their attributes, and the text of scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.open, self.scripts, self.stray = [], [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open[-1][0] != tag:
            self.stray.append(tag)
        else:
            self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            self.scripts[self.open[-1][1].get("id", "")] = data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def test_well_formed(record):
    page = Page(to_html(record))
    assert not page.stray
    assert not page.open
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for target in [a["href"] for a in page.all("a")]:
        assert target[1:] in ids
    for label in [a["aria-labelledby"] for _, a in page.tags if "aria-labelledby" in a]:
        assert label in ids


def test_accessible(record):
    page = Page(to_html({"one": record, "two": record}))
    assert page.all("html")[0]["lang"] == "en"
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))
    for plot in [a for a in page.all("div") if "plot" in a.get("class", "").split()]:
        assert plot["role"] == "img"
        assert plot["aria-label"].endswith(".")
    assert all(image["alt"] for image in page.all("img"))


def test_no_request(record):
    text = to_html(record)
    page = Page(text)
    for tag, attrs in page.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster", "formaction"):
            assert attrs.get(name, "#").startswith(("#", "data:")), tag
    style = re.search("<style>(.*?)</style>", text, re.S).group(1)
    assert "url(" not in style
    assert "@import" not in style
    assert "default-src 'none'" in text
    assert len(text) < 3e6


def test_holds_its_record(record):
    page = Page(to_html(record))
    assert AuditRecord.from_json(page.scripts["record"]).to_json() == record.to_json()
    json.loads(page.scripts["figures"])


def test_verdicts_are_those_of_the_record(record):
    page = Page(to_html(record))
    shown = {a["data-use"]: a["data-status"] for a in page.all("article")}
    assert shown == {use: v.status.value for use, v in record.verdicts.items()}


def test_every_measurement_is_shown_or_explained():
    text = to_html(records.unsafe())
    assert "the model has 16 dimensions; a map needs 2" in text
    assert "The audit was stopped." in to_html(records.nearly_empty())
    assert "Not part of this audit" in to_html(records.nearly_empty())


def test_unknown_probe_is_shown():
    m = Measurement("novelty", "test", {"depth": 3.25, "share_odd": 0.5}, rows=({"a": 1, "b": "two"},))
    text = to_html(AuditRecord(measurements=(m,)))
    for part in ("Novelty", "3.25", "50 %", "two"):
        assert part in text


def test_everything_is_escaped():
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    m = Measurement("reconstruction", evil, {"failure": evil, evil: evil}, notes=(evil,))
    blame = Measurement(
        "blame", evil, {"guilty": evil, "why": evil}, rows=({"block": evil, "kind": evil, "carried_max": 1.0},)
    )
    lost = Measurement("map", evil, reason=evil)
    verdict = Verdict("sampling", Status.UNSAFE, evil, evil, 1.0, 0.0, evil, evil)
    sources = ({"name": evil, "role": evil, "description": evil},)
    settings = {"command": evil, evil: evil, "thresholds": {evil: evil}}
    record = AuditRecord(
        {"name": evil, "library": evil}, sources, (m, blame, lost), {"sampling": verdict, evil: verdict}, settings
    )
    page = Page(to_html({evil: record, "other": record}, title=evil))
    assert not page.stray
    assert not page.open
    assert not [a for a in page.all("img") if a.get("src") == "x"]
    assert not [a for tag, a in page.tags if "onerror" in a]
    assert len(page.all("script")) == 5  # two records, the figures, plotly and the page's own
    assert "<" not in page.scripts["figures"]


def test_several_records():
    named = {name: records.ALL[name]() for name in ("unsafe", "safe", "plane")}
    page = Page(to_html(named, title="Three flows"))
    assert [a["id"] for a in page.all("button") if a.get("role") == "tab"] == [
        "tab-model-1",
        "tab-model-2",
        "tab-model-3",
    ]
    assert AuditRecord.from_json(page.scripts["record-3"]).model["name"] == "RealNVP on the checkerboard"
    same = Page(to_html([records.safe(), records.safe(), records.safe()]))
    assert len([a for a in same.all("button") if a.get("role") == "tab"]) == 3


def test_refuses_what_is_no_record(tmp_path):
    for wrong in ([], {}, ["x"], {"a": 3}):
        with pytest.raises(InputError, match="AuditRecord"):
            to_html(wrong)
    with pytest.raises(InputError, match="cannot write"):
        write_html(AuditRecord(), tmp_path / "missing" / "run.html")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"pip install 'bilip\[report\]'"):
        to_html(AuditRecord())


@pytest.mark.process
def test_needs_no_torch():
    import subprocess

    code = (
        "import sys; from bilip.record import AuditRecord; from bilip.report import to_html, to_markdown, print_terminal;"
        "to_html(AuditRecord()); to_markdown(AuditRecord()); print_terminal(AuditRecord());"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_sources_and_models_are_explained_where_they_are_named():
    lost = Measurement(
        "reconstruction",
        "uniform:2",
        {"count": 512, "share_bad": 0.038, "relative_max": 6.6, "share_nan": 0.0, "share_inf": 0.0},
    )
    source = {"name": "uniform:2", "role": "ood", "count": 512, "description": "uniform noise on [-8, 8], seed 0"}
    safe = Verdict(
        "inversion",
        Status.SAFE,
        "Share that does not come back on uniform:2: 0 of 3",
        "share_bad",
        0.0,
        0.01,
        "uniform:2",
    )
    about = "Coupling blocks with a scale in (0, 1)."
    record = AuditRecord(
        model={"name": "flow", "description": about},
        sources=(source,),
        measurements=(lost,),
        verdicts={"inversion": safe},
    )
    for page in (to_html(record), to_html({"a": record, "b": record})):
        head = page.split('class="toc"')[0].replace("\N{NO-BREAK SPACE}", " ")  # before the first section
        assert (
            "3.8 % of uniform:2 (uniform noise on [-8, 8], seed 0) does not come back; relative errors reach 6.6."
            in head
        )
        assert "<dt>uniform:2</dt><dd><b>out of distribution</b>, uniform noise on [-8, 8], seed 0</dd>" in head
        assert "uniform:2: uniform noise on [-8, 8], seed 0" in head  # on the card that it decided
        assert "Safe for 1 use, but not every sample comes back outside the data." in head
    assert about in to_html({"a": record, "b": record}).split('class="toc"')[0]


def test_the_headline_of_several_models_names_who_fails():
    fine = AuditRecord(verdicts={"sampling": Verdict("sampling", Status.SAFE, "fine")})
    bad = AuditRecord(verdicts={"sampling": Verdict("sampling", Status.UNSAFE, "2 % are lost")})
    page = to_html({"a": bad, "b": fine})
    assert "a: Sampling is unsafe: 2\N{NO-BREAK SPACE}% are lost. Nothing wrong was found in b." in page
    assert "Nothing wrong was found.</p>" in to_html({"a": fine, "b": fine})
    assert "No use of any model was judged." in to_html({"a": AuditRecord(), "b": AuditRecord()})
    assert "And 1 more." in to_html({"a": bad, "b": bad, "c": bad})
