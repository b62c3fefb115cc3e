"""Where a client finds an instance, with which keys it comes, and whether the instance runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from immortal.appsdk.client.discovery import IDENTITY_VARIABLE, Finder, KeyPair, ProcessStatus, presence
from immortal.appsdk.client.errors import NotConnectable
from immortal.protocol.files import SUPERVISOR_FILE_NAME

PUBLIC, SECRET, OTHER = "P" * 40, "S" * 40, "O" * 40


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A registry folder with one instance, shop, that has keys."""
    monkeypatch.delenv(IDENTITY_VARIABLE, raising=False)
    found = tmp_path / "home"
    found.mkdir(mode=0o700)
    (found / "shop.toml").write_text('peer = "tcp://127.0.0.1:7001"\nallow = ["till"]\n')
    add_keys(found / "shop", PUBLIC)
    (found / "shop" / "public_keys").write_text(f"{PUBLIC}\n")
    return found


def add_keys(folder: Path, public: str) -> None:
    (folder / "keys").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    pairs = folder / "keys" / "pairs"
    pairs.touch(mode=0o600)
    pairs.write_text(f"{public} {SECRET}\n")


# --- keys -------------------------------------------------------------------------------------------------------------


def test_whoever_can_read_the_instances_own_keys_comes_with_them(home: Path) -> None:
    found = Finder("shop", home).find()
    assert (found.endpoints, found.server_keys) == (("tcp://127.0.0.1:7001",), (PUBLIC,))
    assert found.pair == KeyPair(PUBLIC, SECRET)
    assert SECRET not in repr(found)
    assert found.folder == home / "shop"
    assert found.refusal == ""


def test_an_identity_comes_with_keys_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_keys(home / "till", OTHER)
    for finder in (Finder("shop", home, identity="till"), Finder("shop", home)):
        assert finder.find().pair == KeyPair(OTHER, SECRET)
        monkeypatch.setenv(IDENTITY_VARIABLE, "till")
    monkeypatch.setenv(IDENTITY_VARIABLE, "somebody")
    assert Finder("shop", home, identity="till").find().pair == KeyPair(OTHER, SECRET)


@pytest.mark.parametrize(
    ("identity", "words"),
    [("till", "'till' has no keys in .*'immortal keys till --make --client'"), ("bank", "'bank' is an instance")],
)
def test_an_identity_without_keys_of_a_client_is_refused(home: Path, identity: str, words: str) -> None:
    (home / "bank.toml").touch()
    with pytest.raises(NotConnectable, match=words):
        Finder("shop", home, identity=identity).find()


def test_without_any_keys_it_is_said_how_to_make_some(home: Path) -> None:
    (home / "shop" / "keys" / "pairs").unlink()
    with pytest.raises(NotConnectable, match="'shop' takes only callers with keys, and its own can't be read"):
        Finder("shop", home).find()


def test_whom_the_instance_does_not_allow_is_told_so(home: Path) -> None:
    for identity in ("till", "thief"):
        add_keys(home / identity, OTHER)
    assert Finder("shop", home, identity="till").find().refusal == ""
    refusal = Finder("shop", home, identity="thief").find().refusal
    assert refusal == f"'shop' takes no calls of 'thief': 'allow' in {home / 'shop'}.toml names till"


# --- this machine and others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:7001", "tcp://127.8.0.1:7001", "tcp://localhost:7001", "tcp://[::1]:7001", "ipc:///tmp/shop"],
)
def test_on_this_machine_no_keys_are_needed(tmp_path: Path, endpoint: str) -> None:
    found = Finder("shop", tmp_path / "none", (endpoint,)).find()
    assert (found.endpoints, found.server_keys, found.pair, found.folder) == ((endpoint,), (), None, None)


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.1:7001", "tcp://shop.internal:7001", "tcp://[fe80::1]:7001"])
def test_elsewhere_nobody_is_called_without_keys(tmp_path: Path, endpoint: str) -> None:
    home = tmp_path / "none"
    with pytest.raises(NotConnectable, match="is not on this machine and no public key of 'shop' is known"):
        Finder("shop", home, (endpoint,)).find()
    assert Finder("shop", home, (endpoint,), insecure=True).find().endpoints == (endpoint,)


# --- whether it runs --------------------------------------------------------------------------------------------------


def test_an_instance_that_nobody_has_started_is_stopped(tmp_path: Path) -> None:
    assert presence(tmp_path / "shop") == ProcessStatus(True, "'shop' does not run: 'immortal run shop' starts it")


def test_of_a_folder_that_can_not_be_looked_into_nothing_is_said(tmp_path: Path) -> None:
    # A user of another account gets EACCES, root only ENAMETOOLONG; what matters is that it is not "there is none".
    assert presence(tmp_path / ("x" * 300)) == ProcessStatus(False, "")


def test_what_was_killed_leaves_its_file(tmp_path: Path) -> None:
    (tmp_path / SUPERVISOR_FILE_NAME).write_text("{}")
    found = presence(tmp_path)
    assert not found.stopped
    assert found.problem.startswith(f"'{tmp_path.name}' was killed, and nobody has started it again")
