"""How one request wants its tokens chosen and when it ends. Checked when made, immutable afterwards."""

from dataclasses import dataclass, fields

from nanovllm.checks import check_bool, check_int, check_number

# Fields of the interface that the engine does not act on yet: any value but the default is refused.
_NOT_BUILT = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "stop", "stop_token_ids", "logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request. Raises ValueError or TypeError, naming the field.

    Tokens are drawn from softmax(logits / temperature), cut by top-k, then top-p, then min-p; temperature 0 is greedy.
    """

    n: int = 1
    temperature: float = 1.0
    """>= 0; 0 takes the most probable token."""
    top_p: float = 1.0
    """(0, 1]: the smallest set of tokens whose probability reaches top_p; the token that crosses it stays."""
    top_k: int = -1
    """The k most probable tokens; -1: all."""
    min_p: float = 0.0
    """[0, 1]: tokens at least min_p times as probable as the most probable one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 64
    """Generated tokens at most; a sequence that reaches the engine's max_model_len ends sooner."""
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    """The same seed draws the same tokens, whatever else is in the batch. None: the engine's seed and the request's id."""
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_int("top_k", self.top_k, -1)
        if self.top_k == 0:
            raise ValueError("top_k must be -1 (off) or at least 1, not 0")
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        check_int("seed", self.seed, 0, optional=True)
        for field in fields(self):
            if field.name in _NOT_BUILT and getattr(self, field.name) != field.default:
                raise ValueError(f"{field.name} is not built yet: only its default, {field.default!r}, is")
