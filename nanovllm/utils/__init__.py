"""Helpers without knowledge of the engine.

checks.py      validates values, and names what is invalid
arithmetic.py  integer arithmetic
terminal.py    messages on stderr
packing.py     how a batch travels: packed, copied to a device
"""
