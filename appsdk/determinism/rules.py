"""Table of functions that differ from run to run, with their replacements in handlers."""

from __future__ import annotations

import ast
import importlib
import random
import sys
from datetime import date
from types import BuiltinFunctionType, MethodType, ModuleType
from typing import Any

from msgspec import Struct

DIFFERS = "which differs at each replay"
NOT_REPEATED = "which no replay repeats"

_NOW = "use immortal.now()"
_NOW_NS = "use immortal.now_ns()"
_RANDOM = "use immortal.random"
_UUID = "use immortal.uuid4()"
_SEND = "take it in an @on_primary hook and send it as an impulse"
_HOOK = "start it in an @on_primary hook, and send what the app is to know as an impulse"
_EFFECT = "do it in an effect: await immortal.effect(<function>, ...) in an 'async def' handler"
NOT_BEGUN = "which so never begins"
AWAIT = "write 'await' in front of it"
AWAIT_OR_FORK = f"{AWAIT}, or .fork(...) if nobody is to wait for it"
REFUSED = "which is refused there, as others change it while that waits"
OF_A_COPY = "so the state stays as it is"
IN_A_STEP = "move this line into a function, or a 'def' handler, and await immortal.step(<function>)"
NOT_RUN_AGAIN = "which no recovery runs again"
NOT_KEPT = "whose first value comes back in a recovery"
IN_THE_STATE = "keep it in an attribute of the class"
BY_RESULT = "let the function return what changes"
BLOCKS = "which holds up the whole instance, at each replay too"


class Rule(Struct, frozen=True):
    """Rule for a function. ``name``: as in the source; ``why``: the problem with it; ``instead``: the replacement.

    ``arguments_count``: the rule applies only to calls with fewer arguments; -1: to all calls.
    """

    name: str
    why: str
    instead: str
    arguments_count: int = -1

    def applies_to(self, call: ast.Call) -> bool:
        """Return True if the rule applies to this call."""
        if self.arguments_count < 0 or any(isinstance(argument, ast.Starred) for argument in call.args):
            return self.arguments_count < 0
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        nothing = sum(isinstance(argument, ast.Constant) and argument.value is None for argument in given)
        return len(given) - nothing < self.arguments_count


_ROWS: dict[str, list[tuple[str, str, str]]] = {  # module: (names, why, instead)
    "time": [
        ("sleep", BLOCKS, "await immortal.sleep(...) in an 'async def' handler"),
        ("time monotonic perf_counter process_time thread_time clock_gettime", DIFFERS, _NOW),
        ("time_ns monotonic_ns perf_counter_ns process_time_ns thread_time_ns clock_gettime_ns", DIFFERS, _NOW_NS),
    ],
    "secrets": [("token_bytes token_hex token_urlsafe randbelow", DIFFERS, _RANDOM)],
    "uuid": [("uuid1 uuid4 uuid6 uuid7 uuid8", DIFFERS, _UUID)],
    "os": [
        ("urandom getrandom", DIFFERS, _RANDOM),
        ("system popen", NOT_REPEATED, _EFFECT),
        ("getpid getppid fork", DIFFERS, _SEND),
    ],
    "builtins": [("id", DIFFERS, "use a key of your own"), ("input", NOT_REPEATED, _SEND)],
    "urllib.request": [("urlopen urlretrieve", NOT_REPEATED, _EFFECT)],
    "socket": [("create_connection create_server getaddrinfo gethostbyname", NOT_REPEATED, _EFFECT)],
    "subprocess": [("run call check_call check_output getoutput getstatusoutput", NOT_REPEATED, _EFFECT)],
    "requests": [("request get options head post put patch delete", NOT_REPEATED, _EFFECT)],
    "httpx": [("request get options head post put patch delete stream", NOT_REPEATED, _EFFECT)],
    "_thread": [("start_new_thread start_new", NOT_REPEATED, _HOOK)],
    "asyncio": [
        ("run new_event_loop run_coroutine_threadsafe", NOT_REPEATED, _HOOK),
        ("to_thread open_connection start_server open_unix_connection start_unix_server", NOT_REPEATED, _EFFECT),
        ("create_subprocess_exec create_subprocess_shell", NOT_REPEATED, _EFFECT),
    ],
}
_UNLESS_GIVEN = {"time": [("localtime gmtime ctime asctime", 1), ("strftime", 2)]}  # the default time is now
_CLASSES = {  # module: (base class, the module that people import it from, instead)
    "threading": ("Thread", "threading", _HOOK),
    "concurrent.futures": ("Executor", "concurrent.futures", _HOOK),
    "multiprocessing.process": ("BaseProcess", "multiprocessing", _HOOK),
    "multiprocessing.pool": ("Pool", "multiprocessing.pool", _HOOK),
    "asyncio": ("Runner", "asyncio", _HOOK),
    "subprocess": ("Popen", "subprocess", _EFFECT),
    "socket": ("socket", "socket", _EFFECT),
    "http.client": ("HTTPConnection", "http.client", _EFFECT),
    "smtplib": ("SMTP", "smtplib", _EFFECT),
}
_DATE_METHODS = {"now": _NOW, "utcnow": _NOW, "today": "use immortal.now().date()"}
_MODULES = {*_ROWS, *_UNLESS_GIVEN, *_CLASSES, "random", "datetime", "multiprocessing"}


class Rules:
    """Table of rules, found by the function itself. Modules that nothing has imported are left out."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Rule]] = {}
        self._classes: dict[type, tuple[str, str]] = {}
        for name in _MODULES:
            if name in sys.modules:
                self._add(name)

    def module(self, name: str) -> ModuleType | None:
        """Return the loaded module of an import in a handler, or None. A module of the table is loaded if necessary."""
        if name not in sys.modules and name in _MODULES:
            importlib.import_module(name)
            for each in _MODULES & sys.modules.keys():
                self._add(each)
        return sys.modules.get(name)

    def _add(self, module_name: str) -> None:
        module = sys.modules[module_name]
        for names, why, instead in _ROWS.get(module_name, ()):
            for name in names.split():
                if (found := getattr(module, name, None)) is not None:
                    shown = name if module_name == "builtins" else f"{module_name}.{name}"
                    self._by_id[id(found)] = found, Rule(shown, why, instead)
        for names, count in _UNLESS_GIVEN.get(module_name, ()):
            for name in names.split():
                found = getattr(module, name)
                self._by_id[id(found)] = found, Rule(f"{module_name}.{name}", DIFFERS, _NOW, count)
        if module_name in _CLASSES:
            class_name, shown, instead = _CLASSES[module_name]
            self._classes[getattr(module, class_name)] = shown, instead

    def rule_of_function(self, function: object) -> Rule | None:
        """Return the rule for a function, method or built-in, however it was reached."""
        if (entry := self._by_id.get(id(function))) is not None:
            return entry[1]
        if not isinstance(function, BuiltinFunctionType | MethodType):
            return None
        receiver, name = function.__self__, function.__name__
        if isinstance(receiver, type):
            if issubclass(receiver, date) and name in _DATE_METHODS:
                instead = _NOW if receiver.__name__ == "datetime" else _DATE_METHODS[name]
                return Rule(f"{receiver.__name__}.{name}", DIFFERS, instead)
        elif isinstance(receiver, random.Random):
            return self.rule_of_random(receiver, name)
        elif type(receiver).__module__ == "multiprocessing.context":
            return Rule(f"multiprocessing.{name}", NOT_REPEATED, _HOOK)
        return None

    def rule_of_random(self, generator: random.Random, name: str) -> Rule:
        """Return the rule for a method of a generator that is no part of the state."""
        if generator is getattr(random, "_inst", None):
            return Rule(f"random.{name}", DIFFERS, _RANDOM)
        if isinstance(generator, random.SystemRandom):
            return Rule(f"secrets.{name}", DIFFERS, _RANDOM)
        return Rule(f"{name} of a random.Random that is no part of the state", DIFFERS, _RANDOM)

    def rule_of_class(self, cls: type) -> Rule | None:
        """Return the rule for the creation of an instance of the class."""
        if issubclass(cls, random.SystemRandom):
            return Rule("random.SystemRandom", DIFFERS, _RANDOM)
        if cls is random.Random:
            return Rule("random.Random", DIFFERS, _RANDOM, 1)
        for forbidden, (shown, instead) in self._classes.items():
            if issubclass(cls, forbidden):
                is_pythons = cls.__module__.partition(".")[0] == shown.partition(".")[0]
                return Rule(f"{shown}.{cls.__name__}" if is_pythons else cls.__name__, NOT_REPEATED, instead)
        return None
