"""Several real cores and real apps in one process and thread, over a simulated disk, network and clock, from one seed.

`plan.py` draws what is to happen, `world.py` runs it, `node.py` drives one core. README.md lists
what is modelled.
"""
