"""The CPU time that the host needs for a decode step on a GPU, in microseconds.

    host.py NUM_SEQS...

It needs no GPU, because the model, the sampler and the transfers are replaced. The time is that of
`generate` from one step to the next.
"""

import json
import random
import statistics
import sys
import time
from itertools import pairwise
from tempfile import TemporaryDirectory

import torch
from internals import describe_hardware, remove_the_gpu_work, watch_steps
from transformers import Qwen3Config

from nanovllm import LLM, SamplingParams

CONTEXT_LEN = 1000
NUM_STEPS = 200
VOCAB_SIZE = 10000
BLOCK_SIZE = 16
TINY = Qwen3Config(
    architectures=["Qwen3ForCausalLM"],
    vocab_size=VOCAB_SIZE,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    dtype="float32",
)


def measure(num_seqs: int) -> None:
    max_model_len = 2048
    with TemporaryDirectory() as folder:
        TINY.save_pretrained(folder)
        llm = LLM(
            folder,
            load_format="dummy",
            device="cpu",
            enable_kernels=False,
            kvcache_block_size=BLOCK_SIZE,
            num_kvcache_blocks=max(num_seqs, 2) * max_model_len // BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_model_len=max_model_len,
        )
    remove_the_gpu_work(llm, num_seqs, torch.randint(VOCAB_SIZE, (num_seqs,)))
    starts = []
    watch_steps(llm, lambda: starts.append(time.thread_time()))
    rng = random.Random(0)
    prompts = []
    for _ in range(num_seqs):
        prompts.append([rng.randrange(VOCAB_SIZE) for _ in range(CONTEXT_LEN)])
    # Some sequences start earlier, so the last steps have fewer of them.
    num_chunks = num_seqs * CONTEXT_LEN // llm.config.max_num_batched_tokens + 1
    max_tokens = NUM_STEPS + 2 * num_chunks
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens)
    llm.generate(prompts, params, use_tqdm=False)
    ends = starts[-num_chunks - NUM_STEPS : -num_chunks]
    steps = [1e6 * (end - start) for start, end in pairwise(ends)]
    median = statistics.median(steps)
    print(f"host time of a decode step of {num_seqs} sequences: {median:.0f} us", flush=True)
    hardware = describe_hardware(torch.device("cpu"))
    print(json.dumps({"hardware": hardware, "num_seqs": num_seqs, "host_us": median}))
    llm.exit()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in sys.argv[1:]:
        measure(int(number))
