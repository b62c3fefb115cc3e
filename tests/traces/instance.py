"""One instance under a script: the real driver and machine, a log in memory, ports that do nothing by themselves.

Its peers, its app and its disk do what the lines of a trace say; COMMANDS has all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.interfaces import LogSpace
from immortal.coordinator.core.limits import Limits
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.driver.ports import ManualClock, PlainApp, PlainHost, PlainLog, PlainPeers
from immortal.coordinator.driver.turn import Driver
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.extensions import AppDescription, Hello, encode_app_description, encode_hello
from immortal.protocol.messages import MessageType, encode_message
from immortal.protocol.peer_frames import FrameType, PeerFrame, RefusedCode
from immortal.protocol.verdicts import Handling, Verdict, VerdictKind, encode_handling, encode_verdict
from tests.helpers.core import (
    COMMITTER_ID,
    EXTENSIONS,
    NOW_NS,
    PEER_COMMITTER_ID,
    attach,
    call,
    checkpoint,
    first_start,
    rpc,
)
from tests.traces.words import Words

PADDED_SIZE_BYTES = 100  # of the argument of a "large" call

COMMANDS: list[tuple[re.Pattern[str], Callable[..., None]]] = []


def command(pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def known(function: Callable[..., None]) -> Callable[..., None]:
        COMMANDS.append((re.compile(pattern), function))
        return function

    return known


def numbers(first: str, last: str | None) -> range:
    return range(int(first), int(last or first) + 1)


class Instance:
    """Of the name "a". What a line brings about is in :attr:`said`."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.limits = Limits()
        self.store = MemoryLogStore(COMMITTER_ID)
        self.words = Words()
        self._disk_at_once = False
        self._tags: dict[str, int] = {}  # of what was last sent to each peer
        self._unsent_bytes = 0  # sent to the app, whose socket has not taken it
        self._start()

    def do(self, line: str) -> list[str]:
        """One line of a trace; what follows from it. Raises ValueError for a line that nothing here knows."""
        self.said.clear()
        for pattern, function in COMMANDS:
            if found := pattern.fullmatch(line):
                function(self, *found.groups())
                return self.said
        raise ValueError(f"no command is like {line!r}; tests/traces/instance.py has all of them")

    def _start(self, **options: Any) -> None:
        self.clock = ManualClock(NOW_NS)
        self.machine = Machine(Components("a", self.limits, **options))
        inbox: list[ev.Event] = []
        self.log = PlainLog(self.store, inbox)
        ports = PlainApp(), PlainPeers(), self.log, self.clock, PlainHost()
        self.driver = Driver(self.machine, inbox, *ports, observer=self._seen)
        self.driver.start()

    def _seen(self, effect: ef.Effect) -> None:
        self.said += self.words.of(effect)
        if isinstance(effect, ef.SendToPeer):
            self._tags[effect.destination] = effect.tag
        elif isinstance(effect, ef.SendToApp):
            self._unsent_bytes += len(effect.data)

    def handle(self, *events: ev.Event) -> None:
        self.driver.inbox += events
        self.driver.turn()
        while self._disk_at_once and self.log.jobs and not self.machine.stopped:
            self.driver.inbox.append(self.log.work())
            self.driver.turn()

    def app_says(self, data: bytes) -> None:
        self.handle(ev.AppData(data))

    def frame(self, sender: str, frame_type: FrameType, position: int, **fields: Any) -> PeerFrame:
        return PeerFrame(frame_type, sender, "a", PEER_COMMITTER_ID, 1, position, **fields)

    # --- the process -------------------------------------------------------------------------------------------------

    @command(r"limit (\w+) is (\d+)")
    def limit(self, name: str, value: str) -> None:
        """For an instance that has not begun."""
        self.limits = replace(self.limits, **{name: int(value)})
        self._start()
        self.said.clear()

    @command(r"it works")
    def works(self) -> None:
        """All up to normal processing, of which nothing is said."""
        self.disk("works at once")
        self.connect(version="1")
        self.begin("one")
        self.takes_all()
        self.disk("waits")
        self.said.clear()

    @command(r"the process crashes(?:, and is (started to upgrade to|promoted)(?: version (\d+))?)?")
    def crash(self, how: str | None = None, version: str | None = None) -> None:
        """What was durable is left; the next process has no app yet."""
        self.store = self.store.crash()
        self._unsent_bytes = 0
        self._start(promote=how == "promoted", upgrade_to=None if version is None else int(version))

    @command(r"(\d+) s pass")
    def passes(self, seconds: str) -> None:
        self.clock.time_ns += int(seconds) * 10**9
        self.words.now_ns = self.clock.time_ns
        self.handle(ev.Tick())

    @command(r"an operator asks for a (checkpoint|stop)")
    def asked(self, what: str) -> None:
        self.handle(ev.CheckpointRequested() if what == "checkpoint" else ev.StopRequested())

    # --- the disk ----------------------------------------------------------------------------------------------------

    @command(r"the disk (works at once|waits)")
    def disk(self, how: str) -> None:
        self._disk_at_once = how == "works at once"
        self.handle()

    @command(r"the disk does the next( (\d+))?")
    def disk_next(self, _: str | None = None, count: str | None = None) -> None:
        for _ in range(int(count or 1)):
            self.handle(self.log.work())

    @command(r"the log takes (\d+) bytes, the disk has (\d+) left")
    def measured(self, used: str, free: str) -> None:
        self.handle(ev.LogMeasured(LogSpace(int(used), int(free))))

    # --- the app -----------------------------------------------------------------------------------------------------

    @command(r"an app connects(?:, of version (\d+))?(?:, which knows (verdicts))?")
    def connect(self, version: str | None = None, verdicts: str | None = None) -> None:
        self.words.app_connected()
        self._unsent_bytes = 0
        extensions = EXTENSIONS if verdicts else EXTENSIONS - {MessageType.VERDICTS, MessageType.CAREFUL}
        hello = encode_hello(Hello(extensions, "trace")) + encode_app_description(AppDescription(int(version or 1)))
        self.handle(ev.AppConnected(), ev.AppData(hello))

    @command(r"the app begins with the state '(\w+)'")
    def begin(self, state: str) -> None:
        self.app_says(first_start(state.encode()))

    @command(r"the app's state is '(\w+)'")
    def state(self, state: str) -> None:
        self.app_says(checkpoint(state.encode()))

    @command(r"the app takes all")
    def takes_all(self) -> None:
        """Its socket has room again."""
        size_bytes, self._unsent_bytes = self._unsent_bytes, 0
        self.handle(ev.AppSent(size_bytes))

    @command(r"the app attaches to (\w)")
    def attaches(self, destination: str) -> None:
        self.app_says(attach(destination))

    @command(r"the app makes (large )?calls? (\d+)(?:-(\d+))? to (\w|itself)")
    def calls(self, large: str | None, first: str, last: str | None, destination: str) -> None:
        self.app_says(b"".join(_call(number, large, destination) for number in numbers(first, last)))

    @command(r"the app says that message (\d+):(\d+) failed: (.+)")
    def failed(self, sequence_id: str, index: str, text: str) -> None:
        key = int(sequence_id), int(index)
        self.app_says(encode_verdict(Verdict(*key, VerdictKind.UNDONE, "ValueError", text, caller="b")))

    @command(r"the app is at work on record (\d+)")
    def handling(self, sequence_id: str) -> None:
        self.app_says(encode_handling(Handling(int(sequence_id))))

    @command(r"the app can't upgrade: (.+)")
    def upgrade_failed(self, reason: str) -> None:
        self.app_says(encode_message(MessageType.UPGRADE_FAILED, reason.encode()))

    @command(r"the app's connection ends")
    def closed(self) -> None:
        self.handle(ev.AppClosed())

    # --- peers -------------------------------------------------------------------------------------------------------

    @command(r"(\w) says Hello, (\d+) were acknowledged")
    def hello(self, peer: str, position: str) -> None:
        self.handle(ev.PeerFrameReceived(peer, self.frame(peer, FrameType.HELLO, int(position))))

    @command(r"(\w) sends calls? (\d+)(?:-(\d+))?")
    def sends(self, peer: str, first: str, last: str | None) -> None:
        messages = [rpc(number) for number in numbers(first, last)]
        frame = self.frame(peer, FrameType.BATCH, int(first), count=len(messages), payload=b"".join(messages))
        self.handle(ev.PeerFrameReceived(peer, frame))

    @command(r"(\w) (welcomes it, and has|has|asks for what is behind) (\d+)")
    def answers(self, peer: str, what: str, position: str) -> None:
        kinds = {"has": FrameType.TRIM_TO, "asks for what is behind": FrameType.RESEND}
        self._replied(peer, kinds.get(what, FrameType.WELCOME), int(position))

    @command(r"(\w) refuses it: its log is full")
    def refuses(self, peer: str) -> None:
        self._replied(peer, FrameType.REFUSED, 0, code=RefusedCode.LOG_FULL, reason=f"{peer!r} is full")

    def _replied(self, peer: str, frame_type: FrameType, position: int, **fields: Any) -> None:
        frame = self.frame(peer, frame_type, position, **fields)
        self.handle(ev.PeerReplied(peer, self._tags[peer], frame))


def _call(number: int, large: str | None, destination: str) -> bytes:
    argument = number.to_bytes(4, "little").ljust(PADDED_SIZE_BYTES if large else 4, b"\0")
    # A call to itself that nobody made it make is an impulse, which is durable before it is done.
    own = destination == "itself"
    return call("" if own else destination, argument, rpc_type=2 if own else 1)
