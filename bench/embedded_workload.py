"""What both ways of running services are asked to do alike: a line of JSON on standard input for each run."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TextIO

BATCH_CALLS = 1_000  # of one round of Case.ONE_WAY


class Case(enum.StrEnum):
    """Who calls whom. The values are what tables say."""

    CLIENT = "an outside client's awaited call"
    SERVICES = "an awaited call between two services"
    STEP = "a handler's step, its result in the log"
    ONE_WAY = "one-way calls between two services, 1,000 a batch"

    @property
    def calls_per_round(self) -> int:
        return BATCH_CALLS if self is Case.ONE_WAY else 1


@dataclass(frozen=True, slots=True)
class Task:
    """``rounds`` one after the other: a round is an awaited call, or a batch and the answer that it was taken."""

    case: Case
    rounds: int
    size_bytes: int


def encode_task(task: Task) -> str:
    return json.dumps(asdict(task)) + "\n"


def read_tasks(source: TextIO) -> Iterator[Task]:
    for line in source:
        values = json.loads(line)
        yield Task(Case(values["case"]), values["rounds"], values["size_bytes"])
