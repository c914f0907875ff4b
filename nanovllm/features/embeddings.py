"""Embeddings: the hidden states of a prompt, pooled into one vector (`LLM.embed`).

    hidden states of a chunk   | 4  5  6  7 |      of a prompt of 8 tokens, whose last chunk it is
    pooling "last"                       7         that of the last token
    pooling "mean"               4  5  6  7        added to the sum of earlier chunks

Such a prompt is a sequence that ends with its prompt. For "last" its prefix can come from the
prefix cache. For "mean" it is computed whole, because a hit computes no hidden states, and again
after a preemption.
"""

import json
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.block_manager import Block
from nanovllm.engine.feature import Feature
from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Row, Step
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import naming

Pooling = Literal["last", "mean"]
# Names in the files of sentence-transformers.
_POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(eq=False)
class Pooled:
    """The hidden states of one prompt, pooled."""

    pooling: Pooling
    total: Tensor | float = 0.0  # float32 [hidden_size]
    num_tokens: int = 0

    def add(self, hidden: Tensor, position: int) -> None:
        """Add the hidden states [num_tokens, hidden_size] of tokens from `position` on."""
        if self.pooling == "last":
            self.total, self.num_tokens = hidden[-1].float(), 1
        elif position == self.num_tokens:  # those of an interrupted step may come twice
            self.total = self.total + hidden.float().sum(0)
            self.num_tokens += len(hidden)


def read_vectors(prompts: list[PreparedPrompt], normalize: bool) -> np.ndarray:
    """Return the vectors of prompts, float32 [num_prompts, hidden_size], in one copy from a GPU.

    Raises ValueError if one is not finite.
    """
    pooled: list[Pooled] = [prompt.fields["pooled"] for prompt in prompts]
    means = [cast(Tensor, each.total) / each.num_tokens for each in pooled]
    vectors = torch.stack(means).cpu().numpy()
    if normalize:
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        vectors = (vectors / np.maximum(lengths, 1e-300)).astype(np.float32)
    for index, vector in enumerate(vectors):
        if not np.isfinite(vector).all():
            raise ValueError(f"prompt {index} has no embedding: its hidden states are NaN")
    return vectors


class Embeddings(Feature):
    serves = "embeddings"
    wants_hidden = True

    def start(self, engine: LLMEngine) -> bool:
        self.has_head = engine.executor.worker.spec.has_head
        return super().start(engine)

    def reset(self) -> None:
        self.pooled: dict[Sequence, Pooled] = {}  # of running sequences that are embedded

    def prepare(self, params: SamplingParams, num_samples: int) -> dict[str, Any]:
        if not self.has_head:
            raise ValueError("the checkpoint has no output head, so it can only `embed` prompts")
        return {}

    def limit_prefix(self, seq: Sequence, prefix: list[Block]) -> list[Block]:
        pooled = cast(Request, seq).pooled
        return [] if pooled is not None and pooled.pooling == "mean" else prefix

    def admitted(self, seq: Sequence) -> None:
        pooled = cast(Request, seq).pooled
        if pooled is not None:
            pooled.total, pooled.num_tokens = 0.0, 0  # begin again after a preemption
            self.pooled[seq] = pooled

    def wanted_rows(self, step: Step) -> list[Row]:
        rows: list[Row] = []
        for seq, num_tokens in zip(step.seqs, step.num_tokens) if self.pooled else ():
            if seq in self.pooled:
                end = seq.num_computed_tokens + num_tokens
                first = seq.num_computed_tokens
                if self.pooled[seq].pooling == "last":
                    first = max(first, seq.num_prompt_tokens - 1)
                rows += [Row(seq, position) for position in range(first, end)]
        return rows

    def receive_rows(self, rows: list[Row], hidden: Tensor) -> None:
        start = 0
        for seq, group in groupby(rows, key=attrgetter("seq")):
            positions = [row.position for row in group]
            end = start + len(positions)
            if seq in self.pooled:
                self.pooled[seq].add(hidden[start:end], positions[0])
            start = end

    def releasing(self, seq: Sequence) -> None:
        self.pooled.pop(seq, None)


def prepare_embedding(token_ids: list[int], pooling: Pooling, salt: str | None) -> PreparedPrompt:
    params = SamplingParams(temperature=0.0, cache_salt=salt)
    return PreparedPrompt(token_ids, params, {"ends_with_prompt": True, "pooled": Pooled(pooling)})


def find_pooling(directory: Path) -> Pooling:
    """Return the pooling of a checkpoint of sentence-transformers. That of others is "last".

    Raises ValueError for what is not supported.
    """
    path = directory / "modules.json"
    if not path.exists():
        return "last"
    errors = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
    with naming(f"{path} does not say a pooling that is supported, so give `pooling`", *errors):
        return _read_pooling(path)


def _read_pooling(path: Path) -> Pooling:
    folders: dict[str, str] = {}
    for module in json.loads(path.read_bytes()):
        kind = module["type"].rpartition(".")[2]
        folders[kind] = module["path"]
        if kind not in _MODULES:
            raise ValueError(f"the module {kind}")
    if "Pooling" not in folders:
        return "last"
    config = json.loads((path.parent / folders["Pooling"] / "config.json").read_bytes())
    modes = {name.removeprefix("pooling_mode_") for name, value in config.items() if value is True}
    modes = (modes - {"include_prompt"}) or {config["pooling_mode"]}
    if len(modes) != 1:
        raise ValueError(f"several poolings {sorted(modes)}")
    return _POOLINGS[modes.pop()]
