"""Safe output of text from outside: a terminal obeys nothing in it, and it cannot forge a line of a log.

All output uses this module: lines of logs, output of commands, an app's messages, pages of HTML. It escapes, as Python
writes it, the characters that ``str.isprintable`` refuses: control characters (C0, DEL, C1), changes of the writing
direction, separators of lines and paragraphs, invisible characters, and lone surrogates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable

from msgspec import Struct


def printable(text: str) -> str:
    r"""Escape ``text`` for a part of one line.

    >>> printable("a\x1b]0;title\x07\nb")
    'a\\x1b]0;title\\x07\\nb'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def safe_repr(value: object) -> str:
    """Return ``repr(value)``; integers with too many digits are in hex or described."""
    try:
        return repr(value)
    except ValueError:
        return hex(value) if isinstance(value, int) else f"<a {type(value).__name__} with an integer of many digits>"


def logfmt_value(value: object) -> str:
    """Return ``value`` for a line of KEY=VALUE: text that is no single word as JSON, a float with three places."""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value)
    if text and text.isprintable() and not any(one in ' "=' for one in text):
        return text
    return printable_json(text)


def is_encodable(text: str) -> bool:
    """Return True if ``text`` has no lone surrogates (half a character): sent and stored text has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable_lines(text: str, indent: str = "  ") -> list[str]:
    """Indent the lines of ``text`` and escape them, so that none looks like another process's line."""
    lines = map(printable, text.split("\n"))
    return [line if line[:1] in ("", " ") else f"{indent}{line}" for line in lines]


def printable_message(text: str) -> str:
    """Escape ``text`` except its line ends; indent all lines after the first."""
    first, *rest = text.split("\n")
    return "\n".join([printable(first), *(printable_lines("\n".join(rest)) if rest else ())])


def printable_json(
    value: object, *, indent: int | None = None, default: Callable[[object], object] | None = None
) -> str:
    """Format ``value`` as JSON that is safe to print, with the same meaning, on one line unless ``indent`` is given."""
    return printable_json_text(json.dumps(value, ensure_ascii=False, indent=indent, default=default))


def printable_json_text(text: str) -> str:
    """Escape ``text``, which is JSON, so that its value stays the same."""
    return text if text.isprintable() else "".join(map(_json_character, text))


def _json_character(character: str) -> str:
    if character.isprintable() or character == "\n":  # JSON text has line ends between values only
        return character
    return json.dumps(character)[1:-1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ": did you mean 'x'?" if ``name`` looks like a known one, else ""."""
    import difflib  # imported here: wrong words are rare

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""


# Rate limits for log lines whose number other processes determine.


INTERVAL_NS = 5_000_000_000  # between two lines of one kind
BURST = 5  # lines of one kind that pass at once before that: enough to see what happens
KINDS_MAX = 256  # limit of kinds: invented names must not fill memory or the log

OTHERS = "others"  # the one kind for all kinds beyond the limit


class _Kind(Struct):
    due_ns: int = 0  # time at which its credit is full again, at one line per interval
    left_out: int = 0  # since the last line


class RateLimit:
    """Rate limit that lets ``burst`` lines of each kind pass, then one per interval, and counts the lines left out.

    If KINDS_MAX kinds are in use, each new kind counts as OTHERS. ``now_ns`` is on the monotonic clock.
    """

    def __init__(self, burst: int = BURST, interval_ns: int = INTERVAL_NS) -> None:
        self._interval_ns = interval_ns
        self._credit_ns = (burst - 1) * interval_ns
        self._kinds: dict[Hashable, _Kind] = {OTHERS: _Kind()}

    def admit(self, kind: Hashable, now_ns: int) -> int | None:
        """Return the number of lines of ``kind`` left out since the last one; None if this one must be left out too."""
        known = self._kind(kind, now_ns)
        if known.due_ns - self._credit_ns > now_ns:
            known.left_out += 1
            return None
        known.due_ns = max(known.due_ns, now_ns) + self._interval_ns
        left_out, known.left_out = known.left_out, 0
        return left_out

    def next_ns(self, kind: Hashable) -> int:
        """Return the time at which the next line of this kind passes, ns."""
        return self._kinds[self.counted_as(kind)].due_ns - self._credit_ns

    def counted_as(self, kind: Hashable) -> Hashable:
        """Return the kind under which ``kind`` is counted: itself, or OTHERS."""
        return kind if kind in self._kinds else OTHERS

    def _kind(self, kind: Hashable, now_ns: int) -> _Kind:
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) > KINDS_MAX:
                self._forget(now_ns)
            if len(self._kinds) > KINDS_MAX:
                return self._kinds[OTHERS]
            known = self._kinds[kind] = _Kind()
        return known

    def _forget(self, now_ns: int) -> None:
        """Drop kinds that have full credit; add the counts of their left-out lines to OTHERS."""
        for kind in [kind for kind, known in self._kinds.items() if known.due_ns <= now_ns and kind != OTHERS]:
            self._kinds[OTHERS].left_out += self._kinds.pop(kind).left_out
