"""Data model of a table: rows, keys and subtrees, entitlements, values of its handlers, errors. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

import msgspec

from immortal.protocol.errors import ImmortalError

SECOND_NS = 1_000_000_000
KEY_SIZE_BYTES_MAX = 256
KEY_DEPTH_MAX = 16  # parts between "/": each is a subtree that a client can request
VALUE_SIZE_BYTES_MAX = 1 << 20
# Number of deleted keys kept for returning clients; a client that was away longer gets everything again.
GONE_MAX = 100_000
TTL_S_MAX = 10 * 365 * 86_400.0
SUBTREES_MAX = 100  # of one client
SUBTREES_SIZE_BYTES_MAX = 4096  # of all its subtrees: they are in its row of presence
STREAMS_MAX = 10_000  # clients of one publisher; more need forwarders
REQUEST_SIZE_BYTES_MAX = 64 << 10  # of one frame of a client
BEAT_S = 1.0  # between two signs of life of each side
SILENCE_S = 5.0  # a side without a sign of life for so long is gone
WINDOW_BYTES_DEFAULT = 1 << 20  # in flight to one client
MARK_BYTES_DEFAULT = 4 << 20  # the high-water mark: bytes that wait for one client beyond its window
MARK_BYTES_MAX = 64 << 20
PRESENCE_S = 0.2  # between two reports to the table on clients that joined and left
LEASE_S = 5.0  # a forwarder without a message for so long is gone, with its clients
FORWARDERS_MAX = 1000
CONNECT_S = 2.5  # to wait for a first answer; then the next place is tried

OWN = "@"
"""First character of the table's own keys."""
PRESENT = "@present"
"""Subtree of presence: one row for each stream."""
ENTITLED = "@entitled"
"""Subtree of entitlements: which names can see what. No client sees these rows."""
EVERYBODY = "*"


class Row(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Row of a table. ``value``: MessagePack; None: the key is deleted. ``number``: of the update that set it.
    ``expires_ns``: the instance's time; 0: never.
    """

    key: str
    number: int
    value: bytes | None
    expires_ns: int = 0


class Change(msgspec.Struct, array_like=True, frozen=True):
    """Change that a writer requests. ``value``: MessagePack; None: delete. ``ttl_s``: seconds; 0: no limit."""

    key: str
    value: bytes | None
    ttl_s: float = 0.0


class Written(msgspec.Struct, frozen=True):
    """Answer to a writer. ``number``: of the last change. Without ``has_room`` the writer must wait before the next
    change, see ``Table.room``.
    """

    number: int
    has_room: bool


class Entitlement(msgspec.Struct, frozen=True):
    """Entitlement of one name. ``relay``: it is a forwarder, which sees all and applies its clients' entitlements.

    ``may_block``: its policy can be "block", which holds up writers.
    """

    subtrees: tuple[str, ...] = ()
    relay: bool = False
    may_block: bool = False


class Place(msgspec.Struct, frozen=True):
    """Endpoint at which a table is published. ``identity``: the name whose keys it shows; "": the table's.

    ``is_table``: the table's own app publishes there. ``may_block``: clients there can hold up writers.
    """

    endpoint: str
    identity: str = ""
    streams: int = 0
    is_table: bool = False
    may_block: bool = False


class Presence(msgspec.Struct, frozen=True):
    """Stream of a client, as the value of its row. ``name``: of its key, "" without keys; ``label``: the client's own
    name for itself.
    """

    stream: str
    name: str
    label: str
    via: str
    subtrees: tuple[str, ...] = ()


class Status(msgspec.Struct, frozen=True):
    """State of a table. ``held_by``: clients that hold up writers now."""

    number: int
    rows: int
    size_bytes: int
    gone: int
    present: int
    places: list[Place]
    held_by: list[str]


def check_key(key: str) -> None:
    """Check a key. Raises ValueError."""
    if not isinstance(key, str):
        raise ValueError(f"key {key!r}: text was expected")
    if not 1 <= len(key.encode("utf-8", "surrogatepass")) <= KEY_SIZE_BYTES_MAX:
        raise ValueError(f"key {key[:40]!r}: 1 to {KEY_SIZE_BYTES_MAX} bytes were expected")
    parts = key.split("/")
    if len(parts) > KEY_DEPTH_MAX or not all(parts) or not key.isprintable():
        raise ValueError(f"key {key!r}: up to {KEY_DEPTH_MAX} printable parts with '/' between them were expected")


def check_change(change: Change) -> None:
    """Check a writer's change. Raises ValueError."""
    check_key(change.key)
    if change.key.startswith(OWN):
        raise ValueError(f"key {change.key!r}: those that begin with {OWN!r} are the table's own")
    if change.value is not None and len(change.value) > VALUE_SIZE_BYTES_MAX:
        raise ValueError(
            f"key {change.key!r}: a value of {len(change.value)} bytes, at most {VALUE_SIZE_BYTES_MAX} are possible"
        )
    if not 0 <= change.ttl_s <= TTL_S_MAX:
        raise ValueError(f"key {change.key!r}: ttl {change.ttl_s!r}: 0 to {TTL_S_MAX:g} seconds were expected")


def encode(value: Any) -> bytes:
    """Encode a value of the table's own rows."""
    return msgspec.msgpack.encode(value)


# Rows of a table by their numbers, and its deleted keys. No I/O, no clock.
#
# A table has them in its state; each publisher has its own copy.


class Entries(msgspec.Struct):
    """Rows and deleted keys of a table, in the order of their numbers. Deletions up to number ``forgotten`` can be
    missing.
    """

    rows: dict[str, Row] = {}
    gone: dict[str, int] = {}
    number: int = 0
    forgotten: int = 0
    size_bytes: int = 0

    def apply(self, row: Row) -> None:
        """Apply ``row``, which is newer than all others. A deletion is recorded even if the key did not exist."""
        key = row.key
        before = self.rows.pop(key, None)
        if before is not None:
            self.size_bytes -= size_bytes(before)
        self.gone.pop(key, None)
        if row.value is not None:
            self.rows[key] = row
            self.size_bytes += size_bytes(row)
        else:
            self.gone[key] = row.number
            if len(self.gone) > GONE_MAX:
                oldest = next(iter(self.gone))
                self.forgotten = self.gone.pop(oldest)
        self.number = row.number

    def since(self, number: int) -> list[Row] | None:
        """Return the present rows of all keys that have changed after ``number``; None: this is no longer known."""
        if number < self.forgotten or number > self.number:
            return None
        found = list(takewhile(lambda row: row.number > number, reversed(self.rows.values())))
        for key, at in takewhile(lambda one: one[1] > number, reversed(self.gone.items())):
            found.append(Row(key, at, None))
        found.sort(key=lambda row: row.number)
        return found

    def everything(self) -> list[Row]:
        """Return the rows of all keys, including known deletions."""
        found = [*self.rows.values(), *(Row(key, at, None) for key, at in self.gone.items())]
        found.sort(key=lambda row: row.number)
        return found

    def copy(self) -> Entries:
        """Return a copy that shares the rows, which never change."""
        return Entries(dict(self.rows), dict(self.gone), self.number, self.forgotten, self.size_bytes)


def size_bytes(row: Row) -> int:
    return len(row.key) + (len(row.value) if row.value is not None else 0)


# Subtrees of keys. ``a/b`` has the key ``a/b`` and all keys that begin with ``a/b/``. No I/O.
#
# "" has all keys except the table's own, ``@`` has only these.


ALL = ("", OWN)
ORDINARY = ("", PRESENT)
"""Subtrees of a table without entitlements that all clients can see."""


def subtrees_of(key: str) -> Iterator[str]:
    """Yield the subtrees of a key, from the narrowest to the widest."""
    yield key
    at = key.rfind("/")
    while at > 0:
        yield key[:at]
        at = key.rfind("/", 0, at)
    if key.startswith(OWN):
        if key != OWN:
            yield OWN
    elif key:
        yield ""


def covers(subtree: str, key: str) -> bool:
    """Return True if ``key``, or the subtree of that name, belongs to ``subtree``."""
    if not subtree:
        return not key.startswith(OWN)
    if subtree == OWN:
        return key.startswith(OWN)
    return key == subtree or key.startswith(subtree + "/")


def check_subtrees(subtrees: Iterable[str]) -> tuple[str, ...]:
    """Return the subtrees sorted, without those that others cover. Raises ValueError."""
    if isinstance(subtrees, str):
        raise ValueError(f"subtrees {subtrees!r}: a list was expected, such as [{subtrees!r}]")
    found = tuple(subtrees)
    if len(found) > SUBTREES_MAX:
        raise ValueError(f"{len(found)} subtrees: at most {SUBTREES_MAX} are possible; ask for what has them all")
    for subtree in found:
        if subtree not in ALL:
            check_key(subtree)
    size_bytes = sum(len(subtree.encode()) for subtree in found)
    if size_bytes > SUBTREES_SIZE_BYTES_MAX:
        raise ValueError(
            f"subtrees of {size_bytes} bytes: at most {SUBTREES_SIZE_BYTES_MAX} are possible; ask for what has them all"
        )
    return reduced(found)


def reduced(subtrees: Iterable[str]) -> tuple[str, ...]:
    """Return the subtrees sorted, without those that others cover."""
    kept = set(subtrees)
    return tuple(sorted(one for one in kept if not any(other in kept for other in list(subtrees_of(one))[1:])))


def common(wanted: Iterable[str], allowed: Iterable[str]) -> tuple[str, ...]:
    """Return the intersection of two sets of subtrees."""
    allowed = tuple(allowed)
    return reduced(
        [one for one in wanted if any(covers(other, one) for other in allowed)]
        + [other for other in allowed if any(covers(one, other) for one in wanted)]
    )


def may_be_seen(subtree: str) -> bool:
    """Return True if clients can see ``subtree``: of the table's own rows only those of presence."""
    return not subtree.startswith(OWN) or covers(PRESENT, subtree)


class Entitlements:
    """Rules for what each name can see. Without entitlements, every client sees everything but the entitlements.

    ``owner``: the table's own name, whose keys only its operators can read; it always sees everything.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._by_name: dict[str, Entitlement] = {}

    def set(self, name: str, entitlement: Entitlement | None) -> None:
        if entitlement is None:
            self._by_name.pop(name, None)
        else:
            self._by_name[name] = entitlement

    def __len__(self) -> int:
        return len(self._by_name)

    def visible(self, name: str, wanted: Iterable[str], *, relay: bool) -> tuple[str, ...]:
        """Return the part of ``wanted`` that the owner of the key ``name`` ("": no key) can see. ``relay``: all, for
        forwarding.
        """
        if relay:
            return ALL if self.may_relay(name) else ()
        if not self._by_name or name == self._owner:
            return common(wanted, ORDINARY)
        known = self._by_name.get(name) or self._by_name.get(EVERYBODY)
        return () if known is None else common(wanted, filter(may_be_seen, known.subtrees))

    def may_relay(self, name: str) -> bool:
        """Return True if ``name`` can forward: without keys every process on this machine; with keys the entitled
        names.
        """
        if not name or name == self._owner:
            return True
        known = self._by_name.get(name)
        return known is not None and known.relay

    def may_block(self, name: str) -> bool:
        """Return True if ``name`` can hold up writers; a forwarder can, for its clients with that right."""
        if not self._by_name or name == self._owner:
            return True
        known = self._by_name.get(name) or self._by_name.get(EVERYBODY)
        return known is not None and (known.may_block or known.relay)


# Errors of a table and its copies.


class CloneError(ImmortalError):
    """Root of a clone's errors."""


class TableFull(CloneError):  # noqa: N818 (what happened, not what is wrong)
    """Raised if the table has no room for more rows, bytes, or names. Nothing was changed."""


class NotEntitled(CloneError):  # noqa: N818
    """Raised if the caller can see nothing of what it requested."""


class Ended(CloneError):  # noqa: N818
    """Raised if the publisher ended the stream: the client is slow or asks for the impossible. Connect again."""
