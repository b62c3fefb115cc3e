"""The registry folder: names, ports, what is refused."""

from __future__ import annotations

import os
import random
import socket
import threading
from pathlib import Path

import pytest

from immortal.coordinator.config import AppSendMode, ConfigError, split_tcp
from immortal.coordinator.instances.registry import Registry, RegistryError, UnknownInstanceError, free_port
from immortal.coordinator.operator import control
from immortal.coordinator.operator.unregister import unregister


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "home")


def announce_this_process(registry: Registry, name: str) -> None:
    control.announce(registry.home / name, Path("/there/is/none"))


def test_register_and_resolve(registry: Registry) -> None:
    settings = registry.register("counter", "tcp://127.0.0.1:7001", app_port=7002)
    assert registry.names() == ["counter"]
    assert registry.load("counter") == settings
    assert registry.resolve("counter") == "tcp://127.0.0.1:7001"
    assert settings.log == str(registry.home / "counter" / "log")


def test_star_takes_a_port_and_writes_it_down(registry: Registry) -> None:
    settings = registry.register("counter", "tcp://127.0.0.1:*", app_port=0)
    address = split_tcp(settings.peer)
    assert address is not None
    assert address[1] not in (0, settings.app_port)
    assert settings.app_port
    assert Registry(registry.home).resolve("counter") == settings.peer


def test_a_port_for_the_app_is_taken_where_one_is_asked_for(registry: Registry) -> None:
    without = registry.register("a", "tcp://127.0.0.1:*")
    assert (without.app_port, without.app_addresses) == (None, [f"unix:{registry.home}/a/app.sock"])
    assert "app_" not in registry.path("a").read_text()
    for name, options in (("b", {"app_auth": "none"}), ("c", {"app_host": "127.0.0.1"}), ("d", {"app_send_port": 0})):
        assert registry.register(name, "tcp://127.0.0.1:*", **options).app_port  # type: ignore[arg-type]
    both = registry.register("e", "tcp://127.0.0.1:*", app_port=0)
    assert both.app_addresses == [f"unix:{registry.home}/e/app.sock", both.app_address]
    assert registry.load("b").app_addresses == [registry.load("b").app_address], "a base client knows ports alone"


def test_ports_of_other_instances_are_not_taken(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = iter([7001, 7002, 7001, 7003, 7002, 7004])
    monkeypatch.setattr("immortal.coordinator.instances.registry._bind", lambda host, port: next(offered))
    first = registry.register("a", "tcp://127.0.0.1:*", app_host="127.0.0.1")
    second = registry.register("b", "tcp://127.0.0.1:*", app_host="127.0.0.1")
    assert (first.peer, first.app_port) == ("tcp://127.0.0.1:7001", 7002)
    assert (second.peer, second.app_port) == ("tcp://127.0.0.1:7003", 7004)


def test_registering_at_once_never_shares_a_port(registry: Registry) -> None:
    threads = [
        threading.Thread(
            target=Registry(registry.home).register, args=(f"i{index}", "tcp://127.0.0.1:*"), kwargs={"app_port": 0}
        )
        for index in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ports = []
    for name in registry.names():
        settings = registry.load(name)
        address = split_tcp(settings.peer)
        assert address is not None
        ports += [address[1], settings.app_port]
    assert len(ports) == len(set(ports)) == 24


def test_a_free_port_is_free_and_none_for_outgoing_connections() -> None:
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    port = free_port(("127.0.0.1",), set())
    assert port < lowest_outgoing or lowest_outgoing < 16000
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))


def test_free_ports_come_from_where_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        monkeypatch.setenv("IMMORTAL_PORTS", f"{port}-{port}")
        with pytest.raises(RegistryError, match=f"no free port was found at .* in the range of .* {port}-{port}"):
            free_port(("127.0.0.1",), set())
    assert free_port(("127.0.0.1",), set()) == port


@pytest.mark.parametrize("text", ["", "7000", "7099-7000", "0-7", "1-65536", "7000-x", "-7000-7099"])
def test_ports_that_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMMORTAL_PORTS", text)
    with pytest.raises(RegistryError, match=f"IMMORTAL_PORTS must be .* such as 7000-7099, not '{text}'"):
        free_port(("127.0.0.1",), set())


def test_programs_that_seed_alike_get_ports_of_their_own() -> None:
    found = set()
    for _ in range(2):
        random.seed(0)
        found.add(free_port(("127.0.0.1",), set()))
    assert len(found) == 2


def test_a_port_is_free_on_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = {("127.0.0.1", 0): iter([7001, 7002, 7003])}

    def bind(host: str, port: int) -> int | None:
        if host == "::1":
            return None if port == 7001 else port
        return next(offered["127.0.0.1", 0])

    monkeypatch.setattr("immortal.coordinator.instances.registry._bind", bind)
    assert free_port(("127.0.0.1", "::1"), {7002}) == 7003


def test_two_ports_for_an_app(registry: Registry) -> None:
    settings = registry.register("a", "tcp://127.0.0.1:*", app_send_port=0, app_send_mode="listen")
    assert settings.app_send_port is not None
    assert settings.app_send_mode is AppSendMode.LISTEN
    assert registry.load("a") == settings
    peer = split_tcp(settings.peer)
    assert peer is not None
    taken = {peer[1], settings.app_port, settings.app_send_port}
    assert len(taken) == 3
    other = registry.register("b", "tcp://127.0.0.1:*", app_send_port=7003)
    assert (other.app_send_port, other.app_send_mode) == (7003, AppSendMode.CONNECT)
    assert {7003} | taken <= registry._find_used_ports()


def test_an_address_of_another_machine_is_refused(registry: Registry) -> None:
    with pytest.raises(RegistryError, match=r"'192\.0\.2\.1' cannot be used here"):
        registry.register("a", "tcp://192.0.2.1:*")
    assert registry.names() == []


def test_duplicate_name(registry: Registry) -> None:
    registry.register("counter", "tcp://127.0.0.1:*")
    before = registry.path("counter").read_bytes()
    with pytest.raises(RegistryError, match=r"'counter' is registered already.*status counter.*unregister counter"):
        registry.register("counter", "tcp://127.0.0.1:*")
    assert registry.path("counter").read_bytes() == before


def test_one_port_for_app_and_peers(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="cannot both use port 7001"):
        registry.register("a", "tcp://127.0.0.1:7001", app_port=7001)
    with pytest.raises(ConfigError, match="cannot both use port 7001"):
        registry.register("a", "tcp://127.0.0.1:7001", app_send_port=7001)
    with pytest.raises(ConfigError, match="expected another port than 'app_port'"):
        registry.register("a", "tcp://127.0.0.1:7001", app_port=7002, app_send_port=7002)
    with pytest.raises(ConfigError, match="it needs an 'app_send_port'"):
        registry.register("a", "tcp://127.0.0.1:7001", app_send_mode="listen")


def test_one_log_for_two(registry: Registry, tmp_path: Path) -> None:
    registry.register("a", "tcp://127.0.0.1:*", log=tmp_path / "log")
    with pytest.raises(RegistryError, match="is the log folder of 'a'"):
        registry.register("b", "tcp://127.0.0.1:*", log=tmp_path / "log")


def test_unknown_instance(registry: Registry) -> None:
    with pytest.raises(UnknownInstanceError, match="nothing is registered in"):
        registry.load("counter")
    registry.register("counter", "tcp://127.0.0.1:*")
    registry.register("reader", "tcp://127.0.0.1:*")
    with pytest.raises(UnknownInstanceError, match=r"did you mean 'counter'\? registered in .*: counter, reader"):
        registry.resolve("conter")
    with pytest.raises(UnknownInstanceError, match=r"no instance 'xyz': registered in .*: counter, reader"):
        registry.resolve("xyz")


def test_a_changed_file_is_read_again(registry: Registry) -> None:
    settings = registry.register("counter", "tcp://127.0.0.1:7001", app_port=7002)
    assert registry.load("counter") is registry.load("counter")
    text = registry.path("counter").read_text()
    registry.path("counter").write_text(text.replace("7001", "7010"))
    os.utime(registry.path("counter"), ns=(1, 1))
    assert registry.resolve("counter") == settings.peer.replace("7001", "7010")


def test_an_instance_registered_later_is_found(registry: Registry) -> None:
    with pytest.raises(UnknownInstanceError):
        registry.resolve("counter")
    Registry(registry.home).register("counter", "tcp://127.0.0.1:7001")
    assert registry.resolve("counter") == "tcp://127.0.0.1:7001"


def test_unregister_keeps_the_log(registry: Registry) -> None:
    settings = registry.register("counter", "tcp://127.0.0.1:*")
    Path(settings.log).mkdir(parents=True)
    (Path(settings.log) / "data.mdb").write_bytes(b"x")
    assert unregister(registry, "counter") == settings.log
    assert registry.names() == []
    assert (Path(settings.log) / "data.mdb").exists()


def test_unregister_with_the_log(registry: Registry) -> None:
    settings = registry.register("counter", "tcp://127.0.0.1:*")
    Path(settings.log).mkdir(parents=True)
    (Path(settings.log) / "data.mdb").write_bytes(b"x")
    unregister(registry, "counter", delete_log=True)
    assert not settings.folder.exists()


def test_what_else_lies_in_a_log_folder_is_not_deleted(registry: Registry, tmp_path: Path) -> None:
    log = tmp_path / "precious"
    log.mkdir()
    (log / "data.mdb").write_bytes(b"x")
    (log / "journal").write_bytes(b"x")
    (log / "thesis.txt").write_text("x")
    registry.register("counter", "tcp://127.0.0.1:*", log=log)
    unregister(registry, "counter", delete_log=True)
    assert [entry.name for entry in log.iterdir()] == ["thesis.txt"]


def test_unregister_a_running_one(registry: Registry) -> None:
    registry.register("counter", "tcp://127.0.0.1:*")
    announce_this_process(registry, "counter")
    with pytest.raises(control.RunningError, match=f"runs, as process {os.getpid()}: 'immortal stop counter'"):
        unregister(registry, "counter")
    control.withdraw(registry.home / "counter")
    unregister(registry, "counter")
    assert not (registry.home / "counter").exists()


def test_a_broken_file_can_be_unregistered(registry: Registry) -> None:
    registry.register("counter", "tcp://127.0.0.1:*")
    registry.path("counter").write_text("nonsense")
    with pytest.raises(ConfigError):
        unregister(registry, "counter", delete_log=True)
    unregister(registry, "counter")
    assert registry.names() == []


def test_remember_app(registry: Registry) -> None:
    registry.register("counter", "tcp://127.0.0.1:*", keep_checkpoints=None)
    registry.remember_app("counter", "wordcount:Counter")
    settings = Registry(registry.home).load("counter")
    assert settings.app == "wordcount:Counter"
    assert settings.keep_checkpoints is None
    with pytest.raises(ConfigError):
        registry.remember_app("counter", "wordcount")
    assert Registry(registry.home).load("counter").app == "wordcount:Counter"


BY_HAND = """\
# The counter of the shop.
app_port = 7002  # as the firewall knows it
{first}
keep_checkpoints = 2     # the default, said all the same
peer = "tcp://127.0.0.1:7001"

# peers on other machines
[peers]
till = "tcp://10.0.0.5:7400"  # since May
"""


@pytest.mark.parametrize("first", ["# no app yet", "  app   =   'old:Counter' # the one of May"])
def test_remember_app_keeps_what_was_written_by_hand(registry: Registry, first: str) -> None:
    before = BY_HAND.format(first=first)
    registry.home.mkdir(parents=True)
    path = registry.path("counter")
    path.write_text(before)
    path.chmod(0o600)
    assert registry.remember_app("counter", "wordcount:Counter").app == "wordcount:Counter"
    now = 'app = "wordcount:Counter"\n# no app yet' if "no app" in first else first.replace("'old:", '"wordcount:')
    assert path.read_text() == BY_HAND.format(first=now.replace("Counter'", 'Counter"'))
    assert path.stat().st_mode & 0o777 == 0o600


def test_remember_app_in_a_file_without_a_last_line_end(registry: Registry) -> None:
    registry.home.mkdir(parents=True)
    path = registry.path("counter")
    path.write_text('peer = "tcp://127.0.0.1:7001"\napp_port = 7002')
    assert registry.remember_app("counter", "a:B").app == "a:B"
    assert path.read_text() == 'peer = "tcp://127.0.0.1:7001"\napp_port = 7002\napp = "a:B"\n'


def test_home_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("x")
    registry = Registry(tmp_path / "home")
    assert registry.names() == []
    with pytest.raises(RegistryError, match="cannot be used"):
        registry.register("counter", "tcp://127.0.0.1:*")


# --- coordinator.json ------------------------------------------------------------------------------------------------


def test_what_a_coordinator_announces(tmp_path: Path) -> None:
    assert control.running(tmp_path) is None
    control.announce(tmp_path / "counter", Path("/run/counter/control.sock"))
    found = control.running(tmp_path / "counter")
    assert found is not None
    assert (found.pid, found.control) == (os.getpid(), "/run/counter/control.sock")
    control.withdraw(tmp_path / "counter")
    assert control.running(tmp_path / "counter") is None


@pytest.mark.parametrize(
    "text",
    [
        '{"pid": 4194399, "control": "tcp://127.0.0.1:1", "started_ns": 1}',  # beyond the highest pid
        '{"pid": OURS, "control": "tcp://127.0.0.1:1", "started_ns": 1, "process_start_ticks": 1}',
        "nonsense",
        "",
    ],
)
def test_a_stale_file_means_not_running(tmp_path: Path, text: str) -> None:
    (tmp_path / "coordinator.json").write_text(text.replace("OURS", f"{os.getpid()}"))
    assert control.running(tmp_path) is None
    with pytest.raises(control.NotRunningError):
        control.query(tmp_path, "status", 0.1)
