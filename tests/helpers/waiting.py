"""Instances that wait for each other and for the time, with crashes between: real machines, logs and dispatchers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from immortal.appsdk.effects.effect import EffectRequest, EffectRunner
from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.protocol.system_methods import Order
from tests.helpers.recorded import Instances, RecordedInstance

S_NS = 1_000_000_000


class EffectsByHand:
    """EffectRunner that runs nothing by itself."""

    def __init__(self) -> None:
        self.requests: list[EffectRequest] = []  # all requests
        self.cancelled: list[EffectRequest] = []  # requests that were not done

    def start(self, request: EffectRequest) -> None:
        self.requests.append(request)

    def cancel(self, request: EffectRequest) -> None:
        if not request.is_done:
            self.cancelled.append(request)

    @property
    def waiting(self) -> list[EffectRequest]:
        return [request for request in self.requests if not request.is_done and not request.is_cancelled]


class WaitingInstances(Instances):
    """Instances by class. ``classes``: by name. A message to a stopped one is sent again once it runs."""

    def __init__(self, folder: Path, classes: dict[str, type], effects: EffectRunner | None = None) -> None:
        super().__init__(folder, effects)
        self.classes = classes
        self._unsent: list[tuple[RecordedInstance, ef.SendToPeer]] = []
        self.answers: dict[object, dict[str, object]] = {}  # to operators, by token
        for name in classes:
            self.start(name, classes[name])

    def __getitem__(self, name: str) -> RecordedInstance:
        return self._running[name]

    def app(self, name: str) -> Any:
        return self[name].app

    def waiting_count(self, name: str) -> int:
        return self[name].dispatcher.tasks.count

    def effect_requests(self, name: str) -> list[EffectRequest]:
        """Return the requests of the running app that have no answer."""
        requests = self[name].dispatcher.tasks.effects.requests.values()
        return [request for request in requests if not request.is_done]

    # --- crashes ----------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Stop app and coordinator, with all that they had not written or sent."""
        self.stop(name)
        self._unsent = [(sender, effect) for sender, effect in self._unsent if sender.name != name]

    def crash(self, *names: str) -> None:
        for name in names:
            self.kill(name)
        for name in names:
            self.start(name, self.classes[name])

    def step(self, name: str) -> bool:
        """Let one instance handle its input and send its output, and do nothing more."""
        instance = self._running[name]
        moved = instance.turn()
        effects, instance.driven.effects = instance.driven.effects, []
        for effect in effects:
            moved = self._carry(instance, effect) or moved
        return moved

    def settle(self) -> None:
        moved = True
        while moved:
            moved = False
            super().settle()
            unsent, self._unsent = self._unsent, []
            for sender, effect in unsent:
                moved = self._carry(sender, effect) or moved

    def _carry(self, instance: RecordedInstance, effect: ef.Effect) -> bool:
        if isinstance(effect, ef.SendToPeer):
            receiver = self._running.get(effect.destination)
            if receiver is None:
                self._unsent.append((instance, effect))
                return False
            token = (instance, effect.tag)
            receiver.driven.handle(ev.PeerFrameReceived(token, effect.frame))
            return True
        if isinstance(effect, ef.ReplyToPeer):
            assert isinstance(effect.token, tuple)
            sender, tag = effect.token
            if self._running.get(sender.name) is sender:  # otherwise it was for an instance that has crashed
                sender.driven.handle(ev.PeerReplied(instance.name, tag, effect.frame))
            return True
        if isinstance(effect, ef.OperatorAnswered):
            assert effect.token not in self.answers
            self.answers[effect.token] = dict(effect.answer)
            return True
        return super()._carry(instance, effect)

    # --- operators --------------------------------------------------------------------------------------------------

    def ask(self, name: str, event_type: type, *fields: object) -> Any:
        """Send an operator's request; return its answer, None while there is none."""
        token = object()
        self[name].driven.handle(event_type(*fields, token))
        self.settle()
        return self.answers.get(token)

    def cancel(self, name: str, task: int, reason: str = "") -> Any:
        return self.ask(name, ev.HandlerOrdered, Order("cancel", task, reason, "ann"))

    # --- time -------------------------------------------------------------------------------------------------------

    def pass_time(self, duration_s: float) -> None:
        """Advance the clock, and tell every instance that has a due timer."""
        self._time_ns += int(duration_s * S_NS)
        self.log_time()

    def log_time(self) -> None:
        told = True
        while told:
            told = False
            for instance in list(self._running.values()):
                due_ns = instance.dispatcher.next_due_ns
                if due_ns is not None and due_ns <= self._time_ns:
                    instance.dispatcher.log_time(self._time_ns)
                    told = True
            self.settle()

    def pass_all_time(self) -> None:
        """Pass time until no timer is left."""
        while due := [d for i in self._running.values() if (d := i.dispatcher.next_due_ns) is not None]:
            self._time_ns = max(self._time_ns, min(due))
            self.log_time()
