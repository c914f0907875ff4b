"""Guesses a sequence's next tokens from its own: prompt lookup (Saxena 2023; LLMA, Yang et al. 2023).

    token_ids | the cat sat on the mat . the cat      the last two occurred before: "sat on the mat" may follow again

In code, in quotations, in answers that repeat the question, it often does. This module knows token ids and nothing else.
Whatever has `guess`, such as a small model, can take the place of PromptLookup: `Speculator.make_drafter` makes one per sequence.
"""

from dataclasses import dataclass, field
from typing import Protocol

_NEWS = 0.1  # weight of the newest judgement in what is known of a drafter


class Drafter(Protocol):
    def guess(self, num_tokens: int) -> list[int]:
        """What may follow a sequence's tokens: at most `num_tokens` token ids of the vocabulary, none if it has no idea."""


class PromptLookup:
    """Reads `token_ids`, the sequence's own list, as it grows: each token once, so a guess costs O(1)."""

    SIZES = 3, 2  # of the n-grams, the longest first

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.num_read = 0
        self.ends: dict[tuple[int, ...], int] = {}  # n-gram -> where its latest occurrence ends that has a token behind it

    def guess(self, num_tokens: int) -> list[int]:
        """What followed the latest occurrence of the last three tokens, or else of the last two."""
        token_ids = self.token_ids
        for end in range(self.num_read, len(token_ids)):
            for size in self.SIZES:
                self.ends[tuple(token_ids[max(0, end - size) : end])] = end
        self.num_read = len(token_ids)
        for size in self.SIZES:
            if end := self.ends.get(tuple(token_ids[-size:]), 0):
                found = token_ids[end : end + num_tokens]
                return (found * num_tokens)[:num_tokens]  # an occurrence that overlaps the last tokens goes on as it began
        return []


@dataclass
class Guesser:
    """A sequence's drafter, its newest guess of what follows the first `position` tokens, and how likely the next one is right:
    a moving average of the earlier ones."""

    drafter: Drafter
    guess: list[int] = field(default_factory=list)
    position: int = 0
    likelihood: float = 0.5

    def learn(self, token_ids: list[int]) -> None:
        """Compare the guess with the sequence's tokens, whether a step computed it or not: so probing costs nothing."""
        for guessed, token_id in zip(self.guess, token_ids[self.position :]):
            self.likelihood += _NEWS * ((guessed == token_id) - self.likelihood)
            if guessed != token_id:
                break
