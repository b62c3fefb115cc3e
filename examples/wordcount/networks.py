"""Two network namespaces with a cable between them, which act as two machines on a network. Needs root."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence

ADDRESSES = ("10.231.78.1", "10.231.78.2")  # visible only inside
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_CABLE = "cable"


class NetworksError(Exception):
    """Raised when the two networks can't be created here; the text says why."""


class Networks:
    """Two networks, created on entry, and removed on exit with all that is in them."""

    def __init__(self) -> None:
        self._names = [f"immortal-demo-{os.getpid()}-{side}" for side in range(len(ADDRESSES))]

    def __enter__(self) -> Networks:
        """Create the networks. Raises NetworksError."""
        try:
            for name in self._names:
                _ip("netns", "add", name)
            near, far = self._names
            _ip("-n", near, "link", "add", _CABLE, "type", "veth", "peer", _CABLE, "netns", far)
            for name, address in zip(self._names, ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", _CABLE)
                for device in (_CABLE, "lo"):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def inside(self, side: int, command: Sequence[str]) -> list[str]:
        """Return ``command`` as it runs in the network of that side."""
        return ["ip", "netns", "exec", self._names[side], *command]

    def enter(self, side: int) -> None:
        """Move the calling thread, and those that it starts, into the network of that side, for good."""
        descriptor = os.open(f"/run/netns/{self._names[side]}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(descriptor)


def _ip(*arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NetworksError("there is no 'ip' command: install iproute2") from None
    if done.returncode:
        raise NetworksError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
