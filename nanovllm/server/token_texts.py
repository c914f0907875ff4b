"""Tokens and log probabilities as OpenAI's API writes them, by text, bytes and offset.

    text          " Hello 你"          of five tokens; the last three are the bytes of a character
    tokens        " Hello", " ", "", "", "你"      join to the text, unless a token is special
    text_offset   0, 6, 7, 7, 7                    where each token begins in the text
    bytes         20 48 .., 20, E4, BD, A0         join to the text's bytes

A special token adds no text, and has its name instead. So have candidates that were not sampled.
"""

from collections.abc import Iterable

from nanovllm.server.errors import JsonObject
from nanovllm.text.vocabulary import Vocabulary

Entry = dict[int, float] | None  # log probabilities of candidates; the first of a prompt has none
TokenEntry = tuple[int, str, Entry]  # a token, the text that it adds, and its entry
LEAST_LOGPROB = -9999.0  # stands for -inf, as in vLLM, because JSON has no infinity


def write_completion_tokens(
    vocabulary: Vocabulary, tokens: Iterable[TokenEntry], offset: int
) -> JsonObject:
    """Write lists with an item for each token. The first one begins at `offset` of the text."""
    found: JsonObject = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, text, entry in tokens:
        name = _name(vocabulary, token_id, text)
        logprobs = _name_candidates(vocabulary, entry, token_id, name)
        found["tokens"].append(name)
        found["token_logprobs"].append(logprobs.get(name))
        found["top_logprobs"].append(logprobs or None)
        found["text_offset"].append(offset)
        offset += len(text)
    return found


def write_chat_tokens(
    vocabulary: Vocabulary, tokens: Iterable[TokenEntry], num_top: int
) -> JsonObject:
    """Write an object for each token, with `num_top` candidates beside it."""

    def describe(token_id: int, name: str, logprob: float) -> JsonObject:
        token_bytes = list(vocabulary.read_bytes(token_id))
        return {"token": name, "logprob": logprob, "bytes": token_bytes}

    content: list[JsonObject] = []
    for token_id, text, entry in tokens:
        name = _name(vocabulary, token_id, text)
        logprobs = _name_candidates(vocabulary, entry, token_id, name)
        candidates = [
            describe(candidate_id, candidate, logprob)
            for candidate_id, (candidate, logprob) in zip(entry or (), logprobs.items())
        ]
        described = describe(token_id, name, logprobs[name])
        content.append({**described, "top_logprobs": candidates[:num_top]})
    return {"content": content}


def _name(vocabulary: Vocabulary, token_id: int, text: str) -> str:
    """Return the text that a token adds, or its name if it is special."""
    if not text and (vocabulary.tokenizer is None or token_id in vocabulary.added):
        return vocabulary.name(token_id)
    return text


def _name_candidates(
    vocabulary: Vocabulary, entry: Entry, token_id: int, token: str
) -> dict[str, float]:
    """Return the log probabilities of an entry by name. `token` is the name of the sampled token.

    Different tokens can have equal names, such as "a" and its byte. A name is given once.
    """
    names: dict[str, float] = {}
    for candidate_id, logprob in (entry or {}).items():
        name = token
        if candidate_id != token_id:
            name = vocabulary.name(candidate_id)
            if name == token or name in names:
                name = f"token_id:{candidate_id}"
        names[name] = max(logprob, LEAST_LOGPROB)
    return names
