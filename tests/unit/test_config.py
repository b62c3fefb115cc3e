"""Settings files: what is accepted, and what is said of what is not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from immortal.coordinator.config import (
    AppAuth,
    AppSendMode,
    ConfigError,
    InstanceSettings,
    Tuning,
    check_instance_name,
    check_settings,
    line_of,
    read_settings,
    settings_text,
    split_tcp,
    write_atomically,
)
from immortal.coordinator.core.limits import ReplayCheck

PORT_FIELDS = ("app_port", "app_send_port", "app_send_mode", "app_socket", "app_auth")
GOOD = 'peer = "tcp://127.0.0.1:7001"\napp_port = 7002\n'


def read(folder: Path, text: str) -> InstanceSettings:
    path = folder / "counter.toml"
    path.write_text(text)
    return read_settings(path, "counter")


def error_of(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, text)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{folder}/", "")


def test_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, GOOD) == InstanceSettings(
        name="counter",
        folder=tmp_path / "counter",
        log=str(tmp_path / "counter" / "log"),
        peer="tcp://127.0.0.1:7001",
        app_port=7002,
        app_host="localhost",
        app_send_port=None,
        app_send_mode=AppSendMode.CONNECT,
        keep_checkpoints=2,
        log_trigger_mb=1024,
        app=None,
        tuning=Tuning(),
    )


def test_all_fields(tmp_path: Path) -> None:
    text = GOOD + 'app_host = "::1"\nlog = "elsewhere"\nkeep_checkpoints = "all"\nlog_trigger_mb = 5\napp = "a.b:C"\n'
    settings = read(tmp_path, text + "[tuning]\ngroup_size_kib_max = 2048\n")
    assert settings.app_host == "::1"
    assert settings.log == str(tmp_path / "elsewhere")
    assert settings.keep_checkpoints is None
    assert settings.log_trigger_mb == 5
    assert settings.app == "a.b:C"
    assert settings.tuning.group_size_kib_max == 2048


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD.replace("app_port", "app_prot"),
            "counter.toml, line 2, field 'app_prot': unknown field: did you mean 'app_port'?",
        ),
        (
            GOOD + "\n# a comment\nzzz = 1\n",
            "counter.toml, line 5, field 'zzz': unknown field: known are"
            " peer, peer_template, allow, insecure, app_host, app_port, app_send_port, app_send_mode, app_socket,"
            " app_auth, app_insecure,"
            " log, log_key, encryption_key, allow_data_loss, lease_s, checkpoints_to, file_store, checkpoints,"
            " keep_checkpoints,"
            " keep_log_days, keep_log_mb, log_trigger_mb,"
            " checkpoint_age_s, kills_before_verdict,"
            " replay_check, rpc_limit_mb, nesting_max, spill_limit_mb, log_limit_mb, disk_free_mb, metrics,"
            " metrics_token_file, metrics_certificate_file, metrics_key_file, timings_limit_mb,"
            " keep_executions_days, keep_code, app,"
            " tuning, peers, peer_keys, client_keys",
        ),
        (
            GOOD.replace("7002", '"7002"'),
            "counter.toml, line 2, field 'app_port': got \"7002\", expected a whole number from 1 to 65535",
        ),
        (
            GOOD.replace("7002", "70020"),
            "counter.toml, line 2, field 'app_port': got 70020, expected a whole number from 1 to 65535",
        ),
        (
            GOOD.replace("7002", "true"),
            "counter.toml, line 2, field 'app_port': got true, expected a whole number from 1 to 65535",
        ),
        (
            GOOD + "app_send_port = 0\n",
            "counter.toml, line 3, field 'app_send_port': got 0, expected a whole number from 1 to 65535",
        ),
        (
            GOOD + "app_send_port = 7002\n",
            "counter.toml, line 3, field 'app_send_port': got 7002, expected another port than 'app_port'"
            " (without 'app_send_port' one connection serves both directions)",
        ),
        (
            GOOD + 'app_send_port = 7003\napp_send_mode = "accept"\n',
            'counter.toml, line 4, field \'app_send_mode\': got "accept", expected "connect" or "listen"',
        ),
        (
            GOOD + "app_send_port = 7003\napp_send_mode = [1]\n",
            'counter.toml, line 4, field \'app_send_mode\': got [1], expected "connect" or "listen"',
        ),
        (
            GOOD + 'app_send_mode = "listen"\n',
            "counter.toml, line 3, field 'app_send_mode': it needs an 'app_send_port', the port that it is about",
        ),
        (
            GOOD.replace("tcp:", "tpc:"),
            "counter.toml, line 1, field 'peer': got \"tpc://127.0.0.1:7001\","
            ' expected an endpoint such as "tcp://127.0.0.1:7001" or "ipc:///run/counter.sock"',
        ),
        (
            GOOD.replace("7001", "*"),
            "counter.toml, line 1, field 'peer': got \"tcp://127.0.0.1:*\","
            " expected an endpoint with its port (`*` is for 'immortal register' alone)",
        ),
        (
            GOOD + "keep_log_days = 0\n",
            "counter.toml, line 3, field 'keep_log_days': got 0, expected a whole number from 1 to 36500",
        ),
        (
            GOOD + 'replay_check = "lax"\n',
            'counter.toml, line 3, field \'replay_check\': got "lax", expected "strict", "counts" or "off"',
        ),
        (
            GOOD + 'kills_before_verdict = "once"\n',
            "counter.toml, line 3, field 'kills_before_verdict': got \"once\","
            ' expected a whole number from 1 to 1000, or "never"',
        ),
        (
            GOOD + "keep_checkpoints = 0\n",
            "counter.toml, line 3, field 'keep_checkpoints': got 0,"
            ' expected a whole number from 1 to 1000000, or "all"',
        ),
        (
            GOOD + 'app = "module"\n',
            'counter.toml, line 3, field \'app\': got "module", expected "module:Class"',
        ),
        (
            GOOD + "\n[tuning]\ngroup_size_kib_mx = 1\n",
            "counter.toml, line 5, field 'tuning.group_size_kib_mx': unknown field: did you mean 'group_size_kib_max'?",
        ),
        (
            GOOD + "[tunning]\n",
            "counter.toml, line 3, field 'tunning': unknown field: did you mean 'tuning'?",
        ),
        (GOOD + "tuning = 3\n", "counter.toml, line 3, field 'tuning': got 3, expected a table [tuning]"),
        ("app_port = 7002\n", "counter.toml: the field 'peer' is missing"),
        (
            'peer = "tcp://127.0.0.1:7001"\napp_host = "::1"\n',
            "counter.toml, line 2, field 'app_host': it needs an 'app_port'; without, the app has a Unix socket",
        ),
        (
            'peer = "tcp://127.0.0.1:7001"\napp_send_port = 7003\n',
            "counter.toml, line 2, field 'app_send_port': it needs an 'app_port'; without, the app has a Unix socket",
        ),
        (
            GOOD + "log = /var/log\n",
            "counter.toml, line 3, column 7: no valid TOML: Invalid value: log = /var/log",
        ),
        (
            GOOD + "app_port = 1\n",
            "counter.toml, line 3, column 13: no valid TOML: Cannot overwrite a value: app_port = 1",
        ),
        (GOOD + "log = [", "counter.toml, line 3: no valid TOML: Invalid value (at end of document)"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, message: str) -> None:
    assert error_of(tmp_path, text) == message


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "counter.toml").write_bytes(b'peer = "\xff"\n')
    with pytest.raises(ConfigError, match=r"counter.toml, byte 8: the file is not UTF-8"):
        read_settings(tmp_path / "counter.toml", "counter")


@pytest.mark.parametrize("name", ["a", "counter", "Counter-2.b_c", "9", "x" * 64])
def test_names(name: str) -> None:
    assert check_instance_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "_a", "a/b", "a b", "ä", "a\n", "a.toml", "x" * 65, "a\0"])
def test_impossible_names(name: str) -> None:
    with pytest.raises(ConfigError):
        check_instance_name(name)


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("tcp://127.0.0.1:7001", ("127.0.0.1", 7001)),
        ("tcp://[::1]:7001", ("::1", 7001)),
        ("tcp://host:*", ("host", 0)),
        ("tcp://*:7001", None),
        ("tcp://127.0.0.1:65536", None),
        ("tcp://127.0.0.1:0", None),
        ("tcp://127.0.0.1", None),
        ("ipc:///tmp/x", None),
    ],
)
def test_split_tcp(endpoint: str, address: tuple[str, int] | None) -> None:
    assert split_tcp(endpoint) == address


@pytest.mark.parametrize(
    ("host", "address", "send_address"),
    [
        ("localhost", "127.0.0.1:7002", "127.0.0.1:7003"),
        ("127.0.0.1", "127.0.0.1:7002", "127.0.0.1:7003"),
        ("::1", "[::1]:7002", "[::1]:7003"),
        ("app.example", "app.example:7002", "app.example:7003"),
    ],
)
def test_the_addresses_for_the_app(tmp_path: Path, host: str, address: str, send_address: str) -> None:
    settings = read(tmp_path, GOOD + f'app_host = "{host}"\napp_send_port = 7003\napp_insecure = true\n')
    assert (settings.app_host, settings.app_address, settings.app_send_address) == (host, address, send_address)
    assert settings.app_send_mode is AppSendMode.CONNECT
    assert read(tmp_path, GOOD).app_send_address is None


def test_line_of_looks_into_the_right_table() -> None:
    text = 'a = 1\n[tuning]\n"b" = 2\n[other]\nb = 3\n'
    assert line_of(text, "a") == 1
    assert line_of(text, "b", "tuning") == 3
    assert line_of(text, "b") is None
    assert line_of(text, "tuning") == 2


app_ports = st.one_of(
    st.tuples(
        st.integers(1, 65535),
        st.none(),
        st.just(AppSendMode.CONNECT),
        st.none() | st.just("unix:/run/c.sock"),
        st.sampled_from(AppAuth),
    ),
    st.tuples(
        st.integers(1, 7002),
        st.integers(7003, 65535),
        st.sampled_from(AppSendMode),
        st.none(),
        st.just(AppAuth.NONE),
    ),
)
settings_values = st.builds(
    InstanceSettings,
    name=st.just("counter"),
    folder=st.just(Path("/home/x/counter")),
    log=st.sampled_from(["/home/x/counter/log", '/var/a "strange" one', "toy:a log"]),
    peer=st.sampled_from(["tcp://127.0.0.1:7001", "ipc:///run/c.sock", "tcp://[::1]:1"]),
    app_port=st.just(7002),
    app_host=st.sampled_from(["localhost", "127.0.0.1", "::1"]),
    keep_checkpoints=st.none() | st.integers(1, 1000),
    keep_log_days=st.none() | st.integers(1, 36_500),
    keep_log_mb=st.none() | st.integers(0, 1 << 30),
    log_trigger_mb=st.integers(1, 1 << 20),
    spill_limit_mb=st.integers(0, 1 << 30),
    log_limit_mb=st.none() | st.integers(1, 1 << 30),
    disk_free_mb=st.integers(0, 1 << 30),
    kills_before_verdict=st.none() | st.integers(1, 1000),
    rpc_limit_mb=st.integers(1, 1023),
    timings_limit_mb=st.integers(0, 1 << 20),
    keep_executions_days=st.integers(0, 100_000),
    replay_check=st.none() | st.sampled_from(ReplayCheck),
    app=st.none() | st.just("wordcount:Counter"),
    tuning=st.builds(Tuning, st.integers(1, 9999), st.integers(0, 9999), st.integers(1, 9999)),
)


@given(settings_values, app_ports)
def test_what_is_written_reads_the_same(settings: InstanceSettings, ports: tuple[Any, ...]) -> None:
    settings = structs.replace(settings, **dict(zip(PORT_FIELDS, ports, strict=True)))
    text = settings_text(settings, log=settings.log)
    assert check_settings(tomllib.loads(text), "counter", Path("/home/x/counter.toml"), text) == settings


def test_where_the_files_of_the_metrics_are(tmp_path: Path) -> None:
    text = GOOD + 'metrics_token_file = "token"\nmetrics_certificate_file = "/c"\nmetrics_key_file = "k"\n'
    settings = read(tmp_path, text)
    found = (settings.metrics_token_file, settings.metrics_certificate_file, settings.metrics_key_file)
    assert found == (tmp_path / "token", Path("/c"), tmp_path / "k")
    written = settings_text(settings, log=None)
    assert check_settings(tomllib.loads(written), "counter", tmp_path / "counter.toml", written) == settings


@pytest.mark.parametrize("given", ["metrics_certificate_file", "metrics_key_file"])
def test_a_certificate_goes_with_a_key(tmp_path: Path, given: str) -> None:
    assert error_of(tmp_path, GOOD + f'{given} = "x"\n') == (
        "counter.toml, line 3: 'metrics_certificate_file' and 'metrics_key_file' go together, one of them is missing"
    )


def test_defaults_are_not_written(tmp_path: Path) -> None:
    for good in (GOOD, 'peer = "tcp://127.0.0.1:7001"\n'):
        settings = read(tmp_path, good)
        assert settings_text(settings, log=None) == good
    assert "log = " in settings_text(structs.replace(settings, log="/x"), log="/x")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "counter.toml"
    write_atomically(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["counter.toml"]
