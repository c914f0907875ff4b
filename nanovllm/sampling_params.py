"""How one request wants its tokens chosen and when it ends. Checked when made, immutable afterwards."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from nanovllm.checks import check_bool, check_int, check_ints, check_number

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "n": partial(check_int, minimum=1),
    "temperature": partial(check_number, low=0.0, high=1e6),
    "top_p": partial(check_number, low=0.0, high=1.0, open_low=True),
    "top_k": partial(check_int, minimum=-1),
    "min_p": partial(check_number, low=0.0, high=1.0),
    "presence_penalty": partial(check_number, low=-2.0, high=2.0),
    "frequency_penalty": partial(check_number, low=-2.0, high=2.0),
    "repetition_penalty": partial(check_number, low=1e-6, high=1e6),
    "max_tokens": partial(check_int, minimum=1),
    "min_tokens": partial(check_int, minimum=0),
    "stop_token_ids": partial(check_ints, minimum=0),
    "ignore_eos": check_bool,
    "seed": partial(check_int, minimum=0, optional=True),
    "logprobs": partial(check_int, minimum=0, optional=True),
}


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request. Raises ValueError or TypeError, naming the field.

    The logits are changed by the penalties, then divided by the temperature; what top-k, then top-p, then min-p leave is
    drawn from. Sample i of n draws with a seed of its own, a function of `seed` and i; that of sample 0 is `seed`.

    Args:
        n: Samples per prompt.
        temperature: [0, 1e6]; 0 takes the most probable token.
        top_p: (0, 1]: the smallest set of tokens whose probability reaches top_p; the token that crosses it stays.
        top_k: The k most probable tokens; -1: all.
        min_p: [0, 1]: tokens at least min_p times as probable as the most probable one.
        presence_penalty: [-2, 2], subtracted from the logit of every token that has been generated.
        frequency_penalty: [-2, 2], subtracted once for every time that the token has been generated.
        repetition_penalty: [1e-6, 1e6]: positive logits of tokens in the prompt or the generated text are divided by it,
            negative ones multiplied. The bounds keep the results finite in float32 for logits up to 1e32.
        max_tokens: Generated tokens at most; a sequence that reaches the engine's max_model_len ends sooner.
        min_tokens: The first min_tokens tokens end nothing: stop tokens are not drawn, stop strings not looked for.
        stop: Texts that end the sequence; the first one found is cut off, with all that follows.
        stop_token_ids: Tokens that end the sequence, as EOS does.
        ignore_eos: EOS ends nothing.
        seed: The same seed draws the same tokens, whatever else is in the batch. None: one made of the engine's seed and the
            request's id.
        logprobs: Report the model's own log probabilities of this many most probable tokens, and of the chosen one. None:
            of none.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 64
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.top_k == 0:
            raise ValueError("top_k must be -1 (off) or at least 1, not 0")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        if not all(isinstance(text, str) for text in self.stop_strings):
            raise TypeError(f"stop must be a str or a list of str, not {self.stop!r}")
        if "" in self.stop_strings:
            raise ValueError("stop must not hold an empty string")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return tuple(self.stop) if isinstance(self.stop, (list, tuple)) else (self.stop,)

    @property
    def penalizes(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
