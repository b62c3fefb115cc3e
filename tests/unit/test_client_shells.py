"""Shells around made-up machines: what they wait for, and what they do where a machine breaks."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from immortal.appsdk.client import connect
from immortal.appsdk.client.errors import ClientClosed, ClientError
from immortal.appsdk.client.shells import LoopShell, ThreadShell, WatchedSockets


class Machine:
    """Breaks as it is told to. Has no sockets, and nothing that is ever due."""

    def __init__(self) -> None:
        self.breaks = self.is_closed = False
        self.waiting: list[Callable[[], None]] = []

    def process(self) -> None:
        if self.breaks:
            raise RuntimeError("a fault of ours")

    def sockets(self) -> tuple[()]:
        return ()

    def next_deadline_s(self) -> float:
        return float("inf")

    def close(self) -> None:
        self.is_closed = True
        for done in self.waiting:
            done()


class Breaking:
    """A request at which the machine breaks."""

    wait_timeout_s: float | None = None

    def start(self, machine: Machine, done: Callable[[], None]) -> None:
        machine.waiting.append(done)
        machine.breaks = True

    def withdraw(self, machine: Machine) -> None:
        pass

    expire = withdraw

    def value(self, execute: Any) -> None:
        raise ClientClosed("it broke")


def test_a_call_in_a_signal_handler_or_del_that_interrupts_another_says_so_at_once() -> None:
    shell = ThreadShell(Machine, "it")

    class Interrupted(Breaking):
        def start(self, machine: Machine, done: Callable[[], None]) -> None:
            for interrupts in (lambda: shell.execute(Breaking()), lambda: shell.post(lambda machine: None)):
                with pytest.raises(ClientError, match="a signal handler or a __del__ has interrupted a call"):
                    interrupts()
            done()

        def value(self, execute: Any) -> None:
            pass

    shell.execute(Interrupted())
    shell.execute(Interrupted())
    shell.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_breaks_leaves_nobody_waiting_and_is_closed_like_any() -> None:
    shell = ThreadShell(Machine, "it")
    with pytest.raises(ClientClosed):
        shell.execute(Breaking())
    shell._thread.join()
    assert isinstance(shell.error, RuntimeError)
    shell.close()
    shell.close()
    shell.wake()  # a caller of before the end writes nowhere


def test_a_loop_that_ends_leaves_an_open_machine_to_the_next_and_another_loop_has_none() -> None:
    machines: list[Machine] = []

    def make() -> Machine:
        machines.append(Machine())
        return machines[-1]

    async def begin() -> LoopShell[Machine]:
        return LoopShell(make, "it")

    shell = asyncio.run(begin())
    with pytest.raises(ClientClosed, match="it belongs to the asyncio loop that ran where it was made"):
        asyncio.run(shell.execute(Breaking()))
    with pytest.raises(ClientClosed, match="connect in this one"):
        shell.post(lambda machine: None)
    del shell
    gc.collect()  # of sockets and their context together, which may wait for ever
    assert not machines[0].is_closed
    asyncio.run(begin())
    assert [machine.is_closed for machine in machines] == [True, False]


def test_a_loop_on_which_it_breaks_leaves_nobody_waiting() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        shell = LoopShell(Machine, "it")
        with pytest.raises(ClientClosed):
            await asyncio.wait_for(shell.execute(Breaking()), 30)
        await shell.close()

    asyncio.run(main())


def test_who_closes_it_twice_at_once_closes_it_once() -> None:
    shell = ThreadShell(Machine, "it")
    closers = [threading.Thread(target=shell.close) for _ in range(4)]
    for one in closers:
        one.start()
    for one in closers:
        one.join(30)
    assert not any(one.is_alive() for one in closers)


class Socket:
    def getsockopt(self, option: int) -> int:
        return 5


def test_a_socket_that_has_the_number_of_one_before_is_waited_for() -> None:
    said: list[str] = []
    watched = WatchedSockets(
        lambda number: said.append(f"leave {number}"), lambda number: said.append(f"watch {number}")
    )
    first: Any = Socket()
    second: Any = Socket()
    assert [watched.update([first]), watched.update([first]), watched.update([second])] == [True, False, True]
    assert said == ["watch 5", "leave 5", "watch 5"]


def test_a_connection_that_was_not_opened_says_how() -> None:
    connection: Any = connect("counter", endpoints=["tcp://127.0.0.1:9"], insecure=True)
    with pytest.raises(AttributeError, match=r"with connect\(\.\.\.\) as client: client\.add"):
        connection.add(1)
