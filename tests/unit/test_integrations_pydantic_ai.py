"""Agents in async handlers, with models of the library's own for tests: what is logged is made once, and replays agree.

Each environment compares its logs with a replay of them as it is closed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest
from pydantic_ai import Agent, AgentStreamEvent, ModelRetry, RunContext
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    PartDeltaEvent,
    TextPart,
    ToolCallPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.toolsets import DynamicToolset, FunctionToolset

import immortal
from immortal import EffectFailed, Immortal, Retry, effect_context, peer, rpc
from immortal.appsdk.state.journal import JournalError
from immortal.appsdk.waiting.loop import HandlerLoop
from immortal.errors import UsageError
from immortal.integrations.pydantic_ai import ImmortalDurability, run_step
from immortal.testing import Environment, crash_everywhere
from tests.helpers.effort import effort

RUNS = {run_step: run_step}
MADE: Counter[str] = Counter()
"""The requests and calls that were made, in this process."""


@pytest.fixture(autouse=True)
def _nothing_made() -> None:
    MADE.clear()


class Bank(Immortal):
    asked: int

    def __init__(self) -> None:
        self.asked = 0

    @rpc
    def balance(self) -> int:
        self.asked += 1
        return 42


# --- an agent with tools of all kinds ---------------------------------------------------------------------------------


def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    MADE[f"request behind {len(messages)}"] += 1
    if len(messages) == 1:
        calls = [
            ("weather", {"city": "Rome"}),
            ("weather", {"city": "Oslo"}),
            ("balance", {}),
            ("wait", {"minutes": 5}),
        ]
        return ModelResponse(parts=[ToolCallPart(name, arguments) for name, arguments in calls])
    if len(messages) == 3:
        return ModelResponse(parts=[TextPart("rude")])
    return ModelResponse(parts=[TextPart("it rains, and you have 42")])


agent = Agent(FunctionModel(answer), name="helper", deps_type=Any, capabilities=[ImmortalDurability()])


@agent.tool_plain
def weather(city: str) -> str:
    MADE[f"weather in {city}"] += 1
    return "rain"


@agent.tool(metadata={"immortal": False})
async def balance(ctx: RunContext[Any]) -> int:
    return await ctx.deps.bank.balance()


@agent.tool_plain(metadata={"immortal": False})
async def wait(minutes: int) -> str:
    await asyncio.sleep(60 * minutes)
    return "waited"


@agent.output_validator
def polite(text: str) -> str:
    if text == "rude":
        raise ModelRetry("be polite")
    return text


class Helper(Immortal):
    bank = peer(Bank, "bank")
    history: bytes

    def __init__(self) -> None:
        self.history = b""

    @rpc
    async def ask(self, question: str) -> str:
        before = ModelMessagesTypeAdapter.validate_json(await immortal.step(self.messages) or "[]")
        result = await agent.run(question, deps=self, message_history=before)
        await immortal.step(self.keep, result.all_messages_json())
        return result.output

    @rpc
    def messages(self) -> bytes:
        return self.history

    @rpc
    def keep(self, messages: bytes) -> None:
        self.history = messages


STEPS = {"request behind 1", "request behind 3", "request behind 5", "weather in Rome", "weather in Oslo"}


def test_each_step_is_made_once_and_what_was_logged_is_there_after_crashes_anywhere() -> None:
    histories, repeats = set(), set()
    for env in crash_everywhere(runs_max=effort(20)):
        MADE.clear()
        with env:
            bank = env.start(Bank, "bank")
            helper = env.start(Helper, "helper", effects=RUNS)
            assert helper.call(Helper.ask, "is it nice?") == "it rains, and you have 42"
            assert MADE.keys() == STEPS
            assert bank.state.asked == 1
            made = ModelMessagesTypeAdapter.validate_json(helper.state.history)
            histories.add(str([[part.part_kind for part in message.parts] for message in made]))
            assert {message.run_id for message in made} == {made[0].run_id}
            if not env.crash:
                assert set(MADE.values()) == {1}
            repeats.add(tuple(sorted(name for name, count in MADE.items() if count > 1)))
            assert max(MADE.values()) <= 2
    assert len(histories) == 1
    # What has been asked for and is not in the log is asked for again: never a step together with an earlier one's.
    assert {len({name.partition(" ")[0] for name in names}) for names in repeats} <= {0, 1}


def test_a_checkpoint_in_the_middle_has_the_run_in_its_journal(immortal_env: Environment) -> None:
    bank = immortal_env.start(Bank, "bank")
    helper = immortal_env.start(Helper, "helper", effects=RUNS)
    pending = helper.begin(Helper.ask, "is it nice?")
    immortal_env.run()  # up to the tool that waits 5 minutes
    helper.checkpoint()
    helper.crash()
    helper.recover()
    immortal_env.advance(minutes=5)
    assert pending.result() == "it rains, and you have 42"
    assert MADE.keys() == STEPS
    assert set(MADE.values()) == {1}
    assert bank.state.asked == 1


def test_a_history_in_the_state_goes_on_with_the_handlers_times(immortal_env: Environment) -> None:
    immortal_env.start(Bank, "bank")
    helper = immortal_env.start(Helper, "helper", effects=RUNS)
    helper.call(Helper.ask, "is it nice?")
    first = ModelMessagesTypeAdapter.validate_json(helper.state.history)
    immortal_env.advance(hours=1)
    assert helper.call(Helper.ask, "and now?") == "it rains, and you have 42"
    both = ModelMessagesTypeAdapter.validate_json(helper.state.history)
    assert both[: len(first)] == first
    asked = both[len(first)]
    assert isinstance(asked, ModelRequest)
    assert asked.timestamp == asked.parts[0].timestamp == immortal_env.now  # type: ignore[union-attr]


# --- what a handler does with a run -----------------------------------------------------------------------------------


programs: list[Callable[[Any], Coroutine[Any, Any, str]]] = []


class Runner(Immortal):
    said: list[str]

    def __init__(self) -> None:
        self.said = []

    @rpc
    def say(self, text: str) -> None:
        self.said.append(text)

    @rpc
    async def go(self) -> None:
        try:
            await immortal.step(self.say, await programs[-1](self))
        except (EffectFailed, UsageError, RuntimeError) as error:
            await immortal.step(self.say, f"{type(error).__name__}: {error}")


def said(env: Environment, program: Callable[[Any], Coroutine[Any, Any, str]]) -> str:
    """What it returned, or raised: in service, and in the recovery from a crash behind it."""
    programs.append(program)
    runner = env.start(Runner, "runner", effects=RUNS)
    runner.send(Runner.go)
    env.run()
    env.advance(minutes=10)
    (text,) = runner.state.said
    runner.crash()
    runner.recover()
    assert runner.state.said == [text]
    return text


def agent_of(model: Callable[[list[ModelMessage], AgentInfo], Any], **options: Any) -> Agent[None, str]:
    return Agent(FunctionModel(model), name="one", capabilities=[ImmortalDurability(**options)])


def broken(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    MADE["request"] += 1
    raise ConnectionError("no route")


def nonsense(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    MADE["request"] += 1
    if MADE["request"] < 4:
        raise ConnectionError("no route")
    raise UnexpectedModelBehavior("nonsense")


def test_a_request_that_fails_is_an_effect_that_has_failed(immortal_env: Environment) -> None:
    """It is tried again, as effects are, until it fails with what comes again."""

    async def program(self: Any) -> str:
        return (await agent_of(nonsense).run("hello")).output

    text = said(immortal_env, program)
    assert text == (
        "EffectFailed: the effect one__model.request failed after 4 attempts: UnexpectedModelBehavior: nonsense"
    )
    assert MADE == {"request": 4}


def test_a_request_is_tried_as_often_as_is_said(immortal_env: Environment) -> None:
    made = agent_of(broken, model_retry=Retry(attempts=3), model_timeout=timedelta(seconds=10))

    async def program(self: Any) -> str:
        return (await made.run("hello")).output

    assert "after 3 attempts: ConnectionError" in said(immortal_env, program)
    assert MADE == {"request": 3}


def test_a_run_that_has_lost_a_race_is_given_up(immortal_env: Environment) -> None:
    ended: list[str] = []

    async def slow(ctx: RunContext[None]) -> str:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("slow")
        return "done"

    made = Agent(TestModel(), name="one", capabilities=[ImmortalDurability()])
    made.tool(metadata={"immortal": False})(slow)

    async def program(self: Any) -> str:
        winner = await immortal.race(made.run("hello"), immortal.sleep(timedelta(minutes=1)))
        return f"won: {winner.index}"

    assert said(immortal_env, program) == "won: 1"
    assert set(ended) == {"slow"}


def test_a_tool_that_is_given_up_takes_no_event_from_others(immortal_env: Environment) -> None:
    made = Agent(TestModel(), name="one", deps_type=Any, capabilities=[ImmortalDurability()])

    @made.tool(metadata={"immortal": False})
    async def approved(ctx: RunContext[Any]) -> str:
        return await immortal.event("approved", str)

    async def program(self: Any) -> str:
        await immortal.race(made.run("hello", deps=self), immortal.sleep(timedelta(minutes=1)))
        immortal.signal("approved", "yes")
        return str(await immortal.event("approved", str))

    assert said(immortal_env, program) == "yes"


def test_a_delay_that_is_cancelled_is_no_timer_any_more(immortal_env: Environment) -> None:
    async def program(self: Any) -> str:
        await asyncio.wait_for(asyncio.sleep(1), 3600)
        await immortal.event("never")
        return ""

    programs.append(program)
    runner = immortal_env.start(Runner, "runner")
    runner.send(Runner.go)
    immortal_env.advance(minutes=1)
    tasks = runner._app().dispatcher.tasks.save()
    assert tasks is not None
    assert [pending.what for pending in tasks.tasks[0].pending] == ["event never"]


def test_a_tool_knows_its_effect(immortal_env: Environment) -> None:
    made = Agent(TestModel(), name="one", capabilities=[ImmortalDurability()])

    @made.tool_plain
    def pay() -> str:
        MADE[effect_context().key] += 1
        return "paid"

    async def program(self: Any) -> str:
        return (await made.run("hello")).output

    assert said(immortal_env, program) == '{"pay":"paid"}'
    assert [len(key) for key in MADE] == [36]


def test_a_runs_timeout_is_refused_with_the_way_out(immortal_env: Environment) -> None:
    async def program(self: Any) -> str:
        made = Agent(TestModel(), name="one", capabilities=[ImmortalDurability()])
        return (await made.run("hello", timeout=5)).output

    assert "async with asyncio.timeout(300)" in said(immortal_env, program)


def test_sync_functions_of_the_agent_run_in_the_handlers_thread(immortal_env: Environment) -> None:
    made = Agent(TestModel(call_tools=[]), name="one", capabilities=[ImmortalDurability()])

    @made.instructions
    def instructions() -> str:
        MADE["instructions"] += 1
        return "be nice"

    async def program(self: Any) -> str:
        return str((await made.run("hello")).all_messages()[0].instructions)  # type: ignore[union-attr]

    assert said(immortal_env, program) == "be nice"
    assert MADE["instructions"] > 0


def test_a_tool_of_an_effect_that_asks_for_the_handler_is_told_how(immortal_env: Environment) -> None:
    made = Agent(TestModel(), name="one", deps_type=Any, capabilities=[ImmortalDurability()])

    @made.tool
    async def ask(ctx: RunContext[Any]) -> int:
        return int(await immortal.step(ctx.deps.say, "x"))

    async def program(self: Any) -> str:
        try:
            return (await made.run("hello", deps=self)).output
        except EffectFailed as error:
            return error.message

    assert "step say is awaited outside of Runner.go" in said(immortal_env, program)


def test_what_is_in_the_metadata_of_a_tool_is_checked(immortal_env: Environment) -> None:
    made = Agent(TestModel(), name="one", capabilities=[ImmortalDurability()])

    @made.tool_plain(metadata={"immortal": {"retries": 5}})
    async def ask() -> int:
        return 5

    async def program(self: Any) -> str:
        return (await made.run("hello")).output

    expected = "UsageError: 'retries' of an agent's steps: only 'retry' and 'timeout' can be given"
    assert said(immortal_env, program) == expected


def test_events_go_to_a_handler_beside_the_app(immortal_env: Environment) -> None:
    texts: list[str] = []

    async def note(ctx: RunContext[None], events: AsyncIterable[AgentStreamEvent]) -> None:
        async for event in events:
            if isinstance(event, PartDeltaEvent):
                texts.append(str(getattr(event.delta, "content_delta", "")))

    capability = ImmortalDurability[None](event_stream_handler=note)
    made = Agent(TestModel(custom_output_text="one two three"), name="one", capabilities=[capability])

    async def program(self: Any) -> str:
        return (await made.run("hello")).output

    assert said(immortal_env, program) == "one two three"
    assert "".join(texts).endswith("three")
    assert texts == list(dict.fromkeys(texts))  # a replay tells nobody again


def test_a_stream_in_a_handler_gives_what_the_log_has(immortal_env: Environment) -> None:
    made = Agent(TestModel(custom_output_text="one two three"), name="one", capabilities=[ImmortalDurability()])

    async def program(self: Any) -> str:
        async def stream() -> str:
            async with made.run_stream("hello") as result:
                return "|".join([text async for text in result.stream_text(debounce_by=None)])

        return await stream()

    assert said(immortal_env, program).endswith("one two three")


def test_a_dynamic_toolset_is_resolved_in_effects(immortal_env: Environment) -> None:
    def toolset(ctx: RunContext[None]) -> FunctionToolset[None]:
        def add(number: int) -> int:
            MADE["add"] += 1
            return number + 1

        return FunctionToolset([add])

    made = Agent(
        TestModel(), name="one", capabilities=[ImmortalDurability()], toolsets=[DynamicToolset(toolset, id="numbers")]
    )

    async def program(self: Any) -> str:
        return (await made.run("hello")).output

    assert said(immortal_env, program) == '{"add":1}'
    assert MADE == {"add": 1}


def test_what_a_tool_adds_to_the_usage_does_not_count(immortal_env: Environment) -> None:
    """It would be missing in a replay."""
    made = Agent(TestModel(), name="one", capabilities=[ImmortalDurability()])

    @made.tool
    async def ask(ctx: RunContext[None]) -> str:
        return (await Agent(TestModel(custom_output_text="x")).run("hello", usage=ctx.usage)).output

    async def program(self: Any) -> str:
        return str((await made.run("hello")).usage.requests)

    assert said(immortal_env, program) == "2"


def test_a_prompt_may_change_while_a_run_waits(immortal_env: Environment) -> None:
    seen: list[str] = []
    prompts = ["be nice"]

    def note(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append(str(info.instructions))
        if len(seen) == 1:
            return ModelResponse(parts=[ToolCallPart("wait", {})])
        return ModelResponse(parts=[TextPart("done")])

    made = agent_of(note)
    made.instructions(lambda: prompts[-1])

    @made.tool_plain(metadata={"immortal": False})
    async def wait() -> None:
        await asyncio.sleep(60)

    async def program(self: Any) -> str:
        return (await made.run("hello")).output

    programs.append(program)
    runner = immortal_env.start(Runner, "runner", effects=RUNS)
    runner.send(Runner.go)
    immortal_env.run()
    runner.checkpoint()
    runner.crash()
    prompts.append("be very nice")
    runner.recover()
    immortal_env.advance(minutes=1)
    assert runner.state.said == ["done"]
    assert seen == ["be nice", "be very nice"]


def test_a_run_that_would_make_other_steps_does_not_come_back(immortal_env: Environment) -> None:
    """As any handler whose journal does not fit."""
    names = ["one"]

    async def program(self: Any) -> str:
        capability = ImmortalDurability[None](name=names[-1])
        waits = Agent(TestModel(), name="one", capabilities=[capability])

        @waits.tool_plain(metadata={"immortal": False})
        async def wait() -> None:
            await asyncio.sleep(60)

        return (await waits.run("hello")).output

    programs.append(program)
    runner = immortal_env.start(Runner, "runner", effects=RUNS)
    runner.send(Runner.go)
    immortal_env.run()
    runner.checkpoint()
    runner.crash()
    names.append("other")
    with pytest.raises(JournalError, match=r"expected effect one__model.request .*, got effect other__model.request"):
        runner.recover()
    names.pop()
    runner.recover()  # with the code that it waits in
    immortal_env.advance(minutes=1)
    assert runner.state.said == ['{"wait":null}']


def test_outside_handlers_the_agent_is_one_as_ever() -> None:
    made = Agent(TestModel(custom_output_text="hello"), name="one", capabilities=[ImmortalDurability()])
    assert asyncio.run(made.run("hello")).output == "hello"


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asks", "expected"),
    [
        (lambda: asyncio.open_connection("127.0.0.1", 9), "asks for create_connection, and a handler does not reach"),
        (lambda: asyncio.to_thread(len, "abc"), "asks for run_in_executor"),
        (lambda: asyncio.wait_for(asyncio.sleep(3600, "late"), 60), "TimeoutError"),
        (lambda: asyncio.gather(asyncio.sleep(60, "a"), asyncio.sleep(30, "b")), "['a', 'b']"),
    ],
)
def test_asyncio_in_a_handler(asks: Callable[[], Any], expected: str, immortal_env: Environment) -> None:
    async def program(self: Any) -> str:
        async def ask() -> str:
            try:
                return str(await asks())
            except (UsageError, TimeoutError) as error:
                return f"{type(error).__name__} {error}"

        return await ask()

    assert expected in said(immortal_env, program)


def test_what_no_log_would_wake_ends_the_handler(immortal_env: Environment) -> None:
    async def program(self: Any) -> str:
        return str(await asyncio.Event().wait())

    programs.append(program)
    runner = immortal_env.start(Runner, "runner")
    with pytest.raises(UsageError, match="wait for each other, and for nothing"):
        runner.call(Runner.go)


def test_no_other_thread_reaches_the_loop(immortal_env: Environment) -> None:
    async def program(self: Any) -> str:
        async def ask() -> str:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, HandlerLoop)
            try:
                loop.call_soon_threadsafe(print)
            except NotImplementedError as error:
                return str(error)
            return "none"

        return await ask()

    assert "the log alone wakes a handler" in said(immortal_env, program)
