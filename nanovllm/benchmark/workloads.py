"""The workloads of bench.py, by the names that users of other projects know, and their requests.

A workload is one or more command lines of bench.py. Options that follow --workload replace theirs.
Some command lines have the names of llama-bench:

    pp512           prompt processing: 512 tokens, up to the first token of the answer
    tg128           text generation: 128 tokens of one request, from an empty context
    tg128 @ d8192   the same after 8,192 tokens of context (llama-bench -d 8192)
"""

import random
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

# Checkpoints without weights, by name. Sizes that a config.json does not have are the defaults of
# transformers, which are those of a released model.
#   qwen3-moe            about 1/30 of Qwen3-30B-A3B: 1.0 billion parameters, 0.2 active per token
#   qwen3-0.2b           the dense model of the active size, as wide as the 8 experts of a token
#   qwen3.5-35b-a3b-4l   4 of the 40 layers of Qwen3.5-35B-A3B
SHAPES = {path.name: str(path) for path in sorted(Path(__file__).with_name("shapes").iterdir())}


class Workload(NamedTuple):
    reading: str  # which figure to look at
    lines: dict[str, str]  # the options of bench.py, by title


PP512 = "--input-len 512 512 --output-len 1 1 --temperature 0 --set max_num_seqs=1"
TG128 = "--input-len 1 1 --output-len 128 128 --temperature 0 --set max_num_seqs=1"
TG128_X16 = f"{TG128} --num-seqs 16 --set max_num_seqs=16"
THROUGHPUT = (
    "Look at output tok/s: the tokens generated per second, over a whole run with prefills."
)
WORKLOADS = {
    "quick": Workload(
        THROUGHPUT,
        {"": "--model small --num-seqs 32 --input-len 32 256 --output-len 32 256"},
    ),
    "nano-vllm": Workload(
        f"{THROUGHPUT}\nThe README of nano-vLLM has 1,434 for an RTX 4070 Laptop GPU.",
        {"": "--model qwen3-0.6b --num-seqs 256 --input-len 100 1024 --output-len 100 1024"},
    ),
    "llama-bench": Workload(
        "Look at prompt tok/s of pp512 and output tok/s of tg128, which llama-bench calls t/s.",
        {
            "pp512": f"--model qwen3-0.6b {PP512} --repeat 5",
            "tg128": f"--model qwen3-0.6b {TG128} --repeat 5",
        },
    ),
    "llama-bench-depth": Workload(
        "Look at output tok/s, and how it falls with the context. A layer with a window reads no\n"
        "more than the window.",
        {
            f"{model}, tg128 @ d{depth}": f"--model {model} {TG128} --cached-prefix {depth}"
            for model in ("qwen3-0.6b", "gemma-3-270m")
            for depth in (1024, 8192, 32000)
        },
    ),
    "moe": Workload(
        "Look at prompt tok/s of pp512 and output tok/s of tg128. A token uses as many weights of\n"
        "the mixture as of the dense model, but the tokens of a step use different experts.",
        {
            f"{model}, {title}": f"--model {model} {line} --repeat 3"
            for title, line in {"pp512": PP512, "tg128": TG128, "tg128 x 16": TG128_X16}.items()
            for model in ("qwen3-moe", "qwen3-0.2b")
        },
    ),
    "multi-turn": Workload(
        "Look at seconds: the time to first token. Each turn adds a message of 256 tokens to the\n"
        "conversation, and then an answer of 128. The prefix cache has the earlier turns.",
        {
            f"turn {turn}, prefix cache {cache}": (
                f"--model qwen3-0.6b --input-len 256 256 --output-len 1 1 --temperature 0"
                f" --cached-prefix {384 * (turn - 1)} --set max_num_seqs=1"
                f" --set enable_prefix_caching={cache}"
            )
            for turn in range(1, 6)
            for cache in (True, False)
        },
    ),
}


class Request(NamedTuple):
    prompt: list[int]
    num_tokens: int  # to generate
    temperature: float = 0.0

    def make_params(self, params_class: Any) -> Any:
        """Make the sampling parameters of an engine."""
        return params_class(
            temperature=self.temperature, max_tokens=self.num_tokens, ignore_eos=True
        )


def make_requests(args: Namespace, vocab_size: int, run: int) -> list[Request]:
    """Make the requests of one run. Runs have the same lengths and different token ids."""
    num_ids = min(10001, vocab_size)
    rng = random.Random(0)

    def draw_ids(length: int) -> list[int]:
        return [(rng.randrange(num_ids) + run) % num_ids for _ in range(length)]

    # Drawn in the order of nano-vLLM's bench.py, so that lengths equal those of its results.
    prompts = [draw_ids(rng.randint(*args.input_len)) for _ in range(args.num_seqs)]
    output_lens = [rng.randint(*args.output_len) for _ in prompts]
    prefix = draw_ids(args.cached_prefix + args.shared_prefix)
    return [
        Request(prefix + prompt, output_len, args.temperature)
        for prompt, output_len in zip(prompts, output_lens)
    ]
