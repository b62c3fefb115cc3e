"""Bridges to other libraries, each with its own extra: ``asgi`` (Starlette, FastAPI) and ``pydantic_ai``.

No other part of the SDK imports them. `docs/how-to/integrations.md`.
"""
