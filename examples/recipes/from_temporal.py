"""Migration of a Temporal workflow: a subscription that is charged each month until it is cancelled.

Workflow and worker become one class, activities become effects, and there is no cluster. What Temporal says is in the
comments. Determinism is asked for as there; sleeps, signals, queries and continue-as-new have the same meaning.

immortal dev from_temporal.py
immortal call subscriptions run ann 1 --start --key ann       # Client.start_workflow(..., id="ann")
immortal call subscriptions months ann --query
immortal call subscriptions cancel ann
"""

import asyncio
import json
import urllib.request
from datetime import timedelta

import immortal
from immortal import Immortal, Retry, effect_context, query, rpc

BANK = "http://localhost:8099/charges"


def charge(customer: str, month: int) -> None:  # @activity.defn
    body = json.dumps({"customer": customer, "month": month}).encode()
    headers = {"Idempotency-Key": effect_context().key}  # made by hand in Temporal: workflow ID, activity ID
    urllib.request.urlopen(urllib.request.Request(BANK, body, headers), timeout=10).close()


class Subscriptions(Immortal):  # @workflow.defn, for all customers
    charged: dict[str, int]

    def __init__(self) -> None:
        self.charged = {}

    @rpc
    async def run(self, customer: str, month: int) -> str:  # @workflow.run
        immortal.label(customer=customer)  # a search attribute
        patient = immortal.effect.options(retry=Retry(attempts=10), timeout=timedelta(seconds=30))
        await patient(charge, customer, month)  # workflow.execute_activity(charge, retry_policy=...)
        await immortal.step(lambda: self.charged.update({customer: month}))
        try:  # workflow.wait_condition(lambda: self.cancelled, timeout=timedelta(days=30))
            await asyncio.wait_for(immortal.event(f"cancel {customer}"), timeout=30 * 86400)
        except TimeoutError:
            return immortal.continue_as(customer, month + 1)  # workflow.continue_as_new(...)
        return f"cancelled after {month} months"

    @rpc
    def cancel(self, customer: str) -> None:  # @workflow.signal
        immortal.signal(f"cancel {customer}")

    @query
    def months(self, customer: str) -> int:  # @workflow.query
        return self.charged.get(customer, 0)
