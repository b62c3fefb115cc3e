"""What is read of annotations, whichever Python evaluates them when: at once, or from 3.14 on when they are asked for.

A name in an annotation may come later in the module, so none is evaluated before :func:`resolve_hints` is called.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Iterable
from typing import Any


def resolve_hints(subject: Any) -> dict[str, Any]:
    """The annotations of a function or class, evaluated. Raises NameError while a name in them is not there yet."""
    return typing.get_type_hints(subject, include_extras=True)


def annotated_names(cls: type) -> Iterable[str]:
    """The names that the class itself annotates."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(cls, format=Format.FORWARDREF)
    return inspect.get_annotations(cls)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Names, kinds and defaults of the parameters; the annotations in it may be no more than names. Raises as
    ``inspect.signature``: TypeError, ValueError."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)
