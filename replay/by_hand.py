"""Where an app that is started by hand comes in for a replay: at one port or two, as in service.

The ports are free ones, so that a replay is never in the way of the instance that runs.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import ExitStack

from msgspec import structs

from immortal.coordinator.app.connection import AppConnection
from immortal.coordinator.app.listener import AppListener
from immortal.coordinator.config import AppSendMode, InstanceSettings
from immortal.coordinator.config.app_hosts import host_port
from immortal.coordinator.instances.registry import free_port
from immortal.coordinator.notices import warnings_on_stderr
from immortal.replay.errors import ReplayError

HOST = "127.0.0.1"
LOOK_DELAY_S = 0.1


def accept_two_ports(
    settings: InstanceSettings, announce: Callable[[str], None], stop: Callable[[], bool], stack: ExitStack
) -> AppConnection:
    """The connection of an app that uses two ports in the mode of ``settings``; ``announce`` is told where.

    Raises ReplayError when it is to stop before, AppListenError, RegistryError.
    """
    port = free_port((HOST,), set())
    send_port = free_port((HOST,), {port})
    own = structs.replace(settings, app_host=HOST, app_port=port, app_send_port=send_port, app_socket=None)
    does = "it listens" if own.app_send_mode is AppSendMode.LISTEN else "it connects too"
    epoll = stack.enter_context(select.epoll())
    listener = AppListener(own, warnings_on_stderr("replay"), epoll)
    stack.callback(listener.close)
    listener.listen()
    announce(f"{host_port(HOST, port)}, with its send port {send_port}, where {does}")
    while not stop():
        connection = listener.process(dict(epoll.poll(LOOK_DELAY_S)), taken=False)
        if connection is not None:
            return connection
    raise ReplayError("stopped before an app had connected")
