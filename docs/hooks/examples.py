"""Show `Example:` sections of docstrings as code: griffe knows them as `Examples:` and takes the other for a remark."""

from __future__ import annotations

import re
from typing import Any

import griffe

HEAD = re.compile(r"^Example:[ \t]*$", re.MULTILINE)


class Examples(griffe.Extension):
    """Renames the heading while docstrings are collected."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls this for every object it has read."""
        if obj.docstring:
            obj.docstring.value = HEAD.sub("Examples:", obj.docstring.value)
