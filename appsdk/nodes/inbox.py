"""Input for nodes: their calls, and messages between owners and holders of handles."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from immortal.appsdk.calls.codec import ArgumentCodec
from immortal.appsdk.calls.context import Context
from immortal.appsdk.calls.failures import argument_mismatch, encode_refused, method_of, refused, rpc_of
from immortal.appsdk.calls.user_code import is_user_failure
from immortal.appsdk.errors import HandlerError
from immortal.appsdk.handlers.decorators import Handler
from immortal.appsdk.nodes.accounts import WHAT, Accounts
from immortal.appsdk.nodes.node import Node, NodeTable, node_definition
from immortal.appsdk.nodes.reference_counts import (
    DESTROYED,
    REVOKED,
    AwaitedNodeCall,
    Ending,
    Forgotten,
    NodeCall,
    Passed,
    Released,
    Stage,
    Stale,
    Word,
    decode_word,
)
from immortal.appsdk.state.schema import hook_of
from immortal.appsdk.types.handles import MARK, Handle
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.system_methods import HANDLES_METHOD_ID, NODE_METHOD_ID
from immortal.protocol.verdicts import Cause, Verdict, VerdictKind


class Inbox:
    """Inbox of one instance. ``life``: its immortal.appsdk.nodes.nodes.Nodes."""

    def __init__(self, life: Any) -> None:
        self._life = life
        self._context: Context = life.context
        self._accounts: Accounts = life.accounts
        self._living: NodeTable = life.living
        self._hooks: list[tuple[str, Any]] = []

    def forget_hooks(self) -> None:
        """Forget hooks that belong to a state which no longer exists."""
        self._hooks.clear()

    def failed(self, message: bytes, verdict: Verdict) -> None:
        """Give back what a message with a verdict brought, if the verdict means that the message is skipped."""
        if not verdict.skips:
            return
        if method_of(message) == HANDLES_METHOD_ID:
            if verdict.kind is not VerdictKind.REFUSED:  # only a hook has failed
                self._failed_hook(message)
        elif MARK in message:
            self._accounts.not_taken(_arguments_of(message))

    def called(self, call: NodeCall | AwaitedNodeCall) -> None:
        """Raises HandlerError."""
        caller, number = (call.caller, call.number) if isinstance(call, AwaitedNodeCall) else (None, 0)
        self._require_speaker(call.sender)
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
                targets.append(self._living[grant.node])
        arguments = bytes(call.arguments)
        ready = [(node, *self._read(node, call.method_id, arguments)) for node in targets]
        if not ready:
            self._accounts.not_taken(arguments)
            if caller is not None:
                self._answer_gone(caller, number, gone)
            return
        self._accounts.arrived(arguments)
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

    def _answer_gone(self, caller: str, number: int, text: str) -> None:
        handler: Any = SimpleNamespace(
            method_id=NODE_METHOD_ID, function=Inbox.called, signature=SimpleNamespace(parameters={})
        )
        self._context.tasks.answers.answer(handler, caller, number, True, encode_refused(text))

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
        """Take what a message says although its hook has failed, and the state is as before it."""
        self._take(decode_word(_arguments_of(message)))
        self._hooks.clear()
        self._act()
        self._hooks.clear()

    def _take(self, word: Word) -> bool:
        sender, message = word.sender, word.message
        if isinstance(message, Passed):
            return self._accounts.passed(message.key, message.to)
        if isinstance(message, Released):
            return self._accounts.owner.released(message.key, sender, message.count)
        make: Any = Handle
        if isinstance(message, Stale):
            if sender != self._context.instance_name:
                return False
            self._hooks.append((f"on_{message.how}", make(message.owner, message.key, None, self._life)))
        elif isinstance(message, Ending):
            if message.how not in (DESTROYED, REVOKED):
                return False
            if message.owner != self._context.instance_name and not self._accounts.holder.knows(
                message.owner, message.key
            ):
                self._hooks.append((f"on_{message.how}", make(message.owner, message.key, None, self._life)))
        elif isinstance(message, Forgotten):
            self._accounts.holder.forgotten(sender, message.key)
        elif sender != self._context.instance_name:
            self._accounts.holder.ended(sender, message.key, message.how)
            self._hooks.append((f"on_{message.how}", make(sender, message.key, None, self._life)))
        else:
            grant = self._accounts.owner.grants.get(message.key)
            if grant is None or grant.stage != Stage.ENDING:
                return False
            if message.how == DESTROYED:
                self._living.remove(grant.node)
            self._accounts.owner.end(message.key, message.how)
        return True

    def _act(self) -> None:
        """Send what the counting asks for, and add the hooks that are to be called."""
        accounts = self._accounts
        accounts.act()
        released, accounts.released = accounts.released, []
        self._hooks += [("on_last_release", self._life.handle(one.key, one.node)) for one in released]

    def _run_hook(self, name: str, handle: Any) -> None:
        function = hook_of(type(self._life.instance), name)
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

    def _require_speaker(self, sender: str) -> None:
        """Check that a message speaks for its sender. Messages to oneself were checked as they came from others."""
        if self._context.source not in ("", sender):
            raise self._wrong(f"{self._context.source!r} speaks for {sender!r}", Cause.SENDER)

    def _wrong(self, text: str, cause: Cause) -> HandlerError:
        return refused(self._context, WHAT, cause, text)


def _arguments_of(message: bytes) -> bytes:
    rpc = rpc_of(message)
    return b"" if rpc is None else bytes(rpc.arguments)
