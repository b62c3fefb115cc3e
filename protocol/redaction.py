"""Redaction: what people are not shown, by the rules of one file. Logs and replays keep the true values.

A rule is a path: ``Cart.pay.card`` (an argument), ``Cart.pay.card.number`` (a field of it), ``Cart.pay.return`` (the
result), ``Cart.items`` (an attribute of the state). ``*`` is any one name; ``*.password`` is a name at any place. What
is below a hidden value is hidden, too. Items of a list have no names: a rule goes through lists.

Where a name is unknown, each rule that could fit counts: without parameters' names a rule of one argument hides all of
that handler's. A call's class is unknown, since a handler can be inherited: a rule is for all handlers of its name.
"""

from __future__ import annotations

import copy
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from msgspec import Struct

from immortal.protocol import shared_registry
from immortal.protocol.shared_registry import HOME_DEFAULT, HOME_VARIABLE, is_url

FILE_NAME = "redact.toml"
FILE_VARIABLE = "IMMORTAL_REDACTION"
"""Variable with the file; by default it stands beside the home, where a project has its immortal.toml."""
REDACTED = "[redacted]"
RESULT = "return"  # no parameter has this name
_OWN = "immortal_"  # handlers that move keys: their arguments are rows of a state, and calls
_RULE = re.compile(r"(\w+|\*)(\.(\w+|\*))+")

Rule = tuple[str, ...]
parameters: dict[str, tuple[str, ...]] = {}
"""Names of parameters by handler, as "Cart.pay", of the classes that this process has; (): two classes differ."""


class Redacted(str):
    """Text in place of a hidden value. Two are equal if the hidden values are."""

    __slots__ = ("value",)
    value: Any

    def __new__(cls, value: Any) -> Redacted:
        made = super().__new__(cls, REDACTED)
        made.value = value
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Redacted) and bool(self.value == other.value)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return REDACTED

    __hash__ = str.__hash__


class Rules(Struct, frozen=True):
    """Rules of a file. ``anywhere``: those that began with ``*.``, without it. ``problem``: why all is hidden."""

    rules: tuple[Rule, ...] = ()
    anywhere: tuple[Rule, ...] = ()
    problem: str = ""

    def __bool__(self) -> bool:
        return bool(self.rules or self.anywhere)


_rules: Rules | None = None


def rules_file() -> Path | None:
    """Return the file that counts, which need not exist; None for a home that is a database, without the variable."""
    if given := os.environ.get(FILE_VARIABLE):
        return Path(given)
    home = str(shared_registry.chosen_home or os.environ.get(HOME_VARIABLE) or HOME_DEFAULT)
    return None if is_url(home) else Path(home).absolute().parent / FILE_NAME


def environment() -> dict[str, str]:
    """Return the variable by which a child process uses the same rules."""
    found = rules_file()
    is_there = found is not None and (os.environ.get(FILE_VARIABLE) or found.exists())
    return {FILE_VARIABLE: str(found and found.absolute())} if is_there else {}


def rules() -> Rules:
    """Return the rules, which a process reads once. A file that can't be read hides everything."""
    global _rules
    if _rules is None:
        _rules = read_rules(rules_file(), must_exist=bool(os.environ.get(FILE_VARIABLE)))
    return _rules


def set_rules(given: Rules | None) -> None:
    """Let this process use other rules from now on; None: those that the file has now."""
    global _rules
    _rules = given


def read_rules(file: Path | None, *, must_exist: bool = False) -> Rules:
    """Read a file; ``problem`` says what is wrong with it."""
    try:
        if file is None or not (must_exist or file.exists()):
            return Rules()
        import tomllib

        given = tomllib.loads(file.read_text("utf-8"))
        paths = given.pop("hide", [])
        if given:
            raise ValueError(f"{', '.join(given)} came, hide alone was expected")
        if not isinstance(paths, list):
            raise ValueError(f"hide = {paths!r} came, a list was expected")
        for path in paths:
            if not isinstance(path, str) or not _RULE.fullmatch(path):
                raise ValueError(f"{path!r} came, a rule such as 'Cart.pay.card' or '*.password' was expected")
    except (OSError, ValueError) as error:
        problem = f"{file}: {error}: all values are hidden until it is mended and what reads it restarted"
        return Rules((("*", "*"),), problem=problem)
    split = [tuple(path.split(".")) for path in paths]
    return Rules(
        tuple(one for one in split if one[0] != "*" or one[1] == "*"),
        tuple(one[1:] for one in split if one[0] == "*" and one[1] != "*"),
    )


def note_parameters(handler: str, names: Iterable[str]) -> None:
    """Note the names of the parameters of a handler, "Cart.pay" or "Cart[key].pay"."""
    name, given = handler.replace("[key]", ""), tuple(names)
    parameters[name] = given if parameters.get(name, given) == given else ()


def parameter_names(handler: str) -> tuple[str, ...]:
    """Return the names of a handler's parameters; () if they are unknown."""
    return parameters.get(handler.replace("[key]", ""), ())


def redact(
    value: Any,
    path: Sequence[str | int | None] = (),
    classes: Collection[str] | None = None,
    hidden: Callable[[Any], Any] = Redacted,
) -> Any:
    """Return ``value``, a tree of plain values at ``path`` of a class, with ``hidden(part)`` for what rules hide.

    None in ``path`` is an unknown name, a number can be an item of a list. ``classes`` None: the class is unknown.
    """
    found = rules()
    return _redacted(value, _at(found, path, classes), found, hidden) if found else value


def name_in_rules(handler: str | None) -> str | None:
    """Return the name of a handler without its class; None: any, as one of ours carries what others have."""
    name = handler and handler.rpartition(".")[2]
    return None if name and name.startswith(_OWN) else name


def is_hidden(handler: str, name: str | None) -> bool:
    """Return True if a rule hides a handler's argument (or result: RESULT), or a part of it. None: any of them."""
    return bool(_at(rules(), (name_in_rules(handler), name), None))


def is_named_anywhere(name: str) -> bool:
    """Return True if a rule hides the name at any place."""
    return any(rule[-1] in ("*", name) for rule in rules().anywhere)


def may_apply(handler: str | None) -> bool:
    """Return True if a rule may hide a part of a call of ``handler`` or of its answer. None: it is unknown."""
    found, name = rules(), name_in_rules(handler)
    return bool(found.anywhere) or any(name is None or rule[1] in ("*", name) for rule in found.rules)


def arguments(handler: str | None, values: Iterable[Any], names: Iterable[str] = ()) -> list[Any]:
    """Return a call's arguments as people are shown them. ``names``: of the parameters, if they are known."""
    if not rules():
        return list(values)
    given = list(values)
    name = name_in_rules(handler)
    known = () if name is None else names or parameter_names(str(handler))
    return [redact(value, (name, one)) for value, one in zip_longest(given, islice(known, len(given)))]


def result(handler: str | None, value: Any) -> Any:
    """Return a result of ``handler`` as people are shown it."""
    return redact(value, (name_in_rules(handler), RESULT))


def step_name(what: str) -> str:
    """Return what gave a step its result: of "call till.receipt" or "effect charge" the last word."""
    return what.partition(" of ")[0].rpartition(" ")[2]


def placeholder(encoded: bytes) -> bytes:
    """Return what stands for encoded arguments: text of the same size."""
    return REDACTED.ljust(len(encoded), ".")[: len(encoded)].encode()


def redact_call_text(text: str) -> str:
    """Return the text of an effect's call, ``unlock(bike=7) of Ride.ride(17)``, as people are shown it."""
    found = rules()
    if not found.anywhere and not any(rule[1] == "*" or rule[1] in text for rule in found.rules):
        return text
    return f"{text.partition('(')[0]}({REDACTED})"


def _at(found: Rules, path: Sequence[str | int | None], classes: Collection[str] | None) -> list[Rule]:
    """Return what is left of the rules at a path: () for one that hides the value there."""
    left = [rule[1:] for rule in found.rules if classes is None or rule[0] == "*" or rule[0] in classes]
    for name in path:
        left = [*left, *_below(left, str(name), found)] if isinstance(name, int) else _below(left, name, found)
    return left


def _below(left: list[Rule], name: str | None, found: Rules) -> list[Rule]:
    if () in left:
        return [()]
    return [rule[1:] for rule in (*left, *found.anywhere) if name is None or rule[0] in ("*", name)]


def _redacted(value: Any, left: list[Rule], found: Rules, hidden: Callable[[Any], Any]) -> Any:
    if not left and not found.anywhere:
        return value
    if () in left:
        return hidden(value)
    if isinstance(value, dict):
        made = copy.copy(value)  # of its own kind, such as a Counter
        for key, part in value.items():
            below = left if str(key).startswith("$") else _below(left, str(key), found)  # "$set" is no name
            made[key] = _redacted(part, below, found, hidden)
        return made
    if isinstance(value, list | tuple | deque) and not hasattr(value, "_fields"):
        return type(value)(_redacted(part, left, found, hidden) for part in value)
    return hidden(value) if left and value is not None else value  # a rule names a part of what has no names


def unmatched_rules(known: Iterable[tuple[Collection[str], Collection[str]]]) -> Iterator[str]:
    """Yield the rules that fit nothing. ``known``: of each class its names, and paths ("pay.card") in it."""
    classes = list(known)
    for cls, *rule in rules().rules:
        paths = chain.from_iterable(paths for names, paths in classes if cls == "*" or cls in names)
        if not any(all(one in ("*", name) for one, name in zip(rule, path.split("."))) for path in paths):  # noqa: B905
            yield ".".join([cls, *rule])
