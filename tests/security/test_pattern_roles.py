"""Who may do what at the ready-made patterns: by keys, roles and settings, in memory and with real processes."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from immortal import Immortal, rpc
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.handlers.proxy import all_method_names
from immortal.appsdk.patterns.clone.model import Change
from immortal.client import CallRefused, connect
from immortal.coordinator.core import events as ev
from immortal.coordinator.core.components import Components
from immortal.coordinator.core.permissions import EVERYTHING, Permission, Permissions
from immortal.coordinator.peers import keys
from immortal.errors import DefinitionError
from immortal.messenger import Role
from immortal.patterns import clone, pirate, queue
from immortal.patterns.harmony import Cluster, Collector
from immortal.protocol.batch import check_batch
from immortal.protocol.extensions import AppDescription
from immortal.protocol.messages import encode_incoming_rpc
from immortal.protocol.system_methods import ORDERED_METHOD_ID
from tests.helpers.cli import HOME, Run, immortal
from tests.helpers.clients import request
from tests.security.test_permissions import Guarded, by

GUIDES = Path(__file__).parents[2] / "docs" / "patterns"
ROW = re.compile(r"^\| (.*) \| (.*) \| (`.*`|all|) ?\|$")


def rows_of(guide: str) -> list[list[tuple[str, str]]]:
    """Of each table "who | may | calls" in a guide: (who, what stands under calls)."""
    tables: list[list[tuple[str, str]]] = []
    is_table = False
    for line in (GUIDES / guide).read_text().splitlines():
        if line == "| who | may | calls |":
            tables.append([])
            is_table = True
        elif is_table and (match := ROW.match(line)):
            tables[-1].append((match[1], match[3]))
        else:
            is_table = is_table and line.startswith("|")
    return tables


PATTERNS: list[tuple[type, str, int]] = [
    (queue.Queue, "queue.md", 0),
    (clone.Table, "clone.md", 0),
    (Cluster, "harmony.md", 0),
    (Collector, "harmony.md", 1),
]
ROWS = [
    pytest.param(cls, who, calls, id=f"{cls.__name__}: {who}")
    for cls, guide, number in PATTERNS
    for who, calls in rows_of(guide)[number]
    if "without keys" not in who
]


def called(cls: type, name: str, *arguments: Any) -> bytes:
    handler = definition_of(cls).handlers[name]
    made = encode_incoming_rpc(handler.method_id, 0, msgspec.msgpack.encode(("who", 1, *arguments)))
    check_batch(made, 1)
    return made


def judging(cls: type, given: dict[str, Permission], *, has_keys: bool = True) -> Permissions:
    """Those of an instance of the pattern, "it", whose app has come."""
    permissions = Permissions("it", given, has_keys=has_keys)
    permissions.app_connected(accepts_verdicts=True, describes=True)
    permissions.describe(AppDescription(1, all_method_names(definition_of(cls))))
    return permissions


@pytest.mark.parametrize(("cls", "who", "calls"), ROWS)
def test_each_may_call_what_the_guide_says_and_nothing_else(cls: type, who: str, calls: str) -> None:
    role = re.match(r"`(@[^`]+)`", who)
    given = {"bob": Permission(frozenset({role[1]}))} if role else {}
    permissions = judging(cls, given)
    caller = "it" if who.startswith("the owner") else "bob"
    handlers = definition_of(cls).handlers
    may = {
        name
        for name in handlers
        if not permissions.find_forbidden(caller, called(cls, name), is_instance=who.startswith("an instance"))
    }
    if role and ":" in role[1]:
        may -= {"update", "update_below"}  # of which the argument decides
    assert may == (set(handlers) if calls == "all" else set(re.findall(r"`(\w+)`", calls)))


@pytest.mark.parametrize(
    ("cls", "more"),
    [
        (queue.Queue, set()),
        (clone.Table, set()),
        (Cluster, set()),
        (Collector, {"accept_of", "end_of"}),
    ],
)
def test_an_instance_may_no_more_than_a_client_but_bring_results(cls: type, more: set[str]) -> None:
    permissions = judging(cls, {"ann": Permission(rate=5), "eve": Permission(frozenset())})
    names = set(definition_of(cls).handlers)
    for caller in ("bob", "ann"):
        find = permissions.find_forbidden
        as_client = {name for name in names if not find(caller, called(cls, name))}
        as_instance = {name for name in names if not find(caller, called(cls, name), is_instance=True)}
        assert as_instance == as_client | more
    assert all(permissions.find_forbidden("eve", called(cls, name), is_instance=True) for name in names)


@pytest.mark.parametrize("cls", [cls for cls, _, _ in PATTERNS])
def test_without_keys_everybody_may_do_all(cls: type) -> None:
    permissions = judging(cls, {}, has_keys=False)
    assert not any(permissions.find_forbidden("bob", called(cls, name)) for name in definition_of(cls).handlers)
    assert not permissions.limits("bob")


@pytest.mark.parametrize("cls", [cls for cls, _, _ in PATTERNS])
def test_the_settings_can_name_methods_or_everything(cls: type) -> None:
    names = sorted(definition_of(cls).handlers)
    permissions = judging(cls, {"bob": Permission(frozenset(names[:1])), "ann": EVERYTHING})
    assert [name for name in names if not permissions.find_forbidden("bob", called(cls, name))] == names[:1]
    assert not any(permissions.find_forbidden("ann", called(cls, name)) for name in names)


def test_a_writer_of_a_subtree_writes_nowhere_else() -> None:
    permissions = judging(clone.Table, {"bob": Permission(frozenset({"@writer:a/b", "@writer:c"}))})

    def may(name: str, *arguments: Any) -> bool:
        return not permissions.find_forbidden("bob", called(clone.Table, name, *arguments))

    changes = [Change("a/b/1", b"\x01")]
    assert may("update_below", "a/b", changes)
    assert may("update_below", "a/b/1", changes)
    assert may("update_below", "c", changes)
    assert may("room")
    for elsewhere in ("", "a", "a/bc", "d", "a/b\0", b"a/b", 7, None, ["a/b"], {"a/b": 1}):
        assert not may("update_below", elsewhere, changes), elsewhere
    assert not may("update", changes)
    assert not may("entitle", "a/b", [""])
    method_id = definition_of(clone.Table).handlers["update_below"].method_id
    for data in (b"", b"\x93", b"\xc0", msgspec.msgpack.encode("a/b"), b"\x91" * 100_000):
        assert permissions.find_forbidden("bob", encode_incoming_rpc(method_id, 1, data)), data
    run = msgspec.msgpack.encode(("a/b", 1, "a/b", [method_id, 1], "a/b"))
    assert permissions.find_forbidden("bob", encode_incoming_rpc(ORDERED_METHOD_ID, 0, run))


@pytest.mark.parametrize("inner", ["entitle", "update", None, b"x", 1.5, [], {}])
def test_a_multicast_gives_nobody_a_role(inner: Any) -> None:
    if isinstance(inner, str):
        inner = definition_of(clone.Table).handlers[inner].method_id
    call = encode_incoming_rpc(ORDERED_METHOD_ID, 0, msgspec.msgpack.encode((inner, "bob", [""])))
    for given in ({}, {"bob": Permission(frozenset({"@reader", "@writer:a"}))}):
        assert judging(clone.Table, given).find_forbidden("bob", call, is_instance=True)


@pytest.mark.parametrize(
    ("caller", "method", "text"),
    [
        ("bob", "ready", "that is for @worker; bob = [\"@worker\"] under [allow] in its settings lets 'bob' in"),
        ("bob", "task", 'that is for @administrator or @reader or @submitter; bob = ["@administrator"]'),
        ("bob", "take_offer", 'that is for its owner alone; bob = ["take_offer"] under [allow]'),
    ],
)
def test_a_refusal_says_who_asked_which_role_it_takes_and_how_to_give_it(caller: str, method: str, text: str) -> None:
    admission = Components("jobs").admission
    admission.change({}, has_keys=True)
    admission.permissions.describe(AppDescription(1, all_method_names(definition_of(queue.Queue))))
    said = admission.format_permission_refusal(caller, method)
    assert said.startswith(f"{caller!r} may not call {method!r} of 'jobs': {text}")


class Roles(Immortal, roles={"writer": ["put"], "anybody": ["ping"]}):
    entries: list[int]

    def __init__(self) -> None:
        self.entries = []

    @rpc
    def put(self, number: int) -> None:
        self.entries.append(number)

    @rpc
    def ping(self) -> None: ...

    @rpc
    def forgotten(self) -> None: ...


class Below(Roles):
    @rpc
    def put(self, number: int) -> None: ...

    @rpc
    def more(self) -> None: ...


def test_what_a_class_below_overrides_stays_closed_and_what_it_adds_is_open() -> None:
    permissions = judging(Below, {})
    closed = [name for name in definition_of(Below).handlers if permissions.find_forbidden("bob", called(Below, name))]
    assert sorted(closed) == ["forgotten", "put"]


@pytest.mark.parametrize(
    "roles", [{"owner": ["put"]}, {"query": ["put"]}, {"a b": ["put"]}, {"w": "put"}, {"w": ["x"]}]
)
def test_roles_that_make_no_sense_are_refused(roles: Any) -> None:
    with pytest.raises(DefinitionError, match="roles="):
        type("Wrong", (Roles,), {}, roles=roles)


def sent(guarded: Guarded, number: int, value: int) -> None:
    put = definition_of(Roles).handlers["put"].method_id
    call = encode_incoming_rpc(put, 0, msgspec.msgpack.encode((value,)))
    guarded.driven.handle(by("web", request("t", number, call)))


def test_nothing_is_taken_before_an_app_has_said_its_roles_and_a_refusal_outlives_the_settings() -> None:
    guarded = Guarded({}, app=Roles)
    guarded.driven.handle(ev.PermissionsChanged({}, has_keys=True))
    sent(guarded, 1, 1)
    assert guarded.serve() == [], "it was not taken: no app had come"
    sent(guarded, 1, 1)
    assert guarded.serve() == []
    (verdict,) = guarded.verdicts
    assert "'web' may not call 'put' of 'a': that is for @writer" in verdict.text
    guarded.driven.handle(ev.PermissionsChanged({"web": Permission(frozenset({"@writer"}))}, has_keys=True))
    sent(guarded, 2, 2)
    assert guarded.serve() == [2]
    guarded.crash()
    assert guarded.serve() == [2], "a replay does as it was then"


@pytest.mark.parametrize(("who", "may"), [("stranger", False), ("other key", False), ("caller", True), ("owner", True)])
def test_a_plain_server_answers_those_that_the_guide_says(tmp_path: Path, who: str, may: bool) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    for name in ("vault", "ada", "eve"):
        keys.create(home / name, role=Role.CLIENT)
    shown = {"stranger": {}, "other key": {"identity": "eve"}, "caller": {"identity": "ada"}, "owner": {}}[who]
    server_of = {} if who == "stranger" else {"server": "vault"}
    server = pirate.Server(
        lambda one: one.caller.encode(), "tcp://127.0.0.1:*", identity="vault", callers=["ada"], home=home
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        options: dict[str, Any] = {"home": home, "timeout": 10.0 if may else 0.4, **shown, **server_of}
        with pirate.connect([server.endpoint], **options) as pool:
            if may:
                assert pool.request(b"") == (b"ada" if who == "caller" else b"vault")
            else:
                with pytest.raises(pirate.GaveUp):
                    pool.request(b"")
    finally:
        server.close()
        thread.join()


@pytest.mark.kills
def test_a_client_with_keys_cannot_take_tasks_entitle_itself_or_overwrite_rows(tmp_path: Path) -> None:
    home = tmp_path / HOME
    for name in ("jobs", "prices"):
        immortal(tmp_path, "register", name, "--peer", "tcp://127.0.0.1:*")
    for name in ("bob", "carol", "hands", "web"):
        immortal(tmp_path, "keys", name, "--make", "--client")
    settings = home / "jobs.toml"
    settings.write_text(settings.read_text() + '\n[allow]\nbob = {}\nhands = ["@worker"]\nweb = ["@submitter"]\n')
    settings = home / "prices.toml"
    settings.write_text(settings.read_text() + '\n[allow]\nbob = {}\ncarol = ["@writer:a"]\n')
    runs = [
        Run(tmp_path, "jobs", "immortal.patterns.queue:Queue", "--restart"),
        Run(tmp_path, "prices", "immortal.patterns.clone:Table", "--restart"),
    ]
    try:
        for run in runs:
            run.line("ready")
        with connect(queue.Queue, "jobs", home=home, identity="bob") as jobs:
            attack: Any = jobs
            with pytest.raises(CallRefused, match=r"'bob' may not call 'ready' of 'jobs': .*@worker"):
                attack.ready("w", "session", ["pay"], 1.0, None)
        with queue.connect("jobs", home=home, identity="web") as web:
            job = web.submit("pay", ["secret"])
        with connect(queue.Queue, "jobs", home=home, identity="hands") as jobs:
            worker: Any = jobs
            assert worker.ready("w", "session", ["pay"], 1.0, None).task == job.id
        with clone.connect("prices", home=home) as owner:
            owner.put("a", 1)
        with connect(clone.Table, "prices", home=home, identity="bob") as table:
            with pytest.raises(CallRefused, match=r"'bob' may not call 'entitle' of 'prices': .*@administrator"):
                table.entitle("bob", [""])
            with pytest.raises(CallRefused, match=r"'bob' may not call 'update' of 'prices': .*@writer"):
                table.update([Change("a", b"\x02")])
        with clone.connect("prices", home=home, identity="carol", writes="a") as carol:
            carol.put("a/1", 2)
            assert dict(carol) == {"a": 1, "a/1": 2}
            with pytest.raises(ValueError, match="key 'b' is not in 'a'"):
                carol.put("b", 3)
        with (
            clone.connect("prices", home=home, identity="carol") as carol,
            pytest.raises(CallRefused, match=r"'carol' may not call 'update' of 'prices'"),
        ):
            carol.put("a/1", 3)
    finally:
        for run in runs:
            run.kill()
