"""Declared exceptions arrive with all that they had, also what their classes keep in other places than ``__dict__``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from immortal import Immortal, peer, query, rpc
from immortal.appsdk.state.journal import decode_raised, encode_raised
from immortal.appsdk.types.exceptions import _fields
from immortal.errors import DefinitionError
from immortal.testing import Environment


class Slots(Exception):  # noqa: N818
    __slots__ = ("__hidden", "code", "unset")

    def __init__(self, code: int) -> None:
        super().__init__("with a code")
        self.code = code
        self.__hidden = code + 1

    def hidden(self) -> int:
        return self.__hidden


class Below(Slots):
    __slots__ = ("more",)

    def __init__(self) -> None:
        super().__init__(7)
        self.more = None
        self.other = [1, 2]


class SignatureError(OSError):
    def __init__(self, *, path: str) -> None:
        super().__init__(5, "no input", path)
        self.path = path


class New(Exception):  # noqa: N818
    def __new__(cls, number: int) -> New:
        made = super().__new__(cls, number)
        made.number = number  # type: ignore[attr-defined]
        return made

    def __init__(self, number: int) -> None:
        super().__init__(number)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0],)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818
    item: str
    left: int


@dataclasses.dataclass(slots=True)
class SlottedData(Exception):  # noqa: N818
    item: str
    left: int


def raised(of: Any, *arguments: Any, **keywords: Any) -> Exception:
    try:
        of(*arguments, **keywords)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def with_note() -> Exception:
    error = ValueError("noted")
    error.add_note("at the till")
    return error


def caused() -> Exception:
    error = LookupError("no file")
    error.__cause__ = raised(open, "/nowhere/at/all")
    return error


def blocking() -> Exception:
    error = BlockingIOError(11, "later")
    error.characters_written = 3
    return error


EXCEPTIONS = [
    raised(open, "/nowhere/at/all"),
    raised(Path("/nowhere").rename, "/nowhere/else"),
    OSError(28, "full"),
    OSError("only a text"),
    blocking(),
    ConnectionRefusedError(111, "refused", "there"),
    raised(b"\xff".decode, "utf-8"),
    raised("ä".encode, "ascii"),
    UnicodeTranslateError("ab", 0, 1, "why"),
    raised(compile, "a = = 1", "book.py", "exec"),
    IndentationError("deep", ("book.py", 3, 4, "  x", 3, 5)),
    StopIteration(5),
    raised({}.__getitem__, "key"),
    raised(__import__, "nowhere_at_all"),
    ImportError("half", name="half", path="/half.py"),
    AttributeError("no price", name="price", obj="a text"),
    NameError("no x", name="x"),
    Slots(3),
    Below(),
    SignatureError(path="/a"),
    New(5),
    Frozen("hat", 2),
    SlottedData("hat", 2),
    with_note(),
    caused(),
]


def all_of(error: BaseException | None) -> Any:
    if error is None:
        return None
    fields = {name: getattr(error, name, "unset") for name in _fields(type(error))}
    return type(error), error.args, str(error), fields, vars(error), all_of(error.__cause__)


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_an_exception_arrives_as_it_was(error: Exception) -> None:
    name = type(error).__name__
    arrived = decode_raised({name: type(error)}, "it", encode_raised(name, error))
    assert all_of(arrived) == all_of(error)


def test_whose_attribute_is_missing_is_not_sent_where_it_is_no_plain_value() -> None:
    """Python has it for its own hints."""
    arrived = decode_raised(
        {"AttributeError": AttributeError}, "it", encode_raised("AttributeError", raised(getattr, Path(), "price"))
    )
    assert isinstance(arrived, AttributeError)
    assert (arrived.name, arrived.obj) == ("price", None)


def test_a_cause_that_is_none_of_pythons_own_does_not_come_along() -> None:
    error = ValueError("x")
    error.__cause__ = Slots(1)
    arrived = decode_raised({"ValueError": ValueError}, "it", encode_raised("ValueError", error))
    assert arrived.__cause__ is None


def test_a_chain_of_causes_has_an_end() -> None:
    error = last = ValueError(0)
    for number in range(1, 100):
        last.__cause__ = ValueError(number)
        last = last.__cause__
    last.__cause__ = error  # in a circle
    arrived: BaseException | None = decode_raised({"ValueError": ValueError}, "it", encode_raised("ValueError", error))
    count = 0
    while arrived is not None:
        count, arrived = count + 1, arrived.__cause__
    assert count == 9


def test_what_of_it_cannot_be_sent_is_said() -> None:
    error = ValueError("x")
    error.lock = object()  # type: ignore[attr-defined]
    for one, says in ((error, "its 'lock', a object"), (ValueError(object()), "its 'args', a tuple")):
        with pytest.raises(TypeError, match=f"ValueError can't be sent to who waits: {says}"):
            encode_raised("ValueError", one)


def test_a_group_of_exceptions_is_refused_where_it_is_declared() -> None:
    with pytest.raises(DefinitionError, match="a group of exceptions can't be sent"):

        class Grouped(Immortal):
            @rpc(raises=[ExceptionGroup])
            def group(self) -> None: ...


class Files(Immortal):
    def __init__(self) -> None:
        pass

    @rpc(raises=[OSError])
    def read(self, path: str) -> None:
        raise FileNotFoundError(2, "not there", path)

    @query(raises=[Slots])
    def look(self) -> None:
        raise Slots(4)

    @rpc(raises=[StopIteration])
    def end(self) -> None:
        raise StopIteration(9)


class Reader(Immortal):
    def __init__(self) -> None:
        pass

    files = peer(Files, "files")

    @rpc
    async def read(self, path: str) -> list[Any]:
        try:
            await self.files.read(path)
        except OSError as error:
            return [error.errno, error.strerror, error.filename]
        return []

    @rpc
    async def end(self) -> str:
        try:
            await self.files.end()
        except RuntimeError as error:
            return str(error)
        return ""


def test_callers_get_the_fields() -> None:
    with Environment() as environment:
        files = environment.start(Files, "files")
        reader = environment.start(Reader, "reader")
        assert reader.call(Reader.read, "/a") == [2, "not there", "/a"]
        with pytest.raises(OSError, match="not there") as no:
            files.call(Files.read, "/b")
        assert (no.value.errno, no.value.filename) == (2, "/b")
        with pytest.raises(Slots) as slots:
            files.call(Files.look)
        assert (slots.value.code, slots.value.hidden()) == (4, 5)
        assert reader.call(Reader.end) == "generator raised StopIteration", "as Python has it, with the cause"
        reader.crash()
        reader.recover()
        assert reader.call(Reader.read, "/c") == [2, "not there", "/c"]
