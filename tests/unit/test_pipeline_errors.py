"""Whatever Spark wraps an error in, one line of it comes out."""

from __future__ import annotations

import logging
import signal

import pytest

from immortal.coordinator.core.errors import LogFormatError
from immortal.pipeline.errors import PipelineError, SourceError, one_line_error
from immortal.pipeline.session import _is_no_interrupt, _uninterrupted

WORKER = """[FAILED_EXECUTE_UDF] Job aborted due to stage failure: Task 0 failed 1 times, most recent failure:
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/x/pipeline/reading.py", line 50, in open_log
    raise lmdb.Error("x")
lmdb.Error: x

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 2, in main
immortal.coordinator.core.errors.LogFormatError: the log in /a: b has format version 9, this program reads version 2

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:581)
Driver stacktrace:"""
USER = """Traceback (most recent call last):
  File "/x/user.py", line 2, in main
ValueError: no such thing:
   at all
\tat org.apache.spark"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (WORKER, "the log in /a: b has format version 9, this program reads version 2"),
        (USER, "ValueError: no such thing:"),
        ("[PATH_NOT_FOUND] Path does not exist: x. SQLSTATE: 42\n at y", "Path does not exist: x. SQLSTATE: 42"),
        ("py4j\n: java.lang.OutOfMemoryError: Java heap space\n\tat java", "Spark ran out of memory"),
        ("x: Python worker exited unexpectedly (crashed)\n\tat y", "a Python worker of Spark crashed"),
        ("boo\nCaused by: java.io.IOException: No space left on device\n\tat java", "IOException: No space left"),
        (
            "Traceback (most recent call last):\nModuleNotFoundError: No module named 'immortal'\n\tat org.apache",
            "Spark's executors have no package immortal: make an archive with 'immortal pipeline pack ",
        ),
        ("x\nModuleNotFoundError: No module named 'immortal_till'\n\tat y", "ModuleNotFoundError: No module named"),
        ("", "RuntimeError"),
    ],
)
def test_one_line(text: str, expected: str) -> None:
    error = one_line_error(RuntimeError(text))
    assert isinstance(error, PipelineError)
    assert str(error).startswith(expected)
    assert "\n" not in str(error)
    assert "SparkException" not in str(error)
    assert "\tat" not in str(error)


def test_errors_of_ours_stay_what_they_are() -> None:
    for error in (SourceError("x"), LogFormatError("y")):
        assert one_line_error(error) is error


def test_a_lost_connection() -> None:
    assert "connection to Spark is lost" in str(one_line_error(ConnectionRefusedError(111, "refused")))


def test_an_interrupt_waits_until_the_jvm_has_started() -> None:
    """A JVM that was left while it started never ended."""
    done = []

    def start() -> None:
        with _uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("started")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["started"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_traceback_that_py4j_logs_for_an_interrupt_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger().addFilter(_is_no_interrupt)
    try:
        logging.exception("KeyboardInterrupt while sending command.")
        logging.error("another")
    finally:
        logging.getLogger().removeFilter(_is_no_interrupt)
    assert caplog.messages == ["another"]
