"""Drafts by an MTP head: which tokens it proposes, and that they change no token of the output.

A wrong head changes no token, only how many are accepted, so the drafts themselves are compared
with those of a loop in plain torch, which has transformers' layers and no cache.
"""

import copy
import shutil

import pytest
import torch
from conftest import (
    check_invariants,
    edit_weights,
    find_feature,
    generate_ids,
    greedy,
    random_prompt,
)
from families import make_family
from graph_helpers import replay_on_the_cpu
from mtp_heads import Drafter, add_head, record_drafts
from safetensors.torch import load, load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.features.speculation.proposers import MTPProposer, PromptLookupProposer

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


@pytest.mark.parametrize("options", [{"kv_offloading_size": 1}, {"enable_kernels": False}], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_drafts_after_a_restored_prefix(make_pair, name, options):
    """K/V and hidden states of the head come back with those of the model."""
    directory, drafter = make_pair(name)
    prompts = [random_prompt(seed, 40) for seed in range(6)]
    with LLM(directory, num_speculative_tokens=2, **SMALL, **options) as llm:
        proposals = record_drafts(llm)
        for _ in range(2):
            for prompt in prompts:
                llm.generate(prompt, greedy(6))
        assert (llm.stats["num_restored_tokens"] > 0) == ("kv_offloading_size" in options)
    for token_ids, draft in proposals:
        assert draft == drafter.draft(token_ids, len(draft))


def test_drafts_of_a_graph(make_pair, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    replay_on_the_cpu(monkeypatch)
    directory, drafter = make_pair("qwen3.5")
    plain = {"enable_kernels": False, "attention_backend": "auto"}
    with LLM(directory, num_speculative_tokens=2, **SMALL, **plain) as llm:
        assert llm.executor.worker.graphs is not None
        proposals = record_drafts(llm)
        generate_ids(llm, [random_prompt(seed, 9) for seed in range(3)], greedy(6))
    assert len(proposals) >= 6
    for token_ids, draft in proposals:
        assert draft == drafter.draft(token_ids, len(draft))


def test_drafts_after_an_update(make_pair):
    """A trainer does not know the head, which stays as it is in the checkpoint."""
    directory, drafter = make_pair("qwen3")
    model = copy.deepcopy(drafter.model)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    with LLM(directory, num_speculative_tokens=2) as llm:
        proposals = record_drafts(llm)
        llm.update_weights(model.state_dict())
        llm.generate(random_prompt(0, 9), greedy(5))
    changed = Drafter(model, drafter.head)
    for token_ids, draft in proposals:
        assert draft == changed.draft(token_ids, len(draft))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantized_head_changes_no_token(make_pair, quantization):
    directory, _ = make_pair("qwen3.5-moe-tied")
    prompts = [random_prompt(seed, 9) for seed in range(3)]
    params = [SamplingParams(seed=1, temperature=each, max_tokens=9) for each in (0.0, 0.7, 1.0)]
    with LLM(directory, quantization=quantization) as llm:
        expected = generate_ids(llm, prompts, params)
    with LLM(directory, quantization=quantization, num_speculative_tokens=3) as llm:
        record_drafts(llm, [prompt + tokens for prompt, tokens in zip(prompts, expected)])
        assert generate_ids(llm, prompts, params) == expected
        assert llm.stats["num_accepted_tokens"] > 5


def test_a_head_of_nan_changes_no_token(make_pair, tmp_path):
    directory, _ = make_pair("qwen3")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "mtp.safetensors"
    save_file({name: each * torch.nan for name, each in load_file(path).items()}, path)
    prompt = random_prompt(0, 9)
    with LLM(tmp_path, num_speculative_tokens=2) as llm:
        proposals = record_drafts(llm)
        tokens = generate_ids(llm, [prompt], greedy(5))
        assert proposals
    with LLM(directory) as llm:
        assert generate_ids(llm, [prompt], greedy(5)) == tokens


def find_proposer(directory, **options):
    with LLM(directory, num_speculative_tokens=2, **options) as llm:
        return type(find_feature(llm, Drafts).proposer)


def test_the_method_is_chosen(make_pair, tmp_path):
    directory, _ = make_pair("qwen3")
    assert find_proposer(directory) is MTPProposer
    assert find_proposer(directory, speculative_method="mtp") is MTPProposer
    assert find_proposer(directory, speculative_method="prompt_lookup") is PromptLookupProposer
    assert find_proposer(directory, model_impl="transformers") is PromptLookupProposer
    assert find_proposer(directory, load_format="dummy") is PromptLookupProposer
    assert find_proposer(directory, load_format="dummy", speculative_method="mtp") is MTPProposer
    for options, reason in [
        ({"model_impl": "transformers"}, "only classes of models/"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is more than 1"),
    ]:
        with pytest.raises(ValueError, match=f"speculative_method='mtp': {reason}"):
            find_proposer(directory, speculative_method="mtp", **options)
    make_family(tmp_path, "gemma3")
    assert find_proposer(tmp_path) is PromptLookupProposer
    with pytest.raises(ValueError, match="has no tensor mtp.norm.weight"):
        find_proposer(tmp_path, speculative_method="mtp")
    with pytest.raises(ValueError, match="speculative_method must be one of"):
        find_proposer(tmp_path, speculative_method="eagle")


@pytest.mark.parametrize(
    "change, problem", [("missing", "mtp.pre_fc_norm_hidden"), ("unexpected", "mtp.layers.1")]
)
def test_a_head_that_does_not_fit(make_pair, tmp_path, change, problem):
    """The model is served without it."""
    directory, _ = make_pair("qwen3")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "mtp.safetensors"
    weights = load_file(path)
    if change == "missing":
        del weights["mtp.pre_fc_norm_hidden.weight"]
    else:
        weights["mtp.layers.1.mlp.gate_proj.weight"] = torch.zeros(3)
    save_file(weights, path)
    with pytest.raises(ValueError, match=f"{change} tensors: {problem}"):
        find_proposer(tmp_path)
    assert find_proposer(tmp_path, speculative_method="prompt_lookup") is PromptLookupProposer


def test_the_own_file_of_a_head_is_the_last_to_be_opened(make_pair, tmp_path):
    """It is not opened without drafts, nor if other files have a head."""
    directory, _ = make_pair("qwen3")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "mtp.safetensors"
    head = load(path.read_bytes())
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with LLM(tmp_path) as llm:
        assert not llm.executor.worker.has_mtp_head
    assert find_proposer(tmp_path, speculative_method="prompt_lookup") is PromptLookupProposer
    with pytest.raises(ValueError, match=r"mtp\.safetensors"):
        find_proposer(tmp_path)
    edit_weights(tmp_path, lambda weights: weights.update(head))
    assert find_proposer(tmp_path) is MTPProposer


@pytest.mark.parametrize("max_num_batched_tokens, max_tokens", [(9, 9), (100, 2)])
def test_a_head_does_not_run_in_vain(make_pair, max_num_batched_tokens, max_tokens):
    """The step or the requests have no room for a draft token of each sequence."""
    directory, _ = make_pair("qwen3")
    prompts = [[number] for number in range(8)]
    options = {"max_num_batched_tokens": max_num_batched_tokens, "num_kvcache_blocks": 40}
    with LLM(directory, num_speculative_tokens=3, **options) as llm:
        proposals = record_drafts(llm)
        find_feature(llm, Drafts).costs = StepCosts(per_token=0.001, per_pass=0.3)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        llm.generate(prompts, params)
        assert not proposals


def test_a_head_that_does_not_pay_runs_rarely(make_pair):
    """A random head is never right. It is tried again after some time."""
    directory, _ = make_pair("qwen3")
    with LLM(directory, num_speculative_tokens=2) as llm:
        proposals = record_drafts(llm)
        find_feature(llm, Drafts).costs = StepCosts(per_token=0.1, per_pass=0.4)
        llm.generate(random_prompt(0, 9), greedy(200))
        num_tokens = [len(token_ids) - 9 for token_ids, _ in proposals]
    assert num_tokens[:3] == [1, 2, 3]
    assert len(num_tokens) < 20
    assert num_tokens[-1] > 50
