"""What most callers use: prompts in, answers out. `LLM` is the engine plus the loops that drive it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from numbers import Integral
from typing import Any

from tqdm import tqdm

from nanovllm.beam_search import Beam, BeamSearch
from nanovllm.checks import check_bool, check_int, check_number, check_text, naming
from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.llm_engine import CheckedPrompt, LLMEngine, Prompt
from nanovllm.engine.request import News, Request
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.transaction import for_one_thread
from nanovllm.outputs import RequestOutput, Stats
from nanovllm.sampling_params import SamplingParams

Prompts = Prompt | list[Prompt]
Params = SamplingParams | list[SamplingParams] | None
Message = dict[str, Any]  # {"role": "system" | "user" | "assistant", "content": a str, or [{"type": "text", "text": a str}, ...]}


class LLM(LLMEngine):
    """An engine for one model: LLM("Qwen/Qwen3-0.6B", max_model_len=2048). Its options are documented in `Config`."""

    @for_one_thread
    def generate(self, prompts: Prompts, sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer one prompt (str or token ids) or a list of them, in their order, n samples of a prompt side by side.

        `sampling_params` is one for all or one each. Raises ValueError or TypeError, with nothing queued, if any
        prompt cannot be served. If it is interrupted, its requests are taken back.
        """
        checked = self._check_all(prompts, sampling_params)
        bar = tqdm(total=sum(params.n for _, params in checked), unit="seq", miniters=0, mininterval=0.5, disable=not use_tqdm)
        with self._queued(checked) as (requests, news), bar:
            before, start = self.stats, time.perf_counter()
            for num_finished in self._finish(requests, news):
                if use_tqdm:
                    bar.set_postfix_str(self._rates(before, time.perf_counter() - start), refresh=False)
                    bar.update(num_finished)
            return self._tell(dict.fromkeys(requests))

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[RequestOutput]:
        """Yield a request's output so far each time it gains a token; its `text` only ever grows.

        Prompts are checked now and queued when the first output is asked for. Leaving the loop takes them back.
        """
        return self._stream(self._check_all(prompts, sampling_params))

    def chat(
        self, messages: list[Message] | list[list[Message]], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, written as the checkpoint's chat template says.

        A message's content is a str or, as OpenAI's clients send it, a list of parts, of which those of type "text" are served.
        """
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, so no chat template: use generate with token ids")
        if self.tokenizer.chat_template is None:
            raise ValueError("the checkpoint's tokenizer has no chat template: use generate with prompts of your own")
        if not isinstance(messages, (list, tuple)):
            raise TypeError(f"messages must be a list of dicts, or a list of such lists, not {messages!r}")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        for conversation in conversations:
            if not isinstance(conversation, (list, tuple)) or not all(isinstance(message, dict) for message in conversation):
                raise TypeError(f"a conversation must be a list of dicts with 'role' and 'content', not {conversation!r}")
        conversations = [[_join_parts(message) for message in conversation] for conversation in conversations]
        with naming("the checkpoint's chat template refuses these messages", Exception):  # it is code of the checkpoint's
            prompts = [
                self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
                for conversation in conversations
            ]
        return self.generate(prompts, sampling_params, use_tqdm)

    @for_one_thread
    def beam_search(
        self, prompts: Prompts, beam_width: int, max_tokens: int, length_penalty: float = 1.0, ignore_eos: bool = False
    ) -> list[list[RequestOutput]]:
        """For each prompt its `beam_width` best continuations, best first, by beam search as in transformers.

        They are ranked by cumulative_logprob / number of tokens ** length_penalty. Every step sends the beams through the
        engine as prompts of one token to generate; their common past is in the prefix cache.
        """
        check_int("beam_width", beam_width, 1)
        check_int("max_tokens", max_tokens, 1)
        check_number("length_penalty", length_penalty, -100.0, 100.0)
        check_bool("ignore_eos", ignore_eos)
        eos_token_ids = frozenset() if ignore_eos else self.eos_token_ids
        searches = [
            BeamSearch(prompt, beam_width, min(max_tokens, self.max_model_len - len(prompt)), length_penalty, eos_token_ids)
            for prompt, _ in self._check_all(prompts, None)
        ]
        num_cached_tokens: list[int] = []  # of the prompts, in the first step
        while active := [search for search in searches if search.running]:
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=active[0].num_candidates)
            prefixes = [search.prompt + beam.token_ids for search in active for beam in search.running]
            with self._queued([CheckedPrompt(prefix, params) for prefix in prefixes]) as (requests, news):
                for _ in self._finish(requests, news):
                    pass
            num_cached_tokens = num_cached_tokens or [request.seq.num_cached_tokens or 0 for request in requests]
            logprobs = iter([request.logprobs[0] if request.logprobs else {} for request in requests])
            for search in active:
                search.advance(list(islice(logprobs, len(search.running))))
        return [
            self._tell({self._beam_request(search, beam, num_cached): None for beam in search.finished})
            for search, num_cached in zip(searches, num_cached_tokens)
        ]

    def _beam_request(self, search: BeamSearch, beam: Beam, num_cached_tokens: int) -> Request:
        """A finished beam as a request of its own that has ended."""
        seq = Sequence(next(self._ids), search.prompt, SamplingParams(logprobs=0))
        seq.token_ids += beam.token_ids
        seq.num_cached_tokens, seq.finish_reason = num_cached_tokens, search.finish_reason(beam) or "error"
        detokenizer = Detokenizer(self.tokenizer, len(search.prompt)) if self.tokenizer is not None else None
        request = Request(seq, seq.seq_id, 0, {}, detokenizer)
        request.logprobs, request.cumulative_logprob = beam.logprobs, beam.cumulative_logprob
        request.note(None)
        return request

    def _rates(self, before: Stats, seconds: float) -> str:
        now = self.stats
        prefill, decode = ((now[name] - before[name]) / seconds for name in ("num_prefill_tokens", "num_decode_tokens"))
        return f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s"

    def _finish(self, requests: list[Request], news: News) -> Iterator[int]:
        """Step until all of `requests` have ended; yield after each step how many just did."""
        num_unfinished = len(requests)
        while num_unfinished:
            self._step()
            num_finished = self._count_ends(news)
            num_unfinished -= num_finished
            yield num_finished

    def _stream(self, prompts: list[CheckedPrompt]) -> Iterator[RequestOutput]:
        with self._queued(prompts) as (requests, news):
            num_unfinished = len(requests)
            while num_unfinished:
                self._step()
                for output in self._tell(news):
                    num_unfinished -= output["finish_reason"] is not None
                    yield output

    @contextmanager
    def _queued(self, prompts: list[CheckedPrompt]) -> Iterator[tuple[list[Request], News]]:
        """Queue prompts with a place of their own for news; however the block is left, take back what is unfinished."""
        requests: list[Request] = []
        news: News = {}
        try:
            self._queue(prompts, news, requests)
            yield requests, news
        finally:
            if unfinished := [request for request in requests if not request.is_finished]:
                self._abort(unfinished)

    def _check_all(self, prompts: Any, sampling_params: Params) -> list[CheckedPrompt]:
        if isinstance(prompts, str) or (isinstance(prompts, (list, tuple)) and prompts and isinstance(prompts[0], Integral)):
            prompts = [prompts]
        if not isinstance(prompts, (list, tuple)):
            raise TypeError(f"prompts must be a str, a list of token ids, or a list of these, not {prompts!r}")
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [SamplingParams() if sampling_params is None else sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
        return [self._check_prompt(prompt, params) for prompt, params in zip(prompts, sampling_params)]


def _join_parts(message: Message) -> Message:
    """The message, its content a single text: parts are joined by newlines, as vLLM joins them."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a part of a message must be {{'type': 'text', 'text': a str}}, not one of type {kind!r}")
        content = "\n".join(part["text"] for part in content)
    if isinstance(content, str):
        check_text("a message", content)
    return {**message, "content": content} if "content" in message else message
