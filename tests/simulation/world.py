"""One run of a plan: the instances, the faults when they strike, and the end, where all must be complete."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from immortal.coordinator.core import effects as ef
from immortal.coordinator.core import events as ev
from immortal.coordinator.core import notices
from immortal.coordinator.core.interfaces import Transaction
from immortal.coordinator.core.machine import Machine
from immortal.coordinator.core.output.output_stream import StreamState
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.peer_frames import PeerFrame, RefusedCode
from tests.simulation.apps import App, CheckingApp, Outside, doom_of
from tests.simulation.callers import Caller
from tests.simulation.checkers import Checker
from tests.simulation.clock import MS, START_NS, US, Clock
from tests.simulation.disk import Disk
from tests.simulation.failing import calls_that_wait, count_of_answers
from tests.simulation.marks import Marks
from tests.simulation.network import Network
from tests.simulation.node import VERSION_MAX, Node
from tests.simulation.node_clock import JUMPS_NS, SIMULATED_NS_MAX
from tests.simulation.plan import CRASHES, DAMAGE, Fault, Plan
from tests.simulation.sdk_apps import SdkApp
from tests.simulation.sdk_failing import doom_of as sdk_doom_of
from tests.simulation.shared_log import SharedLog
from tests.simulation.trace import Trace, Violation

CALM_EVENTS_MAX = 10_000  # after the last fault, once all ways are open: until everything has converged
COPY_EVENTS = 1_500  # how long a copy runs beside the first
LOOK_EVERY_EVENTS = 16
NO_MORE_FAULTS = 1 << 62

ERRORS_WITH_DAMAGE = (notices.CheckpointDamaged,)
ERRORS_TOLD = (notices.CheckpointFailed, notices.NotCalledAgain)
ERRORS_WITH_A_COPY = (notices.StreamStopped, notices.PeerRefused)


@dataclass
class Totals:
    """Totals of a run, or of many."""

    runs: int = 0
    events: int = 0
    effects: int = 0
    records: int = 0
    messages: int = 0  # frames that arrived at a core
    frames_lost: int = 0
    frames_doubled: int = 0
    frames_held: int = 0
    starts: int = 0
    crashes: int = 0
    upgrades: int = 0
    simulated_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    marks: Marks = field(default_factory=Marks)

    def add(self, other: Totals) -> None:
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)


class World:
    """World of one plan. ``trace``: keeps the events, for people; None: nothing is kept, which is faster."""

    def __init__(self, plan: Plan, trace: Trace | None = None) -> None:
        self.plan = plan
        self.trace = trace
        self.clock = Clock()
        self.network = Network(plan, self.clock)
        self.outside = Outside()
        self.marks = Marks()
        self.faults: Counter[str] = Counter()
        self.events = self.effects = self.turns = self.starts = self.crashes = self.upgrades = 0
        self._rng = plan.stream("world")
        self._faults = list(plan.faults)
        self._power_failure_due = plan.ends_with_power_failure
        self._calm_since = 0
        self._copied_at: int | None = None
        self.next_fault_at = self._faults[0].at_effect if self._faults else NO_MORE_FAULTS
        self.nodes: list[Node] = []
        for name in plan.names:
            self.nodes.append(self._make_node(name, SharedLog(MemoryLogStore(len(self.nodes) + 1))))
        self.network.nodes = {node.name: node for node in self.nodes}
        if plan.followers:
            for first in list(self.network.nodes.values()):
                self.nodes.append(self._make_node(first.name, first.disk.shared, first.checker))
        self.callers = [
            Caller(self, number, self._rng.choice(plan.names), 2 * plan.work) for number in range(plan.callers)
        ]

    def _make_node(self, name: str, log: SharedLog, checker: Checker | None = None) -> Node:
        number = len(self.nodes)
        checker = checker or Checker(name, sdk_doom_of if self.plan.app == "sdk" else doom_of)

        def written(transaction: Transaction) -> None:
            checker.became_durable(transaction)
            for node in self.nodes:
                if node.disk.shared is log and node.log_side is not None:
                    node.log_side.log_grew()

        disk = Disk(log, self.plan.stream(f"disk {number}"), self.plan.keep_checkpoints, written)
        return Node(self, number, name, disk, checker, follows=self.plan.followers)

    def offer_right(self, name: str) -> None:
        """Give the right to write the log of ``name`` to one of the waiting nodes, if no node has it."""
        waiting = [node for node in self.nodes if node.name == name and node in node.disk.shared.waiting]
        if waiting and waiting[0].disk.shared.writer is None:
            log_side = self._rng.choice(waiting).log_side
            assert log_side is not None
            log_side.granted()

    def make_app(self, node: Node, version: int) -> App:
        plan = self.plan
        peers = [name for name in plan.names if name != node.name]
        rng = plan.stream(f"app {node.number} {node.life} {node.app_life}")
        if plan.app == "sdk":
            return SdkApp(node, peers, plan.work, version, rng, self.outside, self.marks)
        plain = plan.app == "plain"
        return CheckingApp(
            node.name,
            peers,
            plan.work,
            version,
            rng,
            node.checker,
            self.outside,
            self.marks,
            plain=plain,
            hops=plan.hops,
            calls_only=plan.has_copy,  # two copies of a log can differ in their impulses, and neither can see it
            salt=plan.salt if plan.fails else -1,
        )

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until all is done and everything has converged. Raises Violation."""
        for node in self.nodes:
            self.clock.after(self._rng.random() * 300 * US, node.start)
        run_next = self.clock.run_next
        while True:
            self.events += 1
            if run_next():
                if self.events % LOOK_EVERY_EVENTS == 0 and self._is_over():
                    break
                continue
            faults_left = len(self._faults)
            if self._is_over():
                break
            if self.clock.is_empty and len(self._faults) == faults_left:
                raise Violation(f"everything stands still: {self.describe()}")
        self._check_end()

    def _is_over(self) -> bool:
        if self._copied_at is not None:
            return self.clock.is_empty or self.events > self._copied_at + COPY_EVENTS
        is_quiet = all(node.is_quiet for node in self.nodes) and self.network.is_quiet
        is_quiet = is_quiet and all(caller.is_done for caller in self.callers)
        if self.network.blocked:
            self._calm_since = self.events
        if self.clock.now_ns - START_NS > SIMULATED_NS_MAX:
            raise Violation(f"something stands still until the clock says so: {self.describe()}")
        if self.events - self._calm_since > CALM_EVENTS_MAX:
            raise Violation(f"no end in {CALM_EVENTS_MAX} events since the last fault: {self.describe()}")
        if self.next_fault_at is not NO_MORE_FAULTS:
            if is_quiet:  # the work is done: the remaining faults strike an idle fleet
                self.strike(self._rng.choice(self.nodes), None)
            return False
        if not is_quiet or any(node.upgrade_to is not None for node in self.nodes):
            return False
        if self._power_failure_due:
            self._power_failure_due = False
            self._fail_power()
            return False
        return True

    # --- faults ------------------------------------------------------------------------------------------------------

    def strike(self, node: Node, effect: ef.Effect | None) -> None:
        """Let the next fault strike ``node``, before it carries out ``effect``."""
        fault = self._faults.pop(0)
        self._calm_since = self.events
        self.next_fault_at = self._faults[0].at_effect if self._faults else NO_MORE_FAULTS
        self.next_fault_at = max(self.next_fault_at, self.effects + 1)
        kind = fault.kind
        if self.trace is not None:
            node.note(f"!! {kind}, share {fault.share:.2f}")
        if node.machine is None:
            return
        if kind in CRASHES:
            self._crash(node, kind, effect)
        elif kind in DAMAGE:
            if not node.disk.flip(kind, fault.share):
                return
            if fault.share < 0.8:
                node.power_off()  # so that the damage is read soon
        elif "partition" in kind or "hang" in kind:
            self._block(node, fault)
        elif kind == "second copy":
            self._copy(node)
        else:
            self._operate(node, fault)
        self.faults[kind] += 1
        self.marks[f"fault: {kind}"] += 1

    def _crash(self, node: Node, kind: str, effect: ef.Effect | None) -> None:
        if node.app is None and kind == "crash app":
            return
        if kind == "crash app" and node.machine is not None and self._is_last_straw(node.machine):
            return
        if self._copied_at is not None and node.name == self.nodes[-1].name:
            return  # a split brain that restarts wins again: what must then hold is undefined
        self.crashes += 1
        self.marks[f"{kind} while {node.phase.value}"] += 1
        if effect is not None:
            self.marks[f"crash right before {type(effect).__name__}"] += 1
        if kind == "crash app":
            node.crash_app()
        else:
            node.crash(app_first=kind == "crash both")

    def _is_last_straw(self, machine: Machine) -> bool:
        """Return True if one more death would cause a verdict, possibly on an innocent message."""
        return machine.components.call_failures.poison_guard.suspect.runs_count + 1 >= (
            machine.state.limits.kills_max or 0
        )

    def _block(self, node: Node, fault: Fault) -> None:
        others = [name for name in self.plan.names if name != node.name]
        if not others:
            return
        other = others[int(fault.share * 7919) % len(others)]
        directions = [(node.name, other), (other, node.name)]
        if "one-way" in fault.kind:
            directions = [directions[int(fault.share * 104729) % 2]]
        self.network.block("hang" if "hang" in fault.kind else "cut", *directions)
        self.clock.after(fault.share * 15 * MS, self.network.heal, *directions)

    def _operate(self, node: Node, fault: Fault) -> None:
        kind, share, disk = fault.kind, fault.share, node.disk
        if kind in ("disk full", "sync fails"):
            disk.fails_next = kind
        elif kind == "slow disk":
            disk.slow = 2 + int(share * 20)
            self.clock.after(share * 10 * MS, setattr, disk, "slow", 1)
        elif kind == "peer moved":
            assert node.machine is not None
            for name in self.plan.names:
                if name != node.name:
                    stream = node.machine.components.peers.outbound.streams.get(name)
                    self.marks["open stream moved"] += stream is not None and stream.state is StreamState.OPEN
                    node.post(ev.PeerMoved(name))
        elif kind == "clean stop":
            node.request_stop()
        elif kind in ("upgrade", "failing upgrade"):
            self._upgrade(node, fails=kind == "failing upgrade", share=share)
        elif kind == "checkpoint":
            node.post(ev.CheckpointRequested())
        elif kind == "clock jump":
            self._set_clock(node, share)
        elif kind == "power failure":
            self._fail_power()
        elif kind == "log silent":
            disk.silent = 1 + int(share * 5)
        elif kind == "take over":
            self._take_over(node)
        elif kind == "crash at a verdict":
            disk.crashes_at_verdict = True

    def crash_soon(self, node: Node, within_ns: float) -> None:
        """Crash the coordinator of ``node`` soon, when its writes can still be pending."""
        self.clock.after(self._rng.random() * within_ns, self._crash_life, node, node.life)

    def _crash_life(self, node: Node, life: int) -> None:
        if node.life == life and node.machine is not None:
            self.marks["crash with a verdict on its way"] += any(
                isinstance(job, ef.Commit) and job.transaction.verdicts for job in node.disk.jobs
            )
            self._calm_since = self.events
            self._crash(node, "crash coordinator", None)

    def _take_over(self, node: Node) -> None:
        """Give a follower the right to write, though the current writer lives and continues."""
        shared = node.disk.shared
        log_side = shared.waiting[0].log_side if shared.waiting else None
        if log_side is not None and shared.writer is not None:
            # A writer with nothing to write does not find out: its machine is stopped, sooner or later.
            self.clock.after(self._rng.random() * 30 * MS, self._end_fenced, shared.writer, shared.writer.life)
            log_side.granted()

    def _end_fenced(self, node: Node, life: int) -> None:
        if node.life == life and node.machine is not None and not node.disk.is_writer:
            node.power_off()

    def _set_clock(self, node: Node, share: float) -> None:
        """Set the clock by a little, or by an hour, three days or ten years, either way, for some time or for good."""
        choice = int(share * 7919)
        sizes_ns = (int(share * 20 * MS), *JUMPS_NS)
        skew_ns = sizes_ns[choice % len(sizes_ns)] * (1 if choice % 8 < 4 else -1)
        self.marks["clock set far away"] += abs(skew_ns) > MS * 1000
        node.set_clock(skew_ns)
        if choice % 3:
            self.clock.after(share * 12 * MS, node.set_clock, 0)

    def _upgrade(self, node: Node, *, fails: bool, share: float) -> None:
        """Stop the instance as an operator, cleanly or not, and start it with the code of another version."""
        machine = node.machine
        if machine is None or self.plan.app == "plain" or not machine.state.ready or node.upgrade_to is not None:
            return
        if machine.state.versions.current >= VERSION_MAX:
            return
        node.upgrade_to = machine.state.versions.current + 1
        node.upgrade_fails = fails and self.plan.app != "sdk"
        if share < 0.5:
            node.request_stop()
        else:
            node.power_off()

    def _fail_power(self) -> None:
        self.marks["everything crashed at once"] += 1
        for node in self.nodes:
            if node.machine is not None:
                self.crashes += 1
                node.power_off(machine_too=True)

    def _copy(self, node: Node) -> None:
        """Start a coordinator on a copy of the node's current log, beside the first one."""
        if len(node.disk.store.summary().checkpoints) == 0 or self._copied_at is not None:
            return
        copy = self._make_node(node.name, SharedLog(node.disk.copy()), node.checker.copy())
        self.nodes.append(copy)
        self._copied_at = self.events
        self.marks["second copy beside the first"] += 1
        self.clock.after(self._rng.random() * MS, copy.start)

    # --- reports of a node -------------------------------------------------------------------------------------------

    def error_told(self, node: Node, notice: notices.Notice) -> None:
        expected: tuple[type[notices.Notice], ...] = ERRORS_TOLD
        if node.disk.damaged:
            expected += ERRORS_WITH_DAMAGE
        if self._copied_at is not None or not node.disk.is_writer:
            expected += ERRORS_WITH_A_COPY
        if not isinstance(notice, expected) and "it can't (simulated)" not in notice.text:
            raise Violation(f"{node.name} tells an error that nothing here explains: {notice.text}")

    def refused(self, node: Node, frame: PeerFrame) -> None:
        if frame.code == RefusedCode.STALE_EPOCH:
            self.marks["frame of a past life refused"] += 1
        elif self._copied_at is None:
            raise Violation(f"{node.name} refuses {frame.receiver}: {frame.reason}")

    # --- the end -----------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        self.marks["frame answered twice"] += self.network.answered_twice
        self.marks["Welcome beyond what was known"] += self.network.overtaken
        for node in self.nodes:
            self.marks["commits joined"] += node.disk.joined > 0
        if self._copied_at is not None:
            return
        apps = {name: node.app for name, node in self.network.nodes.items()}
        for name, app in apps.items():
            assert app is not None
            for other, sender in apps.items():
                assert sender is not None
                made = sender.made.get(name if name != other else "", 0)
                got = app.got.get(other if name != other else "", 0)
                if made != got:
                    raise Violation(f"{other} has made {made} calls to {name}, which has executed {got}")
                if self.outside.wiped in (name, other):
                    continue  # accepted impulses are lost with the log
                missing = self.outside.accepted.get((other, name), set()) - set(app.outside.get(other, ()))
                if missing:
                    raise Violation(f"{name} lacks impulses of {other} that were accepted: {sorted(missing)}")
            if self.plan.fails:
                self._check_failures(name, app)
            if app.got.get("", 0) == 0 and self.plan.work >= 3 and self.plan.app != "sdk":
                raise Violation(f"{name} has executed none of its calls to itself")

    def _check_failures(self, name: str, app: App) -> None:
        node = self.network.nodes[name]
        records = node.checker.ledger
        node.checker.failures.check_end(records, node.disk.store.summary().letters)
        self.marks["dead letter"] += len(node.disk.store.summary().letters) > 0
        if app.spoiled:
            raise Violation(f"{name} has kept something of a call that has failed")
        answers = count_of_answers(records)
        twice = sorted(number for number, count in answers.items() if count > 1)
        if twice:
            raise Violation(f"{name} got more than one answer to its calls {twice}")
        asked = Counter(
            number
            for other in self.network.nodes.values()
            for caller, number in calls_that_wait(other.checker.ledger)
            if caller == name or (caller == "" and other.name == name)
        )
        waiting = sum(
            other.app.count_that_answer(name) for other in self.network.nodes.values() if other.app is not None
        )
        if asked.total() - answers.total() != waiting:
            raise Violation(
                f"{name} waits for {asked.total() - answers.total()} answers {sorted(asked - answers)}, "
                f"{waiting} handlers are still at it"
            )

    def totals(self) -> Totals:
        return Totals(
            runs=1,
            events=self.events,
            effects=self.effects,
            records=sum(len(node.checker.ledger) for node in self.network.nodes.values()),
            messages=self.network.delivered,
            frames_lost=self.network.lost,
            frames_doubled=self.network.doubled,
            frames_held=self.network.held,
            starts=self.starts,
            crashes=self.crashes,
            upgrades=self.upgrades,
            simulated_s=(self.clock.now_ns - START_NS) / 1e9,
            faults=self.faults,
            marks=self.marks,
        )

    def describe(self) -> str:
        """Describe the state of all nodes, for a run that does not end."""
        lines = [f"event {self.events}, effect {self.effects}, blocked {self.network.blocked}"]
        for node in self.nodes:
            lines.append(
                f"{node.name}: {node.phase.value}, app {'down' if node.app is None else f'done {node.app.is_done}'}, "
                f"{len(node.disk.jobs)} writes, upgrade to {node.upgrade_to}"
            )
            if node.machine is not None:
                lines.append(f"   {node.machine.view.status(0)}")
        return "\n".join(lines)


def as_text(plan: Plan) -> str:
    """Return the plan as a few lines of text."""
    values = {name: value for name, value in asdict(plan).items() if name not in ("faults", "limits")}
    lines = [", ".join(f"{name} {value}" for name, value in values.items())]
    lines += [
        f"  [{index}] effect {one.at_effect}: {one.kind}, {one.share:.3f}" for index, one in enumerate(plan.faults)
    ]
    return "\n".join(lines)
