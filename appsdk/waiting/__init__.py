"""``async def`` handlers: operations that they wait for, and how each is run again over its journal."""
