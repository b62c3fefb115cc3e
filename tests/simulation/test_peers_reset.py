"""One instance of the simulated world loses its whole log in mid-run; an operator resets it where an error says so."""

from __future__ import annotations

import pytest

from coordinator.core import effects as ef
from coordinator.core import events as ev
from coordinator.core.peer_reset import reset_transaction
from coordinator.core.session import Phase
from coordinator.log.memory import MemoryLogStore
from tests.simulation.world import Node, World

SEEDS = 40
NEW_COMMITTER_ID = 99


class WipedWorld(World):
    """``b`` is wiped at a step of its seed. ``a``'s operator does what the errors say, whether it is up or down."""

    def __init__(self, seed: int, **options: object) -> None:
        super().__init__(seed, **options)  # type: ignore[arg-type]
        self.wipe_step = self.rng.randrange(200, 2500)
        self.had: dict[str, int] = {}  # by sender: what the log that is lost had of it
        self.wiped = False
        self.resets = 0
        self.wake_ns: dict[str, int] = {}

    def _step(self) -> None:
        if not self.wiped and self.step_count >= self.wipe_step:
            self._wipe(self.nodes["b"])
            return
        if self.wiped and self.rng.random() < 0.02:
            name = self.rng.choice([name for name in self.names if name != "b"])
            self._operate(self.nodes[name])
            return
        node = self.nodes[self.rng.choice(self.names)]
        if node.name in self.wake_ns and self.rng.random() < 0.05:
            self.now_ns = max(self.now_ns, self.wake_ns.pop(node.name))
            self._handle(node, [ev.Tick()])
            return
        super()._step()

    def _wipe(self, node: Node) -> None:
        self.wiped = True
        self.trace.append(f"{self.step_count} {node.name} is wiped")
        self.had = {name: known.position for name, known in node.store.summary().sources.items()}
        node.store = MemoryLogStore(NEW_COMMITTER_ID)
        node.life += 1
        node.machine = node.app = node.upgrade_to = None
        node.jobs.clear()
        self.messages = [message for message in self.messages if message.sender is not node]
        # What it had answered comes before anything is delivered to its next life: that is another connection.
        self.answers = [answer for answer in self.answers if answer[0].effect.destination != node.name]
        node.down_until = self.step_count + self.rng.randrange(200)

    def _operate(self, node: Node) -> None:
        if node.machine is None:
            summary = node.store.summary()
            transaction = reset_transaction(summary, "b")
            if transaction is not None and summary.peers.get("b") != NEW_COMMITTER_ID:  # known to have been wiped
                self.resets += 1
                self.trace.append(f"{self.step_count} {node.name} is reset while it is down")
                node.store.commit(transaction)
            return
        peer = node.machine.peers_status().get("b", {})
        if f"immortal peers reset {node.name} b'" in str(peer.get("error")):
            self.resets += 1
            self.trace.append(f"{self.step_count} {node.name} is reset")
            self._handle(node, [ev.PeerReset("b", None)])

    def _carry_out(self, node: Node, effect: ef.Effect, following: list) -> None:
        if isinstance(effect, ef.WakeAt):
            self.wake_ns[node.name] = effect.time_ns
        elif isinstance(effect, ef.Report) and effect.level == "error" and "immortal peers reset" in effect.message:
            assert self.wiped, effect.message
            assert "reset b " not in effect.message, f"the one that was wiped knows nothing to reset: {effect.message}"
            self.trace.append(f"{self.step_count} {node.name} {effect.message}")
        elif not isinstance(effect, ef.PeerResetDone):
            super()._carry_out(node, effect, following)

    def done(self) -> bool:
        if not self.wiped:
            return False
        for node in self.nodes.values():
            app = node.app
            if node.machine is None or app is None or not app.primary or not app.state.get("begun"):
                return False
            if node.jobs or node.to_app or app.out or app.snapshot:
                return False
            if app.state["ticks"] < self.tick_count or app.accepted < len(app.impulses):
                return False
            status = node.machine.status(0)
            if status["backlog_records"] or node.machine._session.phase is not Phase.NORMAL:
                return False
            outputs = status["outputs"]
            if any(one["acknowledged"] < one["position"] or one["state"] != "open" for one in outputs.values()):
                return False
            if len(app.state["own"]) < self.tick_count // 3:
                return False
        return not self.messages

    def check(self) -> None:
        ticks = list(range(1, self.tick_count + 1))
        for name, node in self.nodes.items():
            state = node.app.state
            assert state["ticks"] == self.tick_count
            assert state["own"] == [number for number in ticks if number % 3 == 0]
            for peer in node.app.peers:
                executed = state["from"].get(peer, [])
                if name == "b":  # what its old log had not acknowledged, and all since
                    assert executed == ticks[len(ticks) - len(executed) :], f"b from {peer}: {executed}"
                    made = self.nodes[peer].machine._peers.outputs["b"].position
                    here = node.machine._peers.inputs[peer].durable if peer in node.machine._peers.inputs else 0
                    assert made - here <= self.had.get(peer, 0), "more is missing than the log that is lost had"
                elif peer == "b":  # of its old life as far as it got, then all of the new one
                    assert executed == [*ticks[: len(executed) - len(ticks)], *ticks], f"{name} from b: {executed}"
                else:
                    assert executed == ticks, f"{name} from {peer}: {executed}"


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_a_wiped_instance_is_reset_and_nothing_that_survived_is_lost_or_doubled(first: int) -> None:
    resets = 0
    for seed in range(first, first + 10):
        names = ("a", "b", "c") if seed % 3 == 0 else ("a", "b")
        world = WipedWorld(seed, names=names, crash_rate=(0.0, 0.01, 0.03)[seed % 3], loss_rate=0.15)
        world.run()
        world.check()
        resets += world.resets
    assert resets >= 5
