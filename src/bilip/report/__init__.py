"""From a record to its readers: terminal, Markdown, notebook, JUnit file, figures, one self-contained HTML page. Needs no torch."""

from bilip.report.comparison import (
    Change,
    Comparison,
    VerdictChange,
    compare,
    comparison_markdown,
    print_comparison,
)
from bilip.report.junit import to_junit
from bilip.report.markdown import to_markdown
from bilip.report.page import notebook_html, to_html, write_html
from bilip.report.plot import plot
from bilip.report.terminal import print_terminal

__all__ = [
    "Change",
    "Comparison",
    "VerdictChange",
    "compare",
    "comparison_markdown",
    "notebook_html",
    "plot",
    "print_comparison",
    "print_terminal",
    "to_html",
    "to_junit",
    "to_markdown",
    "write_html",
]
