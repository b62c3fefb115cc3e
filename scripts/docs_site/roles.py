"""An extension of griffe: docstrings name things as Sphinx does (:func:`x`); Markdown shows them as code."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:py:)?(?:func|meth|class|mod|data|attr|exc|obj|ref):`~?([^`]*)`")


def without_roles(docstring: str) -> str:
    return _ROLE.sub(r"`\1`", docstring)


class Roles(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = without_roles(obj.docstring.value)
