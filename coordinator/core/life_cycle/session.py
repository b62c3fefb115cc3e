"""Session of one app from its connection to its end, and the pause and the stop that an operator requests.

    WAITING --first start--> FIRST_START --its checkpoint--------------------------------> NORMAL
            --recovery-----> LOADING --> RESTORING --> REPLAYING --> BECOMING_PRIMARY ----> NORMAL
                                          |                            (its checkpoint, or that there is none)
                                          '--promoted, BecomingPrimary sent-----------> NORMAL
    REPLAYING --another writes the log--> FOLLOWING --this one does from now on--> REPLAYING
    NORMAL --TakeCheckpoint sent--> CHECKPOINTING --its checkpoint, or that there is none--> NORMAL
    REPLAYING --UpgradeTakeCheckpoint sent--> UPGRADING --its checkpoint--> REPLAYING        a version of the log's past
    REPLAYING --UpgradeTakeCheckpoint sent--> UPGRADING --its checkpoint, TakeCheckpoint sent--> CONFIRMING_UPGRADE
              --its checkpoint--> COMPLETING_UPGRADE --durable--> NORMAL                     the requested upgrade
    any --connection lost--> WAITING, under a new epoch

The table below has all transitions; any other is an internal error.

During a pause input is logged, and the app gets none. A pause is kept in memory, so it ends with this process. To the
rest of the machine a paused app is a slow app.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.effects import CloseApp, OperatorAnswered
from immortal.coordinator.core.errors import require
from immortal.coordinator.core.interfaces import ONESELF
from immortal.protocol.batch import CallRules
from immortal.protocol.call_permissions import from_app
from immortal.protocol.extensions import ALL_EXTENSIONS, AppDescription, Hello, decode_hello, encode_sources
from immortal.protocol.limits import RPC_SIZE_BYTES_MAX
from immortal.protocol.messages import MessageType
from immortal.protocol.readers import Message, MessageReader
from immortal.protocol.record import CONTROL_SEQUENCE_ID, encode_record
from immortal.protocol.trailer import BatchKind, BatchSource

if TYPE_CHECKING:
    from immortal.coordinator.core.state import CoreState


INTRODUCED = frozenset({MessageType.RECORD_TIME, MessageType.VERDICTS})
"""Messages that only an app with a Hello asks for; its calls that wait for an answer name the caller (WIRE.md, 4.1)."""


class Phase(Enum):
    """Phase of a session with the app."""

    WAITING = "waiting for the app"
    LOADING = "loading"
    FIRST_START = "first start"
    RESTORING = "restoring the checkpoint"
    REPLAYING = "replaying"
    FOLLOWING = "following"
    BECOMING_PRIMARY = "becoming primary"
    NORMAL = "normal"
    CHECKPOINTING = "taking a checkpoint"
    UPGRADING = "upgrading"
    CONFIRMING_UPGRADE = "confirming the upgrade"
    COMPLETING_UPGRADE = "completing the upgrade"
    STOPPED = "stopped"

    __hash__ = object.__hash__  # each member exists once; an enum's own hash would cost a call for each set look-up


NORMAL = Phase.NORMAL
"""Alias for each turn's code: on Python 3.11 an enum member's look-up takes ten times as long as a name's."""


class Step(Enum):
    """Event that moves a session to its next phase."""

    APP_CONNECTED = "an app connected"
    LOG_IS_NEW = "the log is new"
    CHECKPOINT_CHOSEN = "a checkpoint was chosen"
    BLOB_SENT = "the blob was sent"
    FOLLOWS = "another writes the log"
    LEASE_GRANTED = "the log is ours to write"
    CAUGHT_UP = "the replay is complete"
    CHECKPOINT_REQUESTED = "a checkpoint was asked for"
    CHECKPOINT_RECEIVED = "the checkpoint was received"
    CHECKPOINT_ABANDONED = "there will be no checkpoint"
    PROMOTED = "the app is primary without a checkpoint"
    UPGRADE_REQUESTED = "an upgrade was asked for"
    UPGRADE_REPLAYED = "an upgrade of the past was repeated"
    UPGRADE_CONFIRMED = "the upgraded app has sent its checkpoint"
    UPGRADE_DURABLE = "the upgrade is durable"
    APP_LOST = "the app is gone"
    STOP = "stop"


TRANSITIONS: dict[tuple[Phase, Step], Phase] = {
    (Phase.WAITING, Step.APP_CONNECTED): Phase.LOADING,
    (Phase.LOADING, Step.LOG_IS_NEW): Phase.FIRST_START,
    (Phase.LOADING, Step.CHECKPOINT_CHOSEN): Phase.RESTORING,
    (Phase.RESTORING, Step.BLOB_SENT): Phase.REPLAYING,
    (Phase.REPLAYING, Step.FOLLOWS): Phase.FOLLOWING,
    (Phase.FOLLOWING, Step.LEASE_GRANTED): Phase.REPLAYING,
    (Phase.REPLAYING, Step.CAUGHT_UP): Phase.BECOMING_PRIMARY,
    (Phase.REPLAYING, Step.PROMOTED): Phase.NORMAL,
    (Phase.FIRST_START, Step.CHECKPOINT_RECEIVED): Phase.NORMAL,
    (Phase.BECOMING_PRIMARY, Step.CHECKPOINT_RECEIVED): Phase.NORMAL,
    (Phase.BECOMING_PRIMARY, Step.CHECKPOINT_ABANDONED): Phase.NORMAL,
    (Phase.NORMAL, Step.CHECKPOINT_REQUESTED): Phase.CHECKPOINTING,
    (Phase.CHECKPOINTING, Step.CHECKPOINT_RECEIVED): Phase.NORMAL,
    (Phase.CHECKPOINTING, Step.CHECKPOINT_ABANDONED): Phase.NORMAL,
    (Phase.REPLAYING, Step.UPGRADE_REQUESTED): Phase.UPGRADING,
    (Phase.FOLLOWING, Step.UPGRADE_REQUESTED): Phase.UPGRADING,
    (Phase.UPGRADING, Step.UPGRADE_REPLAYED): Phase.REPLAYING,
    (Phase.UPGRADING, Step.CHECKPOINT_RECEIVED): Phase.CONFIRMING_UPGRADE,
    (Phase.CONFIRMING_UPGRADE, Step.UPGRADE_CONFIRMED): Phase.COMPLETING_UPGRADE,
    (Phase.COMPLETING_UPGRADE, Step.UPGRADE_DURABLE): Phase.NORMAL,
    **{(phase, Step.APP_LOST): Phase.WAITING for phase in Phase if phase is not Phase.STOPPED},
    **{(phase, Step.STOP): Phase.STOPPED for phase in Phase},
}

UPGRADES = frozenset({Phase.UPGRADING, Phase.CONFIRMING_UPGRADE, Phase.COMPLETING_UPGRADE})

AWAITING_CHECKPOINT = frozenset(
    {Phase.FIRST_START, Phase.BECOMING_PRIMARY, Phase.CHECKPOINTING, Phase.UPGRADING, Phase.CONFIRMING_UPGRADE}
)
"""Phases in which the app owes a checkpoint, and can send one."""

REPLAYS = frozenset({Phase.REPLAYING, Phase.FOLLOWING})
"""Phases in which the app repeats work that was done before, or elsewhere."""

GETS_RECORDS = REPLAYS | {Phase.BECOMING_PRIMARY, Phase.NORMAL, Phase.CHECKPOINTING}
"""Phases in which logged records go to the app."""

RECOVERING = REPLAYS | {Phase.LOADING, Phase.RESTORING}
"""Phases in which each turn can bring the app a step further."""

RECOVERED = GETS_RECORDS - REPLAYS
"""Phases after the replay: new records go to the app as soon as they are durable."""

WORKS = frozenset({Phase.NORMAL, Phase.CHECKPOINTING})
"""Phases in which the app's outputs are new, and their marks go to the log."""

SENDS_CALLS = GETS_RECORDS | UPGRADES
"""Phases in which the app can send calls: it has records, or can have impulses."""

SENDS_IMPULSES = frozenset({Phase.NORMAL, Phase.CHECKPOINTING, Phase.COMPLETING_UPGRADE})
"""Phases in which the app is primary. An upgraded app can count itself as primary too early: its impulses wait."""


class AppSession:
    """State of the connection with the app; without a connection, that of the next one.

    ``logged_extensions``: the extensions of the app that began the log; None if the log is new.
    """

    def __init__(self, rpc_size_bytes_max: int = RPC_SIZE_BYTES_MAX) -> None:
        self.logged_extensions: frozenset[int] | None = None
        self._rpc_size_bytes_max = rpc_size_bytes_max
        self.phase = Phase.WAITING
        self.committer_id = 0
        self.number = 0  # of this connection
        self.connect()

    def load(self, committer_id: int, logged_extensions: frozenset[int] | None) -> None:
        """Load what the log has about itself and its app."""
        self.committer_id = committer_id
        self.logged_extensions = logged_extensions

    def connect(self) -> None:
        """Start a new connection: forget the last one."""
        self.number += 1
        self.reader = MessageReader(rpc_size_bytes_max=self._rpc_size_bytes_max)
        self.hello: Hello | None = None
        self._extensions_of: Hello | None = None
        self._extensions: frozenset[int] = frozenset()
        self.description = AppDescription()
        self.has_sent = False  # the app has sent something
        self.refused = False  # it broke the protocol; nothing more is read
        self.attached: set[str] = set()
        self.upgraded = False  # it has answered an UpgradeTakeCheckpoint: it may count itself as primary
        self.upgraded_sequence_id = -2  # ... after this record; -2: it has not
        self.fed_sequence_id = -1  # the last record given to the app
        self.replay_target = -1  # the last record it gets before it is primary
        self.checkpoint_sequence_id = -1  # the last record it got before it was asked for a checkpoint
        self.unsent_bytes = 0  # given to the runtime, not yet taken by the socket
        self.reading = False  # a read of records is under way
        self.initial_message: bytes | None = None
        self.impulses_accepted = 0
        self.acceptances: deque[tuple[int, int]] = deque()  # unsent: (after this record, total accepted by then)
        self._rules: dict[str, CallRules] = {}  # by destination
        self._sources: list[tuple[int, str]] | None = None  # as last sent to the app

    @property
    def is_loaded(self) -> bool:
        """True if the log is loaded, so its committer ID and the kind of its app are known."""
        return self.committer_id != 0

    def advance(self, step: Step) -> None:
        following = TRANSITIONS.get((self.phase, step))
        require(following is not None, f"{step.value!r} in phase {self.phase.value!r}")
        if following is not None:
            self.phase = following

    @property
    def extensions(self) -> frozenset[int]:
        """Extensions that the app asked for and this coordinator supports."""
        if self._extensions_of is not self.hello:  # cached, since each batch reads it
            self._extensions_of = self.hello
            self._extensions = self.hello.extensions & ALL_EXTENSIONS if self.hello else frozenset()
        return self._extensions

    @property
    def label(self) -> str:
        """The app's name for itself."""
        return self.hello.label if self.hello else ""

    @property
    def flushes(self) -> bool:
        """True if the app sends all its outputs before a checkpoint; one of the base protocol can send some after
        it."""
        return MessageType.STREAM_BATCH in self.extensions

    @property
    def hello_is_due(self) -> bool:
        """True if the app has not sent anything yet, and the app that began the log said Hello."""
        return bool(self.logged_extensions) and not self.has_sent

    @property
    def waits_for_hello(self) -> bool:
        """True if the app's Hello must arrive before its first record, since it decides what the app gets first."""
        return not self.has_sent and not INTRODUCED.isdisjoint(self.logged_extensions or ())

    def note_first_message(self, message: Message | None) -> None:
        """Note the app's first message (None: a blob); only this one can be a Hello. Raises RemoteProtocolError."""
        self.has_sent = True
        if message is not None and message.message_type == MessageType.HELLO:
            self.hello = decode_hello(message.data)

    def rules(self, own_name: str, destination: str) -> CallRules:
        """Return the rules for calls that the app sends to ``destination``."""
        rules = self._rules.get(destination)
        if rules is None:
            # The calls of an app of the base protocol that wait for an answer do not name the caller.
            knows_extensions = not INTRODUCED.isdisjoint(self.extensions)
            rules = self._rules[destination] = from_app(own_name, destination, knows_extensions=knows_extensions)
        return rules

    def sources_record(self, batches: Sequence[BatchSource]) -> bytes | None:
        """Return the control record that names the senders of the next record's batches; None if they did not
        change."""
        if MessageType.SOURCES not in self.extensions:
            return None
        runs: list[tuple[int, str]] = []
        is_own = True
        for batch in batches:
            name = batch.name if batch.kind == BatchKind.STREAM else ONESELF
            is_own = is_own and name == ONESELF
            if runs and runs[-1][1] == name:
                runs[-1] = runs[-1][0] + 1, name
            else:
                runs.append((1, name))
        if is_own:
            runs.clear()
        if runs == self._sources:
            return None
        self._sources = runs
        return encode_record(self.committer_id, CONTROL_SEQUENCE_ID, encode_sources(runs))

    def note_accepted(self, count: int, durable_sequence_id: int) -> None:
        """Note accepted impulses; they are reported to the app after the records before them."""
        self.impulses_accepted += count
        self.acceptances.append((durable_sequence_id, self.impulses_accepted))


class Pause:
    """Pause of the app by an operator. ``by``: who paused it, "" if nobody; ``since_ns``: when, instance time."""

    def __init__(self, state: CoreState) -> None:
        self.is_paused = False
        self.by = ""
        self.since_ns = 0
        self._state = state

    def requested(self, event: ev.InstancePaused) -> None:
        """Pause the app. A recovering app is not paused: its state would be neither the old nor the current one."""
        session, state = self._state.session, self._state
        changed = not self.is_paused
        if changed and session.phase not in WORKS:
            problem = (
                f"the app of {state.name!r} does not work now (phase: {session.phase.value}), and only one that does "
                f"can be paused: try again once it does"
            )
            state.effects.append(OperatorAnswered(event.token, {"refused": problem}))
            return
        if changed:
            self.is_paused, self.by, self.since_ns = True, event.operator, state.now_ns
            state.report(notices.InstancePaused(event.operator))
        state.effects.append(OperatorAnswered(event.token, {"changed": changed, **self.describe()}))

    def resume_requested(self, event: ev.InstanceResumed) -> None:
        state, before = self._state, self.describe()
        changed = self.is_paused
        if changed:
            paused_s = round(max(0, state.now_ns - self.since_ns) / 1e9, 3)
            state.report(notices.InstanceResumed(event.operator, self.by, paused_s))
            self.is_paused, self.by, self.since_ns = False, "", 0
        state.effects.append(OperatorAnswered(event.token, {"changed": changed, **before}))

    def describe(self) -> dict[str, object]:
        return {"paused": {"by": self.by, "since_ns": self.since_ns} if self.is_paused else None}


# Shutdown on an operator's request: the app has time for a last checkpoint, and gets a goodbye.
#
# NOT_REQUESTED --StopRequested--> REQUESTED --TakeCheckpoint sent--> LAST_CHECKPOINT --durable, or none--> GOODBYE
#    '------StopRequested, another one follows--> HANDING_OVER --all input that was taken is durable--> the end
#
# A handover needs no checkpoint, since the follower has the state. For the app it is like a crash of its coordinator
# with a goodbye; the follower's app continues, since it has the same records.


class StopStage(IntEnum):
    """Stage of a requested stop; stages only rise."""

    NOT_REQUESTED = 0
    REQUESTED = 1  # no more input is accepted
    LAST_CHECKPOINT = 2  # the app was asked for its last checkpoint: it gets no more records
    GOODBYE = 3  # the app got the goodbye
    HANDING_OVER = 4  # the app gets no more records, and is not read any more


class Shutdown:
    """Stop requested by an operator. ``stage`` only rises; the loss of the app completes the stop. The other
    attributes repeat the stage as plain values, since each turn reads them. ``is_feeding_stopped``: the app gets no
    more records."""

    def __init__(self, state: CoreState) -> None:
        self.is_requested = self.goodbye_sent = self.hands_over = False
        self.is_feeding_stopped = self.awaits_last_checkpoint = False
        self.stage = StopStage.NOT_REQUESTED
        self._last_checkpoint_id = 0
        self._state = state

    def _reach(self, stage: StopStage) -> None:
        self.stage = stage
        self.is_requested = stage >= StopStage.REQUESTED
        self.is_feeding_stopped = stage >= StopStage.LAST_CHECKPOINT
        self.hands_over = stage is StopStage.HANDING_OVER
        self.awaits_last_checkpoint = self.is_feeding_stopped and not self.hands_over
        self.goodbye_sent = stage is StopStage.GOODBYE

    def request(self, *, hands_over: bool) -> None:
        self._reach(StopStage.HANDING_OVER if hands_over else StopStage.REQUESTED)

    def checkpoint_requested(self) -> None:
        """Note that the app is asked for a checkpoint: during a stop it is the last one."""
        if self.stage is StopStage.REQUESTED:
            self._reach(StopStage.LAST_CHECKPOINT)

    def checkpoint_began(self, checkpoint_id: int) -> None:
        if self.awaits_last_checkpoint:
            self._last_checkpoint_id = checkpoint_id

    def checkpoint_durable(self, checkpoint_id: int) -> None:
        if checkpoint_id == self._last_checkpoint_id:
            self._send_goodbye()

    def checkpoint_failed(self) -> None:
        """Say goodbye without a last checkpoint: the app has none to give, and the log keeps the one before."""
        if self.awaits_last_checkpoint:
            self._send_goodbye()

    def _send_goodbye(self) -> None:
        self._reach(StopStage.GOODBYE)
        self.report_stop_reason()
        self._state.effects.append(CloseApp())

    def report_stop_reason(self) -> None:
        """Tell the app that the coordinator stops."""
        self._state.outbox.send_text(MessageType.GOODBYE, "the coordinator was asked to stop")
