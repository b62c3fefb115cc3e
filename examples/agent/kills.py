"""Plan trips while the agent's processes are killed one after another; then compare.

    python examples/agent/kills.py [--trips N] [--kills N] [--seed S]

The app and the coordinator of the agent run under `immortal run --restart`, and are killed with kill -9 in turns. At
the end each trip must have its plan and one booking, and its history each request and tool call once. Steps that ran
more than once are counted: there can be no more than were in progress at a kill.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from pydantic_ai import ModelMessagesTypeAdapter
from trips import Airline, Travel

from immortal.client import connect
from immortal.coordinator.instances.registry import Registry

sys.path.append(str(Path(__file__).resolve().parents[1]))
import supervised
from supervised import APP, COORDINATOR, STOP_S

HERE = Path(__file__).parent
STEPS_OF_A_TRIP = 5  # three requests and two tools outside the handlers
PLAN_S = 60.0
ROLES = (APP, COORDINATOR)
KILL = "kill"


class Instance(supervised.Instance):
    """Instance of the agent, whose ``kill`` waits until the process is started again."""

    def kill(self, role: str) -> bool:
        self.until_ready()
        starts = self.starts
        was_there = super().kill(role)
        with self.changed:
            ended = self.supervisor.poll
            if not self.changed.wait_for(lambda: self.starts > starts or ended() is not None, STOP_S):
                raise self.failed("it did not start again")
        return was_there


async def plan_all(cities: list[str], home: Path) -> list[str]:
    async with connect(Travel, "travel", home=home, timeout=PLAN_S) as travel:
        return list(await asyncio.gather(*(travel.plan(city) for city in cities)))


def kill_all(travel: Instance, kills: int, seed: int, is_over: threading.Event, steps: Path) -> list[str]:
    """Kill processes, and return their roles. Each kill adds a line to the steps."""
    source = random.Random(seed)
    killed = []
    for number in range(kills):
        travel.until_ready()
        if is_over.wait(source.uniform(0.05, 0.3)):
            break
        killed.append(ROLES[(number + seed) % 2])
        travel.kill(killed[-1])
        with steps.open("a") as lines:
            lines.write(f"{KILL}\n")
    return killed


def repeats(lines: list[str]) -> tuple[int, list[str]]:
    """Count repeated steps, and list those whose earlier result the run had used."""
    found, count = [], 0
    before: dict[str, int] = {}  # by key: its last line
    for index, line in enumerate(lines):
        if line == KILL:
            continue
        key, what, city, *_ = line.split()
        if (last := before.get(key)) is not None:
            count += 1
            between = lines[last + 1 : index]
            if KILL not in between:
                found.append(f"{what} for {city} was made again without a kill")
            later = [other for other in between if city in other.split() and stage(other) > stage(line)]
            if later:
                found.append(f"{what} for {city} was made again, behind {later[0]!r}")
        before[key] = index
    return count, found


def stage(line: str) -> int:
    """Return the stage of a trip, from 0."""
    _, what, _, *rest = line.split()
    return {"0": 0, "2": 2, "3": 3}[rest[0]] if what == "model" else 1


def differences(cities: list[str], plans: list[str], bookings: dict[str, list[int]], travel: Travel) -> list[str]:
    found = []
    for city, plan in zip(cities, plans, strict=True):
        euros = 50 + 10 * len(city)
        if plan != f"{city}: a flight for {euros} euros, Hotel {city} Central":
            found.append(f"the plan for {city} is {plan!r}")
        if bookings.get(city) != [euros]:
            found.append(f"{city} is booked for {bookings.get(city)}")
        messages = ModelMessagesTypeAdapter.validate_json(travel.history(city))
        calls = [part.tool_name for message in messages for part in message.parts if part.part_kind == "tool-call"]
        if calls != ["flight", "hotel", "book"]:
            found.append(f"the history of {city} has the calls {calls}")
    return found


def run(trips: int, kills: int, seed: int, folder: Path) -> tuple[list[str], str]:
    """Run the trips and the kills; return the differences, and a verdict if there are none. Raises RunError."""
    home, steps = folder / "registry", folder / "steps"
    for name in ("airline", "travel"):
        Registry(home).register(name, "tcp://127.0.0.1:*")
    environment = {**os.environ, "TRIPS_STEPS": str(steps)}
    cities = [f"City{number}" for number in range(1, trips + 1)]
    with ExitStack() as stack:
        pair = []
        for name, app in (("airline", "trips:Airline"), ("travel", "trips:Travel")):
            pair.append(Instance(name, app, home, HERE, environment))
            stack.callback(pair[-1].end)
        for one in pair:
            one.until_ready()
        is_over = threading.Event()
        killed: list[str] = []
        killer = threading.Thread(target=lambda: killed.extend(kill_all(pair[1], kills, seed, is_over, steps)))
        killer.start()
        try:
            plans = asyncio.run(plan_all(cities, home))
        finally:
            is_over.set()
            killer.join()
        with connect(Airline, "airline", home=home) as airline, connect(Travel, "travel", home=home) as travel:
            found = differences(cities, plans, airline.booked(), travel)
        for one in reversed(pair):
            one.stop()
    lines = steps.read_text().splitlines()
    made = {line.split()[0] for line in lines if line != KILL}
    again, wrong = repeats(lines)
    found += wrong
    print(f"{trips} trips, with {len(made)} requests and tool calls; kill -9 of {', '.join(killed) or 'nobody'}")
    print(f"{again} of them were made again, since they were under way")
    if len(made) != trips * STEPS_OF_A_TRIP:
        found.append(f"{trips * STEPS_OF_A_TRIP} steps were expected, not {len(made)}")
    return found, "each trip is planned, and booked once"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trips", type=int, default=6, help="how many, at a time (default 6)")
    parser.add_argument("--kills", type=int, default=4, help="of the app and its coordinator, by turns (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (default 0)")
    options = parser.parse_args()
    if options.trips < 1 or options.kills < 0:
        parser.error("--trips is positive, --kills is not negative")
    return supervised.conclude(partial(run, options.trips, options.kills, options.seed), None)


if __name__ == "__main__":
    sys.exit(main())
