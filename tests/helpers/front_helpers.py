"""What the tests of calls and interrupts share: prompts, loops over steps, and interrupts."""

from itertools import chain, repeat
from unittest.mock import DEFAULT, patch

import pytest
from conftest import greedy, random_prompt

GREEDY = greedy(6)
PROMPTS = [random_prompt(i, 5 + i) for i in range(4)]


def finish(llm):
    """Run steps until all requests have finished. Return the last output of each by its id."""
    last = {}
    while not llm.is_finished():
        last.update((output["request_id"], output) for output in llm.step())
    return last


def interrupt_in(owner, name, call, error=KeyboardInterrupt, num_calls=0):
    """Check that `call` ends with `error` if `owner.name` raises it after `num_calls` calls."""
    effects = chain(repeat(DEFAULT, num_calls), repeat(error))
    original = getattr(owner, name)
    with patch.object(owner, name, wraps=original, side_effect=effects), pytest.raises(error):
        call()
