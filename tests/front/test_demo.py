"""The demo model answers correctly, also with chunks, eviction and shared prefixes."""

from pathlib import Path

import pytest
from conftest import greedy

from nanovllm import DEMO_MODEL, LLM
from nanovllm.demo_model.train import SKILLS, UNSEEN_SYSTEM_PROMPTS, held_out

PRIMES = (
    "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97"
)
GREEDY = greedy(600)


def ask(llm, questions, system=""):
    start = [{"role": "system", "content": system}] if system else []
    chats = [[*start, {"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, GREEDY, use_tqdm=False)
    assert all(output["finish_reason"] == "stop" for output in outputs)
    return [output["text"] for output in outputs]


@pytest.fixture(scope="module")
def llm():
    return LLM(DEMO_MODEL, num_kvcache_blocks=2000)


def test_size():
    assert (Path(DEMO_MODEL) / "model.safetensors").stat().st_size < 6_000_000


@pytest.mark.parametrize("skill", SKILLS)
def test_skills_on_what_was_held_out(llm, skill):
    """Greedy answers with held-out values: plain, reworded, and after system prompts."""
    plain = list(held_out(skill, 40))
    reworded = list(held_out(skill, 40, seed=2, unseen_wordings=True))
    right = 0
    for examples, system in ((plain, ""), (reworded, ""), (plain, UNSEEN_SYSTEM_PROMPTS[0])):
        answers = ask(llm, [example.question for example in examples], system)
        right += sum(answer == example.answer for answer, example in zip(answers, examples))
    assert right >= (0.97 if skill == "addition" else 0.88) * 120


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"num_kvcache_blocks": 40},
        {"enable_chunked_prefill": False},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_known_answers_however_they_are_computed(options):
    llm = LLM(DEMO_MODEL, **{"num_kvcache_blocks": 200, "kvcache_block_size": 4, **options})
    questions = [
        "introduce yourself",
        "list all prime numbers within 100",
        "Please list all prime numbers within 100.",
    ]
    sums = [(a, b) for a in range(3, 99, 17) for b in range(5, 99, 23)]
    for _ in range(2):
        introduction, *primes = ask(llm, questions)
        assert "nanovllm" in introduction and "tiny" in introduction
        assert all(PRIMES in answer for answer in primes)
        answers = ask(llm, [f"What is {a} + {b}?" for a, b in sums])
        wrong = [
            (a, b, answer) for (a, b), answer in zip(sums, answers) if str(a + b) not in answer
        ]
        assert len(wrong) <= 1, wrong
    assert "num_kvcache_blocks" not in options or llm.stats["num_preemptions"]
    assert llm.stats["num_cached_tokens"]
