"""Instances whose executions are listed, as beside a coordinator; rows that were not written before a kill are lost."""

from __future__ import annotations

from typing import Any

from immortal.appsdk.running.executions import ExecutionWriter
from immortal.protocol.executions import FILE_NAME, Execution, Query, open_index
from tests.helpers.recorded import RecordedInstance
from tests.helpers.waiting import WaitingInstances


class Listed(WaitingInstances):
    def start(self, name: str, cls: type, **more: Any) -> RecordedInstance:
        self.fails_alone = True
        instance = self._running[name] = RecordedInstance(self, name, cls, **more)
        writer = ExecutionWriter(self.folder / name / FILE_NAME, 0, lambda text: None)
        instance.dispatcher.tasks.executions = writer
        self.settle()
        return instance

    def stop(self, name: str) -> None:
        writer = self[name].dispatcher.tasks.executions
        writer._is_broken = True
        writer.close()
        super().stop(name)

    def find(self, name: str, query: Query | None = None) -> list[Execution]:
        self[name].dispatcher.tasks.executions.flush(is_primary=True)
        with open_index(self.folder / name, name) as index:
            return index.find(query or Query(limit=1000))
