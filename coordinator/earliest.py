"""Deadlines that may not be there."""

from __future__ import annotations


def earliest(*moments_ns: int | None) -> int | None:
    """The first of ``moments_ns``; None if there is none."""
    first_ns: int | None = None
    for moment_ns in moments_ns:
        if moment_ns is not None and (first_ns is None or moment_ns < first_ns):
            first_ns = moment_ns
    return first_ns
