"""The tables of logs in a PostgreSQL database: the schema ``immortal``, with a version, made and brought forward here.

One row of ``logs`` stands for a log. Each append updates it, and so does each takeover: the row's lock orders them, and
no clock has a part in that. The lease is a row apart, so that renewing it never waits for an append.

``appends`` counts what has changed the row; an append that expects another count is not done. ``token`` is that of the
last append. So who has lost its connection in the middle of one adds to the count, which waits for it and keeps it from
coming later, and finds out by the token whether it was done.

Records are packed: a row an append, ``first`` to ``last``, ``sizes`` apart. What is there before
``logs.first_sequence_id`` is removed, though it may be in a row with records that are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.core.errors import LogFormatError

if TYPE_CHECKING:
    import psycopg

_LOCK_KEY = 0x696D6D6F7274616C  # of the advisory lock around migrations: "immortal"
WRITER_ROLE = "immortal_writer"

MIGRATIONS = (
    """
CREATE SCHEMA immortal;
CREATE TABLE immortal.schema_version (version int NOT NULL);
INSERT INTO immortal.schema_version VALUES (0);

CREATE TABLE immortal.logs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    epoch bigint NOT NULL DEFAULT 0,
    holder text NOT NULL DEFAULT '',
    appends bigint NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    first_sequence_id bigint NOT NULL,
    last_sequence_id bigint NOT NULL
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

CREATE TABLE immortal.leases (
    log bigint PRIMARY KEY REFERENCES immortal.logs ON DELETE CASCADE,
    epoch bigint NOT NULL,
    until timestamptz NOT NULL
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

CREATE TABLE immortal.records (
    log bigint NOT NULL REFERENCES immortal.logs ON DELETE CASCADE,
    first bigint NOT NULL,
    last bigint NOT NULL,
    sizes int[] NOT NULL,
    packed bytea NOT NULL,
    PRIMARY KEY (log, first)
);
ALTER TABLE immortal.records ALTER packed SET STORAGE EXTERNAL;

CREATE TABLE immortal.rows (
    log bigint NOT NULL REFERENCES immortal.logs ON DELETE CASCADE,
    tab text COLLATE "C" NOT NULL,
    key bytea NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (log, tab, key)
);
ALTER TABLE immortal.rows ALTER value SET STORAGE EXTERNAL;

-- One round trip, one transaction: NULL where it is done, else why not.
CREATE FUNCTION immortal.append(
    in_log bigint, in_epoch bigint, in_appends bigint, in_token bigint, in_expected bigint, in_last bigint,
    in_sizes int[], in_packed bytea, in_records_end bigint,
    gone_tab text[], gone_first bytea[], gone_end bytea[],
    put_tab text[], put_key bytea[], put_value bytea[]
) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    UPDATE immortal.logs
       SET last_sequence_id = in_last, appends = appends + 1, token = in_token,
           first_sequence_id = greatest(first_sequence_id, least(coalesce(in_records_end, 0), in_last + 1))
     WHERE id = in_log AND epoch = in_epoch AND appends = in_appends AND last_sequence_id = in_expected;
    IF NOT FOUND THEN
        RETURN coalesce((SELECT CASE WHEN epoch <> in_epoch THEN 'fenced by ' || holder || ' at epoch ' || epoch
                                     ELSE 'the log ends with ' || last_sequence_id || ', append ' || appends END
                           FROM immortal.logs WHERE id = in_log), 'the log is gone');
    END IF;
    IF in_records_end IS NOT NULL THEN
        DELETE FROM immortal.records WHERE log = in_log AND last < in_records_end;
    END IF;
    FOR i IN 1 .. cardinality(gone_tab) LOOP
        DELETE FROM immortal.rows WHERE log = in_log AND tab = gone_tab[i] AND key >= gone_first[i]
           AND (gone_end[i] IS NULL OR key < gone_end[i]);
    END LOOP;
    IF in_last > in_expected THEN
        INSERT INTO immortal.records VALUES (in_log, in_expected + 1, in_last, in_sizes, in_packed);
    END IF;
    IF cardinality(put_tab) > 0 THEN
        INSERT INTO immortal.rows SELECT in_log, * FROM unnest(put_tab, put_key, put_value)
            ON CONFLICT (log, tab, key) DO UPDATE SET value = excluded.value;
    END IF;
    RETURN NULL;
END $$;

-- The right to write: refused with a sentence while another one's lease runs, by the clock of the database.
CREATE FUNCTION immortal.take_over(in_log bigint, in_holder text, in_lease interval) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    held immortal.logs;
BEGIN
    SELECT * INTO held FROM immortal.logs WHERE id = in_log FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'it is gone';
    END IF;
    IF EXISTS (SELECT FROM immortal.leases WHERE log = in_log AND epoch = held.epoch AND until > clock_timestamp()) THEN
        RETURN held.holder;
    END IF;
    UPDATE immortal.logs SET epoch = epoch + 1, holder = in_holder WHERE id = in_log;
    INSERT INTO immortal.leases VALUES (in_log, held.epoch + 1, clock_timestamp() + in_lease)
        ON CONFLICT (log) DO UPDATE SET epoch = excluded.epoch, until = excluded.until;
    RETURN NULL;
END $$;
""",
)

# What a coordinator may do that is not the schema's owner: write logs that were registered, and no more.
GRANTS = f"""
GRANT USAGE ON SCHEMA immortal TO {WRITER_ROLE};
GRANT SELECT ON ALL TABLES IN SCHEMA immortal TO {WRITER_ROLE};
GRANT UPDATE ON immortal.logs TO {WRITER_ROLE};
GRANT INSERT, UPDATE, DELETE ON immortal.leases, immortal.records, immortal.rows TO {WRITER_ROLE};
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA immortal TO {WRITER_ROLE};
"""


def version_of(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    """Of the schema in this database; 0 where there is none."""
    if connection.execute("SELECT to_regclass('immortal.schema_version')").fetchone() == (None,):
        return 0
    row = connection.execute("SELECT version FROM immortal.schema_version").fetchone()
    assert row is not None
    assert isinstance(row[0], int)
    return row[0]


def migrate(connection: psycopg.Connection[tuple[object, ...]], where: str) -> None:
    """Make the schema, or bring it forward; the role of its owner can. Raises LogFormatError for a newer one."""
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK_KEY,))
        version = version_of(connection)
        check_version(version, where, may_be_older=True)
        for migration in MIGRATIONS[version:]:
            connection.execute(migration.encode())
        if version < len(MIGRATIONS):
            connection.execute("UPDATE immortal.schema_version SET version = %s", (len(MIGRATIONS),))
            if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (WRITER_ROLE,)).rowcount:
                connection.execute(GRANTS.encode())


def check_version(version: int, where: str, *, may_be_older: bool = False) -> None:
    """Raises LogFormatError for a schema that this program does not know."""
    if version > len(MIGRATIONS):
        raise LogFormatError(
            f"the schema 'immortal' in {where} has version {version}, this program knows {len(MIGRATIONS)}: use the "
            f"newer version of the program that made it"
        )
    if version < len(MIGRATIONS) and not may_be_older:
        what = "no schema 'immortal'" if not version else f"version {version} of the schema 'immortal'"
        raise LogFormatError(
            f"there is no log {where}: the database has {what}, {len(MIGRATIONS)} was expected; 'immortal register' "
            f"with the role that owns the database makes it"
        )
