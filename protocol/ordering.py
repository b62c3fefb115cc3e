"""Calls by which the SDKs of senders and destinations agree on the order of multicasts (`docs/ORDERING.md`).

The method IDs are above those of users, and not negative: who does not know them refuses them in words, as any method
that there is not. EXECUTED is an app's to itself.
"""

from __future__ import annotations

import msgspec

from immortal.protocol import decoding
from immortal.protocol.messages import decode_incoming_rpc

ORDERED_METHOD_ID = (1 << 20) + 1  # calls that are to be ordered: [method ID of all of them, ...]
ORDERING_METHOD_ID = (1 << 20) + 2  # everything else that is said about them; it calls no method of the user's
FENCING_METHOD_ID = (1 << 20) + 5  # how a member is expelled from a group
FENCING_METHODS = frozenset({"group_change", "group_told"})
"""Handlers of groups. Who may call one of them may expel, as it changes the group in any case."""
EXECUTED_METHOD_ID = -5  # behind calls that were released to oneself

_first_of = decoding.Decoder(list[msgspec.Raw]).decode
_number_of = decoding.Decoder(int).decode


def ordered_method(data: bytes, start: int, end: int) -> int:
    """What the RPC ``data[start:end]``, of ORDERED_METHOD_ID, calls in the end; -1 where it does not say so."""
    rpc = decode_incoming_rpc(data, start, end)
    try:
        return _number_of(_first_of(rpc.arguments)[0])
    except (decoding.DecodeError, IndexError):
        return -1
