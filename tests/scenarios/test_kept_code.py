"""The code of an app is kept beside its log, and shows the past after its files have changed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from immortal.appsdk.running.user_modules import sources_of
from immortal.coordinator.instances.registry import Registry
from immortal.protocol import kept_code
from immortal.replay.plan import ReplayError
from immortal.replay.travel.sessions import Sessions
from tests.helpers.cli import HOME, immortal
from tests.helpers.projects import SHOP
from tests.helpers.recorded import Instances, load_module, write_module
from tests.helpers.waiting import EffectsByHand, WaitingInstances
from tests.scenarios.test_what_if_cli import what_if

TALLY = """
from immortal import Immortal, impulse


class Tally(Immortal):
    total: int

    def __init__(self) -> None:
        self.total = 0

    @impulse
    def add(self, n: int) -> None:
        self.total += n
"""


@pytest.fixture
def tally(tmp_path: Path) -> tuple[Path, str]:
    """A folder with the log of ``tally`` and the file of its class, which has changed since; the module's name."""
    name = write_module(tmp_path, TALLY)
    cls = load_module(tmp_path, name).Tally
    instances = WaitingInstances(tmp_path / "logs", {"tally": cls}, EffectsByHand())
    for number in (1, 2, 3):
        instances["tally"].impulse("add", number)
    instances.close()
    registry = Registry(tmp_path / HOME)
    registry.register("tally", "tcp://127.0.0.1:*", log=tmp_path / "logs" / "tally" / "log")
    registry.remember_app("tally", f"{name}:Tally")
    assert kept_code.store(tmp_path / HOME / "tally" / "code", f"{name}:Tally", sources_of(cls), 0)
    (tmp_path / f"{name}.py").write_text(TALLY.replace("+= n", "+= 100 * n"))
    return tmp_path, name


def test_states_are_shown_by_the_code_that_made_them(tally: tuple[Path, str]) -> None:
    folder, _ = tally
    assert '"total": 3\n' in immortal(folder, "replay", "tally", "--state", "--to", "2")
    assert immortal(folder, "sql", "select total from tally").split() == ["total", "6"]


def test_the_past_outlives_its_file(tally: tuple[Path, str]) -> None:
    folder, name = tally
    (folder / f"{name}.py").unlink()
    said = immortal(folder, "replay", "tally", "--state")
    assert '"total": 6\n' in said
    assert "note: replays the code that made it, kept with the log (digest " in said


def test_what_if_compares_with_the_code_that_made_the_log(tally: tuple[Path, str]) -> None:
    folder, name = tally
    said, _ = what_if(folder, "tally", "--app", f"{name}:Tally", status=3)
    assert "  total: was 6; would be 600" in said.splitlines()


def test_the_page_travels_by_the_code_of_each_record(tally: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, name = tally
    monkeypatch.chdir(folder)
    sessions = Sessions(folder / HOME)
    try:
        moment = sessions.ask("tally", "moment", record=3, index=None)
        assert moment["state"]["items"][0]["text"] == "6"
        code = sessions.code_of("tally", 3)
        assert (code.app, code.archive is not None) == (f"{name}:Tally", True)
        (folder / f"{name}.py").write_text(TALLY)
        assert sessions.code_of("tally", 3).archive is None, "it is on disk again"
    finally:
        sessions.close()


def test_an_app_keeps_its_code_as_it_begins_to_work(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "immortal.toml").write_text('[services.till]\napp = "shop:Till"\n')
    immortal(tmp_path, "up")
    try:
        immortal(tmp_path, "call", "till", "sold", "5")
        folder = tmp_path / HOME / "till" / "code"
        (start,) = kept_code.read_index(folder)
        assert (start.first, start.app, start.is_on_disk()) == (0, "shop:Till", True)
        with zipfile.ZipFile(start.archive(folder)) as archive:
            assert archive.read("shop.py").decode() == SHOP
        (tmp_path / "shop.py").write_text(f"{SHOP}\n# other\n")
        immortal(tmp_path, "restart", "till")
        assert [one.first for one in kept_code.read_index(folder)] == [0, 2]
    finally:
        immortal(tmp_path, "down")


def test_each_version_shows_its_own_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write_module(tmp_path, TALLY)
    first = load_module(tmp_path, old)
    monkeypatch.syspath_prepend(tmp_path)
    source = f"from {old} import Tally as One\nfrom immortal import upgrades\n@upgrades(One)\nclass Tally(One):\n"
    new = write_module(tmp_path, f"{source}    twice: int\n    def __init__(self) -> None:\n        self.twice = 0\n")
    instances = Instances(tmp_path)
    instances.start("tally", first.Tally).impulse("add", 2)
    instances.stop("tally")
    instances.start("tally", load_module(tmp_path, new).Tally, upgrade_to=2).impulse("add", 3)
    instances.close()
    registry = Registry(tmp_path)
    registry.register("tally", "tcp://127.0.0.1:*")
    registry.remember_app("tally", f"{new}:Tally")
    monkeypatch.chdir(tmp_path)
    sessions = Sessions(tmp_path)
    try:
        shown = []
        for record in (1, 2):
            items = sessions.ask("tally", "moment", record=record, index=None)["state"]["items"]
            shown.append({one["label"]: one["text"] for one in items})
        assert shown == [{"total": "2"}, {"total": "5", "twice": "0"}]
        assert {code.app for _, code in sessions._sessions} == {f"{old}:Tally", f"{new}:Tally"}
        found = sessions.ask("tally", "moment", record=1, index=0)
        assert found["message"].endswith("Tally.add(2)")
        with pytest.raises(ReplayError, match="from record 2 on version 2 handled the log"):
            sessions.ask("tally", "find", record=1, index=0, handler="", expression="False", back=False)
    finally:
        sessions.close()
