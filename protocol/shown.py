"""Text that came from outside, where it is shown: a terminal obeys nothing in it, and it forges no line of a log.

Everything that shows something goes through here: lines of logs, what commands print, what an app says, pages of HTML.
Escaped, as Python writes it, is what ``str.isprintable`` refuses: control characters (C0, DEL, C1), what turns the
direction of writing, separators of lines and paragraphs, what is invisible, and lone surrogates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable


def printable(text: str) -> str:
    r"""``text`` as a part of one line.

    >>> printable("a\x1b]0;title\x07\nb")
    'a\\x1b]0;title\\x07\\nb'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def shown(value: object) -> str:
    """As Python writes it, but for integers of more digits than Python writes."""
    try:
        return repr(value)
    except ValueError:
        return hex(value) if isinstance(value, int) else f"<a {type(value).__name__} with an integer of many digits>"


def is_encodable(text: str) -> bool:
    """Without lone surrogates, which are half a character: what is sent or kept has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable_lines(text: str, indent: str = "  ") -> list[str]:
    """The lines of ``text``, each of them indented, so that none can be taken for one of somebody else's."""
    lines = map(printable, text.split("\n"))
    return [line if line[:1] in ("", " ") else f"{indent}{line}" for line in lines]


def printable_message(text: str) -> str:
    """``text`` with its line ends; lines behind the first are indented."""
    first, *rest = text.split("\n")
    return "\n".join([printable(first), *(printable_lines("\n".join(rest)) if rest else ())])


def printable_json(
    value: object, *, indent: int | None = None, default: Callable[[object], object] | None = None
) -> str:
    """As JSON, which stays the same for who reads it: on one line, unless there is an ``indent``."""
    return printable_json_text(json.dumps(value, ensure_ascii=False, indent=indent, default=default))


def printable_json_text(text: str) -> str:
    """``text``, which is JSON."""
    return text if text.isprintable() else "".join(map(_json_character, text))


def _json_character(character: str) -> str:
    if character.isprintable() or character == "\n":  # such a line end is one between values
        return character
    return json.dumps(character)[1:-1]


def near_miss(word: str, known: Iterable[str]) -> str:
    """ ": did you mean 'x'?" when ``word`` looks like a known one, else nothing."""
    import difflib  # here: few words are wrong

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f": did you mean {close[0]!r}?" if close else ""
