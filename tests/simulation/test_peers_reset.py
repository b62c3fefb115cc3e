"""One instance of the simulated world loses its whole log in mid-run; an operator resets it when an error says so."""

from __future__ import annotations

import pytest

from immortal.coordinator.core import events as ev
from immortal.coordinator.core.notices import Notice
from immortal.coordinator.core.peers import reset_transaction
from immortal.coordinator.log.memory import MemoryLogStore
from immortal.protocol.peer_frames import PeerFrame
from tests.helpers.effort import effort
from tests.simulation.checkers import Checker
from tests.simulation.clock import MS
from tests.simulation.disk import Disk
from tests.simulation.node import Node
from tests.simulation.plan import CRASHES, Fault, Plan
from tests.simulation.shared_log import SharedLog
from tests.simulation.trace import Trace, Violation
from tests.simulation.world import World

SEEDS = effort(20)
NEW_COMMITTER_ID = 99


class WipedWorld(World):
    """World in which ``b`` is wiped at a moment of its seed. The others' operator follows the errors' advice."""

    def __init__(self, plan: Plan, trace: Trace | None = None) -> None:
        super().__init__(plan, trace)
        self.had: dict[str, int] = {}  # by sender: the position in the lost log
        self.resets = 0
        self.network.given_up_arrives = False  # a reset counts positions anew: a late frame would have another meaning
        for node in self.nodes:
            node.checker.is_reset = True
        self.clock.after((0.5 + self._rng.random() * 3) * MS, self._wipe)

    def _wipe(self) -> None:
        b = self.nodes[1]
        self.had = {name: known.position for name, known in b.disk.store.summary().sources.items()}
        checker = Checker("b")
        checker.is_reset = True
        disk = Disk(
            SharedLog(MemoryLogStore(NEW_COMMITTER_ID)), self.plan.stream("new disk"), 2, checker.became_durable
        )
        b.wipe(disk, checker)
        self.outside.wiped = "b"
        for node in self.nodes:
            node.checker.wiped = "b" if node is not b else ""
        self.clock.after(MS, self._look)

    def _look(self) -> None:
        """Let the operator check one of the nodes."""
        node = self._rng.choice([node for node in self.nodes if node.name != "b"])
        self.clock.after(self._rng.random() * 2 * MS, self._look)
        if node.machine is None:
            summary = node.disk.store.summary()
            transaction = reset_transaction(summary, "b")
            if transaction is not None and summary.peers.get("b") != NEW_COMMITTER_ID:  # known to have been wiped
                self.resets += 1
                node.disk.store.commit(transaction)
                node.checker.became_durable(transaction)
            return
        error = node.machine.view.peers().get("b", {}).get("error")
        if f"immortal peers reset {node.name} b'" in str(error):
            self.resets += 1
            node.post(ev.PeerReset("b", None))

    def error_told(self, node: Node, notice: Notice) -> None:
        if "immortal peers reset" not in notice.text:
            super().error_told(node, notice)
        elif not self.outside.wiped or "reset b " in notice.text:
            raise Violation(f"{node.name} names a reset that is none of its business: {notice.text}")

    def refused(self, node: Node, frame: PeerFrame) -> None:
        """Accept a refusal, which lasts until the reset."""

    def _is_over(self) -> bool:
        return bool(self.outside.wiped) and super()._is_over()

    def check_losses(self) -> None:
        """Check that only messages in the lost log are missing: an operator can't restore those."""
        for (sender, receiver), number in self.outside.begun_anew.items():
            if receiver == "b":
                assert number - 1 <= self.had.get(sender, 0), f"{number} of {sender} came first, b had {self.had}"


def plan_of(seed: int) -> Plan:
    rng = Plan(seed).stream("plan")
    faults, at_effect = [], 0
    for _ in range((0, 4, 12)[seed % 3]):
        at_effect += rng.randrange(1, 80)
        faults.append(Fault(at_effect, rng.choice(CRASHES), rng.random()))
    names = ("a", "b", "c") if seed % 3 == 0 else ("a", "b")
    return Plan(seed, names, work=20, loss_rate=0.15, late_rate=0.1, duplicate_rate=0.05, faults=tuple(faults))


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_a_wiped_instance_is_reset_and_nothing_that_survived_is_lost_or_doubled(first: int) -> None:
    resets = 0
    for seed in range(first, first + 20):
        world = WipedWorld(plan_of(seed))
        world.run()
        world.check_losses()
        resets += world.resets
    assert resets >= 5
