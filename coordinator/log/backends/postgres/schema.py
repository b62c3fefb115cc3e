"""Schema ``immortal`` of a database: its tables, the function that appends, and its migrations.

Each entry of MIGRATIONS brings the schema from the version of its index to the next one. A released entry is never
changed: a change is a new entry. `immortal register` applies them in one transaction, under an advisory lock, when it
creates a log; opening a log only compares the version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import LiteralString

from psycopg import Connection, errors, sql

from immortal.coordinator.core.errors import LogError, LogFormatError

MIGRATION_LOCK = 0x696D6D6F7274616C  # "immortal": one migration of a database at a time

# Every append changes a row of heads, and a row of leases changes twice a second. Half of their pages is left free, so
# that a new version of a row stays on its page and no index changes. A removed log keeps its head: its epoch must
# never be reused, since an earlier writer may still try to append.
#
# Standbys have the endpoint where peers would reach each; a lease has its holder's. Lease changes are announced on the
# channel "immortal", with the instance's name. Appends are not: a commit with a NOTIFY takes a lock on the whole
# database. The registry has the files that machines share (protocol.shared_registry), by instance and part. Public keys
# belong to one machine each.
_TABLES: LiteralString = """
CREATE SCHEMA immortal;
CREATE TABLE immortal.schema_version (version int NOT NULL);
INSERT INTO immortal.schema_version VALUES (0);
CREATE TABLE immortal.heads (
    instance text COLLATE "C" PRIMARY KEY,
    is_there boolean NOT NULL,
    epoch bigint NOT NULL,
    appends_count bigint NOT NULL,
    last_sequence_id bigint NOT NULL,
    holder text NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE TABLE immortal.leases (
    instance text COLLATE "C" PRIMARY KEY,
    process text NOT NULL,
    holder text NOT NULL,
    until timestamptz NOT NULL,
    endpoint text NOT NULL DEFAULT ''
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE TABLE immortal.standbys (
    instance text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    host text NOT NULL,
    endpoint text NOT NULL,
    is_ready boolean NOT NULL,
    seen timestamptz NOT NULL,
    PRIMARY KEY (instance, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE TABLE immortal.records (
    instance text COLLATE "C" NOT NULL,
    first bigint NOT NULL,
    kept_from bigint NOT NULL,
    kept_count int NOT NULL,
    pack bytea NOT NULL,
    PRIMARY KEY (instance, first)
);
CREATE TABLE immortal.rows (
    instance text COLLATE "C" NOT NULL,
    table_name text COLLATE "C" NOT NULL,
    key bytea NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (instance, table_name, key)
) WITH (fillfactor = 80);
CREATE SEQUENCE immortal.registry_revisions;
CREATE TABLE immortal.registry (
    instance text COLLATE "C" NOT NULL,
    part text COLLATE "C" NOT NULL CHECK (part IN ('settings', 'public_keys', 'upgrade')),
    machine text COLLATE "C" NOT NULL,
    host text NOT NULL,
    endpoint text NOT NULL DEFAULT '',
    content text NOT NULL,
    revision bigint NOT NULL DEFAULT nextval('immortal.registry_revisions'),
    changed timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (instance, part, machine)
);
ALTER TABLE immortal.records ALTER COLUMN pack SET STORAGE EXTERNAL;
ALTER TABLE immortal.rows ALTER COLUMN value SET STORAGE EXTERNAL;
"""

# Spans are deleted before rows are added. Records are removed at their beginning or end: for a pack removed in part,
# kept_from and kept_count say which of its records remain, and its bytes stay as they are.
_CHANGE: LiteralString = """
CREATE FUNCTION immortal.change(
    of_instance text,
    span_tables text[], span_firsts bytea[], span_ends bytea[],
    removed_from bigint, removed_end bigint,
    pack_firsts bigint[], pack_counts int[], packs bytea[],
    row_tables text[], row_keys bytea[], row_values bytea[]
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF removed_from < removed_end THEN
        DELETE FROM immortal.records r WHERE r.instance = of_instance
            AND r.kept_from >= removed_from AND r.kept_from + r.kept_count <= removed_end;
        UPDATE immortal.records r
            SET kept_count = (r.kept_from + r.kept_count - removed_end)::int, kept_from = removed_end
            WHERE r.instance = of_instance AND r.first < removed_end
            AND r.kept_from >= removed_from AND r.kept_from < removed_end;
        UPDATE immortal.records r SET kept_count = (removed_from - r.kept_from)::int
            WHERE r.instance = of_instance
            AND r.kept_from < removed_from AND r.kept_from + r.kept_count > removed_from;
    END IF;
    IF cardinality(span_tables) > 0 THEN
        FOR i IN 1 .. cardinality(span_tables) LOOP
            DELETE FROM immortal.rows r WHERE r.instance = of_instance AND r.table_name = span_tables[i]
                AND r.key >= span_firsts[i] AND (span_ends[i] IS NULL OR r.key < span_ends[i]);
        END LOOP;
    END IF;
    IF cardinality(packs) > 0 THEN
        INSERT INTO immortal.records (instance, first, kept_from, kept_count, pack)
            SELECT of_instance, f, f, c, p FROM unnest(pack_firsts, pack_counts, packs) AS u(f, c, p);
    END IF;
    IF cardinality(row_tables) > 0 THEN
        INSERT INTO immortal.rows AS r (instance, table_name, key, value)
            SELECT of_instance, t, k, v FROM unnest(row_tables, row_keys, row_values) AS u(t, k, v)
            ON CONFLICT (instance, table_name, key) DO UPDATE SET value = excluded.value;
    END IF;
END $$;
"""

# The head's row orders appends and takeovers, since both change it. If it is not as this writer expects, nothing is
# changed, and the answer is the head's state. Each statement of a function sees what was committed before it, so the
# second read sees the changes that the first one has waited for.
_APPEND: LiteralString = """
CREATE FUNCTION immortal.append(
    of_instance text, of_epoch bigint, of_number bigint, expected_last bigint, new_last bigint,
    span_tables text[], span_firsts bytea[], span_ends bytea[],
    removed_from bigint, removed_end bigint,
    pack_firsts bigint[], pack_counts int[], packs bytea[],
    row_tables text[], row_keys bytea[], row_values bytea[],
    OUT is_done boolean, OUT epoch bigint, OUT appends_count bigint, OUT last_sequence_id bigint, OUT holder text
) LANGUAGE plpgsql AS $$
BEGIN
    UPDATE immortal.heads h SET last_sequence_id = new_last, appends_count = of_number
        WHERE h.instance = of_instance AND h.is_there AND h.epoch = of_epoch
        AND h.appends_count = of_number - 1 AND h.last_sequence_id = expected_last;
    is_done := FOUND;
    IF NOT is_done THEN
        SELECT h.epoch, h.appends_count, h.last_sequence_id, h.holder
            INTO append.epoch, append.appends_count, append.last_sequence_id, append.holder
            FROM immortal.heads h WHERE h.instance = of_instance;
        RETURN;
    END IF;
    PERFORM immortal.change(of_instance, span_tables, span_firsts, span_ends, removed_from, removed_end,
        pack_firsts, pack_counts, packs, row_tables, row_keys, row_values);
END $$;
"""

# Roles belong to the whole server: one may exist already, and the owner of a database may lack the right to create
# one. Then nothing is granted here: docs/how-to/postgresql.md has the grants. A machine that only calls has the role
# immortal_reader.
_GRANTS: LiteralString = """
DO $$ DECLARE
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['immortal_writer', 'immortal_reader'] LOOP
        BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) THEN
                EXECUTE format('CREATE ROLE %I NOLOGIN', name);
            END IF;
        EXCEPTION WHEN insufficient_privilege OR duplicate_object OR unique_violation THEN NULL;
        END;
    END LOOP;
END $$;
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'immortal_writer') THEN
        GRANT USAGE ON SCHEMA immortal TO immortal_writer;
        GRANT SELECT ON immortal.schema_version TO immortal_writer;
        GRANT SELECT, INSERT, UPDATE, DELETE ON immortal.heads, immortal.leases, immortal.records, immortal.rows,
            immortal.standbys, immortal.registry TO immortal_writer;
        GRANT USAGE ON SEQUENCE immortal.registry_revisions TO immortal_writer;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'immortal_reader') THEN
        GRANT USAGE ON SCHEMA immortal TO immortal_reader;
        GRANT SELECT ON immortal.schema_version, immortal.leases, immortal.registry TO immortal_reader;
    END IF;
END $$;
"""

# Created by the first `immortal registry role`, so that it costs others nothing. Members of immortal_instance can use
# the rows of their own instances, even with other roles; all other roles can use what their grants say, as before.
# Places and public keys are no secret. A later migration that adds a table of instances must protect it, too.
_OWN_ROWS: LiteralString = """
DO $$
DECLARE
    name text;
    own text := 'instance = ANY (ARRAY(SELECT w.instance FROM immortal.writers w WHERE w.role = current_user))'
        ' OR (SELECT NOT pg_has_role(current_user, ''immortal_instance'', ''member''))';
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'immortal_instance') THEN
        CREATE ROLE immortal_instance NOLOGIN;
    END IF;
    GRANT USAGE ON SCHEMA immortal TO immortal_instance;
    GRANT SELECT ON immortal.schema_version TO immortal_instance;
    GRANT USAGE ON SEQUENCE immortal.registry_revisions TO immortal_instance;
    IF to_regclass('immortal.writers') IS NULL THEN
        CREATE TABLE immortal.writers (role name, instance text COLLATE "C", PRIMARY KEY (role, instance));
        GRANT SELECT ON immortal.writers TO PUBLIC;
        FOREACH name IN ARRAY ARRAY['heads', 'leases', 'records', 'rows', 'standbys', 'registry'] LOOP
            EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON immortal.%I TO immortal_instance', name);
            EXECUTE format('CREATE POLICY own ON immortal.%I USING (%s)', name, own);
            EXECUTE format('ALTER TABLE immortal.%I ENABLE ROW LEVEL SECURITY', name);
        END LOOP;
        CREATE POLICY seen ON immortal.leases FOR SELECT USING (true);
        CREATE POLICY seen ON immortal.registry FOR SELECT USING (true);
    END IF;
END $$;
"""

MIGRATIONS: tuple[LiteralString, ...] = (_TABLES + _CHANGE + _APPEND + _GRANTS,)
FIRST_VERSION = 3  # after the first step; 1 and 2 were never released
VERSION = FIRST_VERSION + len(MIGRATIONS) - 1


def version_of(connection: Connection) -> int | None:
    """Return the version of the schema; None if there is no schema."""
    try:
        row = connection.execute("SELECT version FROM immortal.schema_version").fetchone()
    except (errors.UndefinedTable, errors.InvalidSchemaName):
        return None
    return None if row is None else int(row[0])


def check(connection: Connection, label: str) -> bool:
    """Check the schema's version; return False if there is no schema. Raises LogFormatError for an unknown version."""
    version = version_of(connection)
    if version is None:
        return False
    if version > VERSION:
        raise LogFormatError(
            f"the schema 'immortal' of {label} has version {version}, this program knows version {VERSION}:"
            " use the newer version of the program that made it"
        )
    if version < FIRST_VERSION:
        raise LogFormatError(
            f"the schema 'immortal' of {label} has version {version}, which was never released: this program needs"
            f" version {VERSION}; let it make the schema in a new database"
        )
    if version < VERSION:
        raise LogFormatError(
            f"the schema 'immortal' of {label} has version {version}, this program needs version {VERSION}:"
            " 'immortal log upgrade NAME' brings it there, as the owner of the schema"
        )
    return True


def migrate(connection: Connection, label: str) -> int:
    """Bring the schema to VERSION; return the version that it had (0: there was none). Raises LogError."""
    connection.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
    try:
        before = version_of(connection) or 0
        if before and not FIRST_VERSION <= before <= VERSION:
            check(connection, label)
        try:
            with connection.transaction():  # others see the old version or the new one, nothing in between
                for step in MIGRATIONS[max(0, before - FIRST_VERSION + 1) :]:
                    connection.execute(step)
                if before < VERSION:
                    connection.execute("UPDATE immortal.schema_version SET version = %s", [VERSION])
        except errors.InsufficientPrivilege as error:
            raise LogError(
                f"the schema 'immortal' of {label} can't be made or changed: {error.diag.message_primary}; this needs"
                " a role that may: the owner of the database, say"
            ) from None
        return before
    finally:
        connection.execute("SELECT pg_advisory_unlock(%s)", [MIGRATION_LOCK])


def restrict(connection: Connection, role: str, instances: Sequence[str], *, allowed: bool) -> None:
    """Restrict ``role``, created if it is missing, to reading and writing the rows of ``instances``.

    Repeated calls add instances; not ``allowed`` removes them. Raises LogError for a role that can't be restricted.
    """
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [MIGRATION_LOCK])
        connection.execute("SET LOCAL lock_timeout = '10s'")
        connection.execute(_OWN_ROWS)
        found = connection.execute(
            "SELECT rolsuper OR rolbypassrls OR pg_has_role(oid, (SELECT nspowner FROM pg_namespace"
            " WHERE nspname = 'immortal'), 'member') FROM pg_roles WHERE rolname = %s",
            [role],
        ).fetchone()
        if found is not None and found[0]:
            raise LogError(f"the role {role!r} is a superuser's or the owner's of the schema, whom no policy restricts")
        named = sql.Identifier(role)
        if found is None:
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(named))
        connection.execute(sql.SQL("GRANT immortal_instance TO {}").format(named))
        change = (
            "INSERT INTO immortal.writers SELECT %s, unnest(%s::text[]) ON CONFLICT DO NOTHING"
            if allowed
            else "DELETE FROM immortal.writers WHERE role = %s AND instance = ANY (%s)"
        )
        connection.execute(change, [role, list(instances)])
