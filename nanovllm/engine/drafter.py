"""Guesses a sequence's next tokens from its own: prompt lookup (Saxena 2023; LLMA, Yang et al. 2023).

    token_ids | the cat sat on the mat . the cat      the last two occurred before: "sat on the mat" may follow again

In code, in quotations, in answers that repeat the question, it often does. This module knows token ids and nothing else.
Whatever has `guess`, such as a small model, can take the place of PromptLookup: `Speculator.make_drafter` makes one per sequence.
"""

from dataclasses import dataclass, field
from typing import Protocol

_DECAY = 0.95  # weight of a guess when the next one is judged


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
    """A sequence's drafter, its newest guess, and how many guesses were judged and right; older ones count less."""

    drafter: Drafter
    guess: list[int] = field(default_factory=list)
    num_judged: float = 0.0
    num_right: float = 0.0

    @property
    def likelihood(self) -> float:
        """That the next guess is right: Laplace's rule of succession."""
        return (1 + self.num_right) / (2 + self.num_judged)

    def learn(self, token_ids: list[int]) -> None:
        """Compare the guess with what was drawn: also with one token more than the draft had, so probing costs nothing."""
        for guessed, token_id in zip(self.guess, token_ids):
            self.num_judged = _DECAY * self.num_judged + 1
            self.num_right = _DECAY * self.num_right + (guessed == token_id)
            if guessed != token_id:
                break
