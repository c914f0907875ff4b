"""The engine: requests in, one step at a time, results out.

    add_request -> Sequence -> Scheduler.schedule -> ModelRunner.run -> Scheduler.postprocess -> mailbox -> step

Every sequence has a mailbox, a dict that remembers which sequences have news: the engine's own, emptied by `step`, or
that of the `generate` or `stream` call that waits for it. So callers can share an engine and miss nothing.
"""

import operator
import struct
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash

from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.models import read_spec
from nanovllm.models.checkpoint import find_checkpoint, read_config, read_eos_token_ids, read_tokenizer
from nanovllm.models.weights import find_dtype
from nanovllm.outputs import Detokenizer, RequestOutput, Stats
from nanovllm.sampling_params import SamplingParams

Prompt = str | list[int]
Mailbox = dict[Sequence, None]
Engine = TypeVar("Engine", bound="LLMEngine")


class Request(NamedTuple):
    """A checked prompt and its params; `params.n` sequences come of it."""

    token_ids: list[int]
    params: SamplingParams


class LLMEngine:
    """Serves one model. `model` is a checkpoint directory or a Hub id; `options` are the fields of `Config`."""

    def __init__(self, model: str, **options: Any) -> None:
        self.config = config = Config.from_options(model, options)
        directory = find_checkpoint(config.model)
        hf_config = read_config(directory)
        if config.dtype != "auto":
            dtype = getattr(torch, config.dtype)
        elif config.load_format == "dummy":
            dtype = hf_config.dtype or torch.float32
        else:
            dtype = hf_config.dtype or find_dtype(directory)
        spec = read_spec(hf_config, dtype)
        self.tokenizer = read_tokenizer(directory)
        self.eos_token_ids = read_eos_token_ids(directory, hf_config, self.tokenizer)
        self.model_runner: ModelRunner | None = ModelRunner(config, spec, directory)
        self.vocab_size = spec.vocab_size
        self.max_model_len = self.model_runner.max_model_len
        self.scheduler = Scheduler(
            BlockManager(self.model_runner.num_blocks, self.model_runner.block_size, config.enable_prefix_caching),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.enable_chunked_prefill,
        )
        self.sequences: dict[int, Sequence] = {}  # unfinished ones, oldest first
        self.sample_ids: dict[int, range] = {}  # of requests with n > 1: first id -> all ids, until the last sample ends
        self.mailbox: Mailbox = {}
        self.num_sequences = 0

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a prompt and return its request id; with n > 1 that of the first sample, the others' follow.

        Raises ValueError or TypeError for a prompt that can never be served.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._add(self._check_request(prompt, params), self.mailbox)[0].seq_id

    def step(self) -> list[RequestOutput]:
        """Run one step; the requests that gained a token or ended since the last call, as they stand now."""
        self._advance()
        outputs = [self._output(seq) for seq in self.mailbox]
        self.mailbox.clear()
        return outputs

    def abort(self, request_id: int) -> None:
        """End a request, with all its samples, with finish_reason "abort". An unknown or ended one is left alone."""
        for seq_id in self.sample_ids.get(request_id, (request_id,)):
            if seq := self.sequences.get(seq_id):
                self.scheduler.abort(seq)
                self._report_end(seq)

    def is_finished(self) -> bool:
        """True if nothing waits, runs or is left for `step` to report, other than what the caller has aborted itself."""
        return not self.sequences and all(seq.finish_reason == "abort" for seq in self.mailbox)

    @property
    def stats(self) -> Stats:
        scheduler, block_manager = self.scheduler, self.scheduler.block_manager
        return Stats(
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_decode_tokens=scheduler.num_decode_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_free_blocks=len(block_manager.free_block_ids),
            num_blocks=block_manager.num_blocks,
        )

    def exit(self) -> None:
        """Give the model's and the cache's memory back. The engine serves nothing afterwards; a second call does nothing."""
        self.model_runner = None
        torch.cuda.empty_cache()  # does nothing where there is no GPU

    def __enter__(self: Engine) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.exit()

    def _check_request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """The request, if this engine can serve it."""
        if self.model_runner is None:
            raise RuntimeError("this engine has been shut down by exit()")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {params!r}")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer: use stop_token_ids instead of stop")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the checkpoint has no tokenizer: a prompt must be a list of token ids, not a str")
            prompt = self.tokenizer.encode(prompt)
        if not isinstance(prompt, (list, tuple)):
            raise TypeError(f"a prompt must be a str or a list of token ids, not {prompt!r}")
        if not prompt:
            raise ValueError("a prompt must have at least one token")
        try:
            prompt = list(map(operator.index, prompt))
        except TypeError as error:
            wrong = next(token_id for token_id in prompt if not hasattr(token_id, "__index__"))
            raise TypeError(f"a prompt's token ids must be ints, not {wrong!r}") from error
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.vocab_size}")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room to generate within max_model_len={self.max_model_len}"
            )
        if not self.config.enable_chunked_prefill and len(prompt) > self.config.max_num_batched_tokens:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens is above max_num_batched_tokens={self.config.max_num_batched_tokens}:"
                " raise that, or set enable_chunked_prefill"
            )
        return Request(prompt, params)

    def _add(self, request: Request, mailbox: Mailbox) -> list[Sequence]:
        """Queue the request's n sequences, all or none."""
        token_ids, params = request
        first_id = self.num_sequences
        stop_token_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_token_ids)}
        stop_token_ids = frozenset(token_id for token_id in stop_token_ids if token_id < self.vocab_size)
        max_num_tokens = min(len(token_ids) + params.max_tokens, self.max_model_len)
        seqs: list[Sequence] = []
        for sample_index in range(params.n):
            seq_id = self._next_id()
            if params.seed is None:
                seed = _derive_seed(self.config.seed, seq_id)
            else:
                seed = _derive_seed(params.seed, sample_index) if sample_index else params.seed
            seq = Sequence(seq_id, token_ids, params, seed, sample_index, stop_token_ids, max_num_tokens)
            seq.mailbox = mailbox
            if params.stop_strings:
                seq.detokenizer = Detokenizer(self.tokenizer, len(token_ids), params.stop_strings)
            seqs.append(seq)
        try:
            if params.n > 1:
                self.sample_ids[first_id] = range(first_id, first_id + params.n)
            for seq in seqs:
                self.sequences[seq.seq_id] = seq
                self.scheduler.add(seq)
        except BaseException:
            for seq in seqs:
                self.scheduler.waiting.pop(seq, None)
                self.sequences.pop(seq.seq_id, None)
            self.sample_ids.pop(first_id, None)
            raise
        return seqs

    def _next_id(self) -> int:
        self.num_sequences += 1
        return self.num_sequences - 1

    def _advance(self) -> None:
        """One step of whatever is queued; word of it goes to the mailboxes."""
        if self.model_runner is None:
            raise RuntimeError("this engine has been shut down by exit()")
        try:
            if seqs := self.scheduler.schedule():
                for seq in self.scheduler.postprocess(seqs, self.model_runner.run(seqs)):
                    if seq.finish_reason is None:
                        seq.mailbox[seq] = None
                    else:
                        self._report_end(seq)
        except BaseException:
            # Cut short anywhere, even by Ctrl-C: blocks may be published that were never written. Keep only the tokens.
            self.scheduler.reset(self.sequences.values())
            for seq in [seq for seq in self.sequences.values() if seq.is_finished]:
                self._report_end(seq)
            self.sample_ids = {first: ids for first, ids in self.sample_ids.items() if any(map(self.sequences.get, ids))}
            raise

    def _report_end(self, seq: Sequence) -> None:
        seq.mailbox[seq] = None
        del self.sequences[seq.seq_id]
        if seq.params.n > 1:
            first_id = seq.seq_id - seq.sample_index
            if not any(map(self.sequences.get, self.sample_ids.get(first_id, ()))):
                self.sample_ids.pop(first_id, None)

    def _output(self, seq: Sequence) -> RequestOutput:
        text = ""
        if self.tokenizer is not None:
            if seq.detokenizer is None:
                seq.detokenizer = Detokenizer(self.tokenizer, seq.num_prompt_tokens)
            text = seq.detokenizer.read(seq.token_ids, is_last=seq.is_finished)
        wants_logprobs = seq.params.logprobs is not None
        token_ids = seq.generated_token_ids
        return RequestOutput(
            request_id=seq.seq_id,
            sample_index=seq.sample_index,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            token_ids=token_ids,
            text=text,
            finish_reason=seq.finish_reason,
            logprobs=seq.logprobs[: len(token_ids)] if wants_logprobs else None,
            cumulative_logprob=sum(seq.cumulative_logprobs[len(token_ids) - 1 : len(token_ids)]) if wants_logprobs else None,
            num_cached_tokens=seq.num_cached_tokens or 0,
        )


def _derive_seed(seed: int, index: int) -> int:
    """The seed of a request without one (engine's seed, request's id) and of sample index > 0 (request's seed, index)."""
    return xxhash.xxh64_intdigest(struct.pack("<QQ", seed % 2**64, index))
