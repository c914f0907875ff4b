"""Helpers of all rooms. Only packing.py knows what a batch is.

checks.py      validates values, and names what is invalid
arithmetic.py  integer arithmetic
terminal.py    reports on stderr
packing.py     how batches and arrays travel: packed, copied to a device
"""
