"""What is nested too deeply, in an argument or in an older log, is shown or said by each command: never a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from immortal.cli import main
from immortal.coordinator.config import InstanceSettings
from immortal.coordinator.core.formatting import format_call
from immortal.coordinator.core.interfaces import CheckpointHeader, Transaction
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.log.record_contents import shown_arguments
from immortal.log import create_log, open_reader
from immortal.pipeline.arguments import decoder_for
from immortal.presenters.records import describe_message, rpc_of
from immortal.protocol.checksum import crc64
from immortal.protocol.messages import MessageType, RpcKind, RpcType, encode_incoming_rpc, encode_message
from immortal.protocol.trailer import BatchKind, BatchSource
from immortal.protocol.verdicts import Verdict, VerdictKind
from immortal.replay.findings import pair_arguments
from tests.contract.test_dead_letters_cli import ADD, APP, COMMITTER_ID, FORK, TIME_NS, value

DEPTHS = (100, 200, 500, 900, 990, 1100, 20_000)
NESTED = ("[" * 1600 + "]" * 1600, '{"a":' * 1600 + "1" + "}" * 1600, "[" * 200 + "]" * 200)


def messages() -> Iterator[bytes]:
    """Calls and answers of an older log, with values of each depth."""
    for depth in DEPTHS:
        deep = b"\x91" * depth + b"\x01"
        yield from (
            encode_incoming_rpc(ADD, RpcType.FORK, b"\x91" + deep),
            encode_incoming_rpc(ADD, RpcType.ASYNC, b"\x93\xa4shop\x11" + deep),
            encode_incoming_rpc(ADD, RpcType.ASYNC, b"\x92\x05" + deep, RpcKind.RETURNED_VALUE),
            encode_incoming_rpc(ADD, RpcType.ASYNC, b"\x94\x05\xa1E\x91" + deep + b"\x80", RpcKind.RAISED),
        )


MESSAGES = list(messages())


@pytest.fixture
def settings(tmp_path: Path) -> InstanceSettings:
    """One message in each record behind a checkpoint; those with odd numbers are dead letters."""
    settings = Registry(tmp_path).register("counter", "tcp://127.0.0.1:*", app=APP)
    store = create_log(settings.log, "counter", committer_id=COMMITTER_ID)
    initial = value(0, encode_message(MessageType.INITIAL_MESSAGE, FORK), BatchSource(BatchKind.INITIAL, "", 0, 1, 0))
    store.commit(Transaction(records=[(0, initial)], extensions=frozenset()))
    store.write_checkpoint_chunk(1, 0, b"state")
    store.commit(Transaction(checkpoint=CheckpointHeader(1, 0, 5, crc64(b"state"), TIME_NS)))
    for number, message in enumerate(MESSAGES, 1):
        source = BatchSource(BatchKind.STREAM, "shop", number, 1, TIME_NS)
        store.commit(Transaction(records=[(number, value(number, message, source))]))
    letters = [
        Verdict(number, 0, VerdictKind.UNDONE, "ValueError", "no", method="Counter.add", message=message)
        for number, message in enumerate(MESSAGES, 1)
        if number % 2
    ]
    store.commit(Transaction(verdicts=letters))
    store.close()
    return settings


def immortal(settings: InstanceSettings, *arguments: str, status: int = 0) -> Result:
    result = CliRunner().invoke(main, ["--home", str(settings.folder.parent), *arguments], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result


@pytest.mark.parametrize(
    "command",
    [
        ("log", "show", "counter"),
        ("log", "show", "counter", "--json"),
        ("log", "show", "counter", "--limit", "3"),
        ("dead-letters", "counter"),
        ("dead-letters", "counter", "--json"),
        ("dead-letters", "counter", "export"),
        ("dead-letters", "counter", "show", "1:0"),
        ("dead-letters", "counter", "show", "27:0"),
        ("status", "counter"),
    ],
    ids=" ".join,
)
def test_an_older_log_is_shown(settings: InstanceSettings, command: tuple[str, ...]) -> None:
    output = immortal(settings, *command).output
    assert output
    if "--json" in command and command[0] == "log":
        assert len([json.loads(line) for line in output.splitlines()]) == len(MESSAGES) + 1


@pytest.mark.parametrize("number", range(2, len(MESSAGES) + 1, 2))
def test_each_can_be_skipped(settings: InstanceSettings, number: int) -> None:
    immortal(settings, "skip", "counter", f"{number}:0", "--reason", "nested")
    with open_reader(settings.log, "counter") as reader:
        (verdict,) = [one for one in reader.verdicts() if one.kind is VerdictKind.SKIPPED]
    is_answer = number % 4 == 0 or number % 4 == 3
    assert verdict.caller == (None if is_answer else "shop")


@pytest.mark.parametrize("given", NESTED)
@pytest.mark.parametrize(
    "command",
    [("call", "counter", "add"), ("call", "counter", "--query", "add"), ("handlers", "counter", "signal", "1", "it")],
    ids=" ".join,
)
def test_what_is_given_is_refused_in_one_line(settings: InstanceSettings, command: tuple[str, ...], given: str) -> None:
    output = immortal(settings, *command, given, status=2).output
    line = output.splitlines()[-1]
    assert line.startswith("Error: ")
    assert "nested" in line
    assert len(line) < 300


@pytest.mark.parametrize("is_msgpack", [True, False])
@pytest.mark.parametrize("message", MESSAGES[::3])
def test_in_words(message: bytes, is_msgpack: bool) -> None:
    """As the report of a replay that does something else has it, and time travel."""
    methods = {("", ADD): "Counter.add"} if is_msgpack else {}
    assert format_call(message, "", methods)
    rpc = rpc_of(message)
    assert rpc is not None
    assert describe_message(message, decoder_for(APP, None))
    shown_arguments(rpc)
    pair_arguments(rpc, rpc, is_msgpack=is_msgpack)
