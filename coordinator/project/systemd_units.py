"""Unit files of systemd for a project: a service for each instance, and a target for all of them.

`immortal run --restart` restarts what dies; systemd restarts `immortal run`, and all of them after a reboot.
"""

from __future__ import annotations

import getpass
from collections.abc import Sequence

from immortal.coordinator.project.project import Project, ServiceSpec
from immortal.coordinator.service.children import PYTHON, STATUS_HANDLER_FAILED
from immortal.coordinator.service.process import STATUS_FENCED
from immortal.coordinator.service.supervisor import CLEAN_STOP_S, STOP_GRACE_S

_STOP_TIMEOUT_S = round(CLEAN_STOP_S + 2 * STOP_GRACE_S + 5)  # longer than a supervisor takes at most
_FOR_GOOD = (STATUS_FENCED, STATUS_HANDLER_FAILED)  # a start would end in the same


def units(project: Project, services: Sequence[ServiceSpec], *, for_user: bool = False) -> dict[str, str]:
    """Return the texts of the unit files by name. ``for_user``: for a user's own systemd. Raises ConfigError."""
    name = project.name()
    target = f"immortal-{name}.target"
    texts = {target: _target(name, for_user=for_user)}
    for service in services:
        texts[f"immortal-{name}-{service.name}.service"] = _service(project, service, target, for_user=for_user)
    return texts


def _target(name: str, *, for_user: bool) -> str:
    wanted_by = "default.target" if for_user else "multi-user.target"
    return f"[Unit]\nDescription=All services of {_plain(name)}\n\n[Install]\nWantedBy={wanted_by}\n"


def _service(project: Project, service: ServiceSpec, target: str, *, for_user: bool) -> str:
    argv = [
        *PYTHON,
        "-m",
        "immortal",
        "--home",
        str(project.home),
        "run",
        service.name,  # with the class that is registered: an upgrade changes it
        "--restart",
    ]
    environment = {"PYTHONUNBUFFERED": "1", **service.environment}
    lines = [
        "[Unit]",
        f"Description={_plain(service.name)} of {_plain(project.name())}, kept by Immortal",
        f"PartOf={target}",
        *(() if for_user else ("After=network-online.target", "Wants=network-online.target")),
        "",
        "[Service]",
        "Type=exec",
        *(() if for_user else (f"User={getpass.getuser()}",)),
        f"WorkingDirectory={_plain(str(project.folder))}",
        *(f"Environment={_quoted(f'{key}={text}')}" for key, text in environment.items()),
        f"ExecStart={' '.join(map(_quoted_argument, argv))}",
        "# With the code as it is now, behind a checkpoint.",
        "ExecReload=/bin/kill -USR1 $MAINPID",
        "# The supervisor alone is asked: it stops its coordinator, which takes a checkpoint and stops the app.",
        "KillMode=mixed",
        f"TimeoutStopSec={_STOP_TIMEOUT_S}",
        "Restart=on-failure",
        "RestartSec=1",
        f"RestartPreventExitStatus={' '.join(map(str, _FOR_GOOD))}",
        "",
        "[Install]",
        f"WantedBy={target}",
    ]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return text.replace("%", "%%").replace("\n", " ")


def _quoted(text: str) -> str:
    """Quote ``text`` as one word of a line of a unit file."""
    escaped = _plain(text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
    return f'"{escaped}"'


def _quoted_argument(text: str) -> str:
    """Quote ``text`` as an argument of a command, in which $ stands for variables."""
    quoted = _quoted(text).replace("$", "$$")
    return (
        quoted
        if quoted[1:-1] != text or not text.replace("/", "").replace("-", "").replace(".", "").isalnum()
        else text
    )
