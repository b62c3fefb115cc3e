"""Notices: reports of the core to its operator, each a small struct with a level, fields and a text.

A :class:`Report` effect carries a notice out of the machine; the driver gives it to sinks (coordinator/notices/). A new
notice is a class here, reported with ``state.report(...)``; docs/reference/notices.md has a table of these classes.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from string import Formatter
from typing import ClassVar, Literal

import msgspec
from msgspec import Struct

Level = Literal["trace", "debug", "info", "warning", "error"]
"""Severity of a notice. Trace is only for sinks that measure, and produces no line."""


class Notice(Struct, kw_only=True):
    """Base of all notices. ``template``: its text with field names as in ``str.format``. Fields that it does not name,
    and ``peer``, by which lines are searched, follow it as named values. The text is built once a sink asks for it.

    ``left_out``: number of notices of its kind that the sink did not get before it.
    """

    level: ClassVar[Level] = "info"
    template: ClassVar[str]
    apart: ClassVar[tuple[str, ...]] = ("peer",)  # fields that distinguish kinds of this notice
    left_out: int = 0

    @property
    def text(self) -> str:
        return self.template.format_map(self.fields())

    def fields(self) -> dict[str, object]:
        """Return the fields by the names that lines show."""
        names = zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True)
        return {shown: getattr(self, name) for name, shown in names if name != "left_out" or self.left_out}

    def values(self) -> dict[str, object]:
        """Return the fields that follow the text."""
        fields, said = self.fields(), _named_in(self.template)
        return {name: value for name, value in fields.items() if name not in said or name == "peer"}

    def kind(self) -> Hashable | None:
        """Return the kind for which the number of lines is limited; None: no limit."""
        if self.level not in ("warning", "error"):
            return None
        return type(self), *[getattr(self, name, None) for name in self.apart]


class _WarningNotice(Notice):
    level = "warning"


class _ErrorNotice(Notice):
    level = "error"


@cache
def _named_in(template: str) -> frozenset[str]:
    return frozenset(name for _, name, _, _ in Formatter().parse(template) if name)


# --- an app's way to become primary -----------------------------------------------------------------------------------


class NewEpoch(Notice):
    """The epoch of this start or session is durable."""

    level = "debug"
    template = "new epoch"
    epoch: int


class Recovering(Notice):
    """An app gets a checkpoint, and then the records after it."""

    template = "recovering"
    checkpoint: int
    after_record: int
    to_replay: int  # records
    epoch: int


class Recovered(Notice):
    """The replay is over and the app is primary."""

    template = "recovered"
    epoch: int
    sequence_id: int


class CheckpointDamaged(_ErrorNotice):
    """A checkpoint differs from what was written."""

    template = "checkpoint {checkpoint} is damaged ({problem}); falling back to the one before"
    apart = ("checkpoint",)
    checkpoint: int
    problem: str


class LogSilent(_WarningNotice):
    """The log did not answer. Reads are repeated; writes also, once it is known whether the log has them."""

    template = "the log does not answer, trying again: {problem}"
    problem: str


class LogAnswers(Notice):
    """The log answers again, and all open requests to it are settled."""

    template = "the log answers again"
    silent_s: float


class Following(Notice):
    """The process follows a log that another process writes."""

    template = "following {holder}, which writes the log"
    holder: str


class TakingOver(Notice):
    """The follower becomes the instance."""

    template = "taking over: {holder} no longer writes the log"
    holder: str


class FollowerBeginsAnew(_WarningNotice):
    """The state of a follower's app is no longer usable."""

    template = "{problem}; restarting from the last checkpoint"
    problem: str


class AppBeginsAnew(_WarningNotice):
    """A follower's checkpoint in the log contradicts the app, whose state is later."""

    template = "{problem}; restarting the app from that checkpoint"
    problem: str


class WaitsForReceivers(_WarningNotice):
    """The log was cut, and its recovery waits until all receivers of this instance's calls are up."""

    template = "the log was cut: waiting for {receivers} to report which calls of this instance they have"
    receivers: str


class Diverged(_WarningNotice):
    """A replay makes calls with other arguments than the log has, and continues."""

    template = "{difference}; {holds}"
    apart = ("destination",)
    destination: str
    difference: str  # both in words
    holds: str

    def values(self) -> dict[str, object]:
        return {"left_out": self.left_out} if self.left_out else {}  # the text already names the destination


class UpgradeFailed(_ErrorNotice):
    """The app could not become another version."""

    template = "the upgrade to version {version} failed: {reason}; version {current_version} stays in use"
    version: int
    reason: str
    current_version: int


class UpgradeInterrupted(_WarningNotice):
    """The app disconnected in the middle of an upgrade."""

    template = (
        "the upgrade to version {version} was interrupted: the old version is intact, and the upgrade is tried again at"
        " the next start"
    )
    version: int


class Upgraded(Notice):
    """An upgrade is durable."""

    template = "upgraded"
    from_version: int
    to_version: int
    after_record: int


# --- checkpoints and the log ------------------------------------------------------------------------------------------


class CheckpointBegan(Notice):
    """The first bytes of a checkpoint arrive from the app."""

    level = "trace"
    template = "checkpoint started"
    checkpoint: int


class CheckpointTaken(Notice):
    """A checkpoint is durable."""

    template = "checkpoint taken"
    checkpoint: int
    after_record: int
    size_bytes: int = msgspec.field(name="bytes")


class CheckpointAdopted(Notice):
    """A follower's checkpoint is durable."""

    template = "checkpoint taken by a standby"
    checkpoint: int
    after_record: int
    size_bytes: int = msgspec.field(name="bytes")


class CheckpointOffered(Notice):
    """A follower's checkpoint, which the writer asked for, is in the log and can be adopted."""

    template = "checkpoint taken for the primary"
    checkpoint: int
    after_record: int
    size_bytes: int = msgspec.field(name="bytes")


class OfferRefused(Notice):
    """A follower's checkpoint is no longer wanted, or can't be written to the log."""

    level = "debug"
    template = "the requested checkpoint was abandoned: {problem}"
    checkpoint: int
    problem: str


class StandbyTakesNone(_WarningNotice):
    """No follower took a checkpoint that was due, so the instance's own app must take it."""

    template = "no standby took the checkpoint that is due ({reason}): the instance's own app takes it"
    reason: str


class CheckpointFailed(_ErrorNotice):
    """The app began a checkpoint beside its work, and could not finish it."""

    template = "the app could not take a checkpoint: {reason}; the previous one stays in use"
    reason: str


class StateUnsaved(_ErrorNotice):
    """The app has no checkpoint to give: its state can't be saved, and no message to take back was found."""

    template = (
        "no checkpoint, its state can't be saved since {message}; it works on without checkpoints, which costs: "
        "{costs}. What helps: {ways_out}"
    )
    message: str
    costs: str
    ways_out: str
    failures: int


class StateSavedAgain(Notice):
    """The state can be saved again, after failed checkpoints."""

    template = "the state can be saved again: {failures} checkpoints had failed"
    failures: int


class TakenBack(_WarningNotice):
    """A message that made the state impossible to save was taken back: it counts as never handled."""

    template = "{method} at {where} was undone after record {behind}: {reason}"
    method: str
    where: str
    reason: str
    behind: int


class LogFull(_ErrorNotice):
    """The log has reached its limit, or its disk is nearly full."""

    template = "input from peers and impulses are held back: {reason}"
    reason: str


class LogHasRoom(Notice):
    """The log was full and has room again."""

    template = "the log has room again: input from peers and impulses are accepted again"


class InstancePaused(_WarningNotice):
    """An operator has paused the instance: its input is logged, and the app gets none."""

    template = "paused by {who}: input is logged, and the app gets none until it is resumed"
    who: str


class InstanceResumed(Notice):
    """An operator has ended the pause."""

    template = "resumed by {who}: it was paused by {paused_by} for {paused_s} s"
    who: str
    paused_by: str
    paused_s: float


# --- the app's connection ---------------------------------------------------------------------------------------------


class AppGone(_WarningNotice):
    """The app's connection has ended."""

    template = "the app disconnected; waiting for the next one"
    phase: str


class AppCutOff(_WarningNotice):
    """The app's connection has ended in the middle of a message."""

    template = "the app's connection ended in the middle of a message; that message is dropped"


class AppLeaves(Notice):
    """The app says why it exits."""

    template = "the app leaves: {reason}"
    reason: str

    def kind(self) -> Hashable:
        return type(self)


class AppBrokeProtocol(_ErrorNotice):
    """The app sent something that the protocol forbids."""

    template = "the app broke the protocol: {error}; its connection is closed, nothing logged is lost"
    error: str


class CallTooLarge(_ErrorNotice):
    """An app of the base protocol made a call that is too large."""

    template = (
        "the app made a call of {size_bytes} bytes to {destination!r}, at most {limit_mib} MiB of arguments are allowed"
        " (rpc_limit_mb): the call is dropped, at each replay again, and the app goes on"
    )
    destination: str
    size_bytes: int
    limit_mib: int


# --- messages that fail alone -----------------------------------------------------------------------------------------


class FailedBefore(_ErrorNotice):
    """A message with a verdict of failure ends the app's process again: no other verdict can follow."""

    template = "{reason} at {where}, where it failed before: deploy code that does not end the process there"
    reason: str
    where: str


class NotCalledAgain(_ErrorNotice):
    """A message has ended the app's process too often."""

    template = "{method} ({where}) is no longer called: {reason}; {then}"
    method: str
    where: str
    reason: str
    then: str


class CallForbidden(_WarningNotice):
    """A caller made its first call that it is not allowed to make."""

    template = "{reason}: the call is refused; further refusals of this caller are only counted"
    reason: str


class NestedTooDeeply(_WarningNotice):
    """A caller sent its first message that is nested too deeply."""

    template = "{reason}: it is refused; further refusals of this caller are only counted"
    reason: str


class CallerHeldOff(_WarningNotice):
    """Calls of one caller have repeatedly ended the app's process."""

    template = "calls of {caller} have ended the app's process {deaths} times: nothing of it is taken for {for_s:.0f} s"
    caller: str
    deaths: int
    for_s: float


class QueryChangedState(_WarningNotice):
    """A query that is not logged has changed the state; the app rebuilds it from the log."""

    template = (
        "the query {method} has changed the state, which only logged calls may do: the app rebuilds the state from the "
        "log, and the query is refused for a minute; make it an @rpc method, or let it work on a copy"
    )
    method: str


class HandlerTakesLong(_WarningNotice):
    """A handler has run for too long."""

    template = "{handler}"
    handler: str  # which one, as a text


class StopWaits(_WarningNotice):
    """A clean stop was requested while a handler runs."""

    template = "the stop waits for the app: it is {handler}"
    handler: str


class MessageSkipped(_WarningNotice):
    """An operator has skipped a message."""

    template = "{who} {what}"
    apart = ("what",)
    who: str
    what: str


class LettersRetried(Notice):
    """An upgrade retries dead letters that an earlier version had refused."""

    template = "the upgrade to version {version} retries dead letters that were refused"
    version: int
    count: int


class LetterNotRetried(_WarningNotice):
    """An upgrade can't retry a dead letter."""

    template = "the upgrade to version {version} can't retry the dead letter {letter}: {reason}"
    version: int
    letter: str  # its record, message and part
    reason: str


class LetterUnreadable(_ErrorNotice):
    """A dead letter is damaged."""

    template = "{problem}: it is not retried"
    problem: str


# --- streams ----------------------------------------------------------------------------------------------------------


class StreamStopped(Notice):
    """An output stream has stopped because of its receiver."""

    level: ClassVar[Level] = "error"
    template = "stream stopped: {reason}; its messages are kept"
    peer: str
    reason: str


class StreamWaits(StreamStopped):
    """An output stream has stopped because the receiver's log is full."""

    level = "warning"


class StreamReset(_WarningNotice):
    """The receiver of a stream that an operator has reset has said how much it has."""

    template = "the stream was reset and continues"
    peer: str
    behind_position: int
    receiver_has: int


class PeerForgotten(_WarningNotice):
    """An operator has reset a peer: what was known of its log is forgotten."""

    template = "the identity of a peer's log was forgotten"
    peer: str


class LogReclaimed(_WarningNotice):
    """An operator declares this log valid, and its copies invalid."""

    template = "this log is the valid one from now on, and no copy of it"
    epoch: int


class PeerRefused(Notice):
    """An input stream is refused."""

    level: ClassVar[Level] = "error"
    template = "stream refused: {reason}"
    peer: str
    reason: str


class OldPeerRefused(PeerRefused):
    """An input stream is refused for its epoch, which is that of an older copy."""

    level = "warning"


class FrameRefused(_ErrorNotice):
    """A peer sends more than its window allows."""

    template = "a frame was refused: {reason}; further ones are not reported"
    peer: str
    reason: str


# --- back-pressure ----------------------------------------------------------------------------------------------------


class _Load(Notice):
    peer: str
    memory_mib: float
    spilled_mib: float


class InMemoryAgain(_Load):
    """A stream has no spilled messages any more."""

    template = "all messages that wait for {peer!r} are in memory again"


class AppWaitsFor(_Load):
    """Memory is full, and the receiver takes messages as fast as it can."""

    template = "the app is slowed down: it calls {peer!r} faster than {peer!r} accepts calls"


class Spills(_Load):
    """Memory is full, and the receiver takes too little: messages are spilled."""

    level = "warning"
    template = "{peer!r} {state}: {limit_mib} MiB of messages for it are in memory, further ones go to disk"
    state: str
    limit_mib: float


class HeldUp(_Load):
    """Memory and the spill limit are full: the app is blocked."""

    level = "warning"
    template = (
        "{peer!r} {state}: the app is held up, the limits are {limit_mib} MiB in memory and {spill_limit_mib} MiB on"
        " disk"
    )
    state: str
    limit_mib: float
    spill_limit_mib: float
