"""Unsaved state: the app's state can't be saved, and the instance continues from the checkpoint before.

Instead of a checkpoint the app reports a failure, and which message caused it. By itself, or on an operator's decision,
it can take messages back; it names them right before the checkpoint of the state without them. The verdicts and the
checkpoint are durable together, and nothing is sent before. So after a crash at any time the log has a state with these
messages, or one without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import OperatorAnswered
from immortal.coordinator.core.errors import AppProtocolError
from immortal.coordinator.core.failures.call_failure import Verdicts
from immortal.coordinator.core.failures.poison_guard import format_message_position
from immortal.coordinator.core.group_commit import Group
from immortal.coordinator.core.interfaces import AuditEntry
from immortal.coordinator.core.state import CoreState
from immortal.protocol.messages import MessageType
from immortal.protocol.verdicts import MessageKey, Unsaved, Verdict, VerdictKind, encode_verdict


@dataclass(slots=True, eq=False, repr=False)
class TakeBackRequest:
    """Request of ``operator`` to take a message back. ``token``: for the answer; None: answered. ``is_sent``: the app
    has the request."""

    verdict: Verdict
    operator: str
    token: object | None
    is_sent: bool = False


@dataclass(slots=True, eq=False, repr=False)
class UnsavedState:
    """Handling of a state that can't be saved. ``failed``: why the last checkpoint failed; None: it did not."""

    state: CoreState
    verdicts: Verdicts
    failed: Unsaved | None = None
    failures: int = 0  # in a row
    since_ns: int = 0  # of the first of them
    _taken_back: list[Verdict] = field(default_factory=list)  # for the next checkpoint
    _requests: dict[MessageKey, TakeBackRequest] = field(default_factory=dict)

    # --- reports of the app ------------------------------------------------------------------------------------------

    def save_failed(self, unsaved: Unsaved) -> None:
        """Note that the app can't give a checkpoint."""
        state = self.state
        if not self.failures:
            self.since_ns = state.now_ns
        self.failures += 1
        self.failed = unsaved
        state.checkpoints.last_failed_ns = state.now_ns
        state.report(notices.StateUnsaved(self.problem_text(), self.cost_text(), self.remedy_text(), self.failures))
        self._answer_requests(unsaved)

    def taken_back(self, verdict: Verdict) -> None:
        """Note a message that the next checkpoint's state lacks. Raises AppProtocolError."""
        sequence_id = self.state.session.fed_sequence_id
        if verdict.kind is not VerdictKind.TAKEN_BACK or not verdict.sequence_id <= verdict.behind <= sequence_id:
            raise AppProtocolError(
                f"the app sent a TakenBack of record {verdict.sequence_id}, behind record {verdict.behind}, it was "
                f"given the records up to {sequence_id}"
            )
        self._taken_back.append(verdict)
        self.state.outputs_held = True

    def checkpoint_complete(self, group: Group) -> None:
        """Log the verdicts on taken-back messages in ``group``, together with the checkpoint's header."""
        for verdict in self._taken_back:
            self.verdicts.log_verdict(verdict, group=group)
            request = self._requests.get(verdict.key)
            what = f"took back message {verdict.message_index} of record {verdict.sequence_id}: {verdict.text}"
            if request is not None:
                group.transaction.audit.append(AuditEntry(self.state.now_ns, request.operator, what))
        if self._taken_back:
            self.state.last_verdict_ticket = group.ticket

    def checkpoint_durable(self) -> None:
        """Note that the checkpoint is durable, and report what changed."""
        for verdict in self._taken_back:
            where = format_message_position(verdict.sequence_id, verdict.message_index, verdict.caller)
            self.state.report(notices.TakenBack(verdict.method or "a message", where, verdict.text, verdict.behind))
        if self.failed is not None:
            self.state.report(notices.StateSavedAgain(self.failures))
        taken = {verdict.key for verdict in self._taken_back}
        if taken:
            self.state.outputs_held = False
        for key, request in self._requests.items():
            if key in taken:
                self._answer(request, {"skipped": True})
            else:
                self._answer(request, {"refused": "the state can be saved as it is by now: nothing was skipped"})
        self.failed, self.failures = None, 0
        self._taken_back, self._requests = [], {}

    def app_lost(self) -> None:
        if self._taken_back:
            self.state.outputs_held = False
        self._taken_back = []
        for request in self._requests.values():
            self._answer(request, {"refused": "the app is gone: ask again once it works"})
        self._requests = {}

    # --- decisions of an operator ------------------------------------------------------------------------------------

    def is_failed_message(self, key: MessageKey) -> bool:
        """Return True if the message is known to make the state impossible to save."""
        failed = self.failed
        return failed is not None and key == (failed.sequence_id, failed.message_index, 0, 0)

    def request_take_back(self, verdict: Verdict, operator: str, token: object) -> None:
        """Ask the app, on an operator's request, for a checkpoint without that message."""
        self._requests[verdict.key] = TakeBackRequest(verdict, operator, token)
        self.state.checkpoints.is_requested = True

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def send_requests(self) -> None:
        """Tell the app, before a TakeCheckpoint, which messages to take back."""
        for request in self._requests.values():
            request.is_sent = True
            message = encode_verdict(request.verdict, MessageType.TAKE_BACK)
            self.state.outbox.send_control(MessageType.TAKE_BACK, message)

    def _answer_requests(self, unsaved: Unsaved) -> None:
        """Answer operators that the checkpoint failed without those messages too. If another message is the cause, the
        requests stay until it is skipped as well."""
        if not all(request.is_sent for request in self._requests.values()):  # with the next one
            self.state.checkpoints.is_requested = True
            return
        key = unsaved.sequence_id, unsaved.message_index, 0, 0
        another = unsaved.sequence_id >= 0 and key not in self._requests and not unsaved.why
        for request in self._requests.values():
            if another:
                text = f"it is noted, and the state still can't be saved: skip {self.problem_text()} too"
            else:
                text = f"the state can't be saved without it: {unsaved.why or unsaved.text}"
            self._answer(request, {"refused": text})
        if not another:
            self._requests = {}

    def _answer(self, request: TakeBackRequest, answer: dict[str, object]) -> None:
        if request.token is not None:
            self.state.effects.append(OperatorAnswered(request.token, answer))
            request.token = None

    # --- texts -------------------------------------------------------------------------------------------------------

    def problem_text(self) -> str:
        """Describe why the state can't be saved."""
        failed = self.failed
        if failed is None:
            return ""
        why = f" ({failed.why})" if failed.why else ""
        if failed.sequence_id < 0:
            return f"{failed.text}{why}"
        where = format_message_position(failed.sequence_id, failed.message_index, failed.caller)
        return f"{failed.method or 'a message'}, {where}: {failed.text}{why}"

    @property
    def _records(self) -> int:
        """Number of records after the last checkpoint."""
        last = self.state.checkpoints.last
        return self.state.log.durable_sequence_id - (-1 if last is None else last.sequence_id)

    def cost_text(self) -> str:
        """Describe what it costs to continue without a checkpoint, and how much room the log has left."""
        text = f"a recovery goes over {self._records} records, and the log is not trimmed"
        space, limit = self.state.log_capacity.space, self.state.limits.log_limit_bytes
        if space is None:
            return text
        if limit is None:
            return f"{text}: it has {space.used_bytes >> 20} MiB, and its disk {space.free_bytes >> 20} MiB left"
        left = max(0, limit - space.used_bytes)
        return f"{text}: {left >> 20} MiB of its {limit >> 20} MiB are left"

    def remedy_text(self) -> str:
        """Describe what an operator can do."""
        failed = self.failed
        skip = "" if failed is None or failed.sequence_id < 0 else f"{failed.sequence_id}:{failed.message_index}"
        ways = [f"'immortal skip {self.state.name} {skip} --reason ...'"] if skip else []
        return ", ".join([*ways, "new code whose state can be saved ('immortal upgrade')", "a codec for the type"])

    def describe(self, now_ns: int) -> dict[str, object]:
        """Return plain values for the status."""
        failed = self.failed
        if failed is None:
            return {"unsaved": None}
        return {
            "unsaved": {
                "problem": failed.text,
                "since": self.problem_text(),
                "why": failed.why or None,
                "record": None if failed.sequence_id < 0 else failed.sequence_id,
                "message": None if failed.message_index < 0 else failed.message_index,
                "method": failed.method or None,
                "caller": failed.caller,
                "failures": self.failures,
                "records": self._records,
                "for_s": round(max(0, now_ns - self.since_ns) / 1e9, 3),
                "costs": self.cost_text(),
                "ways_out": self.remedy_text(),
            }
        }
