"""Tokenizes and checks prompts, and turns them into Requests, one for each of the n samples."""

from collections.abc import Callable, Sequence
from copy import copy
from itertools import count
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from nanovllm.config import Config
from nanovllm.engine.request import Inbox, Request
from nanovllm.layers.noise import derive_seed
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.prompt_encoder import PromptEncoder, PromptTooLong
from nanovllm.utils.checks import check_int, check_type, invalid

Prompt = str | list[int]
RequestFactory = Callable[..., Request]
# From the parameters that prompts share, and the number of their samples.
ChooseFactory = Callable[[SamplingParams, int], RequestFactory]


class PreparedPrompt(NamedTuple):
    """A prompt that is validated for this engine."""

    token_ids: list[int]
    params: SamplingParams
    factory: RequestFactory = Request


NEEDS_LLM = "needs nanovllm.LLM: LLMEngine alone does not serve it"


def choose_plain_factory(params: SamplingParams, num_samples: int) -> RequestFactory:
    """Choose for LLMEngine alone, which rejects parameters that need a feature of LLM."""
    if params.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", NEEDS_LLM)
    if params.structured_outputs is not None:
        raise invalid("structured_outputs", NEEDS_LLM)
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
        max_prompt_len: int | None,
        choose_factory: ChooseFactory,
    ) -> None:
        self.config = config
        self.max_prompt_len = max_prompt_len
        self.choose_factory = choose_factory
        self.tokenizer = tokenizer
        self.default_params = default_params
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.ids = count()  # ids of requests and of their samples
        self.encoder = PromptEncoder(tokenizer, vocab_size, max_model_len)

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
        all_token_ids = [self.encoder.encode(prompt) for prompt in prompts]
        for token_ids in all_token_ids:
            self._check_len(token_ids)
        # Once for all prompts, because compiling a grammar can take seconds.
        factory = self.choose_factory(params, len(prompts) * params.n)
        return [PreparedPrompt(ids, params, factory) for ids in all_token_ids]

    def _check_len(self, token_ids: list[int]) -> None:
        if self.max_prompt_len is not None and len(token_ids) > self.max_prompt_len:
            raise PromptTooLong(
                f"a prompt of {len(token_ids)} tokens exceeds"
                f" max_num_batched_tokens={self.max_prompt_len}: raise it, and kvcache_memory_bytes"
                " if the start has lowered it, or use a policy that splits prompts"
                " (policy='mixed', enable_chunked_prefill=True)"
            )

    def make_requests(
        self, prompts: list[PreparedPrompt], eos_token_ids: frozenset[int], inbox: Inbox
    ) -> list[Request]:
        """Make the samples of all prompts. `inbox` receives those with progress to report."""
        requests: list[Request] = []
        for token_ids, params, factory in prompts:
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
                seed = derive_seed(self.config.seed, seq_id)
                if params.seed is not None:
                    seed = derive_seed(params.seed, index)
                request = factory(
                    seq_id=seq_id,
                    token_ids=token_ids,
                    params=params,
                    seed=seed,
                    stop_token_ids=valid_ids,
                    max_model_len=self.max_model_len,
                    sample_index=index,
                    inbox=inbox,
                    detokenizer=copy(detokenizer),
                )
                requests.append(request)
        return requests
