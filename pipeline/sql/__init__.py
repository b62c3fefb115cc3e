"""SQL over logs and states, by DuckDB (extra ``sql``): ``immortal sql``."""
