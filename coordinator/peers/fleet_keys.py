"""Keys of a fleet, by one file that lists its members, their registry folders and the allowed callers of each.

    expires_days = 365                    how long new keys are valid; without it for ever
    age_days_max = 300                    older keys must be rotated

    [instances.counter]
    home = "/srv/a"                       its registry folder, relative to this file; without it ".immortal"
    allow = { web = ["place"], reader = "*" }

    [clients.web]
    home = "/srv/web"

Secrets stay where they are made. Each folder gets the public files of all callers of its members, and of all members
that its own ones call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from immortal.coordinator.config import ConfigError, write_atomically
from immortal.coordinator.config.settings_file import read_table, read_toml, text_with_allow
from immortal.coordinator.config.values import Callers, doc, kind, whole
from immortal.coordinator.core.permissions import ANYTHING, Permission
from immortal.coordinator.instances.registry import HOME_DEFAULT, Registry, UnknownInstanceError, notify_coordinators
from immortal.coordinator.messenger import Role
from immortal.coordinator.peers import keys
from immortal.coordinator.peers.keys import KeysError, PublicFile
from immortal.protocol.safe_output import did_you_mean

_Home = Annotated[str, kind("FOLDER", "a path"), doc("Its registry folder, relative to the fleet's file.")]
_Days = Annotated[int, whole(1, 36_500, "days")]


class _Client(Struct):
    home: _Home = HOME_DEFAULT


class _Instance(Struct):
    home: _Home = HOME_DEFAULT
    allow: Annotated[Callers, doc("Who may call it, and what.")] = ()


class _File(Struct):
    instances: Annotated[Mapping[str, _Instance], doc("The instances, by name.")] = {}
    clients: Annotated[Mapping[str, _Client], doc("The clients, by name.")] = {}
    operators: Annotated[Mapping[str, _Client], doc("The operators, by name.")] = {}
    expires_days: Annotated[_Days | None, doc("How long keys that are made may be used.", default="for ever")] = None
    age_days_max: Annotated[_Days | None, doc("Older keys are to be rotated.", default="none for its age")] = None


class Member(Struct, frozen=True):
    """Instance, client or operator of the fleet. ``allow``: the callers of an instance, with their permissions."""

    name: str
    role: Role
    home: Path
    allow: Mapping[str, Permission]

    @property
    def folder(self) -> Path:
        return self.home / self.name

    @property
    def public(self) -> PublicFile:
        """Public file of the member. Raises KeysError."""
        return keys.read_public_file(self.folder)


class Fleet(Struct, frozen=True):
    """Contents of a fleet's file, with ``members`` by name."""

    members: Mapping[str, Member]
    expires_days: int | None = None
    age_days_max: int | None = None

    @property
    def homes(self) -> list[Path]:
        return sorted({member.home for member in self.members.values()})

    def needed_in(self, home: Path) -> list[Member]:
        """Return the members whose public keys ``home`` needs: they call a member there, or are called by one."""
        names: set[str] = set()
        for member in self.members.values():
            for caller in member.allow:
                if member.home == home:
                    names.add(caller)
                if self.members[caller].home == home:
                    names.add(member.name)
        return [self.members[name] for name in sorted(names)]


def read(path: Path) -> Fleet:
    """Read and check a fleet's file. Raises ConfigError."""
    try:
        values, source = read_toml(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    file = _File(**read_table(source, _File, values))
    members: dict[str, Member] = {}
    tables = ((Role.INSTANCE, file.instances), (Role.CLIENT, file.clients), (Role.OPERATOR, file.operators))
    for role, table in tables:
        for name, given in table.items():
            if name in members:
                raise ConfigError(f"{path}: {name!r} stands there twice, as {members[name].role} and as {role}")
            allow = given.allow if isinstance(given, _Instance) else ()
            home = (path.absolute().parent / given.home).resolve()
            permissions = allow if isinstance(allow, Mapping) else dict.fromkeys(allow, ANYTHING)
            members[name] = Member(name, role, home, permissions)
    for member in members.values():
        for caller in member.allow:
            if caller not in members or caller == member.name:
                hint = did_you_mean(caller, members) or f": there are {', '.join(sorted(members))}"
                place = source.field(caller, f"instances.{member.name}.allow")
                raise ConfigError(f"{place}: {caller!r} is no other member{hint}")
    return Fleet(members, file.expires_days, file.age_days_max)


# --- making -----------------------------------------------------------------------------------------------------------


def create_missing(fleet: Fleet, today: date) -> Iterator[str]:
    """Create missing keys, and write the files that each folder needs; yield a text for each change.

    Raises KeysError, ConfigError.
    """
    expires = None if fleet.expires_days is None else today + timedelta(days=fleet.expires_days)
    for member in fleet.members.values():
        if not keys.read_pairs(member.folder):
            keys.create(member.folder, member.role, expires)
            yield f"{member.name}: made keys in {member.folder}"
        elif member.public.keys != _complete(member).keys or _role(member.public) is not member.role:
            keys.create(member.folder, member.role)
            yield f"{member.name}: wrote its public file anew"
    for home in fleet.homes:
        for known in fleet.needed_in(home):
            if known.home != home and _copy(known, home):
                yield f"{known.name}: its public keys are in {home} now"
    for member in fleet.members.values():
        if member.role is Role.INSTANCE and _write_allow(member):
            yield f"{member.name}: wrote who may call it into {Registry(member.home).path(member.name)}"


def _role(public: PublicFile) -> Role:
    return public.role or Role.INSTANCE


def _complete(member: Member) -> PublicFile:
    """Return the public file that the member's pairs should have."""
    known = {public.key: public for public in member.public.keys}
    pairs = keys.read_pairs(member.folder)
    return PublicFile(tuple(known.get(pair.public, keys.PublicKey(pair.public)) for pair in pairs))


def _copy(member: Member, home: Path) -> bool:
    """Copy the public file to ``home``; return True if it differed there. Raises KeysError."""
    text = keys.public_text(member.public).encode()
    path = keys.public_path(home / member.name)
    if keys.secret_path(home / member.name).exists():
        raise KeysError(f"{home} has secret keys of {member.name!r}, who lives in {member.home}: remove one of them")
    try:
        if path.exists() and path.read_bytes() == text:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
        notify_coordinators(path)
    except OSError as error:
        raise KeysError(f"{path} cannot be written: {error.strerror}") from None
    return True


def _write_allow(member: Member) -> bool:
    """Write ``allow`` into a registered member's settings; return True if it differed there. Raises ConfigError."""
    registry = Registry(member.home)
    try:
        settings = registry.load(member.name)
    except UnknownInstanceError:
        return False
    if _allowed(settings.allow, settings.permissions) == member.allow:
        return False
    path = registry.path(member.name)
    text = text_with_allow(path.read_bytes().decode(), member.allow)
    write_atomically(path, text.encode(), mode=path.stat().st_mode & 0o777)
    return True


def _allowed(allow: tuple[str, ...] | None, permissions: Mapping[str, Permission]) -> Mapping[str, Permission] | None:
    return None if allow is None else {caller: permissions.get(caller, ANYTHING) for caller in allow}


# --- checking ---------------------------------------------------------------------------------------------------------


def problems(fleet: Fleet, today: date) -> Iterator[str]:
    """Yield a text for each difference from the fleet's file, and for each key that must be rotated."""
    owners: dict[str, str] = {}
    for member in fleet.members.values():
        yield from _key_problems(fleet, member, owners, today)
        if member.role is Role.INSTANCE:
            yield from _settings_problems(member)
    for home in fleet.homes:
        yield from _home_problems(fleet, home)


def _key_problems(fleet: Fleet, member: Member, owners: dict[str, str], today: date) -> Iterator[str]:
    try:
        pairs, public = keys.read_pairs(member.folder), member.public
    except KeysError as error:
        yield f"{member.name}: {error}"
        return
    if not pairs:
        yield f"{member.name}: no keys in {member.folder}"
        return
    if [pair.public for pair in pairs] != [known.key for known in public.keys]:
        yield f"{member.name}: {keys.public_path(member.folder)} has other keys than its secret file"
    if _role(public) is not member.role:
        yield f"{member.name}: its public file gives the role {_role(public)}, expected {member.role}"
    for known in public.keys:
        other = owners.setdefault(known.key, member.name)
        if other != member.name:
            yield f"{member.name}: it has the same key as {other!r}: make new ones for both"
    for reminder in keys.reminders(public, today, fleet.age_days_max, keys.SOON_DAYS):
        yield f"{member.name}: {reminder}"


def _settings_problems(member: Member) -> Iterator[str]:
    registry = Registry(member.home)
    try:
        settings = registry.load(member.name)
    except (UnknownInstanceError, ConfigError) as error:
        yield f"{member.name}: {error}"
        return
    if _allowed(settings.allow, settings.permissions) != member.allow:
        yield f"{member.name}: 'allow' in {registry.path(member.name)} is not what the fleet's file says"
    for table, given in (("peer_keys", settings.peer_keys), ("client_keys", settings.client_keys)):
        for name in given:
            yield (
                f"{member.name}: [{table}] in {registry.path(member.name)} gives keys of {name!r}, which go before "
                f"those of the fleet"
            )


def _home_problems(fleet: Fleet, home: Path) -> Iterator[str]:
    known = {member.name for member in fleet.needed_in(home)}
    for member in fleet.members.values():
        if member.home == home:
            continue
        there = home / member.name
        if keys.secret_path(there).exists():
            yield f"{member.name}: secret keys of it are in {home} too, it lives in {member.home}"
        elif member.name in known:
            try:
                same = keys.read_public_file(there) == member.public
            except KeysError as error:
                yield f"{member.name}: {error}"
                continue
            if not same:
                yield f"{member.name}: its public keys in {home} are missing, or not those that it has"
    registry = Registry(home)
    for name in sorted({*registry.names(), *registry.client_names(registry.names())} - set(fleet.members)):
        yield f"{name}: it has a place in {home}, and none in the fleet's file"
