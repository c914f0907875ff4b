"""The demo model answers correctly, in a small pool whose blocks prompts share."""

import pytest
from conftest import greedy
from train_demo_model import SKILLS, UNSEEN_SYSTEM_PROMPTS, held_out

from nanovllm import DEMO_MODEL, LLM

SYSTEM = {"role": "system", "content": UNSEEN_SYSTEM_PROMPTS[0]}


@pytest.fixture(scope="module")
def llm():
    """The pool is small. Blocks of 4 tokens let short prompts share prefixes."""
    return LLM(DEMO_MODEL, num_kvcache_blocks=400, kvcache_block_size=4, max_num_batched_tokens=512)


def ask(llm, questions, *start):
    """Return the answers to questions. Each chat begins with `start`."""
    chats = [[*start, {"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, greedy(600), use_tqdm=False)
    assert {output["finish_reason"] for output in outputs} == {"stop"}
    return [output["text"] for output in outputs]


@pytest.mark.parametrize("skill", SKILLS)
def test_held_out_questions_are_answered(llm, skill):
    """As in training, reworded, and after a system prompt that training did not have."""
    examples = list(held_out(skill, 25))
    reworded = list(held_out(skill, 25, seed=2, unseen_wordings=True))
    questions = [example.question for example in examples + reworded]
    answers = ask(llm, questions) + ask(llm, questions[:25], SYSTEM)
    expected = [example.answer for example in examples + reworded + examples]
    num_right = sum(map(str.__eq__, answers, expected))
    assert num_right >= (0.97 if skill == "addition" else 0.88) * len(expected)
