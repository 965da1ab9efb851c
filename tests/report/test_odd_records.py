"""Records as odd as a search can make them: nothing breaks the rendering."""

import io
import math
import pkgutil

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from bilip.record import AuditRecord, Histogram, Measurement, Status, Verdict
from bilip.report import compare, comparison_markdown, print_comparison, print_terminal, sections, to_html, to_markdown

OWN = {module.name for module in pkgutil.iter_modules(sections.__path__)} - {"tables"}
PROBES = sorted(OWN | set(sections.tables.SECTIONS))

NAMES = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["<b>x</b>", "a" * 3000, "漢字" * 60, "\x1b[31m", "a\nb", "[bold]", "</script>", "", "test", "%{x}", "\ud800"]
    ),
)
NUMBERS = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-320, 1.7e308, -1.0]),
    st.integers(-(10**400), 10**400),
    st.booleans(),
    st.none(),
    NAMES,
)
KNOWN = """
count share_nan share_inf share_wrong share_failed failure wrong_limit relative_median relative_p999 low high points
data_low data_high guilty guilty_kind why condition sigma_min_status sigma_max_status method log10_inverse domain
cure own box radius block kind carried_max local_max gain rung error_max predicted start_error sample relative
share_trusted first_beyond_precision
"""
KEYS = st.sampled_from(KNOWN.split())
VALUES = st.dictionaries(st.one_of(KEYS, NAMES), NUMBERS, max_size=8)
SERIES = st.dictionaries(
    st.one_of(st.sampled_from(["error", "singular_values", "resolved"]), NAMES),
    st.lists(st.floats(), max_size=9).map(tuple),
    max_size=3,
)
HISTOGRAMS = st.dictionaries(
    st.sampled_from(["relative", "latent_relative", "antisymmetry", "reencode_relative"]),
    st.lists(st.floats().map(abs), max_size=6).map(Histogram.of),
    max_size=2,
)
MEASUREMENTS = st.builds(
    Measurement,
    probe=st.one_of(st.sampled_from(PROBES), NAMES),
    source=NAMES,
    values=VALUES,
    series=SERIES,
    rows=st.lists(VALUES, max_size=3).map(tuple),
    histograms=HISTOGRAMS,
    notes=st.lists(NAMES, max_size=2).map(tuple),
    reason=st.one_of(st.just(""), NAMES),
)
OPTIONAL = st.one_of(st.none(), st.floats())
VERDICTS = st.builds(
    Verdict,
    use=NAMES,
    status=st.sampled_from(Status),
    reason=NAMES,
    number=st.one_of(KEYS, NAMES),
    value=OPTIONAL,
    limit=OPTIONAL,
    source=NAMES,
    remedy=NAMES,
)
RECORDS = st.builds(
    AuditRecord,
    model=st.dictionaries(
        st.sampled_from(["name", "library", "dtype", "shape", "parameters", "blocks"]),
        st.one_of(NUMBERS, st.lists(NUMBERS, max_size=3)),
    ),
    sources=st.lists(
        st.dictionaries(st.sampled_from(["name", "role", "count", "description"]), NUMBERS), max_size=3
    ).map(tuple),
    measurements=st.lists(MEASUREMENTS, max_size=5).map(tuple),
    verdicts=st.dictionaries(st.one_of(st.just("sampling"), NAMES), VERDICTS, max_size=3),
    settings=st.dictionaries(st.sampled_from(["seed", "command", "thresholds", "tf32"]), st.one_of(NUMBERS, VALUES)),
    environment=st.dictionaries(NAMES, NAMES, max_size=3),
    created=NAMES,
)
PATIENT = settings(settings.default, suppress_health_check=list(HealthCheck))


@PATIENT
@given(RECORDS, RECORDS)
def test_pages_of_odd_records(one, two):
    text = to_html({"one": one, "two": two})
    assert text.encode("utf-8")
    assert text.count("</script>") == 5


def test_a_page_of_the_largest_and_the_smallest_float():
    for values in ([1.79e308], [5e-324], [5e-324, 1.0, 1.79e308, math.inf]):
        measured = Measurement(
            "reconstruction", "x", values={"count": 1}, histograms={"relative": Histogram.of(values)}
        )
        record = AuditRecord(measurements=(measured,))
        assert AuditRecord.from_json(record.to_json()) == record
        assert to_html(record)


@PATIENT
@given(RECORDS)
def test_texts_of_odd_records(record):
    stream = io.StringIO()
    print_terminal(record, Console(file=stream, width=80))
    assert max(map(cell_len, stream.getvalue().splitlines()), default=0) <= 80
    assert "\x1b" not in stream.getvalue()
    assert to_markdown(record).encode("utf-8")


@PATIENT
@given(RECORDS, RECORDS)
def test_comparisons_of_odd_records(one, two):
    stream = io.StringIO()
    print_comparison(compare(one, two), Console(file=stream, width=80))
    assert max(map(cell_len, stream.getvalue().splitlines()), default=0) <= 80
    assert comparison_markdown(compare(one, two)).encode("utf-8")
