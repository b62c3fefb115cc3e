"""Processes for time travel: a few at a time, each for one log, ended after IDLE_S without a question."""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import IO, Any

import msgspec

from immortal.appsdk.errors import AppError
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import decoding
from immortal.protocol.errors import ImmortalError
from immortal.replay.app_process import OwnCode, code_environment, code_of_record
from immortal.replay.plan import ReplayError
from immortal.replay.travel.traveller import QUESTION_S, MomentExplorer

SESSIONS_MAX = 4
IDLE_S = 300.0
ANSWER_S = 30.0  # a question takes QUESTION_S at most, unless a message needs more time, or hangs
WAIT_S = 30.0  # for another question to the same process
MEMORY_MB = 2048
SAID_CHARACTERS_MAX = 2000  # of the end of a process's stderr


class Sessions:
    """Pool of time-travel processes, for all threads. ``home``: the registry's folder. ``locked``: keeps a log from
    other threads while it is read, as a process can't open one twice. ``question_s``: time for one question, whose
    answer is cut then; ``answer_s``: time after which a process without an answer is ended.
    """

    def __init__(
        self,
        home: Path,
        locked: Callable[[InstanceSettings], AbstractContextManager[None]] = lambda _: nullcontext(),
        question_s: float = QUESTION_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._home = home
        self._limits = question_s, answer_s
        self.locked = locked
        self._lock = threading.Lock()
        self._sessions: dict[_Key, _Session] = {}

    def ask(self, name: str, what: str, **given: Any) -> Any:
        """Return the answer of a process with the code of the record in question; start the process if needed.

        Raises ReplayError.
        """
        key = name, self.code_of(name, given.get("record", given.get("last")))
        session = self._session(key)
        try:
            return session.ask(what, given)
        except _EndedError as error:
            self._end(lambda other: self._sessions.get(other) is session)
            raise ReplayError(str(error)) from None

    def code_of(self, name: str, record: int | None) -> OwnCode:
        """Return the code that handled a record; None: the last record. Raises ReplayError, LogError."""
        settings = Registry(self._home).load(name)
        with self.locked(settings), own_logs.open_reader(settings, check=False) as reader:
            summary = reader.summary()
        record = summary.last_sequence_id if record is None else record
        versions = [start.version for start in summary.versions if start.sequence_id < record]
        return code_of_record(settings, summary, versions[-1] if versions else 1, record)

    def end(self, name: str) -> None:
        """End an instance's processes, so that later ones have today's code."""
        self._end(lambda key: key[0] == name)

    def _end(self, is_meant: Callable[[_Key], bool]) -> None:
        with self._lock:
            ended = [self._sessions.pop(key) for key in list(self._sessions) if is_meant(key)]
        for session in ended:
            session.close()

    def close(self) -> None:
        self._end(lambda key: True)

    def _session(self, key: _Key) -> _Session:
        closed: list[_Session] = []
        with self._lock:
            now_s = time.monotonic()
            for other, one in list(self._sessions.items()):
                if now_s - one.used_s > IDLE_S and not one.is_busy:
                    closed.append(self._sessions.pop(other))
            session = self._sessions.get(key)
            if session is None:
                if len(self._sessions) >= SESSIONS_MAX:
                    idle = [(one.used_s, other) for other, one in self._sessions.items() if not one.is_busy]
                    if not idle:
                        raise ReplayError(f"{SESSIONS_MAX} replays are at work: try again when one of them is done")
                    closed.append(self._sessions.pop(min(idle)[1]))
                session = self._sessions[key] = _Session(self._home, *key, *self._limits)
            session.used_s = now_s
        for one in closed:
            one.close()
        return session


_Key = tuple[str, OwnCode]  # an instance, and the code that replays its records


class _EndedError(Exception):
    """Raised if the process has ended, or was too slow and must be ended."""


class _Session:
    def __init__(self, home: Path, name: str, code: OwnCode, question_s: float, answer_s: float) -> None:
        self._name = name
        self._question_s = question_s
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self.used_s = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        environment = {**os.environ, "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
        environment |= code_environment(code.archive)
        environment.setdefault(MEMORY_VARIABLE, str(MEMORY_MB))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "immortal.replay.travel.sessions", str(home), name, code.app],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            env=environment,
            start_new_session=True,  # Ctrl-C in a terminal ends it by its stdin
        )

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    def ask(self, what: str, given: dict[str, Any]) -> Any:
        """Ask the process a question. Raises ReplayError with its error, _EndedError."""
        if not self._lock.acquire(timeout=WAIT_S):
            raise ReplayError("this replay is at work for somebody else: try again")
        try:
            asked = {"ask": what, "with": given, "end_s": time.monotonic() + self._question_s}
            answer = self._exchange(msgspec.json.encode(asked) + b"\n")
        finally:
            self.used_s = time.monotonic()
            self._lock.release()
        if "error" in answer:
            raise ReplayError(self._with_output(answer["error"]))
        return answer["answer"]

    def _exchange(self, line: bytes) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        end_s, answer = time.monotonic() + self._answer_s, bytearray()
        try:
            stdin.write(line)
            stdin.flush()
            while not answer.endswith(b"\n"):
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not select.select([stdout], [], [], left_s)[0]:
                    raise _EndedError(
                        f"the replay of {self._name} did not answer for {self._answer_s:g} s, and was ended: a handler"
                        " hangs or needs more time"
                    )
                data = os.read(stdout.fileno(), 1 << 20)
                if not data:
                    raise _EndedError(self._exit_text())
                answer += data
        except (OSError, ValueError):
            raise _EndedError(self._exit_text()) from None
        decoded: dict[str, Any] = decoding.decode_json(answer)
        return decoded

    def _exit_text(self) -> str:
        try:
            status = self._process.wait(1)
        except subprocess.TimeoutExpired:  # it has closed its stdout alone
            status = None
        return self._with_output(
            f"the process that replays {self._name} has ended (status {status}): the code of a handler ends it, or it"
            " was killed; ask for an earlier moment"
        )

    def _with_output(self, text: str) -> str:
        size = os.fstat(self._output.fileno()).st_size
        said = os.pread(self._output.fileno(), SAID_CHARACTERS_MAX, max(0, size - SAID_CHARACTERS_MAX))
        os.ftruncate(self._output.fileno(), 0)
        lines = said.decode("utf-8", "replace").strip()
        return f"{text}\n{lines}" if lines else text

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # data that the process did not read
                continue
        self._output.close()


# ``python -m immortal.replay.travel.sessions HOME NAME APP``: one log, and the class that replays it. Each line of
# stdin is a question in JSON.
#
#     {"ask": "moment", "with": {"record": 3, "index": 0}}      answer: {"answer": {...}} or {"error": TEXT}
#
# The process ends with its stdin. Output of the user's code goes to stderr. The process never sends anything, and only
# reads the log; but expressions and handlers run with all rights of this process.


CPU_S_MAX = 3600
MEMORY_VARIABLE = "IMMORTAL_TRAVEL_MEMORY_MB"


ASKS = {
    *("overview", "moment", "between", "evaluate", "find", "last_change", "change_behind_checkpoint", "had", "line"),
    *("minimal", "watch", "origin"),
}
"""Methods of :class:`MomentExplorer` that answer questions."""


class Question(msgspec.Struct):
    ask: str
    end_s: float  # of this machine's monotonic clock: the start of the process counts, too
    given: dict[str, Any] = msgspec.field(name="with", default={})


def main(home: str, name: str, app: str) -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    memory_bytes = int(os.environ.get(MEMORY_VARIABLE, "2048")) << 20
    # Not the address space: the mapped log takes as much of that as it can grow to.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with ExitStack() as stack:
        traveller: MomentExplorer | None = None
        for line in sys.stdin.buffer:
            try:
                if traveller is None:
                    traveller = _traveller(Registry(home).load(name), app, stack)
                question = decoding.decode_json(line, type=Question)
                if question.ask not in ASKS:
                    raise ReplayError(f"{question.ask!r} is no question: {', '.join(sorted(ASKS))} are")
                traveller.begin(question.end_s)
                _answer(answers, {"answer": getattr(traveller, question.ask)(**question.given)})
            except (ImmortalError, AppError) as error:
                _answer(answers, {"error": str(error)})
            except MemoryError:
                _answer(answers, {"error": f"it needs more than {memory_bytes >> 20} MiB of memory"})
                return
            except (Exception, SystemExit) as error:  # raised by the user's class when it is loaded or restored
                _answer(answers, {"error": f"{type(error).__name__}: {error}"})


def _traveller(settings: InstanceSettings, app: str, stack: ExitStack) -> MomentExplorer:
    """Open the log with ``app``. A class of an older version can be gone; today's class then has it in its chain.
    Raises LogError, ReplayError, AppError.
    """
    reader = own_logs.open_reader(settings)
    try:
        try:
            made = MomentExplorer(reader, app)
        except ReplayError:
            if settings.app in (None, app):
                raise
            made = MomentExplorer(reader, str(settings.app))
    except BaseException:
        reader.close()
        raise
    stack.callback(reader.close)
    return made


def _answer(answers: IO[bytes], answer: dict[str, Any]) -> None:
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:4])
