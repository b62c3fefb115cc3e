"""What owners and holders of handles tell each other: calls of methods that no user can declare.

`docs/NODES.md` says which message does what. A *key* is 16 random bytes: a handle is its owner's name and a key.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from immortal.protocol import decoding

Key: TypeAlias = bytes


class Passed(msgspec.Struct, array_like=True, frozen=True, tag=1, gc=False):
    """Holder to owner: a message with the handle goes to the instance ``to``."""

    key: Key
    to: str


class Released(msgspec.Struct, array_like=True, frozen=True, tag=2, gc=False):
    """Holder to owner: ``count`` of the copies that came here are held no more."""

    key: Key
    count: int


class Ended(msgspec.Struct, array_like=True, frozen=True, tag=3, gc=False):
    """Owner to holder: the handle leads nowhere from here on, as it was ``how``: "destroyed" or "revoked"."""

    key: Key
    how: str


class Forgotten(msgspec.Struct, array_like=True, frozen=True, tag=4, gc=False):
    """Owner to holder: no copy is anywhere any more, so nobody need remember that it has ended."""

    key: Key


class Stale(msgspec.Struct, array_like=True, frozen=True, tag=5, gc=False):
    """To oneself: a copy has come behind the end of the handle, so that the hook is still to be called for it."""

    owner: str
    key: Key
    how: str


class Ending(msgspec.Struct, array_like=True, frozen=True, tag=6, gc=False):
    """Who passes a handle on to who gets it, in front of the copy: its end is on its way, so it may lead nowhere."""

    owner: str
    key: Key
    how: str


Message: TypeAlias = Passed | Released | Ended | Forgotten | Stale | Ending


class NodeCall(msgspec.Struct, array_like=True, frozen=True):
    """``sender`` calls the nodes of these keys."""

    sender: str
    keys: list[bytes]
    method_id: int
    arguments: msgspec.Raw


class AwaitedNodeCall(msgspec.Struct, array_like=True, frozen=True):
    """As :class:`NodeCall`; ``caller`` waits for the answer to its call ``number``."""

    caller: str
    number: int
    sender: str
    keys: list[bytes]
    method_id: int
    arguments: msgspec.Raw


class Word(msgspec.Struct, array_like=True, frozen=True):
    """What owners and holders tell each other."""

    sender: str
    message: Message


decode_node_call = decoding.Decoder(NodeCall).decode
decode_awaited_node_call = decoding.Decoder(AwaitedNodeCall).decode
decode_word = decoding.Decoder(Word).decode
