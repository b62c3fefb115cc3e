"""Agents of Pydantic AI in ``async def`` handlers: each model request and each tool call is an effect.

    agent = Agent("openai:gpt-5", name="support", capabilities=[ImmortalDurability()])

    class Support(Immortal):
        @rpc
        async def ask(self, question: str) -> str:
            result = await run_agent(self, agent.run(question))
            return result.output

The run goes on after a crash where it was: what has a result in the log is not requested and not called again. The
agent's own code (its graph, output functions, history processors, dynamic instructions) runs in the handler, on its
:mod:`loop <immortal.appsdk.integrations.handler_loop>`, and is repeated by replays: it has to do the same again.
`docs/how-to/integrations.md`.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from immortal.protocol import distribution

try:
    from pydantic_ai import Agent
except ModuleNotFoundError as error:
    raise ImportError(f"agents need Pydantic AI ({error}): {distribution.add_extra('pydantic-ai')}") from None
from pydantic_ai.agent import EventStreamHandler
from pydantic_ai.capabilities import WrapRunHandler
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    DurabilityEngineSpec,
    DurableOperationId,
    JournalCallableOperationBackend,
    RoleBasedOperationConfig,
    conversation_id_from_run_id,
    record_durable_unit,
    replay_scope,
)
from pydantic_ai.messages import ModelMessage, ModelRequest
from pydantic_ai.models import Model, ModelRequestContext
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import AgentDepsT, RunContext

from immortal.appsdk.calls.codec import encode_value
from immortal.appsdk.effects.effect import EffectFunction, Retry, current_context
from immortal.appsdk.errors import UsageError
from immortal.appsdk.functions import effect, now, uuid4
from immortal.appsdk.immortal import Immortal
from immortal.appsdk.integrations.handler_loop import HandlerLoop
from immortal.appsdk.waiting.impulses import Effect
from immortal.protocol import decoding

__all__ = ["ImmortalDurability", "in_handler", "run_agent", "run_step"]

T = TypeVar("T")

Body = Callable[[], Awaitable[object]]
Config = dict[str, Any]
"""Keywords of ``immortal.effect.options``: ``retry`` and ``timeout``."""

TOOL_KEY = "immortal"  # in the metadata of a tool


async def run_agent(handler_self: Immortal, run: Coroutine[Any, Any, T]) -> T:
    """Run an agent in an ``async def`` handler and return the run's result: ``await run_agent(self,
    agent.run(question))``.

    Any coroutine of asyncio can be run so, as long as it reaches the outside world by nothing but agents with
    :class:`ImmortalDurability`. Raises what it raises, EffectFailed where a model request or a tool has failed, and
    UsageError.
    """
    if not isinstance(run, Coroutine):
        raise UsageError(f"run_agent(self, {run!r}): a coroutine was expected, such as agent.run(question)")
    try:
        loop = HandlerLoop(handler_self)  # type: ignore[abstract]  # of asyncio's methods it has what there can be
    except UsageError as error:
        run.close()
        raise UsageError(f"run_agent(self, agent.run(...)): {error}") from None
    return await loop.run(_without_threads(run))


async def in_handler(awaitable: Awaitable[T]) -> T:
    """Await in the handler, from a tool that runs there, what a handler can await: ``await
    in_handler(bank.balance(account))``.

    Such a tool has the metadata ``{"immortal": False}``, and gets the handler's ``self``, or a peer, as its deps. Its
    calls are made exactly once. Raises what the call raises, and UsageError elsewhere.
    """
    loop = _loop()
    if loop is None:
        if isinstance(awaitable, Coroutine):
            awaitable.close()
        raise UsageError(
            "in_handler(...): only code that runs in an async handler can await what a handler awaits: give the tool "
            f"the metadata {{{TOOL_KEY!r}: False}}"
        )
    return await loop.future_of(awaitable)


async def run_step(body: Body) -> object:
    """Function of the effect of each model request and tool call.

    Tests that want these to run (of a TestModel, say) name it as its own stand-in: ``effects={run_step: run_step}``.
    """
    return await body()


class _Step(EffectFunction):
    """Effect of one model request or tool call. The journal has its name; the agent's run supplies the body anew each
    time.
    """

    def __init__(self, name: str, body: Body) -> None:
        self.function = run_step
        self.name = name
        self.is_async = True
        self.decode_result = decoding.decode
        self._body = body

    def encode_arguments(self, arguments: tuple[Any, ...]) -> bytes:
        return encode_value(arguments)  # none: they are in the body

    def arguments(self, encoded: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._body,), {}

    def encode_result(self, value: Any) -> bytes:
        try:
            return encode_value(value)
        except Exception as error:
            raise TypeError(f"{self.name} returned what can't be kept: {error}") from error


class _Backend(JournalCallableOperationBackend[Config]):
    """Backend that turns each durable unit of Pydantic AI into an effect of the handler."""

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Body,
        cache_key: tuple[object, ...],
        config: Config,
    ) -> object:
        loop = _loop()
        if loop is None:  # outside handlers, the capability changes nothing
            return await body()
        context, is_run_here = contextvars.copy_context(), False

        async def perform() -> object:
            nonlocal is_run_here
            is_run_here = True
            own = context.copy()  # with the agent's spans and overrides, on the loop of effects
            own.run(current_context.set, current_context.get())
            return await asyncio.create_task(_with_threads(body), context=own)

        options = effect.options(**config)._options
        payload = await loop.future_of(Effect(loop.handler_task, _Step(name, perform), (), options))
        record_durable_unit(executed=is_run_here)
        return payload


class ImmortalDurability(BaseDurabilityCapability[AgentDepsT]):
    """Capability that makes an agent durable: ``Agent(..., name="...", capabilities=[ImmortalDurability()])``. It
    changes nothing outside handlers.

    ``model_retry``, ``model_timeout``: of each model request, as in ``immortal.effect.options``; ``tool_retry``,
    ``tool_timeout``: of each tool call. For one tool, the metadata ``{"immortal": {"retry": ..., "timeout": ...}}``;
    ``{"immortal": False}`` lets it run in the handler, and be repeated by replays: see :func:`in_handler`.
    ``models``: those besides the agent's own that runs name. ``event_stream_handler``: gets a request's events while it
    streams, beside the handlers; for an attempt that a crash has ended, again. ``name``: in the journal, by default the
    agent's. Raises UsageError.
    """

    engine_spec = DurabilityEngineSpec(
        engine_name="Immortal",
        durable_unit_noun="effect",
        durable_container_noun="async handler",
        codec=JSON_CODEC,
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        toolset_lifecycles={
            "function": "enter-outside-durable",
            "mcp": "enter-outside-durable",
            "dynamic": "enter-never",
        },
        tool_config_key=TOOL_KEY,
    )

    def __init__(
        self,
        *,
        model_retry: Retry | None = None,
        model_timeout: timedelta | None = None,
        tool_retry: Retry | None = None,
        tool_timeout: timedelta | None = None,
        models: Mapping[str, Model] | None = None,
        event_stream_handler: EventStreamHandler[AgentDepsT] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(models=models, event_stream_handler=event_stream_handler, name=name)
        self._model_config = _checked({"retry": model_retry, "timeout": model_timeout})
        self._tool_config = _checked({"retry": tool_retry, "timeout": tool_timeout})

    @property
    def in_durable_context(self) -> bool:
        return _loop() is not None

    def get_durable_operation_backend(self) -> _Backend:
        return _Backend(
            agent_name=self.name,
            default_model_id=self.default_model_id,
            config=RoleBasedOperationConfig(
                model=self._model_config,
                event=self._tool_config,
                capability=self._tool_config,
                tool=self._tool_config,
                resolve_tool=self._resolve_tool,
            ),
        )

    def _resolve_tool(self, operation_id: DurableOperationId, tool: Any, name: str) -> Any:
        return self._build_resolve_tool_config(self._tool_config)(tool, name)

    def _normalize_unit_config(self, config: Any) -> Any:
        return _checked(config)

    def _durable_run_context(self, ctx: RunContext[AgentDepsT]) -> RunContext[AgentDepsT]:
        """Return a context with a usage of its own: what an effect adds to the run's would be missing in a replay."""
        return replace(super()._durable_run_context(ctx), usage=copy.deepcopy(ctx.usage))

    def get_default_run_id(self) -> str | None:
        loop = _loop()
        return None if loop is None else str(uuid4())

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return conversation_id_from_run_id(run_id) if self.in_durable_context else None

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        loop = _loop()
        return None if loop is None else now()

    async def wrap_run(self, ctx: RunContext[AgentDepsT], *, handler: WrapRunHandler) -> AgentRunResult[Any]:
        loop = _loop()
        if loop is None:
            return await handler()
        if ctx.deadline is not None:
            raise UsageError(
                "agent.run(..., timeout=...) goes by the machine's clock, which differs at each replay: race the run "
                "against a timer: await immortal.race(run_agent(self, agent.run(...)), immortal.sleep(...))"
            )
        with replay_scope():
            result = await super().wrap_run(ctx, handler=handler)
        _stamp(result.new_messages(), loop)
        return result

    async def before_model_request(
        self, ctx: RunContext[AgentDepsT], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        if (loop := _loop()) is not None:
            _stamp(request_context.messages[-1:], loop)
        return await super().before_model_request(ctx, request_context)


def _loop() -> HandlerLoop | None:
    """Return the loop of the handler whose code runs; None elsewhere, as in an effect."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop if isinstance(loop, HandlerLoop) else None


def _checked(config: Mapping[str, Any]) -> Config:
    """Return the options of steps without those that are None. Raises UsageError."""
    if unknown := sorted(config.keys() - {"retry", "timeout"}):
        names = ", ".join(map(repr, unknown))
        raise UsageError(f"{names} of an agent's steps: only 'retry' and 'timeout' can be given")
    given = {name: value for name, value in config.items() if value is not None}
    effect.options(**given)
    return given


def _stamp(messages: list[ModelMessage], loop: HandlerLoop) -> None:
    """Set the times that the agent's own code took from the machine's clock to the handler's, equal at each replay."""
    moment = now()
    for message in messages:
        if isinstance(message, ModelRequest) and id(message) not in loop.stamped:
            loop.stamped[id(message)] = message
            message.timestamp = moment
            for part in message.parts:
                if hasattr(part, "timestamp"):
                    part.timestamp = moment


class _Here(Executor):
    """Executor that runs sync functions of the agent at once, where its loop runs them."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        raise UsageError("the executor of an async handler runs on its loop alone")


async def _without_threads(run: Awaitable[T]) -> T:
    with Agent.using_thread_executor(_Here()):
        return await run


async def _with_threads(body: Body) -> object:
    with Agent.using_thread_executor(None):  # type: ignore[arg-type]  # the library's own again
        return await body()
