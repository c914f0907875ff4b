"""Tokens and log probabilities by name, as in OpenAI's API.

    text        " Hello 你"          of five tokens; the last three are the bytes of a character
    names       " Hello", " ", "", "", "你"      join to the text, unless a token is special
    offsets     0, 6, 7, 7, 7                    where each token begins in the text

A special token adds no text, and has its name instead. So have candidates that were not sampled.
"""

from typing import NamedTuple

from nanovllm.engine.outputs import RequestOutput
from nanovllm.text.vocabulary import Vocabulary

LEAST_LOGPROB = -9999.0  # stands for -inf, as in vLLM, because JSON has no infinity


class Token(NamedTuple):
    """A token of a choice."""

    token_id: int
    name: str
    offset: int
    candidates: dict[str, int]  # token ids by name
    logprobs: dict[str, float]  # of the candidates; empty for the first token of a prompt


def list_tokens(vocabulary: Vocabulary, output: RequestOutput, start: int) -> list[Token]:
    """Return the tokens of an output from index `start` on."""
    texts = output["token_texts"] or []
    entries = output["logprobs"] or []
    offset = sum(map(len, texts[:start]))
    tokens: list[Token] = []
    for token_id, text, entry in zip(output["token_ids"][start:], texts[start:], entries[start:]):
        name = text
        if not text and (vocabulary.tokenizer is None or token_id in vocabulary.added):
            name = vocabulary.name(token_id)
        token = Token(token_id, name, offset, {}, {})
        # The first token of a prompt has no entry.
        for candidate_id, logprob in (entry or {}).items():
            candidate = _name_candidate(vocabulary, candidate_id, token)
            token.candidates[candidate] = candidate_id
            token.logprobs[candidate] = max(logprob, LEAST_LOGPROB)
        tokens.append(token)
        offset += len(text)
    return tokens


def _name_candidate(vocabulary: Vocabulary, candidate_id: int, token: Token) -> str:
    """Return a name that no other candidate has.

    Different tokens can have equal names, such as "a" and its byte.
    """
    if candidate_id == token.token_id:
        return token.name
    name = vocabulary.name(candidate_id)
    if name == token.name or name in token.candidates:
        return f"token_id:{candidate_id}"
    return name
