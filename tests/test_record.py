"""Records: strict JSON both ways, whole or not at all."""

import json
import math
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bilip.errors import InputError, RecordError
from bilip.record import (
    SCHEMA,
    AuditRecord,
    Histogram,
    Measurement,
    Picture,
    Status,
    Verdict,
    read_json,
    to_plain,
    write_aside,
    write_json,
)
from bilip.record.plain import from_plain

words = st.one_of(st.text(max_size=12), st.sampled_from(["nan", "inf", "-inf", "\\nan", "\\\\inf", "NaN", "Infinity"]))
numbers = st.floats(allow_nan=True, allow_infinity=True)
scalars = st.one_of(numbers, st.integers(-(2**70), 2**70), words, st.booleans(), st.none())
tables = st.dictionaries(words, scalars, max_size=4)
histograms = st.lists(numbers.map(abs), max_size=6).map(Histogram.of)
measurements = st.builds(
    Measurement,
    probe=words,
    source=words,
    values=tables,
    series=st.dictionaries(words, st.lists(numbers, max_size=4).map(tuple), max_size=2),
    rows=st.lists(tables, max_size=3).map(tuple),
    histograms=st.dictionaries(words, histograms, max_size=2),
    pictures=st.lists(st.builds(Picture, words, words, words, words), max_size=2).map(tuple),
    notes=st.lists(words, max_size=2).map(tuple),
    reason=words,
)
verdicts = st.builds(Verdict, words, st.sampled_from(Status), words, words, numbers, numbers, words, words)
records = st.builds(
    AuditRecord,
    model=tables,
    sources=st.lists(tables, max_size=2).map(tuple),
    measurements=st.lists(measurements, max_size=3).map(tuple),
    verdicts=st.dictionaries(words, verdicts, max_size=2),
    settings=tables,
    environment=tables,
    created=words,
)


def refuse(name):
    raise AssertionError(f"{name} is not JSON")


@settings(max_examples=150, deadline=None)
@given(records)
def test_round_trip(record):
    text = record.to_json()
    json.loads(text, parse_constant=refuse)
    assert repr(AuditRecord.from_json(text)) == repr(record)  # as text: NaN is not equal to itself
    assert AuditRecord.from_json(text).to_json() == text


def test_numbers_that_are_not_finite_are_words_and_words_stay_words():
    record = AuditRecord(model={"name": "inf", "size": math.inf, "low": -math.inf, "none": math.nan})
    assert json.loads(record.to_json())["model"] == {"name": "\\inf", "size": "inf", "low": "-inf", "none": "nan"}
    back = AuditRecord.from_json(record.to_json()).model
    assert (back["name"], back["size"], back["low"]) == ("inf", math.inf, -math.inf)
    assert math.isnan(back["none"])


def test_numbers_of_numpy_and_torch_are_numbers():
    values = {"a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(2.0)}
    values |= {"d": np.bool_(True), "e": np.float64("inf")}
    back = AuditRecord.from_json(AuditRecord(measurements=(Measurement("own", values=values),)).to_json())
    assert dict(back.measurements[0].values) == {"a": 0.5, "b": 3, "c": 2.0, "d": True, "e": math.inf}
    with pytest.raises(RecordError, match="not a Tensor: convert it first"):
        AuditRecord(model={"weights": torch.zeros(3)}).to_json()


def test_lists_of_a_probe_of_ones_own_come_back():
    own = Measurement("own", values={"a": [1, [2.0, "x"]], "b": {"c": None}}, rows=({"d": [1]},))
    assert AuditRecord.from_json(AuditRecord(measurements=(own,)).to_json()).measurements == (own,)


GOOD = AuditRecord(
    model={"name": "flow"},
    sources=({"name": "x", "role": "data"},),
    measurements=(Measurement("p", "x", values={"a": 1.0}, histograms={"h": Histogram.of([1.0])}),),
    verdicts={"sampling": Verdict("sampling", Status.SAFE, "fine", value=0.0, limit=1.0)},
)


@pytest.mark.parametrize("length", [0, 1, 100, -3])
def test_truncated_records_are_refused(length, tmp_path):
    path = tmp_path / "cut.json"
    path.write_text(GOOD.to_json()[:length])
    with pytest.raises(RecordError, match="cut.json is not strict JSON .*truncated"):
        AuditRecord.load(path)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_bare_words_are_refused(word):
    with pytest.raises(RecordError, match=f"the bare word {word} is not JSON"):
        AuditRecord.from_json(GOOD.to_json().replace('"a": 1.0', f'"a": {word}'))


OTHER = [(schema, "expected a number from 1") for schema in (0, -1, 1.5, "1", None)]
NEWER = (SCHEMA + 1, rf"schema {SCHEMA + 1}; this bilip reads up to {SCHEMA}. Upgrade bilip")


@pytest.mark.parametrize(("schema", "said"), [*OTHER, NEWER])
def test_no_schema_and_a_newer_one_are_refused(schema, said):
    with pytest.raises(RecordError, match=said):
        AuditRecord.from_json(json.dumps({**json.loads(GOOD.to_json()), "schema": schema}))


def test_digits_without_end_are_refused():
    with pytest.raises(RecordError, match="not strict JSON"):
        AuditRecord.from_json(GOOD.to_json().replace('"a": 1.0', f'"a": {"9" * 5000}'))


@pytest.mark.parametrize("depth", [49, 600, 100_000])
def test_nesting_has_an_end(depth):
    deep = "[" * depth + "]" * depth
    with pytest.raises(RecordError, match="nested deeper than 48 levels"):
        AuditRecord.from_json(GOOD.to_json().replace('"name": "flow"', f'"name": {deep}'))
    AuditRecord.from_json(GOOD.to_json().replace('"name": "flow"', f'"name": {"[" * 40 + "]" * 40}'))


def corrupt(path, value):
    document = json.loads(GOOD.to_json())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["model"], 3),
        (["sources"], {"name": "x"}),
        (["sources", 0], "x"),
        (["measurements"], None),
        (["measurements", 0], []),
        (["measurements", 0, "probe"], 5),
        (["measurements", 0, "values"], [1]),
        (["measurements", 0, "series"], {"curve": "abc"}),
        (["measurements", 0, "series"], {"curve": ["a"]}),
        (["measurements", 0, "rows"], [1]),
        (["measurements", 0, "histograms", "h", "counts"], {"a": 1}),
        (["measurements", 0, "histograms", "h", "counts"], {"1": "a"}),
        (["measurements", 0, "histograms", "h", "more"], 1),
        (["measurements", 0, "histograms", "h", "zeros"], "many"),
        (["measurements", 0, "histograms", "h", "nans"], -1),
        (["measurements", 0, "histograms", "h", "infinite"], True),
        (["measurements", 0, "histograms", "h", "largest"], []),
        (["measurements", 0, "histograms", "h", "counts"], {"99999": 1}),
        (["measurements", 0, "histograms", "h"], None),
        (["measurements", 0, "pictures"], [{"title": "x", "alt": "x", "png": 3}]),
        (["verdicts", "sampling", "value"], "much"),
        (["verdicts", "sampling", "limit"], []),
        (["verdicts", "sampling", "use"], 3),
        (["verdicts", "sampling", "remedy"], {}),
        (["verdicts", "sampling", "status"], []),
        (["measurements", 0, "pictures"], [{"title": "x"}]),
        (["measurements", 0, "reason"], None),
        (["verdicts", "sampling", "status"], "perhaps"),
        (["verdicts", "sampling"], "safe"),
        (["settings"], []),
        (["environment"], "linux"),
        (["created"], 2026),
    ],
)
def test_corrupt_records_are_refused(path, value):
    AuditRecord.from_json(corrupt(["created"], "today"))
    with pytest.raises(RecordError, match="the text is not a whole audit record"):
        AuditRecord.from_json(corrupt(path, value))


@pytest.mark.parametrize("name", ["model", "sources", "measurements", "verdicts", "settings", "environment", "created"])
def test_missing_parts_are_refused(name):
    document = json.loads(GOOD.to_json())
    del document[name]
    with pytest.raises(RecordError, match=name):
        AuditRecord.from_json(json.dumps(document))


@pytest.mark.process
def test_saved_text_is_utf8_whatever_the_locale(tmp_path):
    code = (
        "import sys; from bilip.record import AuditRecord; "
        "assert AuditRecord.load('r.json').model['name'] == chr(0xb2); assert 'torch' not in sys.modules"
    )
    (tmp_path / "r.json").write_text(GOOD.to_json().replace('"flow"', '"\N{SUPERSCRIPT TWO}"'), encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_write_that_fails_keeps_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    GOOD.save(path)
    before = path.read_text()

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match=r"cannot write .*run.json \(No space left on device\)"):
        AuditRecord().save(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["run.json"]


def test_names_that_are_no_files(tmp_path):
    with pytest.raises(InputError, match="expected the name of a file"):
        GOOD.save("")
    with pytest.raises(InputError, match="Is a directory"):
        GOOD.save(tmp_path)
    with pytest.raises(InputError, match="No such file or directory"):
        GOOD.save(tmp_path / "nowhere" / "run.json")
    assert os.listdir(tmp_path) == []


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_aside(pipe, "words")
    reader.join(10)
    assert read == ["words"]
    assert pipe.is_fifo()


positive = st.floats(1e-300, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(positive, st.just(0.0)), min_size=1, max_size=30), st.floats(0, 1), positive)
def test_histograms_round_up_and_by_less_than_a_bin(values, q, limit):
    h, bin_ = Histogram.of(values), 10 ** (1 / 40)
    true = sorted(values)[max(0, math.ceil(round(q * len(values), 9)) - 1)]
    assert true * (1 - 1e-9) <= h.quantile(q) <= true * bin_ * (1 + 1e-9)
    above = h.share_above(limit)
    assert above >= sum(v > limit * (1 + 1e-9) for v in values) / len(values)
    assert above <= sum(v > limit / bin_ * (1 - 1e-9) for v in values) / len(values)


def test_histograms_add_up():
    parts = [[0.0, 1e-3], [math.nan], [2.0, math.inf], []]
    total = sum(map(Histogram.of, parts), Histogram())
    whole = Histogram.of([v for part in parts for v in part])
    assert total == whole
    assert (total.count, total.infinite, total.nans, total.zeros) == (5, 1, 1, 1)
    assert (total.smallest, total.largest) == (0.0, 2.0)
    assert total.share_above(1.0) == 0.6
    assert total.share_non_finite == 0.4
    assert math.isinf(total.quantile(0.9))


# ---- records of version 0.1


def test_a_record_of_version_0_1_is_still_read_and_shown():
    """Written by the released 0.1: values without quantities, four uses, a verdict whose unit stood in its sentence."""
    from pathlib import Path

    from bilip.report import compare, to_html, to_markdown

    old = AuditRecord.load(Path(__file__).parent / "record_0_1.json")
    assert old.schema == 1
    assert list(old.verdicts) == ["sampling", "likelihood", "ood-likelihood", "reversible-gradients"]
    assert old.verdicts["ood-likelihood"].measure.unit == "share"
    assert old.verdicts["reversible-gradients"].measure.unit == ""
    m = old.find("reconstruction")[0]
    assert m.quantity("share_nan").unit == "share"
    assert m.quantity("relative_p999").label == "p99.9 relative error"
    text = to_markdown(old)
    assert "25 %" in text
    assert "2.4e-5" in text
    assert "flow of 0.1" in to_html(old)
    assert compare(old, old).word == "same"
    assert AuditRecord.from_json(old.to_json()) == old


def test_quantities_travel_with_the_record_once():
    from bilip.record import Quantity

    angle = Quantity("angle", "gradient angle", "rad", "lower", "angle", ("reversible-gradients",))
    both = tuple(Measurement("angles", name, values={"angle": 0.1}, quantities=(angle,)) for name in "ab")
    record = AuditRecord(
        measurements=both, verdicts={"x": Verdict("x", Status.SAFE, "fine", quantity=angle, interval=(0, 1))}
    )
    document = json.loads(record.to_json())
    assert len(document["quantities"]) == 1
    assert AuditRecord.from_json(record.to_json()) == record
    document["measurements"][0]["quantities"] = [7]
    with pytest.raises(RecordError, match="names a quantity"):
        AuditRecord.from_json(json.dumps(document))
    with pytest.raises(ValueError, match="expected one of"):
        Quantity("angle", unit="degrees")


def _judged(**states):
    return AuditRecord(verdicts={use: Verdict(use, Status(state), "because") for use, state in states.items()})


@pytest.mark.parametrize(
    ("uses", "not_measured", "expected"),
    [
        (("sampling",), "fail", True),
        (("likelihood",), "fail", False),
        (("inversion",), "fail", False),
        (("inversion",), "pass", True),
        (("sampling", "inversion"), "pass", True),
        (("sampling", "likelihood"), "pass", False),
        ((), "fail", False),
        ((), "pass", False),
    ],
)
def test_passed_asks_for_uses_by_name(uses, not_measured, expected):
    record = _judged(sampling="safe", likelihood="unsafe", inversion="not-measured")
    assert record.passed(*uses, not_measured=not_measured) is expected


def test_nothing_passes_without_a_verdict_or_after_the_model_ended_the_program():
    assert not AuditRecord().passed()
    assert not AuditRecord(
        settings={"ended": "the model ended the program"}, verdicts=_judged(sampling="safe").verdicts
    ).passed()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda r: r.passed("samplng"), "Did you mean 'sampling'?"),
        (lambda r: r.passed("sampling", not_measured="skip"), "expected 'fail' or 'pass'"),
    ],
)
def test_passed_refuses_what_it_does_not_know(call, said):
    with pytest.raises(InputError, match=re.escape(said)):
        call(_judged(sampling="safe"))


def test_a_list_of_numbers_is_one_line_and_reads_as_it_was(tmp_path):
    value = {
        "a": [1, 2.5, math.inf, math.nan, True, None],
        "b": [[1, 2], ["[", "]", "x, y"]],
        "c": [],
        "d": ["nan"],
        "e": "[\n 1\n]",
    }
    write_json(tmp_path / "a.json", value)
    text = (tmp_path / "a.json").read_text()
    assert ' "a": [1, 2.5, "inf", "nan", true, null],\n' in text
    assert "  [1, 2],\n" in text
    assert to_plain(from_plain(json.loads(text))) == to_plain(value)
    assert read_json(tmp_path / "a.json")["e"] == value["e"]
