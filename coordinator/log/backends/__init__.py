"""Places where logs are kept, one module or folder each; :mod:`coordinator.log.open` alone names them."""
