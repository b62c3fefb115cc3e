"""What a client says to people."""

from __future__ import annotations

from appsdk.client.connection import Connection
from appsdk.client.lane import Call


def timeout_text(connection: Connection, endpoint: str, method: str, call: Call, timeout_s: float) -> str:
    front = f"{method}: no reply of {connection.instance!r} at {endpoint} within {timeout_s:g} s: {connection.problem}"
    if not call.sent:
        return f"{front}; the request was never sent, and will not be"
    return (
        f"{front}; the request (number {(call.leader or call).number} of client {(call.leader or call).client_id!r}) "
        f"may have been done or may still be"
    )
