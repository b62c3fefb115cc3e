"""Nodes: their classes (handlers, state), the live nodes of an instance, calls through handles, and input for nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any, ClassVar, Self, cast

import msgspec

from immortal.appsdk.calls.codec import ArgumentCodec, bind_arguments
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import argument_mismatch, encode_refused, method_of, refused, rpc_of
from immortal.appsdk.calls.outbox import outside_handler_error
from immortal.appsdk.calls.user_code import is_user_failure
from immortal.appsdk.errors import DefinitionError, HandlerError, StateError, UsageError
from immortal.appsdk.handlers.decorators import HOOK_MARK, BoundHandler, Handler
from immortal.appsdk.handlers.definition import Definition, resolving
from immortal.appsdk.nodes.accounts import WHAT, Accounts
from immortal.appsdk.nodes.reference_counts import (
    DESTROYED,
    REVOKED,
    AwaitedNodeCall,
    Ending,
    Forgotten,
    HandleMessage,
    NodeCall,
    Passed,
    Released,
    Stage,
    Stale,
    decode_handle_message,
)
from immortal.appsdk.state.schema import StateSchema, copied_envelope, hook_of
from immortal.appsdk.types.handles import MARK, Handle
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.system_methods import HANDLES_METHOD_ID, NODE_METHOD_ID
from immortal.protocol.verdicts import Cause, Verdict, VerdictKind


class NodeDefinition:
    """Definition of a class of nodes: handlers by name and by method ID, and how its state is saved."""

    def __init__(self, cls: type, formerly: Iterable[str]) -> None:
        if isinstance(formerly, str):
            raise DefinitionError(f"{cls.__qualname__}: formerly={formerly!r}: a tuple was expected: ({formerly!r},)")
        self.cls = cls
        self.formerly = tuple(formerly)
        self.handlers: dict[str, Handler[Any, Any]] = {}
        self.by_method_id: dict[int, Handler[Any, Any]] = {}
        self._codecs: dict[str, ArgumentCodec] = {}
        self._state: StateSchema | None = None
        for ancestor in reversed(cls.__mro__):
            for name, value in vars(ancestor).items():
                self._add(name, value)
        for handler in self.handlers.values():
            if (other := self.by_method_id.setdefault(handler.method_id, handler)) is not handler:
                raise DefinitionError(
                    f"{self.name}: {other.name} and {handler.name} have the same method ID, {handler.method_id}: give "
                    f"one of them another, e.g. @rpc(id=1)"
                )

    @property
    def name(self) -> str:
        return self.cls.__qualname__

    def _add(self, name: str, value: object) -> None:
        where = f"{self.name}.{name}"
        if name == "owner" and self.cls is not Node and not isinstance(value, property):
            raise DefinitionError(f"{where}: 'owner' is the instance that a node is of: choose another name")
        if getattr(value, HOOK_MARK, None) is not None:
            raise DefinitionError(f"{where}: a node has @rpc handlers alone; hooks are its owner's")
        if isinstance(value, Handler):
            if value.decorator != "rpc" or value.is_async:
                what = "an 'async def'" if value.is_async else f"@{value.decorator}"
                raise DefinitionError(
                    f"{where}: {what}: a node's handlers are @rpc and plain 'def'; what has to wait is a handler of "
                    f"its owner, which the node starts with self.owner.<handler>.fork(...)"
                )
            self.handlers[name] = value
        elif name in self.handlers:
            raise DefinitionError(f"{where} replaces a handler of a base class and is none itself: write @rpc above it")

    def codec(self, handler: Handler[Any, Any]) -> ArgumentCodec:
        """Return the codec of a handler's arguments. Raises DefinitionError, NameError."""
        if (codec := self._codecs.get(handler.key)) is None:
            codec = self._codecs[handler.key] = ArgumentCodec(handler.function, handler.signature)
        return codec

    def state(self) -> StateSchema:
        """Return the schema of the state. Raises DefinitionError."""
        if self._state is None:
            with resolving(f"{self.name}: the annotation of an attribute"):
                self._state = StateSchema(self.cls, "msgspec", self.handlers, self.formerly)
            for name in self._state.tables:
                raise DefinitionError(f"{self.name}: attribute {name!r}: a Table is its owner's: a node can't have one")
        return self._state

    def resolve(self) -> None:
        """Check all annotations. Raises DefinitionError."""
        self.state()
        for handler in self.handlers.values():
            with resolving(f"{handler.function.__qualname__}: an annotation"):
                self.codec(handler)


def node_definition(cls: object) -> NodeDefinition:
    """Return the definition of a class of nodes. Raises DefinitionError for anything else."""
    found = vars(cls).get("_immortal_node") if isinstance(cls, type) else None
    if found is None:
        raise DefinitionError(f"{cls!r} is not a class below immortal.Node")
    return cast(NodeDefinition, found)


class NodeContext:
    """Context of one node: it makes the node's handlers.

    ``nodes``: an appsdk.nodes.nodes.Nodes; None: a plain object that no instance created. ``number``: of the
    node in it.
    """

    __slots__ = ("_node", "nodes", "number")

    def __init__(self, node: Node, nodes: Any = None, number: int = 0) -> None:
        self._node = node
        self.nodes = nodes
        self.number = number

    @property
    def handlers(self) -> SimpleNamespace:
        node = self._node
        found = SimpleNamespace()
        for handler in node._immortal_node.handlers.values():
            bound = BoundHandler[Any, Any](MethodType(handler.function, node), self._fork(handler.name))
            setattr(found, handler.key, bound)
        return found

    def _fork(self, name: str) -> Any:
        def fork(*arguments: Any, **keywords: Any) -> None:
            if self.nodes is None:
                raise UsageError(f"{name}.fork: no instance has made this node: immortal.create_node(...) does")
            getattr(self.nodes.handle_of(self.number), name).fork(*arguments, **keywords)

        return fork


class Node:
    """Base class of nodes: parts of an instance that others call by a handle, with their own handlers and state.

    Its handlers are ``@rpc`` methods; its state is its annotated attributes, saved with its owner's. A handler creates
    it with ``immortal.create_node(Order, ...)``, in an instance whose class lists it: ``class Exchange(Immortal,
    nodes=(Order,))``. ``formerly=("Old",)`` lists older names of the class that older checkpoints contain.
    """

    __slots__ = ("__dict__", "__weakref__", "_immortal_context")

    _immortal_node: ClassVar[NodeDefinition]
    _immortal_context: Any

    def __init_subclass__(cls, *, formerly: Iterable[str] = (), **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls._immortal_node = NodeDefinition(cls, formerly)

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        if cls is Node:
            raise DefinitionError("Node itself can't be made: write a class below it")
        node = super().__new__(cls)
        node._immortal_context = NodeContext(node)
        return node

    @property
    def owner(self) -> Any:
        """Instance that owns the node. Raises UsageError."""
        nodes = self._immortal_context.nodes
        if nodes is None:
            raise UsageError(
                f"{type(self).__qualname__}.owner: no instance has made this node: immortal.create_node(...) does"
            )
        return nodes.instance


# The nodes of an instance, by number: created, saved in checkpoints, and moved to newer classes.


class SavedNode(msgspec.Struct, array_like=True):
    number: int
    class_name: str
    state: bytes


class NodeTable:
    """Table of live nodes. ``owner``: an immortal.appsdk.nodes.nodes.Nodes, to which the nodes belong."""

    def __init__(self, owner: Any) -> None:
        self.definition: Definition | None = None
        self._owner = owner
        self.nodes: dict[int, Node] = {}  # by number

    def use(self, definition: Definition) -> None:
        """Use this class's code from here on. Raises StateError if it does not fit the existing nodes."""
        before, self.definition = self.definition, definition
        if before is not None and before is not definition:
            self.restore(self.save())

    def save(self) -> list[SavedNode]:
        """Return the nodes for a checkpoint. Raises StateError."""
        saved = []
        for number, node in self.nodes.items():
            definition = node_definition(type(node))
            saved.append(SavedNode(number, definition.name, definition.state().encode(node)))
        return saved

    def restore(self, saved: Iterable[SavedNode]) -> None:
        """Replace the nodes by saved ones. Raises StateError."""
        self.nodes = {one.number: self._restored(one) for one in saved}

    def _restored(self, saved: SavedNode) -> Node:
        classes = () if self.definition is None else self.definition.nodes
        for cls in classes:
            definition = node_definition(cls)
            if saved.class_name in (definition.name, *definition.formerly):
                node = self._new(cls, saved.number)
                schema = definition.state()
                schema.restore(node, copied_envelope(saved.class_name, schema.serializer), memoryview(saved.state))
                return node
        name = "?" if self.definition is None else self.definition.name
        known = ", ".join(cls.__qualname__ for cls in classes) or "none"
        raise StateError(
            f"there is a node of the class {saved.class_name!r}, and {name} has {known}: name it in nodes=(...); if it "
            f"was renamed: class New(Node, formerly=({saved.class_name!r},))"
        )

    def create(self, cls: type, number: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Create a node. Raises what its ``__init__`` raises; also then the node exists, but without a handle."""
        node: Any = self._new(cls, number)
        self.nodes[number] = node
        node.__init__(*arguments, **keywords)

    def _new(self, cls: type, number: int) -> Node:
        given: Any = cls
        made: Node = given._immortal_node.state().with_own_defaults(given.__new__(given))
        made._immortal_context = NodeContext(made, self._owner, number)
        return made


# Calls through a handle: ``handle.fill.fork(3)``, ``await handle.fill(3)``, and in multicasts.


class HandleMethod:
    """Handler of a node, called through a handle. ``nodes``: an immortal.appsdk.nodes.nodes.Nodes."""

    __slots__ = ("_handle", "_handler", "_nodes")

    def __init__(self, nodes: Any, handle: Any, handler: Handler[Any, Any]) -> None:
        self._nodes = nodes
        self._handle = handle
        self._handler = handler

    @property
    def _name(self) -> str:
        return self._handler.function.__qualname__

    def fork(self, *arguments: Any, **keywords: Any) -> None:
        nodes, context = self._nodes, self._nodes.context
        bound = bind_arguments(self._name, self._handler.signature, arguments, keywords)
        if threading.get_ident() != context.handling_thread_id:
            raise outside_handler_error(context, self._name)
        task = context.tasks.running
        if task is None or not task.is_silent:
            codec = node_definition(self._handle._immortal_of[2]).codec(self._handler)
            if codec.needs_forms:
                bound, keywords = codec.tag_values(bound), {"": None}
            nodes.send(self._handle, self._handler, bound if keywords else arguments)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        nodes = self._nodes
        task = nodes.context.tasks.running
        if task is None:
            raise UsageError(
                f"{self._name}(...): only async handlers wait for an answer: send the call with "
                f"{self._handler.name}.fork(...), or move it into an 'async def' handler"
            )
        make_call: Callable[..., Any] = nodes.make_call
        return make_call(task, self._handle, self._handler, arguments, keywords)


class Inbox:
    """Receiver of messages for the nodes of one instance. ``nodes``: its immortal.appsdk.nodes.nodes.Nodes."""

    def __init__(self, nodes: Any) -> None:
        self._nodes = nodes
        self._context: Context = nodes.context
        self._accounts: Accounts = nodes.accounts
        self._living: NodeTable = nodes.living
        self.hooks: list[tuple[str, Any]] = []

    def note_verdict(self, message: bytes, verdict: Verdict) -> None:
        """Give back the handles of a message with a verdict, if that means that the message is skipped."""
        if not verdict.skips:
            return
        if method_of(message) == HANDLES_METHOD_ID:
            if verdict.kind is not VerdictKind.REFUSED:  # only a hook has failed, and was undone: the message counts
                self._apply(decode_handle_message(_arguments_of(message)))
                self.hooks.clear()
                self._act()
                self.hooks.clear()
        elif MARK in message:
            self._accounts.return_copies(_arguments_of(message))

    def run_call(self, call: NodeCall | AwaitedNodeCall) -> None:
        """Handle a call of nodes. Raises HandlerError."""
        caller, number = (call.caller, call.number) if isinstance(call, AwaitedNodeCall) else (None, 0)
        self._require_sender(call.sender)
        if caller is not None and caller.startswith(CLIENTS):
            raise self._wrong("clients hold no handles, and call no nodes", Cause.SENDER)
        targets = []
        gone = ""
        for key in call.keys:
            grant = self._accounts.owner.grants.get(key)
            if grant is None and call.sender != self._context.instance_name:
                raise self._wrong(f"{call.sender!r} has no such handle", Cause.SENDER)
            if grant is None or grant.stage == Stage.ENDED:
                gone = "its node was destroyed, or the handle revoked, before the call came in its order"
            elif call.sender in grant.banned:
                gone = f"the handle was revoked for {call.sender!r}"
            else:
                targets.append(self._living.nodes[grant.node])
        arguments = bytes(call.arguments)
        ready = [(node, *self._read(node, call.method_id, arguments)) for node in targets]
        if not ready:
            self._accounts.return_copies(arguments)
            if caller is not None:
                handler: Any = SimpleNamespace(
                    method_id=NODE_METHOD_ID, function=Inbox.run_call, signature=SimpleNamespace(parameters={})
                )
                self._context.tasks.answers.answer(handler, caller, number, True, encode_refused(gone))
            return
        self._accounts.count_incoming(arguments)
        for node, handler, codec, values in ready:
            self._run(node, handler, codec, values, caller, number)
        self._context.tasks.drain()

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
        except BaseException as error:
            if not is_user_failure(error):
                raise
            raise self._wrong(argument_mismatch(codec, error, arguments, 0), Cause.ARGUMENTS) from None

    def _run(
        self,
        node: Node,
        handler: Handler[Any, Any],
        codec: ArgumentCodec,
        values: tuple[Any, ...],
        caller: str | None,
        number: int,
    ) -> None:
        tasks = self._context.tasks
        run = partial(
            tasks.handler_runs.run_handler, handler, values, waits=caller is not None, node=node, caller=caller
        )
        try:
            raised, value = self._context.run_contexts.run(run)
        except HandlerError as error:
            if error.failure is not None:
                error.failure = replace(error.failure, method_id=NODE_METHOD_ID)
            raise
        if caller is not None:
            tasks.answers.answer(handler, caller, number, raised, value)

    def receive_message(self, received: HandleMessage) -> None:
        """Handle a message between owners and holders of handles. Raises HandlerError."""
        self._require_sender(received.sender)
        if not self._apply(received):
            raise self._wrong(f"{received.sender!r} tells of a handle that there is not", Cause.SENDER)
        self._act()
        hooks, self.hooks = self.hooks, []
        for name, handle in hooks:
            self._run_hook(name, handle)

    def _apply(self, received: HandleMessage) -> bool:
        sender, message = received.sender, received.message
        if isinstance(message, Passed):
            return self._accounts.note_passed(message.key, message.to)
        if isinstance(message, Released):
            return self._accounts.owner.note_released(message.key, sender, message.count)
        make: Any = Handle
        if isinstance(message, Stale):
            if sender != self._context.instance_name:
                return False
            self.hooks.append((f"on_{message.how}", make(message.owner, message.key, None, self._nodes)))
        elif isinstance(message, Ending):
            if message.how not in (DESTROYED, REVOKED):
                return False
            if message.owner != self._context.instance_name and not self._accounts.holder.has_entry(
                message.owner, message.key
            ):
                self.hooks.append((f"on_{message.how}", make(message.owner, message.key, None, self._nodes)))
        elif isinstance(message, Forgotten):
            self._accounts.holder.forget(sender, message.key)
        elif sender != self._context.instance_name:
            self._accounts.holder.note_end(sender, message.key, message.how)
            self.hooks.append((f"on_{message.how}", make(sender, message.key, None, self._nodes)))
        else:
            grant = self._accounts.owner.grants.get(message.key)
            if grant is None or grant.stage != Stage.ENDING:
                return False
            if message.how == DESTROYED:
                self._living.nodes.pop(grant.node, None)
            self._accounts.owner.end(message.key, message.how)
        return True

    def _act(self) -> None:
        """Send the messages that the counting of handles has made, and queue the hooks to call."""
        accounts = self._accounts
        accounts.send_actions()
        released, accounts.released = accounts.released, []
        self.hooks += [("on_last_release", self._nodes.make_handle(one.key, one.node)) for one in released]

    def _run_hook(self, name: str, handle: Any) -> None:
        function = hook_of(type(self._nodes.instance), name)
        if function is None:
            return
        hook: Any = SimpleNamespace(
            function=function,
            call=function,
            raises={},
            is_query=False,
            on_error=None,
            method_id=HANDLES_METHOD_ID,
            name=name,
        )
        run = partial(self._context.tasks.handler_runs.run_handler, hook, (handle,), waits=False)
        self._context.run_contexts.run(run)
        self._context.tasks.drain()

    def _require_sender(self, sender: str) -> None:
        """Check that a message names its real sender. Messages to oneself were checked when they came from others."""
        if self._context.source not in ("", sender):
            raise self._wrong(f"{self._context.source!r} speaks for {sender!r}", Cause.SENDER)

    def _wrong(self, text: str, cause: Cause) -> HandlerError:
        return refused(self._context, WHAT, cause, text)


def _arguments_of(message: bytes) -> bytes:
    rpc = rpc_of(message)
    return b"" if rpc is None else bytes(rpc.arguments)
