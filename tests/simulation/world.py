"""Several real coordinators' machines over a simulated disk, network and clock, all drawn from one seed.

The disk answers late and loses what it had not answered. The network delays, loses, duplicates and reorders; a message
is sent again until it is answered (the messenger's promise), to whichever life of the receiver is up. Apps and
coordinators die at any effect. The apps are small, deterministic and count everything; `check` compares them with what
must have been.
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import dataclass, field

from coordinator.core import effects as ef
from coordinator.core import events as ev
from coordinator.core.limits import Limits
from coordinator.core.machine import Machine
from coordinator.core.session import Phase
from coordinator.log.memory import MemoryLogStore
from protocol.batch import decode_batch
from protocol.extensions import (
    ALL_EXTENSIONS,
    AppDescription,
    Hello,
    decode_impulses_accepted,
    decode_version,
    encode_app_batch,
    encode_app_description,
    encode_hello,
)
from protocol.messages import (
    MessageType,
    RpcType,
    decode_incoming_rpc,
    decode_messages,
    encode_attach_to,
    encode_checkpoint,
    encode_incoming_rpc,
    encode_message,
)
from protocol.peer import decode_frame, encode_frame
from protocol.readers import BlobData, BlobStart, RecordReader

TINY = Limits(
    group_size_bytes=400,
    log_pending_bytes=2000,
    output_memory_bytes=180,
    spill_limit_bytes=1500,
    spill_row_bytes=60,
    spill_trim_bytes=200,
    recent_ns=20_000,
    receive_budget_bytes=500,
    grant_bytes_min=50,
    peer_window_bytes=300,
    peer_window_frames=4,
    peer_frame_bytes=120,
    peer_gather_bytes=60,
    app_window_bytes=500,
    read_size_bytes=300,
    chunk_size_bytes=64,
    chunks_pending_bytes=256,
    checkpoint_trigger_bytes=6000,
)

METHOD_TICK, METHOD_FROM_PEER, METHOD_OWN, METHOD_OUTSIDE, METHOD_INITIAL = 1, 2, 3, 4, -1


class SimulatedApp:
    """Ticks are impulses to itself; each tick calls all peers and, every third time, itself. Peers' calls are listed.

    Beside that it sends impulses to its peers, which no replay makes again. Each version words its calls to itself in
    its own way, so that a record that the wrong version handles shows. Half of its checkpoints are snapshots.
    """

    def __init__(self, name: str, peers: list[str], tick_count: int, world: World, version: int) -> None:
        self.name, self.peers, self.tick_count, self.world = name, peers, tick_count, world
        self.reader = RecordReader()
        self.blob: list[bytes] | None = None
        self.primary = False
        self.state: dict = {}
        self.out = bytearray(encode_hello(Hello(ALL_EXTENSIONS, name)))
        self.out += encode_app_description(AppDescription(version))
        self.version = version  # the one that it is run for
        self.upgrading_to = 0
        self.snapshot: deque[bytes] = deque()  # what is still to be said of the one on its way
        for peer in peers:
            self.out += encode_attach_to(peer)
        self.dead = False
        self.ticks_sent = 0
        self.impulses: list[tuple[str, int] | None] = []  # (peer, number) by count; None for a tick
        self.accepted = 0

    def receive(self, data: bytes) -> None:
        self.reader.receive_data(bytes(data))
        while (event := self.reader.next_event()) is not None:
            if isinstance(event, BlobStart):
                self.blob = []
            elif isinstance(event, BlobData):
                assert self.blob is not None
                self.blob.append(event.data)
                if event.last:
                    self.state = json.loads(b"".join(self.blob))
                    self.blob = None
            else:
                self._record(event.header.sequence_id, event.content)

    def _record(self, sequence_id: int, content: bytes) -> None:
        if sequence_id >= 0:
            assert sequence_id == self.state["sequence_id"] + 1, f"record {sequence_id} behind {self.state}"
            self.state["sequence_id"] = sequence_id
        for message_type, start, end in decode_messages(content):
            self._message(message_type, content[start:end])

    def _message(self, message_type: int, data: bytes) -> None:
        if message_type == MessageType.RECORD_TIME:
            time_ns = int.from_bytes(data, "little")
            assert time_ns >= self.state["time_ns"], "time went back"
            self.state["time_ns"] = time_ns
        elif message_type == MessageType.RPC:
            self._call(data)
        elif message_type == MessageType.RPC_BATCH:
            _, start = decode_batch(data)
            for _, first, last in decode_messages(data[start:]):
                self._call(data[start + first : start + last])
        elif message_type == MessageType.INITIAL_MESSAGE:
            assert data == b"begin"
            assert not self.state["begun"], "begun twice"
            self.state["begun"] = True
        elif message_type == MessageType.TAKE_BECOMING_PRIMARY_CHECKPOINT:
            if not self.state:
                self.state = {"sequence_id": -1, "time_ns": 0, "begun": False, "ticks": 0, "own": [], "from": {}}
                self.state["version"] = self.version
                self.state["outside"] = {}
                self.out += encode_message(MessageType.INITIAL_MESSAGE, b"begin")
            self._checkpoint()
            self._become_primary()
        elif message_type == MessageType.TAKE_CHECKPOINT:
            if self.primary and self.world.rng.random() < 0.5:
                self._begin_snapshot()
            else:
                self._checkpoint()
                self._become_primary()
        elif message_type == MessageType.BECOMING_PRIMARY:
            self._become_primary()
        elif message_type == MessageType.VERSION:
            self.upgrading_to = decode_version(data)
        elif message_type == MessageType.UPGRADE_TAKE_CHECKPOINT:
            assert not self.primary
            assert self.upgrading_to == self.state["version"] + 1
            self.state["version"] = self.upgrading_to
            self._checkpoint()
        elif message_type == MessageType.IMPULSES_ACCEPTED:
            count = decode_impulses_accepted(data)
            assert count > self.accepted
            for impulse in self.impulses[self.accepted : count]:
                if impulse is not None:
                    self.world.accepted[self.name, impulse[0]].append(impulse[1])
            self.accepted = count
        elif message_type == MessageType.INSTANCE_NAME:
            assert data.decode() == self.name
        elif message_type == MessageType.GOODBYE:
            pass
        else:
            raise AssertionError(f"message type {message_type}, {data!r}")

    def _call(self, data: bytes) -> None:
        rpc = decode_incoming_rpc(data)
        state = self.state
        if rpc.method_id == METHOD_TICK:
            state["ticks"] += 1
            number = state["ticks"]
            for peer in self.peers:
                self._send(peer, METHOD_FROM_PEER, [self.name, number])
            if number % 3 == 0:
                self._send("", METHOD_OWN, [number, state["version"]])
        elif rpc.method_id == METHOD_FROM_PEER:
            sender, number = json.loads(rpc.arguments)
            state["from"].setdefault(sender, []).append(number)
        elif rpc.method_id == METHOD_OUTSIDE:
            sender, number = json.loads(rpc.arguments)
            state["outside"].setdefault(sender, []).append(number)
        elif rpc.method_id == METHOD_OWN:
            state["own"].append(json.loads(rpc.arguments)[0])

    def _send(self, destination: str, method_id: int, value: object) -> None:
        rpc = encode_incoming_rpc(method_id, RpcType.FORK, json.dumps(value).encode())
        self.out += encode_app_batch(MessageType.STREAM_BATCH, destination, 1, rpc)

    def _checkpoint(self) -> None:
        blob = json.dumps(self.state).encode()
        self.out += encode_checkpoint(len(blob)) + blob

    def _become_primary(self) -> None:
        if not self.primary:
            self.primary = True
            self.ticks_sent = self.state["ticks"]

    def _begin_snapshot(self) -> None:
        rng = self.world.rng
        self.out += encode_message(MessageType.SNAPSHOT_BEGIN)
        blob = json.dumps(self.state).encode()
        size_bytes = rng.randrange(20, 200)
        for start in range(0, len(blob), size_bytes):
            self.snapshot.append(encode_message(MessageType.SNAPSHOT_CHUNK, blob[start : start + size_bytes]))
        why_not = b"no memory" if rng.random() < 0.1 else b""
        self.snapshot.append(encode_message(MessageType.SNAPSHOT_END, why_not))

    def act(self, rng: random.Random) -> bool:
        """Something of its own accord: a part of a snapshot, a few ticks, an impulse to a peer."""
        if self.snapshot:
            self.out += self.snapshot.popleft()
        if not self.primary or len(self.impulses) - self.accepted > 20:
            return False
        acted = False
        while self.ticks_sent < self.tick_count and rng.random() < 0.6:
            self.ticks_sent += 1
            rpc = encode_incoming_rpc(METHOD_TICK, RpcType.IMPULSE, b"")
            self.out += encode_app_batch(MessageType.IMPULSE_BATCH, "", 1, rpc)
            self.impulses.append(None)
            acted = True
        if self.peers and self.ticks_sent < self.tick_count and rng.random() < 0.3:
            peer = rng.choice(self.peers)
            number = self.world.next_outside()
            rpc = encode_incoming_rpc(METHOD_OUTSIDE, RpcType.IMPULSE, json.dumps([self.name, number]).encode())
            self.out += encode_app_batch(MessageType.IMPULSE_BATCH, peer, 1, rpc)
            self.impulses.append((peer, number))
            acted = True
        return acted


@dataclass
class SentMessage:
    """A message of the messenger: sent again until answered."""

    sender: Node
    life: int
    effect: ef.SendToPeer
    parts: list[bytes]
    answered: bool = False


@dataclass
class Node:
    """One instance: its disk, and the machine and app of its current life."""

    name: str
    store: MemoryLogStore
    life: int = 0
    upgrade_to: int | None = None  # the operator's wish
    upgrades: int = 0
    bit_rot: bool = False  # a checkpoint was found damaged in this life
    machine: Machine | None = None
    app: SimulatedApp | None = None
    to_app: deque[bytes] = field(default_factory=deque)
    app_closing: bool = False
    paused: bool = False
    jobs: deque = field(default_factory=deque)  # of the disk
    events: list = field(default_factory=list)
    down_until: int = 0


class World:
    """One run. ``crash_rate``: per step; ``loss_rate``: per delivery."""

    app_type = SimulatedApp

    def __init__(
        self,
        seed: int,
        *,
        names: tuple[str, ...] = ("a", "b"),
        tick_count: int = 40,
        crash_rate: float = 0.02,
        loss_rate: float = 0.1,
        limits: Limits = TINY,
    ) -> None:
        self.rng = random.Random(seed)
        self.names = names
        self.tick_count, self.crash_rate, self.loss_rate, self.limits = tick_count, crash_rate, loss_rate, limits
        self.now_ns = 1_000_000
        self.step_count = 0
        self.crashes = 0
        self.spills_read = 0
        self.nodes = {name: Node(name, MemoryLogStore(index + 1)) for index, name in enumerate(names)}
        self.messages: list[SentMessage] = []  # unanswered
        self.answers: list[tuple[SentMessage, list[bytes]]] = []
        self.accepted: dict[tuple[str, str], list[int]] = {(a, b): [] for a in names for b in names}
        self._outside = 0
        self.trace: list[str] = []

    def next_outside(self) -> int:
        self._outside += 1
        return self._outside

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self, steps_max: int = 60_000) -> None:
        while not self.done():
            self.step_count += 1
            assert self.step_count < steps_max, f"no end in sight: {self.describe()}"
            self.now_ns += self.rng.choice((0, 1, 1000, -500))  # clocks jump
            self._step()

    def done(self) -> bool:
        for node in self.nodes.values():
            app = node.app
            if node.machine is None or app is None or not app.primary or not app.state.get("begun"):
                return False
            if app.state["ticks"] < self.tick_count or len(app.state["own"]) < self.tick_count // 3:
                return False
            if app.accepted < len(app.impulses) or node.jobs:
                return False
            if any(len(app.state["from"].get(peer, ())) < self.tick_count for peer in app.peers):
                return False
            status = node.machine.status(0)
            if any(output["acknowledged"] < output["position"] for output in status["outputs"].values()):
                return False
            if status["backlog_records"] or node.machine._session.phase is not Phase.NORMAL:
                return False
        return True

    def _step(self) -> None:
        rng = self.rng
        node = rng.choice(list(self.nodes.values()))
        if node.machine is None:
            if self.step_count >= node.down_until:
                self._start(node)
            return
        if rng.random() < self.crash_rate and self.step_count < 6000:
            self._crash(node)
            return
        if node.app is None:
            peers = [name for name in self.names if name != node.name]
            versions = node.store.summary().versions
            version = node.upgrade_to or (versions[-1].version if versions else 1)
            node.app = self.app_type(node.name, peers, self.tick_count, self, version)
            node.to_app.clear()
            node.app_closing = node.paused = False
            self._handle(node, [ev.AppConnected()])
            return
        rng.choice((self._app_reads, self._app_writes, self._app_acts, self._disk, self._network, self._network))(node)

    def _start(self, node: Node) -> None:
        summary = node.store.summary()
        if summary.versions and node.upgrade_to is None and self.rng.random() < 0.2:
            node.upgrade_to = summary.versions[-1].version + 1
        node.bit_rot = False
        promote = self.rng.random() < 0.3
        clients = node.store.clients()
        node.machine = Machine(node.name, summary, self.limits, node.upgrade_to, promote=promote, clients=clients)

    def _crash(self, node: Node) -> None:
        self.crashes += 1
        whole = self.rng.random() < 0.5
        self.trace.append(f"{self.step_count} crash {node.name} {'all' if whole else 'app'}")
        if whole:
            node.store = node.store.crash()
            node.life += 1
            node.machine = None
            node.jobs.clear()
            node.app = None
            self.messages = [m for m in self.messages if m.sender is not node]
            node.down_until = self.step_count + self.rng.randrange(200)
        elif node.app is not None:
            node.app = None
            self._handle(node, [ev.AppClosed()])

    # --- the parts of a node -----------------------------------------------------------------------------------------

    def _app_reads(self, node: Node) -> None:
        if node.to_app:
            data = node.to_app.popleft()
            cut = self.rng.randrange(1, len(data) + 1)
            if cut < len(data):
                node.to_app.appendleft(data[cut:])
            node.app.receive(data[:cut])
            self._handle(node, [ev.AppSent(cut)])
        elif node.app_closing:
            node.app = None
            self._handle(node, [ev.AppClosed()])

    def _app_writes(self, node: Node) -> None:
        app = node.app
        if app.out and not node.paused and not node.app_closing:
            cut = self.rng.randrange(1, len(app.out) + 1)
            data = bytes(app.out[:cut])
            del app.out[:cut]
            self._handle(node, [ev.AppData(data)])

    def _app_acts(self, node: Node) -> None:
        node.app.act(self.rng)

    def _disk(self, node: Node) -> None:
        if not node.jobs:
            return
        job = node.jobs.popleft()
        if isinstance(job, ef.Commit):
            node.store.commit(job.transaction)
            self._handle(node, [ev.Committed(job.ticket)])
        else:
            node.store.write_checkpoint_chunk(job.checkpoint_id, job.index, job.data)
            self._handle(node, [ev.ChunkWritten(len(job.data))])

    def _network(self, node: Node) -> None:
        rng = self.rng
        if self.answers and rng.random() < 0.5:
            message, parts = self.answers.pop(rng.randrange(min(len(self.answers), 3)))
            sender = message.sender
            if message.answered or sender.life != message.life or message not in self.messages:
                return
            if rng.random() < self.loss_rate:
                return  # the message is sent again, and answered again
            message.answered = True
            self.messages.remove(message)
            effect = message.effect
            self._handle(sender, [ev.PeerReplied(effect.destination, effect.tag, decode_frame(parts))])
            return
        if not self.messages:
            return
        message = self.messages[rng.randrange(min(len(self.messages), 3))]
        if rng.random() < self.loss_rate:
            return
        receiver = self.nodes[message.effect.destination]
        if receiver.machine is not None:
            frame = decode_frame(message.parts)
            self._handle(receiver, [ev.PeerFrameReceived((message, receiver.life), frame)])

    def _handle(self, node: Node, events: list) -> None:
        """One turn, and those that its effects bring about at once; the process may die between any two effects."""
        while events:
            machine = node.machine
            if machine is None:
                return
            following: list = []
            for effect in machine.handle(events, self.now_ns):
                if self.rng.random() < self.crash_rate / 20 and self.step_count < 6000:
                    self._crash(node)
                    if node.machine is None:
                        return
                self._carry_out(node, effect, following)
            events = following

    def _carry_out(self, node: Node, effect: ef.Effect, following: list) -> None:
        if isinstance(effect, ef.SendToApp):
            if node.app is not None and not node.app_closing:
                node.to_app.append(bytes(effect.data))
        elif isinstance(effect, ef.Commit | ef.WriteCheckpointChunk):
            node.jobs.append(effect)
        elif isinstance(effect, ef.SendToPeer):
            self.messages.append(SentMessage(node, node.life, effect, [bytes(p) for p in encode_frame(effect.frame)]))
        elif isinstance(effect, ef.ReplyToPeer):
            message, life = effect.token
            if life == node.life and not message.answered:
                self.answers.append((message, encode_frame(effect.frame)))
        elif isinstance(effect, ef.ResetPeer):
            self.messages = [
                m for m in self.messages if not (m.sender is node and m.effect.destination == effect.destination)
            ]
        elif isinstance(effect, ef.LoadLog):
            following.append(ev.LogLoaded(node.store.summary()))
        elif isinstance(effect, ef.CheckCheckpoint):
            # One is left: which have been found damaged, a life remembers.
            damaged = not node.bit_rot and self.crash_rate and self.rng.random() < 0.05
            damaged = damaged and len(node.store.summary().checkpoints) > 1
            node.bit_rot = node.bit_rot or bool(damaged)
            following.append(ev.CheckpointChecked(effect.header.checkpoint_id, "bit rot" if damaged else None))
        elif isinstance(effect, ef.ReadCheckpointChunk):
            following.append(
                ev.CheckpointChunkRead(node.store.read_checkpoint_chunk(effect.checkpoint_id, effect.index))
            )
        elif isinstance(effect, ef.ReadRecords):
            following.append(ev.RecordsRead(node.store.read(effect.first_sequence_id, effect.size_bytes_max)))
        elif isinstance(effect, ef.ReadSpilled):
            batches = node.store.read_spilled(
                effect.destination, effect.first_position, effect.last_position, effect.size_bytes_max
            )
            self.spills_read += 1
            following.append(ev.SpilledRead(effect.destination, effect.first_position, batches))
        elif isinstance(effect, ef.PauseApp | ef.ResumeApp):
            node.paused = isinstance(effect, ef.PauseApp)
        elif isinstance(effect, ef.CloseApp):
            node.app_closing = True
        elif isinstance(effect, ef.Trim):
            while node.store.trim(keep_checkpoints=2):
                pass
        elif isinstance(effect, ef.UpgradeEnded):
            assert effect.problem is None, effect.problem
            node.upgrade_to = None
            node.upgrades += 1
        elif isinstance(effect, ef.Stop):
            raise AssertionError(f"{node.name} stopped: {effect.error!r}\n{self.describe()}")
        elif isinstance(effect, ef.Report):
            self.trace.append(f"{self.step_count} {node.name} {effect.level} {effect.message} {dict(effect.fields)}")
            expected = "bit rot" in effect.message or "could not take its checkpoint" in effect.message
            assert effect.level != "error" or expected, self.describe()

    # --- checking --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Exactly once, in order, nothing lost; what was accepted has arrived."""
        ticks = list(range(1, self.tick_count + 1))
        for name, node in self.nodes.items():
            state = node.app.state
            assert state["ticks"] == self.tick_count
            assert state["own"] == [n for n in ticks if n % 3 == 0], f"{name} own {state['own']}"
            for peer in node.app.peers:
                assert state["from"][peer] == ticks, f"{name} from {peer}: {state['from'][peer]}"
                outside = state["outside"].get(peer, [])
                assert outside == sorted(set(outside)), f"{name} impulses of {peer}: {outside}"
                missing = set(self.accepted[peer, name]) - set(outside)
                assert not missing, f"{name} lacks accepted impulses of {peer}: {missing}"

    def describe(self) -> str:
        lines = [f"step {self.step_count}, {len(self.messages)} messages, {len(self.answers)} answers"]
        for name, node in self.nodes.items():
            lines.append(f"{name}: jobs {len(node.jobs)} paused {node.paused} to_app {len(node.to_app)}")
            if node.app is not None:
                state = {key: value for key, value in node.app.state.items() if key in ("ticks", "sequence_id")}
                lines.append(f"   app {state} sent {node.app.ticks_sent} accepted {node.app.accepted}")
            if node.machine is not None:
                lines.append(f"   {node.machine.status(0)}")
        return "\n".join(lines + self.trace[-12:])
