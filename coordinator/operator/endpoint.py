"""Requests of operators to a running coordinator over its control socket, and the answers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from immortal.coordinator.app.endpoint import AppInterface
from immortal.coordinator.audit.auditor import READ_ONLY, Auditor
from immortal.coordinator.clock import InstanceClock
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.errors import LogError, fail
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.fault_points import FaultPoint, reach
from immortal.coordinator.log_port.endpoint import LogEndpoint
from immortal.coordinator.operator import verbs as operator_verbs
from immortal.coordinator.operator.control_server import ControlRequest
from immortal.coordinator.operator.verbs import HandOverError, VerbError, choose_successor
from immortal.coordinator.peers.endpoint import PeerEndpoint


class OperatorEndpoint:
    """Answers requests of operators. ``post``: takes events of changes, which are answered once they are durable."""

    def __init__(
        self,
        machine: Machine,
        app: AppInterface,
        peers: PeerEndpoint,
        log: LogEndpoint,
        clock: InstanceClock,
        auditor: Auditor,
        post: Callable[[ev.Event], None],
        request_stop: Callable[[], None],
    ) -> None:
        self._machine, self._app, self._peers, self._log = machine, app, peers, log
        self._clock, self._auditor, self._post = clock, auditor, post
        self._request_stop = request_stop
        self._verbs: dict[str, Callable[[ControlRequest], None]] = {
            "status": lambda request: request.answer(self._status()),
            "checkpoint": self._checkpoint,
            "clock": lambda request: request.answer(clock.status()),
            "accept-clock": self._accept_clock,
            "peers": lambda request: request.answer({"peers": self._peers_status()}),
            "clients": lambda request: request.answer(machine.view.clients()),
            "hand-over": self._hand_over,
            "stop": self._stop,
            "reclaim": lambda request: post(ev.Reclaimed(request)),
            **dict.fromkeys(operator_verbs.VERBS, self._post_change),
        }

    def handle(self, requests: Sequence[ControlRequest]) -> None:
        """Audit each request, refuse it, or pass it to the handler of its verb."""
        for request in requests:
            reach(FaultPoint.CONTROL)
            self._auditor.operator(f"uid {request.uid}", request.verb, request.argument.decode(errors="replace"))
            verb = self._verbs.get(request.verb)
            lease = self._machine.state.write_lease
            if verb is None:
                request.answer({"error": f"unknown verb {request.verb!r}; known: {', '.join(self._verbs)}"})
            elif not lease.writes and request.verb not in READ_ONLY:
                request.answer({"refused": f"it does not write the log now ({lease.role.value}): ask {lease.holder}"})
            else:
                verb(request)

    def peer_reset_done(self, effect: ef.PeerResetDone) -> None:
        if isinstance(effect.token, ControlRequest):
            effect.token.answer({"found": effect.found})

    def operator_answered(self, effect: ef.OperatorAnswered) -> None:
        if isinstance(effect.token, ControlRequest):
            effect.token.answer(effect.answer)

    def _checkpoint(self, request: ControlRequest) -> None:
        self._post(ev.CheckpointRequested())
        request.answer({"asked": True})

    def _stop(self, request: ControlRequest) -> None:
        """Stop as by SIGTERM, for who can send none: what runs in another container."""
        request.answer({"asked": True})
        self._request_stop()

    def _hand_over(self, request: ControlRequest) -> None:
        try:
            wanted = operator_verbs.requested_successor(request.argument)
            successor = choose_successor(self._log.standbys, wanted)
        except (VerbError, HandOverError) as error:
            request.answer({"refused": str(error)})
            return
        if not self._machine.view.can_hand_over:
            request.answer({"refused": "its app does not work now: try again once it does ('immortal status')"})
            return
        self._log.hand_over_to(successor.name)
        self._post(ev.StopRequested(hands_over=True))
        request.answer({"to": successor.name})

    def _accept_clock(self, request: ControlRequest) -> None:
        self._clock.now_ns(accept=True)
        request.answer(self._clock.status())

    def _post_change(self, request: ControlRequest) -> None:
        store = self._log.store
        if store is None:
            fail("an operator changes a log that is not ours")
        try:
            event = operator_verbs.event_of(request.verb, request.argument, request, store, self._machine.view.letters)
        except (VerbError, LogError) as error:
            request.answer({"error": str(error)})
        else:
            self._post(event)

    def _status(self) -> dict[str, object]:
        status: dict[str, Any] = {
            **self._machine.view.status(self._clock.now_ns()),
            "pid": os.getpid(),
            "clock": self._clock.status(),
            "standbys": [{"name": one.name, "peer": one.endpoint, "ready": one.is_ready} for one in self._log.standbys],
            "commit_ms": round(self._log.commit_s * 1000, 3),
            "security": self._peers.describe_security(),
        }
        if self._log.problem:
            status["problems"] = [*status.get("problems", ()), self._log.problem]
        status["unsent_bytes"] -= self._app.sent_bytes  # the machine has not heard of these yet
        behind = bool(status["backlog_records"] or status["unsent_bytes"]) and not status["paused"]
        silent_s = (time.monotonic_ns() - self._app.last_traffic_ns) / 1e9
        status["app_silent_s"] = round(silent_s, 3) if behind and status["app_connected"] else 0.0
        for destination, output in status["outputs"].items():
            output |= self._peers.describe_output(destination, output["error"])
        return status

    def _peers_status(self) -> dict[str, dict[str, object]]:
        """Return what the machine knows of each peer, and how it is reached."""
        peers = self._machine.view.peers()
        for name, peer in peers.items():
            peer |= self._peers.describe_peer(name, peer["error"])
        return peers
