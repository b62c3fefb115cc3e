"""What a table knows, and what its handlers take and give."""

from __future__ import annotations

from typing import Any

import msgspec

from immortal.appsdk.patterns.clone import limits

OWN = "@"
"""Keys of the table itself begin with it."""
PRESENT = "@present"
"""Who is there: one row for each stream."""
ENTITLED = "@entitled"
"""Who may see what. No client sees these rows."""
EVERYBODY = "*"


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """``value``: MessagePack; None: there is no such key any more. ``number``: of the update that made it so.
    ``expires_ns``: the instance's time; 0: it stays.
    """

    key: str
    number: int
    value: bytes | None
    expires_ns: int = 0


class Change(msgspec.Struct, array_like=True, frozen=True):
    """What a writer asks for. ``value``: MessagePack; None: delete. ``ttl_s``: seconds; 0: it stays."""

    key: str
    value: bytes | None
    ttl_s: float = 0.0


class Written(msgspec.Struct, frozen=True):
    """``number`` of the last change. Unless there is ``has_room``, a writer waits with the next, see ``Table.room``."""

    number: int
    has_room: bool


class Entitlement(msgspec.Struct, frozen=True):
    """``relay``: it is a forwarder, which sees all, and asks for what its clients may see.

    ``may_block``: it may hold up writers.
    """

    subtrees: tuple[str, ...] = ()
    relay: bool = False
    may_block: bool = False


class Place(msgspec.Struct, frozen=True):
    """Where a table is published. ``identity``: whose keys are shown there; "": those of the table.

    ``is_table``: by the table's app itself. ``may_block``: clients there may hold up writers.
    """

    endpoint: str
    identity: str = ""
    streams: int = 0
    is_table: bool = False
    may_block: bool = False


class Presence(msgspec.Struct, frozen=True):
    """A stream, as the value of its row. ``name``: of its key, "" in plain; ``label``: what it calls itself."""

    stream: str
    name: str
    label: str
    via: str
    subtrees: tuple[str, ...] = ()


class Status(msgspec.Struct, frozen=True):
    """``held_by``: clients that may block, and do."""

    number: int
    rows: int
    size_bytes: int
    gone: int
    present: int
    places: list[Place]
    held_by: list[str]


def check_key(key: str) -> None:
    """Raises ValueError."""
    if not isinstance(key, str):
        raise ValueError(f"key {key!r}: text was expected")
    if not 1 <= len(key.encode("utf-8", "surrogatepass")) <= limits.KEY_SIZE_BYTES_MAX:
        raise ValueError(f"key {key[:40]!r}: 1 to {limits.KEY_SIZE_BYTES_MAX} bytes were expected")
    parts = key.split("/")
    if len(parts) > limits.KEY_DEPTH_MAX or not all(parts) or not key.isprintable():
        raise ValueError(
            f"key {key!r}: up to {limits.KEY_DEPTH_MAX} printable parts with '/' between them were expected"
        )


def check_change(change: Change) -> None:
    """Of a writer. Raises ValueError."""
    check_key(change.key)
    if change.key.startswith(OWN):
        raise ValueError(f"key {change.key!r}: those that begin with {OWN!r} are the table's own")
    if change.value is not None and len(change.value) > limits.VALUE_SIZE_BYTES_MAX:
        raise ValueError(
            f"key {change.key!r}: a value of {len(change.value)} bytes, at most {limits.VALUE_SIZE_BYTES_MAX} are "
            f"possible"
        )
    if not 0 <= change.ttl_s <= limits.TTL_S_MAX:
        raise ValueError(f"key {change.key!r}: ttl {change.ttl_s!r}: 0 to {limits.TTL_S_MAX:g} seconds were expected")


def encode(value: Any) -> bytes:
    """Of the table's own rows."""
    return msgspec.msgpack.encode(value)
