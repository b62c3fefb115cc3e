"""`immortal pipeline` from the command line, on real logs, with Spark."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lmdb
import pytest
from click.testing import CliRunner, Result
from pyspark.errors import PySparkException

from immortal.cli import main
from immortal.coordinator.log import format as log_format
from immortal.log import open_reader
from immortal.pipeline.errors import PipelineError, one_line_error
from immortal.pipeline.jobs import export as export_job
from immortal.pipeline.jobs.audit import audit
from immortal.pipeline.jobs.sources import EXPORT_FILE_NAME, open_fleet
from immortal.pipeline.jobs.stats import stats
from immortal.pipeline.jobs.trace import trace
from immortal.pipeline.jobs.verify import verify
from immortal.protocol.trailer import BatchKind
from tests.helpers import flow, talk_app
from tests.helpers.fleet import STREAM_FAULTS, Found, Plan, cut, damage, flip_byte, plan_fleet, streams_for_faults, trim
from tests.helpers.strangers import mode, modes
from tests.helpers.talk_fleet import CLASSES, TALK, app_options, record_talk, write_changed_code

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("spark")


def run(*arguments: object, status: int = 0, home: Path | None = None) -> Result:
    """The command in this process, on the one session of the tests."""
    options = ["--home", str(home)] if home is not None else []
    result = CliRunner().invoke(main, [*options, "pipeline", *map(str, arguments)])
    assert result.exit_code == status, (result.output, result.exception)
    return result


def values(*arguments: object, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json", status=status).stdout)
    return found


def failed(*arguments: object, status: int = 1, home: Path | None = None) -> str:
    """The one line in which it ended."""
    lines = run(*arguments, status=status, home=home).stderr.strip().splitlines()
    assert status == 2 or len(lines) == 1, lines
    return lines[-1]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_fleet(4, messages=2_000, seed=3)


@pytest.fixture(scope="module")
def pair() -> Plan:
    """A small one: an export reads the logs twice for each table."""
    return plan_fleet(2, messages=600, seed=4)


@pytest.fixture(scope="module")
def logs(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet")
    plan.write(folder)
    return folder


# --- audit -----------------------------------------------------------------------------------------------------------


def test_the_audit_of_twenty_services_finds_each_of_a_hundred_faults(tmp_path: Path) -> None:
    """From the logs and from an export of them, to the same result."""
    rng = random.Random(7)
    plan = plan_fleet(20, messages=16_000, seed=7)
    receivers_of_damage = plan.names[-2:]
    streams = [
        (sender, receiver)
        for sender, receiver in streams_for_faults(plan)
        if receiver not in receivers_of_damage and sender not in receivers_of_damage
    ]
    rng.shuffle(streams)
    planted: list[Found] = []
    for number in range(90):
        planted.append(STREAM_FAULTS[number % len(STREAM_FAULTS)](plan, *streams[number], rng))
    for number in range(10):
        planted.append(damage(plan, receivers_of_damage[number % 2], rng))
    assert len(planted) == 100
    plan.write(tmp_path / "logs")
    audit = ("audit", tmp_path / "logs", "--tolerance-ms", 10**6, "--limit", 10**6)
    report = values(*audit, status=3)
    found = {
        (each["kind"], each["sender"], each["receiver"], position)
        for each in report["violations"]
        if each["kind"] != "causality"  # a batch that changed places may be executed before it was made
        for position in range(each["first"], each["last"] + 1)
    }
    for fault in planted:
        assert fault <= found
    assert {fault[:3] for fault in found} == {next(iter(fault))[:3] for fault in planted}
    run("export", tmp_path / "logs", "--to", tmp_path / "export", "--tables", "raw")
    again = values("audit", tmp_path / "export", *audit[2:], status=3)
    assert again["violations"] == report["violations"]
    assert again["streams"] == report["streams"]


def test_a_sound_fleet_is_sound(plan: Plan, logs: Path) -> None:
    report = values("audit", logs, "--tolerance-ms", 0)
    assert report["sound"]
    assert sum(log["records"] for log in report["logs"]) == sum(map(len, plan.records.values()))
    lines = run("audit", "--streams", home=logs).stdout.splitlines()  # without a path: the registry's home
    assert lines[-1] == "sound: every message was executed once, in order, after its cause"
    assert len([line for line in lines if line.startswith(("service", "outside"))]) == len(report["streams"])


# --- export ----------------------------------------------------------------------------------------------------------


def archived(spark: SparkSession, folder: Path) -> dict[str, dict[int, bytes]]:
    """What the export's table raw holds."""
    found: dict[str, dict[int, bytes]] = {}
    for row in open_fleet([str(folder)]).table(spark, "raw").collect():
        records = found.setdefault(row["instance"], {})
        assert row["sequence_id"] not in records, "exported twice"
        records[row["sequence_id"]] = bytes(row["value"])
    return found


def logged(folder: Path) -> dict[str, dict[int, bytes]]:
    found = {}
    for log in sorted(folder.glob("*/log")):
        with open_reader(log) as reader:
            found[reader.identity.instance_name] = {each.sequence_id: each.value for each in reader.records()}
    return found


def test_each_export_adds_what_is_new(pair: Plan, tmp_path: Path, spark: SparkSession) -> None:
    to = tmp_path / "export"
    plan = pair
    for number, share in enumerate((0.5, 1.0), 1):
        folder = tmp_path / f"logs-{number}"
        cut(plan, share).write(folder)
        report = values("export", folder, "--to", to)
        assert report["run"] == number
        assert archived(spark, to) == logged(folder)
        assert modes(to) == {}
    assert values("audit", to)["sound"]
    exported = open_fleet([str(to)])
    messages = exported.table(spark, "messages").where("kind <> 'initial'").groupBy("instance").count().collect()
    assert {row["instance"]: row["count"] for row in messages} == {
        name: sum(batch.count for record in records[1:] for batch in record.inputs)
        for name, records in plan.records.items()
    }
    assert exported.table(spark, "outputs").count() == sum(
        len(record.marks) for records in plan.records.values() for record in records
    )
    days = sorted({path.parent.name for path in to.glob("raw/*/*/*.parquet")})
    assert days == ["day=2026-01-01"]
    names = sorted(path.name for path in (to / "raw").iterdir())
    assert names == [f"instance={name}" for name in plan.names]


def test_an_export_that_is_cut_off_is_done_again(
    pair: Plan, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "export"
    cut(pair, 0.5).write(tmp_path / "earlier")
    pair.write(tmp_path / "now")
    export = ("export", "--to", to, "--tables", "raw")
    run(*export, tmp_path / "earlier")
    earlier = archived(spark, to)

    def stop(*arguments: object) -> None:
        raise PipelineError("the power failed")

    for step in ("_compare", "_move", "_finish"):
        with monkeypatch.context() as patched:
            patched.setattr(export_job._Run, step, stop)
            assert failed(*export, tmp_path / "now") == "error: the power failed"
    state = json.loads((to / EXPORT_FILE_NAME).read_text())
    assert state["run"] == 1
    assert len(list(to.glob("raw/*/*/run-00000002-*.parquet"))) == len(pair.names)  # moved, and not counted yet
    assert archived(spark, to) == earlier
    run(*export, tmp_path / "now")
    assert archived(spark, to) == logged(tmp_path / "now") != earlier
    assert not (to / "_staging").exists()
    assert values(*export, tmp_path / "now")["run"] == 3
    assert archived(spark, to) == logged(tmp_path / "now")
    assert values("verify", to)["sound"]


def test_an_export_has_delta_tables(pair: Plan, tmp_path: Path) -> None:
    delta = pytest.importorskip("deltalake")
    to, url = tmp_path / "export", f"file://{tmp_path}/tables"
    export = ("export", "--to", to, "--tables", "raw", "--delta")
    for number, share in enumerate((0.5, 1.0), 1):
        folder = tmp_path / f"logs-{number}"
        cut(pair, share).write(folder)
        assert values(*export, url, folder)["copied"] == len(pair.names)
        table = delta.DeltaTable(f"{url}/raw")
        assert table.version() == number - 1
        found = [(row["instance"], row["sequence_id"], row["value"]) for row in table.to_pyarrow_table().to_pylist()]
        assert sorted(found) == [(name, *each) for name, records in logged(folder).items() for each in records.items()]
    assert "'lake' names no store: a URL with one of s3://" in failed(*export, "lake", tmp_path / "logs-1")


def test_an_export_that_was_changed_behind_its_back_is_found(pair: Plan, tmp_path: Path) -> None:
    pair.write(tmp_path / "logs")
    run("export", tmp_path / "logs", "--to", tmp_path / "export", "--tables", "raw")
    file = sorted((tmp_path / "export" / "raw").glob("*/*/*.parquet"))[0]
    name = file.parent.parent.name.removeprefix("instance=")
    file.unlink()
    report = values("verify", tmp_path / "export", status=3)
    assert [(problem["instance"], problem["place"]) for problem in report["problems"]] == [(name, "export")]
    assert "0 records" in report["problems"][0]["text"]


def test_an_export_is_not_mixed_up_with_anything_else(plan: Plan, logs: Path, tmp_path: Path) -> None:
    to = tmp_path / "export"
    run("export", logs, "--to", to, "--tables", "records")
    assert "holds the tables records: export the same ones" in failed("export", logs, "--to", to, "--tables", "raw")
    assert "has no table 'raw', it has records: export again" in failed("audit", to)
    assert "is an export already" in failed("export", to, "--to", tmp_path / "other")
    assert "it has to be the only path" in failed("audit", to, logs)
    assert "there is no table 'rows': there are records," in failed("export", logs, "--to", to, "--tables", "rows")
    assert "is not empty and holds no export" in failed("export", logs, "--to", logs)
    others = Plan(dict.fromkeys(plan.names, 5), plan.records, plan.endings)
    others.write(tmp_path / "others")
    assert "it was wiped or swapped; export into a new folder" in failed("export", tmp_path / "others", "--to", to)
    cut(plan, 0.5).write(tmp_path / "back")
    assert "it was set back; export into a new folder" in failed("export", tmp_path / "back", "--to", to)
    longer = {
        name: [replace(one, time_ns=one.time_ns + 1) for one in records] for name, records in plan.records.items()
    }
    Plan(plan.committer_ids, longer, plan.endings).write(tmp_path / "regrown")
    assert "the log was cut and has grown since" in failed("export", tmp_path / "regrown", "--to", to)
    state = json.loads((to / EXPORT_FILE_NAME).read_text())
    (to / EXPORT_FILE_NAME).write_text(json.dumps({**state, "version": 9}))
    assert "was exported with version 9, this program reads version 1" in failed("audit", to)
    (to / EXPORT_FILE_NAME).write_text("{")
    assert "cannot be read" in failed("audit", to)


def test_damaged_records_are_exported_as_they_are(pair: Plan, tmp_path: Path, spark: SparkSession) -> None:
    plan = pair
    folders = plan.write(tmp_path / "logs")
    for sequence_id in (5, 9):
        flip_byte(Path(folders[1]), sequence_id)
    run("export", tmp_path / "logs", "--to", tmp_path / "export", "--tables", "raw,messages")
    assert archived(spark, tmp_path / "export") == logged(tmp_path / "logs")
    damaged = {"kind": "damage", "sender": "", "receiver": plan.names[1], "first": 5}
    report = values("audit", tmp_path / "export", status=3)
    assert report["counts"] == {"damage": 2}
    assert report["violations"][0].items() >= damaged.items()
    lines = run("audit", tmp_path / "logs", "--limit", 1, status=3).stdout.splitlines()
    assert "VIOLATIONS: 2 damage" in lines
    assert lines[-1] == "and 1 more; --limit shows them"
    for source in ("logs", "export"):
        problems = values("verify", tmp_path / source, status=3)["problems"]
        places = [(problem["instance"], problem["place"]) for problem in problems]
        assert places == [(plan.names[1], "record 5"), (plan.names[1], "record 9")]


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify_lists_everything_that_is_damaged(plan: Plan, tmp_path: Path) -> None:
    folders = [Path(folder) for folder in plan.write(tmp_path)]
    flip_byte(folders[0], 3)
    flip_byte(folders[0], 9, at=-1)
    flip_byte(folders[2], 1, at=20)
    flip_value(folders[1], b"chunks")
    flip_value(folders[3], b"meta")
    report = values("verify", tmp_path, status=3)
    places = [(problem["instance"], problem["place"]) for problem in report["problems"]]
    names = plan.names
    expected = {(names[0], "record 3"), (names[0], "record 9"), (names[2], "record 1"), (names[1], "checkpoint 1")}
    assert set(places) == expected
    assert [each["log"] for each in report["unreadable"]] == [str(folders[3])]
    assert report["records"][names[0]] == len(plan.records[names[0]]) - 2
    lines = run("verify", tmp_path, "--limit", 1, status=3).stdout.splitlines()
    assert lines[1] == "and 3 more; --limit shows them"
    assert lines[2].startswith("DAMAGED: 4 problems; ")
    assert lines[3] == "NOT READ, or not to the end: 1 log"
    assert lines[4].startswith(f"  {folders[3]}: ")


def flip_value(folder: Path, table: bytes) -> None:
    """A bit of the last byte of a table's first value."""
    environment = lmdb.open(str(folder), max_dbs=32, map_size=1 << 30, lib_version=0)
    try:
        database = environment.open_db(table, create=False)
        with environment.begin() as transaction, transaction.cursor(database) as cursor:
            assert cursor.first()
            key, value = cursor.key(), bytearray(cursor.value())
    finally:
        environment.close()
    value[-1] ^= 1
    put_value(folder, table, key, bytes(value))


def put_value(folder: Path, table: bytes, key: bytes, value: bytes) -> None:
    environment = lmdb.open(str(folder), max_dbs=32, map_size=1 << 30, lib_version=0)
    try:
        database = environment.open_db(table, create=False)
        with environment.begin(write=True) as transaction:
            transaction.put(key, value, db=database)
    finally:
        environment.close()


# --- stats -----------------------------------------------------------------------------------------------------------


def test_statistics_are_what_a_plain_count_gives(plan: Plan, logs: Path, tmp_path: Path) -> None:
    calls: Counter[str] = Counter()
    pairs: Counter[tuple[str, str]] = Counter()
    latencies: dict[str, list[int]] = {name: [] for name in plan.names}
    for name, records in plan.records.items():
        for record in records[1:]:
            for batch in record.inputs:
                sender = "outside" if batch.kind == BatchKind.IMPULSES else batch.name or name
                calls[name] += batch.count
                pairs[sender, name] += batch.count
                latencies[name] += [record.time_ns - batch.send_time_ns] * batch.count
    found = values("stats", logs, "--html", tmp_path / "page.html")
    assert {service["instance"]: service["figures"]["calls"] for service in found["services"]} == calls
    assert {(each["sender"], each["receiver"]): each["figures"]["calls"] for each in found["talkers"]} == pairs
    for service in found["services"]:
        times = sorted(latencies[service["instance"]])
        assert service["figures"]["max_ms"] == times[-1] / 1e6
        low, high = times[int(len(times) * 0.45)] / 1e6, times[int(len(times) * 0.55)] / 1e6
        assert low * 0.98 <= service["figures"]["median_ms"] <= high * 1.02
        assert service["records"] == len(plan.records[service["instance"]])
        assert service["messages_max"] == max(
            sum(batch.count for batch in record.inputs) for record in plan.records[service["instance"]]
        )
    by_method = Counter()
    for method in found["methods"]:
        by_method[method["instance"]] += method["figures"]["calls"]
    assert by_method == calls
    assert sum(part["figures"]["calls"] for part in found["bins"]) == sum(calls.values())
    moments = [record.time_ns for records in plan.records.values() for record in records]
    assert found["bin_ns"] * 20 < max(moments) - min(moments) <= found["bin_ns"] * 120
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 5
    assert all(name in page for name in plan.names)
    lines = run("stats", logs, "--top", 1).stdout.splitlines()
    assert len([line for line in lines if line.endswith("more; --top shows them")]) == 2


# --- trace and what-if, on logs of real coordinators -----------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_talk(tmp_path_factory.mktemp("talk"))


def test_a_trace_follows_a_message_through_the_services(home: Path, tmp_path: Path) -> None:
    picture, graph = tmp_path / "trace.svg", tmp_path / "trace.dot"
    options = ("--lag", 0, "--within-ms", 5, "--decode", f"asker={TALK}:Asker,helper={TALK}:Helper")
    found = values("trace", "asker", "1:0", home, *options, "--svg", picture, "--dot", graph)
    assert [(node["instance"], node["source"], node["first"], node["candidates"]) for node in found["nodes"]] == [
        ("asker", "outside", 1, 1),
        ("helper", "asker", 1, 1),
        ("asker", "helper", 1, 1),
    ]
    assert [node["methods"] for node in found["nodes"]] == [["ask"], ["help"], ["answer"]]
    assert "<svg" in picture.read_text()
    assert (mode(picture), mode(graph)) == ("0600", "0600")
    assert graph.read_text().startswith("digraph")


def test_what_if_on_a_whole_fleet(home: Path, tmp_path: Path) -> None:
    """It finds exactly those instances that do other things with the new code; of one class some do, some do not."""
    code = tmp_path / "new"
    other = write_changed_code(code)
    changed = values("what-if", home, *app_options(other), "--code", code, status=3)
    by_name = {each["instance"]: each["values"] for each in changed["instances"]}
    verdicts = {each["instance"]: each["status"] for each in changed["instances"]}
    assert verdicts == {"asker": 0, "helper": 3, "tally-large": 3, "tally-negative": 3, "tally-small": 0}
    assert (changed["same"], changed["different"], changed["failed"]) == (2, 3, 0)
    assert [name for name, found in by_name.items() if found["fates"]] == ["tally-negative"]
    assert by_name["tally-negative"]["fates"][0]["first"]["new"]["text"] == "a negative number"
    assert [name for name, found in by_name.items() if found["state"]] == ["tally-large", "tally-negative"]
    assert [name for name, found in by_name.items() if found["by_method"]] == ["helper"]
    assert changed["differences"]["changed"] == 4  # 0 * 2 is 0 * 3
    assert {(row["destination"], row["method"]): row["changed"] for row in changed["by_method"]} == {
        ("asker", "Asker.answer"): 4
    }
    lines = run("what-if", home, "--app", f"helper={other}:Helper", "--code", code, status=3).stdout.splitlines()
    assert lines[-1].startswith("0 the same, 1 different, 0 failed: ")
    nowhere = ("--app", "asker=nowhere:Asker", "--app", "helper=nowhere:Helper")
    broken = run("what-if", home, *nowhere, "--code", code, status=1)
    assert "0 the same, 0 different, 2 failed" in broken.stdout
    assert "nowhere" in broken.stdout
    assert "Traceback" not in broken.output
    failure = failed("what-if", home, "--app", f"other={TALK}:Asker")
    assert failure.startswith("error: the instance 'other' is not registered in ")
    assert "there is no folder or wheel" in failed("what-if", home, "--app", "a:B", "--code", tmp_path / "none")
    assert "expected MODULE:CLASS" in failed("what-if", home, "--app", "nonsense", status=2)


def test_what_if_runs_the_code_that_is_named_on_both_sides(tmp_path: Path) -> None:
    """Code with the old one's module names, and with others: each status is that of `immortal what-if`."""
    flow.record_flow(tmp_path)
    with contextlib.chdir(tmp_path / "old"):
        found = values("what-if", tmp_path / "home", *flow.app_options(), "--code", "../new", status=3)
        assert {each["instance"]: each["status"] for each in found["instances"]} == flow.STATUSES
        by_name = {each["instance"]: each["values"] for each in found["instances"]}
        assert [name for name, one in by_name.items() if one["state"]] == ["both", "state"]
        assert [name for name, one in by_name.items() if one["by_method"]] == ["both", "calls"]
        for name, one in by_name.items():
            for side in ("old", "new"):
                assert one[f"{side}_code"]["file"] == str(tmp_path / side / "flow" / f"{name}.py")
        other = ("--app", f"state={flow.app_of('state', 'flow2')}", "--code", "../new")
        lines = run("what-if", tmp_path / "home", *other, status=3).stdout.splitlines()
        assert any(line.startswith(f"new code: {tmp_path}/new/flow2/state.py, 2 modules with dig") for line in lines)
        nothing = ("--app", f"nothing={flow.app_of('nothing')}", "--code")
        run("what-if", tmp_path / "home", *nothing, "../new")
    with contextlib.chdir(tmp_path / "new"):
        said = run("what-if", tmp_path / "home", *nothing, ".", status=1).stdout
        assert "so the new code would be compared with itself" in said


def fleet_what_if(home: Path, *arguments: object, status: int) -> str:
    """Return what `immortal what-if --fleet` prints, which its run on Spark must print too."""
    alone = CliRunner().invoke(main, ["--home", str(home), "what-if", "--fleet", *map(str, arguments)])
    assert alone.exit_code == status, (alone.output, alone.exception)
    assert run("what-if", "--propagate", home, *arguments, status=status).stdout == alone.stdout
    return alone.stdout


def test_a_what_if_that_propagates_is_that_of_one_process(home: Path, tmp_path: Path) -> None:
    """The asker gets other answers; orders are run by several tasks, and each is compared with the first."""
    other = write_changed_code(tmp_path / "new")
    told = ("--change", f"helper={other}:Helper", "--code", tmp_path / "new")
    text = fleet_what_if(home, *told, status=3)
    assert "count: was 20; would be 30" in text
    check = ("--check", "tests.helpers.talk_fleet:is_little")
    checked = fleet_what_if(home, *told, *check, "--seeds", "3", "--details", "--json", status=3)
    found = json.loads(checked)
    assert (found["seeds"]["runs"], found["seeds"]["broken"], len(found["differences"])) == (3, 3, 4)
    more = ("--change", f"tally-small={other}:Tally")
    assert "no difference" in fleet_what_if(home, *more, "--change", f"asker={other}:Asker", *told[2:], status=0)
    told = ("--propagate", home, "--change", f"helper={other}:Helper", "--code", tmp_path / "new")
    run("what-if", *told, "--html", tmp_path / "page.html", "--parquet", tmp_path / "tables", status=3)
    assert "Helper.help" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "tables" / "differences.parquet").exists()
    assert "no module 'nowhere'" in failed("what-if", "--propagate", home, "--change", "helper=nowhere:Helper")
    assert "the instance 'other' is not registered" in failed("what-if", "--propagate", home, "--change", "other=a:B")
    assert "no terminal" in failed("what-if", *told, "--effects", "ask", status=2)


def test_a_what_if_that_propagates_goes_without_logs_that_cannot_be_read(home: Path, tmp_path: Path) -> None:
    copy = copied(home, tmp_path)
    truncate(asker := tmp_path / "logs" / "asker" / "log")
    same = ("what-if", "--propagate", copy, "--change", f"helper={TALK}:Helper")
    found = values(*same, status=4)
    assert [each["log"] for each in found["unreadable"]] == [str(asker)]
    assert "asker" not in [*found["equal_services"], *(one["name"] for one in found["services"])]
    assert f"  {asker}: " in run(*same, status=4).stdout
    assert "is truncated" in failed(*same, "--strict")
    assert "data.mdb is truncated" in failed("what-if", "--propagate", copy, "--change", f"asker={TALK}:Asker")


def test_commits_are_tried_at_once(home: Path, tmp_path: Path) -> None:
    code = tmp_path / "code"
    other = write_changed_code(code)
    changed, same = (code / f"{other}.py").read_text(), Path(talk_app.__file__).read_text()
    for text in (same, same, changed, changed):
        (code / f"{other}.py").write_text(f"{text}\n# {len(list(code.glob('.git/objects/*')))}\n")
        for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "Change"]):
            own = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]
            subprocess.run(["git", "-C", code, *own, *command], check=True)
    told = ("--change", f"helper={other}:Helper", "--code", code, "--bisect", "HEAD~3..HEAD")
    assert "the first of 3 commits that makes a difference" in fleet_what_if(home, *told, status=3)
    found = values("what-if", "--propagate", home, *told, status=3)
    assert [one["found"] for one in found["tried"]] == ["good", "bad", "good", "bad"]


# --- logs that cannot be read ----------------------------------------------------------------------------------------


def truncate(folder: str | Path) -> None:
    os.truncate(Path(folder) / "data.mdb", 16 << 10)


def test_logs_that_cannot_be_opened_are_reported_beside_the_others(plan: Plan, tmp_path: Path) -> None:
    folders = plan.write(tmp_path / "logs")
    truncate(folders[0])
    flip_value(Path(folders[1]), b"meta")
    verbs: list[tuple[object, ...]] = [
        ("verify", tmp_path / "logs"),
        ("audit", tmp_path / "logs"),
        ("stats", tmp_path / "logs"),
        ("trace", plan.names[2], "2", tmp_path / "logs"),
        ("export", tmp_path / "logs", "--to", tmp_path / "export", "--tables", "raw"),
    ]
    for verb in verbs:
        found = values(*verb, status=4)["unreadable"]
        assert [each["log"] for each in found] == folders[:2]
        assert "is truncated: it has" in found[0]["text"]
        assert "is truncated: it has" in failed(*verb, "--strict")
    lines = run("verify", tmp_path / "logs", status=4).stdout.splitlines()
    assert lines[0].startswith("no damage in what could be read: ")
    assert lines[1] == "NOT READ, or not to the end: 2 logs"
    assert [line.split(": ")[0].strip() for line in lines[2:]] == folders[:2]
    assert sorted(json.loads((tmp_path / "export" / EXPORT_FILE_NAME).read_text())["exported"]) == plan.names[2:]
    flip_byte(Path(folders[2]), 3)
    values("verify", tmp_path / "logs", status=3)  # what is found goes first
    for folder in folders[2:]:
        truncate(folder)
    assert "none of 4 logs can be read; the first: " in failed("audit", tmp_path / "logs")


def test_logs_that_go_bad_while_they_are_read(plan: Plan, tmp_path: Path, spark: SparkSession) -> None:
    folders = plan.write(tmp_path / "logs")
    shutil.copytree(tmp_path / "logs", tmp_path / "sound")
    fleet, strict = (open_fleet(folders, strict=strict) for strict in (False, True))
    to = tmp_path / "export"
    shutil.rmtree(folders[1])
    truncate(folders[2])
    good = [plan.names[0], plan.names[3]]
    verified = verify(spark, fleet)
    assert (verified.problems, {name: count for name, count in verified.records.items() if count}) == (
        [],
        {name: len(plan.records[name]) for name in good},
    )
    audited = audit(spark, fleet)
    assert audited.violations == []
    assert [service.instance for service in stats(spark, fleet).services] == good
    assert {node.instance for node in trace(spark, fleet, good[0], 2).nodes} <= set(good)
    exported = export_job.export(spark, fleet, to, ["raw"])
    assert list(exported.instances) == good
    for report in (verified, audited, exported):
        assert [each.log for each in report.unreadable] == folders[1:3]
        assert "was removed while it was read" in report.unreadable[0].text
        assert "is truncated" in report.unreadable[1].text
    with pytest.raises(PySparkException) as raised:
        verify(spark, strict)
    assert str(one_line_error(raised.value)) in [each.text for each in verified.unreadable]
    sound = logged(tmp_path / "sound")
    assert archived(spark, to) == {name: sound[name] for name in good}
    again = values("export", tmp_path / "sound", "--to", to)
    assert again["rows"]["raw"] == sum(len(plan.records[name]) for name in plan.names[1:3])
    assert archived(spark, to) == sound


def copied(home: Path, folder: Path) -> Path:
    """Copy a home and its logs into ``folder``."""
    copy = folder / "home"
    shutil.copytree(home.parent, copy.parent, dirs_exist_ok=True)
    for settings in copy.glob("*.toml"):
        settings.write_text(settings.read_text().replace(str(home.parent), str(copy.parent)))
    return copy


def test_what_if_leaves_out_a_log_that_cannot_be_read(home: Path, tmp_path: Path) -> None:
    copy = copied(home, tmp_path)
    truncate(asker := copy.parent / "logs" / "asker" / "log")
    found = values("what-if", copy, *app_options(TALK), status=4)
    assert (found["same"], found["different"], found["failed"]) == (len(CLASSES) - 1, 0, 0)
    assert [each["log"] for each in found["unreadable"]] == [str(asker)]
    assert "is truncated" in failed("what-if", copy, *app_options(TALK), "--strict")


# --- what can be wrong -----------------------------------------------------------------------------------------------


def test_what_a_user_can_get_wrong(plan: Plan, pair: Plan, logs: Path, tmp_path: Path) -> None:
    assert failed("audit", tmp_path / "none") == f"error: there is no folder {tmp_path / 'none'}"
    (tmp_path / "empty").mkdir()
    assert "there is no log in" in failed("stats", tmp_path / "empty")
    assert "there is no log in" in failed("verify", tmp_path / "empty")
    (tmp_path / "text" / "log").mkdir(parents=True)
    (tmp_path / "text" / "log" / "data.mdb").write_text("hello " * 100)
    assert "is not an LMDB file" in failed("audit", tmp_path / "text")
    newer = Path(pair.write(tmp_path / "newer")[0])
    key = b"format"
    put_value(newer, b"meta", key, log_format.seal(b"meta", key, log_format.ENCRYPTED_VERSION + 1))
    said = failed("audit", newer)
    assert f"has format version {log_format.ENCRYPTED_VERSION + 1}, this program reads version" in said
    copy = tmp_path / "copies"
    for number in (1, 2):
        shutil.copytree(logs / plan.names[0], copy / f"copy-{number}")
    assert f"are both logs of {plan.names[0]!r}: give one" in failed("audit", copy)
    assert failed("trace", "nobody", "3", logs).startswith("error: there is no log of 'nobody' among those given: ")
    assert "the log of 'service-0' holds records 0 to " in failed("trace", "service-0", "99999", logs)
    assert "has the messages 0 to " in failed("trace", "service-0", "2:99999", logs)
    assert "a record's number was expected" in failed("trace", "service-0", "3x", logs, status=2)
    assert "expected a name and a value" in failed("audit", logs, "--conf", "nonsense", status=2)
    assert "there is no module 'nowhere'" in failed("stats", logs, "--decode", "nowhere:Class")


def test_a_log_that_is_trimmed_while_it_is_read(pair: Plan, tmp_path: Path, spark: SparkSession) -> None:
    folders = pair.write(tmp_path)
    fleets = [open_fleet(folders, strict=strict) for strict in (True, False)]
    trim(Path(folders[0]), pair, pair.names[0], 10)
    with pytest.raises(PySparkException) as raised:
        audit(spark, fleets[0])
    said = str(one_line_error(raised.value))
    assert f"the log of '{pair.names[0]}' in {folders[0]} was trimmed up to record 10 while record 0" in said
    assert len(said.splitlines()) == 1
    report = audit(spark, fleets[1])
    assert [(each.log, each.text) for each in report.unreadable] == [(folders[0], said)]
    assert report.violations == []


def test_without_its_packages_one_line_says_so(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    lacking = "pyspark", "packaging"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in lacking else there(name))
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    monkeypatch.delitem(sys.modules, "immortal.pipeline.packing", raising=False)
    (archive := tmp_path / "env.tar.gz").touch()
    for options in ([], ["--env", archive]):
        said = failed("audit", logs, *options)
        assert said.startswith("error: the pipeline needs pyspark, packaging: ")
        assert said.endswith("pip install 'immortal-services[spark]'")


def test_without_java_one_line_says_so(logs: Path) -> None:
    environment = {**os.environ, "JAVA_HOME": "/nonexistent"}
    command = [sys.executable, "-m", "immortal", "pipeline", "audit", str(logs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: JAVA_HOME is /nonexistent, where there is no Java that runs; ")
    assert len(done.stderr.splitlines()) == 1


def test_a_run_is_reported_to_openlineage(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = tmp_path / "events"
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__APPEND", "true")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", str(events))
    run("verify", logs, "--lineage")
    first, last = map(json.loads, events.read_text().splitlines())
    assert (first["eventType"], last["eventType"]) == ("START", "COMPLETE")
    assert {one["name"] for one in last["inputs"]} == {str(log) for log in logs.glob("*/log")}
