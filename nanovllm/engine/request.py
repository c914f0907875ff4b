"""A sequence with a text: what a caller is told of one sample.

A token exists once it is noted (`note`). A step that is cut short before leaves tokens that are not; `rewind` cuts them off, and
they come again, since noise is a function of seed and position.
"""

from copy import copy
from dataclasses import InitVar, dataclass

from transformers import PreTrainedTokenizerBase

from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import FinishReason, Logprobs, RequestOutput

Noted = tuple[int, FinishReason | None]  # what exists of a request: how many generated tokens, and its end
NOTHING: Noted = 0, None


@dataclass(eq=False)
class Request(Sequence):
    """One of the n samples of a request."""

    sample_index: int = 0
    tokenizer: InitVar[PreTrainedTokenizerBase | None] = None

    def __post_init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__post_init__()
        self.noted = NOTHING
        self.logprobs: list[dict[int, float]] = []  # per generated token, if they are asked for
        stop_strings = self.params.stop_strings
        # Up to the newest noted token.
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer, self.num_prompt_tokens, stop_strings)
        self.newest_detokenizer = self.detokenizer  # up to the newest token

    def check_end(self) -> FinishReason | None:
        """As a Sequence, and first whether the newest token completes a stop string: the text then ends before that."""
        if self.detokenizer is not None and self.detokenizer.stop_strings:
            self.newest_detokenizer = copy(self.detokenizer)
            if self.newest_detokenizer.meets_stop_string(self.token_ids, may_stop=len(self.token_ids) > self.min_num_tokens):
                return "stop"
        return super().check_end()

    def note(self, logprobs: Logprobs = None) -> None:
        """Record the new tokens, or the end. `logprobs` may have more rows than new tokens: those of a refused draft."""
        num_tokens = len(self.token_ids) - self.num_prompt_tokens
        if logprobs is not None:
            self.logprobs += filter(None, logprobs[: num_tokens - self.noted[0]])  # no token if the logits are NaN
        # Ctrl-C does not come between these two.
        self.detokenizer, self.noted = self.newest_detokenizer, (num_tokens, self.finish_reason)

    def rewind(self) -> None:
        """Cut off what is not noted."""
        num_tokens, self.finish_reason = self.noted
        del self.token_ids[self.num_prompt_tokens + num_tokens :]
        del self.logprobs[num_tokens:]
        self.newest_detokenizer = self.detokenizer

    def output(self) -> RequestOutput:
        """The request as it stands."""
        token_ids, is_last = self.token_ids[self.num_prompt_tokens :], self.finish_reason is not None
        logprobs = None if self.params.logprobs is None else list(self.logprobs)
        return RequestOutput(
            request_id=self.seq_id,
            sample_index=self.sample_index,
            prompt_token_ids=self.token_ids[: self.num_prompt_tokens],
            token_ids=token_ids,
            text="" if self.detokenizer is None else self.detokenizer.read(self.token_ids, is_last),
            finish_reason=self.finish_reason,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum((e[t] for e, t in zip(logprobs, token_ids)), 0.0),
            num_cached_tokens=self.num_cached_tokens or 0,
        )
