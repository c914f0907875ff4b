"""Tokens and log probabilities as OpenAI's API writes them, by text, bytes and offset.

    text          " Hello 你"          of five tokens; the last three are the bytes of a character
    tokens        " Hello", " ", "", "", "你"      join to the text, unless a token is special
    text_offset   0, 6, 7, 7, 7                    where each token begins in the text
    bytes         20 48 .., 20, E4, BD, A0         join to the text's bytes

A special token adds no text, and has its name instead. So have candidates that were not sampled.
"""

from collections.abc import Sequence

from nanovllm.server.errors import JsonObject
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.vocabulary import Vocabulary

# For each token a dict from candidates to log probabilities, or None for the first of a prompt.
Entries = Sequence[dict[int, float] | None]
LEAST_LOGPROB = -9999.0  # stands for -inf, as in vLLM, because JSON has no infinity


class TokenTexts:
    """Describes the tokens of one choice, in order.

    A subclass has `write`, which returns the `logprobs` of an endpoint for more tokens.
    """

    def __init__(self, vocabulary: Vocabulary, prompt_token_ids: list[int]) -> None:
        """The tokens to be described follow `prompt_token_ids`."""
        self.vocabulary = vocabulary
        self.detokenizer: Detokenizer | None = None
        if vocabulary.tokenizer is not None:
            self.detokenizer = Detokenizer(vocabulary.tokenizer, prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.text = ""  # text of the tokens after the prompt, at whose end the next one begins

    def _take(self, token_id: int, is_last: bool) -> str:
        """Return the text that a token adds, or its name if it is special."""
        text = ""
        if self.detokenizer is not None:
            self.token_ids.append(token_id)
            whole = self.detokenizer.read(self.token_ids, is_last)
            text = whole[len(self.text) :]
            self.text = whole
        if not text and (self.detokenizer is None or token_id in self.vocabulary.added):
            return self.vocabulary.name(token_id)
        return text

    def _name_candidates(
        self, entry: dict[int, float] | None, token_id: int, token: str
    ) -> dict[str, float]:
        """The log probabilities of an entry by name. `token` is the name of the sampled token.

        Different tokens can have equal names, such as "a" and its byte. A name is given once.
        """
        names: dict[str, float] = {}
        for candidate_id, logprob in (entry or {}).items():
            name = token
            if candidate_id != token_id:
                name = self.vocabulary.name(candidate_id)
                if name == token or name in names:
                    name = f"token_id:{candidate_id}"
            names[name] = max(logprob, LEAST_LOGPROB)
        return names

    def _describe(self, token_id: int, name: str, logprob: float) -> JsonObject:
        token_bytes = list(self.vocabulary.read_bytes(token_id))
        return {"token": name, "logprob": logprob, "bytes": token_bytes}


class CompletionTexts(TokenTexts):
    """Writes lists with an item for each token."""

    def write(self, token_ids: list[int], entries: Entries, is_last: bool) -> JsonObject:
        found: JsonObject = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for index, (token_id, entry) in enumerate(zip(token_ids, entries), 1):
            found["text_offset"].append(len(self.text))
            token = self._take(token_id, is_last and index == len(token_ids))
            names = self._name_candidates(entry, token_id, token)
            found["tokens"].append(token)
            found["token_logprobs"].append(names.get(token))
            found["top_logprobs"].append(names or None)
        return found


class ChatTexts(TokenTexts):
    """Writes an object for each token, with `num_top` candidates beside it."""

    def __init__(
        self, vocabulary: Vocabulary, prompt_token_ids: list[int], num_top: int = 0
    ) -> None:
        super().__init__(vocabulary, prompt_token_ids)
        self.num_top = num_top

    def write(self, token_ids: list[int], entries: Entries, is_last: bool) -> JsonObject:
        content: list[JsonObject] = []
        for index, (token_id, entry) in enumerate(zip(token_ids, entries), 1):
            token = self._take(token_id, is_last and index == len(token_ids))
            names = self._name_candidates(entry, token_id, token)
            candidates = [
                self._describe(candidate_id, name, logprob)
                for candidate_id, (name, logprob) in zip(entry or (), names.items())
            ]
            described = self._describe(token_id, token, names[token])
            content.append({**described, "top_logprobs": candidates[: self.num_top]})
        return {"content": content}
