"""Driver: the only interpreter of a machine's effects; it sets the order of the work in a turn.

A turn gives the machine all events that have arrived, and carries out its effects. First the app gets its record: it is
idle without one. Replies to peers come later, since a peer is seldom idle without them. Small commits follow when all
else is under way, and their results are handled in the same turn. Work that can wait comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core.events import Event, Started
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.driver.ports import AppPort, ClockPort, HostPort, LogPort, PeerPort

Action = Callable[[Any], None]
Observer = Callable[[ef.Effect], None]


class Driver:
    """Drives ``machine`` through its ports.

    ``inbox``: events in their order of arrival; any port can append to it, also during a turn. ``observer``: gets each
    effect before it is carried out; an exception that it raises ends the turn there, as a crash would.
    """

    def __init__(
        self,
        machine: Machine,
        inbox: list[Event],
        app: AppPort,
        peers: PeerPort,
        log: LogPort,
        clock: ClockPort,
        host: HostPort,
        observer: Observer | None = None,
    ) -> None:
        self.machine = machine
        self.inbox = inbox
        self._app, self._peers, self._log, self._clock = app, peers, log, clock
        self._actions: dict[type, Action] = {
            ef.SendToApp: app.send,
            ef.CloseApp: app.close_app,
            ef.PauseApp: app.pause,
            ef.ResumeApp: app.resume,
            ef.AcquireWriteLease: log.acquire,
            ef.Commit: log.submit,
            ef.WriteCheckpointChunk: log.submit,
            ef.ReadTail: log.submit,
            ef.LoadLog: log.submit,
            ef.CheckCheckpoint: log.submit,
            ef.ReadCheckpointChunk: log.submit,
            ef.ReadRecords: log.submit,
            ef.ReadSpilled: log.submit,
            ef.ReadLetters: log.submit,
            ef.RequestStandbyCheckpoint: log.request_standby_checkpoint,
            ef.CancelStandbyRequest: log.cancel_standby_request,
            ef.OfferChunk: log.offer,
            ef.OfferCheckpoint: log.offer,
            ef.Trim: log.trim,
            ef.OpenPeer: peers.open,
            ef.SendToPeer: peers.send,
            ef.ResetPeer: peers.reset,
            ef.ReplyToPeer: peers.reply,
            ef.ReplyToClient: peers.reply_to_client,
            ef.WakeAt: clock.wake_at,
            ef.PeerResetDone: host.peer_reset_done,
            ef.OperatorAnswered: host.operator_answered,
            ef.UpgradeEnded: host.upgrade_ended,
            ef.Report: host.report,
            ef.Stop: host.stop,
        }
        self._observer = observer

    def start(self) -> None:
        """Run the first turn: the machine asks for the write lease."""
        self.inbox.insert(0, Started())
        self.turn()

    def turn(self) -> None:
        """Handle all events that have arrived, and those that they cause at once."""
        self._handle_events()
        if self._peers.replies_wait and not self.machine.stopped:
            self._peers.receive()
            self._handle_events()

    def _handle_events(self) -> None:
        machine, inbox = self.machine, self.inbox
        app, peers, log, clock = self._app, self._peers, self._log, self._clock
        while inbox and not machine.stopped:
            now_ns = clock.now_ns()
            events = [*clock.pop_events(), *app.pop_sent_events(), *inbox]
            inbox.clear()
            peers.begin_turn()
            replies = self._carry_out(machine.handle(events, now_ns))
            replies += self._carry_out(machine.advance())
            for reply in replies:
                self._act(reply)
            if peers.has_new or not log.has_inline:
                self._flush_peers()
            if log.has_inline:
                log.run_inline()
            if not inbox:
                self._carry_out(machine.settle())
        self._flush_peers()

    def _carry_out(self, effects: Sequence[ef.Effect]) -> list[ef.Effect]:
        """Carry out all effects except replies to peers; return these."""
        replies: list[ef.Effect] = []
        if not effects:
            return replies
        for effect in effects:
            if type(effect) is ef.ReplyToPeer:
                replies.append(effect)
            else:
                self._act(effect)
        self.inbox += self._app.flush()
        if self.machine.waits_for_app:
            self.inbox += self._app.pop_sent_events()
        return replies

    def _act(self, effect: ef.Effect) -> None:
        if self._observer is not None:
            self._observer(effect)
        self._actions[type(effect)](effect)

    def _flush_peers(self) -> None:
        self._peers.flush(patient=not self.machine.waits_for_peers)
