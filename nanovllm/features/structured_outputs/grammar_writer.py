"""Writes constraints as grammars in llguidance's variant of Lark."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.features.structured_outputs.patterns import convert_pattern
from nanovllm.features.structured_outputs.schemas import write_schema
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.utils.checks import invalid, naming

# Whitespace between two tokens of JSON. It is limited, because small models would repeat it until
# max_tokens.
JSON_DEFAULTS: Any = {"whitespace_pattern": " "}
# The end of a grammar. Otherwise text that must come next may come only in tokens of llguidance's
# choice. The model would then not write what it writes without a grammar, even if that is allowed.
NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
# What a reasoning model writes after <think>: any text up to the first </think>, and blank lines.
REASONING = r"""
reasoning: REASONING /\n{0,2}/
REASONING: /(?s:.*)<\/think>/ & ~/(?s:.*)<\/think>(?s:.+)/
"""
EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


@contextmanager
def naming_outputs(name: str = "structured_outputs") -> Iterator[None]:
    """Turn what writing and compiling a grammar can raise into ValueErrors with `name`."""
    errors = (ValueError, TypeError, ArithmeticError, RecursionError)
    advice = "needs pip install 'nanovllm[structured]'"
    with naming(name, *errors), naming(advice, ImportError):
        yield


def make_grammar(outputs: StructuredOutputsParams) -> str:
    """Write `outputs` as a grammar."""
    return write_rules(outputs) + NO_FORCING


def write_rules(outputs: StructuredOutputsParams) -> str:
    if outputs.grammar is not None:
        if EBNF_RULE.search(outputs.grammar) is not None:
            raise invalid("grammar", "is EBNF (root ::= ...): write it in Lark, or use json")
        return outputs.grammar
    if outputs.regex is not None:
        return f"start: /(?:{convert_pattern(outputs.regex)})/"
    if outputs.choice is not None:
        texts = [json.dumps(text, ensure_ascii=False) for text in outputs.choice]
        # A terminal, because the parser's limits would allow only some thousand rules.
        return f"start: TEXT\nTEXT: {' | '.join(texts)}"
    schema = {"type": "object"} if outputs.json is None else outputs.json
    return f"start: %json {write_schema(schema, JSON_DEFAULTS)}"


def allow_reasoning(outputs: StructuredOutputsParams, is_open: bool) -> StructuredOutputsParams:
    """Let reasoning come before a constraint. `is_open` if the prompt has begun it with <think>."""
    with naming_outputs():
        rules = write_rules(outputs)
    start = "reasoning" if is_open else '("<think>" reasoning)?'
    # The rules come first, so that their lines keep their numbers.
    return StructuredOutputsParams(
        grammar=f"body: %lark {{ {rules}\n}}\nstart: {start} body{REASONING}"
    )
