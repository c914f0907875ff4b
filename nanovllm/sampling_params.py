"""How one request wants its tokens chosen and when it ends. Checked when made, immutable afterwards."""

from dataclasses import dataclass

from nanovllm.checks import Checked, check_bool, check_int, check_ints, check_number, check_type, checked


@dataclass(frozen=True)
class SamplingParams(Checked):
    """Options of one request. Raises ValueError or TypeError, naming the field.

    The logits are changed by the penalties, then divided by the temperature; what top-k, then top-p, then min-p leave is
    drawn from. Sample i of n draws with a seed of its own, a function of `seed` and i.

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

    n: int = checked(1, check_int, minimum=1)
    temperature: float = checked(1.0, check_number, low=0.0, high=1e6)
    top_p: float = checked(1.0, check_number, low=0.0, high=1.0, open_low=True)
    top_k: int = checked(-1, check_int, minimum=-1)
    min_p: float = checked(0.0, check_number, low=0.0, high=1.0)
    presence_penalty: float = checked(0.0, check_number, low=-2.0, high=2.0)
    frequency_penalty: float = checked(0.0, check_number, low=-2.0, high=2.0)
    repetition_penalty: float = checked(1.0, check_number, low=1e-6, high=1e6)
    max_tokens: int = checked(64, check_int, minimum=1)
    min_tokens: int = checked(0, check_int, minimum=0)
    stop: str | list[str] | None = checked(None, check_type, types=(str, list, tuple), meaning="a str or a list of str")
    stop_token_ids: list[int] | None = checked(None, check_ints, minimum=0)
    ignore_eos: bool = checked(False, check_bool)
    seed: int | None = checked(None, check_int, minimum=0)
    logprobs: int | None = checked(None, check_int, minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k == 0:
            raise ValueError("top_k must be -1 (off) or at least 1, not 0")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        for text in self.stop_strings:
            if not check_type("stop", text, (str,), "a str or a list of str"):
                raise ValueError("stop must not hold an empty string")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def penalizes(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
