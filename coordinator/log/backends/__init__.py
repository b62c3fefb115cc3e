"""Storage backends of logs, one module or folder each. Only :mod:`immortal.coordinator.log.open` names them."""
