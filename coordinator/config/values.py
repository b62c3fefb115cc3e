"""Kinds of setting values: each is a type with msgspec's checks, and can have further ones.

``Meta.extra`` of a kind or of a setting can have these keys:

    expected    description of the allowed values, if the type does not tell them
    read        a function in place of msgspec's: from the value in a file to the attribute; it raises WrongValueError
    table       a kind that is allowed instead, as a table
    unit        of a number
    none        the word in the file that stands for None
    default     description of a default that is computed, or None

and for an option:

    metavar     name of the value in the option's help
    free        ending of the text for which 'immortal register' chooses a free port
    bare        value of the option if it is given without one
    words       values of a path that are no paths
    path        "file" or "folder": it is relative to the working directory
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from immortal.coordinator.config.socket_addresses import UNIX, UNIX_PATH_SIZE_BYTES_MAX
from immortal.coordinator.core.permissions import ALL_METHODS, EVERYTHING, Permission
from immortal.coordinator.log_url import is_in_folder, split_url
from immortal.protocol.errors import ImmortalError
from immortal.protocol.extensions import GROUP_MARK, NO_ROLES, QUERIES

INSTANCE_NAME_SIZE_MAX = 64  # characters; the name is a file name, and part of each message between coordinators
CALLS_MAX = 1_000_000_000  # largest limit on calls, per second or open; more means no limit
NAME_PLACE = "{name}"  # placeholder in peer_template
IPC_PATH_SIZE_MAX = 107  # bytes; the kernel's limit for the path of a Unix socket
LOG_KEY_FILE = "file"  # as log_key: a key in the instance's own folder
NO_LOG_KEY = "none"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_CLASS = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_APP = rf"\A(\w[\w-]*(\.\w[\w-]*)*|[^:\n]*[^:\n/]\.py):{_CLASS}\Z"  # a module, or the path of a file
_PUBLIC_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9][A-Za-z0-9._%-]*):(?P<port>\d{1,5}|\*)")


class ConfigError(ImmortalError):
    """Raised if a setting has a wrong value, or is missing."""


class WrongValueError(ValueError):
    """Raised for a wrong value. Its ``str`` says what was expected; if it is empty, the kind's ``expected`` does."""


def check_instance_name(name: str) -> str:
    """Return ``name`` if an instance can have it; raise ConfigError otherwise."""
    if len(name) > INSTANCE_NAME_SIZE_MAX:
        raise ConfigError(
            f"the instance name {name[:20]!r}... has {len(name)} characters,"
            f" at most {INSTANCE_NAME_SIZE_MAX} are allowed"
        )
    if not re.fullmatch(_NAME, name) or name.endswith(".toml"):
        raise ConfigError(
            f"{name!r} is no instance name: letters, digits, '-', '_' and '.', starting with a letter or digit,"
            " not ending in '.toml'"
        )
    return name


def check_app(app: str) -> str:
    """Return ``app`` if it has the form "module:Class" or "path/of/file.py:Class"; raise ConfigError otherwise."""
    if not re.search(_APP, app):
        raise ConfigError(f'{app!r} names no app: expected "module:Class", or "path/of/file.py:Class"')
    return app


def split_tcp(endpoint: str) -> tuple[str, int] | None:
    """Return (host without brackets, port) of a tcp endpoint; port 0 stands for `*`. None for any other text."""
    match = _TCP.fullmatch(endpoint)
    if match is None or match["host"] == "*":
        return None
    port = 0 if match["port"] == "*" else int(match["port"])
    if port > 65535 or (port == 0 and match["port"] != "*"):
        return None
    return match["host"].strip("[]"), port


def permission_of(value: object) -> Permission:
    """Convert a value of the table [allow]. Raises WrongValueError, which says what was expected."""
    if isinstance(value, dict):
        if unknown := set(value) - {"methods", "rate", "concurrent"}:
            raise WrongValueError(f'"methods", "rate" and "concurrent", not "{min(unknown)}"')
        methods = permission_of(value["methods"]).methods if "methods" in value else None
        return Permission(methods, *(_number_of_calls(value.get(key), key) for key in ("rate", "concurrent")))
    if value == ALL_METHODS:
        return EVERYTHING
    if not isinstance(value, list) or not all(_is_method(name) for name in value):
        raise WrongValueError(
            'a list of names of methods, such as ["place", "total"], with "@query" for all that only read and '
            '"@worker" for all that a role of the app may call, or "*" for all of them; or a table with "methods", '
            '"rate" (calls in a second) and "concurrent" (open calls)'
        )
    return Permission(frozenset(value))


def _is_method(name: object) -> bool:
    """Return True if ``name`` is a method, a group, or a role for a subtree, such as "@writer:stocks/nyse"."""
    if not isinstance(name, str) or name == QUERIES:
        return name == QUERIES
    group, colon, subtree = name.partition(":")
    if colon and not (group.startswith(GROUP_MARK) and subtree.isprintable() and all(subtree.split("/"))):
        return False
    return group not in NO_ROLES and group.removeprefix(GROUP_MARK).isidentifier()


def _number_of_calls(value: object, key: str) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= CALLS_MAX):
        raise WrongValueError(f'a whole number from 1 to {CALLS_MAX} as "{key}"')
    return value if isinstance(value, int) else None


def _endpoint(value: object) -> str:
    if not isinstance(value, str):
        raise WrongValueError
    if value.startswith("ipc://"):
        path = value.removeprefix("ipc://")
        if len(path.encode()) > IPC_PATH_SIZE_MAX:
            raise WrongValueError(f"a path of at most {IPC_PATH_SIZE_MAX} bytes behind ipc://")
        if not path or "\0" in path:
            raise WrongValueError
        return value
    address = split_tcp(value)
    if address is None:
        raise WrongValueError
    if address[1] == 0:
        raise WrongValueError("an endpoint with its port (`*` is for 'immortal register' alone)")
    return value


def _peer_template(value: object) -> str:
    """Check that ``value`` becomes an endpoint if {name} is replaced by a name."""
    if not isinstance(value, str) or NAME_PLACE not in value:
        raise WrongValueError
    _endpoint(value.replace(NAME_PLACE, "x"))
    return value


def is_endpoint(text: str) -> bool:
    try:
        _endpoint(text)
    except WrongValueError:
        return False
    return True


def is_log_url(place: str) -> bool:
    """Return True if ``place`` is the URL of a log, whose lease has the instance's endpoint, and no endpoint itself."""
    return place.startswith("postgresql:")


def _peer_place(value: object) -> str:
    if isinstance(value, str) and is_log_url(value):
        if not value.partition("#")[2]:
            raise WrongValueError("the URL of a log with its instance, such as postgresql://USER@HOST/DATABASE#NAME")
        return value
    return _endpoint(value)


def _app_socket(value: object) -> str:
    if not isinstance(value, str) or not value.startswith(f"{UNIX}/") or "\0" in value:
        raise WrongValueError
    size_bytes = len(os.fsencode(value.removeprefix(UNIX)))
    if size_bytes > UNIX_PATH_SIZE_BYTES_MAX:
        raise WrongValueError(f"a path of at most {UNIX_PATH_SIZE_BYTES_MAX} bytes behind {UNIX}, it has {size_bytes}")
    return value


def _metrics(value: object) -> str:
    if not isinstance(value, str) or split_tcp(f"tcp://{value}") is None:
        raise WrongValueError
    return value


def _path(value: object) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise WrongValueError
    return Path(value)


def _log(value: object) -> str:
    """Check the path of a log's folder, or the URL of a log."""
    _path(value)
    return str(_path(split_url(str(value))[1])) if is_in_folder(str(value)) else str(value)


def _public_keys(value: object) -> tuple[str, ...]:
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(key, str) and _PUBLIC_KEY.fullmatch(key) for key in found):
        raise WrongValueError
    return tuple(found)


def whole(least: int, most: int, unit: str = "", **more: Any) -> Meta:
    """Describe a whole number in a range. ``more``: further keys of ``Meta.extra``."""
    return Meta(ge=least, le=most, extra={"unit": unit, **more})


def kind(metavar: str, expected: str, **more: Any) -> Meta:
    """Describe a kind of value. ``more``: further keys of ``Meta.extra``."""
    return Meta(extra={"metavar": metavar, "expected": expected, **more})


def doc(text: str, **more: Any) -> Meta:
    """Describe a setting in sentences, for 'immortal register --help' and the docs. ``more``: as of :func:`kind`.

    A field of a schema without this description is no setting.
    """
    return Meta(description=text, extra=more)


Name = Annotated[str, Meta(pattern=rf"\A(?!.*\.toml\Z){_NAME}\Z", max_length=INSTANCE_NAME_SIZE_MAX)]
Port = Annotated[int, whole(1, 65_535, free="*")]
Endpoint = Annotated[
    str,
    kind(
        "ENDPOINT", 'an endpoint such as "tcp://127.0.0.1:7001" or "ipc:///run/counter.sock"', read=_endpoint, free=":*"
    ),
]
PeerPlace = Annotated[
    str,
    kind(
        "ENDPOINT",
        'an endpoint such as "tcp://127.0.0.1:7001", or the URL of its log in PostgreSQL, '
        '"postgresql://USER@HOST/DATABASE#NAME"',
        read=_peer_place,
    ),
]
PeerTemplate = Annotated[
    str,
    kind(
        "ENDPOINT",
        f'an endpoint with {NAME_PLACE} in it, such as "tcp://{NAME_PLACE}.example:7400"',
        read=_peer_template,
    ),
]
Host = Annotated[
    str,
    Meta(pattern=r"\A[^\s/\[\]*]+\Z"),
    kind("HOST", 'an address such as "127.0.0.1", or "localhost" for both loopbacks'),
]
AppSocket = Annotated[
    str,
    kind("unix:PATH", '"unix:" and an absolute path, such as "unix:/run/counter.sock"', read=_app_socket, path="file"),
]
App = Annotated[str, Meta(pattern=_APP), kind("MODULE:CLASS", '"module:Class"')]
HostPort = Annotated[
    str, kind("HOST:PORT", 'HOST:PORT such as "127.0.0.1:9400" (HOST:* takes a free port)', read=_metrics)
]
File = Annotated[Path, kind("FILE", "a path", read=_path, path="file")]
Log = Annotated[str, kind("FOLDER|URL", "a path, or the URL of a log", read=_log, path="log")]
StoreUrl = Annotated[
    str,
    Meta(pattern=r"\A(s3|gs|az|file)://[^\s]*[^\s/][^\s]*\Z"),
    kind("URL", '"s3://BUCKET/PATH", gs://, az:// or "file:///PATH"'),
]
FileStore = Annotated[
    str,
    Meta(pattern=r"\A((s3|gs|az|file)://[^\s]*[^\s/][^\s]*|/[^\0]*)\Z"),
    kind("FOLDER|URL", 'an absolute path, "s3://BUCKET/PATH", gs://, az:// or "file:///PATH"', path="log"),
]
LogKey = Annotated[
    str,
    Meta(pattern=rf"\A({LOG_KEY_FILE}|{NO_LOG_KEY}|/[^\0]*)\Z"),
    kind(
        "[FILE]",
        f'"{LOG_KEY_FILE}", "{NO_LOG_KEY}", or the absolute path of a file',
        bare=LOG_KEY_FILE,
        path="file",
        words=(LOG_KEY_FILE, NO_LOG_KEY),
    ),
]
EncryptionKey = Annotated[
    str,
    Meta(pattern=r"\A(env:[A-Za-z_]\w*|command:\s*\S[^\0]*|/[^\0]*)\Z"),
    kind("SOURCE", 'the absolute path of a file, "env:VARIABLE", or "command:PROGRAM ARGUMENTS"'),
]
PublicKeys = Annotated[
    tuple[str, ...], kind("", "a public key, 40 characters of Z85, or a list of them", read=_public_keys)
]
Grant = Annotated[Permission, kind("", "the methods that it may call", read=permission_of)]
Callers = Annotated[
    tuple[Name, ...],
    kind(
        "",
        'a list of instance names, such as ["reader", "feeder"], or a table [allow] of names and the methods that each '
        'may call, such as reader = ["total"]',
        table=Mapping[str, Grant],
    ),
]
