"""What most callers use: prompts in, answers out. `LLM` is the engine plus the loops that drive it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from numbers import Integral
from typing import Any

from tqdm import tqdm

from nanovllm.beam_search import Beam, BeamSearch
from nanovllm.checks import check_bool, check_int, check_number
from nanovllm.engine.llm_engine import LLMEngine, Mailbox, Prompt, Request
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import Detokenizer, RequestOutput
from nanovllm.sampling_params import SamplingParams

Params = SamplingParams | list[SamplingParams] | None
Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}


class LLM(LLMEngine):
    """An engine for one model.

    `model` is a Hugging Face checkpoint directory or a Hub id; `options` are the fields of `Config` (see the README).
    Raises ValueError or TypeError for options and checkpoints that cannot be served.
    """

    def generate(self, prompts: Prompt | list[Prompt], sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer one prompt (str or token ids) or a list of them, in their order, n samples of a prompt side by side.

        `sampling_params` is one for all or one each. Raises ValueError or TypeError, with nothing queued, if any
        prompt cannot be served. If it is interrupted, its requests are taken back.
        """
        requests = self._check_all(prompts, sampling_params)
        scheduler, start = self.scheduler, time.perf_counter()
        num_prefill_tokens, num_decode_tokens = scheduler.num_prefill_tokens, scheduler.num_decode_tokens
        bar = tqdm(total=sum(r.params.n for r in requests), unit="seq", miniters=0, mininterval=0.5, disable=not use_tqdm)
        with self._queued(requests) as (seqs, mailbox), bar:
            for num_finished in self._finish(seqs, mailbox):
                seconds = time.perf_counter() - start
                bar.set_postfix_str(
                    f"prefill {(scheduler.num_prefill_tokens - num_prefill_tokens) / seconds:.0f} tok/s,"
                    f" decode {(scheduler.num_decode_tokens - num_decode_tokens) / seconds:.0f} tok/s",
                    refresh=False,
                )
                bar.update(num_finished)
            return [self._output(seq) for seq in seqs]

    def stream(self, prompts: Prompt | list[Prompt], sampling_params: Params = None) -> Iterator[RequestOutput]:
        """Yield a request's output so far each time it gains a token; its `text` only ever grows.

        Prompts are checked now and queued when the first output is asked for. Leaving the loop takes them back.
        """
        return self._stream(self._check_all(prompts, sampling_params))

    def chat(
        self, messages: list[Message] | list[list[Message]], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, written as the checkpoint's chat template says."""
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, so no chat template: use generate with token ids")
        if not isinstance(messages, (list, tuple)):
            raise TypeError(f"messages must be a list of dicts, or a list of such lists, not {messages!r}")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            self.tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | list[Prompt],
        beam_width: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        ignore_eos: bool = False,
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
            with self._queued([Request(prefix, params) for prefix in prefixes]) as (seqs, mailbox):
                for _ in self._finish(seqs, mailbox):
                    pass
            num_cached_tokens = num_cached_tokens or [seq.num_cached_tokens or 0 for seq in seqs]
            logprobs = iter([seq.logprobs[0] for seq in seqs])
            for search in active:
                search.advance(list(islice(logprobs, len(search.running))))
        return [
            [self._beam_output(search, beam, num_cached) for beam in search.finished]
            for search, num_cached in zip(searches, num_cached_tokens)
        ]

    def _beam_output(self, search: BeamSearch, beam: Beam, num_cached_tokens: int) -> RequestOutput:
        text = "" if self.tokenizer is None else Detokenizer(self.tokenizer, 0).read(beam.token_ids, is_last=True)
        return RequestOutput(
            request_id=self._next_id(),
            sample_index=0,
            prompt_token_ids=search.prompt,
            token_ids=beam.token_ids,
            text=text,
            finish_reason="stop" if search.has_eos(beam) else "length",
            logprobs=beam.logprobs,
            cumulative_logprob=beam.cumulative_logprob,
            num_cached_tokens=num_cached_tokens,
        )

    def _finish(self, seqs: list[Sequence], mailbox: Mailbox) -> Iterator[int]:
        """Step until all of `seqs` have ended; yield after each step how many just did."""
        num_unfinished = len(seqs)
        while num_unfinished:
            self._advance()
            num_finished = sum(seq.is_finished for seq in mailbox)
            mailbox.clear()
            num_unfinished -= num_finished
            yield num_finished

    def _stream(self, requests: list[Request]) -> Iterator[RequestOutput]:
        with self._queued(requests) as (seqs, mailbox):
            num_unfinished = len(seqs)
            while num_unfinished:
                self._advance()
                while mailbox:  # may gain entries while the caller has the turn: it can abort, step, generate
                    seq = next(iter(mailbox))
                    del mailbox[seq]
                    num_unfinished -= seq.is_finished
                    yield self._output(seq)

    @contextmanager
    def _queued(self, requests: list[Request]) -> Iterator[tuple[list[Sequence], Mailbox]]:
        """Queue requests with a mailbox of their own; however the block is left, take back what is unfinished."""
        seqs: list[Sequence] = []
        mailbox: Mailbox = {}
        try:
            for request in requests:
                seqs += self._add(request, mailbox)
            yield seqs, mailbox
        finally:
            for seq in [seq for seq in self.sequences.values() if seq.mailbox is mailbox]:
                self.abort(seq.seq_id)

    def _check_all(self, prompts: Any, sampling_params: Params) -> list[Request]:
        if isinstance(prompts, str) or (isinstance(prompts, (list, tuple)) and prompts and isinstance(prompts[0], Integral)):
            prompts = [prompts]
        if not isinstance(prompts, (list, tuple)):
            raise TypeError(f"prompts must be a str, a list of token ids, or a list of these, not {prompts!r}")
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [SamplingParams() if sampling_params is None else sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
        return [self._check_request(prompt, params) for prompt, params in zip(prompts, sampling_params)]
