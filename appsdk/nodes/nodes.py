"""Nodes of one instance and the handles that it holds: requests of handlers, and input from the log.

Everything here happens while an input of the log is handled, so it follows from the log. Its state is part of each
checkpoint. Before the first node or handle it costs nothing.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from immortal.appsdk.calls.codec import encoder
from immortal.appsdk.calls.context import QUERY_RUNS, Context
from immortal.appsdk.calls.outbox import encode_call, make_writer
from immortal.appsdk.errors import AS_RPC, QueryError, StateError, UsageError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.handlers.definition import Definition, Peer
from immortal.appsdk.nodes.accounts import WHAT, Accounts
from immortal.appsdk.nodes.node import HandleMethod, Inbox, Node, NodeTable, SavedNode, node_definition
from immortal.appsdk.nodes.reference_counts import DESTROYED, REVOKED, Ended, Grant, Held, Key, Stage
from immortal.appsdk.types.handles import KEY_SIZE_BYTES, Handle
from immortal.protocol import decoding
from immortal.protocol.messages import RpcType
from immortal.protocol.safe_output import is_encodable
from immortal.protocol.system_methods import HANDLES_METHOD_ID, NODE_METHOD_ID


class Saved(msgspec.Struct):
    last_number: int
    nodes: list[SavedNode]
    grants: list[Grant]
    held: list[Held]


_decode_saved = decoding.Decoder(Saved).decode


def decode_saved(data: bytes) -> Saved:
    """Decode the part of a checkpoint on nodes and handles. Raises StateError."""
    try:
        return _decode_saved(data)
    except decoding.DecodeError as error:
        raise StateError(f"the checkpoint's part on nodes and handles can't be read: {error}") from None


_write_message = make_writer(WHAT, HANDLES_METHOD_ID, RpcType.FORK)


class Nodes:
    """Nodes of one instance. ``make_call`` makes an awaitable call of a node (:mod:`immortal.appsdk.waiting`).

    ``accounts``: who holds which handles; ``inbox``: takes input from the log; ``living``: the nodes themselves.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.instance: Any = None
        self.make_call: Callable[..., Any] = lambda *arguments: None
        self.accounts = Accounts(context)
        self.living = NodeTable(self)
        self.inbox = Inbox(self)
        self._last_number = 0  # of nodes and keys together

    # --- state --------------------------------------------------------------------------------------------------------

    def use(self, definition: Definition, instance: Any) -> None:
        """Use this class's code from here on. Raises StateError if it does not fit the existing nodes."""
        self.instance = instance
        self.living.use(definition)

    def save(self) -> bytes | None:
        """Encode nodes and accounts for a checkpoint; None: there are none. Raises StateError."""
        accounts = self.accounts
        if not self._last_number and not accounts.holder.held:
            return None
        nodes = self.living.save()
        return encoder.encode(Saved(self._last_number, nodes, accounts.owner.save(), accounts.holder.save()))

    def restore(self, data: bytes | None) -> None:
        """Restore nodes and accounts from a checkpoint. Raises StateError."""
        saved = Saved(0, [], [], []) if data is None else decode_saved(data)
        self._last_number = saved.last_number
        self.accounts.restore(saved.grants, saved.held)
        self.living.restore(saved.nodes)
        self.inbox.hooks.clear()  # of a state that no longer exists

    # --- requests of the owner's handlers -----------------------------------------------------------------------------

    def _require_handler(self, function_name: str) -> str:
        """Return the instance's name if a handler runs. Raises UsageError."""
        context = self.context
        if context.handling_thread_id == QUERY_RUNS:
            raise QueryError(f"{function_name}: a query only reads: {AS_RPC}")
        if threading.get_ident() != context.handling_thread_id:
            raise UsageError(
                f"{function_name}: only handlers make and use nodes and handles (@rpc, @impulse and @initial methods): "
                f"what __init__, prepare, upgrade, hooks and queries do is not in the log"
            )
        if not context.instance_name or context.source is None:
            raise UsageError(
                f"{function_name}: the log does not say what this instance is called, or the coordinator does not say "
                f"who sent what: both are older than this SDK; start the instance with a new log"
            )
        return context.instance_name

    def create(self, cls: type, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Create a node; return its handle. Raises UsageError, DefinitionError, and what its ``__init__`` raises."""
        self._require_handler("immortal.create_node")
        node_definition(cls)
        definition = self.living.definition
        if definition is None or cls not in definition.nodes:
            name = "the class" if definition is None else definition.name
            raise UsageError(
                f"immortal.create_node({cls.__qualname__}): {name} does not name it: class {name}(Immortal, "
                f"nodes=({cls.__qualname__},))"
            )
        self._last_number = number = self._last_number + 1
        self.living.create(cls, number, arguments, keywords)
        return self._grant(number)

    def _grant(self, number: int) -> Any:
        """Return a new handle of the node with its own key: 128 bits that only the instance's secret seed leads to."""
        context = self.context
        self._last_number += 1
        digest = hashlib.blake2b(key=context.seed, digest_size=KEY_SIZE_BYTES, person=b"node key")
        place = context.committer_id, context.sequence_id, context.message_index, self._last_number
        digest.update(" ".join(map(str, place)).encode())
        key = digest.digest()
        self.accounts.owner.create(key, number)
        return self.make_handle(key, number)

    def make_handle(self, key: Key, number: int) -> Any:
        """Return a handle of the node ``number``."""
        make: Any = Handle
        node = self.living.nodes.get(number)
        return make(self.context.instance_name, key, None if node is None else type(node), self)

    def handle_of(self, number: int) -> Any:
        """Return the live handle of the node ``number``. Raises UsageError."""
        for grant in self.accounts.owner.grants.values():
            if grant.node == number and grant.stage == Stage.LIVE:
                return self.make_handle(grant.key, number)
        raise UsageError("this node is destroyed, or about to be: it has no handle any more")

    def node_of(self, handle: Any) -> Node:
        """Return the node of an own handle. Raises UsageError."""
        grant = self._own_grant(handle, "immortal.node_of")
        node = None if grant is None or grant.stage == Stage.ENDED else self.living.nodes.get(grant.node)
        if node is None:
            raise UsageError(f"immortal.node_of({handle!r}): it was destroyed or revoked")
        return node

    def _own_grant(self, handle: Any, function_name: str) -> Grant | None:
        """Return the grant of an own handle; None: it is no longer known. Raises UsageError."""
        owner, key = _parts(handle, function_name)
        if owner != self.context.instance_name:
            raise UsageError(f"{function_name}({handle!r}): only its owner, {owner!r}, can do that")
        return self.accounts.owner.grants.get(key)

    def destroy(self, handle: Any) -> None:
        """End the node of an own handle. Raises UsageError."""
        self._require_handler("immortal.destroy")
        grant = self._own_grant(handle, "immortal.destroy")
        if grant is None or grant.stage == Stage.ENDED:
            raise UsageError(f"immortal.destroy({handle!r}): it was destroyed or revoked before")
        if grant.stage == Stage.LIVE:
            self._end(grant.key, DESTROYED)

    def revoke(self, handle: Any, holder: Any) -> Any:
        """Revoke an own handle for ``holder`` (None: for all); return a valid handle. Raises UsageError."""
        own_name = self._require_handler("immortal.revoke")
        grant = self._own_grant(handle, "immortal.revoke")
        if grant is None or grant.stage != Stage.LIVE:
            raise UsageError(f"immortal.revoke({handle!r}): it was destroyed or revoked before, or is about to be")
        if holder is None:
            self._end(grant.key, REVOKED)
            return self._grant(grant.node)
        source = getattr(holder, "_immortal_peer", None)
        name = source.name if isinstance(source, Peer) else holder
        if not isinstance(name, str) or name == own_name or not is_encodable(name):
            raise UsageError(f"immortal.revoke({handle!r}, {holder!r}): a peer (self.q) or its name was expected")
        if name not in grant.banned:
            self.accounts.owner.ban(grant.key, name)
            self.accounts.send_actions()
        return handle

    def _end(self, key: Key, how: str) -> None:
        """End a node: the end goes through the queues of owner and holders, as one ordered multicast."""
        own_name = self.context.instance_name
        holders = self.accounts.owner.start_end(key)
        message = encode_call(_write_message, (own_name, Ended(key, how)))
        self.context.multicasts.send(WHAT, HANDLES_METHOD_ID, [own_name, *holders], [message])

    # --- requests of holders' handlers --------------------------------------------------------------------------------

    def release_handle(self, handle: Any) -> None:
        """Release the handle of another instance's node. Raises UsageError."""
        own_name = self._require_handler("immortal.release_handle")
        owner, key = _parts(handle, "immortal.release_handle")
        if owner == own_name:
            raise UsageError(
                f"immortal.release_handle({handle!r}): it is one's own: immortal.destroy(...) ends its node"
            )
        if self.accounts.holder.holds(owner, key):  # else it has ended, or was released before
            self.accounts.holder.release(owner, key)
            self.accounts.send_actions()

    def holders_of(self, handle: Any) -> list[str]:
        """Return the names of the holders of an own handle. Raises UsageError."""
        grant = self._own_grant(handle, "immortal.holders_of")
        return [] if grant is None else sorted(grant.holders)

    def require_usable(self, handle: Any) -> None:
        """Check that a handle can be used. Raises UsageError."""
        self.accounts.require_usable(*_parts(handle, WHAT), f"{handle!r} can't be used")

    def method(self, handle: Any, name: str) -> HandleMethod:
        return HandleMethod(self, handle, self.handler_of(handle, name))

    @staticmethod
    def handler_of(handle: Any, name: str) -> Handler[Any, Any]:
        """Return the handler ``name`` of a handle's node. Raises AttributeError, UsageError."""
        cls = handle._immortal_of[2]
        if cls is None:
            raise UsageError(
                f"{handle!r}.{name}: nobody says of which class its node is: annotate it as Handle[...] where it comes "
                f"from"
            )
        definition = node_definition(cls)
        if (handler := definition.handlers.get(name)) is None:
            known = ", ".join(sorted(definition.handlers)) or "none"
            raise AttributeError(f"{definition.name} has no handler {name!r} (its handlers: {known})")
        return handler

    def send(self, handle: Any, handler: Handler[Any, Any], arguments: tuple[Any, ...]) -> None:
        """Send a call to a handle's node. Raises UsageError, TypeError."""
        self.require_usable(handle)
        destination = self.destination(handle)
        sender = self.accounts.sender(destination, NODE_METHOD_ID, handler.function.__qualname__)
        sender(self.wrapped([handle._immortal_of[1]], handler, arguments))

    def destination(self, handle: Any) -> str:
        owner: str = handle._immortal_of[0]
        return "" if owner == self.context.instance_name else owner

    def wrapped(self, keys: list[Key], handler: Handler[Any, Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._require_handler(handler.function.__qualname__), keys, handler.method_id, arguments

    def encoding(self) -> None:
        """Note that a handle is encoded, possibly into a message. Raises UsageError in another thread."""
        context = self.context
        if threading.get_ident() != context.thread_id:
            raise UsageError("a handle can't be part of an impulse: pass it on in a handler")
        context.carries_handles = True


def _parts(handle: Any, function_name: str) -> tuple[str, Key]:
    """Return the owner and the key of a handle. Raises UsageError."""
    found = getattr(handle, "_immortal_of", None)
    if found is None:
        raise UsageError(f"{function_name}({handle!r}): a handle was expected, as immortal.create_node(...) gives it")
    owner, key, _, _ = found
    return owner, key
