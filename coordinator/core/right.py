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


@dataclass(slots=True)
class Right:
    """``follows`` and ``writes`` are the role as plain values, since each turn asks for them."""

    role: Role = Role.STARTING
    follows: bool = False
    writes: bool = False
    fence: int = 0  # the term of the right, once it is granted
    holder: str = ""  # who has it while this one follows, in words

    def become(self, role: Role) -> None:
        self.role = role
        self.follows = role is Role.FOLLOWING
        self.writes = role is Role.WRITING
