"""Folders of followers on the instance's machine, for their sockets, secrets and files.

<home>/counter/followers/1/      the first; its app.sock, app_secret, control.sock and coordinator.json
<home>/counter/followers/2/      a second one beside it

A folder belongs to the process that holds the lock in it. When the follower becomes the instance, peers and operators
reach it at the instance's addresses; its app stays where it is.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from immortal.coordinator.config import InstanceSettings
from immortal.protocol.errors import ImmortalError
from immortal.protocol.files import acquire_lock, make_folder, open_lock

FOLDER_NAME = "followers"
LOCK_FILE_NAME = "lock"
PLACES_MAX = 16  # more followers of one log on one machine are of no use


class FollowerPlaceError(ImmortalError):
    """Raised if folders for followers are used up, or can't be used."""


class FollowerPlace(Struct):
    """Folder of one follower, locked until :meth:`release`, or until the process ends."""

    folder: Path
    _descriptor: int

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def claim_place(settings: InstanceSettings) -> FollowerPlace:
    """Lock a free folder for a follower of the instance. Raises FollowerPlaceError."""
    folder = settings.folder / FOLDER_NAME
    try:
        for number in range(1, PLACES_MAX + 1):
            place = folder / str(number)
            make_folder(place)
            descriptor = open_lock(place / LOCK_FILE_NAME)
            try:
                acquire_lock(descriptor, 0)
            except BlockingIOError:
                os.close(descriptor)
            else:
                return FollowerPlace(place, descriptor)
    except OSError as error:
        raise FollowerPlaceError(f"{folder} can't be used: {error.strerror}; make room for it there") from None
    raise FollowerPlaceError(f"{settings.name!r} has {PLACES_MAX} followers on this machine already: stop one of them")


def follower_settings(
    settings: InstanceSettings, folder: Path, *, app_port: int | None = None, app_send_port: int | None = None
) -> InstanceSettings:
    """Return ``settings`` with the sockets and files of a follower in ``folder``: its app connects by a Unix socket
    there, or by these ports."""
    return msgspec.structs.replace(
        settings, folder=folder, log=settings.log, app_port=app_port, app_send_port=app_send_port, app_socket=None
    )
