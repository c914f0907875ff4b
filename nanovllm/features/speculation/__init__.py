"""Speculative decoding with drafts by prompt lookup.

drafts.py  proposes and verifies draft tokens
costs.py   measures what a token costs, to choose the number of draft tokens
"""
