"""The page about the paper in a real browser: it fits a desk and a phone, asks for nothing, and can be read in light and dark."""

from pathlib import Path

import chromium
import pytest
from test_browser import CONTRAST

from bilip.recipes.page import write_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.process,
    pytest.mark.skipif(chromium.find() is None, reason=f"none of {', '.join(chromium.NAMES)} is installed"),
]

RESULTS = Path(__file__).resolve().parents[2] / "results"
WIDE = """[...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map(
  (e) => e.outerHTML.slice(0, 80))"""
BROKEN = "[...document.images].filter((i) => !i.complete || !i.naturalWidth).length"


def test_it_fits_a_desk_and_a_phone_and_can_be_read(tmp_path):
    path = tmp_path / "page.html"
    write_page(path, RESULTS)
    with chromium.Chromium() as browser:
        for width, dark in ((1400, False), (420, False), (420, True)):
            page = browser.open(path, width=width, dark=dark)
            page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
            page.evaluate("Promise.all([...document.images].map((image) => image.decode())).then(() => true)")
            page.settle()
            assert page.evaluate(WIDE) == []
            assert page.evaluate(BROKEN) == 0
            assert page.evaluate(CONTRAST) == []
            assert page.evaluate("document.querySelectorAll('.claim').length") > 50
            assert page.evaluate("[...document.querySelectorAll('a')].every((a) => document.querySelector(a.hash))")
            assert page.problems() == []
            assert set(page.requests()) == {path.as_uri()}
            page.close()
