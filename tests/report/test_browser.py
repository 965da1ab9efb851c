"""The page of an audit and the page about the paper in a real browser: drawn whole, asking for nothing, readable on a desk and a phone."""

import json
from pathlib import Path

import numpy as np
import pytest

from bilip.recipes.page import write_page
from bilip.record import AuditRecord
from bilip.report import write_html
from report import chromium, records

pytestmark = [
    pytest.mark.browser,
    pytest.mark.process,
    pytest.mark.skipif(chromium.find() is None, reason=f"none of {', '.join(chromium.NAMES)} is installed"),
]

RESULTS = Path(__file__).resolve().parents[2] / "results"
WIDE = """[...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map(
  (e) => e.outerHTML.slice(0, 80))"""
# Figures shown so small that their letters cannot be read, and frames that are wider than the screen.
NARROW = """[...document.querySelectorAll("figure")].filter((f) => f.getBoundingClientRect().right > innerWidth + 1
  || f.querySelector("img").width < Math.min(600, f.querySelector("img").naturalWidth)).map((f) => f.textContent)"""
BROKEN = "[...document.images].filter((i) => !i.complete || !i.naturalWidth).length"
WORDS = {"safe": "Safe", "unsafe": "Unsafe", "not-measured": "Not measured"}
UNFOLD = """(async () => {
  document.querySelectorAll("details").forEach((fold) => (fold.open = true));
  await new Promise((done) => setTimeout(done, 50));
  return true;
})()"""
# Figures that are visible, and how many of their traces were drawn.
DRAWN = """[...document.querySelectorAll(".plot")].filter((div) => div.clientWidth).map((div) => ({
  id: div.id,
  wanted: JSON.parse(document.getElementById("figures").textContent)[div.id].data.length,
  found: div.querySelectorAll(".trace, .hm").length,
  points: div.querySelectorAll(".point, .js-line, .hm image").length,
  overflow: div.querySelector("svg.main-svg").getBoundingClientRect().right - div.getBoundingClientRect().right,
}))"""
# Contrast of every visible text with what is behind it.
CONTRAST = """(() => {
  const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = (c) => {
    const [r, g, b] = c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!text || !e.getClientRects().length || e.closest(".plot, .skip, script, noscript")) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([e.tagName, e.textContent.slice(0, 40), ratio]);
  }
  return low;
})()"""


@pytest.fixture(scope="module")
def browser():
    with chromium.Chromium() as running:
        yield running


@pytest.fixture
def show(browser, tmp_path):
    """Write a page and open it; complaints of the browser fail the test."""
    pages = []

    def opened(content, **options):
        path = tmp_path / f"{len(pages)}.html"
        write_html(content, path)
        pages.append((browser.open(path, **options), path))
        return pages[-1][0]

    yield opened
    for page, path in pages:
        assert page.problems() == []
        assert set(page.requests()) == {path.as_uri()}
        page.close()


def assert_drawn(page) -> int:
    page.evaluate(UNFOLD)
    figures = page.evaluate(DRAWN)
    for figure in figures:
        assert figure["found"] >= figure["wanted"], figure
        assert figure["points"], figure
        assert figure["overflow"] <= 1, figure
    return len(figures)


def assert_fits(page, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_everything_is_drawn_and_verdicts_are_those_of_the_record(show, record):
    page = show(record)
    count = assert_drawn(page)
    assert count == page.evaluate("Object.keys(JSON.parse(document.getElementById('figures').textContent)).length")
    assert_fits(page, 1280)
    embedded = json.loads(page.evaluate("document.getElementById('record').textContent"))
    cards = (
        "[...document.querySelectorAll('article')].map((c) => [c.dataset.use, c.querySelector('.word').textContent])"
    )
    assert dict(page.evaluate(cards)) == {use: WORDS[v["status"]] for use, v in embedded["verdicts"].items()}


def test_fits_a_phone_in_both_themes(show, record):
    """Light, then dark as the system turns; that a page can begin dark, others see."""
    page = show(record, width=390, height=800)
    for dark in (False, True):
        page.prefer(dark=dark)
        page.settle()
        assert page.evaluate("document.getElementById('theme').textContent") == (
            "Light theme" if dark else "Dark theme"
        )
        assert_drawn(page)
        assert_fits(page, 390)
        assert page.evaluate(CONTRAST) == []


def test_begins_dark_where_the_system_is(show):
    page = show(records.images(), width=390, height=800, dark=True)
    assert_drawn(page)
    assert page.evaluate("document.getElementById('theme').textContent") == "Light theme"
    assert page.evaluate(CONTRAST) == []


def test_names_are_text_everywhere(show):
    """Also inside figures, where plotly reads some tags."""
    evil = "<img src=x onerror='window.broken=1'><a href='https://example.org'>x</a>"
    m = records.reconstruction(np.random.default_rng(0), evil, -5, count=64)
    blocks = [{"name": evil, "kind": evil}, {"name": "1", "kind": "k"}]
    blame = records.blame(np.random.default_rng(0), evil, blocks, -7, 0.1, 0)
    page = show(AuditRecord(model={"name": evil}, measurements=(m, blame)))
    assert assert_drawn(page) == 2
    assert page.evaluate("[window.broken, document.querySelectorAll('.plot a[href], .plot img').length]") == [None, 0]


def test_tables_sort(show):
    page = show(records.unsafe())
    page.evaluate(UNFOLD)
    column = """(() => {
      const table = [...document.querySelectorAll("table.sortable")].find((t) => t.getAttribute("aria-label").startsWith("Bounds"));
      const at = [...table.querySelectorAll("th")].findIndex((h) => h.textContent === "Lip(F⁻¹)");
      const head = table.querySelectorAll("th")[at];
      CLICK
      return [head.getAttribute("aria-sort"), [...table.tBodies[0].rows].map((r) => Number(r.cells[at].dataset.key))];
    })()"""
    order, values = page.evaluate(column.replace("CLICK", ""))
    assert order == "none"
    assert values != sorted(values)
    order, once = page.evaluate(column.replace("CLICK", "head.firstElementChild.click();"))
    assert order == "ascending"
    assert once == sorted(values)
    order, twice = page.evaluate(column.replace("CLICK", "head.firstElementChild.click();"))
    assert order == "descending"
    assert twice == sorted(values, reverse=True)


def test_theme_toggle_repaints_figures(show):
    page = show(records.safe())
    look = """[getComputedStyle(document.body).backgroundColor, document.getElementById("theme").textContent,
      document.querySelector(".plot .point path").style.fill, document.querySelector(".plot .ytick text").style.fill]"""
    light = page.evaluate(look)
    page.evaluate("document.getElementById('theme').click()")
    page.settle()
    dark = page.evaluate(look)
    assert light[1] == "Dark theme"
    assert dark[1] == "Light theme"
    assert all(a != b for a, b in zip(light, dark, strict=True))
    page.reload()
    assert page.evaluate(look) == dark


def test_several_models_have_tabs(show):
    page = show({name: records.ALL[name]() for name in ("unsafe", "safe", "plane")}, width=390)
    visible = "[...document.querySelectorAll('.panel')].filter((p) => !p.hidden).map((p) => p.id)"
    assert page.evaluate(visible) == ["model-1"]
    total = assert_drawn(page)
    assert_fits(page, 390)
    for key, panel in (("ArrowRight", "model-2"), ("End", "model-3")):
        press = f"new KeyboardEvent('keydown', {{key: '{key}'}})"
        page.evaluate(f"document.querySelector('[aria-selected=true]').dispatchEvent({press})")
        assert page.evaluate(visible) == [panel]
        assert page.evaluate("document.activeElement.getAttribute('aria-controls')") == panel
        total += assert_drawn(page)
        assert_fits(page, 390)
    total -= 2 * page.evaluate("document.querySelectorAll('.overview .plot').length")  # visible beside every tab
    assert total == page.evaluate("Object.keys(JSON.parse(document.getElementById('figures').textContent)).length")
    page.evaluate("document.querySelector('[data-tab=model-1]').click()")
    assert page.evaluate(visible) == ["model-1"]


def test_copy_and_download(show):
    page = show(records.plane())
    page.evaluate("document.querySelector('[data-copy]').click(); new Promise((done) => setTimeout(done, 100))")
    assert page.evaluate("document.querySelector('[data-copy]').textContent") == "Copied"
    saved = """(async () => {
      let blob = null;
      const make = URL.createObjectURL;
      URL.createObjectURL = (b) => ((blob = b), make(b));
      HTMLAnchorElement.prototype.click = () => {};
      document.querySelector("[data-download]").click();
      return blob.text();
    })()"""
    assert json.loads(page.evaluate(saved)) == json.loads(records.plane().to_json())


def test_prints_everything_dark_on_white(show):
    page = show({"one": records.plane(), "two": records.safe()}, dark=True)
    screen = "[getComputedStyle(document.body).color, document.querySelectorAll('details[open]').length]"
    before = page.evaluate(screen)
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.call("Emulation.setEmulatedMedia", {"media": "print"})
    assert page.evaluate("[...document.querySelectorAll('details')].every((fold) => fold.open)")
    total = page.evaluate("document.querySelectorAll('.plot').length")
    assert assert_drawn(page) == total
    assert page.evaluate(CONTRAST) == []
    page.call(
        "Emulation.setEmulatedMedia", {"media": "", "features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(screen) == before
    assert page.evaluate("[...document.querySelectorAll('.panel')].filter((p) => !p.hidden).length") == 1


def test_contrast_check_sees_low_contrast(show):
    """The check itself: grey on white must not pass."""
    page = show(records.nearly_empty())
    page.evaluate("document.documentElement.style.setProperty('--muted', '#9a9a9a')")
    assert page.evaluate(CONTRAST)


def test_the_first_screen_of_several_models_says_what_is_lost_and_where(show):
    page = show({"breaks": records.plane(), "holds": records.safe()}, width=1280, height=800)
    assert_drawn(page)
    inside = "(e) => { const r = e.getBoundingClientRect(); return r.width > 0 && r.bottom <= innerHeight && r.right <= innerWidth }"
    headline = page.evaluate(f"[document.querySelector('.headline')].filter({inside}).map((e) => e.textContent)[0]")
    assert headline.startswith("breaks: Likelihood out of distribution is unsafe")
    assert headline.endswith("Nothing wrong was found in holds.")
    assert page.evaluate(f"[...document.querySelectorAll('.overview .plot')].filter({inside}).length") == 1
    news = page.evaluate(
        f"[...document.querySelectorAll('.overview .news')].filter({inside}).map((e) => e.textContent)[0]"
    )
    assert "does not come back" in news


def test_every_status_of_several_models_is_on_a_phones_screen(show):
    """No column of verdicts hides behind an edge."""
    page = show({"one": records.unsafe(), "two": records.safe(), "three": records.plane()}, width=420)
    assert_fits(page, 420)
    edges = page.evaluate(
        "[...document.querySelectorAll('.overview [data-status]')].map((e) => e.getBoundingClientRect().right)"
    )
    assert len(edges) == 12
    assert max(edges) <= 420


def test_the_page_about_the_paper_fits_a_desk_and_a_phone_and_can_be_read(tmp_path):
    path = tmp_path / "page.html"
    write_page(path, RESULTS)
    with chromium.Chromium() as browser:
        for width, dark in ((1400, False), (420, False), (420, True)):
            page = browser.open(path, width=width, dark=dark)
            page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
            page.evaluate("Promise.all([...document.images].map((image) => image.decode())).then(() => true)")
            page.settle()
            assert_fits(page, width)
            assert [e for e in page.evaluate(WIDE) if not e.startswith("<img")] == []  # figures scroll in their frames
            assert page.evaluate(NARROW) == []
            assert page.evaluate(BROKEN) == 0
            assert page.evaluate(CONTRAST) == []
            assert page.evaluate("document.querySelectorAll('.claim').length") > 50
            assert page.evaluate("[...document.querySelectorAll('a')].every((a) => document.querySelector(a.hash))")
            assert page.problems() == []
            assert set(page.requests()) == {path.as_uri()}
            page.close()
