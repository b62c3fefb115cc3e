"""Ports of a driver: interfaces to the app, the peers, the log, the clock and the host; and plain ports for tests.

A method that takes an effect (core/effects.py) must do what that effect says. In service the ports use sockets, files
and threads; in the simulation, simulated ones.

A plain port works in memory and does as little as its interface allows; a test or the simulation overrides the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import DamagedLogError, LogError, LogUnavailableError
from immortal.coordinator.core.events import Event
from immortal.coordinator.core.interfaces import CheckpointHeader, LogStore
from immortal.protocol.checksum import crc64
from immortal.protocol.verdicts import MessageKey

Offered = ef.OfferChunk | ef.OfferCheckpoint


class AppPort(Protocol):
    """Connection with one app at a time. The app's messages go into the driver's inbox."""

    def send(self, effect: ef.SendToApp, /) -> None:
        """Send to the connected app, in order; drop the data if no app is connected, or its connection is closing."""

    def close_app(self, effect: ef.CloseApp, /) -> None: ...

    def pause(self, effect: ef.PauseApp, /) -> None: ...

    def resume(self, effect: ef.ResumeApp, /) -> None: ...

    def flush(self) -> Sequence[Event]:
        """Send what the app's socket takes now; return its events, except those of :meth:`pop_sent_events`."""

    def pop_sent_events(self) -> Sequence[Event]:
        """Return how much the app has taken since the last call; it can wait for the next event."""


class PeerPort(Protocol):
    """Port to other instances and clients. Their frames go into the driver's inbox."""

    def open(self, effect: ef.OpenPeer, /) -> None: ...

    def send(self, effect: ef.SendToPeer, /) -> None:
        """Send at least once, in any order, until it is answered; nothing leaves before :meth:`flush`."""

    def reset(self, effect: ef.ResetPeer, /) -> None: ...

    def reply(self, effect: ef.ReplyToPeer, /) -> None: ...

    def reply_to_client(self, effect: ef.ReplyToClient, /) -> None: ...

    def begin_turn(self) -> None:
        """Begin a turn, which ends with :meth:`flush`."""

    @property
    def has_new(self) -> bool:
        """True if frames wait for :meth:`flush`."""

    def flush(self, *, patient: bool) -> None:
        """Send all waiting frames. ``patient``: answers can wait unread until there is other work."""

    @property
    def replies_wait(self) -> bool:
        """True if answers may have arrived that were left unread."""

    def receive(self) -> None:
        """Put arrived replies into the inbox."""


class LogPort(Protocol):
    """Port to the log. An event in the inbox answers each request, at once or later: writes in their order.

    After a temporary LogFailed it is unknown whether the write was done. Later requests up to a ReadTail are not
    answered; they are not done, unless they were in flight with that write and it was done. The ReadTail is answered
    with the end of the log; after it the writes are sent again.
    """

    def acquire(self, effect: ef.AcquireWriteLease, /) -> None: ...

    def submit(self, request: ef.Write | ef.Read, /) -> None:
        """Send a request to the log. Raises nothing: LogFailed answers a failure."""

    def trim(self, effect: ef.Trim, /) -> None: ...

    def request_standby_checkpoint(self, effect: ef.RequestStandbyCheckpoint, /) -> None: ...

    def cancel_standby_request(self, effect: ef.CancelStandbyRequest, /) -> None: ...

    def offer(self, effect: Offered, /) -> None:
        """Write a follower's chunk to the writer's log. Each chunk is answered, even if the log is unreachable."""

    @property
    def has_inline(self) -> bool:
        """True if work waits for :meth:`run_inline`."""

    def run_inline(self) -> None:
        """Do work that is too small for a thread."""


class ClockPort(Protocol):
    """Port to the instance's time; see core/clock.py."""

    def now_ns(self) -> int:
        """Return the time, ns since the Unix epoch."""

    def pop_events(self) -> Sequence[Event]:
        """Return the clock events that the machine must handle before the time of :meth:`now_ns`."""

    def wake_at(self, effect: ef.WakeAt, /) -> None: ...


class HostPort(Protocol):
    """Process that runs the coordinator: carries operators' requests in, and answers and notices out."""

    def peer_reset_done(self, effect: ef.PeerResetDone, /) -> None: ...

    def operator_answered(self, effect: ef.OperatorAnswered, /) -> None: ...

    def upgrade_ended(self, effect: ef.UpgradeEnded, /) -> None: ...

    def report(self, effect: ef.Report, /) -> None: ...

    def stop(self, effect: ef.Stop, /) -> None: ...


def answer(store: LogStore, request: ef.StoreRead) -> ev.Event:
    """Read what ``request`` asks for from ``store``; return the event that answers it, LogFailed if that fails."""
    try:
        match request:
            case ef.LoadLog(with_clients):
                return ev.LogLoaded(store.summary(), store.clients() if with_clients else None)
            case ef.CheckCheckpoint(header):
                return ev.CheckpointChecked(header.checkpoint_id, checkpoint_problem(store, header))
            case ef.ReadCheckpointChunk(checkpoint_id, index):
                return ev.CheckpointChunkRead(store.read_checkpoint_chunk(checkpoint_id, index))
            case ef.ReadRecords(first_sequence_id, size_bytes_max, session):
                return ev.RecordsRead(store.read(first_sequence_id, size_bytes_max), None, session)
            case ef.ReadSpilled(destination, first, last, size_bytes_max):
                batches = store.read_spilled(destination, first, last, size_bytes_max)
                return ev.SpilledRead(destination, first, batches)
            case ef.ReadLetters(keys):
                return _letters(store, keys)
    except LogError as error:
        return failed(error, request)


def failed(error: LogError, request: ef.Write | ef.Read | None) -> ev.LogFailed:
    """Return the event that tells the machine that the log could not carry out ``request``."""
    return ev.LogFailed(error, isinstance(error, LogUnavailableError), request)


class ChunkReader(Protocol):
    """Log whose checkpoints can be read."""

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes: ...


def checkpoint_problem(
    store: ChunkReader, header: CheckpointHeader, is_cancelled: Callable[[], bool] = lambda: False
) -> str | None:
    """Check the checkpoint of ``header``; return what is wrong with it, or None if every byte of its blob is right.

    Also read its outputs while the log is open: the caller may need them after the log is closed. ``is_cancelled``:
    called before each chunk; True if nobody needs the answer any more. Raises LogUnavailableError.
    """
    size_bytes = check = index = 0
    while size_bytes < header.size_bytes:
        if is_cancelled():
            return "nobody waited until it was read"
        try:
            chunk = store.read_checkpoint_chunk(header.checkpoint_id, index)
        except LogUnavailableError:
            raise  # the checkpoint may still be right
        except LogError as error:
            return str(error)
        if not chunk:
            return f"it has {size_bytes} bytes, {header.size_bytes} were written"
        size_bytes += len(chunk)
        check = crc64(chunk, check)
        index += 1
    if size_bytes != header.size_bytes or check != header.check:
        return f"its check is {check:016x} over {size_bytes} bytes, {header.check:016x} was written"
    try:
        len(header.unacknowledged)
    except LogUnavailableError:
        raise
    except LogError as error:
        return str(error)
    return None


def _letters(store: LogStore, keys: Sequence[MessageKey]) -> ev.LettersRead:
    letters, problems = [], []
    for key in keys:
        try:
            letter = store.letter(key)
        except DamagedLogError as error:
            problems.append(str(error))
        else:
            if letter is not None:
                letters.append(letter)
    return ev.LettersRead(letters, problems)


def ignore(self: object, /, *effect: Any, **options: Any) -> None:
    """Do nothing: the body of the methods that a plain port does not need."""


class PlainApp:
    """App port without an app."""

    send = close_app = pause = resume = ignore

    def flush(self) -> Sequence[ev.Event]:
        return ()

    def pop_sent_events(self) -> Sequence[ev.Event]:
        return ()


class PlainPeers:
    """Peer port without a network: frames go nowhere, and answers never wait."""

    has_new = replies_wait = False
    open = send = reset = reply = reply_to_client = begin_turn = flush = receive = ignore


class PlainLog:
    """Log port over ``store``, which has no other writer. Writes wait for :meth:`work`; reads are answered at once,
    into ``inbox``."""

    has_inline = False
    trim = request_standby_checkpoint = cancel_standby_request = offer = run_inline = ignore

    def __init__(self, store: LogStore, inbox: list[ev.Event]) -> None:
        self.store = store
        self.inbox = inbox
        self.jobs: deque[ef.Write] = deque()
        self._ticket = 0  # ticket of the last commit that was done

    def acquire(self, effect: ef.AcquireWriteLease) -> None:
        self.inbox.append(ev.WriteLeaseGranted(1))

    def submit(self, request: ef.Write | ef.Read) -> None:
        if isinstance(request, ef.Commit | ef.WriteCheckpointChunk):
            self.jobs.append(request)
        else:
            self.inbox.append(self.answer(request))

    def answer(self, request: ef.Read) -> ev.Event:
        if isinstance(request, ef.ReadTail):
            return ev.TailRead(self._ticket, self.store.summary().last_sequence_id)
        return answer(self.store, request)

    def work(self) -> ev.Event:
        """Do the oldest waiting write; return its answer."""
        job = self.jobs.popleft()
        if isinstance(job, ef.Commit):
            self.store.commit(job.transaction)
            self._ticket = job.ticket
            return ev.Committed(job.ticket)
        self.store.write_checkpoint_chunk(job.checkpoint_id, job.index, job.data)
        return ev.ChunkWritten(len(job.data))


class ManualClock:
    """Clock that stays at ``time_ns`` (ns since the Unix epoch) until it is set, and never sends a Tick."""

    wake_at = ignore

    def __init__(self, time_ns: int) -> None:
        self.time_ns = time_ns

    def now_ns(self) -> int:
        return self.time_ns

    def pop_events(self) -> Sequence[ev.Event]:
        return ()


class PlainHost:
    """Host port that ignores everything."""

    peer_reset_done = operator_answered = upgrade_ended = report = stop = ignore
