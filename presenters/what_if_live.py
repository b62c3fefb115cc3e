"""Report on shadows of running services: lines, JSON and a page, from what they tell as they go on."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from immortal.coordinator.core.formatting import time_text
from immortal.protocol.command_line import counted, table_lines
from immortal.replay.fleet.outcome import FleetOutcome
from immortal.replay.fleet.report import outcome_lines, service_rows
from immortal.replay.fleet.shadow import Event, Found, Mark, Note, Progress

LINES_MAX = 10  # of one handler and kind; then they are counted
KEPT_MAX = 200  # on the page
REFRESH_S = 2


class LiveReport:
    """Report on shadows. ``changes``: the class that is tried, by service."""

    def __init__(self, changes: Mapping[str, str]) -> None:
        self.marks: dict[str, Mark] = {}
        """Where each shadow goes on in a next process."""
        self.following = dict.fromkeys(changes, False)
        self._changes = changes
        self._before = {name: Progress(name, -1, 0, 0, 0.0) for name in changes}  # of processes that have ended
        self._now = dict(self._before)
        self._counts: Counter[tuple[str, str, str, str]] = Counter()
        self._lines: Counter[tuple[str, str, str, str]] = Counter()
        self._last: deque[Found] = deque(maxlen=KEPT_MAX)
        self._notes: deque[str] = deque(maxlen=KEPT_MAX)
        self._missed: set[str] = set()  # services of which some records were not compared
        self._outcome: FleetOutcome | str | None = None
        self._outcome_ns = 0

    def add(self, event: Event) -> str:
        """Take an event; return the line that it is shown by, "" for none."""
        if isinstance(event, Progress):
            before = self._before[event.service]
            messages, same = before.messages + event.messages, before.same + event.same
            self._now[event.service] = replace(event, messages=messages, same=same)
            self.marks.setdefault(event.service, Mark()).reported = event.record
            return ""
        if isinstance(event, Note):
            self.following[event.service] = event.follows
            if not event.follows:
                self._missed.add(event.service)
            self.marks.setdefault(event.service, Mark())
            self._notes.append(f"{event.service}: {event.text}")
            return f"note: {self._notes[-1]}"
        key = event.service, event.to, event.handler, event.kind
        self._counts[key] += event.count
        self._lines[key] += 1
        self._last.append(event)
        if self._lines[key] > LINES_MAX:
            return ""
        more = "; further ones like this are only counted" if self._lines[key] == LINES_MAX else ""
        return f"{_place(event)}: {event.text} ({event.lag_s:.1f} s later){more}"

    def note_restart(self, name: str, behind: int) -> None:
        """Note that another process goes on, with the service ``name`` at a checkpoint after the record ``behind``."""
        self._before = dict(self._now)
        self.marks.setdefault(name, Mark()).behind = behind

    def set_outcome(self, outcome: FleetOutcome | str) -> None:
        """Take what the fleet would have done up to now, or why that is not known."""
        self._outcome, self._outcome_ns = outcome, time.time_ns()

    def outcome_lines(self) -> Iterator[str]:
        yield ""
        if isinstance(self._outcome, FleetOutcome):
            yield f"consequences in the fleet, as of {time_text(self._outcome_ns)}:"
            yield from outcome_lines(self._outcome)
        else:
            yield f"note: the consequences in the fleet are not known: {self._outcome}"

    @property
    def totals(self) -> list[Progress]:
        return list(self._now.values())

    @property
    def is_different(self) -> bool:
        return bool(self._counts)

    @property
    def line(self) -> str:
        """All in one line."""
        messages, same = (sum(getattr(one, name) for one in self.totals) for name in ("messages", "same"))
        different = self._counts.total()
        lag_s = max(one.lag_s for one in self.totals)
        return f"{counted(messages, 'message')}, {same:,} calls the same, {different:,} different, {lag_s:.1f} s behind"

    def lines(self) -> Iterator[str]:
        """Yield the tables of all that was compared."""
        yield ""
        yield from table_lines(*self._services(), right=_NUMBERS)
        if self._counts:
            yield ""
            yield from table_lines(*self._handlers(), right=_NUMBERS)
        yield ""
        if away := [name for name, follows in self.following.items() if not follows]:
            yield f"not followed at the end: {', '.join(away)}"
        if self.is_different:
            yield "different"
        elif self._missed:
            names = ", ".join(sorted(self._missed))
            yield f"no difference in the compared records; the notes say which records of {names} were not compared"
        else:
            yield "no difference"

    def page(self) -> str:
        """Return the page as HTML, which a browser loads again by itself."""
        from immortal.pipeline.report.pages import Part, page

        tried = ", ".join(f"{name} = {app}" for name, app in self._changes.items())
        last = [(time_text(one.time_ns), _place(one), one.text, f"{one.lag_s:.1f}") for one in reversed(self._last)]
        parts = [
            Part("Services", "", *self._services()),
            Part("Differences by handler", "", *self._handlers()),
            Part("The last differences", "", ("time", "message", "difference", "seconds later"), last),
            Part("Notes", lines=list(self._notes)),
        ]
        if isinstance(outcome := self._outcome, FleetOutcome):
            title = f"Consequences in the fleet, as of {time_text(self._outcome_ns)}"
            parts[1:1] = [
                Part(title, "", *service_rows(outcome)),
                Part("Causes and consequences", tree=outcome.consequences),
            ]
        shown = [part for part in parts if part.rows or part.lines or part.tree]
        texts = ("service", "state", "to", "call", "kind", "time", "message", "difference")
        return page(f"What if {tried}, live?", self.line, shown, texts, refresh_s=REFRESH_S)

    def _services(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for one in self.totals:
            different = sum(count for key, count in self._counts.items() if key[0] == one.service)
            counts = [one.record, one.messages, one.same, different]
            rows.append([one.service, *(f"{count:,}" for count in counts), f"{one.lag_s:.1f}"])
        return ["service", "record", "messages", "same calls", "different", "seconds behind"], rows

    def _handlers(self) -> tuple[list[str], list[list[str]]]:
        rows = [[*key, f"{count:,}"] for key, count in self._counts.most_common()]
        return ["service", "to", "call", "kind", "different"], rows


_NUMBERS = ("record", "messages", "same calls", "different", "seconds behind")


def _place(found: Found) -> str:
    message = "" if found.message is None else f", message {found.message}"
    return f"{found.service}, record {found.record}{message}"
