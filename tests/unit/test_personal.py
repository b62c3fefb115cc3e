"""Values of :class:`immortal.Personal`: what is encoded, read, shown, before and after the person is forgotten."""

from __future__ import annotations

import copy
import os
import pickle
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("cryptography")

from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from immortal import Handle, Immortal, Node, Personal, rpc
from immortal.appsdk.state.tree import differences, tree
from immortal.appsdk.testing import sample
from immortal.appsdk.types.encoding import ValueDecoder, encode_value, form_of
from immortal.appsdk.types.handles import MARK
from immortal.appsdk.types.registry import unsupported_type
from immortal.cli import forget, main
from immortal.coordinator.config import InstanceSettings
from immortal.protocol import decoding, personal_keys, shared_registry
from immortal.protocol.command_line import FailedError
from immortal.protocol.personal_keys import Person, PersonalKeyError
from immortal.replay.fleet import opening
from immortal.testing import Environment, sample_fleet
from tests.helpers.effort import effort

MARKER = "xyzzy-plugh"
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text("abc"), inner),
    max_leaves=5,
)


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(personal_keys.NOTES_VARIABLE, raising=False)
    monkeypatch.setenv(personal_keys.KEYS_VARIABLE, str(tmp_path / "keys"))
    return tmp_path / "keys"


@settings(max_examples=effort(20), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(value=values)
def test_a_value_is_the_same_bytes_each_time_and_comes_back(value: Any) -> None:
    first, second = Personal("ann", value), Personal("ann", copy.deepcopy(value))
    assert (encode_value(first), hash(first)) == (encode_value(second), hash(second))
    for annotation in (Personal, Personal[Any], Any, Personal[Any] | None):
        found = ValueDecoder(annotation).decode(encode_value(first))
        assert (type(found), found) == (Personal, first)
        assert found.value == value
        assert type(found.value) is type(value)
        assert encode_value(found) == encode_value(first)
    assert form_of(list[Any]).encode([first]) == form_of(list[Personal[Any]]).encode([first])


def test_persons_differ_and_no_text_tells_a_value() -> None:
    ann, bob = Personal("ann", MARKER), Personal("bob", MARKER)
    assert ann != bob
    assert ann != MARKER
    assert MARKER.encode() not in encode_value(ann) + pickle.dumps(ann)
    for made in (pickle.loads(pickle.dumps(ann)), copy.deepcopy(ann)):
        assert (made, made.value, made.subject) == (ann, MARKER, "ann")
    for text in (
        str(ann),
        repr(ann),
        f"{ann}",
        f"{[ann]}",
        str(tree({"a": ann})),
        str(decoding.decode_shown(encode_value(ann))),
    ):
        assert "personal: 'ann'" in text
        assert MARKER not in text
    assert list(differences(tree([ann]), tree([Personal("ann", "other")])))


def test_the_forgotten_have_no_value_and_get_no_new_one(keys: Path) -> None:
    ann, bob, encoded = Personal("ann", MARKER), Personal("bob", MARKER), encode_value(Personal("ann", MARKER))
    key = personal_keys.find("ann")
    assert key is not None
    (file,) = [path for path in keys.iterdir() if key.key.encode() in path.read_bytes()]
    with file.open("rb") as before:  # the old file, which the new one replaces
        assert personal_keys.destroy("ann", "2026-11-29") == key
        assert set(before.read()) == {0}
    assert not [path for path in keys.iterdir() if key.key.encode() in path.read_bytes()]
    assert sorted(personal_keys.all_persons(), key=lambda one: one.subject)[0] == Person("ann", forgotten="2026-11-29")
    assert (ann.value, ann.forgotten, bob.value, bob.forgotten) == (None, True, MARKER, False)
    assert encode_value(ann) == encoded
    assert str(ann).startswith("<forgotten on 2026-11-29: 'ann' ")
    late = Personal("ann", MARKER)
    assert (late.value, late.forgotten, ValueDecoder(Personal[str]).decode(encode_value(late))) == (None, True, late)
    assert personal_keys.destroy("ann", "2027-01-01") == Person("ann", forgotten="2026-11-29"), "again"
    assert personal_keys.destroy("eve", "2027-01-01") is None


@pytest.mark.parametrize("when", ["before the new file", "before the old one is overwritten"])
def test_a_crash_while_a_key_is_destroyed(keys: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    ann = Personal("ann", MARKER)
    with monkeypatch.context() as broken:

        def crash(*_: Any, **__: Any) -> None:
            raise OSError("crash")

        broken.setattr(
            *((personal_keys, "replace_file") if when.startswith("before the new") else (os, "pwrite")), crash
        )
        with pytest.raises(PersonalKeyError, match="do it again"):
            personal_keys.destroy("ann", "2026-11-29")
    assert (ann.value is None) == when.startswith("before the old")
    assert personal_keys.has_leftover_key("ann")
    listed = CliRunner().invoke(main, ["forget", "--list"]).output
    assert ("ann  (the key is left on the disk: forget again)\n" in listed) == when.startswith("before the old")
    personal_keys.destroy("ann", "2026-11-30")
    assert ann.value is None
    assert not personal_keys.has_leftover_key("ann")
    assert len(list(keys.iterdir())) == 1


def test_nobody_is_forgotten_if_an_instance_starts_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([False, True])
    monkeypatch.setattr(forget, "_is_running", lambda settings: next(looks))
    for name in ("_rehearse", "_is_left_paused"):
        monkeypatch.setattr(forget, name, lambda *_: None)
    shop = InstanceSettings(name="shop", peer="tcp://127.0.0.1:1", folder=Path("shop"), log="shop")
    with pytest.raises(FailedError, match="nobody is forgotten yet: an instance was started or stopped meanwhile"):
        forget._pause_all([shop], ["ann"], 1.0)


def test_keys_are_of_one_folder_for_its_owner(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ann = Personal("ann", MARKER)
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()} == {0o600}
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    monkeypatch.setenv(personal_keys.KEYS_VARIABLE, str(tmp_path / "others"))
    with pytest.raises(PersonalKeyError, match="has no key of 'ann'"):
        _ = ann.value
    assert not ann.forgotten
    Personal("ann", "in other words")
    with pytest.raises(PersonalKeyError, match="is missing, or another one than this value"):
        _ = ann.value
    for content in ("{", '{"subject": "ann"}', '{"subject": "ann", "key": "zz"}'):
        next((tmp_path / "others").iterdir()).write_text(content)
        with pytest.raises(PersonalKeyError, match="can't be read"):
            _ = ann.value
    assert str(ann).startswith("<personal: 'ann'"), "readers without keys show it all the same"


def test_the_folder_is_the_home_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(personal_keys.KEYS_VARIABLE)
    monkeypatch.setattr(shared_registry, "chosen_home", None)
    monkeypatch.setenv("IMMORTAL_HOME", str(tmp_path))
    assert personal_keys.folder() == tmp_path / ".personal"
    monkeypatch.setattr(shared_registry, "chosen_home", tmp_path / "other")
    assert personal_keys.environment() == {personal_keys.KEYS_VARIABLE: str(tmp_path / "other/.personal")}
    monkeypatch.setattr(shared_registry, "chosen_home", "postgresql://host/database")
    monkeypatch.setenv(*next(iter(personal_keys.environment().items())))  # as a child process has it
    with pytest.raises(PersonalKeyError, match="must name a folder for keys of persons that all machines share"):
        Personal("ann", 1)


def test_many_processes_make_one_key(keys: Path) -> None:
    code = "from immortal import Personal; print(hash(Personal('ann', 1)._ciphertext), end='')"
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    begun = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) for _ in range(3)]
    assert len({process.communicate()[0] for process in begun}) == 1
    assert len(list(keys.iterdir())) == 1


def test_a_replay_makes_no_key_and_notes_who_is_forgotten(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, bob = Personal("ann", 1), Personal("bob", 1)
    personal_keys.destroy("ann", "2026-11-29")
    notes = tmp_path / "notes"
    monkeypatch.setattr(personal_keys, "noted", set())
    monkeypatch.setenv(personal_keys.NOTES_VARIABLE, str(notes))
    assert personal_keys.read_notes(notes) == []
    assert [ann.value, ann.value, bob.value, Personal("eve", 2).value] == [None, None, 1, 2]
    assert Personal("eve", 2) == Personal("eve", 2)
    assert notes.read_text() == '"ann"\n'
    for use in (lambda: Personal("ann", 2), lambda: ann.forgotten, lambda: str(ann)):  # they differ from before, too
        personal_keys.noted.clear()
        use()
        assert personal_keys.noted == {"ann"}
    assert personal_keys.read_notes(notes) == ["ann"]
    assert len(list(keys.iterdir())) == 2
    monkeypatch.setenv(personal_keys.REHEARSED_VARIABLE, '["bob"]')
    assert bob.value is None


def test_a_value_fits_its_person_and_all_its_bytes() -> None:
    ciphertext = Personal("ann", MARKER)._ciphertext
    Personal("bob", MARKER)
    broken = [bytes([*ciphertext[:n], ciphertext[n] ^ 1, *ciphertext[n + 1 :]]) for n in range(len(ciphertext))]
    for subject, stored in (("bob", ciphertext), ("ann", ciphertext[:5]), *(("ann", one) for one in broken)):
        with pytest.raises(PersonalKeyError, match=r"another one than this value was encrypted with, or .* damaged"):
            _ = Personal._decoded(subject, stored).value


def test_what_is_no_key_is_named(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Personal("bob", 1)
    assert personal_keys.find("\udcff") is None, "as a command line can give it"
    personal_keys._path("ann").symlink_to(keys / "missing")
    with pytest.raises(PersonalKeyError, match="is no key of a person, but a link to a file that is missing"):
        Personal("ann", 1)
    keys.chmod(0o777)
    with pytest.raises(PersonalKeyError, match="others could put their own keys"):
        Personal("eve", 1)
    monkeypatch.setenv(personal_keys.KEYS_VARIABLE, str(personal_keys._path("bob")))
    with pytest.raises(PersonalKeyError, match="can't be read: Not a directory"):
        list(personal_keys.all_persons())


def test_a_key_is_durable_before_any_process_uses_it(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []

    def sync(folder: Path) -> None:
        synced.append(folder)
        if len(synced) == 1:  # another process finds the key before its maker has synced it
            Personal("ann", 1)
            assert synced == [keys, keys]

    monkeypatch.setattr(personal_keys, "sync_folder", sync)
    Personal("ann", 1)
    assert synced == [keys, keys, keys.parent]
    Personal("ann", 2)
    assert len(synced) == 3, "once is enough"
    assert len(list(keys.iterdir())) == 1


@pytest.mark.parametrize(
    "run", [lambda home: opening.what_if(home, None), lambda home: sample_fleet(home, home / "to")]
)
def test_a_what_if_in_python_makes_no_key(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[Path], Any]
) -> None:
    def opened_fleet(*_: Any, **__: Any) -> None:
        Personal("eve", 1)
        raise KeyboardInterrupt

    for module in (opening, sample):
        monkeypatch.setattr(module, "opened_fleet", opened_fleet)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    assert not keys.exists()
    Personal("eve", 1)
    assert keys.exists(), "what this process makes later is for real"


@dataclass(frozen=True)
class Address:
    street: str


class Door(Node):
    pass


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Personal("", 1), "the ID of a person was expected"),
        (lambda: Personal(17, 1), "the ID of a person was expected"),  # type: ignore[arg-type]
        (lambda: Personal("a" * 201, 1), r"^Personal\('a{39}, ...\): the ID of a person was expected"),
        (lambda: Personal("ann", {MARKER: {Address(MARKER)}}), r"^(?!.*xyzzy)Personal\('ann', ...\): a value of"),
        (lambda: Personal("ann", Address("Main Street")), "type Address can't be kept where the annotation is Any"),
        (lambda: Personal("ann", MARK), "a handle can't be personal"),
    ],
)
def test_what_can_t_be_personal(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        make()


@pytest.mark.parametrize("kind", [Address, list[Address], Personal[str], Handle[Door]])
def test_annotations_that_can_t_be_read_back(kind: Any) -> None:
    assert "a value of plain types was expected" in str(unsupported_type(Personal[kind]))


@pytest.mark.parametrize("kind", [str, Decimal, dict[str, tuple[int, ...]], Any, str | None])
def test_annotations_of_plain_values(kind: Any) -> None:
    assert unsupported_type(Personal[kind]) is None


def test_a_plain_value_is_refused_where_a_personal_one_is_annotated() -> None:
    with pytest.raises(decoding.DecodeError, match=r"Expected a personal value \(immortal.Personal\), got `str`"):
        ValueDecoder(Personal[str]).decode(encode_value(MARKER))


class Shop(Immortal):
    addresses: dict[str, Personal[str]]

    def __init__(self) -> None:
        self.addresses = {}

    @rpc
    def register(self, customer: str, address: Personal[str]) -> str:
        self.addresses[customer] = address
        return address.value or "nobody"


def test_a_test_keeps_no_keys(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(personal_keys.NOTES_VARIABLE, os.devnull)
    with Environment() as env:
        shop = env.start(Shop, "shop")
        assert shop.call(Shop.register, "ann", Personal("ann", MARKER)) == MARKER
        assert shop.state.addresses["ann"].value == MARKER
        monkeypatch.setenv(personal_keys.REHEARSED_VARIABLE, '["ann"]')
        assert shop.state.addresses["ann"].value is None
        monkeypatch.delenv(personal_keys.REHEARSED_VARIABLE)
    assert not keys.exists()


def test_without_the_extra_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(PersonalKeyError, match=r"personal values need the extra encryption .*immortal-services\[encr"):
        Personal("ann", 1)


def test_the_guides_program(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to" / "forgetting.md").read_text()
    module: Any = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", module)
    exec(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0], module.__dict__)
    with Environment() as env:
        shop = env.start(module.Shop, "shop")
        shop.call(module.Shop.register, "17", Personal("17", "Main Street 1"))
        assert shop.call(module.Shop.label, "17") == "Main Street 1"
