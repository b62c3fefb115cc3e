"""Plan of a run, drawn from its seed: the fleet, the work, the network's behaviour, and a list of faults.

Each fault has its moment, counted in effects of the cores: so a fault can strike between any two effects. A plan is
plain data, so that a failing run can be made smaller by leaving out parts of it (shrink.py). Each kind of chance has a
stream of its own: leaving out a part changes as little as possible of the rest.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from immortal.coordinator.core.limits import Limits, ReplayCheck

CRASHES = ("crash app", "crash coordinator", "crash both")
DISK_FAULTS = ("disk full", "sync fails", "slow disk")
DAMAGE = ("flip record", "flip trailer", "flip chunk", "flip header", "flip table")
NETWORK_FAULTS = ("partition", "one-way partition", "hang", "one-way hang", "peer moved")
OPERATOR = ("clean stop", "upgrade", "failing upgrade", "checkpoint", "clock jump", "power failure")
SINGLE_LOG_KINDS = (*CRASHES, *DISK_FAULTS, *DAMAGE, *NETWORK_FAULTS, *OPERATOR, "second copy")
FAULT_KINDS = (*SINGLE_LOG_KINDS, "log silent", "take over", "crash at a verdict")
_WEIGHTS = {
    **dict.fromkeys(SINGLE_LOG_KINDS, 2),
    **dict.fromkeys(CRASHES, 8),
    "slow disk": 4,
    "upgrade": 4,
    "clock jump": 4,
    "second copy": 0,
}

APPS = ("plain", "checking", "sdk")

SMALL = Limits(
    replay_check=ReplayCheck.STRICT,  # plain apps are deterministic here too: their calls are compared as a whole
    group_size_bytes=400,
    log_pending_bytes=2000,
    output_memory_bytes=180,
    spill_limit_bytes=1500,
    spill_row_bytes=60,
    spill_trim_bytes=200,
    recent_ns=200_000,
    receive_budget_bytes=500,
    grant_bytes_min=50,
    turn_pause_ns_max=2_000_000,
    peer_window_bytes=300,
    peer_window_frames=4,
    peer_frame_bytes=120,
    peer_gather_bytes=60,
    app_window_bytes=500,
    read_size_bytes=300,
    chunk_size_bytes=64,
    chunks_pending_bytes=256,
    checkpoint_trigger_bytes=6000,
    stream_retry_ns=5_000_000,
    hold_off_ns_min=200_000,  # a delayed app starts, and dies, again and again
    hold_off_ns_max=2_000_000,
    log_retry_ns_min=200_000,
    log_retry_ns_max=5_000_000,
    replies_gather_bytes=100,  # less than the memory limit: otherwise the app is not read because of replies here
    client_keep_ns=1_800_000_000_000,  # a run is shorter, and most jumps of a clock are longer
)
"""Limits so small that a run reaches each of them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault at the first effect from number ``at_effect`` on. ``share``: 0 to 1, its duration, amount or place."""

    at_effect: int
    kind: str
    share: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one run. ``work``: ticks (or calls that wait) of each instance. Rates are per frame."""

    seed: int
    names: tuple[str, ...] = ("a", "b")
    app: str = "checking"
    work: int = 10
    loss_rate: float = 0.0
    duplicate_rate: float = 0.0
    late_rate: float = 0.0
    faults: tuple[Fault, ...] = ()
    limits: Limits = SMALL
    hops: int = 3  # of a call that is passed on
    callers: int = 0  # from outside; each makes twice as many requests as ``work``
    keep_checkpoints: int = 2
    ends_with_power_failure: bool = False
    fails: bool = False  # some messages fail
    salt: int = 0  # selects which ones
    followers: bool = False  # each instance has one, ready to take over

    @property
    def has_copy(self) -> bool:
        return any(fault.kind == "second copy" for fault in self.faults)

    def stream(self, purpose: str) -> random.Random:
        """Return the random numbers for one purpose."""
        return random.Random(f"{self.seed} {purpose}")


def draw(seed: int) -> Plan:
    """Draw the plan of a standard run: about 1,000 events."""
    rng = random.Random(f"{seed} plan")
    app = rng.choices(APPS, (1, 8, 3))[0]
    count = rng.choices((1, 2, 3), (1, 6, 3))[0] if app != "sdk" else rng.choice((2, 2, 3))
    rough = rng.random() < 0.6  # the network
    plan = Plan(
        seed=seed,
        names=("a", "b", "c")[:count],
        app=app,
        work={1: 60, 2: 30, 3: 16}[count] + rng.randrange(10) if app != "sdk" else rng.randrange(3, 6),
        loss_rate=rng.choice((0.02, 0.15)) if rough else 0.0,
        duplicate_rate=0.05 if rough else 0.0,
        late_rate=rng.choice((0.05, 0.2)) if rough else 0.0,
        faults=_draw_faults(rng, app),
        limits=_draw_limits(rng),
        callers=rng.randrange(4) if app == "sdk" else 0,
        keep_checkpoints=rng.choice((1, 2, 2, 3)),
        ends_with_power_failure=rng.random() < 0.25,
    )
    # Two copies of a log can reach different verdicts, and neither can see it; the base protocol has none.
    fails = rng.random() < 0.6 and app != "plain" and not plan.has_copy
    return _with_verdicts(_with_other_logs(replace(plan, fails=fails, salt=rng.randrange(1000))))


def _with_verdicts(plan: Plan) -> Plan:
    """Add crashes while a verdict is on its way to the disk, if messages fail."""
    rng = plan.stream("verdicts")
    if not plan.fails or any(fault.kind in _OF_THEIR_OWN for fault in plan.faults):
        return plan
    more = [Fault(rng.randrange(1, 300), "crash at a verdict", rng.random()) for _ in range(rng.randrange(3))]
    return replace(plan, faults=tuple(sorted([*plan.faults, *more], key=lambda fault: fault.at_effect)))


def _with_other_logs(plan: Plan) -> Plan:
    """Add moments when the log is unavailable; and in some plans followers that take the log over now and then."""
    if plan.has_copy:
        return plan
    rng = plan.stream("other logs")
    followers = rng.random() < 0.3
    kept = [fault for fault in plan.faults if not followers or fault.kind not in _ALONE]
    last = max((fault.at_effect for fault in kept), default=200)
    kinds = ["log silent"] * rng.choice((0, 0, 1, 3)) + ["take over"] * (rng.randrange(5) if followers else 0)
    more = [Fault(rng.randrange(1, last + 100), kind, rng.random()) for kind in kinds]
    faults = sorted([*kept, *more], key=lambda fault: fault.at_effect)
    plan = replace(plan, followers=followers, faults=tuple(faults), fails=plan.fails and not followers)
    return _with_checkpoints_of_followers(plan) if followers else plan


def _with_checkpoints_of_followers(plan: Plan) -> Plan:
    """Let followers take the checkpoints, in some plans; the writer waits for that for a short or long time."""
    rng = plan.stream("checkpoints of followers")
    if rng.random() < 0.4:
        return plan
    wait_ns = rng.choice((1_000_000, 20_000_000, 20_000_000))
    return replace(plan, limits=replace(plan.limits, checkpoints_on_standby=True, standby_checkpoint_ns=wait_ns))


# Kinds whose effect is rare: a crash at another moment prevents it.
_OF_THEIR_OWN = ("upgrade", "failing upgrade", "clock jump")
# Not beside followers: their clocks are other machines', and the difference is not checked here.
_ALONE = (*DAMAGE, "upgrade", "failing upgrade", "clock jump")


def _draw_faults(rng: random.Random, app: str) -> tuple[Fault, ...]:
    if rng.random() < 0.06 and app == "checking":
        return _draw_copies(rng)
    weights = dict(_WEIGHTS)
    for kind in rng.sample(SINGLE_LOG_KINDS, 6):  # each seed has favourites, so that faults of one kind meet
        weights[kind] *= 4
    if app == "plain":  # it has no versions
        weights["upgrade"] = weights["failing upgrade"] = 0
    faults = []
    at_effect = 0
    for _ in range(rng.choice((0, 2, 4, 6, 8, 10))):
        # Soon one after another, so that recoveries, checkpoints and upgrades are interrupted, and the next ones too.
        at_effect += rng.randrange(1, 40) if rng.random() < 0.45 else rng.randrange(1, 120)
        kind = rng.choices(SINGLE_LOG_KINDS, [weights[kind] for kind in SINGLE_LOG_KINDS])[0]
        faults.append(Fault(at_effect, kind, rng.random()))
        if kind == "upgrade":
            for _ in range(rng.randrange(3)):  # during the upgrade
                at_effect += rng.randrange(1, 40)
                faults.append(Fault(at_effect, rng.choice(CRASHES), rng.random()))
            if rng.random() < 0.5:  # a replay from before it
                at_effect += rng.randrange(30, 120)
                faults.append(Fault(at_effect, rng.choice(("flip chunk", "flip header")), rng.random() * 0.8))
    return tuple(faults)


def _draw_copies(rng: random.Random) -> tuple[Fault, ...]:
    at_effect = rng.randrange(50, 250)
    faults = [Fault(at_effect, "second copy", rng.random())]
    for _ in range(rng.randrange(5)):
        at_effect += rng.randrange(1, 200)
        faults.append(Fault(at_effect, rng.choice(CRASHES), rng.random()))
    return tuple(faults)


def _draw_limits(rng: random.Random) -> Limits:
    wide = rng.choice((1, 1, 4))
    return replace(
        SMALL,
        group_size_bytes=rng.choice((80, 400)) * wide,
        log_pending_bytes=rng.choice((300, 2000)) * wide,
        output_memory_bytes=rng.choice((180, 3000)) * wide,
        spill_limit_bytes=rng.choice((0, 600, 1500)) * wide,
        receive_budget_bytes=SMALL.receive_budget_bytes * wide,
        peer_window_bytes=SMALL.peer_window_bytes * wide,
        turn_bytes=rng.choice((40, 100, 300)) * wide,
        peer_window_frames=rng.choice((2, 4)),
        peer_frame_bytes=SMALL.peer_frame_bytes * wide,
        peer_gather_bytes=SMALL.peer_gather_bytes * wide,
        app_window_bytes=SMALL.app_window_bytes * wide,
        read_size_bytes=SMALL.read_size_bytes * wide,
        chunk_size_bytes=SMALL.chunk_size_bytes * wide,
        chunks_pending_bytes=SMALL.chunks_pending_bytes * wide,
        checkpoint_trigger_bytes=rng.choice((1500, 6000)),
        checkpoint_age_ns=rng.choice((None, None, 3_000_000)),
    )
