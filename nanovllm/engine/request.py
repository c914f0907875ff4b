"""A sequence with a text: what a caller is told of one sample.

A token exists once it is noted (`note`). A step that is cut short before leaves tokens that are not; `rewind` cuts them off, and
they come again, since noise is a function of seed and position.
"""

from copy import copy
from dataclasses import dataclass

from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import FinishReason, Logprobs, RequestOutput

Noted = tuple[int, FinishReason | None]  # what exists of a request: its tokens, and its end


@dataclass(eq=False)
class Request(Sequence):
    """One of the n samples of a request."""

    sample_index: int = 0
    detokenizer: Detokenizer | None = None  # up to the newest noted token

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noted: Noted = self.num_prompt_tokens, None
        self.logprobs: list[dict[int, float]] = []  # per generated token, if they are asked for
        self.has_stop_strings = bool(self.params.stop_strings)
        self.newest_detokenizer = self.detokenizer  # up to the newest token

    @property
    def has_ended(self) -> bool:
        """Whether the end is noted. (`is_finished` may be undone.)"""
        return self.noted[1] is not None

    def check_end(self) -> FinishReason | None:
        """As a Sequence, and first whether the newest token completes a stop string: the text then ends before that."""
        if self.has_stop_strings and self.detokenizer is not None:
            self.newest_detokenizer = copy(self.detokenizer)
            if self.newest_detokenizer.meets_stop_string(self.token_ids, may_stop=len(self.token_ids) > self.min_num_tokens):
                return "stop"
        return super().check_end()

    def note(self, logprobs: Logprobs = None) -> None:
        """Record the new tokens, or the end. `logprobs` may have more rows than new tokens: those of a refused draft."""
        num_tokens = len(self.token_ids)
        if logprobs is not None:
            new = logprobs[: num_tokens - self.noted[0]]  # no token if the logits are NaN
            self.logprobs += [entry for entry in new if entry is not None]
        # Ctrl-C does not come between these two.
        self.detokenizer, self.noted = self.newest_detokenizer, (num_tokens, self.finish_reason)

    def rewind(self) -> None:
        """Cut off what is not noted."""
        num_tokens, self.finish_reason = self.noted
        del self.token_ids[num_tokens:]
        del self.logprobs[num_tokens - self.num_prompt_tokens :]
        self.newest_detokenizer = self.detokenizer

    def output(self) -> RequestOutput:
        """The request as it stands."""
        text, token_ids = "", self.token_ids[self.num_prompt_tokens :]
        if self.detokenizer is not None:
            text = self.detokenizer.read(self.token_ids, is_last=self.is_finished)
        logprobs = None if self.params.logprobs is None else list(self.logprobs)
        return RequestOutput(
            request_id=self.seq_id,
            sample_index=self.sample_index,
            prompt_token_ids=self.token_ids[: self.num_prompt_tokens],
            token_ids=token_ids,
            text=text,
            finish_reason=self.finish_reason,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum((e[t] for e, t in zip(logprobs, token_ids)), 0.0),
            num_cached_tokens=self.num_cached_tokens or 0,
        )
