"""Permissions: which methods a caller can call, and how often. Calls are checked before they are logged.

A call that is not allowed still takes its place in the log, with a verdict in the same transaction: so the order is
kept, no handler runs, and the caller is told. The app names its methods; until then, calls of a caller that can't call
all methods wait.

An app can restrict a method to roles. If callers have keys, a caller without a list of methods in the settings can't
call such a method, unless it is the instance's owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from immortal.protocol import decoding
from immortal.protocol.errors import RemoteProtocolError
from immortal.protocol.extensions import ANYBODYS, GROUP_MARK, INSTANCES, OWNERS, QUERIES, AppDescription
from immortal.protocol.messages import RpcKind, RpcType, decode_incoming_rpc, decode_messages
from immortal.protocol.system_methods import (
    CANCEL_CALL_METHOD_ID,
    FENCING_METHOD_ID,
    FENCING_METHODS,
    HANDLES_METHOD_ID,
    NODE_METHOD_ID,
    ORDERED_METHOD_ID,
    ORDERING_METHOD_ID,
    ordered_method,
)
from immortal.protocol.varint import decode_zigzag_int


class Permission(Struct, frozen=True):
    """Permission of one caller. ``methods``: names that it can call, groups such as QUERIES, "@worker" and
    "@writer:stocks/nyse", or ALL_METHODS; None: all methods that are not for a role.

    ``rate``: calls in a second; ``concurrent``: unanswered calls at a time; None: any number.
    """

    methods: frozenset[str] | None = None
    rate: int | None = None
    concurrent: int | None = None


ALL_METHODS = "*"
ANYTHING = Permission()
EVERYTHING = Permission(frozenset({ALL_METHODS}))
_SECOND_NS = 1_000_000_000


class TokenBucket:
    """Rate limit, of a caller's calls or of bytes. ``capacity``: allowed at once, and per second. ``tokens``: what is
    allowed now; who takes more while anything is left pays it back later."""

    __slots__ = ("_filled_ns", "capacity", "tokens")

    def __init__(self, capacity: int, now_ns: int = 0) -> None:
        self.capacity = capacity
        self.tokens = float(capacity)
        self._filled_ns = now_ns

    def fill(self, now_ns: int) -> float:
        """Add what the time since the last fill allows, nothing if the clock was set back; return what is left."""
        passed_ns = min(max(0, now_ns - self._filled_ns), 3600 * _SECOND_NS)  # the clock can jump
        self.tokens = min(float(self.capacity), self.tokens + passed_ns * self.capacity / _SECOND_NS)
        self._filled_ns = now_ns
        return self.tokens


_arguments_of = decoding.Decoder(list[msgspec.Raw]).decode
_key_of = decoding.Decoder(str).decode


def _is_below(subtrees: Sequence[str], calls: bytes, start: int, end: int) -> bool:
    """Return True if the call ``calls[start:end]`` has no arguments, or its first one is a key in one of the
    subtrees."""
    try:
        rpc = decode_incoming_rpc(calls, start, end)
        arguments = _arguments_of(rpc.arguments)
        if rpc.rpc_type == RpcType.ASYNC:
            arguments = arguments[2:]  # without who waits, under which number
        key = _key_of(arguments[0]) if arguments else subtrees[0]
    except (decoding.DecodeError, RemoteProtocolError):
        return False
    return any(key == subtree or key.startswith(subtree + "/") for subtree in subtrees)


class Permissions:
    """Permissions of the instance ``name``. ``by_caller``: for named callers; others can call the methods that are
    not for a role.

    ``has_keys``: callers prove their names. Without keys nobody can prove a name, so roles restrict nobody.
    """

    def __init__(self, name: str, by_caller: Mapping[str, Permission], *, has_keys: bool = False) -> None:
        self._name = name
        self._has_keys = has_keys
        self._by_caller: dict[str, Permission] = {}
        self._names: Mapping[int, str] | None = None  # of the app's own methods; None: the app has not named them
        self._groups: dict[str, frozenset[int]] = {}  # method IDs, by "@query", "@worker" and so on
        self._queries: frozenset[int] = frozenset()  # methods that only read
        self._for_roles: frozenset[int] = frozenset()  # methods that not every caller can call
        self._for_roles_of_instances: frozenset[int] = frozenset()  # methods that not every instance can call
        self._roles_known = False  # an app has connected, and has described its roles if it has any
        self.accepts_verdicts = False  # the app can leave out a call by a verdict; otherwise it carries out all
        self._allowed: dict[str, frozenset[int]] = {}  # method IDs, by caller that can't call all methods
        self._below: dict[str, dict[int, tuple[str, ...]]] = {}  # subtrees by method ID, by caller limited to subtrees
        self._buckets: dict[str, TokenBucket] = {}  # by caller with a rate
        self.held_back: Counter[str] = Counter()  # number of times that a caller's calls had to wait, since the start
        self.change(by_caller, has_keys=has_keys)

    def change(self, by_caller: Mapping[str, Permission], *, has_keys: bool) -> None:
        self._has_keys = has_keys
        self._by_caller = {name: permission for name, permission in by_caller.items() if name != self._name}
        before, self._buckets = self._buckets, {}
        for caller, permission in self._by_caller.items():
            if permission.rate is not None:
                known = before.get(caller)
                same = known is not None and known.capacity == permission.rate
                self._buckets[caller] = known if known is not None and same else TokenBucket(permission.rate)
        self._resolve_methods()

    def app_connected(self, *, accepts_verdicts: bool, describes: bool = False) -> None:
        """Note an app's first message. ``describes``: an AppDescription follows, which names its methods."""
        self.accepts_verdicts = accepts_verdicts
        self._roles_known = not describes or not accepts_verdicts
        if self._roles_known:  # there are none
            self._for_roles = self._for_roles_of_instances = frozenset()

    def describe(self, description: AppDescription) -> None:
        """Note the names of the app's methods."""
        self._names = {
            method_id: name.rpartition(".")[2]
            for (destination, method_id), name in description.methods.items()
            if destination == ""
        }
        groups: dict[str, set[int]] = {}
        for destination, method_id in description.methods:
            if destination.startswith(GROUP_MARK):
                groups.setdefault(destination, set()).add(method_id)
        self._groups = {group: frozenset(method_ids) for group, method_ids in groups.items()}
        self._queries = self._groups.get(QUERIES, frozenset())
        roles = [method_ids for group, method_ids in self._groups.items() if group != QUERIES]
        self._for_roles = frozenset().union(*roles) - self._groups.get(ANYBODYS, frozenset())
        self._for_roles_of_instances = self._for_roles - self._groups.get(INSTANCES, frozenset())
        self._roles_known = True
        self._resolve_methods()

    def _resolve_methods(self) -> None:
        self._allowed = {
            caller: self._method_ids(permission.methods)
            for caller, permission in self._by_caller.items()
            if permission.methods is not None and ALL_METHODS not in permission.methods
        }

        self._below = {caller: below for caller in self._allowed if (below := self._subtrees_of(caller))}

    def _subtrees_of(self, caller: str) -> dict[int, tuple[str, ...]]:
        """Return the methods that ``caller`` can call only for some subtrees ("@writer:stocks"), without queries."""
        found: dict[int, tuple[str, ...]] = {}
        for right in sorted(self._by_caller[caller].methods or ()):
            group, _, subtree = right.partition(":")
            for method_id in self._groups.get(group, frozenset()) - self._queries if subtree else ():
                found[method_id] = (*found.get(method_id, ()), subtree)
        return found

    def _method_ids(self, allowed: frozenset[str]) -> frozenset[int]:
        named = frozenset(method_id for method_id, name in (self._names or {}).items() if name in allowed)
        named |= {CANCEL_CALL_METHOD_ID, ORDERING_METHOD_ID}  # these concern only calls that it made or gets
        named |= {NODE_METHOD_ID, HANDLES_METHOD_ID}  # a handle is itself the right to call its node
        if allowed & FENCING_METHODS:
            named |= {FENCING_METHOD_ID}
        roles = [right for right in allowed if right.startswith(GROUP_MARK) and right != OWNERS]
        if any(role != QUERIES for role in roles):
            roles.append(ANYBODYS)
        for role in roles:
            named |= self._groups.get(role, frozenset())
        return named

    def lacks_queries(self, caller: str) -> bool:
        """Return True if ``caller`` is allowed queries, but the app marks no method as one."""
        return QUERIES in (self._by_caller.get(caller, ANYTHING).methods or ()) and not self._queries

    def is_query(self, method_id: int) -> bool:
        """Return True if the app marks the method as a query."""
        return method_id in self._queries

    def limits(self, caller: str) -> bool:
        """Return True if ``caller`` can't call all methods."""
        return caller in self._allowed or (bool(self._for_roles) and self._needs_roles(caller))

    def _needs_roles(self, caller: str) -> bool:
        """Return True if methods with roles are closed to ``caller``: its settings list no methods, and it is not
        the owner."""
        return self._has_keys and caller != self._name and self._by_caller.get(caller, ANYTHING).methods is None

    def wait_reason(self, caller: str, *, is_instance: bool = False) -> str:
        """Return why the calls of ``caller`` can't be checked yet; "" if they can.

        Another instance does not wait for the app's roles: its calls are accepted while the app is away.
        """
        if caller not in self._allowed:
            if self._roles_known or is_instance or not self._needs_roles(caller):
                return ""
            return f"the app of {self._name!r} has not said yet which of its methods are for some callers only"
        if self._names is not None and self.accepts_verdicts:
            return ""
        return (
            f"{self._name!r} lets {caller!r} call some methods only, and its app has not said yet which those are (one "
            f"of the base protocol never does)"
        )

    @property
    def has_rates(self) -> bool:
        return bool(self._buckets)

    def must_wait(self, caller: str, now_ns: int) -> bool:
        """Return True if ``caller`` has used up its calls of this second."""
        bucket = self._buckets.get(caller)
        if bucket is None:
            return False
        return bucket.fill(now_ns) < max(1.0, bucket.capacity / 4)  # for less another try is not worth it

    def admit(self, caller: str, calls: bytes, count: int, open_count: int | None, now_ns: int) -> tuple[int, int]:
        """Return how many of the ``count`` packed RPC messages are accepted now, and where they end. Count them.

        ``open_count``: unanswered calls of a client. None: the caller is a peer, whose open calls delay nothing
        (:mod:`immortal.coordinator.core.input.admission`).
        """
        bucket, concurrent = self._buckets.get(caller), None
        if open_count is None:
            open_count = 0
        else:
            concurrent = self._by_caller.get(caller, ANYTHING).concurrent
        if bucket is None and concurrent is None:
            return count, len(calls)
        if bucket is not None:
            bucket.fill(now_ns)
        taken = offset = 0
        for _, start, end in decode_messages(calls):
            if calls[start] == RpcKind.CALL:
                if (bucket is not None and bucket.tokens < 1) or (concurrent is not None and open_count >= concurrent):
                    self.held_back[caller] += 1
                    break
                open_count += 1
                if bucket is not None:
                    bucket.tokens -= 1
            taken, offset = taken + 1, end
        return taken, offset

    def find_forbidden(self, caller: str, calls: bytes, *, is_instance: bool = False) -> list[tuple[int, str]]:
        """Return the packed RPC messages that ``caller`` is not allowed to send: (index, method name).

        Answers are never among them. ``calls`` were checked before. ``is_instance``: the caller is a peer."""
        allowed = self._allowed.get(caller)
        denied: frozenset[int] = frozenset()
        if allowed is None:
            if self._needs_roles(caller):
                denied = self._for_roles_of_instances if is_instance else self._for_roles
            if not denied:
                return []
        found = []
        below = self._below.get(caller, {})
        for index, (_, start, end) in enumerate(decode_messages(calls)):
            method_id = decode_zigzag_int(calls, start + 1)[0]
            is_ordered = method_id == ORDERED_METHOD_ID and calls[start] == RpcKind.CALL
            if is_ordered:
                method_id = ordered_method(calls, start, end)
            if allowed is None:  # a multicast is refused if it does not say which method it calls
                is_denied = method_id in denied or (is_ordered and method_id < 0)
            else:
                is_denied = method_id not in allowed
            if is_denied and method_id in below and not is_ordered:  # its arguments are inside others
                is_denied = not _is_below(below[method_id], calls, start, end)
            if is_denied and calls[start] == RpcKind.CALL:
                found.append((index, self.name_of(method_id)))
        return found

    def roles_of(self, method: str) -> list[str]:
        """Return the groups that can call the method, such as "@worker"; none if everybody can."""
        method_ids = {method_id for method_id, name in (self._names or {}).items() if name == method}
        return sorted(group for group, found in self._groups.items() if group != QUERIES and method_ids & found)

    def methods_of(self, calls: bytes, indices: Sequence[int]) -> list[tuple[int, str]]:
        """Return (index, method name) of the packed RPC messages with these indices."""
        messages = list(decode_messages(calls)) if indices else []
        return [(index, self.name_of(decode_zigzag_int(calls, messages[index][1] + 1)[0])) for index in indices]

    def name_of(self, method_id: int) -> str:
        """Return the method's name, or its number if the app has not named it."""
        return (self._names or {}).get(method_id) or f"method {method_id}"
