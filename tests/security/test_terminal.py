"""What strangers, peers, clients and apps say is shown; no terminal obeys it, and it forges no line of a log."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from immortal.appsdk.calls.user_code import run_user_code
from immortal.appsdk.handlers.log import FailureReporter
from immortal.appsdk.running.life import print_message
from immortal.cli import main
from immortal.coordinator.core import notices
from immortal.coordinator.core.interfaces import AuditEntry, Transaction
from immortal.coordinator.instances.registry import Registry
from immortal.coordinator.notices import configure
from immortal.coordinator.operator import control
from immortal.errors import HookError
from immortal.log import create_log
from immortal.pipeline.cli import UNREADABLE, Run, _finish
from immortal.pipeline.jobs.sources import Unreadable
from immortal.pipeline.jobs.stats import BinStats, Figures, MethodStats, ServiceStats, Stats, TalkerStats
from immortal.pipeline.jobs.trace import Node, Trace
from immortal.pipeline.report.pages import stats_page, trace_dot, trace_svg
from immortal.protocol.command_line import Commands
from immortal.protocol.errors import ImmortalError
from immortal.protocol.messages import MessageType, encode_incoming_rpc, encode_message
from immortal.protocol.record import encode_record
from immortal.protocol.safe_output import printable, printable_json, printable_lines, printable_message
from immortal.protocol.trailer import BatchKind, BatchSource, Trailer, encode_trailer
from immortal.protocol.verdicts import Cause, Verdict, VerdictKind
from immortal.replay.result import format_failure, new_failure_lines
from tests.helpers.logged import kept_logging

COMMITTER_ID = 77
NASTY = (
    "a\x1b]0;owned\x07\x9b31m\x7f\u202e\u2066\u2028\u2029\x85\x0b\r\n12:00:00.000 info    counter  forged [red]b[/red]"
)
CONTROLS = "\x00\x07\x08\t\n\x0b\x0c\r\x1b\x1c\x7f\x80\x85\x9b\u200b\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff"
texts = st.text(st.one_of(st.characters(), st.sampled_from(CONTROLS)), max_size=40)  # also lone surrogates


def check_lines(said: str, is_own: Callable[[str], bool] = lambda line: True) -> list[str]:
    """Each line is one that a terminal just shows, and either one that we begin or indented."""
    assert said.endswith("\n")
    lines = said[:-1].split("\n")
    for line in lines:
        assert line.isprintable(), line
        assert line[:1] in ("", " ") or is_own(line), line
    return lines


# --- the one place where it is done -----------------------------------------------------------------------------------


@given(texts)
def test_nothing_that_is_shown_is_obeyed(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert all(line.isprintable() and line[:1] in ("", " ") for line in printable_lines(text))
    first, *rest = printable_message(text).split("\n")
    assert first.isprintable()
    assert [line for line in rest if line] == [line for line in printable_lines(text)[1:] if line] or not rest


@given(st.recursive(texts, lambda each: st.lists(each, max_size=3) | st.dictionaries(texts, each, max_size=3)))
def test_json_is_one_line_and_stays_what_it_was(value: Any) -> None:
    said = printable_json(value)
    assert said.isprintable()
    assert json.loads(said) == value
    indented = printable_json(value, indent=2)
    assert all(line.isprintable() for line in indented.split("\n"))
    assert json.loads(indented) == value


@pytest.mark.parametrize("text", ["", "plain", "größer 数 🙂", "C:\\new", "{'a': b'\\x00'}"])
def test_what_is_printable_stays_as_it_is(text: str) -> None:
    assert printable(text) == text
    assert printable_message(f"{text}\n  {text}") == f"{text}\n  {text}"


# --- logs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_logging() -> Iterator[None]:
    with kept_logging():
        yield


@pytest.mark.usefixtures("own_logging")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts, log_format=st.sampled_from(["human", "json"]))
def test_a_stranger_cannot_forge_a_line_of_the_log(text: str, log_format: str) -> None:
    stream = io.StringIO()
    log = configure(text or "counter", log_format=log_format, stream=stream)
    log.warning(f"a frame was dropped: {text}", reason=text, names=[text], error=ImmortalError(text))
    logging.getLogger("immortal.coordinator.messenger").warning("from %s", text)
    log.emit(notices.PeerRefused(text, text))
    log.emit(notices.AppBrokeProtocol(text))
    log.emit(notices.Spills(text, 64, 0.5, text, 64))
    lines = check_lines(stream.getvalue())
    assert len(lines) == 5
    if log_format == "json":
        dropped, _, refused, broke, spills = map(json.loads, lines)
        assert dropped["reason"] == refused["peer"] == broke["error"] == spills["state"] == text
        assert [json.loads(line)["message"] for line in lines[1:4]] == [
            f"from {text}",
            f"stream refused: {text}",
            f"the app broke the protocol: {text}; its connection is closed, nothing logged is lost",
        ]
        assert (refused["notice"], refused["level"], refused["instance"]) == ("PeerRefused", "error", text or "counter")
        assert "notice" not in dropped


@pytest.mark.usefixtures("own_logging")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts, log_format=st.sampled_from(["human", "json"]))
def test_an_exception_cannot_forge_a_line_of_the_log(text: str, log_format: str) -> None:
    stream = io.StringIO()
    configure("counter", log_format=log_format, stream=stream)
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("immortal.coordinator.messenger").exception("a callback failed")
    (line,) = check_lines(stream.getvalue())
    assert "a callback failed" in line
    assert "Traceback (most recent call last):" in line


def test_no_field_is_taken_for_a_part_of_the_template(own_logging: None) -> None:
    stream = io.StringIO()
    configure("counter", stream=stream).emit(notices.PeerRefused("{reason.__class__}", "{peer} {0} %s {"))
    assert stream.getvalue().endswith("stream refused: {peer} {0} %s {  peer={reason.__class__}\n")


def test_a_value_cannot_pass_for_another_one(own_logging: None) -> None:
    stream = io.StringIO()
    configure("counter", stream=stream).warning("dropped", reason='x" peer="bank', peer="a=b c")
    assert stream.getvalue().endswith('dropped  reason="x\\" peer=\\"bank" peer="a=b c"\n')


# --- what an app says -------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_a_call_cannot_forge_a_line_of_its_app(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError(text)

    with pytest.raises(ImmortalError) as raised:
        run_user_code("a handler", fail, HookError)
    print_message("Counter", str(raised.value))
    trace = f"Traceback\n{text}"
    reporter = FailureReporter("Counter")
    reporter.failed(Verdict(1, 0, VerdictKind.UNDONE, f"E{text}", text, method="Counter.add", trace=trace), text)
    reporter.failed(Verdict(1, 0, VerdictKind.REFUSED, text=text, cause=Cause.ARGUMENTS), text, text)
    own = re.compile(r"app Counter: |\d\d:\d\d:\d\d\.\d{3} (error|warning) ")
    check_lines(capsys.readouterr().err, lambda line: own.match(line) is not None)


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """An instance whose log is full of what somebody else made up."""
    registry = Registry(tmp_path)
    settings = registry.register("counter", "tcp://127.0.0.1:*")
    call = encode_incoming_rpc(7, 0, NASTY.encode())
    message = encode_message(MessageType.INITIAL_MESSAGE, NASTY.encode())
    store = create_log(settings.log, "counter", committer_id=COMMITTER_ID)
    batches = ([BatchSource(BatchKind.INITIAL, "", 0, 1, 0)], [BatchSource(BatchKind.STREAM, NASTY, 1, 1, 0)])
    for number, (content, sources) in enumerate(zip((message, call), batches, strict=True)):
        record = encode_record(COMMITTER_ID, number, content)
        value = record + encode_trailer(Trailer(1, tuple(sources)), int.from_bytes(record[8:16], "little"))
        store.commit(Transaction(records=[(number, value)], extensions=frozenset()))
    verdict = Verdict(1, 0, VerdictKind.UNDONE, NASTY, NASTY, method=NASTY, message=call, trace=f"{NASTY}\n  {NASTY}")
    store.commit(Transaction(verdicts=[verdict], audit=[AuditEntry(1, NASTY, NASTY)], peers={NASTY: 5}))
    store.close()
    return registry


LIVE: dict[str, Any] = {
    "name": "counter",
    "phase": NASTY,
    "sequence_id": 4,
    "checkpoint": None,
    "backlog_records": 0,
    "inputs": {NASTY: {"position": 3}},
    "outputs": {NASTY: {"acknowledged": 1, "position": 2, "error": NASTY}},
    "problems": [NASTY],
    "held_up_for": [NASTY],
    "log": {"full": NASTY},
    "handling": {"method": NASTY, "caller": NASTY, "for_s": 11.0, "record": 4},
    "suspect": {},
    "verdicts": {NASTY: 2},
    "letters": {"count": 1, "bytes": 5},
}
PEER: dict[str, Any] = {
    **dict.fromkeys(("made", "sent", "acknowledged", "received", "memory_bytes", "spilled_bytes", "window_bytes")),
    "endpoint": NASTY,
    "origin": NASTY,
    "connected_s": None,
    "state": NASTY,
    "granted_bytes": None,
    "reset_pending": False,
    "held_up": False,
    "committer_id": None,
    "error": NASTY,
}


def immortal(registry: Registry, *arguments: str) -> str:
    result = CliRunner().invoke(main, ["--home", str(registry.home), *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


@pytest.mark.parametrize(
    "command",
    [
        "log show counter",
        "log show counter --json",
        "log show counter --audit",
        "log show counter --audit --json",
        "log verify counter",
        "log diff counter counter2",
        "log diff counter counter2 --json",
        "dead-letters counter",
        "dead-letters counter --json",
        "dead-letters counter show 1:0",
        "dead-letters counter show 1:0 --json",
        "dead-letters counter export",
        "peers show counter",
        "peers show counter --json",
        "status",
        "status --json",
        "top --once --interval 0.5",
        "recover counter",
    ],
)
def test_a_log_cannot_move_the_cursor_of_who_reads_it(registry: Registry, command: str) -> None:
    if "diff" in command:
        create_log(registry.register("counter2", "tcp://127.0.0.1:*").log, "counter2").close()
    lines = check_lines(immortal(registry, *command.split()))
    assert not any(line.startswith("12:00:00.000 info") for line in lines)


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "status --json",
        "top --once --interval 0.5",
        "peers show counter",
        "peers show counter --json",
        "dead-letters counter retry --all",
    ],
)
def test_a_coordinator_cannot_move_the_cursor_of_who_asks_it(
    registry: Registry, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(folder: Path, question: str, timeout_s: float = 0.0, *, argument: object = None) -> dict[str, Any]:
        return {"status": LIVE, "peers": {"peers": {NASTY: PEER}}}.get(
            question, {"retried": 0, "refused": {NASTY: NASTY}}
        )

    monkeypatch.setattr(control, "running", lambda folder: SimpleNamespace(pid=1))
    monkeypatch.setattr(control, "query", answer)
    lines = check_lines(immortal(registry, *command.split()))
    assert any("owned" in line for line in lines), "nothing of it was shown"
    assert not any(line.startswith("12:00:00.000 info") for line in lines)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_an_error_cannot_move_the_cursor(text: str) -> None:
    group = Commands("immortal")

    @group.command()
    def fail() -> None:
        raise ImmortalError(text)

    check_lines(CliRunner().invoke(group, ["fail"]).output, lambda line: line.startswith("error: "))


def test_a_verdict_is_shown_in_lines_of_its_own() -> None:
    verdict = Verdict(1, 0, VerdictKind.UNDONE, "E", NASTY, method="add", trace=f"Traceback\nerror: {NASTY}\x0bx")
    assert format_failure(verdict).isprintable()
    ((_, *trace),) = new_failure_lines([verdict])
    assert all(line.startswith("    ") and line.isprintable() for line in trace)


# --- the pipeline -----------------------------------------------------------------------------------------------------


def test_names_in_logs_move_no_cursor_of_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    run, unreadable = Run("local", False, {}, False), [Unreadable(NASTY, NASTY)]
    with pytest.raises(SystemExit) as ended:
        _finish(run, None, iter([f"service {NASTY}"]), unreadable)
    assert ended.value.code == UNREADABLE
    line, _, log = check_lines(capsys.readouterr().out)
    assert "owned" in line
    assert log.count("owned") == 2
    with pytest.raises(SystemExit):
        _finish(replace(run, as_json=True), {NASTY: [NASTY]}, iter(()), unreadable)
    (as_json,) = check_lines(capsys.readouterr().out)
    assert json.loads(as_json) == {NASTY: [NASTY]}


@pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of matplotlib: glyphs that its font lacks, a name as wide as the page
def test_names_in_logs_are_text_in_pages_and_pictures() -> None:
    name = f"<script>{NASTY}\x00&\ufffe"
    figures = Figures(1, 2, 1.0, 1.0, 1.0, 1.0)
    service = ServiceStats(name, figures, 1, 2, 1, 1, 1.0, 1.0, 1, 0)
    talker = TalkerStats(name, name, figures)
    page = stats_page(
        Stats([service], [MethodStats(name, name, figures)], 10**9, [BinStats(name, 0, figures)], [talker])
    )
    trace = Trace([Node(0, None, 0, name, 1, name, 1, 1, 0, 0, 1, (name,))], False, 1, 1)
    for text in (page, trace_svg(trace), trace_dot(trace)):
        assert all(line.isprintable() for line in text.split("\n"))
    assert "<script" not in page + trace_svg(trace)
    ElementTree.fromstring(trace_svg(trace))
