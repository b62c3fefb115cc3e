"""An agent that plans trips: it looks for flights and hotels, books, and asks its model in between.

immortal register airline --peer 'tcp://127.0.0.1:*'
immortal register travel --peer 'tcp://127.0.0.1:*'
immortal run airline trips:Airline --restart
immortal run travel trips:Travel --restart
immortal call travel plan "Lisbon"

The model answers by rule, so it needs no network. With TRIPS_STEPS=FILE each request and each call of a tool that runs
outside the handlers adds a line to the file: its effect's key, and its text.
"""

from __future__ import annotations

import os
import time
from typing import Any

from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

import immortal
from immortal import Immortal, effect_context, peer, query, rpc
from immortal.integrations.pydantic_ai import ImmortalDurability

STEP_S = 0.1  # a real model takes time


def note(step: str) -> None:
    """Append a step to the file in one write, so that lines of several threads and processes do not mix."""
    time.sleep(STEP_S)
    if path := os.environ.get("TRIPS_STEPS"):
        with open(path, "a") as steps:
            steps.write(f"{effect_context().key} {step}\n")


class Airline(Immortal):
    bookings: dict[str, list[int]]  # by city: the prices; more than one means that a trip was booked twice

    def __init__(self) -> None:
        self.bookings = {}

    @rpc
    def book(self, city: str, euros: int) -> int:
        self.bookings.setdefault(city, []).append(euros)
        return sum(map(len, self.bookings.values()))

    @query
    def booked(self) -> dict[str, list[int]]:
        return self.bookings


def by_rule(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Answer in place of a model: look for flight and hotel, book the flight, and sum up."""
    city = str(messages[0].parts[0].content)  # type: ignore[union-attr]
    found = {
        part.tool_name: part.content
        for message in messages
        for part in message.parts
        if isinstance(part, ToolReturnPart)
    }
    note(f"model {city} {len(found)}")
    if not found:
        return ModelResponse(parts=[ToolCallPart("flight", {"city": city}), ToolCallPart("hotel", {"city": city})])
    if "book" not in found:
        return ModelResponse(parts=[ToolCallPart("book", {"city": city, "euros": found["flight"]})])
    return ModelResponse(parts=[TextPart(f"{city}: a flight for {found['flight']} euros, {found['hotel']}")])


agent = Agent(FunctionModel(by_rule), name="trips", deps_type=Any, capabilities=[ImmortalDurability()])


@agent.tool_plain
def flight(city: str) -> int:
    """Return the price of a flight."""
    note(f"flight {city}")
    return 50 + 10 * len(city)


@agent.tool_plain
def hotel(city: str) -> str:
    """Return the name of a hotel in the city."""
    note(f"hotel {city}")
    return f"Hotel {city} Central"


@agent.tool(metadata={"immortal": False})
async def book(ctx: RunContext[Any], city: str, euros: int) -> int:
    """Book the flight. This runs in the handler, so the airline is called exactly once."""
    bookings: int = await ctx.deps.airline.book(city, euros)
    return bookings


class Travel(Immortal):
    airline = peer(Airline, "airline")
    histories: dict[str, bytes]  # by city: the messages of its run

    def __init__(self) -> None:
        self.histories = {}

    @rpc
    async def plan(self, city: str) -> str:
        result = await agent.run(city, deps=self)
        await immortal.step(self.keep, city, result.all_messages_json())
        return result.output

    @rpc
    def keep(self, city: str, messages: bytes) -> None:
        self.histories[city] = messages

    @query
    def history(self, city: str) -> bytes:
        return self.histories[city]
