"""Runs: the model and the KV cache of each rank. It receives batches, and no sequences.

worker.py          one rank: loads the model, and turns batches into logits
startup.py         prepares a worker: optimizes layers, sizes and allocates the KV cache
cache_plan.py      how many blocks and lanes fit into memory
memory.py          measures the memory of a GPU or of a machine
dummy_steps.py     work before the first request: self-tests, profile runs, warm-up runs
state_slots.py     where recurrent states are kept
executor.py        drives the workers of all ranks
rank_process.py    the processes of ranks 1 and up, started by rank 0
process_groups.py  where ranks meet, also those that torchrun has started
device.py          the device of a rank, and the torch settings with which an engine computes

It must not know sequences, requests or text, nor what a scheduler decides.
"""
