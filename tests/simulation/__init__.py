"""Simulation of several real cores and apps in one thread, over a simulated disk, network and clock, from one seed.

`plan.py` draws the faults and the work, `world.py` runs them, `node.py` drives one core. README.md lists the model.
"""
