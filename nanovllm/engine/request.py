"""What a caller is told of one sequence: its text, its log probabilities, and that it has ended.

A token counts once it is noted here (`note`): from then on callers may have seen it. A step that is cut short before is
undone (`rewind`) and computed again, and since noise is a function of seed and position, with the same result.
"""

from copy import copy

from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import RequestOutput

News = dict["Request", None]  # requests of which somebody is still to be told, oldest news first


class Request:
    """One of the n samples of a request. `first_id` is the id of sample 0, `news` where the engine leaves word."""

    def __init__(self, seq: Sequence, first_id: int, sample_index: int, news: News, detokenizer: Detokenizer | None) -> None:
        self.seq = seq
        self.first_id = first_id
        self.sample_index = sample_index
        self.news = news
        self.detokenizer = detokenizer
        self.looks_for_stop_strings = bool(seq.params.stop_strings)
        self.num_tokens = len(seq.token_ids)  # that are noted
        self.is_finished = False
        self.text_state = copy(detokenizer) if self.looks_for_stop_strings else None
        self.logprobs: list[dict[int, float]] = []  # per generated token, if they are asked for
        self.cumulative_logprob = 0.0

    def note(self, logprobs: dict[int, float] | None) -> None:
        """Count what the last step has done to the sequence: a token, with its `logprobs` if these are asked for, or an end."""
        seq = self.seq
        if logprobs is not None and len(seq.token_ids) > self.num_tokens:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[seq.token_ids[-1]]
        text_state = copy(self.detokenizer) if self.looks_for_stop_strings else None
        # All or none, even if Ctrl-C comes here.
        self.num_tokens, self.is_finished, self.text_state = len(seq.token_ids), seq.finish_reason is not None, text_state

    def rewind(self) -> None:
        """Forget what a step that was cut short has done."""
        seq = self.seq
        del seq.token_ids[self.num_tokens :]
        if self.looks_for_stop_strings:  # in what is not noted yet
            self.detokenizer = copy(self.text_state)
        generated = seq.token_ids[seq.num_prompt_tokens :]
        del self.logprobs[len(generated) :]
        self.cumulative_logprob = sum((entry[token_id] for token_id, entry in zip(generated, self.logprobs)), 0.0)

    def meets_stop_string(self) -> bool:
        """Whether the newest token completes a stop string. Raises what the tokenizer raises."""
        seq = self.seq
        return self.detokenizer.meets_stop_string(seq.token_ids, may_stop=len(seq.token_ids) > seq.min_num_tokens)

    def output(self, text: str) -> RequestOutput:
        """The request as it stands."""
        seq = self.seq
        wants_logprobs = seq.params.logprobs is not None
        return RequestOutput(
            request_id=seq.seq_id,
            sample_index=self.sample_index,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            token_ids=seq.token_ids[seq.num_prompt_tokens :],
            text=text,
            finish_reason=seq.finish_reason,
            logprobs=list(self.logprobs) if wants_logprobs else None,
            cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
            num_cached_tokens=seq.num_cached_tokens or 0,
        )
