"""The nodes of one instance and the handles that it holds: what handlers ask for, and what the log brings.

Everything here happens while an input of the log is handled, so it follows from the log. Its state is part of each
checkpoint. Until the first node that it makes or handle that it gets there is nothing, and nothing is looked at.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec

from appsdk.calls.codec import ArgumentCodec, encoder
from appsdk.calls.context import QUERY_RUNS, Context
from appsdk.calls.failures import encode_refused, method_of, misfit_text, refusal
from appsdk.calls.outbox import Send, encode_call, make_writer
from appsdk.errors import AS_RPC, HandlerError, QueryError, StateError, UsageError
from appsdk.handlers.decorators import Handler
from appsdk.handlers.definition import Definition, Peer
from appsdk.nodes.counting import DESTROYED, REVOKED, Grant, Held, Holder, LastReleased, Owner, Stage, Tell
from appsdk.nodes.handles import HandleMethod
from appsdk.nodes.messages import Ended, Forgotten, Key, Message, Passed, Released, Stale
from appsdk.nodes.node import Node, NodeContext, node_definition
from appsdk.types.handles import KEY_SIZE_BYTES, MARK, Handle, handles_in, tag_of
from protocol.client import CLIENTS
from protocol.errors import ProtocolError
from protocol.messages import RpcKind, RpcType, decode_incoming_rpc, decode_message
from protocol.nodes import HANDLES_METHOD_ID, NODE_METHOD_ID
from protocol.verdicts import Cause, Verdict, VerdictKind

WHAT = "a handle"


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


class SavedNode(msgspec.Struct, array_like=True):
    number: int
    class_name: str
    state: bytes


class Saved(msgspec.Struct):
    last_number: int
    nodes: list[SavedNode]
    grants: list[Grant]
    held: list[Held]


_decode_saved = msgspec.msgpack.Decoder(Saved).decode


def decode_saved(data: bytes) -> Saved:
    """Raises StateError."""
    try:
        return _decode_saved(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateError(f"the checkpoint's part on nodes and handles can't be read: {error}") from None


decode_node_call = msgspec.msgpack.Decoder(NodeCall).decode
decode_awaited_node_call = msgspec.msgpack.Decoder(AwaitedNodeCall).decode
decode_word = msgspec.msgpack.Decoder(Word).decode
_write_word = make_writer(WHAT, HANDLES_METHOD_ID, RpcType.FORK)


class Nodes:
    """Those of one instance. ``make_call``: what awaits an answer of a node, made in :mod:`appsdk.waiting`."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.definition: Definition | None = None
        self.instance: Any = None
        self.make_call: Callable[..., Any] = lambda *arguments: None
        self.outsiders: frozenset[str] = frozenset()  # who may look at handles, and holds none: a test
        self._nodes: dict[int, Node] = {}
        self._last_number = 0  # of nodes and keys
        self._owner = Owner()
        self._holder = Holder()
        self._hooks: list[tuple[str, Any]] = []
        self._senders: dict[tuple[str, int], Send] = {}

    # --- state --------------------------------------------------------------------------------------------------------

    def use(self, definition: Definition, instance: Any) -> None:
        """From here on this class's code runs. Raises StateError where it does not fit the nodes that there are."""
        before, self.definition, self.instance = self.definition, definition, instance
        if before is not None and before is not definition:
            for number, node in list(self._nodes.items()):
                old = node_definition(type(node))
                self._nodes[number] = self._restored(SavedNode(number, old.name, old.encode(node)))

    def save(self) -> bytes | None:
        """None: there is nothing. Raises StateError."""
        if not self._last_number and not self._holder.held:
            return None
        nodes = []
        for number, node in self._nodes.items():
            definition = node_definition(type(node))
            nodes.append(SavedNode(number, definition.name, definition.encode(node)))
        return encoder.encode(Saved(self._last_number, nodes, self._owner.save(), self._holder.save()))

    def restore(self, data: bytes | None) -> None:
        """Raises StateError."""
        saved = Saved(0, [], [], []) if data is None else decode_saved(data)
        self._last_number = saved.last_number
        self._owner, self._holder = Owner(saved.grants), Holder(saved.held)
        self._nodes = {one.number: self._restored(one) for one in saved.nodes}
        self._hooks.clear()

    def _restored(self, saved: SavedNode) -> Node:
        classes = () if self.definition is None else self.definition.nodes
        for cls in classes:
            definition = node_definition(cls)
            if saved.class_name in (definition.name, *definition.formerly):
                node = self._new(cls, saved.number)
                definition.restore(node, saved.class_name, saved.state)
                return node
        name = "?" if self.definition is None else self.definition.name
        known = ", ".join(cls.__qualname__ for cls in classes) or "none"
        raise StateError(
            f"there is a node of the class {saved.class_name!r}, and {name} has {known}: name it in nodes=(...); if it "
            f"was renamed: class New(Node, formerly=({saved.class_name!r},))"
        )

    def _new(self, cls: type, number: int) -> Node:
        given: Any = cls
        made: Node = given.__new__(given)
        made._immortal_context = NodeContext(made, self, number)
        return made

    # --- what handlers of the owner ask for ---------------------------------------------------------------------------

    def _require_handler(self, what: str) -> str:
        """What this instance is called. Raises UsageError."""
        context = self.context
        if context.handling_thread_id == QUERY_RUNS:
            raise QueryError(f"{what}: a query only reads: {AS_RPC}")
        if threading.get_ident() != context.handling_thread_id:
            raise UsageError(
                f"{what}: only handlers make and use nodes and handles (@rpc, @impulse and @initial methods): what "
                f"__init__, prepare, upgrade, hooks and queries do is not in the log"
            )
        if not context.instance_name or context.source is None:
            raise UsageError(
                f"{what}: the log does not say what this instance is called, or the coordinator does not say who sent "
                f"what: both are older than this SDK; start the instance with a new log"
            )
        return context.instance_name

    def create(self, cls: type, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A new node's handle. Raises UsageError, DefinitionError, and what its ``__init__`` raises."""
        self._require_handler("self.create_node")
        node_definition(cls)
        if self.definition is None or cls not in self.definition.nodes:
            name = "the class" if self.definition is None else self.definition.name
            raise UsageError(
                f"self.create_node({cls.__qualname__}): {name} does not name it: class {name}(Immortal, "
                f"nodes=({cls.__qualname__},))"
            )
        self._last_number = number = self._last_number + 1
        node: Any = self._new(cls, number)
        self._nodes[number] = node
        node.__init__(*arguments, **keywords)
        return self._grant(number)

    def _grant(self, number: int) -> Any:
        """A handle of the node with a key of its own: 128 bits that only the instance's secret seed leads to."""
        context = self.context
        self._last_number += 1
        digest = hashlib.blake2b(key=context.seed, digest_size=KEY_SIZE_BYTES, person=b"node key")
        place = context.committer_id, context.sequence_id, context.message_index, self._last_number
        digest.update(" ".join(map(str, place)).encode())
        key = digest.digest()
        self._owner.create(key, number)
        return self._handle(key, number)

    def _handle(self, key: Key, number: int) -> Any:
        make: Any = Handle
        node = self._nodes.get(number)
        return make(self.context.instance_name, key, None if node is None else type(node), self)

    def handle_of(self, number: int) -> Any:
        """Raises UsageError."""
        for grant in self._owner.grants.values():
            if grant.node == number and grant.stage == Stage.LIVE:
                return self._handle(grant.key, number)
        raise UsageError("this node is destroyed, or about to be: it has no handle any more")

    def node_of(self, handle: Any) -> Node:
        """Raises UsageError."""
        grant = self._own(handle, "self.node_of")
        node = None if grant is None or grant.stage == Stage.ENDED else self._nodes.get(grant.node)
        if node is None:
            raise UsageError(f"self.node_of({handle!r}): it was destroyed or revoked")
        return node

    def _own(self, handle: Any, what: str) -> Grant | None:
        """None: nothing is known of it any more. Raises UsageError."""
        owner, key = _parts(handle, what)
        if owner != self.context.instance_name:
            raise UsageError(f"{what}({handle!r}): only its owner, {owner!r}, can do that")
        return self._owner.grants.get(key)

    def destroy(self, handle: Any) -> None:
        """Raises UsageError."""
        self._require_handler("self.destroy")
        grant = self._own(handle, "self.destroy")
        if grant is None or grant.stage == Stage.ENDED:
            raise UsageError(f"self.destroy({handle!r}): it was destroyed or revoked before")
        if grant.stage == Stage.LIVE:
            self._end(grant.key, DESTROYED)

    def revoke(self, handle: Any, holder: Any) -> Any:
        """Raises UsageError."""
        own_name = self._require_handler("self.revoke")
        grant = self._own(handle, "self.revoke")
        if grant is None or grant.stage != Stage.LIVE:
            raise UsageError(f"self.revoke({handle!r}): it was destroyed or revoked before, or is about to be")
        if holder is None:
            self._end(grant.key, REVOKED)
            return self._grant(grant.node)
        source = getattr(holder, "_immortal_peer", None)
        name = source.name if isinstance(source, Peer) else holder
        if not isinstance(name, str) or name == own_name:
            raise UsageError(f"self.revoke({handle!r}, {holder!r}): a peer (self.q) or its name was expected")
        if name not in grant.banned:
            self._owner.ban(grant.key, name)
            self._act()
        return handle

    def _end(self, key: Key, how: str) -> None:
        """Its end goes through the queues of the owner and of all holders, as one ordered multicast."""
        own_name = self.context.instance_name
        told = self._owner.begin_end(key)
        word = encode_call(_write_word, (own_name, Ended(key, how)))
        self.context.multicasts.send(WHAT, HANDLES_METHOD_ID, [own_name, *told], [word])

    # --- what handlers of holders ask for -----------------------------------------------------------------------------

    def release_handle(self, handle: Any) -> None:
        """Raises UsageError."""
        own_name = self._require_handler("self.release_handle")
        owner, key = _parts(handle, "self.release_handle")
        if owner == own_name:
            raise UsageError(f"self.release_handle({handle!r}): it is one's own: self.destroy(...) ends its node")
        if self._holder.holds(owner, key):  # else it has ended meanwhile, or was released before
            self._holder.release(owner, key)
            self._act()

    def holders_of(self, handle: Any) -> list[str]:
        """Raises UsageError."""
        grant = self._own(handle, "self.holders_of")
        return [] if grant is None else sorted(grant.holders)

    def _why_not(self, owner: str, key: Key) -> str:
        one = self._holder.held.get((owner, key))
        if one is not None and one.ended:
            return f"{owner!r} has {one.ended} it"
        return "this instance does not hold it: it was released or has ended, or was never passed to it"

    def require_usable(self, handle: Any) -> None:
        """Raises UsageError."""
        owner, key = _parts(handle, WHAT)
        if owner != self.context.instance_name and not self._holder.holds(owner, key):
            raise self._refused(f"{handle!r} can't be used: {self._why_not(owner, key)}")
        if owner == self.context.instance_name:
            grant = self._owner.grants.get(key)
            if grant is None or grant.stage == Stage.ENDED:
                raise self._refused(f"{handle!r} can't be used: it was destroyed or revoked")

    def _refused(self, text: str) -> BaseException:
        """An async handler ends, whatever it catches: a rebuild would not refuse it again."""
        error, task = UsageError(text), self.context.tasks.running
        return error if task is None else task.abandon(error)

    def method(self, handle: Any, name: str) -> HandleMethod:
        return HandleMethod(self, handle, self.handler_of(handle, name))

    @staticmethod
    def handler_of(handle: Any, name: str) -> Handler[Any, Any]:
        """Raises AttributeError, UsageError."""
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
        """Raises UsageError, TypeError."""
        self.require_usable(handle)
        destination = self.destination(handle)
        sender = self._sender(destination, NODE_METHOD_ID, handler.function.__qualname__)
        sender(self.wrapped([handle._immortal_of[1]], handler, arguments))

    def destination(self, handle: Any) -> str:
        owner: str = handle._immortal_of[0]
        return "" if owner == self.context.instance_name else owner

    def wrapped(self, keys: list[Key], handler: Handler[Any, Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._require_handler(handler.function.__qualname__), keys, handler.method_id, arguments

    def _sender(self, destination: str, method_id: int, name: str = WHAT) -> Send:
        key = destination, method_id
        if (send := self._senders.get(key)) is None:
            made: Send = self.context.outbox.make_sender(destination, name, method_id, RpcKind.CALL, (), RpcType.FORK)
            send = self._senders[key] = made
        return send

    # --- handles in messages ------------------------------------------------------------------------------------------

    def encoding(self) -> None:
        """Raises UsageError."""
        context = self.context
        if threading.get_ident() != context.thread_id:
            raise UsageError("a handle can't be part of an impulse: pass it on in a handler")
        context.carries = True

    def passing(self, destination: str, data: bytes) -> None:
        """What was encoded last goes to ``destination`` now: its handles are passed on. Raises UsageError."""
        self.context.carries = False
        own_name = self.context.instance_name
        to = destination or own_name
        found = handles_in(data)
        for owner, key in found:
            self._require_passable(owner, key, to)
        for owner, key in found:
            if to == owner or to in self.outsiders:
                continue
            if owner == own_name:
                self._owner.passed(key, to)
            else:
                self._holder.pass_on(owner, key, to)
        self._act()

    def _require_passable(self, owner: str, key: Key, to: str) -> None:
        what = f"handle {tag_of(key)} of {owner!r} can't be passed on"
        if to.startswith(CLIENTS):
            raise self._refused(f"{what}: clients hold no handles, instances do")
        if owner != self.context.instance_name:
            if not self._holder.holds(owner, key):
                raise self._refused(f"{what}: {self._why_not(owner, key)}")
            return
        grant = self._owner.grants.get(key)
        if grant is None or grant.stage == Stage.ENDED:
            raise self._refused(f"{what}: it was destroyed or revoked")
        if to in grant.banned:
            raise self._refused(f"{what}: it was revoked for {to!r}")

    def taking(self, decode: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], tuple[Any, ...]]:
        """``decode`` of a handler that may be given handles: once they are read they are held."""

        def taken(data: Any) -> tuple[Any, ...]:
            arguments = decode(data)
            if MARK in (data if isinstance(data, bytes) else bytes(data)):
                self.arrived(bytes(data))
            return arguments

        return taken

    def arrived(self, data: bytes) -> None:
        """Of a message that is taken."""
        for owner, key in handles_in(data):
            if owner != self.context.instance_name and not self._holder.arrived(owner, key):
                stale = Stale(owner, key, self._holder.held[owner, key].ended)
                self._sender("", HANDLES_METHOD_ID)((self.context.instance_name, stale))
        self._act()

    def not_taken(self, data: bytes) -> None:
        """Of a message that nobody takes."""
        for owner, key in handles_in(data):
            if owner != self.context.instance_name:
                self._holder.not_taken(owner, key)
        self._act()

    def failed(self, message: bytes, verdict: Verdict) -> None:
        """The message has a verdict. Where that means that it is passed over, what it brought is given back."""
        if not verdict.skips:
            return
        if method_of(message) == HANDLES_METHOD_ID:
            if verdict.kind is not VerdictKind.REFUSED:  # only a hook has failed
                self._failed_hook(message)
        elif MARK in message:
            self.not_taken(_arguments_of(message))

    # --- what the log brings ------------------------------------------------------------------------------------------

    def called(self, call: NodeCall | AwaitedNodeCall) -> None:
        """Raises HandlerError."""
        caller, number = (call.caller, call.number) if isinstance(call, AwaitedNodeCall) else (None, 0)
        self._require_speaker(call.sender)
        if caller is not None and caller.startswith(CLIENTS):
            raise self._wrong("clients hold no handles, and call no nodes", Cause.SENDER)
        targets = []
        gone = ""
        for key in call.keys:
            grant = self._owner.grants.get(key)
            if grant is None and call.sender != self.context.instance_name:
                raise self._wrong(f"{call.sender!r} has no such handle", Cause.SENDER)
            if grant is None or grant.stage == Stage.ENDED:
                gone = "its node was destroyed, or the handle revoked, before the call came in its order"
            elif call.sender in grant.banned:
                gone = f"the handle was revoked for {call.sender!r}"
            else:
                targets.append(self._nodes[grant.node])
        arguments = bytes(call.arguments)
        ready = [(node, *self._read(node, call.method_id, arguments)) for node in targets]
        if not ready:
            self.not_taken(arguments)
            if caller is not None:
                self._answer_gone(caller, number, gone)
            return
        self.arrived(arguments)
        for node, handler, codec, values in ready:
            self._run(node, handler, codec, values, caller, number)
        self.context.tasks.drain()

    def _read(
        self, node: Node, method_id: int, arguments: bytes
    ) -> tuple[Handler[Any, Any], ArgumentCodec, tuple[Any, ...]]:
        definition = node_definition(type(node))
        if (handler := definition.by_method_id.get(method_id)) is None:
            known = ", ".join(definition.handlers) or "none"
            raise self._wrong(f"{definition.name} has no method {method_id} (it has: {known})", Cause.METHOD)
        codec = definition.codec(handler)
        try:
            return handler, codec, codec.decode(arguments)
        except Exception as error:
            raise self._wrong(misfit_text(codec, error, arguments, 0), Cause.ARGUMENTS) from None

    def _run(
        self,
        node: Node,
        handler: Handler[Any, Any],
        codec: ArgumentCodec,
        values: tuple[Any, ...],
        caller: str | None,
        number: int,
    ) -> None:
        tasks = self.context.tasks
        try:
            raised, value = tasks.handler_runs.run_handler(handler, values, waits=caller is not None, node=node)
        except HandlerError as error:
            if error.failure is not None:
                error.failure = replace(error.failure, method_id=NODE_METHOD_ID)
            raise
        if caller is not None:
            tasks.answers.answer(handler, caller, number, raised, value)

    def _answer_gone(self, caller: str, number: int, text: str) -> None:
        handler: Any = SimpleNamespace(
            method_id=NODE_METHOD_ID, function=Nodes.called, signature=SimpleNamespace(parameters={})
        )
        self.context.tasks.answers.answer(handler, caller, number, True, encode_refused(text))

    def told(self, word: Word) -> None:
        """Raises HandlerError."""
        self._require_speaker(word.sender)
        if not self._take(word):
            raise self._wrong(f"{word.sender!r} tells of a handle that there is not", Cause.SENDER)
        self._act()
        hooks, self._hooks = self._hooks, []
        for name, handle in hooks:
            self._run_hook(name, handle)

    def _failed_hook(self, message: bytes) -> None:
        """A hook has failed, and the state is as before it: what the message says holds all the same."""
        self._take(decode_word(_arguments_of(message)))
        self._hooks.clear()
        self._act()
        self._hooks.clear()

    def _take(self, word: Word) -> bool:
        sender, message = word.sender, word.message
        if isinstance(message, Passed):
            return self._owner.passed(message.key, message.to)
        if isinstance(message, Released):
            return self._owner.released(message.key, sender, message.count)
        make: Any = Handle
        if isinstance(message, Stale):
            if sender != self.context.instance_name:
                return False
            self._hooks.append((f"on_{message.how}", make(message.owner, message.key, None, self)))
        elif isinstance(message, Forgotten):
            self._holder.forgotten(sender, message.key)
        elif sender != self.context.instance_name:
            if self._holder.ended(sender, message.key, message.how):
                self._hooks.append((f"on_{message.how}", make(sender, message.key, None, self)))
        else:
            grant = self._owner.grants.get(message.key)
            if grant is None or grant.stage != Stage.ENDING:
                return False
            if message.how == DESTROYED:
                self._nodes.pop(grant.node, None)
            self._owner.end(message.key, message.how)
        return True

    def _run_hook(self, name: str, handle: Any) -> None:
        function = getattr(type(self.instance), name, None)
        if function is None:
            return
        hook: Any = SimpleNamespace(
            function=function, raises={}, is_query=False, on_error=None, method_id=HANDLES_METHOD_ID, name=name
        )
        self.context.tasks.handler_runs.run_handler(hook, (handle,), waits=False)
        self.context.tasks.drain()

    def _act(self) -> None:
        for machine in (self._owner, self._holder):
            actions, machine.actions = machine.actions, []
            for action in actions:
                if isinstance(action, Tell):
                    to = "" if action.to == self.context.instance_name else action.to
                    self._sender(to, HANDLES_METHOD_ID)((self.context.instance_name, action.message))
                elif isinstance(action, LastReleased):
                    grant = self._owner.grants[action.key]
                    self._hooks.append(("on_last_release", self._handle(action.key, grant.node)))

    def _require_speaker(self, sender: str) -> None:
        """What the instance sends to itself was somebody else's, and was looked at as it came."""
        if self.context.source not in ("", sender):
            raise self._wrong(f"{self.context.source!r} speaks for {sender!r}", Cause.SENDER)

    def _wrong(self, text: str, cause: Cause) -> HandlerError:
        context = self.context
        return HandlerError(
            f"record {context.sequence_id}, message {context.message_index}: {text}; the app stops",
            context.sequence_id,
            context.message_index,
            refusal(WHAT, None, cause, text),
        )


def _parts(handle: Any, what: str) -> tuple[str, Key]:
    """Raises UsageError."""
    found = getattr(handle, "_immortal_of", None)
    if found is None:
        raise UsageError(f"{what}({handle!r}): a handle was expected, as self.create_node(...) gives it")
    owner, key, _, _ = found
    return owner, key


def _arguments_of(message: bytes) -> bytes:
    try:
        _, start, end = decode_message(message, 0)
        return bytes(decode_incoming_rpc(message, start, end).arguments)
    except ProtocolError:
        return b""
