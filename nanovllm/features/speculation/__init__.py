"""Speculative decoding with drafts by prompt lookup or by an MTP head.

drafts.py     chooses and verifies draft tokens
proposers.py  what proposes them
costs.py      measures what a token costs, to choose the number of draft tokens
"""
