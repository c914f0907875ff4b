"""Tokenizes and checks prompts, and turns them into Requests, one for each of the n samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from nanovllm.engine.feature import Features, check_served
from nanovllm.engine.request import Inbox, Request
from nanovllm.layers.noise import derive_seed
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.prompt_encoder import PromptEncoder
from nanovllm.utils.checks import check_int, check_type

Prompt = str | list[int]


class PreparedPrompt(NamedTuple):
    """A prompt that is validated for this engine."""

    token_ids: list[int]
    params: SamplingParams
    fields: dict[str, Any]  # what features and callers add to its requests

    def with_fields(self, **fields: Any) -> "PreparedPrompt":
        return self._replace(fields={**self.fields, **fields})


@dataclass(eq=False)
class InputProcessor:
    """Prepares prompts for one engine: its tokenizer, its limits and its features."""

    encoder: PromptEncoder
    default_params: SamplingParams
    seed: int
    features: Features
    ids: Iterator[int] = field(default_factory=count)  # ids of requests and of their samples

    def prepare(
        self, prompts: Sequence[Prompt], params: SamplingParams | None
    ) -> list[PreparedPrompt]:
        """Check prompts and the parameters that they share.

        Raises ValueError or TypeError for what this engine can never serve.
        """
        if params is None:
            params = self.default_params
        check_type("sampling_params", params, (SamplingParams,), "SamplingParams")
        if params.stop and self.encoder.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: pass stop_token_ids instead of stop")
        for token_id in params.logit_bias or ():
            check_int("logit_bias", token_id, 0, self.encoder.vocab_size - 1)
        all_token_ids = [self.encoder.encode(prompt) for prompt in prompts]
        # Once for these prompts, because compiling a grammar can take seconds.
        fields = self.make_fields(params, len(prompts) * params.n)
        return [PreparedPrompt(ids, params, fields) for ids in all_token_ids]

    def make_fields(self, params: SamplingParams, num_samples: int) -> dict[str, Any]:
        """Collect what features add to the `num_samples` requests with these parameters."""
        check_served(params.needs, self.features)
        fields: dict[str, Any] = {}
        for feature in self.features.prepare:
            for name, value in feature.prepare(params, num_samples).items():
                if name in fields:
                    raise ValueError(f"two features give a request its {name}: use one of them")
                fields[name] = value
        return fields

    def make_requests(
        self, prompts: list[PreparedPrompt], eos_token_ids: frozenset[int], inbox: Inbox
    ) -> list[Request]:
        """Make the samples of all prompts. `inbox` receives those with progress to report."""
        requests: list[Request] = []
        for token_ids, params, fields in prompts:
            stop_token_ids = set(params.stop_token_ids or ())
            # A structured output ends at EOS, whatever ignore_eos is.
            if params.structured_outputs is not None or not params.ignore_eos:
                stop_token_ids |= eos_token_ids
            # Ids above the vocabulary cannot be sampled, and have no logit to ban.
            valid_ids = frozenset(i for i in stop_token_ids if i < self.encoder.vocab_size)
            if "detokenizer" not in fields:
                detokenizer = Detokenizer(self.encoder.tokenizer, token_ids)
                fields = {**fields, "detokenizer": detokenizer}
            for index in range(params.n):
                seq_id = next(self.ids)
                # Without a seed of its own, a request has the engine's seed.
                seed = derive_seed(self.seed, seq_id)
                if params.seed is not None:
                    seed = derive_seed(params.seed, index)
                request = Request(
                    seq_id=seq_id,
                    token_ids=token_ids,
                    params=params,
                    seed=seed,
                    stop_token_ids=valid_ids,
                    max_model_len=self.encoder.max_model_len,
                    sample_index=index,
                    inbox=inbox,
                    **fields,
                )
                requests.append(request)
        return requests
