"""Random engines with random requests, checked against each request alone on a plain engine.

This draws models, options and requests, and compares outputs. random_calls.py runs them.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any

import torch
from conftest import check_invariants, copy_tokenizer, list_ways
from families import make_family
from mtp_heads import add_head
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import POLICIES
from nanovllm.layers.embedding import Embedding
from nanovllm.utils.helpers import cdiv

VOCAB_SIZE = 805  # more logits than the tokenizer has tokens
MAX_MODEL_LEN = 64
MODELS = [
    "qwen2",
    "qwen3",
    "llama-2",
    "qwen3-moe",
    "phi4-mini",
    "smollm3",
    "qwen3-next-mixed",
    "qwen3.5",
    "qwen3.5-moe",
    "mistral-window",
    "gemma3",
]
WITH_HEADS = ["qwen2", "qwen3", "qwen3-moe", "qwen3-next-mixed", "qwen3.5", "qwen3.5-moe"]
WORDS = ["the cat ", "sat on ", "the mat. ", "1, 2, 3, ", "é", "日本", '{"a": ', "a b a b "]
GRAMMARS: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json": {"type": "array", "items": {"enum": ["red", "green", None]}, "maxItems": 3}},
    {"json_object": True},
    {"regex": "( the cat){1,4}[.!]"},
    {"choice": ["yes", "no", "yes and no"]},
    {"grammar": 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'},
]


def prefer_sum(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that depends on all tokens so far."""
    logits[sum(token_ids) % len(logits)] += 3.0
    return logits


PARAMS: dict[str, list[Any]] = {
    "n": [1, 1, 1, 2, 3],
    "temperature": [0.0, 0.0, 0.3, 1.0, 2.0],
    "top_p": [1.0, 1.0, 0.9, 0.5],
    "top_k": [-1, -1, 5, 20],
    "min_p": [0.0, 0.0, 0.1],
    "presence_penalty": [0.0, 0.0, 0.0, 1.0],
    "frequency_penalty": [0.0, 0.0, 0.0, -0.5, 0.7],
    "repetition_penalty": [1.0, 1.0, 1.0, 0.8, 1.3],
    "stop": [None, None, "e", ["th", " the", "zq"], ["."]],
    "ignore_eos": [False, True],
    "logprobs": [None, None, 0, 3],
    "prompt_logprobs": [None, None, None, 0, 2],
    "structured_outputs": [None, None, None, None, *GRAMMARS],
    "logits_processors": [None, None, [prefer_sum]],
}
TOLERANCE = 2e-3  # of log probabilities


class Models:
    """Checkpoints and plain engines, made when they are needed."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.find = cache(self._make)
        self.make_plain = cache(self._make_plain)

    def _make(self, name: str) -> Path:
        path = self.directory / name
        oracle = make_family(path, name, vocab_size=VOCAB_SIZE)
        if name in WITH_HEADS:
            add_head(path, oracle.model)
        copy_tokenizer(path)
        return path

    def _make_plain(self, name: str, quantization: str | None, is_shaken: bool = False) -> LLM:
        """An engine that runs one sequence at a time, without any optimization.

        If it `is_shaken`, its embeddings have relative errors that exceed those of rounding.
        """
        llm = LLM(
            self.find(name),
            quantization=quantization,
            enable_kernels=False,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
            kvcache_block_size=MAX_MODEL_LEN,
            num_kvcache_blocks=2,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=1,
        )
        if is_shaken:
            modules = llm.executor.worker.model.modules()
            embedding = next(module for module in modules if isinstance(module, Embedding))
            embedding.register_forward_hook(shake)
        return llm


def shake(module: object, args: object, output: torch.Tensor) -> torch.Tensor:
    return output * (1 + 1e-5 * torch.randn_like(output))


def draw_prompt(rng: random.Random, prefixes: list[list[int]]) -> Any:
    """Token ids or text, often with a prefix that others share."""
    if rng.random() < 0.3:
        return "".join(rng.choices(WORDS, k=rng.randint(1, 5)))
    prefix = rng.choice(prefixes)[: rng.choice([0, 3, 8, 16, 24])]
    tail = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 6))
    return (prefix + tail * rng.choice([1, 1, 3]))[: MAX_MODEL_LEN - 1]


def draw_params(rng: random.Random) -> SamplingParams:
    chosen = rng.sample(list(PARAMS), rng.randint(1, 6))
    params = {name: rng.choice(PARAMS[name]) for name in ["temperature", *chosen]}
    params["max_tokens"] = rng.choice([1, 2, 5, 9, 14, 20])
    if rng.random() < 0.2:
        params["min_tokens"] = rng.randint(0, params["max_tokens"])
    if rng.random() < 0.2:
        params["stop_token_ids"] = rng.sample(range(VOCAB_SIZE), 40)
    if rng.random() < 0.2:
        params["logit_bias"] = {rng.randrange(VOCAB_SIZE): rng.uniform(-9, 9) for _ in range(30)}
    return SamplingParams(**params, seed=rng.randrange(1000))


def draw_options(rng: random.Random) -> dict[str, Any]:
    policy = rng.choice(["mixed", *POLICIES])
    splits_prompts = POLICIES[policy].splits_prompts
    block_size = rng.choice([2, 3, 4, 8, 16])
    least = cdiv(MAX_MODEL_LEN, block_size)
    return {
        "kvcache_block_size": block_size,
        "num_kvcache_blocks": least + rng.choice([0, 1, least // 2, 2 * least, 4 * least]),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": rng.choice([1, 2, 3, 5, 8]),
        "max_num_batched_tokens": rng.choice(
            [2, 5, 9, 24, 64, 512] if splits_prompts else [64, 512]
        ),
        "policy": policy,
        "enable_prefix_caching": rng.random() < 0.7,
        "num_speculative_tokens": rng.choice([0, 0, 1, 2, 3, 4]),
        **rng.choice(list_ways()),
    }


def draw_store(rng: random.Random, folder: Path) -> dict[str, Any]:
    """A store of many blocks or of few, or a folder that engines share, with damaged files."""
    size = rng.choice([2**-13, 2**-10, 1.0])  # GiB
    kind = rng.choice(["none", "kv_offloading_size", "kv_cache_dir"])
    if kind == "kv_cache_dir":
        paths = sorted(folder.glob("*/*.kv"))
        for path in rng.sample(paths, len(paths) // 9):
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content[: rng.choice([None, len(content) // 2])])
        return {"kv_cache_dir": folder, "kv_cache_dir_size": size}
    return {kind: size} if kind != "none" else {}


class Case:
    """What a seed draws, and the outputs that are expected."""

    def __init__(self, models: Models, seed: int, max_ranks: int = 1) -> None:
        self.models = models
        self.rng = rng = random.Random(seed)
        self.model = rng.choice(MODELS)
        self.quantization = rng.choice([None, None, "int8", "int4"])
        self.options = draw_options(rng)
        num_ranks = rng.choices([1, 2], [49, 1])[0]  # processes are slow
        if self.quantization is None:  # groups of the tiny weights cannot be divided
            self.options["tensor_parallel_size"] = min(num_ranks, max_ranks)
        # The plain engine has the own class of the family.
        has_states = self.model.startswith(("qwen3.5", "qwen3-next"))
        if not has_states and num_ranks == 1 and rng.random() < 0.3:
            self.options["model_impl"] = "transformers"
        if self.options["enable_prefix_caching"] and num_ranks == 1:
            self.options |= draw_store(random.Random(seed), models.directory / "kv")
        if random.Random(seed).random() < 0.3:
            self.options["speculative_method"] = "prompt_lookup"
        prefixes = [rng.choices(range(VOCAB_SIZE), k=24) for _ in range(2)]
        prefixes.append(rng.choices(range(VOCAB_SIZE), k=4) * 6)
        self.jobs = [(draw_prompt(rng, prefixes), draw_params(rng)) for _ in range(5)]
        if num_ranks > 1:
            self.jobs = [(each, replace(p, logits_processors=None)) for each, p in self.jobs]
        self.expect = cache(self._expect)
        self.num_ambiguous = 0

    def make_llm(self, **options: Any) -> LLM:
        path = self.models.find(self.model)
        return LLM(path, quantization=self.quantization, **self.options, **options)

    def load_weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.models.find(self.model) / "model.safetensors")

    def generate(self, llm: LLM, job: int) -> list[Any]:
        return llm.generate(*self.jobs[job])

    def search(self, llm: LLM, job: int) -> list[Any]:
        prompt, _ = self.jobs[job]
        (beams,) = llm.beam_search([prompt], beam_width=3, max_tokens=4)
        for index, beam in enumerate(beams):
            beam["sample_index"] = index
        return beams

    def embed(self, prompts: list[Any], pooling: Any) -> list[Any]:
        """The vectors of prompts, on the plain engine."""
        return self.models.make_plain(self.model, self.quantization).embed(prompts, pooling)

    def _expect(self, ask: Callable[[LLM, int], list[Any]], job: int) -> list[Any]:
        """The outputs of `ask`, alone on the plain engine."""
        plain = self.models.make_plain(self.model, self.quantization)
        outputs = ask(plain, job)
        check_invariants(plain)
        assert plain.stats["num_free_blocks"] == plain.stats["num_blocks"]
        return outputs

    def check(self, outputs: list[Any], ask: Callable[[LLM, int], list[Any]], job: int) -> None:
        """Check outputs of a job. They may be unfinished."""
        expected = self.expect(ask, job)
        for output in outputs:
            problem = find_difference(output, expected[output["sample_index"]])
            if problem is None:
                continue
            assert self._is_ambiguous(ask, job), f"{problem}\n{self}\njob {job}: {self.jobs[job]}"
            self.num_ambiguous += 1

    def _is_ambiguous(self, ask: Callable[[LLM, int], list[Any]], job: int) -> bool:
        """Return whether rounding can change the tokens, because two scores are nearly equal."""
        shaken = self.models.make_plain(self.model, self.quantization, is_shaken=True)
        expected = [output["token_ids"] for output in self.expect(ask, job)]
        torch.manual_seed(0)
        for _ in range(20):
            outputs = ask(shaken, job)
            if [output["token_ids"] for output in outputs] != expected:
                return True
        return False

    def __repr__(self) -> str:
        return f"{self.model} {self.quantization} {self.options}"


def find_difference(output: Any, expected: Any) -> str | None:
    """Describe how an output differs from the expected one, or from the beginning of it."""
    is_whole = output["finish_reason"] not in (None, "abort")
    num_tokens = None if is_whole else len(output["token_ids"])
    if output["token_ids"] != expected["token_ids"][:num_tokens]:
        return f"token_ids: {output['token_ids']} instead of {expected['token_ids']}"
    for name in ("logprobs", "prompt_logprobs"):
        entries = output[name]
        others = expected[name]
        if (entries is None) != (others is None):
            return f"{name}: {entries} instead of {others}"
        if entries is not None and not are_close(
            entries, others[: None if is_whole else len(entries)]
        ):
            return f"{name}: {entries} instead of {others}"
    if is_whole:
        for name in ("text", "finish_reason"):
            if output[name] != expected[name]:
                return f"{name}: {output[name]!r} instead of {expected[name]!r}"
    elif output["finish_reason"] is None and not expected["text"].startswith(output["text"]):
        return f"text: {output['text']!r} instead of {expected['text']!r}"
    return None


def are_close(entries: list[Any], others: list[Any]) -> bool:
    """Compare log probabilities, but not which of two nearly equal tokens is in the top k."""
    if len(entries) != len(others):
        return False
    for entry, other in zip(entries, others):
        ours = sorted((entry or {}).values())
        theirs = sorted((other or {}).values())
        if len(ours) != len(theirs):
            return False
        if not all(isclose(*pair, rel_tol=0, abs_tol=TOLERANCE) for pair in zip(ours, theirs)):
            return False
    return True
