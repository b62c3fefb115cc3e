"""What the operator is told: its words, where it goes, and the page that lists it."""

from __future__ import annotations

import io
import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import fields
from prometheus_client import CollectorRegistry

from immortal.coordinator.core import notices
from immortal.coordinator.core.notices import CheckpointBegan, CheckpointTaken, Notice, Recovered, Recovering
from immortal.coordinator.notices import LOG_LEVELS, Notices
from immortal.coordinator.notices import __main__ as tables
from immortal.coordinator.notices.metrics import STATUS, TIMES, NoticeMetrics
from immortal.coordinator.notices.sinks import (
    CommitTimed,
    JsonLineSink,
    Line,
    RateLimitedSink,
    ReadinessSink,
    SyncTimed,
    TextLineSink,
)
from immortal.protocol.safe_output import BURST
from scripts.docs_site.tables import with_tables
from tests.helpers.notices import Told

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "notices.md"

LINES: dict[str, Notice] = {
    "debug   counter  new epoch  epoch=4": notices.NewEpoch(4),
    "info    counter  recovering  checkpoint=2 after_record=7 to_replay=3 epoch=4": Recovering(2, 7, 3, 4),
    "info    counter  recovered  epoch=4 sequence_id=10": Recovered(4, 10),
    "info    counter  checkpoint taken  checkpoint=2 after_record=7 bytes=142": CheckpointTaken(2, 7, 142),
    "info    counter  upgraded  from_version=1 to_version=2 after_record=7": notices.Upgraded(1, 2, 7),
    "error   counter  checkpoint 2 is damaged (cut off); falling back to the one before": notices.CheckpointDamaged(
        2, "cut off"
    ),
    "warning counter  the app disconnected; waiting for the next one  phase=normal": notices.AppGone("normal"),
    "error   counter  stream stopped: it has gone; its messages are kept  peer=b": notices.StreamStopped(
        "b", "it has gone"
    ),
    "warning counter  stream stopped: it is full; its messages are kept  peer=b": notices.StreamWaits(
        "b", "it is full"
    ),
    "warning counter  'b' takes no messages: 64 MiB of messages for it are in memory, further ones go to disk"
    "  peer=b memory_mib=64 spilled_mib=0.5": notices.Spills("b", 64, 0.5, "takes no messages", 64),
    "warning counter  the upgrade to version 2 was interrupted: the old version is intact, and the upgrade is tried"
    " again at the next start": notices.UpgradeInterrupted(2),
    "info    counter  the upgrade to version 2 retries dead letters that were refused  count=3": notices.LettersRetried(
        2, 3
    ),
    "warning counter  it differs; it holds": notices.Diverged("b", "it differs", "it holds"),
    "info    counter  peer moved  peer=b endpoint=tcp://h:1": Line(
        "peer moved", {"peer": "b", "endpoint": "tcp://h:1"}
    ),
    "info    counter  it was  known=7": Line("it was", {"known": 7, "unknown": None}),
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_for_people(line: str) -> None:
    stream = io.StringIO()
    TextLineSink("counter", stream, "debug").emit(LINES[line])
    time, _, rest = stream.getvalue().partition(" ")
    assert rest == f"{line}\n"
    assert len(time) == len("12:00:01.250")


def test_a_line_for_machines_has_the_notice_and_all_that_is_in_its_text() -> None:
    stream = io.StringIO()
    JsonLineSink("counter", stream, "info").emit(notices.StreamStopped("b", "it has gone"))
    said = json.loads(stream.getvalue())
    assert list(said) == ["time", "level", "instance", "message", "notice", "peer", "reason"], "for who looks at it"
    assert said.pop("time").endswith("Z")
    assert said == {
        "level": "error",
        "instance": "counter",
        "notice": "StreamStopped",
        "message": "stream stopped: it has gone; its messages are kept",
        "peer": "b",
        "reason": "it has gone",
    }


def test_no_value_takes_the_place_of_what_every_line_has() -> None:
    stream = io.StringIO()
    named = {"message": "forged", "level": "debug", "instance": "other", "time": "never"}
    JsonLineSink("counter", stream, "info").emit(Line("it was", named))
    said = json.loads(stream.getvalue())
    assert (said["message"], said["level"], said["instance"]) == ("it was", "info", "counter")
    assert said["time"] != "never"


@pytest.mark.parametrize("form", [TextLineSink, JsonLineSink])
def test_what_is_no_line(form: type[TextLineSink] | type[JsonLineSink]) -> None:
    stream = io.StringIO()
    lines = form("counter", stream, "warning")
    for notice in (CommitTimed(0.1), CheckpointBegan(1), notices.NewEpoch(1), Recovered(1, 2)):
        lines.emit(notice)
    assert stream.getvalue() == ""
    lines.emit(notices.AppGone("normal"))
    assert stream.getvalue().count("\n") == 1
    stream.close()
    lines.emit(notices.AppGone("normal"))  # nobody reads it any more: no reason to stop


@pytest.mark.parametrize("notice", tables.notices(), ids=lambda one: one.__name__)
def test_what_is_said_of_a_notice_fits(notice: type[Notice]) -> None:
    names = {field.encode_name for field in fields(notice)}
    assert {name for _, name, _, _ in string.Formatter().parse(notice.template) if name} <= names
    assert set(notice.apart) <= names | {"peer"}
    assert notice.level in (*LOG_LEVELS, "trace")
    assert (notice.__doc__ or "").endswith(".")


def test_what_others_can_cause_is_limited_by_type_and_peer() -> None:
    told = Told()
    limited = RateLimitedSink(told)
    for number in range(2 * BURST):
        limited.emit(notices.PeerRefused("b", f"reason {number}"))
        limited.emit(Recovered(number, number))
    limited.emit(notices.PeerRefused("c", "no"))
    limited.emit(notices.StreamStopped("b", "no"))
    assert [type(one).__name__ for one in told.notices].count("Recovered") == 2 * BURST
    assert [one.text for one in told.notices if not isinstance(one, Recovered)] == [
        *(f"stream refused: reason {number}" for number in range(BURST)),
        "stream refused: no",
        "stream stopped: no; its messages are kept",
    ]


def test_ready_is_who_has_recovered_or_begun() -> None:
    ready: list[int] = []
    sink = ReadinessSink(lambda: ready.append(1))
    log = Notices("counter", sink)
    log.info("recovered")
    log.info("checkpoint taken")
    assert ready == [], "words are nothing to go by"
    log.emit(CheckpointTaken(1, -1, 10))
    log.emit(CheckpointTaken(2, 5, 10))
    assert len(ready) == 1
    log.emit(Recovered(2, 9))
    log.emit(CheckpointTaken(3, 9, 10))
    log.emit(Recovered(3, 12))
    assert len(ready) == 3


def test_how_long_things_take() -> None:
    now_s = 100.0
    registry = CollectorRegistry()
    sink = NoticeMetrics("counter", registry, lambda: now_s)

    def seconds(name: str) -> tuple[float | None, float | None]:
        named = f"immortal_{name}_duration_seconds"
        count, total = (
            registry.get_sample_value(f"{named}_{of}", {"instance_name": "counter"}) for of in ("count", "sum")
        )
        return count, total

    sink.emit(CheckpointTaken(1, -1, 10))  # who came in between has no beginning of it
    sink.emit(Recovered(1, 5))
    assert seconds("checkpoint") == seconds("recovery") == (0, 0)
    sink.emit(Recovering(1, 5, 20, 2))
    sink.emit(Recovering(1, 5, 20, 3))  # the app crashed, and the next one began
    now_s += 2
    sink.emit(CheckpointBegan(2))
    now_s += 3
    sink.emit(Recovered(3, 25))
    sink.emit(CheckpointTaken(2, 25, 10))
    sink.emit(Recovered(3, 25))  # of an upgrade, which is no other recovery
    for took_s in (0.0001, 0.5):
        sink.emit(CommitTimed(took_s))
    sink.emit(SyncTimed(0.25))
    assert seconds("recovery") == (1, 5)
    assert seconds("checkpoint") == (1, 3)
    assert seconds("commit") == (2, pytest.approx(0.5001))
    assert seconds("sync") == (1, 0.25)
    told = {"instance_name": "counter", "notice": "Recovering", "level": "info"}
    assert registry.get_sample_value("immortal_notices_total", told) == 2
    told |= {"notice": "CommitTimed", "level": "trace"}
    assert registry.get_sample_value("immortal_notices_total", told) is None


def test_the_page_of_the_site_has_the_tables_of_the_schema() -> None:
    page = with_tables(PAGE.read_text())
    for table in (tables.notices_table, tables.metrics_table):
        assert "\n".join(table()) in page, "docs/reference/notices.md: the marker of the table is not there"
    assert len(tables.notices()) >= 40
    assert len({one.name for one in (*STATUS, *TIMES)}) == len(STATUS) + len(TIMES)


def test_who_wants_neither_json_nor_metrics_holds_neither() -> None:
    program = (
        "import sys, immortal.cli.coordinator\n"
        "import immortal.coordinator.service.runtime, immortal.coordinator.service.supervisor\n"
        "from immortal.coordinator.notices import configure\n"
        "configure('counter').info('here')\n"
        "print([one for one in ('structlog', 'prometheus_client', 'rich') if one in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
    assert ran.stderr.endswith("info    counter  here\n")
