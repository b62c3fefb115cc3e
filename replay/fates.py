"""What becomes of the messages of a log that fail: those that fail for the first time, and those with another fate.

A verdict of the log says what became of a message then, one of a replay what becomes of it now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

from msgspec import Struct

from immortal.protocol.shown import printable, printable_lines
from immortal.protocol.verdicts import NOT_OF_CODE, Verdict, VerdictKind


class Fate(Enum):
    WORKS = "works now"  # it failed then
    FAILS = "fails now"  # it did not then
    DIFFERS = "fails in another way"


class Fates(Struct):
    """``count`` messages of ``method`` with that fate, from ``then`` and ``now`` of the first of them on."""

    method: str
    fate: Fate
    then: Verdict | None
    now: Verdict | None
    count: int = 0

    @property
    def first(self) -> Verdict:
        """It has the place."""
        found = self.now or self.then
        assert found is not None
        return found


def changed_fates(then: Iterable[Verdict], now: Iterable[Verdict], after: int, before: tuple[int, int]) -> list[Fates]:
    """Grouped by method, in the order of the log.

    ``then``: the log's verdicts; ``now``: those of an app that was told none of them, but those on what was
    refused whatever its code. It was given the messages behind the record ``after``, those before (record, message)
    ``before``.
    """
    old = {
        each.key: each
        for each in then
        if after < each.sequence_id and each.key[:2] < before and each.cause not in NOT_OF_CODE
    }
    new = {each.key: each for each in now}
    groups: dict[tuple[str, Fate], Fates] = {}
    for key in sorted(old.keys() | new.keys()):
        was, is_now = old.get(key), new.get(key)
        if was is None:
            fate = Fate.FAILS
        elif is_now is None:
            fate = Fate.WORKS
        elif _what(was) != _what(is_now):
            fate = Fate.DIFFERS
        else:
            continue
        method = (is_now.method if is_now is not None else "") or (was.method if was is not None else "")
        groups.setdefault((method, fate), Fates(method, fate, was, is_now)).count += 1
    return list(groups.values())


def _what(verdict: Verdict) -> tuple[VerdictKind, str, str]:
    return verdict.kind, verdict.type_name, verdict.text


# --- in words ---------------------------------------------------------------------------------------------------------


def place_in_words(verdict: Verdict) -> str:
    return f"record {verdict.sequence_id}, message {verdict.message_index}"


def failure_in_words(verdict: Verdict) -> str:
    """How it failed: ``ValueError: no number``. In one line."""
    if verdict.kind is VerdictKind.REFUSED:
        how = f"refused: {verdict.text}"
    elif verdict.kind is VerdictKind.SKIPPED:
        how = f"skipped by an operator: {verdict.text}"
    elif verdict.kind is VerdictKind.TAKEN_BACK:
        how = f"taken back behind record {verdict.behind}: {verdict.text}"
    else:
        how = f"{verdict.type_name}: {verdict.text}" if verdict.text else verdict.type_name
    return printable(how)


def news_lines(verdicts: Iterable[Verdict]) -> Iterator[list[str]]:
    """Messages that had not failed and do so in a replay: for each method the first, and how many more there are."""
    for group in changed_fates((), verdicts, -1, (0, 0)):
        verdict = group.first
        what = f"{group.method or 'a message'} at {place_in_words(verdict)}"
        more = f" (the first of {group.count:,})" if group.count > 1 else ""
        yield [
            f"{what} did not fail when it was handled, and fails now{more}: {failure_in_words(verdict)}",
            *(printable_lines(verdict.trace.rstrip("\n"), indent="    ") if verdict.trace else ()),
        ]


def verdict_values(verdict: Verdict | None) -> dict[str, Any] | None:
    """Plain values."""
    if verdict is None:
        return None
    return {
        "kind": verdict.kind.name.lower(),
        "type": verdict.type_name,
        "text": verdict.text,
        "trace": verdict.trace,
    }


def news_values(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """The messages of :func:`news_lines`, each."""
    return [
        {
            "record": verdict.sequence_id,
            "message": verdict.message_index,
            "method": verdict.method,
            **(verdict_values(verdict) or {}),
        }
        for verdict in verdicts
    ]
