"""Tables and figures of the classifiers."""

from __future__ import annotations


def classifier_lines(found, paper):
    return []


def classifier_figures(found):
    return {}
