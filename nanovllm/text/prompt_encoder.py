"""Turns prompts into token ids, and rejects those that no engine of this size can serve."""

import operator
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from nanovllm.text.foreign_code import call_foreign
from nanovllm.utils.checks import check_number, check_type, naming


class PromptTooLong(ValueError):
    """A prompt has more tokens than this engine can serve."""


class PromptEncoder:
    """Encodes prompts for one vocabulary, and rejects those that are too long."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        max_model_len: int,
        max_step_len: int | None = None,
    ) -> None:
        """`max_step_len` is the limit for prompts that must fit in one step."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.max_step_len = max_step_len
        self.max_chars = 0
        if tokenizer is not None:
            self.max_chars = max_model_len * count_chars_per_token(tokenizer)

    def encode(self, prompt: Any, num_new_tokens: int = 1) -> list[int]:
        """Return the token ids of a prompt, which is a text or token ids.

        There must be room for `num_new_tokens` after it.

        Raises ValueError or TypeError for what can never be served.
        """
        if isinstance(prompt, str):
            prompt = self.tokenize(prompt)
        check_type("a prompt", prompt, (list, tuple), "a str or a list of token ids")
        if len(prompt) + num_new_tokens > self.max_model_len:  # before a pass over all of them
            excess = "leave no room for output within" if num_new_tokens else "exceed"
            raise self._too_long(f"{len(prompt)} tokens, which {excess}")
        if self.max_step_len is not None and len(prompt) > self.max_step_len:
            raise PromptTooLong(
                f"a prompt of {len(prompt)} tokens exceeds"
                f" max_num_batched_tokens={self.max_step_len}: raise it, and kvcache_memory_bytes"
                " if the start has lowered it, or use a policy that splits prompts"
                " (policy='mixed', enable_chunked_prefill=True)"
            )
        if bool in map(type, prompt):
            raise TypeError("each token id of a prompt must be an int, not a bool")
        with naming("a prompt must be a str or a list of token ids", TypeError, kind=TypeError):
            token_ids = [operator.index(token_id) for token_id in prompt]
        if not token_ids:
            raise ValueError("a prompt must have at least one token")
        for token_id in (min(token_ids), max(token_ids)):
            check_number("each token id of a prompt", token_id, 0, self.vocab_size - 1)
        return token_ids

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises ValueError for a text that cannot fit, without tokenizing it, or that the tokenizer
        rejects.
        """
        if self.tokenizer is None:
            raise ValueError(
                "the checkpoint has no tokenizer.json or other tokenizer that is supported: add it,"
                " or let a prompt be token ids, not str"
            )
        if len(text) > self.max_chars:  # tokenizing 32 MB takes a minute and gigabytes
            raise self._too_long(f"{len(text)} characters, which exceed")
        problem = "the tokenizer cannot encode the prompt"
        with naming(problem, ValueError):
            text.encode()  # the error of a lone surrogate, which tokenizers do not describe
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return call_foreign(problem, encode)

    def _too_long(self, size: str) -> PromptTooLong:
        """Make an error that begins like OpenAI's, which clients recognize by its words."""
        return PromptTooLong(
            f"This model's maximum context length is {self.max_model_len} tokens. However, the"
            f" prompt has {size} max_model_len={self.max_model_len}: shorten it"
        )


def count_chars_per_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return for how many characters of a text a token stands at most.

    They are as many as its entry in the vocabulary has, or four times as many if the text is
    normalized, because Unicode composes up to four characters. Tokenizers that drop characters are
    the exception: their longer texts are rejected, too.
    """
    return 4 * max(map(len, tokenizer.get_vocab()))
