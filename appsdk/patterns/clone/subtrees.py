"""Which keys belong to which subtrees. ``a/b`` has the key ``a/b`` and all that begin with ``a/b/``. No I/O.

"" has all keys but the table's own, ``@`` those alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from immortal.appsdk.patterns.clone import limits
from immortal.appsdk.patterns.clone.records import EVERYBODY, OWN, PRESENT, Entitlement, check_key

ALL = ("", OWN)
ORDINARY = ("", PRESENT)
"""What everybody may see of a table without entitlements."""


def subtrees_of(key: str) -> Iterator[str]:
    """From the narrowest to the widest."""
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
    """Whether ``key``, or the subtree of that name, belongs to ``subtree``."""
    if not subtree:
        return not key.startswith(OWN)
    if subtree == OWN:
        return key.startswith(OWN)
    return key == subtree or key.startswith(subtree + "/")


def check_subtrees(subtrees: Iterable[str]) -> tuple[str, ...]:
    """Sorted, without those that others cover. Raises ValueError."""
    if isinstance(subtrees, str):
        raise ValueError(f"subtrees {subtrees!r}: a list was expected, such as [{subtrees!r}]")
    found = tuple(subtrees)
    if len(found) > limits.SUBTREES_MAX:
        raise ValueError(
            f"{len(found)} subtrees: at most {limits.SUBTREES_MAX} are possible; ask for what has them all"
        )
    for subtree in found:
        if subtree not in ALL:
            check_key(subtree)
    size_bytes = sum(len(subtree.encode()) for subtree in found)
    if size_bytes > limits.SUBTREES_SIZE_BYTES_MAX:
        raise ValueError(
            f"subtrees of {size_bytes} bytes: at most {limits.SUBTREES_SIZE_BYTES_MAX} are possible; ask for what has "
            f"them all"
        )
    return reduced(found)


def reduced(subtrees: Iterable[str]) -> tuple[str, ...]:
    """Sorted, without those that others cover."""
    kept = set(subtrees)
    return tuple(sorted(one for one in kept if not any(other in kept for other in list(subtrees_of(one))[1:])))


def common(wanted: Iterable[str], allowed: Iterable[str]) -> tuple[str, ...]:
    """What is in both."""
    allowed = tuple(allowed)
    return reduced(
        [one for one in wanted if any(covers(other, one) for other in allowed)]
        + [other for other in allowed if any(covers(one, other) for one in wanted)]
    )


def may_be_seen(subtree: str) -> bool:
    """By somebody at all: what is the table's own is not, but for who is there."""
    return not subtree.startswith(OWN) or covers(PRESENT, subtree)


class Entitlements:
    """Who may see what. With no rows at all everybody sees everything but the entitlements themselves.

    ``owner``: the table's own name, whose keys only its operators can read; it sees everything in any case.
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
        """What who shows the key of ``name`` ("": none) gets of what it wants. ``relay``: all, to forward it."""
        if relay:
            return ALL if self.may_relay(name) else ()
        if not self._by_name or name == self._owner:
            return common(wanted, ORDINARY)
        known = self._by_name.get(name) or self._by_name.get(EVERYBODY)
        return () if known is None else common(wanted, filter(may_be_seen, known.subtrees))

    def may_relay(self, name: str) -> bool:
        """In plain everybody on this machine may; with keys those that are entitled to."""
        if not name or name == self._owner:
            return True
        known = self._by_name.get(name)
        return known is not None and known.relay

    def may_block(self, name: str) -> bool:
        """Hold up writers. A forwarder may: it does so for those of its clients that may."""
        if not self._by_name or name == self._owner:
            return True
        known = self._by_name.get(name) or self._by_name.get(EVERYBODY)
        return known is not None and (known.may_block or known.relay)
