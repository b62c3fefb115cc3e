"""Command of the harmony pattern: runs workers, and shows the progress of batches."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from immortal.appsdk.client import ClientError
from immortal.appsdk.patterns.harmony.batch import BatchError
from immortal.appsdk.patterns.harmony.ventilator import connect
from immortal.appsdk.patterns.harmony.worker import WorkerProcesses, complain, say, worker

_FOLLOW_S = 1.0


def _function(text: str) -> tuple[str, Callable[[Any], Any]]:
    """Import the function of ``MODULE:FUNCTION`` or ``NAME=MODULE:FUNCTION``. Raises ArgumentTypeError."""
    name, equals, place = text.rpartition("=")
    module, colon, attribute = place.partition(":")
    if not (module and colon and attribute) or (equals and not name):
        raise argparse.ArgumentTypeError(f"{text!r}: MODULE:FUNCTION or NAME=MODULE:FUNCTION was expected")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    except AttributeError:
        raise argparse.ArgumentTypeError(f"{text!r}: module {module!r} has no {attribute!r}") from None
    finally:
        sys.path.pop(0)
    return name or attribute, found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 on was expected")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m immortal.appsdk.patterns.harmony", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    work = commands.add_parser("work", help="do tasks of a cluster until Ctrl-C")
    work.add_argument("cluster", help="its name")
    work.add_argument("functions", nargs="+", metavar="[NAME=]MODULE:FUNCTION", help="what batches call NAME")
    work.add_argument("--processes", type=_count, help="so many, each replaced when it dies")
    work.add_argument("--task-timeout", type=float, metavar="SECONDS", help="a task that takes longer ends its process")
    work.add_argument("--name", help="of this worker, where there is one process")
    progress = commands.add_parser("progress", help="how far batches are")
    progress.add_argument("cluster", help="its name")
    progress.add_argument("batch", nargs="?", help="one of them")
    progress.add_argument("--follow", action="store_true", help="until it is complete")
    return parser


def _work(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.processes is not None:
        rest = list(options.functions)
        if options.task_timeout is not None:
            rest += ["--task-timeout", str(options.task_timeout)]
        crew = WorkerProcesses(options.cluster, rest, options.processes)
        signal.signal(signal.SIGTERM, lambda number, frame: crew.end())
        return crew.run()
    try:
        functions = dict(map(_function, options.functions))
        worker(options.cluster, functions, task_timeout_s=options.task_timeout, name=options.name)
    except (argparse.ArgumentTypeError, TypeError) as error:
        parser.error(str(error))
    return 0


def _progress(options: argparse.Namespace) -> int:
    with connect(options.cluster) as cluster:
        while True:
            names = [options.batch] if options.batch else cluster.batches()
            progress = [cluster.progress(name) for name in names]
            for one in progress:
                say(str(one))
            if not options.follow or all(one.is_complete for one in progress):
                return 0
            time.sleep(_FOLLOW_S)


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    try:
        return _work(options, parser) if options.command == "work" else _progress(options)
    except (ClientError, BatchError) as error:
        complain(f"harmony: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
