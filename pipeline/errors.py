"""Errors of the pipeline, and the reduction of Spark's long errors to one line."""

from __future__ import annotations

import re

from immortal.protocol.errors import ImmortalError


class PipelineError(ImmortalError):
    """Base class of the pipeline's errors."""


class SourceError(PipelineError):
    """Raised when a request to the data source can't be carried out: a path, an option, rows that make no log."""


class LogChangedError(PipelineError):
    """Raised when a log lost records while they were read: it was trimmed or replaced."""


class JavaError(PipelineError):
    """Raised when no Java was found that Spark runs on."""


class SparkError(PipelineError):
    """Raised when Spark failed, for a reason of its own or of the user's code."""


# The last line of a Python traceback: module.Class: message. Spark puts spaces or its own prefix before it.
_OURS = re.compile(r"(?:^|\s)immortal(?:\.\w+)+: (.+)$", re.MULTILINE)
_TRACEBACK_END = re.compile(r"^((?:[A-Za-z_][\w.]*)(?:Error|Exception|Exit|Interrupt)): (.+)$", re.MULTILINE)
_JAVA_CAUSE = re.compile(r"^Caused by: (?:[\w$]+\.)*([\w$]+(?:Error|Exception)): (.+)$", re.MULTILINE)
_ERROR_CLASS = re.compile(r"^\[[\w.]+\]\s*")
_MISSING = re.compile(r"No module named '(immortal|msgspec|numpy|pandas|pyarrow)\b")
_LINE_SIZE_MAX = 500


def one_line_error(error: BaseException) -> ImmortalError:
    """Return ``error`` as an error with one line of text; an ImmortalError is returned unchanged.

    An ImmortalError of a Python worker reaches the driver as text, in a Python traceback within one of the JVM. This
    finds that text again.
    """
    if isinstance(error, ImmortalError):
        return error
    text = str(error)
    if ours := _OURS.findall(text):
        return PipelineError(ours[-1].strip())
    if "OutOfMemoryError" in text:
        return SparkError("Spark ran out of memory: raise spark.driver.memory (or spark.executor.memory)")
    if "Python worker exited unexpectedly" in text or "Python worker failed to connect" in text:
        return SparkError(
            "a Python worker of Spark crashed: too little memory, or a log's file is damaged"
            " ('immortal log verify' finds that)"
        )
    if isinstance(error, ConnectionError) or "Py4JNetworkError" in type(error).__name__:
        return SparkError("the connection to Spark is lost: its process has ended")
    if "PYTHON_VERSION_MISMATCH" in text:
        return SparkError("Spark's workers run another version of Python than this program: set PYSPARK_PYTHON")
    if missing := _MISSING.search(text):
        return SparkError(
            f"Spark's executors have no package {missing[1]}: make an archive with 'immortal pipeline pack --out"
            " env.tar.gz', and add --env env.tar.gz"
        )
    ends = [match for match in _TRACEBACK_END.finditer(text) if not match[1].startswith(("org.", "java.", "py4j."))]
    if ends:
        return SparkError(_one_line(f"{ends[-1][1].rpartition('.')[2]}: {ends[-1][2]}"))
    if causes := _JAVA_CAUSE.findall(text):
        return SparkError(_one_line(f"{causes[-1][0]}: {causes[-1][1]}"))
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return SparkError(_one_line(_ERROR_CLASS.sub("", first)) or type(error).__name__)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LINE_SIZE_MAX else f"{line[:_LINE_SIZE_MAX]}..."
