"""Runs: the model and the KV cache of each rank. It receives batches, and no sequences.

worker.py       one rank: loads the model, and computes a batch
executor.py     drives the workers of all ranks
device.py       the device of a rank, and the settings with which an engine computes
process_groups.py  where ranks meet
memory.py       how many blocks and lanes fit into memory
dummy_steps.py  batches for self-tests, the profile run and warm-up runs
state_slots.py  the places of recurrent states
"""
