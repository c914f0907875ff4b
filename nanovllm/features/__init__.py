"""Optional features. They use the engine, and the engine imports none of them.

speculation/          draft tokens by prompt lookup or an MTP head, and when they pay
structured_outputs/   text that follows a JSON schema, a regex or a grammar
recurrent_states.py   states instead of K/V (Qwen3.5): slots and snapshots
kv_store/             K/V of prefixes in RAM or in a folder, beyond the KV cache
windows.py            sliding windows (Gemma 3, Mistral): a second pool of blocks
embeddings.py         hidden states of prompts, pooled into vectors
logits_processors.py  Python functions that change logits
prompt_logprobs.py    log probabilities of the prompt's own tokens
beam_search.py        beam search
weight_updates.py     new weights in a running engine, and an engine that sleeps
thread_safety.py      several threads, signal handlers, interrupts
"""
