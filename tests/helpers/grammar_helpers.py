"""Grammars compiled for tokens of one byte."""

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TOKENIZER = LLTokenizer("byte")


def compile_grammar(grammar):
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def allows(matcher, text):
    matcher.reset()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def match(grammar, texts):
    try:
        matcher = compile_grammar(grammar)
    except ValueError as error:
        assert re.search("NoExtension|Unsatisfiable", str(error)), "it matches no text"
        return [False] * len(texts)
    return [allows(matcher, text) for text in texts]
