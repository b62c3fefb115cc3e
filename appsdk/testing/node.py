"""One instance of an environment: a real coordinator's machine, its log in memory, and the app of its current life."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from appsdk.context import SEED_SIZE_BYTES
from appsdk.definition import Definition
from appsdk.testing.app import LocalApp, earlier
from appsdk.testing.crashes import CrashNow
from appsdk.testing.memory import checkpoint_chunks
from appsdk.testing.outside import OutsideApp
from appsdk.testing.stand_ins import StandInRunner, StandIns
from coordinator.core import effects as ef
from coordinator.core import events as ev
from coordinator.core.machine import Machine
from coordinator.log.memory import MemoryLogStore
from protocol.checksum import crc64
from protocol.errors import ImmortalError

if TYPE_CHECKING:
    from appsdk.testing.world import World


class Node:
    """``definition`` None: the outside, whose app is none of the user's and which never crashes."""

    def __init__(self, world: World, name: str, definition: Definition | None, committer_id: int) -> None:
        self.world = world
        self.name = name
        self.definition = definition
        self.effects: StandIns = {}
        self.store = MemoryLogStore(committer_id)
        self.store.clock_ns = lambda: world.now_ns
        self.machine: Machine | None = None
        self.app: LocalApp | OutsideApp | None = None
        self.life = 0  # of the coordinator
        self.wake_ns: int | None = None
        self.upgrade_to: int | None = None  # what is wished for, until it is done or given up
        self.failure: ImmortalError | None = None  # why the app is down, or the coordinator
        self._to_app: deque[bytes | memoryview] = deque()
        self._jobs: deque[ef.Commit | ef.WriteCheckpointChunk] = deque()  # of the disk
        self._paused = self._closing = False
        self._app_is_lost = False  # it has crashed, and the machine is to hear of it

    @property
    def is_up(self) -> bool:
        return self.machine is not None

    @property
    def local_app(self) -> LocalApp | None:
        return self.app if isinstance(self.app, LocalApp) else None

    # --- life and death ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Coordinator and app begin, from what the log has."""
        self.failure = None
        self.machine = Machine(self.name, self.store.summary(), None, self.upgrade_to)
        self.connect()

    def connect(self) -> None:
        """A new app, beside the coordinator that is there."""
        if self.definition is None:
            self.app = OutsideApp()
        else:
            seed = hashlib.blake2b(f"{self.world.seed} {self.name}".encode(), digest_size=SEED_SIZE_BYTES).digest()
            effects = StandInRunner(self.effects, lambda: self.world.now_ns)
            self.app = LocalApp(self.definition, seed, self.world.now_ns, effects, fails_alone=self.world.fail_alone)
        self.failure = None
        self._paused = self._closing = False
        self.do(lambda: self._handle(ev.AppConnected()))

    def crash(self) -> None:
        """App and coordinator are gone, with all that is not durable."""
        self.store = self.store.crash()
        self._end()

    def crash_app(self) -> None:
        """The app alone is gone; its coordinator waits for the next one."""
        self._drop_app()
        self.do(lambda: self._handle(ev.AppClosed()))

    def _end(self) -> None:
        self._drop_app()
        self.machine = None
        self.life += 1
        self.wake_ns = None
        self._jobs.clear()
        self._app_is_lost = False
        self.world.network.forget_sender(self)

    def _drop_app(self) -> None:
        if self.app is not None:
            self.app.close()
        self.app = None
        self._to_app.clear()

    # --- turns ------------------------------------------------------------------------------------------------------

    def do(self, action: Callable[[], None]) -> None:
        """Everything that this instance does runs in here: it may die of it, and then comes back at once."""
        try:
            action()
            if self._app_is_lost:
                self._app_is_lost = False
                self._handle(ev.AppClosed())
                self.connect()
        except CrashNow:
            self.crash()
            self.start()

    def lose_app(self) -> None:
        """The app crashes here and now. The machine hears of it once it has done what it is at."""
        self._drop_app()
        self._app_is_lost = True

    def handle(self, event: ev.Event) -> None:
        self.do(lambda: self._handle(event))

    def _handle(self, *events: ev.Event) -> None:
        following: list[ev.Event] = list(events)
        while following and self.machine is not None:
            turn, following = following, []
            for effect in self.machine.handle(turn, self.world.now_ns):
                self.world.crashes.point(self)
                self._carry_out(effect, following)
                if self.machine is None:
                    return

    def step(self) -> bool:
        """The next thing that this instance has to do; False if there is nothing."""
        if self._to_app:
            self.do(self._app_reads)
        elif self._jobs:
            self.do(self._disk)
        elif self._closing and self.app is not None:
            self.do(self._app_leaves)
        elif not self._app_tells():
            return False
        return True

    @property
    def next_due_ns(self) -> int | None:
        app_due_ns = None if self.app is None else self.app.next_due_ns
        return earlier(self.wake_ns, app_due_ns)

    def _app_reads(self) -> None:
        data = b"".join(self._to_app)
        self._to_app.clear()
        app = self.app
        if app is None:
            return
        app.receive(data)
        self.world.crashes.point(self)
        self._handle(ev.AppSent(len(data)), *self._said())
        if app.has_died and self.app is app:
            self.lose_app()
            return
        if app.error is not None and self.app is app:
            self.failure = app.error
            self._drop_app()
            self._handle(ev.AppClosed())
            app.error.add_note(f"in the instance {self.name!r}")
            raise app.error

    def _app_tells(self) -> bool:
        """What the app has to say of its own accord: what was sent from outside the handlers, and the time."""
        app, now_ns = self.app, self.world.now_ns
        if self.wake_ns is not None and self.wake_ns <= now_ns:
            self.wake_ns = None
            self.handle(ev.Tick())
            return True
        if app is None:
            return False
        if (due_ns := app.next_due_ns) is not None and due_ns <= now_ns:
            app.tell_time(now_ns)
        app.take_output()
        if not app.output or self._paused:
            return False
        self.do(self._say)
        return True

    def _say(self) -> None:
        self._handle(*self._said())

    def _said(self) -> list[ev.Event]:
        """What the app has to say and may say now, taken out of it."""
        if self.app is None or not self.app.output or self._paused or self._closing:
            return []
        data = bytes(self.app.output)
        self.app.output.clear()
        return [ev.AppData(data)]

    def _app_leaves(self) -> None:
        self._drop_app()
        self._closing = False
        self._handle(ev.AppClosed())

    def _disk(self) -> None:
        job = self._jobs.popleft()
        if isinstance(job, ef.Commit):
            self.store.commit(job.transaction)
            self.world.crashes.point(self)
            self._handle(ev.Committed(job.ticket))
        else:
            self.store.write_checkpoint_chunk(job.checkpoint_id, job.index, job.data)
            self._handle(ev.ChunkWritten(len(job.data)))

    # --- effects ----------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: ef.Effect, following: list[ev.Event]) -> None:
        network = self.world.network
        match effect:
            case ef.SendToApp(data):
                if self.app is not None and not self._closing:
                    self._to_app.append(data)
            case ef.Commit() | ef.WriteCheckpointChunk():
                self._jobs.append(effect)
            case ef.SendToPeer():
                network.send(self, effect)
            case ef.ReplyToPeer():
                network.reply(self, effect)
            case ef.ResetPeer(destination):
                network.forget_sender(self, destination)
            case ef.LoadLog():
                following.append(ev.LogLoaded(self.store.summary()))
            case ef.CheckCheckpoint(header):
                check = 0
                for chunk in checkpoint_chunks(self.store, header.checkpoint_id):
                    check = crc64(chunk, check)
                problem = None if check == header.check else "its bytes are not those that were written"
                following.append(ev.CheckpointChecked(header.checkpoint_id, problem))
            case ef.ReadCheckpointChunk(checkpoint_id, index):
                following.append(ev.CheckpointChunkRead(self.store.read_checkpoint_chunk(checkpoint_id, index)))
            case ef.ReadRecords(first_sequence_id, size_bytes_max):
                following.append(ev.RecordsRead(self.store.read(first_sequence_id, size_bytes_max)))
            case ef.ReadLetters(keys):
                letters = [self.store.letter(key) for key in keys]
                following.append(ev.LettersRead([letter for letter in letters if letter is not None]))
            case ef.PauseApp():
                self._paused = True
            case ef.ResumeApp():
                self._paused = False
            case ef.CloseApp():
                self._closing = True
            case ef.WakeAt(time_ns):
                self.wake_ns = time_ns
            case ef.UpgradeEnded():
                self.upgrade_to = None
            case ef.Stop(error):
                self.store = self.store.crash()
                self._end()
                if error is not None:
                    self.failure = error
                    raise error
            case ef.Report(level, message):
                if level in ("warning", "error"):
                    self.world.reports.append((self.name, message))
