"""Compiles JSON schemas, regexes and grammars, by llguidance, into matchers of tokens.

Grammars come from clients. A process of its own therefore compiles each grammar first, and finds
its errors (grammar_check.py). LIMITS bound what a step takes. A sample that exceeds them ends with
an error.

Matchers of the newest grammars are kept, and each request gets a copy. Copies share one lexer, and
the limit on its states. A sample that reaches it gets a matcher of its own, once, because the
states may be those of other samples.
"""

import re
import subprocess
import sys
from collections import OrderedDict
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from nanovllm.engine.feature import Feature
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.features.structured_outputs.grammar_writer import make_grammar, naming_outputs
from nanovllm.features.structured_outputs.masks import GrammarConstraint, apply_grammars
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.vocabulary import Vocabulary

CHECK_PROGRAM = str(Path(__file__).with_name("grammar_check.py"))
CPU_SECONDS = 2  # for the compilation of a grammar
LIMITS: Any = {"step_lexer_fuel": 50_000, "step_max_items": 50_000, "max_items_in_row": 10_000}
MAX_LEXER_STATES = 50_000
MAX_MATCHERS = 16  # the newest ones are kept
MAX_ERROR_CHARS = 300  # because llguidance's errors quote patterns
QUOTED = re.compile(r" *\d+ \| | *\^+ *$|<non-verbose/>")  # lines of an error


class StructuredOutputs(Feature):
    """Compiles the grammars of the requests of one engine, and applies them."""

    serves = "structured_outputs"

    def __init__(self) -> None:
        self.matchers = OrderedDict[str, Any]()  # grammar -> matcher, least recently used first
        self.lock = Lock()

    def start(self, engine: LLMEngine) -> bool:
        # Not the engine, because it would then refer to itself and outlive its last reference.
        self.tokenizer = engine.tokenizer
        self.vocab_size = engine.vocab_size
        self.eos_token_ids = engine.eos_token_ids
        return super().start(engine)

    def prepare(self, params: SamplingParams, num_samples: int) -> dict[str, Any]:
        """Compile the grammar of `params`, or copy its matcher.

        Raises ValueError for a grammar that is invalid, too complex, or that no text matches.
        """
        outputs: Any = params.structured_outputs
        if outputs is None or num_samples == 0:
            return {}
        with naming_outputs():
            grammar = make_grammar(outputs)
            matcher = self.matchers.get(grammar)
            if matcher is None:
                check_in_process(grammar)
                matcher = self._compile(grammar)
        with self.lock:
            self.matchers[grammar] = matcher
            self.matchers.move_to_end(grammar)
            if len(self.matchers) > MAX_MATCHERS:
                self.matchers.popitem(last=False)
            own = matcher.deep_copy()
        return {"constraint": GrammarConstraint(own, partial(self._compile_again, grammar))}

    def _compile_again(self, grammar: str) -> Any:
        with self.lock:
            self.matchers.pop(grammar, None)
        return self._compile(grammar)

    def processed(self, rows: list[Sequence], logits: Tensor) -> Tensor:
        return apply_grammars(rows, logits)

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self.guidance_tokenizer, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # the first one takes long
        if matcher.is_error():  # with LIMITS, or with the tokens of this model
            raise ValueError(shorten_error(matcher.get_error()))
        return matcher

    @cached_property
    def guidance_tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer")
        texts = TokenBytes(self.tokenizer, self.vocab_size, self.eos_token_ids)
        return LLTokenizer(TokenizerWrapper(texts), eos_token=sorted(self.eos_token_ids) or None)


class TokenBytes:
    """The bytes of all tokens, in the form that llguidance takes.

    llguidance's own reader of tokenizers does not let added tokens be text, such as Qwen's
    <tool_call>, and reads only some kinds of tokenizers.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        vocabulary = Vocabulary(tokenizer)
        # llguidance needs an EOS token. If there is none, it is the last one, without a logit.
        last_id = max(vocab_size, len(tokenizer))
        self.eos_token_id = min(eos_token_ids, default=last_id)
        self.tokens = [vocabulary.read_bytes(token_id) for token_id in range(last_id + 1)]
        padding = range(len(tokenizer), last_id + 1)
        self.special_token_ids = [*vocabulary.hidden_ids, *padding]

    def __call__(self, text: bytes) -> list[int]:
        """Not needed, see NO_FORCING."""
        return []


# Digest of a grammar that can be compiled without harm -> its error, "" if it is valid. Clients
# could prepare collisions of weaker hashes.
checked: dict[bytes, str] = {}
MAX_CHECKED = 1024
compiling: list[subprocess.Popen[bytes]] = []  # running processes


def check_in_process(grammar: str) -> None:
    """Raise ValueError for a grammar that is invalid, or could harm the engine.

    A process of its own compiles it first, in at most CPU_SECONDS.
    """
    text = grammar.encode()
    digest = sha256(text).digest()
    error = checked.get(digest)
    if error is None:
        command = [sys.executable, "-I", "-X", "utf8", CHECK_PROGRAM, str(CPU_SECONDS), *sys.path]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        ) as process:
            compiling.append(process)
            try:
                output, _ = process.communicate(text)
            finally:  # also after Ctrl-C
                process.kill()
                compiling.remove(process)
        if process.returncode != 0:
            problem = f"needs more than {CPU_SECONDS} seconds of CPU time, or nests too deeply"
            exit_code = f"(exit code {process.returncode})"
            raise ValueError(f"too complex to compile: {problem} {exit_code}: simplify it")
        error = checked[digest] = shorten_error(output.decode())
        if len(checked) > MAX_CHECKED:
            first, *_ = list(checked)  # a copy, because other threads add to it
            checked.pop(first, None)
    if error:
        raise ValueError(error)


def shorten_error(error: str) -> str:
    """Return llguidance's error without the lines of the grammar that it quotes."""
    lines = [line.strip() for line in error.splitlines() if not QUOTED.match(line)]
    text = " ".join(lines)[:MAX_ERROR_CHARS]
    if "NoExtension" in text:
        return "no text matches"
    return text and f"invalid or unsupported: {text}"
