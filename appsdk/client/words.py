"""What a client says to people."""

from __future__ import annotations

from immortal.appsdk.client.lane import Call
from immortal.appsdk.client.transport import Transport


def timeout_text(transport: Transport, method: str, call: Call, timeout_s: float) -> str:
    instance = transport.connection.instance
    front = f"{method}: no reply of {instance!r} at {transport.endpoint} within {timeout_s:g} s: {transport.problem}"
    if not call.sent and call.message:  # a query beside the log, which has no number there
        return f"{front}; a query changes nothing, and may be asked again"
    if not call.sent:
        return f"{front}; the request was never sent, and will not be"
    return (
        f"{front}; the request (number {(call.leader or call).number} of client {(call.leader or call).client_id!r}) "
        f"may have been done or may still be"
    )
