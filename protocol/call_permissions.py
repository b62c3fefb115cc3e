"""Table of the calls that each sender may send to each receiver. `docs/WIRE.md`, part 10, repeats it (tests compare).

A coordinator checks calls by it before it logs them. Only the app knows the call of an answer, so the app checks that:
Sources messages name the sender of each batch.
"""

from __future__ import annotations

from msgspec import Struct

from immortal.protocol.batch import CallRules
from immortal.protocol.client_frames import CLIENTS


class Row(Struct, frozen=True):
    """Row of the table: one sender and one receiver.

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
"""Rules for calls from a peer to an app of the base protocol, whose method IDs and arguments are its own matter."""


def from_peer(name: str) -> CallRules:
    """Return the rules for calls from the peer ``name`` to an app that follows WIRE.md's part 4.1.

    The peer's app can be one of the base protocol, which knows no reserved methods. So a call of such a method is
    reported and fails alone, and does not stop the stream.
    """
    return CallRules(reports_negative=True, callers=(name,))


def from_app(name: str, destination: str, *, knows_extensions: bool) -> CallRules:
    """Return the rules for calls from the app of the instance ``name`` to ``destination`` ("": itself).

    ``knows_extensions``: the app follows WIRE.md's part 4.1; if not, its method IDs and arguments are its own matter.
    An answer has the called method's ID, which its caller chose: so an answer to a refused call can name a reserved
    method.
    """
    if not knows_extensions:
        return CallRules(negative=destination != CLIENTS)
    if destination in ("", CLIENTS):  # callers are unchecked: it can answer any caller, even without such a call
        return CallRules(negative=destination == "", negative_answers=True)
    return CallRules(negative_answers=True, callers=(name,))
