"""The demo model answers correctly, also with chunks, preemptions and shared prefixes."""

import pytest
from conftest import greedy

from nanovllm import DEMO_MODEL, LLM
from nanovllm.demo_model.train import SKILLS, UNSEEN_SYSTEM_PROMPTS, held_out

PRIMES = (
    "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97"
)
SYSTEM = {"role": "system", "content": UNSEEN_SYSTEM_PROMPTS[0]}


def ask(llm, questions, *start):
    """Return the answers to questions, each in a chat of its own that begins with `start`."""
    chats = [[*start, {"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, greedy(600), use_tqdm=False)
    assert {output["finish_reason"] for output in outputs} == {"stop"}
    return [output["text"] for output in outputs]


@pytest.fixture(scope="module")
def llm():
    return LLM(DEMO_MODEL, num_kvcache_blocks=2000)


@pytest.mark.parametrize("skill", SKILLS)
def test_held_out_questions_are_answered(llm, skill):
    """As in training, reworded, and after a system prompt that training did not have."""
    examples = list(held_out(skill, 40))
    reworded = list(held_out(skill, 40, seed=2, unseen_wordings=True))
    questions = [example.question for example in examples + reworded]
    answers = ask(llm, questions) + ask(llm, questions[:40], SYSTEM)
    expected = [example.answer for example in examples + reworded + examples]
    num_right = sum(map(str.__eq__, answers, expected))
    assert num_right >= (0.97 if skill == "addition" else 0.88) * len(expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "dtype": "float32"},
        {"enable_chunked_prefill": False, "num_kvcache_blocks": 40},
    ],
    ids=str,
)
def test_known_answers_do_not_depend_on_the_options(options):
    llm = LLM(DEMO_MODEL, **{"num_kvcache_blocks": 200, "kvcache_block_size": 4, **options})
    sums = [(a, b) for a in range(3, 99, 17) for b in range(5, 99, 23)]
    for _ in range(2):
        introduction, primes = ask(llm, ["introduce yourself", "list all prime numbers within 100"])
        assert "nanovllm" in introduction
        assert PRIMES in primes
        answers = ask(llm, [f"What is {a} + {b}?" for a, b in sums])
        wrong = [answer for (a, b), answer in zip(sums, answers) if str(a + b) not in answer]
        assert len(wrong) <= 1, wrong
    if "num_kvcache_blocks" in options:
        assert llm.stats["num_preemptions"] > 0
    assert llm.stats["num_cached_tokens"] > 0
