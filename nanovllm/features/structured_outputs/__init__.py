"""Constrained decoding with llguidance.

masks.py           applies a mask to the logits in each step
grammar_writer.py  writes constraints as grammars
schemas.py         prepares JSON schemas
patterns.py        converts ECMAScript's patterns into Rust's
grammars.py        compiles grammars to matchers
grammar_check.py   compiles a client's grammar first, as a program in a process of its own
"""
