"""K/V of prefixes beyond the KV cache: in RAM, or in a folder that survives the engine.

stored_prefixes.py   when K/V are stored, and how they return to the KV cache
tensors.py           which tensors belong to a stored entry, and their copies
ram_store.py         entries in the memory of this process
folder_store.py      entries in files, which engines share
"""
