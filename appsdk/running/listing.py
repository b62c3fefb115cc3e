"""Command ``python -m appsdk.running.listing MODULE``: lists the services of a module, and its files, without a run.

It prints a JSON object: {"services": {CLASS: {"versions": [N, ...], "peers": [NAME, ...], "is_own": BOOL, "is_keyed":
BOOL}}, "files": [...]}. The versions are those that the class can run, its own first. A service is the module's own if
the module defines it and no other one of it upgrades it. The files are the imported files of the current folder. The
exit status is 0, or EXIT_NOT_RUNNABLE for a module that can't be imported; stderr says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import site
import sys
from collections.abc import Sequence
from typing import Any

from immortal.appsdk.calls.user_code import user_traceback
from immortal.appsdk.errors import EXIT_DONE, EXIT_NOT_RUNNABLE, DefinitionError
from immortal.appsdk.handlers.definition import Definition, definition_of
from immortal.appsdk.running.user_modules import HiddenModules, add_to_path, explain, load_module
from immortal.protocol.errors import ImmortalError
from immortal.protocol.safe_output import printable_message


def services(module: Any) -> dict[str, dict[str, Any]]:
    """Return the services of ``module``, by name of their class."""
    found: dict[str, Definition] = {}
    for name, value in vars(module).items():
        with contextlib.suppress(DefinitionError):
            found[name] = definition_of(value)
    older = {one.cls for definition in found.values() for one in definition.chain[1:]}
    return {
        name: {
            "versions": [one.version for one in definition.chain],
            "peers": sorted({peer.name for peer in definition.peers.values()}),
            "is_keyed": definition.keyed is not None,
            "is_own": definition.label == f"{module.__name__}:{name}" and definition.cls not in older,
        }
        for name, definition in found.items()
        if definition.cls is not definition.base
    }


def files(folder: str) -> list[str]:
    """Return the files of imported modules in ``folder`` that belong to no environment."""
    places = [os.path.realpath(place) for place in (*site.getsitepackages(), sys.prefix)]
    found = set()
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path is None or not (path := os.path.realpath(path)).startswith(f"{os.path.realpath(folder)}{os.sep}"):
            continue
        if not any(path.startswith(f"{place}{os.sep}") for place in places):
            found.add(path)
    return sorted(found)


def main(arguments: Sequence[str]) -> int:
    name, folder = arguments[0], os.getcwd()
    hidden = HiddenModules(folder)
    add_to_path(folder)
    if not os.path.isfile(name) and (problem := hidden.problem(name.partition(".")[0])) is not None:
        return _refused(problem)
    with contextlib.redirect_stdout(sys.stderr):  # output of the user's module is no part of the answer
        try:
            module = load_module(name)
        except ImmortalError as error:
            return _refused(explain(error))
        except BaseException as error:  # the user's module: its own traceback
            if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                return _refused(f"there is no module {error.name!r} in {folder}")
            return _refused(f"importing {name!r} failed:\n{user_traceback(error)}")
    print(json.dumps({"services": services(module), "files": files(folder)}))  # noqa: T201 (for a program)
    return EXIT_DONE


def _refused(text: str) -> int:
    print(printable_message(text.rstrip("\n")), file=sys.stderr)  # noqa: T201
    return EXIT_NOT_RUNNABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
