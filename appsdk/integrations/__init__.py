"""Bridges to other libraries, each with an extra of its own: ``asgi`` (Starlette, FastAPI) and ``pydantic_ai``.

Nothing else of the SDK imports them. `docs/how-to/integrations.md`.
"""
