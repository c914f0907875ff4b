"""The message from the engine to the model: one step, without sequences.

batch.py    one step as plain arrays
packing.py  a batch as one tensor: to other ranks, to a GPU, into a CUDA graph
"""
