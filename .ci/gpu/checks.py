"""Checks that need no pytest, so that each of them can have a process of its own.

    checks.py machine                                what is installed, and its peak rates
    checks.py attend DTYPE HEAD_DIM GROUP [small]    Triton's attention against torch's
    checks.py tokens                                 equal tokens with and without kernels
    checks.py nccl                                   the same with one rank of NCCL

A failed check prints a line that begins with FAIL.
"""

import json
import sys
import time
from dataclasses import replace
from functools import partial

import torch
from attempts import attempt
from internals import (
    DEVICE,
    ON_GPU,
    Shape,
    check_attention,
    describe_hardware,
    disconnect,
    find_versions,
    measure_peak_rates,
    one_rank_with_collectives,
)

from nanovllm import DEMO_MODEL, LLM, SamplingParams

PACKAGES = ["torch", "triton", "transformers", "numpy", "pytest", "flash-attn"]
QUESTIONS = [
    "What is 12 + 30?",
    "What is 7 + 8?",
    "introduce yourself",
    "list all prime numbers within 100",
    "count from 3 to 17",
    "Who wrote Hamlet?",
]
MAX_TOKENS = 96 if ON_GPU else 24


def machine() -> bool:
    versions = find_versions(PACKAGES)
    rates = measure_peak_rates(DEVICE, torch.bfloat16)
    hardware = describe_hardware(DEVICE)
    print(f"ok   {hardware}, CUDA {torch.version.cuda}, {versions}")
    print(f"ceilings: {rates}")
    print(json.dumps({"hardware": hardware, "versions": versions, **rates._asdict()}, default=str))
    return True


def attend(dtype: str, head_dim: str, group: str, size: str = "full") -> bool:
    """Decodes, splits, prompts, chunks, drafts and windows, each with another batch."""
    num_kv_heads = 8 if size == "full" else 2
    shape = Shape(
        num_seqs=33,
        context_len=700,
        query_len=1,
        num_heads=num_kv_heads * int(group),
        num_kv_heads=num_kv_heads,
        head_dim=int(head_dim),
        block_size=16,
    )
    shapes = {
        "decodes": shape,
        "decode in splits": replace(shape, num_seqs=1, context_len=3000),
        "prompts": replace(shape, num_seqs=3, context_len=300, query_len=300),
        "chunks": replace(shape, num_seqs=2, context_len=1000, query_len=40, block_size=256),
        "drafts": replace(shape, num_seqs=9, context_len=530, query_len=5, block_size=32),
        "decodes in windows": replace(shape, num_seqs=5, context_len=3000, window=600),
        "chunks in windows": replace(shape, num_seqs=2, context_len=1000, query_len=300, window=60),
    }
    results = []
    for name, each in shapes.items():
        if size == "small":
            context_len = min(each.context_len, 90)
            query_len = min(each.query_len, 90)
            each = replace(each, num_seqs=2, context_len=context_len, query_len=query_len)

        title = f"{name} {dtype} head_dim {head_dim} group {group}"
        results.append(attempt(title, partial(describe_error, each, dtype)))
    return all(results)


def describe_error(shape: Shape, dtype: str) -> str:
    _, error = check_attention(shape, dtype)
    return f"error {error:.1e}"


def generate(is_connected: bool = False, **options) -> list[list[int]]:
    """The tokens of the demo model in float32: greedy ones, and sampled ones.

    With `is_connected`, the engine has a process group, which it leaves before it exits.
    """
    llm = LLM(
        DEMO_MODEL,
        dtype="float32",
        device=DEVICE.type,
        kvcache_block_size=16,
        num_kvcache_blocks=512,
        max_num_seqs=16,
        **options,
    )
    prompts = llm.encode_chats([[{"role": "user", "content": each}] for each in QUESTIONS])
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        SamplingParams(seed=7, top_p=0.95, max_tokens=MAX_TOKENS),
    ]
    outputs = []
    for params in kinds:
        outputs += llm.generate(prompts, params, use_tqdm=False)
    if is_connected:
        start = time.perf_counter()
        disconnect(llm)
        print(f"ok   the rank has left NCCL ({time.perf_counter() - start:.1f} s)", flush=True)
    llm.exit()
    return [output["token_ids"] for output in outputs]


def compare(expected: list[list[int]], **options) -> str:
    differing = []
    for index, (got, wanted) in enumerate(zip(generate(**options), expected, strict=True)):
        if got != wanted:
            differing.append(index)
    if differing:
        raise AssertionError(f"outputs {differing} of {len(expected)} differ")
    return f"{len(expected)} outputs equal"


def try_each(expected: list[list[int]], kinds: dict[str, dict], **options) -> bool:
    results = []
    for name, settings in kinds.items():
        results.append(attempt(name, partial(compare, expected, **settings, **options)))
    return all(results)


def tokens() -> bool:
    expected = generate(enable_kernels=False)
    kinds = {
        "kernels, eager": {"enforce_eager": True},
        "kernels, graphs": {},
        "kernels, graphs, prefill first": {"enable_chunked_prefill": False},
        "kernels, drafts": {"num_speculative_tokens": 4},
    }
    return try_each(expected, kinds)


def nccl() -> bool:
    """All-reduces and gathers through NCCL, also within graphs, and the abort at the end."""
    expected = generate()
    with one_rank_with_collectives():
        kinds = {"one rank, graphs": {}, "one rank, eager": {"enforce_eager": True}}
        return try_each(expected, kinds, is_connected=True)


if __name__ == "__main__":
    parts = {"machine": machine, "attend": attend, "tokens": tokens, "nccl": nccl}
    part, *arguments = sys.argv[1:]
    sys.exit(0 if parts[part](*arguments) else 1)
