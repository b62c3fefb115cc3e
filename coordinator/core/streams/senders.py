"""Who may send: a frame is of the sender that is known by that name here, or it is refused."""

from __future__ import annotations

from collections import OrderedDict

from immortal.coordinator.core.effects import Report
from immortal.coordinator.core.interfaces import IMPULSES, LogSummary
from immortal.coordinator.core.notices import OldPeerRefused, PeerRefused
from immortal.coordinator.core.streams import problems
from immortal.coordinator.core.streams.grants import Grants
from immortal.coordinator.core.streams.input_stream import InputStream
from immortal.coordinator.core.streams.local_end import LocalEnd
from immortal.protocol.client import CLIENTS
from immortal.protocol.peer import KNOWN_TO_RECEIVERS, FrameType, PeerFrame, RefusedCode


class Senders:
    """``streams``: the input streams, by sender. Names that only say Hello, or are refused, leave little for long."""

    def __init__(self, end: LocalEnd, grants: Grants) -> None:
        self.streams: dict[str, InputStream] = {}
        self.refused: OrderedDict[str, str] = OrderedDict()  # why, of senders without a stream
        self._greeted: OrderedDict[str, None] = OrderedDict()  # those of which nothing was taken yet
        self._end = end
        self._grants = grants

    def load(self, summary: LogSummary) -> None:
        """What the log says."""
        for source, known in summary.sources.items():
            if source != IMPULSES:
                self.streams[source] = InputStream(source, known)

    def stream(self, source: str) -> InputStream:
        """Of ``source``, new if there is none."""
        stream = self.streams.get(source)
        if stream is None:
            stream = self.streams[source] = InputStream(source, None)
        return stream

    def refusal(self, frame: PeerFrame) -> tuple[RefusedCode, str] | None:
        """Why ``frame`` is not taken or answered; None if it is. A Hello makes its sender known."""
        name, sender, is_hello = self._end.name, frame.sender, frame.frame_type is FrameType.HELLO
        if frame.frame_type is FrameType.UNKNOWN:
            return RefusedCode.UNKNOWN, f"{frame.reason} is not known here: {KNOWN_TO_RECEIVERS}"
        if frame.receiver != name:
            return RefusedCode.NOT_ME, f"this is {name!r}, the message is for {frame.receiver!r}"
        if sender in ("", IMPULSES, name) or sender.startswith(CLIENTS):
            return RefusedCode.MALFORMED, f"no peer can be called {sender!r}"
        known = self.streams.get(sender)
        stream = known or InputStream(sender, None)  # kept if it is accepted
        refused = stream.refusal(frame)
        if refused is None and is_hello and frame.position > stream.durable and not stream.was_reset:
            reason = problems.has_less_than_once(name, sender, stream.durable, frame.position)
            refused = RefusedCode.ROLLED_BACK, reason
        if refused is None and self._end.log_full:
            refused = RefusedCode.LOG_FULL, self._end.log_full
        if refused is not None:
            self._note_refused(frame, stream, *refused, is_known=known is not None)
            return refused
        stream.error = ""
        if known is None and is_hello:
            self._add(stream)
        return None

    def _note_refused(
        self, frame: PeerFrame, stream: InputStream, code: RefusedCode, reason: str, *, is_known: bool
    ) -> None:
        """The same reason is told once."""
        sender, effects = frame.sender, self._end.effects
        told, stream.error = stream.error == reason, reason
        if not is_known:
            told = self.refused.pop(sender, "") == reason
            self.refused[sender] = reason
            if len(self.refused) > self._end.limits.refused_senders_max:
                self.refused.popitem(last=False)
        if code is RefusedCode.LOG_FULL or told:
            return  # that the log is full is told once, for all peers
        if code is not RefusedCode.STALE_EPOCH:
            effects.append(Report(PeerRefused(sender, reason)))
        elif frame.frame_type is FrameType.HELLO:  # one that was late is no error: its sender knows
            effects.append(Report(OldPeerRefused(sender, problems.perhaps_older(self._end.name, sender, reason))))

    def _add(self, stream: InputStream) -> None:
        self.streams[stream.source] = stream
        self.refused.pop(stream.source, None)
        self._greeted[stream.source] = None
        while len(self._greeted) > self._end.limits.greeted_senders_max:
            name, _ = self._greeted.popitem(last=False)
            if self.streams[name].is_empty:
                del self.streams[name]
                self._grants.forget(name)
