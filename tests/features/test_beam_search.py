"""Beam search matches transformers, and its beams share their past."""

import pytest
import torch
from conftest import make_checkpoint

from nanovllm import LLM

EOS = 5


@pytest.fixture(scope="module")
def beams(tmp_path_factory):
    """A vocabulary of 12 tokens, so that beams end early and all texts can be listed."""
    directory = tmp_path_factory.mktemp("beams")
    model = make_checkpoint(directory, vocab_size=12, eos_token_id=EOS)
    return LLM(str(directory), num_kvcache_blocks=200, kvcache_block_size=4), model


@pytest.fixture(scope="module")
def small_llm(beams):
    """Preempts beams, and computes prompts in chunks."""
    options = {"kvcache_block_size": 4, "max_num_batched_tokens": 5}
    return LLM(beams[0].config.model, num_kvcache_blocks=7, **options)


@pytest.mark.parametrize(
    "width, length_penalty", [(1, 1.0), (2, 1.0), (2, -0.5), (5, 0.0), (5, 2.0)]
)
def test_beams_match_transformers(beams, small_llm, width, length_penalty):
    prompts = [[6], [7, 8, 9, 10], [11, 6, 6, 9, 8, 10, 7], [9, 6]]
    found = small_llm.beam_search(prompts, width, 9, length_penalty)
    for prompt, outputs in zip(prompts, found, strict=True):
        reference = beams[1].generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=9,
            length_penalty=length_penalty,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for i, output in enumerate(outputs):
            token_ids = output["token_ids"]
            expected = reference.sequences[i, len(prompt) :].tolist()
            if EOS in expected:
                del expected[expected.index(EOS) + 1 :]  # padding
            assert output["prompt_token_ids"] == prompt
            assert token_ids == expected
            assert output["finish_reason"] == ("stop" if token_ids[-1] == EOS else "length")
            if width > 1:
                score = output["cumulative_logprob"] / len(token_ids) ** length_penalty
                assert score == pytest.approx(reference.sequences_scores[i].item(), abs=1e-4)


def test_beams_share_their_past(beams):
    """Each beam computes at most one block per step."""
    llm, _ = beams

    def count_computed():
        return llm.stats["num_prefill_tokens"] + llm.stats["num_decode_tokens"]

    before = count_computed()
    llm.beam_search([7] * 40, 4, 12, ignore_eos=True)
    assert count_computed() - before <= 40 + 4 * 12 * 4


@pytest.mark.parametrize(
    "arguments, name",
    [
        ((2.5, 3), "beam_width"),
        ((2, 0), "max_tokens"),
        ((2, 3, "x"), "length_penalty"),
        ((2, 3, 1.0, "no"), "ignore_eos"),
    ],
)
def test_an_invalid_argument_is_named(beams, arguments, name):
    with pytest.raises((ValueError, TypeError), match=name):
        beams[0].beam_search([1], *arguments)
