"""Places where logs are kept, one module or folder each; :mod:`immortal.coordinator.log.open` alone names them."""
