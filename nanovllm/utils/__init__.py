"""Helpers of all folders, without knowledge of the engine.

checks.py   validates values, and names what is invalid
helpers.py  division, reports on stderr, reading of JSON and of command lines
"""
