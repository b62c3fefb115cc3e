"""Findings of the doctor: area, level, text and remedy."""

from __future__ import annotations

import enum

from msgspec import Struct


class Area(enum.StrEnum):
    INSTALLATION = "installation"
    HOME = "home"
    DISK = "disk"
    CLOCK = "clock"
    LIMITS = "limits"
    MEMORY = "memory"


class Level(enum.StrEnum):
    OK = "ok"
    NOTE = "note"
    """Level of what works, but could be better or can't be checked."""
    PROBLEM = "problem"
    """Level of a broken promise, or of a start or command that will fail: the exit status is 1."""


class Finding(Struct, frozen=True):
    """Result of a check. ``what``: what was found, with figures; ``why``: why it matters; ``remedy``: what to do. The
    last two are "" if all is well."""

    area: Area
    level: Level
    what: str
    why: str = ""
    remedy: str = ""


def ok(area: Area, what: str) -> Finding:
    return Finding(area, Level.OK, what)


def note(area: Area, what: str, why: str, remedy: str) -> Finding:
    return Finding(area, Level.NOTE, what, why, remedy)


def problem(area: Area, what: str, why: str, remedy: str) -> Finding:
    return Finding(area, Level.PROBLEM, what, why, remedy)
