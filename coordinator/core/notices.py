"""Notices: what the core tells its operator, each a small struct with a level, fields and a text.

A :class:`Report` carries one out of the machine; the driver gives it to sinks (coordinator/notices/). A new notice is a
class here, reported with ``turn.report(...)``; docs/reference/notices.md has a table of all, made of these.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from string import Formatter
from typing import ClassVar, Literal

import msgspec
from msgspec import Struct

Level = Literal["trace", "debug", "info", "warning", "error"]
"""Trace is for sinks that measure, and no line."""


class Notice(Struct, kw_only=True):
    """Base of all notices. ``template``: its text with field names as in ``str.format``. Other fields follow it as
    named values, and so does ``peer``, by which lines are searched. The text is made only when a sink asks for it.

    ``left_out``: how many of its kind were not given to a sink before it.
    """

    level: ClassVar[Level] = "info"
    template: ClassVar[str]
    apart: ClassVar[tuple[str, ...]] = ("peer",)  # fields that tell kinds of it apart
    left_out: int = 0

    @property
    def text(self) -> str:
        return self.template.format_map(self.fields())

    def fields(self) -> dict[str, object]:
        """Return the fields by the names that a reader of lines sees."""
        names = zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True)
        return {shown: getattr(self, name) for name, shown in names if name != "left_out" or self.left_out}

    def values(self) -> dict[str, object]:
        """Return the fields that follow the text."""
        fields, said = self.fields(), _named_in(self.template)
        return {name: value for name, value in fields.items() if name not in said or name == "peer"}

    def kind(self) -> Hashable | None:
        """Return the kind whose lines are limited to a few at once; None: no limit."""
        if self.level not in ("warning", "error"):
            return None
        return type(self), *[getattr(self, name, None) for name in self.apart]


@cache
def _named_in(template: str) -> frozenset[str]:
    return frozenset(name for _, name, _, _ in Formatter().parse(template) if name)


# --- an app's way to being primary ------------------------------------------------------------------------------------


class NewEpoch(Notice):
    """The number of this life is durable."""

    level = "debug"
    template = "new epoch"
    epoch: int


class Recovering(Notice):
    """An app gets a checkpoint, and then the records behind it."""

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


class CheckpointDamaged(Notice):
    """A checkpoint is not what was written."""

    level = "error"
    template = "checkpoint {checkpoint} is damaged ({problem}); falling back to the one before"
    apart = ("checkpoint",)
    checkpoint: int
    problem: str


class LogSilent(Notice):
    """The log has failed to answer. Reads are repeated; writes too, once it is known whether they are there."""

    level = "warning"
    template = "the log does not answer, trying again: {problem}"
    problem: str


class LogAnswers(Notice):
    """The log answers again, and everything it had not answered is settled."""

    template = "the log answers again"
    silent_s: float


class Following(Notice):
    """The process follows a log that another one writes."""

    template = "following {holder}, who writes the log"
    holder: str


class TakingOver(Notice):
    """The follower becomes the instance."""

    template = "taking over: {holder} writes the log no more"
    holder: str


class FollowerBeginsAnew(Notice):
    """The state of the app that follows is of no use any more."""

    level = "warning"
    template = "{problem}; it begins anew, at the last checkpoint"
    problem: str


class AppBeginsAnew(Notice):
    """A checkpoint that the log has, of a follower, says otherwise than the app, which is later."""

    level = "warning"
    template = "{problem}; the app begins anew, at that checkpoint"
    problem: str


class WaitsForReceivers(Notice):
    """A log that was cut can't be recovered before all receivers of this instance's calls are up."""

    level = "warning"
    template = "the log was cut: waiting for {receivers} to say how much of this instance's calls they have"
    receivers: str


class Diverged(Notice):
    """A replay makes other arguments than the log says, and goes on."""

    level = "warning"
    template = "{difference}; {holds}"
    apart = ("destination",)
    destination: str
    difference: str  # both in words
    holds: str

    def values(self) -> dict[str, object]:
        return {"left_out": self.left_out} if self.left_out else {}  # the words name the destination


class UpgradeFailed(Notice):
    """The app could not become another version."""

    level = "error"
    template = "the upgrade to version {version} failed: {reason}; version {current_version} goes on"
    version: int
    reason: str
    current_version: int


class UpgradeInterrupted(Notice):
    """The app went away in the middle of an upgrade."""

    level = "warning"
    template = (
        "the upgrade to version {version} was interrupted: the old version is whole, and the upgrade is tried again at"
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
    """The first bytes of a checkpoint come from the app."""

    level = "trace"
    template = "checkpoint begun"
    checkpoint: int


class CheckpointTaken(Notice):
    """A checkpoint is durable."""

    template = "checkpoint taken"
    checkpoint: int
    after_record: int
    size_bytes: int = msgspec.field(name="bytes")


class CheckpointAdopted(Notice):
    """A checkpoint that a follower has taken is durable."""

    template = "checkpoint taken by a standby"
    checkpoint: int
    after_record: int
    size_bytes: int = msgspec.field(name="bytes")


class CheckpointOffered(Notice):
    """A follower's checkpoint, which the writer asked for, is in the log and may be adopted."""

    template = "checkpoint taken for the one that writes the log"
    checkpoint: int
    after_record: int
    size_bytes: int = msgspec.field(name="bytes")


class OfferRefused(Notice):
    """A follower's checkpoint is not wanted any more, or can't be put into the log."""

    level = "debug"
    template = "the checkpoint that was asked for is given up: {problem}"
    checkpoint: int
    problem: str


class StandbyTakesNone(Notice):
    """A checkpoint was to come from a follower, and is asked of the instance's own app in the end."""

    level = "warning"
    template = "no standby took the checkpoint that is due ({reason}): the app takes it"
    reason: str


class CheckpointFailed(Notice):
    """The app began a checkpoint beside its work, and gave it up."""

    level = "error"
    template = "the app could not take its checkpoint: {reason}; the one before stays in use"
    reason: str


class StateUnsaved(Notice):
    """The app has no checkpoint to give: its state can't be saved, and nothing was found that could be taken back."""

    level = "error"
    template = (
        "no checkpoint, its state can't be saved since {message}; it works on without checkpoints, which costs: "
        "{costs}. What helps: {ways_out}"
    )
    message: str
    costs: str
    ways_out: str
    failures: int


class StateSavedAgain(Notice):
    """The state could not be saved, and can be again."""

    template = "the state can be saved again: {failures} checkpoints had failed"
    failures: int


class TakenBack(Notice):
    """A message made the state impossible to save: it counts as never handled."""

    level = "warning"
    template = "{method} at {where} was taken back behind record {behind}: {reason}"
    method: str
    where: str
    reason: str
    behind: int


class LogFull(Notice):
    """The log has reached its limit, or its disk has."""

    level = "error"
    template = "no more input is taken from peers, and no impulses: {reason}"
    reason: str


class LogHasRoom(Notice):
    """The log was full and is no longer."""

    template = "the log has room again: input is taken from peers, and impulses"


class InstancePaused(Notice):
    """An operator has paused the instance: its input is logged, and the app gets none of it."""

    level = "warning"
    template = "paused by {who}: input is logged, and the app gets none until it is resumed"
    who: str


class InstanceResumed(Notice):
    """An operator has ended the pause."""

    template = "resumed by {who}: it was paused by {paused_by} for {paused_s} s"
    who: str
    paused_by: str
    paused_s: float


# --- the app's connection ---------------------------------------------------------------------------------------------


class AppGone(Notice):
    """The app's connection has ended."""

    level = "warning"
    template = "the app is gone; waiting for the next one"
    phase: str


class AppCutOff(Notice):
    """The app's connection has ended in the middle of a message."""

    level = "warning"
    template = "the app's connection ended in the middle of a message; that message is dropped"


class AppLeaves(Notice):
    """The app says why it goes."""

    template = "the app leaves: {reason}"
    reason: str

    def kind(self) -> Hashable:
        return type(self)


class AppBrokeProtocol(Notice):
    """The app said what it may not say."""

    level = "error"
    template = "the app broke the protocol: {error}; its connection is closed, nothing logged is lost"
    error: str


class CallTooLarge(Notice):
    """A client of the base protocol made a call that is too large."""

    level = "error"
    template = (
        "the app made a call of {size_bytes} bytes to {destination!r}, at most {limit_mib} MiB of arguments are allowed"
        " (rpc_limit_mb): the call is dropped, at each replay again, and the app goes on"
    )
    destination: str
    size_bytes: int
    limit_mib: int


# --- messages that fail alone -----------------------------------------------------------------------------------------


class FailedBefore(Notice):
    """A message ends the app's process whose verdict is that it failed: no other verdict can follow."""

    level = "error"
    template = "{reason} at {where}, which failed before: deploy code that does not end it there"
    reason: str
    where: str


class NotCalledAgain(Notice):
    """A message has ended the app's process too often."""

    level = "error"
    template = "{method} ({where}) is not called any more: {reason}; {then}"
    method: str
    where: str
    reason: str
    then: str


class CallForbidden(Notice):
    """The first call of a caller that may not make it."""

    level = "warning"
    template = "{reason}: the call is refused; further ones of this caller are only counted"
    reason: str


class NestedTooDeeply(Notice):
    """The first message of a caller that is nested too deeply."""

    level = "warning"
    template = "{reason}: it is refused; further ones of this caller are only counted"
    reason: str


class CallerHeldOff(Notice):
    """Calls of one caller have ended the app's process again and again."""

    level = "warning"
    template = "calls of {caller} have ended the app's process {deaths} times: nothing of it is taken for {for_s:.0f} s"
    caller: str
    deaths: int
    for_s: float


class QueryChangedState(Notice):
    """A query that is not logged has changed the state; the app makes it anew from the log."""

    level = "warning"
    template = (
        "the query {method} has changed the state, which no log explains: the app makes it anew from the log, and the "
        "query is refused for a minute; make it an @rpc method, or let it work on a copy"
    )
    method: str


class HandlerTakesLong(Notice):
    """A handler does not come back."""

    level = "warning"
    template = "{handler}"
    handler: str  # which, in words


class StopWaits(Notice):
    """A clean stop is asked for while a handler is at work."""

    level = "warning"
    template = "the stop waits for the app: it is {handler}"
    handler: str


class MessageSkipped(Notice):
    """An operator has passed a message over."""

    level = "warning"
    template = "{who} {what}"
    apart = ("what",)
    who: str
    what: str


class LettersRetried(Notice):
    """An upgrade retries what a version before it had refused."""

    template = "the upgrade to version {version} retries dead letters that were refused"
    version: int
    count: int


class LetterNotRetried(Notice):
    """An upgrade can't retry such a dead letter."""

    level = "warning"
    template = "the upgrade to version {version} can't retry the dead letter {letter}: {reason}"
    version: int
    letter: str  # its record, message and part
    reason: str


class LetterUnreadable(Notice):
    """A dead letter is damaged."""

    level = "error"
    template = "{problem}: it is not retried"
    problem: str


# --- streams ----------------------------------------------------------------------------------------------------------


class StreamStopped(Notice):
    """An output stream stands still, by what its receiver says or is."""

    level: ClassVar[Level] = "error"
    template = "stream stopped: {reason}; its messages are kept"
    peer: str
    reason: str


class StreamWaits(StreamStopped):
    """An output stream stands still, since the receiver's log is full."""

    level = "warning"


class StreamReset(Notice):
    """The receiver of a stream that an operator has reset says how much it has."""

    level = "warning"
    template = "the stream was reset and goes on"
    peer: str
    behind_position: int
    receiver_has: int


class PeerForgotten(Notice):
    """An operator has reset a peer."""

    level = "warning"
    template = "what was known of a peer's log is forgotten"
    peer: str


class LogReclaimed(Notice):
    """An operator says that this log counts."""

    level = "warning"
    template = "this log counts from now on, and no copy of it"
    epoch: int


class PeerRefused(Notice):
    """An input stream is refused."""

    level: ClassVar[Level] = "error"
    template = "stream refused: {reason}"
    peer: str
    reason: str


class OldPeerRefused(PeerRefused):
    """An input stream is refused for its epoch: that of an older copy."""

    level = "warning"


class FrameRefused(Notice):
    """A peer sends more than it was granted."""

    level = "error"
    template = "a frame was refused: {reason}; this is said once"
    peer: str
    reason: str


# --- back-pressure ----------------------------------------------------------------------------------------------------


class _Load(Notice):
    peer: str
    memory_mib: float
    spilled_mib: float


class InMemoryAgain(_Load):
    """A stream has nothing on disk any more."""

    template = "all that waits for {peer!r} is in memory again"


class AppWaitsFor(_Load):
    """Memory is full, and the receiver takes what it can."""

    template = "the app waits for {peer!r}, to which it calls faster than that can take it"


class Spills(_Load):
    """Memory is full, and the receiver takes too little."""

    level = "warning"
    template = "{peer!r} {state}: {limit_mib} MiB for it are in memory, more goes to disk"
    state: str
    limit_mib: float


class HeldUp(_Load):
    """Memory and disk are full."""

    level = "warning"
    template = (
        "{peer!r} {state}: the app is held up, the limits are {limit_mib} MiB in memory and {spill_limit_mib} MiB on"
        " disk"
    )
    state: str
    limit_mib: float
    spill_limit_mib: float
