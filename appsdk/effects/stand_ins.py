"""Other functions in place of those that work in the outside world, while a service is developed.

    IMMORTAL_EFFECTS='{"shop:charge": "fakes:charge"}'

in the environment of the app; `immortal dev` takes it from ``immortal.toml``. Tests have their own way
(:mod:`immortal.appsdk.testing.stand_ins`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from immortal.appsdk.effects.request import EffectRequest, EffectRunner
from immortal.appsdk.errors import UsageError


class StandInRunner:
    """An EffectRunner: ``runner`` calls what ``stand_ins`` has for a function, in its place."""

    def __init__(self, runner: EffectRunner, stand_ins: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        self._runner = runner
        self._stand_ins = stand_ins

    def start(self, request: EffectRequest) -> None:
        request.stand_in = self._stand_ins.get(request.function)
        self._runner.start(request)

    def cancel(self, request: EffectRequest) -> None:
        self._runner.cancel(request)


def load_stand_ins(names: Mapping[str, str]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """``names``: "module:function" by "module:function". Raises UsageError; what a module raises as it is imported
    passes."""
    return {_load(function): _load(stand_in) for function, stand_in in names.items()}


def _load(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise UsageError(f"{name!r}: a function is given as module:function, such as shop:charge")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module imports
        raise UsageError(f"{name!r}: there is no module {error.name!r}") from None
    found = getattr(module, function_name, None)
    if not callable(found) or isinstance(found, type):
        what = "nothing of that name" if found is None else f"a {type(found).__name__} of that name, and no function"
        raise UsageError(f"{name!r}: the module has {what}")
    function: Callable[..., Any] = found
    return function
