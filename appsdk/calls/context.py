"""Time and randomness for handlers: the same values at each replay.

The time is the time of the record. A random stream belongs to one call site within one message. It is seeded from the
app's seed (drawn at the first start, kept in the checkpoint), the committer ID, the record, the message's index in it,
and the calling place (:mod:`immortal.appsdk.calls.replay_rules`). So a new call elsewhere shifts no other stream.
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
QUERY_RUNS = 1  # stands for the handlers' thread while a query runs: no thread has this ID, so none can call
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def datetime_of(time_ns: int) -> datetime:
    """Convert ``time_ns`` (since the Unix epoch) to an aware UTC datetime, rounded down to the microsecond."""
    return _EPOCH + timedelta(microseconds=time_ns // 1000)


class Context:
    """State of one instance's life in the SDK: what is being handled, and the deterministic sources.

    The Context of a plain object (a user's ``Counter()``) has the real clock, a random seed and no outbox.
    """

    __slots__ = (
        "_streams",
        "_streams_of",
        "carries_handles",
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
        "present",
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
        self.definition: Any = None  # immortal.appsdk.handlers.proxy sets these: the instance's class as Definition,
        self.handlers: Any = None  # and the values of self.count and self.counter
        self.peers: Any = None
        self.tasks: Any = (
            None  # an immortal.appsdk.waiting.tasks.Tasks, or None: a plain object, or one that an upgrade creates
        )
        self.multicasts: Any = None  # an immortal.appsdk.ordering.multicasts.Multicasts, or None as for tasks
        self.present: Any = None  # an immortal.appsdk.handlers.keys.KeyContext while an object of a key runs
        self.nodes: Any = None  # an immortal.appsdk.nodes.nodes.Nodes, or None as for tasks
        self.reporter: Any = None  # an immortal.appsdk.handlers.log.FailureReporter, or None: failures are not reported
        self.carries_handles = False  # True if a handle was encoded: the message that is sent now can contain it
        self.instance_name = ""  # the caller's name in calls that wait for an answer
        self.sites = CallSites()
        self.run_contexts = RunContexts(self)
        self.thread_id = threading.get_ident()
        self.committer_id = 0
        self.sequence_id = -1
        self.message_index = 0
        self.source: str | None = ""  # sender of the message that is handled; "": this instance itself; None: not known
        self.record_time_ns: int | None = None
        self.slice_end = 0  # offset in the record where the delivery pauses; the outbox sets it to 0 to pause at once
        self.handling_thread_id = 0  # thread that can make calls: the handlers' while one runs, else 0 or QUERY_RUNS
        self._streams: dict[tuple[bytes, bytes], random.Random] = {}
        self._streams_of = (-1, 0)

    def require_handler_thread(self, function_name: str) -> None:
        if threading.get_ident() != self.thread_id:
            raise UsageError(
                f"immortal.{function_name} is for handlers: it is part of what a replay repeats. In a hook or thread "
                f"of your own use Python's modules 'time', 'random', 'uuid', and send what the app is to know as an "
                f"impulse"
            )

    def now_ns(self) -> int:
        """Return the record's time, ns since the Unix epoch; before the first record (``__init__``) the real time."""
        self.require_handler_thread("now()")
        if self.record_time_ns is not None:
            return self.record_time_ns
        if self.handling_thread_id:
            raise UsageError(
                f"record {self.sequence_id} has no time: immortal.now() has no answer that a replay would repeat"
            )
        return time.time_ns()

    def random_at(self, frame: FrameType, method: str | None, purpose: bytes = b"random") -> random.Random:
        """Return the random stream of the calling place ``frame`` for ``method``. Within one message it continues."""
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
        """Return a new random stream for one place in the code at one moment of this instance's life."""
        digest = hashlib.blake2b(key=self.seed, digest_size=32)
        digest.update(moment.encode())
        digest.update(purpose + b"\n" + site)
        return random.Random(int.from_bytes(digest.digest(), "little"))  # noqa: S311 (a replay draws the same)


def is_plain(runs: Any) -> bool:
    """Return True if ``runs``, a value of `user_code.running`, is None or a plain object without a coordinator."""
    return runs is None or (isinstance(runs, Context) and runs.outbox is None and runs.tasks is None)
