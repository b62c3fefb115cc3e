"""`immortal doctor`: each finding on a home, a disk, a clock or limits that have what it looks for."""

from __future__ import annotations

import json
import os
import resource
import socket
import time
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.coordinator.doctor import Finding, Level, home, installation, machine
from immortal.coordinator.instances.own_logs import OwnLogs
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.operator import control
from immortal.coordinator.project.output import LogFiles
from immortal.log import create_log
from immortal.protocol import compiled, distribution

ROOT = Path(__file__).parents[2]
MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 27 0:41 / /run rw - tmpfs tmpfs rw,size=1k
32 27 0:42 / /mnt/with\\040space rw - nfs4 server:/x rw,vers=4
33 27 8:1 / /data rw,noatime - ext4 /dev/sda1 rw,nobarrier
34 33 8:2 / /data ro - xfs /dev/sda2 rw
"""


def of_level(findings: Iterable[Finding], level: Level) -> list[str]:
    return [finding.what for finding in findings if finding.level is level]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr(home, "SHORT_FOLDERS", tmp_path)  # that of this machine has what others left
    registry = Registry(tmp_path / "home")
    registry.register("counter", "tcp://127.0.0.1:*")
    return registry


def start_once(registry: Registry, name: str) -> Path:
    """What the first start leaves: a log, and the note of it."""
    settings = registry.load(name)
    store = create_log(settings.log, name)
    OwnLogs(settings.folder).add(store.backend.identity, authenticated=False)
    store.close()
    return Path(settings.log)


# --- the installation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("1.6", "<4,>=1.6", True),
        ("1.6.0", "<4,>=1.6", True),
        ("4.0", "<4,>=1.6", False),
        ("1.10", "<4,>=1.6", True),
        ("1.5.9", "<4,>=1.6", False),
        ("26.0.0rc1", "<28,>=26", True),
        ("5", "", True),
    ],
)
def test_versions_within_bounds(version: str, bounds: str, fits: bool) -> None:
    assert installation.is_within(version, bounds) is fits


def test_this_installation_has_no_problem() -> None:
    assert of_level(installation.findings(), Level.PROBLEM) == []


def test_packages_that_are_missing_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["click<2,>=1", "no-such-package>=1", 'no-such-extra>=1; extra == "metrics"', "msgspec>=0.19,<1"]
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    findings = [one for one in installation.findings() if one.level is Level.PROBLEM]
    old, missing = findings
    assert old.what.startswith("click is of version ")
    assert "click <2,>=1" in old.why
    assert missing.what == "the package 'no-such-package' is missing"
    assert missing.remedy.endswith("-m pip install 'no-such-package>=1'")
    assert not installation.is_installed("metrics")


def test_sources_that_nobody_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "NAME", "immortal-elsewhere")
    (found,) = of_level(installation.findings(), Level.PROBLEM)
    assert "is not installed for" in found


def test_the_source_runs_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(compiled.PURE_VARIABLE, "1")
    asked = [one for one in installation.findings() if one.level is Level.NOTE]
    assert [one.what for one in asked] == ["pure Python codec and core (IMMORTAL_PURE_PYTHON is set)"]
    assert asked[0].remedy == "take IMMORTAL_PURE_PYTHON out of the environment"
    monkeypatch.delenv(compiled.PURE_VARIABLE)
    monkeypatch.setattr(compiled, "EXTENSION_SUFFIXES", [".of-another-python.so"])
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    (none,) = (one for one in installation.findings() if one.level is Level.NOTE)
    assert "none is compiled" in none.what
    assert "It lacks a C compiler" in none.why
    assert none.remedy == f"apt-get install gcc python3-dev && {ROOT}/scripts/setup"


# --- a home -----------------------------------------------------------------------------------------------------------


def test_a_home_that_is_not_there(tmp_path: Path) -> None:
    (found,) = home.findings(Registry(tmp_path / "elsewhere"))
    assert found.level is Level.NOTE
    assert found.what.endswith("elsewhere is not there")


def test_a_home_and_a_log_that_are_sound(registry: Registry) -> None:
    start_once(registry, "counter")
    assert {finding.level for finding in home.findings_of(registry, "counter")} <= {Level.OK}


def test_a_home_that_others_write_in(registry: Registry) -> None:
    registry.home.chmod(0o777)
    (found,) = home.findings(Registry(registry.home))
    assert found.what == f"{registry.home} has mode 0777: others can write in it"
    assert found.remedy.endswith(f"chmod go-w {registry.home}")


def test_settings_that_make_no_sense(registry: Registry) -> None:
    registry.path("counter").write_text("peer = 3\n")
    (found,) = of_level(home.findings(registry), Level.PROBLEM)
    assert str(registry.path("counter")) in found


def test_a_name_without_a_log_and_one_whose_log_is_gone(registry: Registry) -> None:
    OwnLogs(registry.load("counter").folder).create()  # as a registration by the command does
    (never,) = of_level(home.findings(registry), Level.NOTE)
    assert never == "counter was never started: it has no log yet"
    log = start_once(registry, "counter")
    log.rename(log.with_name("elsewhere"))
    (lost,) = of_level(home.findings(registry), Level.PROBLEM)
    assert lost == f"counter had a log, and there is none in {log}"


def test_remedies_that_can_be_pasted(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def remedy() -> str:
        (found,) = (one for one in home.findings(registry) if one.level is Level.NOTE)
        return found.remedy

    named = f"immortal --home {registry.home} run counter"
    assert remedy() == f"{named} MODULE:CLASS"
    registry.remember_app("counter", "counter:Counter")
    assert remedy() == named
    monkeypatch.setenv("IMMORTAL_HOME", str(registry.home))
    assert remedy() == "immortal run counter"


def test_a_log_without_a_name(registry: Registry) -> None:
    start_once(registry, "counter")
    registry.path("counter").unlink()
    (left,) = of_level(home.findings(registry), Level.NOTE)
    assert left == "1 log of instances that are not registered: counter"


def test_a_secret_that_others_may_read(registry: Registry) -> None:
    start_once(registry, "counter")
    secret = registry.load("counter").folder / home.APP_SECRET_FILE_NAME
    secret.write_text("x")
    secret.chmod(0o640)
    (found,) = of_level(home.findings(registry), Level.PROBLEM)
    assert found == f"{secret} has mode 0640: others can use it"


def test_a_socket_whose_process_is_gone(registry: Registry) -> None:
    start_once(registry, "counter")
    path = home.socket_path(registry.load("counter").folder, home.CONTROL_SOCKET_FILE_NAME)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))
        server.listen()
        home._bound_sockets.cache_clear()
        assert of_level(home.findings_of(registry, "counter"), Level.NOTE) == []
        server.settimeout(0)
        with pytest.raises(BlockingIOError):  # who listens has not been disturbed
            server.accept()
    home._bound_sockets.cache_clear()
    (found,) = of_level(home.findings_of(registry, "counter"), Level.NOTE)
    assert found == f"counter does not run, and has sockets: {path}"


def test_sockets_in_the_folder_that_all_homes_share(registry: Registry) -> None:
    start_once(registry, "counter")
    folder = home.SHORT_FOLDERS / f"immortal-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(folder / "x"))
    assert of_level(home.findings(registry), Level.NOTE) == [f"1 socket in {folder} without a process"]
    folder.chmod(0o755)
    (found,) = of_level(home.findings(registry), Level.PROBLEM)
    assert found == f"{folder} is no folder that only user {os.geteuid()} can use"


def test_an_extra_that_an_instance_needs(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register("paid", "tcp://127.0.0.1:*", log="postgresql://immortal@db.example/immortal")
    monkeypatch.setattr(installation, "is_installed", lambda extra: False)
    (found,) = of_level(home.findings_of(registry, "paid"), Level.PROBLEM)
    assert found == "paid needs the extra 'postgres', which is not installed"


@pytest.mark.parametrize(("ahead_s", "words"), [(0, None), (3600, "3,600.0 s ahead of"), (-5.5, "5.5 s behind")])
def test_a_jump_that_an_instance_holds_back(
    ahead_s: float, words: str | None, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_once(registry, "counter")
    monkeypatch.setattr(control, "query", lambda folder, verb, timeout_s: {"ahead_s": ahead_s})
    notes = of_level(home.findings_of(registry, "counter"), Level.NOTE)
    if words is None:
        assert notes == []
    else:
        (said,) = notes
        assert f"{words} the time of counter" in said


def test_a_coordinator_that_gives_no_answer(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    start_once(registry, "counter")

    def query(folder: Path, verb: str, timeout_s: float) -> None:
        raise control.ControlError("the coordinator of 'counter' (process 7) gives no answer")

    monkeypatch.setattr(control, "query", query)
    (found,) = of_level(home.findings_of(registry, "counter"), Level.PROBLEM)
    assert found == "the coordinator of 'counter' (process 7) gives no answer"


# --- a disk -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mountinfo(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("folder", "kind", "level", "words"),
    [
        ("/home/me", "ext4", Level.OK, "is on ext4, mounted at /"),
        ("/run/me", "tmpfs", Level.PROBLEM, "is on tmpfs"),
        ("/mnt/with space/me", "nfs4", Level.PROBLEM, "mounted at /mnt/with space"),
        ("/data/me", "xfs", Level.PROBLEM, "read-only"),
    ],
)
def test_filesystems(mountinfo: Path, folder: str, kind: str, level: Level, words: str) -> None:
    mount = machine.mount_of(Path(folder), mountinfo)
    assert mount is not None
    assert mount.kind == kind
    found = machine._check_filesystem(Path(folder), mount)
    assert found.level is level
    assert words in found.what


@pytest.mark.parametrize(
    ("median_s", "level", "words"),
    [
        (2e-6, Level.PROBLEM, "no flush of a device is that fast"),
        (300e-6, Level.OK, ""),
        (0.030, Level.NOTE, "waits for a sync at each end"),
    ],
)
def test_what_times_of_syncs_say(median_s: float, level: Level, words: str) -> None:
    found = machine.judge_sync_times(Path("/x"), machine.SyncTimes([median_s] * 9, 1e-6), None)
    assert found.level is level
    assert words in found.why
    assert "4 KiB takes " in found.what


def test_a_disk_that_rotates_faster_than_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_rotates", lambda device: True)
    mount = machine.Mount(Path("/"), "ext4", "8:1", frozenset())
    found = machine.judge_sync_times(Path("/x"), machine.SyncTimes([100e-6] * 9, 1e-6), mount)
    assert found.level is Level.NOTE
    assert "it rotates" in found.why


def test_barriers_that_a_mount_leaves_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mount = machine.Mount(tmp_path, "ext4", "8:1", frozenset({"rw", "nobarrier"}))
    monkeypatch.setattr(machine, "mount_of", lambda folder: mount)
    assert f"{tmp_path} is mounted with 'nobarrier'" in of_level(machine.findings(tmp_path), Level.PROBLEM)


def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "FREE_SIZE_BYTES_MIN", 1 << 70)
    assert any(what.endswith(f"are free at {tmp_path}") for what in of_level(machine.findings(tmp_path), Level.PROBLEM))


def test_the_measurement_leaves_nothing(tmp_path: Path) -> None:
    times = machine.measure(tmp_path)
    assert len(times.synced_s) >= machine.SAMPLES_MIN
    assert times.synced_s == sorted(times.synced_s)
    assert list(tmp_path.iterdir()) == []


def test_the_measurement_removes_only_its_own_file(tmp_path: Path) -> None:
    """A process of another container can have the same ID."""
    other = tmp_path / f".doctor-{os.getpid()}"
    other.write_text("measured")
    with pytest.raises(FileExistsError):
        machine.measure(tmp_path)
    assert other.read_text() == "measured"


# --- the clock, limits, memory ----------------------------------------------------------------------------------------


def test_a_clock_that_has_gone_back(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    file.touch()
    assert of_level(machine.clock_findings([file]), Level.PROBLEM) == []
    os.utime(file, times=(time.time() + 3600, time.time() + 3600))
    (found,) = of_level(machine.clock_findings([file, tmp_path / "missing"]), Level.PROBLEM)
    assert "s from now: the clock has gone back, or was wrong then" in found


@pytest.mark.parametrize(("status", "level"), [(0, Level.OK), (machine._UNSYNCHRONISED, Level.NOTE)])
def test_a_clock_that_nothing_keeps_right(status: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        @staticmethod
        def adjtimex(pointer: object) -> int:
            timex = pointer._obj  # type: ignore[attr-defined]  # what byref() was given
            timex.status, timex.max_error_us = status, 1500
            return 0

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name, use_errno: Kernel)
    first = next(iter(machine.clock_findings([])))
    assert first.level is level
    assert ("1.5 ms" in first.what) is (level is Level.OK)


def test_the_real_kernel_is_asked() -> None:
    first = next(iter(machine.clock_findings([])))
    assert "adjtimex" in first.what or "synchronised" in first.what


def limited(monkeypatch: pytest.MonkeyPatch, which: int, hard: int) -> None:
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (hard, hard) if asked == which else real(asked))


@pytest.mark.parametrize(
    ("hard", "level"), [(256, Level.PROBLEM), (2048, Level.NOTE), (65536, Level.OK), (resource.RLIM_INFINITY, Level.OK)]
)
def test_descriptors(hard: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIMIT_NOFILE, hard)
    first = next(iter(machine.limit_findings(50)))
    assert first.level is level
    assert "50 instances here may need 456 each" in first.what


def test_a_limit_of_file_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, resource.RLIMIT_FSIZE, 1 << 20)
    assert "the size of a file (ulimit -f) is limited to 1.0 MiB" in of_level(machine.limit_findings(1), Level.PROBLEM)


def test_memory_that_is_promised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_first_word", lambda path: "2" if path.endswith("overcommit_memory") else "")
    monkeypatch.setattr(machine, "_available_size_bytes", lambda: 1 << 20)
    notes = of_level(machine.limit_findings(3), Level.NOTE)
    assert "1.0 MiB of memory are free; 3 instances here take about 192.0 MiB, and their states" in notes
    assert "vm.overcommit_memory is 2: memory is promised only once" in notes


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have their files in memory, which is a problem."""
    monkeypatch.setattr(machine, "mount_of", lambda folder: None)
    monkeypatch.setattr(machine, "UNTRUE_S", 0.0)


@pytest.mark.usefixtures("on_a_disk")
def test_the_status_says_whether_there_is_a_problem(registry: Registry) -> None:
    start_once(registry, "counter")
    asked = ["--home", os.fspath(registry.home), "doctor"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].startswith("0 problems, ")
    registry.home.chmod(0o770)
    broken = CliRunner().invoke(main, asked)
    assert broken.exit_code == 1
    assert f"do: look at what is in it, then: chmod go-w {registry.home}" in broken.output
    found = json.loads(CliRunner().invoke(main, [*asked, "--json"]).output)["findings"]
    assert {"area", "level", "what", "why", "remedy"} == set(found[0])
    assert [one["area"] for one in found if one["level"] == "problem"] == ["home"]


@pytest.mark.usefixtures("on_a_disk")
def test_one_instance(registry: Registry) -> None:
    log = start_once(registry, "counter")
    asked = ["--home", os.fspath(registry.home), "doctor", "counter"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[:2] == [
        f"counter: its log is in {log}, written by nobody now",
        "  the machine crashes: nothing is lost",
    ]
    (registry.home / "counter").chmod(0o777)
    told = CliRunner().invoke(main, [*asked, "--json"])
    assert told.exit_code == 1
    answer = json.loads(told.output)
    assert answer["log"] == os.fspath(log)
    assert [one["what"] for one in answer["findings"] if one["level"] == "problem"] == [
        f"{registry.home / 'counter'} has mode 0777: others can write in it"
    ]


def test_a_bundle_for_a_bug_report(registry: Registry, tmp_path: Path) -> None:
    start_once(registry, "counter")
    output = LogFiles(registry.home, lambda: None)
    output.write_line("counter", "a handler failed token='planted'", "info")
    output.write_line("counter", "what the app prints: planted")
    output.write_line("counter", "> Stock.order raised KeyError: 'planted'  arguments=\"('planted', 1)\"", "error")
    output.write_line("counter", "it makes another call (now: 19: Till.sold('planted', 1)): mend it", "error")
    output.write_line("counter", "the app leaves: Till.take raised ValueError: planted", "info")
    output.close()
    bundle = tmp_path / "report.zip"

    def run(*options: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, ["--home", str(registry.home), "doctor", "--bundle", str(bundle), *options])
        return result.exit_code, result.output

    status, said = run()
    assert status == 0, said
    with zipfile.ZipFile(bundle) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    parts = ["findings.json", *(f"counter/{name}" for name in ("status.json", "settings.json", "output.txt"))]
    assert list(files) == [f"report/{name}" for name in parts]
    assert all(name in said for name in parts)
    assert not any("planted" in text for text in files.values())
    assert "a handler failed token=***" in files["report/counter/output.txt"]
    assert "(now: 19: Till.sold(***" in files["report/counter/output.txt"]
    assert "the app leaves: Till.take raised ValueError: ***" in files["report/counter/output.txt"]
    assert "2 lines of the app left out" in files["report/counter/output.txt"]
    assert json.loads(files["report/counter/settings.json"])["name"] == "counter"
    assert json.loads(files["report/findings.json"])
    assert bundle.stat().st_mode & 0o077 == 0

    for options, error in ((), "the file exists"), (("--json",), "combined with --json"):
        status, said = run(*options)
        assert status == 2
        assert error in said
