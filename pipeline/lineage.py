"""OpenLineage events of a job: its start and its end, the logs that it reads, the folder that it writes.

https://openlineage.io/docs/spec. The client's own settings say where events go (`OPENLINEAGE_URL`, `openlineage.yml`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from immortal.protocol import distribution
from immortal.protocol.command_line import FailedError, echo

try:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
    from openlineage.client.facet_v2 import RunFacet, error_message_run
    from openlineage.client.uuid import generate_new_uuid
except ImportError:
    raise FailedError(f"--lineage needs openlineage-python: {distribution.add_extra('lineage')}") from None

PRODUCER = "https://pypi.org/project/immortal-services"


@contextmanager
def reported(job: str, inputs: Iterable[str], outputs: Iterable[str]) -> Iterator[None]:
    """Report the block as a run of ``job``. ``inputs``, ``outputs``: folders and URLs.

    A receiver that fails does not fail the job: stderr says so once. Raises FailedError if the settings are wrong.
    """
    try:
        client, failed = OpenLineageClient(), False
    except Exception as error:  # whatever its parser raises
        raise FailedError(f"--lineage: OpenLineage's client does not take its settings: {error}") from None
    run = str(generate_new_uuid())
    whole = Job(namespace=os.environ.get("OPENLINEAGE_NAMESPACE", "immortal"), name=f"immortal pipeline {job}")
    reads = [InputDataset(*dataset_name(one)) for one in inputs]
    writes = [OutputDataset(*dataset_name(one)) for one in outputs]

    def emit(state: RunState, error: BaseException | None = None) -> None:
        nonlocal failed
        facets: dict[str, RunFacet] = {}
        if error is not None:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(str(error), "python", producer=PRODUCER)
        event = RunEvent(
            eventTime=datetime.now(UTC).isoformat(),
            eventType=state,
            run=Run(run, facets),
            job=whole,
            inputs=reads,
            outputs=writes,
            producer=PRODUCER,
        )
        try:
            client.emit(event)
        except Exception as problem:  # whatever its transport raises
            if not failed:
                echo(f"note: OpenLineage's receiver did not take an event: {problem}", err=True)
            failed = True

    emit(RunState.START)
    try:
        yield
    except SystemExit:  # a status for what was found
        emit(RunState.COMPLETE)
        raise
    except BaseException as error:
        emit(RunState.FAIL if isinstance(error, Exception) else RunState.ABORT, error)
        raise
    else:
        emit(RunState.COMPLETE)
    finally:
        client.close()


def dataset_name(source: str) -> tuple[str, str]:
    """Return OpenLineage's namespace and name of a folder, or of the URL of an archive or a database."""
    url = urlsplit(source)
    if not url.scheme:
        return "file", str(Path(source).absolute())
    if url.scheme == "file":
        return "file", url.path
    scheme = "postgres" if url.scheme == "postgresql" else url.scheme
    name = "#".join(filter(None, (url.path.strip("/"), url.fragment)))
    return f"{scheme}://{url.netloc.rpartition('@')[2]}", name or "/"
