"""What most callers use: prompts in, answers out. `LLM` is the engine plus the loops that drive it."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

from tqdm import tqdm

from nanovllm.beam_search import Beam, BeamSearch, search_together
from nanovllm.checks import check_bool, check_choice, check_int, check_number, check_text, check_type, naming
from nanovllm.detokenizer import Detokenizer
from nanovllm.engine.llm_engine import CheckedPrompt, LLMEngine, Prompt
from nanovllm.engine.request import NOTHING
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
Message = dict[str, Any]  # {"role": "system" | "user" | "assistant", "content": a str, or [{"type": "text", "text": a str}, ...]}


class LLM(LLMEngine):
    """An engine for one model: LLM("Qwen/Qwen3-0.6B", max_model_len=2048). Its options are documented in `Config`."""

    def generate(self, prompts: Prompts, sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer one prompt (str or token ids) or a list of them, in their order, n samples of a prompt side by side.

        `sampling_params` is one for all or one each. Raises ValueError or TypeError, with nothing queued, if any
        prompt cannot be served. If it is interrupted, its requests are taken back.
        """
        return self._generate(self._check_all(prompts, sampling_params), use_tqdm)

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
        check_type("messages", messages, (list, tuple), "a list of dicts, or a list of such lists")
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        prompts: list[Prompt] = []
        for conversation in conversations:
            with naming("these messages do not fit the checkpoint's chat template", Exception):  # it is code of the checkpoint's
                joined = [_join_parts(message) for message in conversation]
                text = str(self.tokenizer.apply_chat_template(joined, add_generation_prompt=True, tokenize=False))
            prompts.append(self.tokenizer.encode(check_text("a conversation", text), add_special_tokens=False))
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Prompts, beam_width: int, max_tokens: int, length_penalty: float = 1.0, ignore_eos: bool = False
    ) -> list[list[RequestOutput]]:
        """For each prompt its `beam_width` best continuations, best first, by beam search as in transformers.

        They are ranked by cumulative_logprob / number of tokens ** length_penalty.
        """
        check_int("beam_width", beam_width, 1)
        check_int("max_tokens", max_tokens, 1)
        check_number("length_penalty", length_penalty, -50.0, 50.0)
        check_bool("ignore_eos", ignore_eos)
        eos_token_ids = frozenset() if ignore_eos else self.eos_token_ids
        searches = [
            BeamSearch(prompt, beam_width, min(max_tokens, self.max_model_len - len(prompt)), length_penalty, eos_token_ids)
            for prompt, _ in self._check_all(prompts, None)
        ]
        first = search_together(searches, self._generate)
        return [[self._describe(beam, output) for beam in search.finished] for search, output in zip(searches, first)]

    def _describe(self, beam: Beam, first: RequestOutput) -> RequestOutput:
        """A finished beam as a request of its own. `first` is the output of the search's first step."""
        text = Detokenizer(self.tokenizer, 0).read(beam.token_ids, is_last=True) if self.tokenizer is not None else ""
        return cast(RequestOutput, {**first, **beam._asdict(), "request_id": next(self._ids), "text": text})

    def _generate(self, prompts: list[CheckedPrompt], use_tqdm: bool = False) -> list[RequestOutput]:
        with self._queued(prompts) as requests:
            before, start = self.scheduler.num_decode_tokens, time.perf_counter()
            with tqdm(total=len(requests), unit="seq", miniters=0, mininterval=0.5, disable=not use_tqdm) as bar:
                for request in requests:
                    while request.seq_id in self.requests:
                        self._alone(self._step)
                        if use_tqdm:
                            rate = (self.scheduler.num_decode_tokens - before) / (time.perf_counter() - start)
                            bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
                            bar.update(sum(each.seq_id not in self.requests for each in requests) - bar.n)
            return self._alone(lambda: [request.output() for request in requests])

    def _stream(self, prompts: list[CheckedPrompt]) -> Iterator[RequestOutput]:
        with self._queued(prompts) as requests:
            told = dict.fromkeys(requests, NOTHING)
            while told:
                yield from self._alone(self._step_and_tell, told)

    def _check_all(self, prompts: Any, sampling_params: Any) -> list[CheckedPrompt]:
        check_type("prompts", prompts, (str, list, tuple), "a str, a list of token ids, or a list of these")
        if isinstance(prompts, str) or (prompts and not isinstance(prompts[0], (str, list, tuple))):
            prompts = [prompts]
        if not isinstance(sampling_params, (list, tuple)):
            sampling_params = [SamplingParams() if sampling_params is None else sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(sampling_params)} sampling_params")
        return [self._check_prompt(prompt, params) for prompt, params in zip(prompts, sampling_params)]


def _join_parts(message: Message) -> Message:
    """The message, its content a single text: parts are joined by newlines, as vLLM joins them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        check_choice("the type of a message's part", part.get("type"), ("text",))
    return {**message, "content": "\n".join(part["text"] for part in content)}
