"""The pytest plugin: a fixture that audits a model and fails with the verdict. Torch is not imported before it is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bilip._progress import silent

if TYPE_CHECKING:
    from bilip.auditing import Budget, Thresholds
    from bilip.record import AuditRecord

__all__ = ["audit_flow"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin."""
    group = parser.getgroup("bilip", "audits of invertible networks")
    group.addoption(
        "--bilip-budget", metavar="NAME", help="budget of audit_flow: quick (the default), standard or thorough"
    )
    group.addoption("--bilip-out", metavar="FOLDER", help="keep the record of every audit_flow here, as JSON")


@pytest.fixture
def audit_flow(request: pytest.FixtureRequest) -> Callable[..., AuditRecord]:
    """Audit a model and fail unless it is safe for the uses that are named.

    `audit_flow(model, sources, "inversion", "sampling", ood=(), budget=None, tolerance=None, not_measured="fail", thresholds=None,
    **more)` returns the record. `sources` is what `bilip.audit` takes, and `more` goes there. Without uses, those that `[tool.bilip]`
    requires are judged, or else `inversion`. `tolerance` is the largest relative error of a round trip; by default
    `bilip.testing.rounding_tolerance` argues it from eps and the condition of the model, so that an inverse that is wrong by more than
    rounding fails although it is good enough to use.
    """

    def run(
        model: Any,
        sources: Any,
        *uses: str,
        ood: Sequence[str] = (),
        budget: str | Budget | None = None,
        tolerance: float | None = None,
        not_measured: str | None = None,
        thresholds: Thresholds | None = None,
        **more: Any,
    ) -> AuditRecord:
        __tracebackhide__ = True
        import bilip
        from bilip._project import find_project
        from bilip.errors import BilipError

        refused, argued = "", False
        record, failed = bilip.AuditRecord(), []
        try:
            project = find_project(request.config.rootpath)
            limits = thresholds or bilip.Thresholds(**project.limits)
            argued = limits.relative is None and tolerance is None
            if argued:
                tolerance = _argued(model, sources)
            if tolerance is not None:
                limits = replace(limits, relative=tolerance)
            record = bilip.audit(
                model,
                sources,
                ood=ood,
                budget=budget or request.config.getoption("--bilip-budget") or project.budget or "quick",
                thresholds=limits,
                **{"time": project.time, "progress": silent, "command": request.node.nodeid, **more},
            )
            wanted = uses or project.require or ("inversion",)
            lenient = not_measured or project.not_measured or "fail"
            failed = [use for use in wanted if not record.passed(use, not_measured=lenient)]
        except BilipError as error:
            refused = str(error)
        if refused:  # here, not above: pytest would show what it was raised from as well
            pytest.fail(f"bilip could not audit the model: {refused}", pytrace=False)
        kept = _keep(request, record)
        for use, verdict in record.verdicts.items():
            request.node.user_properties.append((f"bilip.{use}", verdict.status.value))
        if failed:
            pytest.fail(_message(record, failed, tolerance if argued else None, kept), pytrace=False)
        return record

    return run


def _argued(model: Any, sources: Any) -> float:
    """The tolerance from eps and the condition of the model, on the first source."""
    from bilip.auditing.audit import source_for
    from bilip.auditing.subject import Subject
    from bilip.testing import rounding_tolerance

    subject = Subject.of(model)
    first = next(iter(sources.values())) if isinstance(sources, dict) and sources else sources
    source = source_for(subject, "data", first, most=256)
    source.check(256)
    batch = source.first(256, dtype=subject.dtype, device=subject.device)
    return rounding_tolerance(model, batch.x, context=batch.context)


def _keep(request: pytest.FixtureRequest, record: AuditRecord) -> str:
    folder = request.config.getoption("--bilip-out")
    if not folder:
        return ""
    name = re.sub(r"[^\w.=-]+", "-", request.node.nodeid).strip("-")[-160:]
    base = request.config.invocation_params.dir / folder
    base.mkdir(parents=True, exist_ok=True)
    taken = sum(path.name.startswith(f"{name}.") for path in base.iterdir())
    path = base / (f"{name}.{taken + 1}.json" if taken else f"{name}.json")
    record.save(path)
    return str(Path(path))


def _message(record: AuditRecord, failed: Sequence[str], argued: float | None, kept: str) -> str:
    from bilip.report.summary import lost_lines

    name = record.model.get("name") or "the model"
    lines = [f"{name} is not safe for {', '.join(failed)}"]
    for use in failed:
        verdict = record.verdicts[use]
        lines += ["", f"{use}: {verdict.status.value}", f"  {verdict.reason}"]
        lines += [f"  what to do: {verdict.remedy}"] if verdict.remedy else []
    lines += ["", *lost_lines(record)] if lost_lines(record) else []
    if record.settings.get("ended"):
        lines += ["", str(record.settings["ended"])]
    if argued is not None and "inversion" in failed:
        lines += [
            "",
            f"A round trip may be off by {argued:.2g}: what rounding explains, from the model's eps and condition "
            "(bilip.testing.rounding_tolerance). Pass tolerance=... for another.",
        ]
    lines += ["", f"record: {kept}  (bilip report {kept} --html page.html)"] if kept else []
    return "\n".join(lines)
