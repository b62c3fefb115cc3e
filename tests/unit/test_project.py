"""A project: what its file says, what is wrong with it, which one is meant, and how its registry follows it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from immortal.cli import main
from immortal.cli.shards import LOCK_FILE_NAME
from immortal.coordinator.config import ConfigError
from immortal.coordinator.config.schema import settings_of
from immortal.coordinator.core.notices import Level
from immortal.coordinator.instances import own_logs, upgrade_mark
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.project import fleet
from immortal.coordinator.project.code_change import (
    SourceFiles,
    VersionGap,
    python_files,
    request_upgrade,
    version_gap,
)
from immortal.coordinator.project.fleet import ServiceProcess, register
from immortal.coordinator.project.project import (
    ModuleImportError,
    Project,
    ProjectError,
    Service,
    ServiceSpec,
    ServiceTable,
    find_project,
    read_project,
)
from immortal.protocol.files import acquire_lock, opened
from tests.helpers.projects import NEXT, SHOP, make_project


def given(folder: Path, text: str) -> list[ServiceTable]:
    (folder / "immortal.toml").write_text(text)
    return read_project(folder / "immortal.toml")[1]


def refused(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as error:
        given(folder, text)
    return str(error.value).removeprefix(f"{folder}/immortal.toml")


def test_all_that_a_service_may_say(tmp_path: Path) -> None:
    (shop,) = given(
        tmp_path,
        """
        [services.shop]
        app = "shop:Shop"
        count = 3
        keep_checkpoints = "all"
        metrics_token_file = "secrets/token"
        environment = { CURRENCY = "EUR" }
        effects = { "shop:charge" = "fakes.bank:charge" }
        [services.shop.tuning]
        clock_hold_s = 7
        [services.shop.peers]
        bank = "tcp://bank.example:7000"
        """,
    )
    assert (shop.name, shop.app, shop.count) == ("shop", "shop:Shop", 3)
    assert shop.environment == {"CURRENCY": "EUR"}
    assert shop.effects == {"shop:charge": "fakes.bank:charge"}
    assert shop.settings == {
        "keep_checkpoints": "all",
        "metrics_token_file": str(tmp_path / "secrets/token"),
        "tuning": {"clock_hold_s": 7},
        "peers": {"bank": "tcp://bank.example:7000"},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ': there is no service: a table such as [services.shop] with app = "shop:Shop"'),
        ("[services.a]\n", ', line 1: the field services.a.app is missing: app = "module:Class"'),
        (
            '[services.a]\napp = "shop"\n',
            ', line 2, field \'services.a.app\': got "shop", expected "module:Class", or a file of this folder with one'
            ' service, such as "shop.py"',
        ),
        (
            '[services.a]\napp = "m:C"\ncuont = 2\n',
            ", line 3, field 'services.a.cuont': unknown field: did you mean 'count'?",
        ),
        (
            '[services.a]\napp = "m:C"\n[services.a.tuning]\nclock_hold_s = 0\n',
            ", line 4, field 'services.a.tuning.clock_hold_s': got 0, expected a whole number from 1 to 604800",
        ),
        (
            '[services.a]\napp = "m:C"\nenvironment = { A = 1 }\n',
            ", line 3, field 'services.a.environment': got {'A': 1}, expected a text for each name, but 'A' has none",
        ),
        (
            '[services.a]\napp = "m:C"\neffects = { "m:charge" = "charge" }\n',
            ", line 3, field 'services.a.effects': got {'m:charge': 'charge'}, expected functions as module:function,"
            " not 'charge'",
        ),
        (
            '[services.a]\napp = "m:C"\ncount = 2\npeer = "tcp://127.0.0.1:7000"\n',
            ", line 4, field 'services.a.peer': 2 instances can't share one; leave it out",
        ),
        (
            '[services.a]\napp = "m:C"\napp_port = 1\napp_send_port = 2\n',
            ", line 4, field 'services.a.app_send_port': the apps that a project runs use one connection; start such an"
            " instance by hand",
        ),
        ('[services."a b"]\napp = "m:C"\n', ", table [services]: 'a b' is no instance name"),
        ("services = 3\n", ", line 1, field 'services': got 3, expected a table [services]"),
        ("[services.a\n", ", line 1, column 12: no valid TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    assert refused(tmp_path, text).startswith(said)


def test_services_are_those_of_the_modules(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "immortal.toml").write_text(
        '[services.till]\napp = "shop:Till"\n[services.s]\napp = "shop:Shop"\ncount=2'
    )
    project = find_project(tmp_path)
    till, first, second = project.services()
    assert (till.name, till.app, till.version, till.calls) == ("till", "shop:Till", 1, ())
    assert (first.name, second.name, first.calls) == ("s-1", "s-2", ("till",))
    assert [Path(file).name for file in first.files] == ["shop.py"]
    assert project.home == tmp_path / ".immortal"
    assert project.names() == ["till", "s-1", "s-2"]


def test_a_file_stands_for_its_services(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP + "\n\nclass OldStall(Shop):\n    pass\n")
    found = Project(tmp_path / "shop.py").services()
    assert [(one.name, one.app) for one in found] == [
        ("till", "shop:Till"),
        ("shop", "shop:Shop"),
        ("old_stall", "shop:OldStall"),
    ]


def test_which_one_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "immortal.toml").write_text('[services.till]\napp = "shop.py"\n')
    with pytest.raises(ProjectError, match=r'line 1: shop.py has 2 services, .* app = "shop:Till" or "shop:Shop"'):
        find_project(tmp_path).services()
    (tmp_path / "immortal.toml").write_text('[services.till]\napp = "shop:Tell"\n')
    with pytest.raises(ProjectError, match="line 1: 'shop' has no service 'Tell'; there are: Till, Shop"):
        find_project(tmp_path).services()


def test_a_module_that_cant_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("import immortal\n\n1 / 0\n")
    with pytest.raises(ModuleImportError) as error:
        Project(tmp_path / "shop.py").services()
    assert 'shop.py", line 3' in str(error.value)
    assert "ZeroDivisionError" in str(error.value)
    assert "importlib" not in str(error.value)


def test_the_project_of_a_folder_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "immortal.toml").touch()
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    assert find_project(None).file == tmp_path / "immortal.toml"
    with pytest.raises(ProjectError, match=r"there is no .*nothing\.toml"):
        find_project(Path("nothing.toml"))


def test_the_registry_follows_and_keeps_what_is_not_said(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "home")

    def service(**settings: object) -> ServiceSpec:
        return ServiceSpec(name="shop", app="shop:Shop", versions=(1,), files=(), calls=(), settings=settings)

    assert register(registry, service(keep_checkpoints=3)).startswith("registered, peers at tcp://127.0.0.1:")
    path = registry.path("shop")
    path.write_text("# by hand\n" + path.read_text() + "spill_limit_mb = 9\n")
    port = registry.load("shop").peer
    assert register(registry, service(keep_checkpoints=3)) == ""
    said = register(registry, service(keep_checkpoints="all", tuning={"clock_hold_s": 5}))
    assert said == "its settings have changed: keep_checkpoints, tuning"
    now = registry.load("shop")
    assert (now.keep_checkpoints, now.tuning.clock_hold_s, now.spill_limit_mb, now.peer) == (None, 5, 9, port)
    assert "# by hand" in path.read_text()
    with pytest.raises(ConfigError, match="give its port"):
        register(registry, service(peer="tcp://0.0.0.0:*"))


def till(app: str, *versions: int) -> ServiceSpec:
    return ServiceSpec(name="till", app=app, versions=versions, files=(), calls=())


def test_a_class_of_another_version_than_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(tmp_path)
    monkeypatch.setattr(own_logs, "log_version", lambda settings: 2)
    assert version_gap(registry, till("shop2:Till", 3, 2)) is None, "it is new"
    registry.register("till", peer="tcp://127.0.0.1:*", app="shop2:Till")
    assert version_gap(registry, till("shop2:Till", 2, 1)) is None
    behind = version_gap(registry, till("shop:Till", 1))
    assert behind == VersionGap(
        "till has version 2, but the project names shop:Till, which lacks that version:"
        ' write app = "shop2:Till" in immortal.toml, the class that it ran last',
        can_upgrade=False,
    )
    ahead = version_gap(registry, till("shop3:Till", 3, 2))
    assert ahead is not None
    assert ahead.stays
    assert ahead.text == "till stays at version 2, but shop3:Till has version 3"
    request_upgrade(registry, till("shop3:Till", 3, 2))
    requested = version_gap(registry, till("shop3:Till", 3, 2))
    assert requested is not None
    assert requested.is_requested
    upgrade_mark.mark_failed(tmp_path / "till", "no room")
    failed = version_gap(registry, till("shop3:Till", 3, 2))
    assert failed is not None
    assert failed.stays
    assert failed.text.endswith("; the upgrade to version 3 failed: no room")


def test_an_upgrade_is_written_into_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = '# mine\n[services.till]\napp = "shop:Till"  # what runs\n[services.s]\napp = "shop:Shop"\ncount = 2\n'
    make_project(tmp_path, project=written)
    (tmp_path / "shop2.py").write_text(NEXT)
    for name in ("till", "s-1"):
        Registry(tmp_path / ".immortal").register(name, peer="tcp://127.0.0.1:*", app="shop:Till")
    monkeypatch.setattr(own_logs, "log_version", lambda settings: 1)
    monkeypatch.chdir(tmp_path)

    def upgrade(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(main, ["upgrade", *arguments])
        assert result.exit_code == status, result.output
        return result.output

    assert upgrade("till", "shop2:Till") == (
        "till: version 1 becomes version 2 at the next start, with shop2:Till\n"
        "till: immortal.toml now names shop2:Till instead of shop:Till\n"
        "start it with: immortal up\n"
    )
    assert (tmp_path / "immortal.toml").read_text() == written.replace('"shop:Till"', '"shop2:Till"')
    upgrade("till", "--cancel")
    assert (tmp_path / "immortal.toml").read_text() == written
    said = upgrade("till", "shop2:Till", "--to", "3", status=1)
    assert "shop2:Till has the versions 2, 1, expected 1 (the log's) and 3" in said
    assert "'shop2' has no service 'Tell'; there are: Till" in upgrade("till", "shop2:Tell", status=1)
    said = upgrade("s-1", "shop2:Till", status=1)
    assert 'line 4: 2 instances run shop:Shop; write app = "shop2:Till" there, then' in said
    assert (tmp_path / "immortal.toml").read_text() == written


class Sink:
    """Keeps what a service says, and its states as others see them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.states: list[str] = []
        self.member: ServiceProcess

    def write_line(self, name: str, text: str, level: Level | None = None, clock: str = "") -> None:
        self.said.append(text)

    def add_question(self, name: str, text: str, answer: Callable[[str], None]) -> None: ...

    def on_ended(self, name: str, state: str) -> None:
        self.said.append(f"ended: {state}")

    def on_changed(self) -> None:
        self.states.append(self.member.state_text)


def process_of(folder: Path, monkeypatch: pytest.MonkeyPatch, run: str) -> tuple[ServiceProcess, Sink]:
    """A service whose `immortal run` is a shell script, which gets its arguments."""
    (folder / "run.sh").write_text(run)
    monkeypatch.setattr(fleet, "PYTHON", ("/bin/sh", str(folder / "run.sh")))
    sink, project = Sink(), Project(folder / "immortal.toml")
    member = sink.member = ServiceProcess(project, till("shop:Till", 1), sink, interactive=False)
    return member, sink


def test_a_killed_run_is_started_again_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member, sink = process_of(tmp_path, monkeypatch, 'echo "$@"; [ -e died ] && exit 70; touch died; kill -9 $$')

    async def live() -> None:
        member.start()
        while member.runs:
            await member.wait()
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(live(), 20))
    death = "'immortal run' died: SIGKILL"
    assert sink.states == ["starting", f"restarting: {death}", "starting", "failed: status 70"]
    first, died, noted, second, ended = sink.said
    assert (died, noted) == (f"{death}; restarting it  pause_s=0.1", f"ended: restarting: {death}")
    assert "run till shop:Till --restart" in first
    assert "run till --restart" in second, "an upgrade may have given it another class"
    assert ended == "ended: failed: status 70", "what its own code ended is not started again"


def test_a_killed_run_that_is_stopped_stays_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    member, sink = process_of(tmp_path, monkeypatch, "kill -9 $$")

    async def live() -> None:
        member.start()
        await member.wait()
        await fleet.stop_all([member])

    asyncio.run(asyncio.wait_for(live(), 20))
    assert sink.states[-1] == "stopped"
    assert not member.runs


def test_files_that_change_are_named_once_they_stand(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("1")
    files = SourceFiles([one, other])
    assert files.poll() == set()
    one.write_text("12")
    other.write_text("new")
    assert files.poll() == set()
    assert files.poll() == {str(one), str(other)}
    assert files.poll() == set()
    one.unlink()
    files.poll()
    assert files.poll() == {str(one)}


def test_environments_and_hidden_folders_are_not_looked_at(tmp_path: Path) -> None:
    for place in ("a.py", "package/b.py", ".git/c.py", "env/pyvenv.cfg", "env/lib/d.py", "__pycache__/e.py"):
        (tmp_path / place).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / place).touch()
    assert sorted(python_files(tmp_path)) == [str(tmp_path / "a.py"), str(tmp_path / "package" / "b.py")]


def test_the_guides_project_is_one(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "tutorial" / "first-service.md").read_text()
    till, shop = given(tmp_path, guide.partition("```toml\n")[2].partition("```")[0])
    assert (till.app, shop.app) == ("shop:Till", "shop:Shop")
    assert shop.environment == {"GREETING": "good morning"}
    known = {*settings_of(Service)}
    table = guide.partition("Of each service:\n\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^- `(\w+)`", table, re.M)) <= known


def test_keys_stay_in_their_shards(tmp_path: Path) -> None:
    source = "from immortal import Immortal\nclass Cart(Immortal, keyed=str): ...\nclass Till(Immortal): ...\n"
    table = '[services.carts]\napp = "shop:Cart"\ncount = {}\n[services.till]\napp = "shop:Till"\ncount = 2\n'
    for count, others in ((3, "carts-1, carts-2, carts-3"), (1, "carts")):
        make_project(tmp_path, source, table.format(count))
        project = Project(tmp_path / "immortal.toml")
        project.home.mkdir(exist_ok=True)
        carts = [one for one in project.services() if one.app == "shop:Cart"]
        assert [one.environment["IMMORTAL_SHARD"] for one in carts] == [f"{n}/{count}" for n in range(1, count + 1)]
        for one in carts:
            project.home.joinpath(f"{one.name}.toml").touch()
        assert [one.environment for one in project.services() if one.app == "shop:Till"] == [{}, {}]
        registered = [one.name for one in carts]
        for another in {1, 2, 3, 4} - {count}:
            make_project(tmp_path, source, table.format(another))
            said = (
                f"count = {another} for 'carts', whose keys are in {others}.*'immortal shards carts --count {another}'"
            )
            with pytest.raises(ProjectError, match=said):
                project.services()
            make_project(tmp_path, source, table.format(f"{another}\ncount_before = {count}"))
            planned = {one.name: one.environment.get("IMMORTAL_SHARD") for one in project.services()}
            assert [planned.pop(name) for name in registered] == [f"{n}/{count}" for n in range(1, count + 1)]
            new = [0] if another == 1 else [n for n in range(1, another + 1) if count == 1 or n > count]
            assert [planned[name] for name in planned if name.startswith("carts")] == [
                f"{n}/{another}/{count}" for n in new
            ]
            kept = {"carts"} if another == 1 else {f"carts-{n}" for n in range(1, another + 1)}
            left = project.set_count("carts", another)  # the others are registered, and go on without keys
            assert left == tuple(name for name in registered if name not in kept)
            assert project.table("carts").count_before == (another if left else 0)
            assert project.set_count("carts", count) == ()
            assert project.table("carts").count_before == 0
        for name in registered:
            project.home.joinpath(f"{name}.toml").unlink()


def test_shards_of_what_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from immortal import Immortal\nclass Cart(Immortal, keyed=str): ...\nclass Till(Immortal): ...\n"
    table = '[services.carts]\napp = "shop:Cart"\ncount = 2\n[services.till]\napp = "shop:Till"\n'
    make_project(tmp_path, source, table)

    def require(*arguments: str, said: str) -> None:
        result = CliRunner().invoke(main, ["shards", *arguments, "--project", str(tmp_path)])
        assert result.exit_code == 1
        assert re.search(said, result.output), result.output

    for arguments, said in (
        (["cart"], r"immortal.toml has no table \[services.cart\]; it has carts"),
        (["carts", "--count", "3"], "the project does not run: 'immortal up' starts it"),
        (["carts"], "there is no instance 'carts-1'"),
        (["till"], "the class of 'till' is not keyed, so it has no shards"),
    ):
        require(*arguments, said=said)
    monkeypatch.setattr("immortal.cli.shards.background", lambda project: project)
    (home := tmp_path / ".immortal").mkdir()
    with opened(home / LOCK_FILE_NAME, os.O_RDWR | os.O_CREAT) as lock:
        acquire_lock(lock, 0)  # as another move does
        said = f"process {os.getpid()} moves keys of this project: wait for it"
        require("carts", "--count", "3", "--timeout-s", "0.01", said=said)
