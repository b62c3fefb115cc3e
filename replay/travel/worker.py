"""``python -m replay.travel.worker HOME NAME``: one log, and the class that replays it; a question on each line.

    {"ask": "moment", "with": {"record": 3, "index": 0}}      answer: {"answer": {...}} or {"error": TEXT}

Lines are JSON. It ends with its stdin. What the user's code prints goes to stderr. It never sends anything, and only
reads the log; but expressions and handlers run with all rights of this process.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any

import msgspec

from immortal.appsdk.errors import AppError
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError
from immortal.replay.apps import default_app
from immortal.replay.travel.traveller import Traveller

CPU_S_MAX = 3600
MEMORY_VARIABLE = "IMMORTAL_TRAVEL_MEMORY_MB"


class Question(msgspec.Struct):
    ask: str
    given: dict[str, Any] = msgspec.field(name="with", default={})


def main(home: str, name: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    memory_bytes = int(os.environ.get(MEMORY_VARIABLE, "2048")) << 20
    # Not the address space, of which a log takes as much as it may grow to.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with ExitStack() as stack:
        traveller: Traveller | None = None
        for line in sys.stdin.buffer:
            try:
                if traveller is None:
                    traveller = _traveller(Registry(home).load(name), stack)
                _answer(answers, {"answer": _asked(traveller, decoding.decode_json(line, type=Question))})
            except (ImmortalError, AppError) as error:
                _answer(answers, {"error": str(error)})
            except MemoryError:
                _answer(answers, {"error": f"it needs more than {memory_bytes >> 20} MiB of memory"})
                return
            except (Exception, SystemExit) as error:  # of the user's class, as it is loaded or restored
                _answer(answers, {"error": f"{type(error).__name__}: {error}"})


def _traveller(settings: InstanceSettings, stack: ExitStack) -> Traveller:
    """Raises LogError, ReplayError, AppError."""
    reader = own_logs.open_reader(settings)
    try:
        summary = reader.summary()
        version = summary.versions[-1].version if summary.versions else 1
        made = Traveller(reader, default_app(settings.name, settings.app, summary, version))
    except BaseException:
        reader.close()
        raise
    stack.callback(reader.close)
    return made


def _asked(traveller: Traveller, question: Question) -> Any:
    asks: dict[str, Callable[..., Any]] = {
        "overview": traveller.overview,
        "moment": traveller.moment,
        "evaluate": traveller.evaluate,
        "find": traveller.find,
        "last_change": traveller.last_change,
        "watch": traveller.watch,
        "origin": traveller.origin,
    }
    traveller.begin()
    return asks[question.ask](**question.given)


def _answer(answers: IO[bytes], answer: dict[str, Any]) -> None:
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:3])
