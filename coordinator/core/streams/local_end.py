"""This instance's end of all its streams: who it is, and what they share."""

from __future__ import annotations

from dataclasses import dataclass

from immortal.coordinator.core.effects import Effect
from immortal.coordinator.core.group_commit import GroupCommit
from immortal.coordinator.core.limits import Limits
from immortal.protocol.peer import FrameType, PeerFrame, RefusedCode


@dataclass(slots=True, eq=False, repr=False)
class LocalEnd:
    """Each part of the streams reads it as it is now; the machine, and who is named, change it."""

    name: str
    limits: Limits
    log: GroupCommit
    effects: list[Effect]  # where effects go; the machine's
    committer_id: int = 0
    epoch: int = 0
    ready: bool = False  # the instance has completed its first start
    app_speaks: bool = False  # its calls and answers are as WIRE.md's part 4.1 says: who waits shows
    app_takes_verdicts: bool = False  # it can leave out a call that is refused
    accepting: bool = False  # of new input: by the right to write, and not while stopping
    following: bool = False  # another writes the log: what the app makes goes nowhere
    log_full: str = ""  # why no input is taken from peers, in words; "" if it is
    epoch_began_ns: int = 0  # ns since the Unix epoch
    catching_up: bool = False  # a replay is making messages again: receivers may have more than there are yet
    held: bool = False  # nothing is sent: what was put in place of a cut's losses, or taken back, is not durable yet
    held_ticket: int = 0  # of the last verdict's commit: what the app sends behind it waits for that
    wants_replies: bool = True  # something is held up until a receiver answers
    trim_ticket: int = 0  # of the commit behind which spilled outputs can be removed from the log; 0: of none

    def frame(
        self,
        frame_type: FrameType,
        receiver: str,
        position: int,
        *,
        count: int = 0,
        time_ns: int = 0,
        payload: bytes = b"",
        code: RefusedCode = RefusedCode.NONE,
        reason: str = "",
    ) -> PeerFrame:
        """One of this instance, in its epoch."""
        return PeerFrame(
            frame_type,
            self.name,
            receiver,
            self.committer_id,
            self.epoch,
            position,
            count,
            time_ns,
            payload,
            code,
            reason,
        )
