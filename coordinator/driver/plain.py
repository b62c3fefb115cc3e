"""Plain ports for worlds in memory: each does the least that its duty allows, and is overridden where a world needs
more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.interfaces import LogStore
from immortal.coordinator.driver.ports import Offered, Read, Write, answer


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
