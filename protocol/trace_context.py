"""Trace context of callers outside: the W3C ``traceparent``, https://www.w3.org/TR/trace-context/.

A Request has it in the field of the reason, and the log after the client's ID, without its version:

    trace ID (32 hexadecimal digits) - parent ID (16) - flags (2)
"""

from __future__ import annotations

import re

from immortal.protocol.errors import LocalProtocolError

TRACE_CONTEXT_SIZE_BYTES = 32 + 1 + 16 + 1 + 2
_CONTEXT = re.compile(r"(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(.{52})(-.*)?", re.DOTALL)

_BEHIND_NAME = "\0"


def is_trace_context(text: str) -> bool:
    return _CONTEXT.fullmatch(text) is not None


def read_traceparent(header: str) -> str:
    """Parse a traceparent header; ignore unknown parts of a later version. Raises LocalProtocolError."""
    found = _TRACEPARENT.fullmatch(header.strip())
    if found is None or not is_trace_context(found[2]) or (found[1] == "00" and found[3] is not None):
        raise LocalProtocolError(
            f"traceparent {header!r}: '00-', 32 hexadecimal digits, '-', 16 of them, '-' and 2 were expected, in lower "
            f"case, no ID of zeros"
        )
    return found[2]


def split_context(context: str) -> tuple[str, str]:
    """Split a context into the trace ID and the ID of the caller's span."""
    trace_id, parent_id, _ = context.split("-")
    return trace_id, parent_id


def join_name(name: str, context: str) -> str:
    """Return the name of a client's batch in a trailer: the client's name with its trace context."""
    return f"{name}{_BEHIND_NAME}{context}" if context else name


def split_name(name: str) -> tuple[str, str]:
    """Split a batch's name in a trailer: (client's name, trace context or "")."""
    if _BEHIND_NAME not in name:
        return name, ""
    front, _, context = name.rpartition(_BEHIND_NAME)
    return (front, context) if is_trace_context(context) else (name, "")
