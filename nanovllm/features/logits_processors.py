"""Python functions that change the logits of a request: SamplingParams(logits_processors=[f]).

f(token_ids, logits) receives the tokens so far, and returns the logits of the next one. It must
depend on its arguments only, because a step that is repeated calls it again, and a draft is
verified with the rows behind its tokens, of which some are rejected.
"""

from collections.abc import Sequence as Functions
from itertools import groupby

import torch
from torch import Tensor

from nanovllm.engine.feature import Feature
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import LogitsProcessor, SamplingParams
from nanovllm.utils.checks import invalid


class LogitsProcessors(Feature):
    """Calls the functions. Comes before constraints, which hold whatever a function does."""

    serves = "logits_processors"

    def start(self, engine: LLMEngine) -> bool:
        self.num_ranks = engine.config.tensor_parallel_size
        return super().start(engine)

    def prepare(self, params: SamplingParams, num_samples: int) -> dict[str, object]:
        if params.logits_processors and self.num_ranks > 1:
            raise invalid("logits_processors", "does not work with tensor_parallel_size > 1")
        return {}

    def processed(self, rows: list[Sequence], logits: Tensor) -> Tensor:
        if not any([seq.params.logits_processors for seq in rows]):
            return logits
        processed = logits.to(torch.float32, copy=True)
        end = 0
        for seq, group in groupby(rows):
            start = end
            end += len(list(group))
            functions = seq.params.logits_processors or ()
            for row in range(start, end if functions else start):
                num_tokens = len(seq.token_ids) - (end - 1 - row)  # the last ones can be a draft
                try:
                    processed[row] = process(seq.token_ids[:num_tokens], processed[row], functions)
                except Exception as error:  # of the caller's function
                    assert isinstance(seq, Request)
                    seq.failure = error
                    processed[row] = torch.nan  # ends this sequence with an error
        return processed


def process(token_ids: list[int], logits: Tensor, functions: Functions[LogitsProcessor]) -> Tensor:
    """Call all functions. Raises ValueError if one returns other logits than those of a row."""
    for function in functions:
        result = function(list(token_ids), logits.clone())
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            shape = getattr(result, "shape", type(result).__name__)
            raise ValueError(f"it returned {shape}, not logits of shape {list(logits.shape)}")
        if result.dtype != logits.dtype:
            raise ValueError(f"it returned logits of {result.dtype}, not of {logits.dtype}")
        logits = result
    return logits
