"""Drafts by an MTP head: which tokens it proposes, and that they change no token of the output.

A wrong head changes no token, only how many are accepted, so the drafts themselves are compared
with those of a loop in plain torch, which has transformers' layers and no cache.
"""

import pytest
from conftest import (
    check_invariants,
    generate_ids,
    greedy,
    make_drafts_free,
    random_prompt,
)
from families import make_family
from mtp_heads import Drafter, add_head

from nanovllm import LLM
from nanovllm.features.speculation.proposers import MTPProposer

FAMILIES = ["qwen3", "qwen3.5", "qwen3.5-moe-tied", "qwen3-next"]
SMALL = {"num_kvcache_blocks": 40, "kvcache_block_size": 4, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory):
    """Make a checkpoint with a head, once for each family. Return its folder and a Drafter."""
    made = {}

    def make(name):
        if name not in made:
            directory = tmp_path_factory.mktemp("mtp")
            oracle = make_family(directory, name)
            made[name] = directory, Drafter(oracle.model, add_head(directory, oracle.model))
        return made[name]

    return make


def record_drafts(llm, answers=()):
    """Let an engine draft in each step. Return what its head proposes: (token_ids, draft).

    A draft for one of the `answers` is then replaced by what follows, except for its last token.
    """
    drafts = make_drafts_free(llm)
    assert isinstance(drafts.proposer, MTPProposer)
    propose = drafts.proposer.propose
    proposals = []

    def propose_and_record(seqs, num_tokens):
        result = propose(seqs, num_tokens)
        replaced = []
        for seq, draft in zip(seqs, result, strict=True):
            proposals.append((list(seq.token_ids), draft))
            start = len(seq.token_ids)
            for answer in answers:
                if answer[:start] == seq.token_ids:
                    draft = answer[start : start + len(draft) - 1] + draft[-1:]
            replaced.append(draft)
        return replaced

    drafts.proposer.propose = propose_and_record
    return proposals


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_are_those_of_a_plain_loop(make_pair, name):
    """Cold and warm, in chunks, after preemptions, and after accepted and rejected drafts."""
    directory, drafter = make_pair(name)
    prompts = [random_prompt(length, length) for length in (1, 4, 5, 33, 70)]
    prompts.append(prompts[-1][:50] + random_prompt(0, 10))
    with LLM(directory, **SMALL) as plain:
        expected = generate_ids(plain, prompts, greedy(12))
    with LLM(directory, num_speculative_tokens=3, **SMALL) as llm:
        answers = [prompt + tokens for prompt, tokens in zip(prompts, expected)]
        proposals = record_drafts(llm, answers)
        for _ in range(2):
            assert generate_ids(llm, prompts, greedy(12)) == expected
            check_invariants(llm)
        stats = llm.stats
    assert stats["num_preemptions"] > 0
    assert stats["num_cached_tokens"] > 0
    assert 20 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
    assert len(proposals) > 20
    for token_ids, draft in proposals:
        assert draft == drafter.draft(token_ids, len(draft)), len(token_ids)
