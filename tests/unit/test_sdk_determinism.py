"""The search for what a replay would not repeat. Lines with ``#: words`` are to be found, and no others."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import immortal.appsdk.running.runner
from immortal.appsdk.determinism.check import DeterminismError, Finding, check
from immortal.appsdk.handlers.definition import definition_of
from immortal.appsdk.running.options import RunOptions
from immortal.appsdk.running.runner import ADDRESS_VARIABLE, run_to_status
from immortal.errors import EXIT_FAILED, EXIT_NOT_RUNNABLE
from tests.helpers.programs import HEAD, Program


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    return Program(tmp_path, monkeypatch)


def handler(body: str, head: str = "", attributes: str = "tags: set[str]") -> str:
    """A class with one handler."""
    return (
        f"{textwrap.dedent(head)}\nclass Counter(Immortal):\n"
        f"{textwrap.indent(textwrap.dedent(attributes), '    ')}\n    @rpc\n    def count(self, line: str) -> None:\n"
        f"{textwrap.indent(textwrap.dedent(body), '        ')}\n"
    )


@pytest.mark.parametrize(
    ("head", "expression", "name", "instead"),
    [
        ("import time", "time.time()", "time.time()", "use immortal.now()"),
        ("import time", "(clock := time).time()", "time.time()", "use immortal.now()"),
        ("import time as t", "t.time_ns()", "time.time_ns()", "use immortal.now_ns()"),
        ("from time import time", "time()", "time.time()", "use immortal.now()"),
        ("from time import monotonic as clock", "clock()", "time.monotonic()", "use immortal.now()"),
        ("import time", "time.perf_counter_ns()", "time.perf_counter_ns()", "use immortal.now_ns()"),
        ("import time", "time.localtime()", "time.localtime()", "use immortal.now()"),
        ("import time", "time.gmtime(None)", "time.gmtime()", "use immortal.now()"),
        ("import time", "time.strftime('%Y')", "time.strftime()", "use immortal.now()"),
        ("from datetime import datetime", "datetime.now()", "datetime.now()", "use immortal.now()"),
        ("import datetime as d", "d.datetime.now(d.UTC)", "datetime.now()", "use immortal.now()"),
        ("import datetime", "datetime.datetime.utcnow()", "datetime.utcnow()", "use immortal.now()"),
        ("from datetime import datetime", "datetime.today()", "datetime.today()", "use immortal.now()"),
        ("from datetime import date", "date.today()", "date.today()", "use immortal.now().date()"),
        ("import random", "random.random()", "random.random()", "use immortal.random"),
        ("from random import choice", "choice([1])", "random.choice()", "use immortal.random"),
        ("import random", "random.Random()", "random.Random()", "use immortal.random"),
        ("import random", "random.Random(None)", "random.Random()", "use immortal.random"),
        ("from random import SystemRandom", "SystemRandom()", "random.SystemRandom()", "use immortal.random"),
        (
            "import random\ndice = random.Random(6)",
            "dice.choice([1])",
            "choice of a random.Random",
            "use immortal.random",
        ),
        ("import secrets", "secrets.token_hex(8)", "secrets.token_hex()", "use immortal.random"),
        ("import secrets", "secrets.choice([1])", "secrets.choice()", "use immortal.random"),
        ("import uuid", "uuid.uuid4()", "uuid.uuid4()", "use immortal.uuid4()"),
        ("from uuid import uuid1", "str(uuid1())", "uuid.uuid1()", "use immortal.uuid4()"),
        ("import os", "os.urandom(8)", "os.urandom()", "use immortal.random"),
        ("import os", "os.getpid()", "os.getpid()", "on_primary hook"),
        ("", "id(line)", "id()", "a key of your own"),
        ("", "input()", "input()", "on_primary hook"),
        ("import threading", "threading.Thread(target=print)", "threading.Thread()", "on_primary hook"),
        ("from threading import Timer", "Timer(1, print)", "threading.Timer()", "on_primary hook"),
        ("import threading\nclass Mine(threading.Thread): pass", "Mine().start()", "Mine()", "on_primary hook"),
        ("import time", "time.sleep(1)", "time.sleep()", "await immortal.sleep(...)"),
        (
            "from urllib.request import urlopen",
            "urlopen('http://localhost')",
            "urllib.request.urlopen()",
            "immortal.effect",
        ),
        ("import subprocess", "subprocess.run(['true'])", "subprocess.run()", "await immortal.effect(<function>, ...)"),
        ("import subprocess", "subprocess.Popen(['true'])", "subprocess.Popen()", "await immortal.effect("),
        ("import socket", "socket.create_connection(('h', 1))", "socket.create_connection()", "await immortal.effect("),
        ("import socket", "socket.socket()", "socket.socket()", "await immortal.effect("),
        (
            "from http.client import HTTPSConnection as C",
            "C('h')",
            "http.client.HTTPSConnection()",
            "await immortal.effect(",
        ),
        ("import os", "os.system('true')", "os.system()", "await immortal.effect("),
        ("import _thread", "_thread.start_new_thread(print, ())", "_thread.start_new_thread()", "on_primary hook"),
        (
            "from concurrent.futures import ThreadPoolExecutor",
            "ThreadPoolExecutor()",
            "concurrent.futures.ThreadPoolExecutor()",
            "on_primary hook",
        ),
        ("import multiprocessing", "multiprocessing.Process()", "multiprocessing.Process()", "on_primary hook"),
        ("import multiprocessing", "multiprocessing.Pool(2)", "multiprocessing.Pool()", "on_primary hook"),
        ("import asyncio\nasync def main() -> None: ...", "asyncio.run(main())", "asyncio.run()", "on_primary hook"),
        ("import asyncio", "asyncio.to_thread(len, 'x')", "asyncio.to_thread()", "await immortal.effect(<function>"),
    ],
)
def test_calls_that_differ(program: Program, head: str, expression: str, name: str, instead: str) -> None:
    (finding,) = program.check(handler(expression, head))
    assert finding.where == "Counter.count"
    assert finding.what.startswith(f"calls {name}")
    assert instead in finding.instead
    source = Path(finding.file).read_text().splitlines()
    assert expression in source[finding.line - 1]


def test_what_runs_as_an_effect_may_do_what_it_likes(program: Program) -> None:
    program.compare(
        """
        import time
        import urllib.request

        def moment() -> float:
            return time.time()

        def fetch(url: str) -> bytes:
            found: bytes = urllib.request.urlopen(url).read()  #: fetch calls urllib.request.urlopen(), which no
            return found

        def stamped(stamp: float) -> float:
            return stamp

        class Counter(Immortal):
            @rpc
            async def count(self) -> None:
                await immortal.effect(moment)
                await immortal.effect.options(key="x")(moment)
                careful = immortal.effect.options(key="x")
                await careful(moment)
                await immortal.effect(stamped, time.time())  #: Counter.count calls time.time()
                fetch("http://localhost")
                time.sleep(1)  #: Counter.count calls time.sleep(), which holds up the whole instance
        """
    )


def test_the_message(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = handler("time.time()", "import time")
    program.module(source, "wordcount_program")
    monkeypatch.chdir(tmp_path)
    (finding,) = check(definition_of(sys.modules["wordcount_program"].Counter))
    line = (HEAD + source).splitlines().index("        time.time()") + 1
    assert str(finding) == (
        f"wordcount_program.py, line {line}: Counter.count calls time.time(), which differs at each replay: "
        f"use immortal.now()"
    )
    error = DeterminismError([finding, finding])
    assert error.exit_status == 2
    assert re.match(r"2 places would not run, or not be replayed, .*\n  wordcount_program.py, line", str(error))


@pytest.mark.parametrize(
    "body",
    [
        "immortal.now(), immortal.now_ns(), immortal.random.choice([1]), immortal.uuid4()",
        "time.localtime(5), time.gmtime(0), time.strftime('%Y', time.gmtime(0))",
        "datetime(2024, 1, 1), datetime.fromtimestamp(0), datetime.fromisoformat(line), date(2024, 1, 1)",
        "random.Random(5).random(), random.Random(x=line)",
        "uuid.UUID(int=5), uuid.uuid5(uuid.NAMESPACE_DNS, line)",
        "isinstance(line, threading.Thread), threading.Lock()",
        "id = 5; print(id); time = line; time.time()",
        "[id for id in line]; (lambda input: input(line))",
        "secrets.compare_digest(line, line)",
        "os.path.join(line, line), os.environ.get(line)",
        "x: time.time = 5",
        "self.local.time()",
    ],
)
def test_calls_that_do_not_differ(program: Program, body: str) -> None:
    head = "import os, random, secrets, threading, time, uuid\nfrom datetime import date, datetime"
    assert program.check(handler(body, head, "local: Any")) == []


def test_what_handlers_reach(program: Program) -> None:
    program.module(
        """
        import time

        def stamp() -> float:
            return time.time()

        def unreached() -> float:
            return time.time()

        class Stamped:
            def __init__(self) -> None:
                self.at = time.time()
        """,
        "helpers_program",
    )
    program.compare(
        """
        import functools, time, uuid
        from dataclasses import dataclass, field
        import msgspec
        import helpers_program
        from helpers_program import Stamped, stamp as renamed

        def in_module(n: int) -> None:
            if n:
                in_module(n - 1)
            time.time()  #: in_module calls time.time()

        def as_value(x: str) -> float:
            return time.time()  #: as_value calls

        def by_name_only(counter: Counter) -> None:
            counter.reached_by_type()

        def unreached() -> None:
            time.time()

        def logged(function: Any) -> Any:
            @functools.wraps(function)
            def wrapper(*args: Any) -> Any:
                time.monotonic()  #: logged.wrapper calls time.monotonic()
                return function(*args)
            return wrapper

        @functools.lru_cache
        def cached() -> float:
            return time.time()  #: cached calls

        @dataclass
        class Item:
            name: str
            id: uuid.UUID = field(default_factory=uuid.uuid4)

            def touch(self) -> None:
                time.time()  #: Item.touch calls

        class Row(msgspec.Struct):
            at: float = msgspec.field(default_factory=lambda: time.time())  #: <lambda> calls

            def __post_init__(self) -> None:
                time.time_ns()  #: Row.__post_init__

        class Base(Immortal):
            items: list[Item]
            by_name: dict[str, Item]

            def __init__(self) -> None:
                self.items = [Item("a", time.time())]  # of the first start only: it is in the checkpoint

            @rpc
            def count(self, line: str) -> None:
                time.time()  #: Base.count calls

            def helper(self) -> None:
                time.time()  #: Base.helper calls

            def overridden(self) -> None:
                time.time()

            def of_super(self) -> None:
                time.time()  #: Base.of_super

        class Other(Immortal):
            @rpc
            def elsewhere(self) -> None:
                time.time()

        class Counter(Base):
            other = peer(Other, "other")

            @rpc
            def count(self, line: str) -> None:
                super().count(line)
                self.helper()
                self.overridden()
                self.of_super()
                self.count.fork(line)
                self.other.elsewhere.fork()

            def overridden(self) -> None:
                time.time_ns()  #: Counter.overridden calls time.time_ns()

            def of_super(self) -> None:
                super().of_super()

            def reached_by_type(self) -> None:
                time.time()  #: Counter.reached_by_type

            @staticmethod
            def static() -> float:
                return time.time()  #: Counter.static

            @classmethod
            def of_class(cls) -> float:
                return cls.made()

            @classmethod
            def made(cls) -> float:
                return time.time()  #: Counter.made

            @property
            def age(self) -> float:
                return time.time()  #: Counter.age

            @impulse
            def line(self, text: str) -> None:
                in_module(3)
                sorted(text, key=as_value)
                by_name_only(self)
                self.static() + self.of_class() + self.age
                renamed()
                helpers_program.stamp()
                cached()

            @logged
            def helped(self) -> None:
                time.perf_counter()  #: Counter.helped calls time.perf_counter()

            @initial
            def begin(self) -> None:
                time.time()  #: Counter.begin
                self.helped()
                made = Item("a")  #: makes a Item without 'id', whose default is uuid.uuid4()
                Item("a", id=immortal.uuid4())
                Row()
                for item in self.items:
                    item.touch()
                Stamped()
                import secrets as s
                from time import time as later
                s.token_hex()  #: secrets.token_hex()
                later()  #: time.time()
                rows = list(map(time.time, []))  #: uses time.time, which
                def inner() -> None:
                    time.process_time()  #: Counter.begin calls time.process_time()
                inner()

            def unreached(self) -> None:
                time.time()

            @on_primary
            def feed(self, impulses: Impulses) -> None:
                time.time()
        """
    )


def test_findings_in_other_modules_are_theirs(program: Program) -> None:
    helpers = program.module("import time\ndef stamp() -> float:\n    return time.time()\n", "helpers_of_program")
    (finding,) = program.check(handler("stamp()", "from helpers_of_program import stamp"))
    assert finding.file == helpers.__file__
    assert (finding.where, finding.line) == ("stamp", 8)


def test_sets_of_the_state(program: Program) -> None:
    program.compare(
        """
        from collections import deque
        from collections.abc import Iterator
        from dataclasses import dataclass
        from itertools import chain

        @dataclass
        class Group:
            members: set[str]

            def names(self) -> str:
                return ", ".join(self.members)  #: goes through self.members, a set

        def names_of(counter: Counter) -> list[str]:
            return list(counter.tags)  #: use sorted(counter.tags)

        class Counter(Immortal):
            tags: set[str]
            frozen: frozenset[str]
            maybe: set[int] | None
            cache: Transient[set[str]]
            by_key: dict[str, set[str]]
            groups: list[Group]
            words: dict[str, int]
            names: list[str]

            @rpc
            def found(self, given: set[str]) -> None:
                for tag in self.tags:  #: Counter.found goes through self.tags, a set, whose order
                    print(tag)
                for tag in self.frozen: pass  #: self.frozen
                for number in self.maybe or (): pass
                if self.maybe:
                    for number in self.maybe: pass  #: self.maybe
                for tag in self.cache: pass  #: self.cache
                for tag in self.by_key["a"]: pass  #: use sorted(self.by_key['a'])
                for tag in self.by_key.get("a"): pass  #: self.by_key.get('a')
                for tags in self.by_key.values():
                    list(tags)  #: use sorted(tags)
                self.groups[0].names()
                names_of(self)
                alias = self.tags
                for tag in alias: pass  #: goes through alias
                for tag in self.tags - given: pass  #: self.tags - given
                for tag in self.tags.union(given): pass  #: self.tags.union(given)
                for tag in set(self.tags): pass  #: set(self.tags)
                list(self.tags)  #: sorted(self.tags)
                tuple(self.tags), deque(self.tags)  #: goes through self.tags
                "".join(self.tags)  #: goes through
                "".join(tag.upper() for tag in self.tags)  #: goes through
                self.names.extend(self.tags)  #: goes through
                dict.fromkeys(self.tags)  #: goes through
                [tag for tag in self.tags]  #: goes through
                {int(tag) for tag in list(self.tags)}, {len(list(self.tags)) for _ in "a"}  #: goes through
                {tag: 1 for tag in self.tags}  #: goes through
                [*self.tags]  #: goes through
                print(*self.tags)  #: goes through
                first, *rest = self.tags  #: goes through
                list(enumerate(self.tags)), zip(self.tags, self.names)  #: goes through
                list(chain(self.tags, "a"))  #: goes through
                self.tags.pop()  #: takes any one element of self.tags, a set
                self.take.fork(self.tags)  #: sends self.tags, a set

            def several(self) -> Iterator[str]:
                yield from self.tags  #: goes through
                yield from [first for first in self.tags]  #: goes through

            @rpc
            def all(self) -> list[str]:
                return [*self.several()]

            @rpc
            def take(self, tags: set[str]) -> None:
                for tag in tags: pass  # it comes the same at each replay
                for tag in sorted(self.tags): pass
                for tag in sorted(tag.upper() for tag in self.tags): pass
                for tag in sorted([tag.upper() for tag in self.tags]): pass
                for tag in sorted(list(self.tags)): pass
                for tag in sorted(map(str.upper, self.tags)): pass
                sum(len(tag) for tag in self.tags), any(tag == "a" for tag in self.tags)
                min(self.tags), max(self.tags), max(*self.tags), len(self.tags), all(self.tags), bool(self.tags)
                "a" in self.tags, self.tags == tags
                {tag.upper() for tag in self.tags}, set(self.tags), frozenset(self.tags), {*self.tags}
                self.tags.add("a"), self.tags.discard("a"), self.tags.update(self.frozen), self.tags | tags
                for name in self.names: pass
                for word in self.words: pass
                list(self.names), self.names.pop(), self.words.pop("a")
                self.take.fork(sorted(self.tags))
                own = Group(set(tags))
                for member in own.members: pass
        """
    )


def test_a_line_can_be_left_out(program: Program) -> None:
    program.compare(
        """
        import time
        def for_the_log() -> float:
            return time.time()

        class Counter(Immortal):
            tags: set[str]

            @rpc
            def count(self, line: str) -> None:
                time.time()  # immortal: deterministic
                time.time()  #immortal:deterministic, it is only printed
                print(
                    time.time(),  # immortal: deterministic
                    time.time(),  #: time.time()
                )
                for_the_log()  # immortal: deterministic
                for tag in self.tags:  # immortal: deterministic
                    time.time()  #: time.time()
                time.time()  #: time.time()
        """
    )


def test_versions_of_a_state(program: Program) -> None:
    program.compare(
        """
        import time
        from immortal.appsdk.dispatch.lifecycle import upgrades

        class Old(Immortal):
            @rpc
            def count(self, line: str) -> None:
                time.time()  #: Old.count

        @upgrades(Old)
        class Counter(Immortal):
            def __init__(self) -> None:
                time.time()  #: Counter.__init__

            @classmethod
            def upgrade(cls, old: Old) -> Counter:
                time.time()  #: Counter.upgrade
                return cls()
        """
    )


def test_objects_with_an_own_idea_of_equality(program: Program) -> None:
    """What is known of a program is compared by identity."""
    program.compare(
        """
        import time
        from typing import Annotated

        class Odd:
            def __eq__(self, other: object) -> bool:
                raise ValueError("ambiguous")

            def __call__(self) -> Any:
                return time.time()  #: Odd.__call__

            def method(self) -> float:
                return time.time()  #: Odd.method

        odd = Odd()

        class Counter(Immortal, serializer="pickle"):
            odd: Annotated[Odd, []]

            @rpc
            def count(self, line: str) -> None:
                odd(), odd.method(), self.odd.method(), list(odd), odd in (odd,)
        """
    )


def test_what_is_not_the_users(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries are not looked into; an app that is itself installed is."""
    folder = tmp_path / "site-packages"
    (folder / "installed_app").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder))
    (folder / "library_of_test.py").write_text("import time\ndef stamp(): return time.time()\n")
    (folder / "installed_app" / "__init__.py").write_text("")
    (folder / "installed_app" / "helpers.py").write_text("import time\ndef stamp(): return time.time()\n")
    source = handler(
        "stamp(), own()", "from library_of_test import stamp\nfrom installed_app.helpers import stamp as own"
    )
    (folder / "installed_app" / "app.py").write_text(HEAD + source)
    (finding,) = check(definition_of(importlib.import_module("installed_app.app").Counter))
    assert finding.where == "stamp"
    assert Path(finding.file).name == "helpers.py"
    (finding,) = program.check(
        handler("stamp(); import shutil; shutil.copyfile; input()", "from library_of_test import stamp")
    )
    assert "input" in finding.what


def test_code_that_can_not_be_read(program: Program) -> None:
    """No source, names that are nothing, annotations that are nothing: no finding, no error."""
    made: dict[str, Any] = {"__name__": "made_of_text"}
    exec(compile(HEAD + handler("time.time()", "import time"), "<text>", "exec"), made)
    assert check(definition_of(made["Counter"])) == []
    body = """
    nowhere.at_all(), (yield_ := nothing), self.nothing.at_all(), super().nothing()
    x = x
    for y in y: z = y
    del z
    match line:
        case {"a": time, **rest}: pass
        case [first, *others] as whole: pass
    try: pass
    except ValueError as time: pass
    import surely_not_there.at_all as gone, os.path
    from . import nothing
    gone.x(), os.path.join()
    lambda *a, **k: (a, k)
    """
    assert program.check(handler(body, "def helper(x: Nowhere) -> Nowhere: ...", "tags: Any")) == []


def test_a_failure_of_the_search_keeps_no_app_from_running(
    program: Program, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(definition: object) -> list[Finding]:
        raise RecursionError("too deep")

    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setattr(immortal.appsdk.running.runner, "check", failing)
    app = program.module(handler("pass")).Counter
    failed = "the search for what a replay would not repeat failed: RecursionError('too deep')"
    assert run_to_status(app, None, options=RunOptions()) == EXIT_FAILED  # no address: it came as far as that
    assert f"app Counter: warning: {failed}\n" in capsys.readouterr().err
    assert run_to_status(app, None, options=RunOptions(strict=True)) == EXIT_NOT_RUNNABLE
    assert f"\n  {failed} (--strict: " in capsys.readouterr().err


ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "how-to" / "sdk.md").read_text()


def apps_of(module: Any) -> list[type]:
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    return [cls for cls in classes if cls.__module__ == module.__name__ and "_immortal_definition" in vars(cls)]


def test_the_example_and_the_guide_have_no_findings(program: Program) -> None:
    programs = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", GUIDE, re.DOTALL))
    programs["wordcount_example"] = (ROOT / "examples" / "wordcount" / "wordcount.py").read_text()
    seen = 0
    for name, source in programs.items():
        for app in apps_of(program.module_of(source, name)):
            assert check(definition_of(app)) == []
            seen += 1
    assert seen >= 8


def test_the_warnings_in_the_guide(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = re.search(r"```python\n(# rates\.py.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)
    assert found
    findings = check(definition_of(program.module_of(found[1], "rates").Rates))
    assert [f"app Rates: warning: {finding}" for finding in findings] == found[2].splitlines()


def test_it_is_quick(program: Program) -> None:
    methods = "".join(
        f"    @rpc\n    def count_{number}(self, line: str) -> None:\n"
        f"        for word in line.split():\n            self.words[word] = self.words.get(word, 0) + len(line)\n"
        f"        helper_{number}(line, self.words)\n\n"
        for number in range(50)
    )
    helpers = "".join(
        f"def helper_{number}(line: str, words: dict[str, int]) -> int:\n"
        f"    return sum(count for word, count in words.items() if word in line.split())\n\n"
        for number in range(50)
    )
    module = program.module(f"{helpers}\nclass Counter(Immortal):\n    words: dict[str, int]\n\n{methods}")
    best_s = 1e9
    for _ in range(3):
        start_s = time.process_time()
        assert check(definition_of(module.Counter)) == []
        best_s = min(best_s, time.process_time() - start_s)
    assert best_s < 0.25  # some 20 ms


@pytest.mark.parametrize("name", ["queue:Queue", "harmony:Cluster", "harmony:Collector", "clone:Table"])
def test_apps_of_the_sdk_have_no_finding(name: str) -> None:
    """Only the package of the pattern is read, not all of the SDK."""
    package, _, cls = name.partition(":")
    app = getattr(importlib.import_module(f"immortal.patterns.{package}"), cls)
    assert check(definition_of(app)) == []
