"""Constrained decoding: the text of a request follows a JSON schema, a regex or a grammar.

A matcher of tokens says in each step which tokens may come next, and the logits of all others
become -inf:

    text so far     {"age": 4
    may come next   2    0}    ,   }        but not: x, EOS

A matcher has consumed the generated tokens of its sequence. After an interrupted step it starts
again with the committed ones. EOS may come when the text may end. grammars.py makes matchers.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.batch.packing import to_device
from nanovllm.engine.feature import Constraint
from nanovllm.engine.outputs import FinishReason
from nanovllm.engine.request import Request
from nanovllm.engine.sequence import Sequence


class GrammarConstraint(Constraint):
    """The grammar of a request, and where its text is in it."""

    def __init__(self, matcher: Any, compile_again: Callable[[], Any] | None) -> None:
        self.matcher = matcher  # llguidance's LLMatcher, whose lexer other requests may share
        self.compile_again = compile_again  # makes another matcher, None if this has been done
        self.consumed: list[int] = []

    def __copy__(self) -> "GrammarConstraint":
        return GrammarConstraint(self.matcher.deep_copy(), self.compile_again)

    def restart(self, token_ids: list[int]) -> None:
        self.matcher.reset()
        self.matcher.consume_tokens(token_ids)
        self.consumed = list(token_ids)

    def consume(self, token_id: int) -> FinishReason | None:
        self.consumed.append(token_id)
        self.matcher.consume_token(token_id)
        if self.matcher.is_error() and not self._recover():
            return "error"
        return "stop" if self.matcher.is_stopped() else None

    def _recover(self) -> bool:
        """Replace a matcher that has an error, once. Return whether the other one has none."""
        if self.compile_again is None:
            return False
        self.matcher = self.compile_again()
        self.compile_again = None
        self.matcher.consume_tokens(self.consumed)
        return not self.matcher.is_error()

    def explain_error(self) -> str | None:
        error = self.matcher.get_error()
        return f"llguidance ends its structured_outputs: {error}" if error else None

    def compute_masks(self, seq: Sequence, num_rows: int) -> list[np.ndarray]:
        """Compute the mask of each row of logits. All rows but the first follow a draft token."""
        mask = compute_mask(self.matcher)
        if self.matcher.is_error() and self._recover():
            mask = compute_mask(self.matcher)
        masks = [mask]
        is_banned = len(seq.token_ids) < seq.min_num_tokens
        if is_banned and seq.stop_token_ids.issuperset(list_tokens(masks[0])):
            # Only stop tokens may come. The text could neither go on nor end.
            seq.min_num_tokens = 0
        draft = seq.token_ids[len(seq.token_ids) - num_rows + 1 :]
        # A copy, because a draft token can exceed limits, and an error of a matcher is final.
        matcher = self.matcher.deep_copy() if draft else self.matcher
        for token_id in draft:
            # A draft token that must not come is rejected. Masks after it have no effect.
            matcher.try_consume_tokens([token_id])
            masks.append(compute_mask(matcher))
        return masks


def compute_mask(matcher: Any) -> np.ndarray:
    """The tokens that may come next, one bit for each. None of them after an error."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.zeros_like(mask) if matcher.is_error() else mask


def list_tokens(mask: np.ndarray) -> list[int]:
    """The tokens that a mask allows."""
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def apply_grammars(rows: list[Sequence], logits: Tensor) -> Tensor:
    """Let sequences with a grammar sample only what may come next. Each row has a sequence.

    A row that is all -inf then becomes NaN, which ends its sequence with an error: no token is
    allowed, or a logits processor has excluded those that are.
    """
    masks: list[np.ndarray] = []  # computed while a GPU still computes the logits
    indices: list[int] = []
    end = 0
    for seq, group in groupby(rows):
        start = end
        end += len(list(group))
        constraint = seq.constraint if isinstance(seq, Request) else None
        if isinstance(constraint, GrammarConstraint):
            masks += constraint.compute_masks(seq, end - start)
            indices += range(start, end)
    if not masks:
        return logits
    device = logits.device
    masked_rows = to_device(np.array(indices), device)
    bits = np.unpackbits(np.array(masks), axis=1, bitorder="little")
    is_allowed = to_device(bits.view(np.bool_), device)[:, : logits.shape[1]]
    masked = logits[masked_rows].masked_fill(~is_allowed, -torch.inf)
    masked.masked_fill_((masked == -torch.inf).all(-1, keepdim=True), torch.nan)
    return logits.index_copy(0, masked_rows, masked)
