"""The class for users. Give `LLM` prompts, and get their outputs."""

import time
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from threading import RLock
from typing import Any

import numpy as np
from tqdm import tqdm

from nanovllm.config import Config, takes
from nanovllm.engine.feature import Feature
from nanovllm.engine.input_processor import PreparedPrompt, Prompt
from nanovllm.engine.outputs import RequestOutput
from nanovllm.engine.request import Inbox
from nanovllm.features.beam_search import BeamSearch, make_outputs, search_together
from nanovllm.features.embeddings import (
    Embeddings,
    Pooling,
    find_pooling,
    prepare_embedding,
    read_vectors,
)
from nanovllm.features.kv_store.stored_prefixes import SavedPrefixes, StoredPrefixes
from nanovllm.features.logits_processors import LogitsProcessors
from nanovllm.features.prompt_logprobs import PromptScores
from nanovllm.features.recurrent_states import RecurrentStates
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.features.structured_outputs.grammars import StructuredOutputs
from nanovllm.features.weight_updates import POLL_INTERVAL, UpdatableEngine
from nanovllm.features.windows import Windows
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.chat_template import Message, Tool, render_chats
from nanovllm.text.vocabulary import Vocabulary
from nanovllm.utils.checks import (
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_type,
)

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None


class ProgressBar(tqdm):
    """A bar with a lock that is written in C, see features/thread_safety.py.

    tqdm's own lock is written in Python, so an interrupt can leave it held. All later calls of
    other threads would then wait for it.
    """

    _lock = RLock()


def list_prompts(prompts: Any) -> Sequence[Any]:
    """Return the prompts of a call, which has been given one prompt or a list of them."""
    expected = "a str, a list of token ids, or a list of these"
    check_type("prompts", prompts, (str, list, tuple), expected)
    is_list = isinstance(prompts, (list, tuple))
    are_many = is_list and all(isinstance(prompt, (str, list, tuple)) for prompt in prompts[:1])
    return prompts if are_many else [prompts]


class LLM(UpdatableEngine):
    """An engine for one model: LLM("Qwen/Qwen3-0.6B", max_model_len=2048).

    `Config` documents the options. Use it as a context manager, or call `exit()` at the end.
    """

    @takes(Config)
    def __init__(self, *args: Any, **options: Any) -> None:
        config = Config.from_options(*args, **options)
        # Stores extend a prefix, and others shorten it. Drafts change what a step computes, so
        # states and windows come after them.
        features: list[Feature] = [
            StoredPrefixes(),
            SavedPrefixes(),
            PromptScores(),
            LogitsProcessors(),
            Embeddings(),
            StructuredOutputs(),
            Drafts(),
            RecurrentStates(),
            Windows(),
        ]
        if config.trace is not None:
            from nanovllm.trace.timeline import TraceFile

            features.append(TraceFile(config.trace))
        try:
            super().__init__(config, features)
        except BaseException:
            if "executor" in vars(self):
                self.executor.stop("the engine did not start")
            for feature in features:
                feature.exit()
            raise
        self.vocabulary = Vocabulary(self.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that come without any: those of generation_config.json."""
        return self.input_processor.default_params

    def generate(
        self, prompts: Prompts, sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Generate for one prompt (str or token ids) or for a list of them.

        Outputs are in the order of the prompts, the n samples of a prompt side by side.
        `sampling_params` is one object for all prompts, or a list with one for each. None stands
        for `get_default_sampling_params()`. If the call is interrupted, its requests are cancelled.

        Raises ValueError or TypeError, and queues nothing, if any prompt cannot be served.
        """
        return self._generate(self.prepare_prompts(prompts, sampling_params), use_tqdm)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[RequestOutput]:
        """Yield the outputs of requests that gained tokens or finished. `text` is append-only.

        The prompts are checked now and queued when the first output is requested. Closing the
        iterator cancels their requests, also when it is garbage-collected.
        """
        return self._stream(self.prepare_prompts(prompts, sampling_params))

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        tools: list[Tool] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or of a list of them.

        The checkpoint's chat template turns a conversation into a prompt. Messages and tools are
        those of OpenAI's API. The content of a message is a str, or a list of parts, of which only
        type "text" is supported. Tool calls are in the text of the reply, as the model writes them.

        Args:
            tools: The functions that the model may call.
            chat_template_kwargs: Variables of the template, such as enable_thinking of Qwen3.
            add_generation_prompt: Let the prompt end with the start of an assistant's message.
            continue_final_message: Continue the last message instead, which needs
                add_generation_prompt=False.
        """
        expected = "a list of dicts, or a list of such lists"
        check_type("messages", messages, (list, tuple), expected)
        conversations: list[Any] = list(messages)
        if conversations and isinstance(conversations[0], dict):
            conversations = [conversations]
        prompts = self.encode_chats(
            conversations,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.generate(prompts, sampling_params, use_tqdm)

    def embed(
        self,
        prompts: Prompts,
        pooling: Pooling | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[np.ndarray]:
        """Return a vector of the hidden states of each prompt, float32 [hidden_size].

        `prompts` are those of `generate`. A prompt can have max_model_len tokens.

        Args:
            pooling: "last": the hidden state of the last token. "mean": the mean of all. None: what
                the checkpoint's modules.json says, or "last".
            normalize: Divide the vector by its length.

        Raises ValueError if the hidden states of a prompt are NaN or infinite.
        """
        check_bool("normalize", normalize)
        prepared = self.prepare_embeddings(prompts, pooling)
        outputs = self._generate(prepared, use_tqdm)
        for index, output in enumerate(outputs):
            if output["finish_reason"] != "length":
                reason = output["error"] or output["finish_reason"]
                raise ValueError(f"prompt {index} has no embedding: {reason}")
        return list(read_vectors(prepared, normalize)) if prepared else []

    def prepare_embeddings(
        self, prompts: Any, pooling: Any = None, cache_salt: Any = None
    ) -> list[PreparedPrompt]:
        """Tokenize and check prompts that are embedded."""
        self.executor.raise_if_stopped()
        if pooling is None:
            pooling = self.default_pooling
        check_choice("pooling", pooling, ("last", "mean"))
        encode = partial(self.input_processor.encoder.encode, num_new_tokens=0)
        all_token_ids = [encode(prompt) for prompt in list_prompts(prompts)]
        return [prepare_embedding(ids, pooling, cache_salt) for ids in all_token_ids]

    @cached_property
    def default_pooling(self) -> Pooling:
        return find_pooling(self.executor.worker.directory)

    def encode_chats(self, conversations: list[list[Message]], **options: Any) -> list[Prompt]:
        """Return the token ids of conversations. `options` are those of `chat`."""
        if self.tokenizer is None:
            raise ValueError(
                "the checkpoint has no tokenizer: pass token ids to generate instead of chat"
            )
        texts = render_chats(self.tokenizer, conversations, **options)
        tokenize = self.input_processor.encoder.tokenize
        return [tokenize(text, add_special_tokens=False) for text in texts]

    def beam_search(
        self,
        prompts: Prompts,
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
    ) -> list[list[RequestOutput]]:
        """Continue each prompt by beam search, with the results of transformers.

        Returns `beam_width` beams for each prompt, best first by cumulative_logprob / number of
        tokens ** length_penalty.
        """
        check_int("beam_width", beam_width, 1)
        check_int("max_tokens", max_tokens, 1)
        check_number("length_penalty", length_penalty, -50.0, 50.0)
        check_bool("ignore_eos", ignore_eos)
        eos_token_ids = frozenset() if ignore_eos else self.eos_token_ids
        searches: list[BeamSearch] = []
        # An output has the log probabilities of the beam's own tokens.
        for prompt in self.prepare_prompts(prompts, SamplingParams(logprobs=0)):
            limit = min(max_tokens, self.max_model_len - len(prompt.token_ids))
            searches.append(BeamSearch(prompt, beam_width, limit, length_penalty, eos_token_ids))
        self.executor.raise_if_stopped()
        search_together(searches, self._generate_awake)
        # Under the lock, because the ids of n samples are consecutive.
        make_requests = self.input_processor.make_requests
        return [self._take_turn(make_outputs, search, make_requests) for search in searches]

    def _generate_awake(self, prompts: list[PreparedPrompt]) -> list[RequestOutput]:
        """Generate for a search that is under way, after `wake_up` if the engine sleeps."""
        while True:
            try:
                return self._generate(prompts)
            except RuntimeError:
                if not self.is_sleeping:
                    raise
            time.sleep(POLL_INTERVAL)

    def prepare_prompts(self, prompts: Any, sampling_params: Any) -> list[PreparedPrompt]:
        """Tokenize and check prompts and their sampling_params, as given to `generate`."""
        prompts = list_prompts(prompts)
        prepare = self.input_processor.prepare
        if not isinstance(sampling_params, (list, tuple)):
            return prepare(prompts, sampling_params)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(sampling_params)} sampling_params:"
                " pass one for all prompts, or one for each"
            )
        prepared: list[PreparedPrompt] = []
        for prompt, params in zip(prompts, sampling_params):
            prepared += prepare([prompt], params)
        return prepared

    def _generate(
        self, prompts: list[PreparedPrompt], use_tqdm: bool = False
    ) -> list[RequestOutput]:
        inbox: Inbox = {}
        with self.queued(prompts, inbox) as requests:
            num_unfinished = len(requests)
            with ProgressBar(total=num_unfinished, unit="seq", disable=not use_tqdm) as progress:
                while num_unfinished > 0:
                    # Outputs would have all generated tokens, and only the last ones are needed.
                    self.step(inbox={})
                    while inbox:  # a step of another thread may be adding to it
                        request, _ = inbox.popitem()
                        if request.has_ended:
                            num_unfinished -= 1
                            progress.update()
            return [request.output() for request in requests]

    def _stream(self, prompts: list[PreparedPrompt]) -> Iterator[RequestOutput]:
        inbox: Inbox = {}
        with self.queued(prompts, inbox) as requests:
            num_unfinished = len(requests)
            while num_unfinished > 0:
                for output in self.step(inbox):
                    if output["finish_reason"] is not None:
                        num_unfinished -= 1
                    yield output
