"""Ports of a driver, and plain ones for worlds in memory.

Ports of a driver: the app, the peers, the log, the clock, and the host that runs the coordinator.

Each method that takes an effect (core/effects.py) has that effect's duty. In service, sockets, files and threads are
behind these ports; in the simulation, simulated ones.

Plain ports for worlds in memory: each does the least that its duty allows, and is overridden where a world needs
more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import DamagedLogError, LogError, LogUnavailableError
from immortal.coordinator.core.events import Event
from immortal.coordinator.core.interfaces import CheckpointHeader, LogStore
from immortal.protocol.checksum import crc64
from immortal.protocol.verdicts import MessageKey

Write = ef.Commit | ef.WriteCheckpointChunk

Offered = ef.OfferChunk | ef.OfferCheckpoint

StoreRead = ef.LoadLog | ef.CheckCheckpoint | ef.ReadCheckpointChunk | ef.ReadRecords | ef.ReadSpilled | ef.ReadLetters

"""Questions that an open log answers by itself."""

Read = StoreRead | ef.ReadTail


class AppPort(Protocol):
    """Connection with one app at a time. Its messages go into the driver's inbox."""

    def send(self, effect: ef.SendToApp, /) -> None:
        """Send to the connected app, behind everything sent before; drop it where there is none, or it is closing."""

    def close_app(self, effect: ef.CloseApp, /) -> None: ...

    def pause(self, effect: ef.PauseApp, /) -> None: ...

    def resume(self, effect: ef.ResumeApp, /) -> None: ...

    def flush(self) -> Sequence[Event]:
        """Hand over what was sent, as far as it is taken now; what has come of it, but for :meth:`take_sent`."""

    def take_sent(self) -> Sequence[Event]:
        """Return how much the app has taken since the last call; comes with the next event if nobody waits for it."""


class PeerPort(Protocol):
    """Port to other instances and clients. What comes from them goes into the driver's inbox."""

    def open(self, effect: ef.OpenPeer, /) -> None: ...

    def send(self, effect: ef.SendToPeer, /) -> None:
        """Send at least once, in any order, until it is answered; nothing goes out before :meth:`flush`."""

    def reset(self, effect: ef.ResetPeer, /) -> None: ...

    def reply(self, effect: ef.ReplyToPeer, /) -> None: ...

    def reply_to_client(self, effect: ef.ReplyToClient, /) -> None: ...

    def hold(self) -> None:
        """Begin a turn that ends in :meth:`flush`."""

    @property
    def has_new(self) -> bool:
        """True if frames wait for :meth:`flush`."""

    def flush(self, *, patient: bool) -> None:
        """Send all there is. ``patient``: answers may stay where they are until something else is to be done."""

    @property
    def replies_wait(self) -> bool:
        """True if answers may have come that nobody was in a hurry for."""

    def receive(self) -> None:
        """Put replies that have come into the inbox."""


class LogPort(Protocol):
    """The log. Each request is answered by an event in the inbox, at once or later: writes in their order.

    A write that is answered by a LogFailed that may pass may have been done or not. What was submitted behind it, up to
    a ReadTail, is not answered; it is not done unless it was under way with it and that one was done. The ReadTail is
    answered with where the log ends, and from there on things are written again.
    """

    def acquire(self, effect: ef.AcquireWriteLease, /) -> None: ...

    def submit(self, request: Write | Read, /) -> None:
        """Hand a request to the log. Raises nothing: a failure is answered by LogFailed."""

    def trim(self, effect: ef.Trim, /) -> None: ...

    def request_standby_checkpoint(self, effect: ef.AskStandby, /) -> None: ...

    def cancel_standby_request(self, effect: ef.DropAsked, /) -> None: ...

    def offer(self, effect: Offered, /) -> None:
        """Write a follower's chunk to another's log, which may not be reached: chunks are answered all the same."""

    @property
    def has_inline(self) -> bool:
        """True if work waits for :meth:`run_inline`."""

    def run_inline(self) -> None:
        """Do now what is too small for a thread."""


class ClockPort(Protocol):
    """The instance's time; see core/clock.py."""

    def now_ns(self) -> int:
        """Return the time, ns since the Unix epoch."""

    def take_events(self) -> Sequence[Event]:
        """Return what :meth:`now_ns` has found out and the machine must handle before that time."""

    def wake_at(self, effect: ef.WakeAt, /) -> None: ...


class HostPort(Protocol):
    """Process that runs the coordinator: carries operators' requests in, and answers and notices out."""

    def peer_reset_done(self, effect: ef.PeerResetDone, /) -> None: ...

    def operator_answered(self, effect: ef.OperatorAnswered, /) -> None: ...

    def upgrade_ended(self, effect: ef.UpgradeEnded, /) -> None: ...

    def report(self, effect: ef.Report, /) -> None: ...

    def stop(self, effect: ef.Stop, /) -> None: ...


# Reading a log for its machine.


def answer(store: LogStore, asked: StoreRead) -> ev.Event:
    """Return what ``store`` has for its writer's request ``asked``; LogFailed where it can't be read."""
    try:
        match asked:
            case ef.LoadLog(with_clients):
                return ev.LogLoaded(store.summary(), store.clients() if with_clients else None)
            case ef.CheckCheckpoint(header):
                return ev.CheckpointChecked(header.checkpoint_id, problem_of(store, header))
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
        return failed(error, asked)


def failed(error: LogError, asked: ev.Asked | None) -> ev.LogFailed:
    """Return the answer of a log that could not do what it was asked for."""
    return ev.LogFailed(error, isinstance(error, LogUnavailableError), asked)


class Chunks(Protocol):
    """A log whose checkpoints can be read."""

    def read_checkpoint_chunk(self, checkpoint_id: int, index: int) -> bytes: ...


def problem_of(store: Chunks, header: CheckpointHeader, is_given_up: Callable[[], bool] = lambda: False) -> str | None:
    """Check ``header``'s checkpoint; return what is wrong with it, or None if every byte of its blob is right.

    Its outputs are read as well: by now they can be, and who restores it may not have this log open any more.
    ``is_given_up``: asked before each chunk; true if nobody wants the answer any more. Raises LogUnavailableError.
    """
    size_bytes = check = index = 0
    while size_bytes < header.size_bytes:
        if is_given_up():
            return "nobody waited until it was read"
        try:
            chunk = store.read_checkpoint_chunk(header.checkpoint_id, index)
        except LogUnavailableError:
            raise  # that says nothing of the checkpoint
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


class PlainApp:
    """App port with no app behind it."""

    def send(self, effect: ef.SendToApp) -> None:
        pass

    def close_app(self, effect: ef.CloseApp) -> None:
        pass

    def pause(self, effect: ef.PauseApp) -> None:
        pass

    def resume(self, effect: ef.ResumeApp) -> None:
        pass

    def flush(self) -> Sequence[ev.Event]:
        return ()

    def take_sent(self) -> Sequence[ev.Event]:
        return ()


class PlainPeers:
    """Peer port without a network: frames go nowhere, and answers never wait."""

    has_new = False
    replies_wait = False

    def open(self, effect: ef.OpenPeer) -> None:
        pass

    def send(self, effect: ef.SendToPeer) -> None:
        pass

    def reset(self, effect: ef.ResetPeer) -> None:
        pass

    def reply(self, effect: ef.ReplyToPeer) -> None:
        pass

    def reply_to_client(self, effect: ef.ReplyToClient) -> None:
        pass

    def hold(self) -> None:
        pass

    def flush(self, *, patient: bool) -> None:
        pass

    def receive(self) -> None:
        pass


class PlainLog:
    """Log over ``store``, which nobody else writes. Writes wait for :meth:`work`; reads are answered at once, into
    ``inbox``."""

    has_inline = False

    def __init__(self, store: LogStore, inbox: list[ev.Event]) -> None:
        self.store = store
        self.inbox = inbox
        self.jobs: deque[Write] = deque()
        self._ticket = 0  # of the last append that was done

    def acquire(self, effect: ef.AcquireWriteLease) -> None:
        self.inbox.append(ev.WriteLeaseGranted(1))

    def submit(self, request: Write | Read) -> None:
        if isinstance(request, ef.Commit | ef.WriteCheckpointChunk):
            self.jobs.append(request)
        else:
            self.inbox.append(self.answer(request))

    def answer(self, request: Read) -> ev.Event:
        if isinstance(request, ef.ReadTail):
            return ev.TailRead(self._ticket, self.store.summary().last_sequence_id)
        return answer(self.store, request)

    def work(self) -> ev.Event:
        """Do the write that has waited longest; its answer."""
        job = self.jobs.popleft()
        if isinstance(job, ef.Commit):
            self.store.commit(job.transaction)
            self._ticket = job.ticket
            return ev.Committed(job.ticket)
        self.store.write_checkpoint_chunk(job.checkpoint_id, job.index, job.data)
        return ev.ChunkWritten(len(job.data))

    def trim(self, effect: ef.Trim) -> None:
        pass

    def request_standby_checkpoint(self, effect: ef.AskStandby) -> None:
        pass

    def cancel_standby_request(self, effect: ef.DropAsked) -> None:
        pass

    def offer(self, effect: Offered) -> None:
        pass

    def run_inline(self) -> None:
        pass


class SetClock:
    """Clock that stands at ``time_ns`` (ns since the Unix epoch) until that is set, and wakes nobody."""

    def __init__(self, time_ns: int) -> None:
        self.time_ns = time_ns

    def now_ns(self) -> int:
        return self.time_ns

    def take_events(self) -> Sequence[ev.Event]:
        return ()

    def wake_at(self, effect: ef.WakeAt) -> None:
        pass


class PlainHost:
    """Host port that ignores everything."""

    def peer_reset_done(self, effect: ef.PeerResetDone) -> None:
        pass

    def operator_answered(self, effect: ef.OperatorAnswered) -> None:
        pass

    def upgrade_ended(self, effect: ef.UpgradeEnded) -> None:
        pass

    def report(self, effect: ef.Report) -> None:
        pass

    def stop(self, effect: ef.Stop) -> None:
        pass
