"""Object storage: what archives of logs lie in, and the large checkpoints of logs in a database.

store     a store by its URL: create-only puts, and errors in words; needs the extra ``archive``
errors    what can go wrong with it

A coordinator loads it only where its settings name a store.
"""
