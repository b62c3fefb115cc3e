"""Time and randomness for handlers: the same values at each replay.

The time is that of the record. A random stream belongs to one call site within one message: it is seeded from the
app's seed (drawn at the first start, kept in the checkpoint), the committer ID, the record, the message's index in it,
and the place that draws (:mod:`immortal.appsdk.calls.replay_rules`). So a new call elsewhere shifts no other stream.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Any

from immortal.appsdk.calls.replay_rules import CallSites
from immortal.appsdk.calls.user_code import RunContexts
from immortal.appsdk.errors import AS_RPC, QueryError, UsageError

SEED_SIZE_BYTES = 16
QUERY_RUNS = 1  # in place of the handlers' thread while a query runs: no thread has this ID, so no calls are made
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def datetime_of(time_ns: int) -> datetime:
    """Convert ``time_ns`` (since the Unix epoch) to an aware UTC datetime, rounded down to the microsecond."""
    return _EPOCH + timedelta(microseconds=time_ns // 1000)


class Context:
    """Life of one instance within the SDK: what is being handled, and the deterministic sources.

    One that no run has attached to (a user's plain ``Counter()``) has the real clock, a random seed and no outbox.
    """

    __slots__ = (
        "_streams",
        "_streams_of",
        "carries",
        "committer_id",
        "definition",
        "handlers",
        "handling_thread_id",
        "instance_name",
        "message_index",
        "multicasts",
        "nodes",
        "outbox",
        "peers",
        "record_time_ns",
        "reporter",
        "run_contexts",
        "seed",
        "sequence_id",
        "sites",
        "slice_end",
        "source",
        "tasks",
        "thread_id",
    )

    def __init__(self, seed: bytes, outbox: Any = None) -> None:
        self.seed = seed
        self.outbox = outbox  # an immortal.appsdk.calls.outbox.Outbox, or None: no calls
        self.definition: Any = (
            None  # immortal.appsdk.handlers.proxy fills in these: the instance's class as Definition,
        )
        self.handlers: Any = None  # and what self.count and self.counter lead to
        self.peers: Any = None
        self.tasks: Any = (
            None  # an immortal.appsdk.waiting.tasks.Tasks, or None: a plain object, or one that an upgrade makes
        )
        self.multicasts: Any = None  # an immortal.appsdk.ordering.multicasts.Multicasts, or None as for tasks
        self.nodes: Any = None  # an immortal.appsdk.nodes.nodes.Nodes, or None as for tasks
        self.reporter: Any = None  # an immortal.appsdk.handlers.log.FailureReporter, or None: nobody is told
        self.carries = False  # a handle was encoded: what is sent now may hold it
        self.instance_name = ""  # what a call that waits for an answer gives as its caller
        self.sites = CallSites()
        self.run_contexts = RunContexts(self)
        self.thread_id = threading.get_ident()
        self.committer_id = 0
        self.sequence_id = -1
        self.message_index = 0
        self.source: str | None = ""  # who sent what is handled; "": the instance's own side; None: it is not known
        self.record_time_ns: int | None = None
        self.slice_end = 0  # where in the record the delivery pauses; the outbox sets it to 0 to pause it at once
        self.handling_thread_id = 0  # of the handlers' thread while a handler runs, else 0 or QUERY_RUNS: who may call
        self._streams: dict[tuple[bytes, bytes], random.Random] = {}
        self._streams_of = (-1, 0)

    def require_handler_thread(self, what: str) -> None:
        if threading.get_ident() != self.thread_id:
            raise UsageError(
                f"immortal.{what} is for handlers: it is part of what a replay repeats. In a hook or thread of your "
                f"own use Python's modules 'time', 'random', 'uuid', and send what the app is to know as an impulse"
            )

    def now_ns(self) -> int:
        """Return the time, ns since the Unix epoch: the record's; before the first one (``__init__``) the real one."""
        self.require_handler_thread("now()")
        if self.record_time_ns is not None:
            return self.record_time_ns
        if self.handling_thread_id:
            raise UsageError(
                f"record {self.sequence_id} has no time: immortal.now() has no answer that a replay would repeat"
            )
        return time.time_ns()

    def random_at(self, frame: FrameType, method: str | None, purpose: bytes = b"random") -> random.Random:
        """Return the stream of the place that ``frame`` is at, for draws by ``method``. In one message it continues."""
        self.require_handler_thread(purpose.decode())
        if self.handling_thread_id == QUERY_RUNS:
            raise QueryError(f"immortal.{purpose.decode()}: a query only reads, and draws nothing: {AS_RPC}")
        moment = (self.sequence_id, self.message_index)
        if self._streams_of != moment:
            self._streams_of = moment
            self._streams.clear()
        key = (purpose, self.sites.site(frame, method))
        stream = self._streams.get(key)
        if stream is None:
            text = f"{self.committer_id} {self.sequence_id} {self.message_index} "
            stream = self._streams[key] = self.make_stream(text, *key)
        return stream

    def make_stream(self, moment: str, purpose: bytes, site: bytes) -> random.Random:
        """Make the stream of one place in the code at one moment of this instance's life."""
        digest = hashlib.blake2b(key=self.seed, digest_size=32)
        digest.update(moment.encode())
        digest.update(purpose + b"\n" + site)
        return random.Random(int.from_bytes(digest.digest(), "little"))  # noqa: S311 (a replay draws the same)


def is_plain(runs: Any) -> bool:
    """Return True if ``runs``, a value of `user_code.running`, is None or a plain object without a coordinator."""
    return runs is None or (isinstance(runs, Context) and runs.outbox is None and runs.tasks is None)
