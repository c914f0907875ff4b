"""The rows of logits of a step, and what is left of it when sequences have ended meanwhile."""

import pytest

from nanovllm import SamplingParams
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step


@pytest.fixture
def step():
    """The picture of step.py: the end of a prompt, a decode with a draft, and a first chunk."""
    step = Step()
    plans = [(6, 3, 1), (9, 2, 2), (6, 2, 0)]  # tokens of the sequence, computed ones, rows
    for seq_id, (length, num_tokens, num_logits) in enumerate(plans):
        seq = Sequence(seq_id, list(range(6)), SamplingParams())
        seq.token_ids += range(6, length)
        seq.num_computed_tokens = length - num_tokens if num_logits > 0 else 0
        step.add(seq, num_tokens, num_logits)
    return step


def test_each_row_samples_the_token_after_its_own(step):
    end_of_prompt, decode, _ = step.seqs
    assert step.list_rows() == ([end_of_prompt, decode, decode], [6, 8, 9])
    assert step.split([70, 71, 72]) == [[70], [71, 72], []]
    assert [step.is_decode(index) for index in range(3)] == [False, True, False]


@pytest.mark.parametrize("num_computed", [0, 4])
def test_a_recomputation_samples_the_token_after_its_newest(num_computed):
    """After a preemption, generated tokens are computed once more."""
    seq = Sequence(0, [1, 2, 3], SamplingParams())
    seq.token_ids += [4, 5, 6, 7]
    seq.num_computed_tokens = num_computed
    step = Step()
    step.add(seq, 7 - num_computed, num_logits=1)
    assert step.list_rows() == ([seq], [7])


def test_a_step_can_have_no_row():
    step = Step()
    for seq_id in range(2):
        step.add(Sequence(seq_id, [1, 2, 3], SamplingParams()), num_tokens=2, num_logits=0)
    assert step.list_rows() == ([], [])
    assert step.split([]) == [[], []]


def test_ended_sequences_are_dropped_with_their_rows(step):
    end_of_prompt, decode, chunk = step.seqs
    end_of_prompt.finish_reason = "abort"
    assert step.drop_ended() == [1, 2]
    assert step.seqs == [decode, chunk]
    assert (step.num_tokens, step.num_logits) == ([2, 2], [2, 0])
    assert step.list_rows() == ([decode, decode], [8, 9])
