"""Table of clients: each client's request numbers, kept replies, and owner.

    a number    not taken --its record--> open --the app's answer--> kept --acknowledged, or beyond the window--> gone

The log has the same table: each change goes into the open transaction. Each number has the identity of its call, as
long as a request with that number can be repeated: another call under it is refused
(:mod:`immortal.protocol.identity`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import ItemsView
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice

from immortal.coordinator.core.clock import RunningTime
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.interfaces import ClientPosition, StoredClients, Token, Transaction
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.permissions import TokenBucket
from immortal.protocol.client_frames import Reply, ReplyKind

FORGOTTEN_PER_REQUEST = 2  # small, so that a request stays cheap; more than one, so that the table shrinks
REPLY_OVERHEAD_BYTES = 200  # of the identity and Python's objects around a kept or gone reply
_OPEN = 5  # instead of a reply's kind: there is no reply yet
_WITH_IDENTITY = 0x80  # flag in a reply's kind: the identity's size (1 byte) and the identity stand before the value


def _row(kind: int, value: bytes, identity: bytes) -> bytes:
    """Encode a request's row as the log keeps it."""
    if not identity:
        return bytes((kind,)) + value
    return bytes((kind | _WITH_IDENTITY, len(identity))) + identity + value


def _front_size(row: bytes) -> int:
    """Return the size of the kind and identity in a row, in bytes."""
    return 2 + row[1] if row[0] & _WITH_IDENTITY else 1


def _identity_of(row: bytes) -> bytes:
    return row[2 : _front_size(row)] if row[0] & _WITH_IDENTITY else b""


def _size_of(row: bytes) -> int:
    """Return a reply's size in bytes without its identity, which counts as overhead."""
    return len(row) - _front_size(row) + 1


@dataclass(slots=True, eq=False, repr=False)
class Client:
    """Client and its requests. ``number``: its last accepted request. Each number above ``released`` is open, in
    ``replies``, or in ``gone``."""

    number: int = 0
    released: int = 0
    time_ns: int = 0
    replies: dict[int, bytes] = field(default_factory=dict)  # as the log has them, oldest first
    gone: dict[int, bytes] = field(
        default_factory=dict
    )  # beyond the window, and above an open one; as the log has them
    identities: dict[int, bytes] = field(default_factory=dict)  # of open requests; an earlier version stored none
    size_bytes: int = 0  # of the replies
    token: Token = None  # where it was last heard
    owner: str = ""  # whose keys first used the ID
    resend_bucket: TokenBucket | None = None  # limits the replies that are repeated to it
    used: int = 0  # grows with each use of any client
    ticket: int = 0  # of the commit with its last request
    is_in_heap: bool = False  # it is in the heap of clients with replies

    @property
    def open_count(self) -> int:
        return self.number - self.released - len(self.replies) - len(self.gone)

    def is_open(self, number: int) -> bool:
        return self.released < number <= self.number and number not in self.replies and number not in self.gone

    def open_numbers(self) -> list[int]:
        if not self.open_count:
            return []
        return [number for number in range(self.released + 1, self.number + 1) if self.is_open(number)]

    def reply(self, number: int) -> Reply | None:
        """Return the reply to the accepted request ``number``; None while it is open."""
        if number <= self.released or number in self.gone:
            return Reply(number, ReplyKind.GONE)
        row = self.replies.get(number)
        return None if row is None else Reply(number, row[0] & ~_WITH_IDENTITY, row[_front_size(row) :])

    def identity(self, number: int) -> bytes:
        """Return the identity of request ``number``; empty if it is unknown."""
        row = self.replies.get(number) or self.gone.get(number)
        return self.identities.get(number, b"") if row is None else _identity_of(row)

    @property
    def position(self) -> ClientPosition:
        return ClientPosition(self.number, self.released, self.time_ns, self.owner)


class ClientTable:
    """Clients of one instance. ``running``: counts the time after which an unused client is forgotten."""

    def __init__(self, limits: Limits, log: GroupCommit, running: RunningTime) -> None:
        self.open_count = self.replies_count = self.replies_bytes = self.gone_count = 0
        self.open_by_owner: Counter[str] = Counter()  # open requests, by owner
        self.forgotten_ns = 0  # last use of the most recently used client that is forgotten
        self._limits = limits
        self._log = log
        self._running = running
        self._clients: OrderedDict[str, Client] = OrderedDict()  # least recently used first
        # Heap of clients with replies: (use number at that time, ID, client). One without replies is dropped later.
        self._holders: list[tuple[int, str, Client]] = []
        self._uses = 0

    def load(self, stored: StoredClients) -> None:
        """Load the clients of the log. Call it once."""
        self.forgotten_ns = stored.forgotten_ns
        for client_id, known in sorted(stored.positions.items(), key=lambda item: (item[1].time_ns, item[0])):
            self._use(client_id, Client(known.number, known.released, known.time_ns, owner=known.owner))
        for (client_id, number), data in sorted(stored.replies.items()):
            client = self._clients.get(client_id)
            if client is None or not client.released < number <= client.number:
                continue  # released since then, or its client was forgotten
            kind = data[0] & ~_WITH_IDENTITY
            if kind == _OPEN:
                client.identities[number] = _identity_of(data)
            elif kind == ReplyKind.GONE:
                client.gone[number] = data
                self.gone_count += 1
            else:
                self._store_reply(client_id, client, number, data)
        for client in self._clients.values():
            self._count_open(client, client.open_count)

    def __len__(self) -> int:
        return len(self._clients)

    def get(self, client_id: str) -> Client | None:
        return self._clients.get(client_id)

    def items(self) -> ItemsView[str, Client]:
        return self._clients.items()

    def recently_used(self, count: int) -> list[tuple[str, Client]]:
        """Return up to ``count`` clients, most recently used first."""
        return list(islice(reversed(self._clients.items()), count))

    # --- requests ----------------------------------------------------------------------------------------------------

    def set_owner(self, client_id: str, client: Client, owner: str) -> None:
        """Make ``owner`` the owner of a client that had none."""
        count = client.open_count
        self._count_open(client, -count)
        client.owner = owner
        self._count_open(client, count)
        self._log.open.transaction.clients[client_id] = client.position

    def add_requests(self, client_id: str, client: Client, identities: list[bytes], transaction: Transaction) -> None:
        """Note new open requests of the client; ``client.number`` is the last one, ``transaction`` holds their
        record."""
        for number, identity in enumerate(identities, client.number - len(identities) + 1):
            client.identities[number] = identity
            transaction.replies[client_id, number] = _row(_OPEN, b"", identity)
        transaction.clients[client_id] = client.position
        self._count_open(client, len(identities))
        self._use(client_id, client)

    def answer(self, client_id: str, client: Client, reply: Reply) -> None:
        """Keep the reply to an open request."""
        row = _row(reply.kind, reply.value, client.identities.pop(reply.number, b""))
        self._count_open(client, -1)
        self._store_reply(client_id, client, reply.number, row)
        self._log.open.transaction.replies[client_id, reply.number] = row

    def _count_open(self, client: Client, count: int) -> None:
        """Add ``count``, which can be negative, to the client's open requests."""
        self.open_count += count
        self.open_by_owner[client.owner] += count

    def _use(self, client_id: str, client: Client) -> None:
        """Make this client the most recently used."""
        self._uses += 1
        client.used = self._uses
        self._clients[client_id] = client
        self._clients.move_to_end(client_id)

    def forget_unused(self) -> list[str]:
        """Forget clients that were unused for too long; return their IDs. Only the instance's running time counts, so a
        wrong clock makes no client old."""
        limits = self._limits
        unused_since_ns = self._running.time_of_age(limits.client_keep_ns)
        forgotten: list[str] = []
        for _ in range(FORGOTTEN_PER_REQUEST):
            client_id, client = next(iter(self._clients.items()))
            if len(self._clients) <= limits.clients_max and client.time_ns >= unused_since_ns:
                break
            if client.open_count and len(self._clients) > 1:
                self._use(client_id, client)  # its answer is still to arrive
                continue
            del self._clients[client_id]
            forgotten.append(client_id)
            transaction = self._log.open.transaction
            self.gone_count -= len(client.gone)
            for number in (*client.replies, *client.gone, *client.identities):
                self._drop(client, number)
                transaction.replies[client_id, number] = None
            self.forgotten_ns = max(self.forgotten_ns, client.time_ns)
            transaction.clients[client_id] = None
            transaction.clients_forgotten_ns = self.forgotten_ns
        return forgotten

    # --- replies -----------------------------------------------------------------------------------------------------

    def _store_reply(self, client_id: str, client: Client, number: int, row: bytes) -> None:
        client.replies[number] = row
        if not client.is_in_heap:
            client.is_in_heap = True
            heappush(self._holders, (client.used, client_id, client))
            if len(self._holders) > 2 * len(self._clients):  # most of these are forgotten clients
                for _, _, one in self._holders:
                    one.is_in_heap = bool(one.replies)
                self._holders = [holder for holder in self._holders if holder[2].is_in_heap]
                heapify(self._holders)
        self._count(client, 1, _size_of(row))

    def _drop(self, client: Client, number: int) -> bool:
        """Remove a reply; return True if there was one."""
        row = client.replies.pop(number, None)
        if row is None:
            return False
        self._count(client, -1, -_size_of(row))
        return True

    def _count(self, client: Client, count: int, size_bytes: int) -> None:
        """Add ``count``, which can be negative, to the replies kept for the client."""
        size_bytes += count * REPLY_OVERHEAD_BYTES
        client.size_bytes += size_bytes
        self.replies_count += count
        self.replies_bytes += size_bytes

    def enforce_limits(self, client_id: str, client: Client) -> None:
        """Enforce the limits after a new reply to the client."""
        limits = self._limits
        while len(client.replies) > 1 and (
            len(client.replies) > limits.client_replies_max or client.size_bytes > limits.client_replies_bytes
        ):
            self._drop_oldest_reply(client_id, client)
        if self.replies_bytes > limits.replies_bytes:
            self._drop_replies_of_unused(client)

    def _drop_replies_of_unused(self, answered: Client) -> None:
        """Drop replies of the least recently used clients until the limit holds, but keep the last reply of
        ``answered``."""
        holders = self._holders
        passed_over = None
        while holders and self.replies_bytes > self._limits.replies_bytes:
            used, client_id, client = holders[0]
            if not client.replies:
                heappop(holders)
                client.is_in_heap = False
            elif client.used != used:
                heapreplace(holders, (client.used, client_id, client))
            elif client is answered and len(client.replies) == 1:
                passed_over = heappop(holders)
            else:
                self._drop_oldest_reply(client_id, client)
        if passed_over is not None:
            heappush(holders, passed_over)

    def _drop_oldest_reply(self, client_id: str, client: Client) -> None:
        number = next(iter(client.replies))
        row = _row(ReplyKind.GONE, b"", _identity_of(client.replies[number]))
        self._drop(client, number)
        client.gone[number] = row
        self.gone_count += 1
        self._log.open.transaction.replies[client_id, number] = row
        up_to = client.released
        while up_to + 1 in client.gone:
            up_to += 1
        self.release(client_id, client, up_to)

    def release(self, client_id: str, client: Client, up_to: int) -> None:
        """Forget the numbers up to ``up_to``: the client no longer needs them, or they are gone."""
        if up_to <= client.released:
            return
        self._count_open(client, -client.open_count)
        transaction = self._log.open.transaction
        for number in range(client.released + 1, up_to + 1):
            is_written = client.identities.pop(number, None) is not None
            if client.gone.pop(number, None) is not None:
                self.gone_count -= 1
            elif not self._drop(client, number) and not is_written:
                continue
            transaction.replies[client_id, number] = None
        client.released = up_to
        self._count_open(client, client.open_count)
        transaction.clients[client_id] = client.position
