"""A record as a JUnit file, which CI servers show as tests: one test case for each use."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

from bilip.record import AuditRecord, Status, Verdict
from bilip.report.format import as_float, clean, sentence
from bilip.report.summary import deciding, ordered_verdicts

__all__ = ["to_junit"]


def to_junit(record: AuditRecord, *, require: Sequence[str] = (), not_measured: str = "fail") -> str:
    """The verdicts as JUnit XML.

    A use that is unsafe is a failure, with reason and remedy. A use that was not measured is an error where it is required, else
    skipped. Where some uses are required, the others are never failures: what they are stands in the message of a skipped case.

    Args:
        record: What `bilip.audit` returned, or `AuditRecord.load`.
        require: Uses that must be safe; without any, none may be unsafe.
        not_measured: `"pass"` to skip a required use that was not measured.

    Raises:
        InputError: A required use has no verdict in the record.

    Example:
        >>> from bilip.record import Verdict
        >>> unsafe = Verdict("sampling", Status.UNSAFE, "2 % are lost.", remedy="Use float64.")
        >>> xml = to_junit(AuditRecord(model={"name": "flow"}, verdicts={"sampling": unsafe}))
        >>> ElementTree.fromstring(xml.encode()).find("testsuite/testcase/failure").get("message")
        '2 % are lost.'
    """
    record.passed(*require, not_measured=not_measured)  # names the use that is not there
    name, ended = clean(record.model.get("name") or "unnamed model", 200), record.settings.get("ended")
    seconds = as_float(record.settings.get("seconds"))
    time = f"{seconds if seconds >= 0 else 0.0:.3f}"
    suite = ElementTree.Element("testsuite", name=f"bilip audit of {name}", time=time)
    if record.created:
        suite.set("timestamp", clean(record.created, 40).removesuffix("+00:00"))
    count = {"failure": 0, "error": 0, "skipped": 0}
    for verdict in ordered_verdicts(record):
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"bilip.{name}", name=clean(verdict.use, 200), time="0"
        )
        kind = _kind(verdict, require, not_measured)
        if ended and (not require or verdict.use in require):
            kind = "error"
        if kind:
            count[kind] += 1
            found = ElementTree.SubElement(case, kind, message=_message(verdict, require, str(ended or "")))
            found.set("type", "bilip.ended" if ended else f"bilip.{verdict.status.value}")
            if kind != "skipped":
                lines = (sentence(verdict.reason), deciding(verdict), clean(verdict.remedy, 2000))
                found.text = "\n".join(dict.fromkeys(line for line in lines if line))
    totals = {
        "tests": len(record.verdicts),
        "failures": count["failure"],
        "errors": count["error"],
        "skipped": count["skipped"],
    }
    for key, value in totals.items():
        suite.set(key, str(value))
    root = ElementTree.Element("testsuites", {"name": "bilip", "time": time, **{k: str(v) for k, v in totals.items()}})
    root.append(suite)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode").encode("utf-8", "replace").decode("utf-8")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _kind(verdict: Verdict, require: Sequence[str], not_measured: str) -> str:
    if verdict.status == Status.SAFE:
        return ""
    if require and verdict.use not in require:
        return "skipped"
    if verdict.status == Status.UNSAFE:
        return "failure"
    return "error" if require and not_measured == "fail" else "skipped"


def _message(verdict: Verdict, require: Sequence[str], ended: str) -> str:
    if ended:
        return clean(ended, 1000)
    unasked = require and verdict.use not in require
    return ("Not required: " if unasked else "") + (
        f"{verdict.status.value}. {sentence(verdict.reason)}" if unasked else sentence(verdict.reason)
    )
