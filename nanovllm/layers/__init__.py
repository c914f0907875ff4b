"""The layers in plain PyTorch, written to be read. They specify what kernels/ computes.

attention.py        paged attention
linear.py           linear layers, sharded over ranks
embedding.py        the embedding and the output head
norm.py             RMSNorm
rotary.py           rotary position embedding
sampler.py          the parameters of all rows as tensors, temperature, filters, Gumbel-max
penalties.py        penalties, biases, and the ban of stop tokens
logprobs.py         log probabilities of sampled tokens
quantized.py        quantized weights
gated_delta.py      the gated delta rule (Qwen3.5)

Two files are no layers, but what layers share:

noise.py            noise as a function of seed, position and token
tensor_parallel.py  collective operations between ranks, and messages from rank 0
"""
