"""Schema of all settings of an instance, and a view of the schema as a list of settings.

Each setting is checked when a file is read, and can be written to a file. It has a row in the table of
docs/reference/settings.md. A setting with a single value is an option of 'immortal register'. To add one, add a field.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from msgspec import NODEFAULT, Meta, Struct, convert, field, structs, to_builtins

from immortal.coordinator.config.socket_addresses import LOCALHOST, SOCKET_FILE_NAME, UNIX, host_port, socket_path
from immortal.coordinator.config.values import (
    App,
    AppSocket,
    Callers,
    EncryptionKey,
    Endpoint,
    File,
    FileStore,
    Host,
    HostPort,
    Log,
    LogKey,
    PeerPlace,
    PeerTemplate,
    Port,
    PublicKeys,
    StoreUrl,
    WrongValueError,
    doc,
    whole,
)
from immortal.coordinator.core.limits import ReplayCheck
from immortal.coordinator.core.permissions import Permission
from immortal.protocol.limits import (
    ARGUMENTS_SIZE_MIB_DEFAULT,
    ARGUMENTS_SIZE_MIB_MAX,
    NESTING_MAX,
    NESTING_MAX_DEFAULT,
)


class Setting(Struct, frozen=True, kw_only=True):
    """Setting, as the schema defines it. ``type``: its type without None. ``about``: properties with the keys that
    :mod:`coordinator.config.values` lists. ``least``, ``most``: the range of a number.

    ``default`` is NODEFAULT if the setting is required, or its default is computed.
    """

    name: str
    type: Any
    text: str
    about: Mapping[str, Any]
    checks: tuple[Meta, ...]  # of msgspec
    least: int | None
    most: int | None
    default: Any

    @property
    def is_required(self) -> bool:
        return self.default is NODEFAULT and "default" not in self.about

    @property
    def schema(self) -> type[Struct] | None:
        """Schema of a table with settings of its own; None for any other setting."""
        is_one = isinstance(self.type, type) and issubclass(self.type, Struct) and "read" not in self.about
        return self.type if is_one else None

    @property
    def is_table(self) -> bool:
        """True for a table, of settings or of names."""
        return get_origin(self.type) is Mapping or self.schema is not None

    @property
    def is_single(self) -> bool:
        """True for a single value, which an option can give."""
        return not self.is_table and "table" not in self.about

    @property
    def default_text(self) -> str:
        """Default in the form of a settings file, or a text about what applies without the setting."""
        text = self.about.get("default")
        if text is None:
            value = self.in_file(self.default)
            text = str(value).lower() if value is None or self.type is bool else str(value)
        return text

    @property
    def each_value(self) -> Setting:
        """Setting that describes each value of a table of names."""
        return setting_of(get_args(self.type)[1])

    @property
    def expected(self) -> str:
        """Description of the values that are allowed."""
        text = self.about.get("expected")
        if text is None and self.type is int:
            text = f"a whole number from {self.least} to {self.most}"
        elif text is None and self.type is bool:
            text = "true or false"
        elif text is None:
            *others, last = (f'"{choice}"' for choice in self.type)
            text = f"{', '.join(others)} or {last}"
        return f'{text}, or "{self.about["none"]}"' if "none" in self.about else text

    def value_of(self, value: object) -> Any:
        """Convert ``value`` from the form of a settings file to the attribute. Raises WrongValueError."""
        if "none" in self.about and value == self.about["none"]:
            return None
        read = self.about.get("read")
        try:
            return read(value) if read else convert(value, Annotated[(self.type, *self.checks)])
        except ValueError as error:  # msgspec's ValidationError is a ValueError
            own = str(error) if isinstance(error, WrongValueError) else ""
            raise WrongValueError(own or self.expected) from None

    def in_file(self, value: object) -> Any:
        """Convert ``value`` to the form of a settings file; None if the file omits it."""
        return self.about.get("none") if value is None else _plain(to_builtins(value, enc_hook=str))


def _plain(value: object) -> object:
    """Replace tuples by lists, which TOML has."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def setting_of(type_: Any, name: str = "", default: Any = NODEFAULT) -> Setting:
    """Return the setting of a field with ``type_``: a type, annotated or not, optional or not."""
    metas: list[Meta] = []
    while get_origin(type_) is Annotated or NoneType in get_args(type_):
        if get_origin(type_) is Annotated:
            metas += type_.__metadata__
            type_ = type_.__origin__
        else:
            (type_,) = (choice for choice in get_args(type_) if choice is not NoneType)
    return Setting(
        name=name,
        type=type_,
        text=next((meta.description for meta in metas if meta.description), ""),
        about={key: value for meta in reversed(metas) for key, value in (meta.extra or {}).items()},
        checks=tuple(metas),
        least=next((int(meta.ge) for meta in metas if meta.ge is not None), None),
        most=next((int(meta.le) for meta in metas if meta.le is not None), None),
        default=default,
    )


@functools.cache
def settings_of(schema: type[Struct]) -> Mapping[str, Setting]:
    """Return the settings of ``schema`` by name, in the order of its fields."""
    found = {}
    for struct_field in structs.fields(schema):
        default = struct_field.default if struct_field.default_factory is NODEFAULT else struct_field.default_factory()
        setting = setting_of(struct_field.type, struct_field.name, default)
        if setting.text:
            found[struct_field.name] = setting
    return found


class AppSendMode(enum.StrEnum):
    """Mode of the second port of a two-port app, on which records are sent to it."""

    CONNECT = "connect"
    LISTEN = "listen"


class AppAuth(enum.StrEnum):
    """Method by which the coordinator authenticates its app."""

    CHALLENGE = "challenge"  # both prove that they know the coordinator's secret, which is not sent
    SECRET = "secret"  # noqa: S105 (a name) or the app sends the secret in its Hello, if it can't answer a challenge
    NONE = "none"  # no proof: for clients that know only the base protocol


class Checkpoints(enum.StrEnum):
    """Choice of the app that takes an instance's checkpoints: the primary's, or a standby's."""

    ON_PRIMARY = "on-primary"
    ON_STANDBY = "on-standby"


class Tuning(Struct, frozen=True):
    """Settings of the table [tuning]: limits that few will ever change."""

    group_size_kib_max: Annotated[
        int, whole(1, 1 << 20, "KiB"), doc("Largest group of input that one commit writes.")
    ] = 1024
    commit_inline_kib_max: Annotated[
        int, whole(0, 1 << 20, "KiB"), doc("Larger groups are committed on a separate thread.")
    ] = 32
    peer_buffer_mib_max: Annotated[
        int,
        whole(1, 1 << 20, "MiB"),
        doc("Messages kept in memory that one peer has not acknowledged; further ones go to disk."),
    ] = 64
    peer_window_kib_max: Annotated[int, whole(64, 1 << 20, "KiB"), doc("Bytes in flight to or from one peer.")] = 16_384
    receive_buffer_mib_max: Annotated[
        int, whole(1, 1 << 20, "MiB"), doc("Bytes in flight from all peers together.")
    ] = 64
    clock_hold_s: Annotated[
        int,
        whole(1, 7 * 86_400, "seconds"),
        doc("How long a jump of the machine's clock must last before the instance follows it."),
    ] = 600


FILES_FOLDER_NAME = ".files"  # in a home; no instance has such a name
KEEP_CHECKPOINTS_DEFAULT = 2  # the newest, and one to fall back on
KEEP_ALL_VARIABLE = "IMMORTAL_KEEP_ALL"
"""Environment variable: if set, the whole log is kept unless the settings limit it, as in 'immortal dev'."""

_Checkpoints = Annotated[int, whole(1, 1_000_000, none="all")]  # more would mean "all"
_Days = Annotated[int, whole(1, 36_500, "days")]  # a hundred years: beyond it keep_checkpoints = "all" is meant
_Age = Annotated[int, whole(1, 366 * 86_400, "seconds")]
_Kills = Annotated[int, whole(1, 1000, none="never")]
_KeptSize = Annotated[int, whole(0, 1 << 30, "MiB")]
_LogSize = Annotated[int, whole(1, 1 << 30, "MiB")]


class InstanceSettings(Struct, frozen=True, kw_only=True):
    """Settings of one instance. A field without doc() is not in its settings file."""

    name: str
    folder: Path  # of its runtime files, and of its log unless ``log`` says otherwise

    peer: Annotated[
        Endpoint,
        doc(
            "Address at which peers connect to the instance; 'immortal register' picks a free port for "
            "tcp://127.0.0.1:*."
        ),
    ]
    peer_template: Annotated[
        PeerTemplate | None, doc("Address pattern for peers that are neither in [peers] nor registered.")
    ] = None
    allow: Annotated[
        Callers | None,
        doc("Peers and clients that may call the instance, and which methods.", default="all registered ones"),
    ] = None
    insecure: Annotated[
        bool,
        doc("Where keys are missing, use connections without encryption or authentication, also to other machines."),
    ] = False
    app_host: Annotated[Host, doc("Address on which the ports for the app listen.")] = LOCALHOST
    app_port: Annotated[
        Port | None,
        doc(
            "TCP port for the app; 'immortal register' picks a free one for *.",
            default="none, only a Unix socket; * with app_send_port, app_host or app_auth none",
        ),
    ] = None
    app_send_port: Annotated[
        Port | None,
        doc(
            "Second port, for an app with two connections: on it the app receives; 'immortal register' picks a free "
            "one for *.",
            default="app_port for both",
        ),
    ] = None
    app_send_mode: Annotated[
        AppSendMode, doc("Whether the app connects to app_send_port, or listens there and the coordinator connects.")
    ] = AppSendMode.CONNECT
    app_socket: Annotated[AppSocket | None, doc("Unix socket for the app.", default="HOME/NAME/app.sock")] = None
    app_auth: Annotated[
        AppAuth,
        doc(
            "How the app proves its identity. challenge: app and coordinator prove to each other that they know a "
            "secret; secret: the app may send the secret; none: no proof, for clients that know only the base "
            "protocol.",
            default="challenge, with app_send_port none",
        ),
    ] = AppAuth.CHALLENGE
    app_insecure: Annotated[bool, doc("Allow app_auth none although other machines can reach app_host.")] = False
    log: Annotated[
        Log,
        doc("Folder of the log, or its URL: lmdb:FOLDER, postgresql://USER@HOST/DATABASE.", default="HOME/NAME/log"),
    ]
    log_key: Annotated[
        LogKey | None,
        doc(
            "Key that authenticates the log, so that nobody else can write it: in HOME/NAME/keys/log_key (file) or in "
            "another file.",
            default="file for a new log in a folder, else none",
        ),
    ] = None
    encryption_key: Annotated[
        EncryptionKey | None,
        doc(
            "Source of the key that encrypts the log: a file outside HOME, env:VARIABLE, or command:PROGRAM, which "
            "prints the key."
        ),
    ] = None
    allow_data_loss: Annotated[
        bool, doc("Start although the log's server is configured so that a crash can lose acknowledged data.")
    ] = False
    lease_s: Annotated[
        int,
        whole(1, 60, "seconds"),
        doc(
            "For a log in a database: how long the writer may be silent before a follower on another machine takes "
            "over."
        ),
    ] = 3  # a server that restarts, or a machine that swaps, is silent for a second or two
    checkpoints_to: Annotated[
        StoreUrl | None,
        doc("For a log in a database: where checkpoints of more than 1 MiB are stored.", default="in the database"),
    ] = None
    file_store: Annotated[
        FileStore | None,
        doc("Where the contents of stored files are kept.", default="HOME/.files"),
    ] = None
    checkpoints: Annotated[
        Checkpoints,
        doc(
            "Which app takes the checkpoints: the instance's own, or that of a follower while there is one (only for "
            "a log in a database)."
        ),
    ] = Checkpoints.ON_PRIMARY
    keep_checkpoints: Annotated[
        _Checkpoints | None,
        doc(
            "Number of checkpoints to keep, with the log after the oldest of them; all: keep everything, or what "
            "keep_log_days and keep_log_mb allow."
        ),
    ] = KEEP_CHECKPOINTS_DEFAULT
    keep_log_days: Annotated[
        _Days | None,
        doc(
            "Also keep the log of the last days, so that they can be replayed.",
            default="7, with keep_checkpoints all no limit",
        ),
    ] = None
    keep_log_mb: Annotated[
        _KeptSize | None,
        doc(
            "Largest size of the log that keep_log_days keeps; 0: keep only what keep_checkpoints needs.",
            default="1024, or half of log_limit_mb; no limit with keep_log_days or keep_checkpoints all",
        ),
    ] = None
    log_trigger_mb: Annotated[
        int, whole(1, 1 << 30, "MiB"), doc("Take a checkpoint when the log has grown by this much.")
    ] = 1024
    checkpoint_age_s: Annotated[
        _Age | None,
        doc("Take a checkpoint when the last one is this old and something has changed.", default="no limit of age"),
    ] = None
    kills_before_verdict: Annotated[
        _Kills | None,
        doc(
            "Number of times in a row that a message may end the app's process before it is skipped; never: it is "
            "never skipped."
        ),
    ] = 3  # one death may be chance, two bad luck
    replay_check: Annotated[
        ReplayCheck | None,
        doc(
            "How strictly a recovery compares the replay with the log. strict: all calls must be equal; counts: their "
            "number and order must be equal, and other differences give a warning; off: no comparison.",
            default="strict, counts for an app that says no Hello",
        ),
    ] = None
    rpc_limit_mb: Annotated[
        int, whole(1, ARGUMENTS_SIZE_MIB_MAX, "MiB"), doc("Largest size of the arguments of one call from the app.")
    ] = ARGUMENTS_SIZE_MIB_DEFAULT
    nesting_max: Annotated[
        int,
        whole(8, NESTING_MAX, "levels"),
        doc("Deepest nesting of lists, maps and objects in a value that is sent; deeper values are refused."),
    ] = NESTING_MAX_DEFAULT
    spill_limit_mb: Annotated[
        int,
        whole(0, 1 << 30, "MiB"),
        doc("Disk space for calls that wait for peers; when it is used up, the app is slowed down."),
    ] = 4096
    log_limit_mb: Annotated[
        _LogSize | None,
        doc("Largest size of the log; above it, input from peers waits until the app catches up.", default="no limit"),
    ] = None
    disk_free_mb: Annotated[
        int,
        whole(0, 1 << 30, "MiB"),
        doc("Free disk space below which input from peers waits."),
    ] = 0
    metrics: Annotated[HostPort | None, doc("Address where Prometheus reads metrics; HOST:* picks a free port.")] = None
    metrics_token_file: Annotated[File | None, doc("File with a token that requests for metrics must carry.")] = None
    metrics_certificate_file: Annotated[
        File | None, doc("TLS certificate for the metrics, together with metrics_key_file.")
    ] = None
    metrics_key_file: Annotated[File | None, doc("Private key of metrics_certificate_file.")] = None
    timings_limit_mb: Annotated[
        int,
        whole(0, 1 << 20, "MiB"),
        doc(
            "Disk space for the times at which input arrived, became durable and was handled, for traces; 0: none are "
            "recorded."
        ),
    ] = 0
    keep_executions_days: Annotated[
        int,
        whole(0, 100_000, "days"),
        doc("How long ended executions are listed, at least as long as the log is kept; 0: none are listed."),
    ] = 30
    keep_code: Annotated[
        bool, doc("Keep the app's code beside the log, so that a replay of the past can use the code of that time.")
    ] = True
    app: Annotated[App | None, doc("App that 'immortal run' starts; it stores the one of the last run here.")] = None
    tuning: Annotated[Tuning, doc("Limits that are rarely changed.")] = field(default_factory=Tuning)
    peers: Annotated[Mapping[str, PeerPlace], doc("Addresses of peers that are not registered, by name.")] = field(
        default_factory=dict
    )
    peer_keys: Annotated[Mapping[str, PublicKeys], doc("Public keys of peers that are not registered, by name.")] = (
        field(default_factory=dict)
    )
    client_keys: Annotated[
        Mapping[str, PublicKeys], doc("Public keys of clients that are not registered, by name.")
    ] = field(default_factory=dict)

    # what each restricted caller in ``allow`` may call, by its name
    permissions: Mapping[str, Permission] = field(default_factory=dict)

    @property
    def log_days(self) -> int | None:
        """Days of the log to keep before the newest checkpoints; None: no limit."""
        return 7 if self._uses_default_retention else self.keep_log_days

    @property
    def log_mib(self) -> int | None:
        """MiB of the log to keep at most before the newest checkpoints; None: no limit."""
        if not self._uses_default_retention or self.keep_log_mb is not None:
            return self.keep_log_mb
        return 1024 if self.log_limit_mb is None else min(1024, self.log_limit_mb // 2)  # a full log must get room

    @property
    def executions_days(self) -> int | None:
        """Days for which ended executions are listed; 0: without a limit; None: none is listed."""
        if not self.keep_executions_days or self.encryption_key:  # the list has arguments and results in plain
            return None
        return 0 if self.log_days is None else max(self.keep_executions_days, self.log_days)

    @property
    def files_place(self) -> str:
        """Folder or URL where the contents of the instance's stored files are kept."""
        return self.file_store or str(self.folder.parent.absolute() / FILES_FOLDER_NAME)

    @property
    def sets_no_retention(self) -> bool:
        """True if no setting says how much of the log is kept."""
        return (self.keep_checkpoints, self.keep_log_days, self.keep_log_mb) == (KEEP_CHECKPOINTS_DEFAULT, None, None)

    @property
    def _uses_default_retention(self) -> bool:
        return self.keep_log_days is None and self.keep_checkpoints is not None

    @property
    def app_address(self) -> str | None:
        """Address ``HOST:PORT`` where the app connects over TCP; None if there is no port."""
        return None if self.app_port is None else host_port(self.app_host, self.app_port)

    @property
    def app_unix_address(self) -> str | None:
        """Address ``unix:PATH`` of the app's Unix socket: the one set, or app.sock in the folder; None without one.

        None also with two ports, or if the app is a client of the base protocol, which uses one TCP port without proof.
        """
        if self.app_socket is not None:
            return self.app_socket
        if self.app_send_port is not None or (self.app_port is not None and self.app_auth is AppAuth.NONE):
            return None
        return f"{UNIX}{socket_path(self.folder, SOCKET_FILE_NAME)}"

    @property
    def app_addresses(self) -> list[str]:
        """Addresses at which the app can connect, the nearest first."""
        return [address for address in (self.app_unix_address, self.app_address) if address is not None]

    @property
    def app_send_address(self) -> str | None:
        """Address ``HOST:PORT`` of the second port; None if there is none."""
        return None if self.app_send_port is None else host_port(self.app_host, self.app_send_port)
