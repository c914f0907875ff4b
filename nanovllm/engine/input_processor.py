"""Tokenizes and checks prompts, and turns them into Requests, one for each of the n samples."""

import operator
import struct
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from itertools import count
from typing import NamedTuple

import xxhash
from transformers import PreTrainedTokenizerBase

from nanovllm.config import Config
from nanovllm.engine.request import Inbox, Request
from nanovllm.engine.scheduler import POLICIES
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.utils.checks import call_foreign, check_int, check_type, invalid, naming

Prompt = str | list[int]


MakeRequest = Callable[..., Request]
# From the parameters that prompts share, and the number of their samples.
ChooseRequest = Callable[[SamplingParams, int], MakeRequest]


class PreparedPrompt(NamedTuple):
    """A prompt that is validated for this engine."""

    token_ids: list[int]
    params: SamplingParams
    make_request: MakeRequest = Request


# A token stands for at most as many characters as its entry in the vocabulary has, or for four
# times as many if the text is normalized, because Unicode composes up to four characters. (A
# tokenizer that drops characters could fit a longer text, which is rejected all the same.)
_CHARS_PER_SIGN = 4


class PromptTooLong(ValueError):
    """A prompt has more tokens than this engine can serve."""


def needs_llm(name: str) -> Exception:
    """Make the error for an optional feature that LLM has and LLMEngine alone does not."""
    return invalid(name, "needs nanovllm.LLM: LLMEngine alone does not serve it")


def choose_plain_request(params: SamplingParams, num_samples: int) -> MakeRequest:
    """Choose for LLMEngine alone, which rejects parameters that need a feature of LLM."""
    if params.prompt_logprobs is not None:
        raise needs_llm("prompt_logprobs")
    if params.structured_outputs is not None:
        raise needs_llm("structured_outputs")
    return Request


class InputProcessor:
    """Prepares prompts for one engine: its tokenizer, its vocabulary and its limits."""

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase | None,
        default_params: SamplingParams,
        vocab_size: int,
        max_model_len: int,
        choose_request: ChooseRequest,
    ) -> None:
        self.config = config
        self.choose_request = choose_request
        self.tokenizer = tokenizer
        self.default_params = default_params
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.ids = count()  # ids of requests and of their samples
        self.max_chars = 0  # no prompt can have more
        if tokenizer is not None:
            longest = max(map(len, tokenizer.get_vocab()))
            self.max_chars = _CHARS_PER_SIGN * longest * max_model_len

    def prepare(
        self, prompts: Sequence[Prompt], params: SamplingParams | None
    ) -> list[PreparedPrompt]:
        """Check prompts and the parameters that they share.

        Raises ValueError or TypeError for what this engine can never serve.
        """
        if params is None:
            params = self.default_params
        check_type("sampling_params", params, (SamplingParams,), "SamplingParams")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: pass stop_token_ids instead of stop")
        for token_id in params.logit_bias or ():
            check_int("logit_bias", token_id, 0, self.vocab_size - 1)
        token_ids = [self._read_prompt(prompt) for prompt in prompts]
        # Once for all prompts, because compiling a grammar can take seconds.
        make_request = self.choose_request(params, len(prompts) * params.n)
        return [PreparedPrompt(ids, params, make_request) for ids in token_ids]

    def _read_prompt(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenize(prompt)
            self._check_len(len(token_ids))
        else:
            check_type("a prompt", prompt, (list, tuple), "a str or a list of token ids")
            self._check_len(len(prompt))  # before a pass over all of them
            if bool in map(type, prompt):
                raise TypeError("each token id of a prompt must be an int, not a bool")
            problem = "a prompt must be a str or a list of token ids"
            with naming(problem, TypeError, kind=TypeError):
                token_ids = [operator.index(token_id) for token_id in prompt]
        if not token_ids:
            raise ValueError("a prompt must have at least one token")
        check_int("each token id of a prompt", min(token_ids), 0, self.vocab_size - 1)
        check_int("each token id of a prompt", max(token_ids), 0, self.vocab_size - 1)
        return token_ids

    def _check_len(self, num_tokens: int) -> None:
        if num_tokens >= self.max_model_len:
            raise self._too_long(f"{num_tokens} tokens, which leave no room for output within")
        budget = self.config.max_num_batched_tokens
        if num_tokens > budget and not POLICIES[self.config.policy_name].splits_prompts:
            raise PromptTooLong(
                f"a prompt of {num_tokens} tokens exceeds max_num_batched_tokens={budget}:"
                " raise it, or set enable_chunked_prefill=True"
            )

    def _too_long(self, size: str) -> PromptTooLong:
        """Make an error that begins like OpenAI's, which clients recognize by its words."""
        return PromptTooLong(
            f"This model's maximum context length is {self.max_model_len} tokens. However, the"
            f" prompt has {size} max_model_len={self.max_model_len}: shorten it"
        )

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises ValueError for a text that cannot fit, without tokenizing it, or that the tokenizer
        rejects.
        """
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: a prompt must be token ids, not str")
        if len(text) > self.max_chars:  # tokenizing 32 MB takes a minute and gigabytes
            raise self._too_long(f"{len(text)} characters, which exceed")
        problem = "the tokenizer cannot encode the prompt"
        with naming(problem, ValueError):
            text.encode()  # the error of a lone surrogate, which tokenizers do not describe
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return call_foreign(problem, encode)

    def make_requests(
        self, prompts: list[PreparedPrompt], eos_token_ids: frozenset[int], inbox: Inbox
    ) -> list[Request]:
        """Make the samples of all prompts. `inbox` receives those with progress to report."""
        requests: list[Request] = []
        for token_ids, params, make_request in prompts:
            stop_token_ids = set(params.stop_token_ids or ())
            if params.structured_outputs is not None or not params.ignore_eos:
                stop_token_ids |= eos_token_ids
            # Ids above the vocabulary cannot be sampled, and have no logit to ban.
            valid_ids = frozenset(i for i in stop_token_ids if i < self.vocab_size)
            detokenizer: Detokenizer | None = None
            if self.tokenizer is not None:
                detokenizer = Detokenizer(self.tokenizer, token_ids, params.stop_strings)
            for index in range(params.n):
                seq_id = next(self.ids)
                # Without a seed of its own, a request has the engine's seed.
                seed = _derive_seed(self.config.seed, seq_id)
                if params.seed is not None:
                    seed = _derive_seed(params.seed, index)
                request = make_request(
                    seq_id=seq_id,
                    token_ids=token_ids,
                    params=params,
                    seed=seed,
                    stop_token_ids=valid_ids,
                    max_num_tokens=self.max_model_len,
                    sample_index=index,
                    inbox=inbox,
                    detokenizer=copy(detokenizer),
                )
                requests.append(request)
        return requests


def _derive_seed(seed: int, index: int) -> int:
    """A 64-bit hash of both numbers, so that different seeds or indices give different noise."""
    return xxhash.xxh64_intdigest(struct.pack("<QQ", seed % 2**64, index))
