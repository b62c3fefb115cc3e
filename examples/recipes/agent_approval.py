"""LLM agent with a human in the loop: it uses tools, and a person allows what costs money.

Use it where a model acts. The model's requests and the tool `price` are effects: they are made again only where no
result is in the log. The tool `buy` runs in the handler: it waits for a person's yes, days if need be, and then pays
exactly once. MODEL=openai:gpt-5, say, names a model; without it Pydantic AI's test model calls each tool once.

immortal dev agent_approval.py
immortal call helper ask 17 "get me a book" --start
immortal call helper decide 17 true
immortal executions helper
"""

import os
from typing import Any

from pydantic_ai import Agent, RunContext

import immortal
from immortal import Immortal, rpc
from immortal.integrations.pydantic_ai import ImmortalDurability

agent = Agent(os.environ.get("MODEL", "test"), name="helper", deps_type=Any, capabilities=[ImmortalDurability()])


@agent.tool_plain
def price(item: str) -> int:
    """Return the price of the item in cents."""
    return 100 * len(item)


@agent.tool(metadata={"immortal": False})
async def buy(ctx: RunContext[Any], item: str) -> str:
    """Buy the item, if a person allows it."""
    helper, task = ctx.deps
    if not await immortal.event(f"decision {task}", bool):
        return f"{item}: refused"
    return f"{item}: bought, {await immortal.step(helper.pay, price(item))} cents are left"


class Helper(Immortal):
    cents: int

    def __init__(self) -> None:
        self.cents = 10_000

    @rpc
    async def ask(self, task: int, question: str) -> str:
        return (await agent.run(question, deps=(self, task))).output

    @rpc
    def decide(self, task: int, allowed: bool) -> None:
        immortal.signal(f"decision {task}", allowed)

    def pay(self, cents: int) -> int:
        self.cents -= cents
        return self.cents
