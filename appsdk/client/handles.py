"""What is asked about a request besides its result: whether it waits, and that it be cancelled."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from immortal.appsdk.client.errors import ClientError
from immortal.appsdk.client.lane import NOT_THERE, TAKEN
from immortal.appsdk.client.results import check_conflict
from immortal.protocol import decoding
from immortal.protocol.client import Reply, ReplyKind
from immortal.protocol.handlers import CANCEL_CALL_METHOD_ID

Status = Literal["waiting", "done", "unknown"]


class _StatusMethod:
    """Its reply is that of a :class:`immortal.appsdk.client.lane.Question`."""

    method: int | str = 0
    name = "status"

    def encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        return b""

    def value(self, reply: Reply) -> Status:
        """Raises CallConflict."""
        if reply is TAKEN:
            return "waiting"
        check_conflict(self.name, reply)
        return "unknown" if reply is NOT_THERE else "done"


class _CancelMethod:
    """Request 2 of a key cancels its first one."""

    method: int | str = CANCEL_CALL_METHOD_ID
    name = "cancel"

    def encode(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bytes:
        return msgspec.msgpack.encode((1, *arguments))

    def value(self, reply: Reply) -> bool:
        """Whether it still waited. Raises ClientError."""
        if reply.kind != ReplyKind.VALUE:
            raise ClientError(
                "the app does not know how to cancel a call: its SDK is of an earlier version than this client's"
            )
        found: bool = decoding.decode(reply.value, type=bool)
        return found


STATUS = _StatusMethod()
CANCEL = _CancelMethod()
