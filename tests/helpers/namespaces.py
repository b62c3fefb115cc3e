"""Two network namespaces with one cable between them, which a test can pull. Needs root."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

DEADLINE_S = 60.0
ADDRESSES = ("10.231.77.1", "10.231.77.2")  # visible only inside
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_NOWHERE = "02:00:00:00:00:99"
Result = TypeVar("Result")


class Namespaces:
    """Namespaces of side 0 and side 1. A context manager; skips the test without the rights for it."""

    def __init__(self) -> None:
        self.names = [f"immortal-{os.getpid()}-{side}" for side in (0, 1)]

    def __enter__(self) -> Namespaces:
        if os.geteuid() != 0:
            pytest.skip("network namespaces need root")
        try:
            made = subprocess.run(["ip", "netns", "add", self.names[0]], capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no 'ip' command (iproute2)")
        if made.returncode:
            pytest.skip(f"no network namespace can be made here: {made.stderr.decode().strip()}")
        try:
            _ip("netns", "add", self.names[1])
            _ip("-n", self.names[0], "link", "add", "cable", "type", "veth", "peer", "cable", "netns", self.names[1])
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def inside(self, side: int, work: Callable[[], Result]) -> Result:
        """Run ``work`` in that side's network: its sockets and the processes that it starts belong there."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                descriptor = os.open(f"/run/netns/{self.names[side]}", os.O_RDONLY)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
                        raise OSError(ctypes.get_errno(), "setns")
                finally:
                    os.close(descriptor)
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        if errors:
            raise errors[0]
        return results[0]

    def pull(self, side: int = 1) -> None:
        """Set the link down."""
        _ip("-n", self.names[side], "link", "set", "cable", "down")

    def plug(self, side: int = 1) -> None:
        _ip("-n", self.names[side], "link", "set", "cable", "up")

    def swallow(self) -> None:
        """Let side 0's packets go nowhere, without an error for it."""
        _ip("-n", self.names[0], "neighbour", "replace", ADDRESSES[1], "lladdr", _NOWHERE, "dev", "cable")

    def deliver(self) -> None:
        _ip("-n", self.names[0], "neighbour", "delete", ADDRESSES[1], "dev", "cable")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
