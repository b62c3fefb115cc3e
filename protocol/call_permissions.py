"""The table of who may send what to whom. `docs/WIRE.md`, part 10, shows it; tests keep both equal.

A coordinator checks it before anything is logged. What it can't see without an app's knowledge, which call an answer
belongs to, the app checks: it is told who sent each batch (Sources).
"""

from __future__ import annotations

from msgspec import Struct

from immortal.protocol.batch import CallRules
from immortal.protocol.client_frames import CLIENTS


class Row(Struct, frozen=True):
    """Row of the table.

    ``carried``: messages or frames that carry the call. ``method_ids``: for apps that follow WIRE.md's part 4.1; others
    may send any method ID. ``caller``: first argument of a call that waits for an answer (kind 0, RPC type 0).
    """

    sender: str
    receiver: str
    carried: str
    kinds: tuple[int, ...]
    rpc_types: tuple[int, ...]
    method_ids: str
    caller: str


ANY, POSITIVE, ANSWERS_ANY = "any", "0 and above", "0 and above, of answers any"
_NONE = "none: what is no answer is passed over"
ROWS = (
    Row("a peer", "the instance", "Batch", (0, 1, 2, 3), (0, 1, 2), POSITIVE, "the peer's name"),
    Row("a client", "the instance", "Request", (0,), (0,), POSITIVE, "none: the coordinator puts `~ID` there"),
    Row("the app", "another instance", "0, 5, 66, 67", (0, 1, 2, 3), (0, 1, 2), ANSWERS_ANY, "its instance's name"),
    Row("the app", "itself", "0, 5, 66, 67", (0, 1, 2, 3), (0, 1, 2), ANY, "any: calls of others that had to wait"),
    Row("the app", "its clients, `~`", "0, 5, 66", (1, 2, 3), (0, 1, 2), ANSWERS_ANY, _NONE),
)

from_base_app_peer = CallRules(negative=True)
"""Rules towards an app of the base protocol: its method IDs and arguments are its own matter."""


def from_peer(name: str) -> CallRules:
    """Return the rules for the peer ``name`` and an app that follows WIRE.md's part 4.1.

    The peer's app may be one of the base protocol, which knows of no reserved methods: so one call of such a method
    is reported, to fail alone, and does not stop the stream.
    """
    return CallRules(reports_negative=True, callers=(name,))


def from_app(name: str, destination: str, *, speaks: bool) -> CallRules:
    """Return the rules for the app of the instance ``name`` and a ``destination`` ("": itself).

    ``speaks``: as WIRE.md's part 4.1 says; else its method IDs and arguments are its own matter. An answer names the
    method that was called, which another instance may have chosen: a refused call of it is answered as well.
    """
    if not speaks:
        return CallRules(negative=destination != CLIENTS)
    if destination in ("", CLIENTS):  # it can name a caller to answer without a call to itself first
        return CallRules(negative=destination == "", negative_answers=True)
    return CallRules(negative_answers=True, callers=(name,))
