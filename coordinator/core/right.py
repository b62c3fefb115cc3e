"""The right to write the log: one coordinator has it at a time, and all parts of the machine ask what this one may.

    STARTING --RightGranted---------------------------------------> LOADING --LogLoaded--> WRITING
        '----RightHeld, and it is to follow--> FOLLOWING --RightGranted--^

Who has the right keeps it until another is given it: then the log takes nothing more of this one, which stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    STARTING = "waiting for the right to write the log"
    FOLLOWING = "following"
    LOADING = "loading the log"
    WRITING = "writing"


@dataclass(slots=True, eq=False, repr=False)
class Right:
    """``follows`` and ``writes`` are the role as plain values, since each turn asks for them."""

    role: Role = Role.STARTING
    follows: bool = False
    writes: bool = False
    fence: int = 0  # the term of the right, once it is granted
    is_granted: bool = False  # to this one, and the log is not loaded yet
    is_loaded: bool = False  # all parts of the machine know what the log says, as of some moment
    holder: str = ""  # who has it while this one follows, in words

    @property
    def may_read(self) -> bool:
        """What an app is to be told is in the log, and there is nobody else's right to wait for."""
        return self.writes or (self.follows and self.is_loaded)

    def become(self, role: Role) -> None:
        self.role = role
        self.follows = role is Role.FOLLOWING
        self.writes = role is Role.WRITING
