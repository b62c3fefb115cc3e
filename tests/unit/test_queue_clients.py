"""What a client of a queue asks for, in plain code and with asyncio: the same submission."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from immortal.appsdk.client.errors import CallTimeout
from immortal.appsdk.client.session import Call
from immortal.appsdk.patterns.queue.clients import AsyncJob, AsyncJobs, Job, Jobs
from immortal.appsdk.patterns.queue.model import NotDone, Outcome, Submission

ASKED: dict[str, Any] = {
    "key": "ada",
    "priority": 3,
    "delay": timedelta(minutes=1),
    "dedup": "once",
    "tries": 7,
    "timeout": 11.0,
    "retry_delay": 2.5,
}
SUBMITTED = Submission("resize", msgspec.msgpack.encode(["cat.png", 64]), "ada", 3, 60.0, "once", 7, 11.0, 2.5)


class Queue:
    """Takes submissions, as the queue's own instance does."""

    def __init__(self) -> None:
        self.submitted: list[Submission] = []

    def submit(self, made: Submission) -> int:
        self.submitted.append(made)
        return 12


class AsyncQueue(Queue):
    async def submit(self, made: Submission) -> int:  # type: ignore[override]
        return super().submit(made)


def test_all_that_is_asked_for_is_submitted() -> None:
    queue = Queue()
    job = Jobs(queue).submit("resize", ["cat.png", 64], **ASKED)  # type: ignore[arg-type]
    assert (job.id, queue.submitted) == (12, [SUBMITTED])


def test_with_asyncio_it_is_the_same() -> None:
    queue = AsyncQueue()
    job = asyncio.run(AsyncJobs(queue).submit("resize", ["cat.png", 64], **ASKED))  # type: ignore[arg-type]
    assert (job.id, queue.submitted) == (12, [SUBMITTED])


@pytest.mark.parametrize("arguments", ["cat.png", b"cat.png", 64])
def test_arguments_are_a_list(arguments: Any) -> None:
    queue = Queue()
    with pytest.raises(TypeError, match="a list was expected"):
        Jobs(queue).submit("resize", arguments)  # type: ignore[arg-type]
    assert queue.submitted == []


def test_an_option_that_there_is_not() -> None:
    with pytest.raises(TypeError, match="no option delay_s, retries of a submission; there are key, priority, delay"):
        Jobs(Queue()).submit("resize", [], delay_s=1, retries=2)  # type: ignore[arg-type,call-overload]


class AwayOnce:
    """A queue whose first reply is late: it was away for a while."""

    def __init__(self) -> None:
        self.asked = 0

    def wait(self, task: int, seconds: float) -> Outcome:
        self.asked += 1
        if self.asked == 1:
            raise CallTimeout("no reply", Call(0, b"", lambda call: None), None)
        return Outcome("done", result=msgspec.msgpack.encode(9))


class AsyncAwayOnce(AwayOnce):
    async def wait(self, task: int, seconds: float) -> Outcome:  # type: ignore[override]
        return super().wait(task, seconds)


def test_a_result_is_waited_for_as_long_as_is_said_also_if_the_queue_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("immortal.appsdk.patterns.queue.clients.with_timeout", lambda queue, timeout: queue)
    assert Job(AwayOnce(), 1, int).result(60) == 9
    assert asyncio.run(AsyncJob(AsyncAwayOnce(), 1, int).result(60)) == 9
    with pytest.raises(NotDone, match="task 1 has no result after 0 s: no reply"):
        Job(AwayOnce(), 1, int).result(0)
