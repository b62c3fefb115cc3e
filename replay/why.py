"""Explains a value of a state: the message and the line that set it, the sender of that message, and so on back to the
input from outside. All of it is found by replay, since no log says which message caused a call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any

from msgspec import Struct, convert, field

from immortal.coordinator.core.formatting import time_text
from immortal.coordinator.instances import own_logs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.open import log_exists
from immortal.coordinator.log.reader import LogReader
from immortal.coordinator.log.record_contents import DecodedMessage, first_record_at, read_record
from immortal.protocol.client_frames import CLIENTS
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import RpcKind, RpcType
from immortal.protocol.system_methods import CLOCK_METHOD_ID, EFFECT_METHOD_ID, ORDER_METHOD_ID
from immortal.protocol.trailer import BatchKind
from immortal.replay.plan import ReplayError
from immortal.replay.travel.sessions import Sessions

STEPS_MAX = 100
READS_MAX = 10

Values = dict[str, Any]
At = tuple[int, int]
"""Record, and the index of a message in it."""


class Step(Struct):
    """Message of the chain of causes. ``record`` None: the message is unknown, and ``note`` says why.

    ``call``: the message as text. ``line``: the code that set the value, or that made the next call of the chain.
    ``behind``: lines before it that made what it used, the newest first. ``handler``: the async handler that ran that
    line, if another message had begun it. ``outside``: the origin of the message, if no message caused it. ``role``:
    its relation to the next step: "sent" it, "began" its handler, "had": brought a result that its handler received
    earlier, or "set" the value at ``path`` that it read.
    """

    instance: str
    record: int | None = None
    message: int | None = None
    role: str = ""
    path: str = ""
    time: str = ""
    call: str = ""
    line: Values | None = None
    behind: list[Values] = field(default_factory=list)
    handler: str | None = None
    outside: str = ""
    note: str = ""
    causes: list[Step] = field(default_factory=list)

    def walk(self, depth: int = 0, *, is_alone: bool = True) -> Iterator[tuple[int, Step]]:
        """Yield the step and its causes, each with its depth, the newest first. ``is_alone``: there is no other cause
        beside it, so its only cause is no deeper."""
        yield depth, self
        is_only = len(self.causes) == 1
        for cause in self.causes:
            yield from cause.walk(depth if is_only and is_alone else depth + 1, is_alone=is_only)

    def lines(self, depth: int) -> Iterator[str]:
        """Yield the step alone as text."""
        indent = "  " * depth
        roles = {"sent": "<- ", "had": "<- having had ", "began": "<- begun by ", "set": f"<- reading {self.path}, of "}
        role = roles.get(self.role, "")
        name = self.instance if self.record is None else f"{self.instance} {self.record}:{self.message}"
        yield indent + role + "  ".join(filter(None, (name, self.time, self.call)))
        if self.handler is not None:
            yield f"{indent}     continues in: {self.handler}"
        if self.line is not None:
            yield f"{indent}     {_line_text(self.line)}"
        for line in self.behind:
            yield f"{indent}       behind {_line_text(line)}"
        if self.note:
            yield f"{indent}     {self.note}"
        if self.outside:
            yield f"{indent}     from outside: {self.outside}"


class Explanation(Struct):
    """Explanation of a value. ``before``, ``value``: the value as JSON before and after the first step."""

    path: str
    before: str
    value: str
    step: Step

    def lines(self) -> Iterator[str]:
        yield f"{self.step.instance}: {self.path} is {self.value}, and was {self.before} before this:"
        for depth, step in self.step.walk():
            yield from step.lines(depth)


class Input(Struct):
    """Input of an instance. ``call``: as text. ``code``: as a line of a test, if there is one."""

    record: int
    message: int
    call: str
    code: str | None


class Minimal(Struct):
    """Fewest inputs of one instance that give a value. ``of``: the number of all inputs after record ``begins_at``;
    ``tried``: the number of replays without some of them. ``value``: as a literal of Python, if there is one.
    """

    instance: str
    path: str
    of: int
    tried: int
    is_cut: bool
    begins_at: int
    inputs: list[Input]
    module: str
    class_name: str = field(name="class")
    value: str | None

    def lines(self) -> Iterator[str]:
        fewest = "the fewest found in time" if self.is_cut else "of which none can be left out"
        since = "the first start" if self.begins_at < 0 else f"record {self.begins_at}"
        yield f"inputs since {since} that give it this value: {len(self.inputs)} of {self.of}, {fewest}"
        for one in self.inputs:
            yield f"  {one.record}:{one.message}  {one.call}"

    def test_source(self) -> str:
        """Return a test for pytest that gives a new instance these inputs. Raises ReplayError if no test can."""
        if self.begins_at >= 0:
            raise ReplayError(
                f"no test can begin as {self.instance} did at record {self.begins_at}, its oldest checkpoint: a test"
                " begins with the first start"
            )
        calls = []
        for one in self.inputs:
            if one.code is None:
                raise ReplayError(f"a test can't send record {one.record}, message {one.message}: {one.call}")
            calls.append(f"        {one.code}\n        env.run()\n")
        if self.value is None:
            raise ReplayError(f"{self.path} is no plain value, which a test could name: give the path to a part of it")
        return (
            f"from immortal.testing import Environment\nfrom {self.module} import {self.class_name}\n\n\n"
            f"def test_why() -> None:\n    with Environment(fail_alone=True) as env:\n"
            f"        service = env.start({self.class_name}, {self.instance!r})\n{''.join(calls)}"
            f"        assert service.state.{self.path} == {self.value}\n"
        )


class Explainer:
    """Search for the causes of one value in the logs of a registry. It answers one question.

    ``steps_max``, ``limit_s``: it follows so many messages at most, and begins no more of them after that time.
    ``reads_max``: maximum of values that these read and whose causes it follows, too.
    """

    def __init__(
        self,
        registry: Registry,
        sessions: Sessions,
        steps_max: int = STEPS_MAX,
        reads_max: int = READS_MAX,
        limit_s: float = inf,
    ) -> None:
        self._registry = registry
        self._sessions = sessions
        self._until_s = time.monotonic() + limit_s
        self._steps_left = steps_max
        self._reads_left = reads_max
        self._reading: deque[tuple[Step, list[str] | None]] = deque()  # steps, and what each read; None: look
        self._seen: set[tuple[str, int | None, int | None]] = set()

    def explain(self, name: str, path: str, record: int | None = None, message: int | None = None) -> Explanation:
        """Explain the value at ``path`` after a message; None: the last one of the record, or of the log.

        Raises ReplayError if no message of the log set the value; raises the errors of a replay.
        """
        if record is None:
            with self._reader(name) as reader:
                record = reader.last_sequence_id()
            if record < 0:
                raise ReplayError(f"the log of {name} has no record yet")
        step, found = self._last_change(name, path, record, message)
        if isinstance(step, tuple):
            made = self._step(name, step, "", {"path": path})
            self._follow_reads()
            return Explanation(path, found["old"], found["new"], made)
        return Explanation(path, found["now"] or "absent", found["began"] or "absent", step)

    def _last_change(self, name: str, path: str, record: int, message: int | None) -> tuple[At | Step, Values]:
        """Return the last message that changed a value, or an upgrade that did as a step. Raises ReplayError."""
        asked, began = record, None
        while True:  # each stretch of the log by the code that handled it
            found = self._sessions.ask(name, "change_behind_checkpoint", record=record, index=message, path=path)
            if record != asked and found["now"] != began and not found["is_cut"]:
                step = Step(name, note=f"the upgrade after record {record} converted it, and no message changed it")
                return step, found | {"began": began}
            if found.get("at") is not None and not found["is_cut"]:
                return tuple(found["at"]), found
            if found["is_oldest"] or found["is_cut"]:
                raise ReplayError(_not_found(name, path, asked, found))
            record, message, began = found["since"], None, found["began"]

    def minimal(self, found: Explanation) -> Minimal:
        """Find the fewest inputs that give the same value. Raises ReplayError."""
        step, path = found.step, found.path
        if step.record is None:
            raise ReplayError(f"{path}: an upgrade made that value, so there are no inputs to look for")
        own = [one for _, one in step.walk() if one.instance == step.instance and one.record is not None]
        how = {"path": path, "likely": [(one.record, one.message) for one in own]}
        answer = self._sessions.ask(step.instance, "minimal", record=step.record, index=step.message, **how)
        return convert({"instance": step.instance, "path": path, **answer}, Minimal)

    def _step(self, name: str, at: At, role: str, how: Values) -> Step:
        """Return a message as a step with its line and causes. ``how``: arguments of :meth:`MomentExplorer.line`."""
        step = Step(name, *at, role=role)
        is_new = self._is_new(step)
        if not is_new and role != "set":
            return step
        try:
            found = self._sessions.ask(name, "line", record=at[0], index=at[1], **how)
            step.call, step.line, step.handler = found["message"], found["line"], found["handler"]
            step.behind = found["behind"]
            if found["is_cut"]:
                step.line, step.note = None, "the line was not found in time"
            elif not found["changed"] and not role:
                step.note = "an upgrade before this message converted it, and no message changed it"
            elif step.line is None:
                step.note = "no line of the app's code did that"
        except ImmortalError as error:
            step.note, found = f"the line is not known: {_first_line(error)}", {"began": None, "read": []}
        if not is_new:
            return step
        began = found["began"]
        if began is None or tuple(began) == at:
            step.handler = None
        self._reading.append((step, found["read"]))
        self._follow(step)
        if step.handler is not None:
            step.causes += self._had(step, tuple(began), found["number"])
            step.causes.append(self._start(name, tuple(began), step.handler))
        return step

    def _had(self, step: Step, began: At, number: int) -> Iterator[Step]:
        """Yield the messages whose results the async handler of a step received earlier, the newest first."""
        asked = {"number": number, "began": began, "record": step.record, "index": step.message}
        try:
            found = self._sessions.ask(step.instance, "had", **asked)
        except ImmortalError as error:
            step.note = step.note or f"its earlier results are not known: {_first_line(error)}"
            return
        if found["is_cut"]:
            step.note = step.note or "not all its earlier results were found in time"
        for record, message, call in reversed(found["had"]):
            cause = Step(step.instance, record, message, role="had", call=call)
            if self._is_new(cause):
                self._reading.append((cause, None))
                self._follow(cause)
            yield cause

    def _start(self, name: str, at: At, call: str) -> Step:
        """Return the message that began an async handler, which continued with another one."""
        if at[0] < 0:
            return Step(name, role="began", call=call, note="it began in an earlier version: no log says where")
        step = Step(name, *at, role="began", call=call)
        self._reading.append((step, None))
        if self._is_new(step):
            self._follow(step)
        return step

    def _follow_reads(self) -> None:
        """Add what set the values that the steps read, the nearest first, each once."""
        known: set[tuple[str, At, str]] = set()
        while self._reading and self._reads_left > 0 and time.monotonic() <= self._until_s:
            step, paths = self._reading.popleft()
            name, record, message = step.instance, step.record, step.message
            assert record is not None
            assert message is not None
            if paths is None:
                with suppress(ImmortalError):  # its code can't be run any more
                    found = self._sessions.ask(name, "line", record=record, index=message, path=None)
                    paths, step.behind = found["read"], found["behind"]
            for path in (paths or [])[: self._reads_left]:
                self._reads_left -= 1
                with suppress(ImmortalError):  # it has this value since the first start, say
                    before = (record, message - 1) if message else (record - 1, None)
                    at, _ = self._last_change(name, path, *before)
                    if isinstance(at, tuple) and (name, at, path) not in known and self._steps_left:
                        known.add((name, at, path))
                        cause = self._step(name, at, "set", {"path": path})
                        cause.path = path
                        step.causes.append(cause)

    def _is_new(self, step: Step) -> bool:
        """Return True if the step must be followed; otherwise note in it why not."""
        key = step.instance, step.record, step.message
        if key in self._seen:
            step.note = "as above"
        elif not self._steps_left:
            step.note = "not followed further: --steps is the limit"
        elif time.monotonic() > self._until_s:
            step.note = "not followed further: the time was up"
        else:
            self._steps_left -= 1
            self._seen.add(key)
            return True
        return False

    def _follow(self, step: Step) -> None:
        """Add the sender of the message, or its origin outside."""
        try:
            message, step.time = self._message(step.instance, step.record, step.message)
        except ImmortalError as error:
            step.note = step.note or _first_line(error)
            return
        step.outside = _outside(message, step.instance)
        if not step.outside:
            step.causes.append(self._sender(step, message))

    def _sender(self, step: Step, message: DecodedMessage) -> Step:
        sender = message.source.name or step.instance
        to = step.instance if message.source.name else ""
        try:
            last = self._record_then(sender, message.source.send_time_ns) if to else step.record
            found = self._sessions.ask(sender, "origin", destination=to, position=message.position, record=last)
        except ImmortalError as error:
            return Step(sender, role="sent", note=f"what made this call is not known: {_first_line(error)}")
        if found["at"] is None:
            why = "its log was not searched in time" if found["is_cut"] else "its log does not reach back that far"
            return Step(sender, role="sent", note=f"what made this call is not known: {why}")
        how = {"path": "", "destination": to, "number": found["number"]}
        return self._step(sender, tuple(found["at"]), "sent", how)

    # --- the logs -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _reader(self, name: str) -> Iterator[LogReader]:
        """Open the log of an instance. Raises RegistryError, ReplayError if it is not here."""
        settings = self._registry.load(name)
        if not log_exists(settings.log):
            raise ReplayError(f"the log of {name} is not here")
        with self._sessions.locked(settings), own_logs.open_reader(settings, check=False) as reader:
            yield reader

    def _message(self, name: str, record: int | None, index: int | None) -> tuple[DecodedMessage, str]:
        """Return a message and the time of its record. Raises ReplayError."""
        assert record is not None
        assert index is not None
        with self._reader(name) as reader:
            for logged in reader.records(record, record):
                committer_id = reader.identity.committer_id
                found = logged.problem or read_record(logged.value, record, committer_id, whole=True)
                if isinstance(found, str):
                    raise ReplayError(found)
                return found.messages[index], time_text(found.trailer.time_ns)
        raise ReplayError(f"record {record} is not in the log of {name} any more")

    def _record_then(self, name: str, time_ns: int) -> int:
        """Return the last record of that time or before. It is a guess, since clocks differ."""
        with self._reader(name) as reader:
            return max(first_record_at(reader, time_ns + 1) - 1, 0)


def _outside(message: DecodedMessage, name: str) -> str:
    """Describe the origin of a message from outside; "" if a message of an instance caused it."""
    kind, rpc = message.source.kind, message.rpc
    if kind == BatchKind.CLIENT:
        return f"the request of client {message.source.name.removeprefix(CLIENTS)}"
    if kind == BatchKind.INITIAL or rpc is None:
        return "the first start"
    if rpc.kind == RpcKind.CALL:
        own = {CLOCK_METHOD_ID: "a timer", EFFECT_METHOD_ID: "the result of an effect", ORDER_METHOD_ID: "an operator"}
        if rpc.method_id in own:
            return own[rpc.method_id]
        if rpc.rpc_type == RpcType.IMPULSE:
            return f"an impulse of {message.source.name or name}"
    return ""


def _not_found(name: str, path: str, record: int, found: Values) -> str:
    if found["is_cut"]:
        return (
            f"{name}: no change of {path} was found in time, looking back from record {record}: give an earlier"
            " moment by --at, or more time by --timeout-s"
        )
    since = found["since"]
    if found["now"] is None:
        return (
            f"{name} has no value at {path}, now or before: 'immortal replay {name} --to {record} --state'"
            " shows the whole state"
        )
    if since is None or since < 0:
        return f"{name}: {path} is {found['now']} since the first start: __init__ made it, and no message changed it"
    return (
        f"{name}: {path} is {found['now']} since record {since}, the oldest checkpoint, or before: ask a copy of the"
        " log that reaches back further ('immortal restore'), or keep more with the setting keep_checkpoints"
    )


def _line_text(line: Values) -> str:
    return f"{line['file']}:{line['line']}, in {line['function']}: {line['text']}"


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]
