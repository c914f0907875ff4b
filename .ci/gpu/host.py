"""The CPU time that the host needs for a decode step on a GPU, in microseconds.

    host.py NUM_SEQS...

It needs no GPU, because the model, the sampler and the transfers are replaced. The time is that of
`generate` from one step to the next. With blocks of 256 tokens, which are nano-vLLM's, fewer
sequences enter or fill a block in a step. A second run with clocks around its parts shows where the
time goes.
"""

import json
import random
import statistics
import sys
import time
from itertools import pairwise
from tempfile import TemporaryDirectory

import torch
from internals import describe_hardware, remove_the_gpu_work, time_parts, watch_steps
from transformers import Qwen3Config

from nanovllm import LLM, SamplingParams

CONTEXT_LEN = 1000
NUM_STEPS = 200
VOCAB_SIZE = 10000
BLOCK_SIZES = [16, 256]
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


def measure(num_seqs: int, block_size: int) -> None:
    max_model_len = 2048
    with TemporaryDirectory() as folder:
        TINY.save_pretrained(folder)
        llm = LLM(
            folder,
            load_format="dummy",
            device="cpu",
            enable_kernels=False,
            kvcache_block_size=block_size,
            num_kvcache_blocks=max(num_seqs, 2) * max_model_len // block_size,
            max_num_seqs=num_seqs,
            max_model_len=max_model_len,
        )
    remove_the_gpu_work(llm, num_seqs, torch.randint(VOCAB_SIZE, (num_seqs,)))
    starts = []
    watch_steps(llm, lambda: starts.append(time.thread_time()))
    rng = random.Random(0)

    def make_prompts() -> list[list[int]]:
        return [rng.choices(range(VOCAB_SIZE), k=CONTEXT_LEN) for _ in range(num_seqs)]

    # Some sequences start earlier, so the last steps have fewer of them.
    num_chunks = num_seqs * CONTEXT_LEN // llm.config.max_num_batched_tokens + 1
    max_tokens = NUM_STEPS + 2 * num_chunks
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens)
    llm.generate(make_prompts(), params, use_tqdm=False)
    ends = starts[-num_chunks - NUM_STEPS : -num_chunks]
    steps = [1e6 * (end - start) for start, end in pairwise(ends)]
    median = statistics.median(steps)
    seconds = time_parts(llm, time.thread_time)
    llm.generate(make_prompts(), params, use_tqdm=False)  # not those in the prefix cache
    parts = {}
    for name, values in seconds.items():
        parts[name] = 1e6 * statistics.median(values[-num_chunks - NUM_STEPS : -num_chunks])
    title = f"host time of a decode step of {num_seqs} sequences, blocks of {block_size}"
    shown = ", ".join([f"{name} {us:.0f}" for name, us in parts.items()])
    print(f"{title}: {median:.0f} us ({shown})", flush=True)
    described = {"measured": title, "hardware": describe_hardware(torch.device("cpu"))}
    print(json.dumps({**described, "host_us": median, "parts_us": parts}))
    llm.exit()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in sys.argv[1:]:
        for size in BLOCK_SIZES:
            measure(int(number), size)
