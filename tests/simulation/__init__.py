"""Several real cores and real apps in one process and thread, over a simulated disk, network and clock, from one seed.

`plan.py` draws what is to happen, `world.py` runs it, `node.py` drives one core. docs/explanation/simulation.md lists
what is modelled.
"""
