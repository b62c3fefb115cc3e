"""Durable agents of Pydantic AI in ``async def`` handlers: each model request and each tool call is an effect.

    agent = Agent("openai:gpt-5", name="support", capabilities=[ImmortalDurability()])

    class Support(Immortal):
        @rpc
        async def ask(self, question: str) -> str:
            result = await agent.run(question)
            return result.output

After a crash the run continues: a request or call with a result in the log is not repeated. The agent's own code (its
graph, output functions, history processors, dynamic instructions) runs in the handler, on its asyncio loop. Replays
repeat this code, so it must be deterministic.
`docs/how-to/integrations.md`.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections.abc import Awaitable, Callable, Mapping
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
from pydantic_ai.exceptions import FallbackExceptionGroup, UnexpectedModelBehavior, UserError
from pydantic_ai.messages import ModelMessage, ModelRequest
from pydantic_ai.models import Model, ModelRequestContext
from pydantic_ai.run import AgentRunResult
from pydantic_ai.tools import AgentDepsT, RunContext

from immortal.appsdk.calls.codec import encode_value
from immortal.appsdk.effects.effect import PROGRAM_ERRORS, EffectFunction, Retry, current_context
from immortal.appsdk.errors import UsageError
from immortal.appsdk.functions import effect, now, uuid4
from immortal.appsdk.waiting.impulses import Effect
from immortal.appsdk.waiting.loop import InlineExecutor
from immortal.appsdk.waiting.task import Task
from immortal.protocol import decoding

__all__ = ["ImmortalDurability", "run_step"]

T = TypeVar("T")

Body = Callable[[], Awaitable[object]]
Config = dict[str, Any]
"""Keywords of ``immortal.effect.options``: ``retry`` and ``timeout``."""

TOOL_KEY = "immortal"  # key in a tool's metadata
RETRY = Retry(not_on=(*PROGRAM_ERRORS, UserError, UnexpectedModelBehavior, FallbackExceptionGroup))
"""Retry policy of a step that has none of its own. Errors of the library and the program are not retried."""


async def run_step(body: Body) -> object:
    """Run one model request or tool call: the function of its effect.

    Tests in which steps must run (with a TestModel, say) name it as its own stand-in: ``effects={run_step: run_step}``.
    """
    return await body()


class _Step(EffectFunction):
    """Effect of one model request or tool call. The journal has its name; the agent's run supplies the body each
    time.
    """

    def __init__(self, name: str, body: Body) -> None:
        self.function = run_step
        self.name = name
        self.is_async = True
        self.decode_result = decoding.decode
        self._body = body

    def encode_arguments(self, arguments: tuple[Any, ...]) -> bytes:
        return encode_value(arguments)  # no arguments: the body has them

    def arguments(self, encoded: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._body,), {}

    def describe(self, encoded: bytes) -> str:
        return f"{self.name}()"

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
        handler = _running_handler()
        if handler is None:  # outside handlers, the capability changes nothing
            return await body()
        context, is_run_here = contextvars.copy_context(), False

        async def perform() -> object:
            nonlocal is_run_here
            is_run_here = True
            own = context.copy()  # with the agent's spans and overrides, for the loop of effects
            own.run(current_context.set, current_context.get())
            return await asyncio.create_task(_with_default_threads(body), context=own)

        options = effect.options(**{"retry": RETRY, **config})._options
        payload = await Effect(handler, _Step(name, perform), (), options)
        record_durable_unit(executed=is_run_here)
        return payload


class ImmortalDurability(BaseDurabilityCapability[AgentDepsT]):
    """Capability that makes an agent durable: ``Agent(..., name="...", capabilities=[ImmortalDurability()])``. It
    changes nothing outside handlers.

    ``model_retry``, ``model_timeout``: for each model request, as in ``immortal.effect.options``; ``tool_retry``,
    ``tool_timeout``: for each tool call. By default they are retried without end, like effects. One tool's
    metadata can be ``{"immortal": {"retry": ..., "timeout": ...}}``. With ``{"immortal": False}`` the tool runs in the
    handler, and replays repeat it: it can await what a handler awaits, and use the handler's ``self`` or a peer as its
    deps. ``models``: further models, by the name that runs give. ``event_stream_handler``: gets a request's events
    during streaming, beside the handlers; again if a crash ended the attempt. ``name``: in the journal, by default the
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
        return _running_handler() is not None

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
        """Return a context with its own usage: a replay would lack what an effect adds to the run's usage."""
        return replace(super()._durable_run_context(ctx), usage=copy.deepcopy(ctx.usage))

    def get_default_run_id(self) -> str | None:
        return str(uuid4()) if self.in_durable_context else None

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return conversation_id_from_run_id(run_id) if self.in_durable_context else None

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        return now() if self.in_durable_context else None

    async def wrap_run(self, ctx: RunContext[AgentDepsT], *, handler: WrapRunHandler) -> AgentRunResult[Any]:
        if not self.in_durable_context:
            return await handler()
        if ctx.deadline is not None:
            raise UsageError(
                "agent.run(..., timeout=...) goes by the machine's clock, which differs at each replay: use a "
                "timer of the handler: async with asyncio.timeout(300): await agent.run(...)"
            )
        token = _stamped.set({})
        with replay_scope(), Agent.using_thread_executor(InlineExecutor()):
            result = await super().wrap_run(ctx, handler=handler)
        _stamp(result.new_messages())
        _stamped.reset(token)
        return result

    async def before_model_request(
        self, ctx: RunContext[AgentDepsT], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        if self.in_durable_context:
            _stamp(request_context.messages[-1:])
        return await super().before_model_request(ctx, request_context)


_stamped: contextvars.ContextVar[dict[int, object]] = contextvars.ContextVar("messages that have the handler's time")


def _running_handler() -> Task | None:
    """Return the async handler whose code runs now; None outside of handlers, for example in an effect."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    return loop if isinstance(loop, Task) else None


def _checked(config: Mapping[str, Any]) -> Config:
    """Return the options of steps without those that are None. Raises UsageError."""
    if unknown := sorted(config.keys() - {"retry", "timeout"}):
        names = ", ".join(map(repr, unknown))
        raise UsageError(f"{names} of an agent's steps: only 'retry' and 'timeout' can be given")
    given = {name: value for name, value in config.items() if value is not None}
    effect.options(**given)
    return given


def _stamp(messages: list[ModelMessage]) -> None:
    """Replace times from the machine's clock in the agent's messages by the handler's, equal at each replay."""
    moment, stamped = now(), _stamped.get()
    for message in messages:
        if isinstance(message, ModelRequest) and id(message) not in stamped:
            stamped[id(message)] = message
            message.timestamp = moment
            for part in message.parts:
                if hasattr(part, "timestamp"):
                    part.timestamp = moment


async def _with_default_threads(body: Body) -> object:
    with Agent.using_thread_executor(None):  # type: ignore[arg-type]  # the library's default again
        return await body()
