"""Embeddings are transformers' hidden states, whatever the chunks, the cache and the batch."""

import json
import shutil
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import check_idle, disturb_logits, edit_config, edit_weights, greedy, random_prompt
from families import make_family

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.features.embeddings import read_vectors

FAMILIES = ["qwen3", "qwen3.5", "gemma3"]
PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((1, 5, 8, 33, 60))]
SMALL = {"num_kvcache_blocks": 24, "kvcache_block_size": 4, "max_num_batched_tokens": 10}


@pytest.fixture(scope="module")
def make_pair(tmp_path_factory):
    """Make a checkpoint of a family, and the hidden states of transformers."""
    made = {}

    def make(name):
        if name not in made:
            directory = tmp_path_factory.mktemp("embedded")
            made[name] = directory, make_family(directory, name)
        return made[name]

    return make


@torch.inference_mode()
def embed(oracle, prompt, pooling, normalize=True):
    hidden = oracle.model.model(torch.tensor([prompt])).last_hidden_state[0]
    vector = hidden[-1] if pooling == "last" else hidden.mean(0)
    return (vector / vector.norm() if normalize else vector).numpy()


def check(vectors, oracle, pooling, normalize=True):
    for vector, prompt in zip(vectors, PROMPTS, strict=True):
        assert vector.dtype == np.float32
        expected = embed(oracle, prompt, pooling, normalize)
        assert vector == pytest.approx(expected, abs=3e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("name", FAMILIES)
def test_vectors_are_those_of_transformers(make_pair, name, pooling):
    """In chunks, cold and warm, beside generation, and after preemptions."""
    directory, oracle = make_pair(name)
    with LLM(directory, **SMALL) as llm:
        for normalize in (True, False):
            for prompt in PROMPTS[2:]:
                llm.add_request(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
            check(llm.embed(PROMPTS, pooling, normalize), oracle, pooling, normalize)
        while not llm.is_finished():
            llm.step()
        check_idle(llm)
        num_cached = llm.stats["num_cached_tokens"]
        llm.embed(PROMPTS, pooling)
        hits = llm.stats["num_cached_tokens"] - num_cached
        if pooling == "mean":
            assert hits == 0
        elif name == "qwen3":  # states of qwen3.5 need a snapshot
            assert hits > 0


def test_prompt_log_probabilities_beside_embeddings(make_pair):
    """A row can belong to two features."""
    directory, oracle = make_pair("qwen3")
    scoring = SamplingParams(max_tokens=2, prompt_logprobs=0)
    with LLM(directory, max_num_batched_tokens=10) as llm:
        (expected,) = llm.generate(PROMPTS[4], scoring)
        request_id = llm.add_request(PROMPTS[4], scoring)
        (request,) = llm.requests[request_id]
        check(llm.embed(PROMPTS, "mean"), oracle, "mean")
        assert request.prompt_logprobs == expected["prompt_logprobs"]


def test_several_ranks(make_pair):
    directory, oracle = make_pair("qwen3")
    with LLM(directory, tensor_parallel_size=2, **SMALL) as llm:
        for pooling in ("last", "mean"):
            check(llm.embed(PROMPTS, pooling), oracle, pooling)


def test_invalid_prompts_queue_nothing(make_pair):
    directory, oracle = make_pair("qwen3")
    with LLM(directory, max_model_len=60) as llm:
        assert llm.embed([]) == []
        for prompts in ([[1], []], [[10**6]], [[1] * 61], [1.5], None):
            with pytest.raises((ValueError, TypeError)):
                llm.embed(prompts)
        with pytest.raises(ValueError, match="exceed max_model_len=60"):
            llm.embed([1] * 61)
        with pytest.raises(ValueError, match="pooling must be one of"):
            llm.embed([1], "cls")
        with pytest.raises(TypeError, match="normalize"):
            llm.embed([1], normalize="yes")
        assert llm.is_finished()
        check(llm.embed(PROMPTS), oracle, "last")  # the longest has max_model_len tokens


def test_nan_is_an_error_of_its_prompt(make_pair):
    directory, _ = make_pair("qwen3")
    with LLM(directory) as llm:
        disturb_logits(llm, lambda seq: seq.num_prompt_tokens == 5)
        with (
            pytest.warns(RuntimeWarning, match="its logits are NaN"),
            pytest.raises(ValueError, match="prompt 1 has no embedding: its logits are NaN"),
        ):
            llm.embed(PROMPTS)


def test_an_engine_that_has_ended_says_so(make_pair):
    directory, _ = make_pair("qwen3")
    with LLM(directory) as llm:
        pass
    with pytest.raises(RuntimeError, match=r"shut down by exit\(\)"):
        llm.embed([1])


def test_a_long_vector_is_normalized(make_pair, tmp_path):
    """Its squares exceed float32."""
    directory, _ = make_pair("qwen3")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    edit_weights(tmp_path, lambda weights: weights["model.norm.weight"].fill_(1e25))
    with LLM(tmp_path) as llm:
        for vector in llm.embed(PROMPTS):
            assert np.linalg.norm(vector) == pytest.approx(1.0)


def test_an_interrupted_call_leaves_the_engine_usable(make_pair):
    directory, oracle = make_pair("qwen3")
    with LLM(directory, **SMALL) as llm:
        forward = llm.model_runner.forward
        steps = []

        def fail_once(step):
            steps.append(step)
            logits = forward(step)
            if len(steps) == 4:
                raise KeyboardInterrupt
            return logits

        with patch.object(llm.model_runner, "forward", fail_once):
            with pytest.raises(KeyboardInterrupt):
                llm.embed(PROMPTS, "mean")
            check(llm.embed(PROMPTS, "mean"), oracle, "mean")
        llm.step()
        check_idle(llm)


def test_new_weights_change_unfinished_embeddings(make_pair):
    directory, oracle = make_pair("qwen3")
    with LLM(directory, **SMALL) as llm:
        embedding = llm.prepare_embeddings(PROMPTS[3], "mean")
        weights = {name: 0.5 * each for name, each in oracle.model.state_dict().items()}
        llm.update_weights(weights)
        (request_id,) = [llm.add_prepared(prompt) for prompt in embedding]
        llm.step()
        llm.update_weights(oracle.model.state_dict())
        while request_id in llm.requests:
            llm.step()
        (vector,) = read_vectors(embedding, normalize=True)
        assert vector == pytest.approx(embed(oracle, PROMPTS[3], "mean"), abs=3e-5)


@pytest.mark.parametrize("is_tied, keeps_head", [(True, False), (False, False), (False, True)])
def test_a_checkpoint_without_a_head(tmp_path, is_tied, keeps_head):
    """Or with one that its class does not have."""
    oracle = make_family(tmp_path, "qwen3", tie_word_embeddings=is_tied)
    edit_config(tmp_path, architectures=["Qwen3Model"])

    def drop_head(weights):
        if not keeps_head:
            weights.pop("lm_head.weight", None)
        for name in list(weights):
            weights[name.removeprefix("model.")] = weights.pop(name)

    edit_weights(tmp_path, drop_head)
    with LLM(tmp_path) as llm:
        check(llm.embed(PROMPTS), oracle, "last")
        with pytest.raises(ValueError, match="no output head"):
            llm.generate([1, 2], greedy(1))
    with pytest.raises(ValueError, match="embeddings no feature of this engine serves it"):
        LLMEngine(Config(tmp_path))


MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
]


@pytest.mark.parametrize(
    "modules, pooling_config, expected",
    [
        (MODULES, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        (MODULES, {"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        (MODULES, {"pooling_mode": "mean"}, "mean"),
        (MODULES[:1], {}, "last"),
        (MODULES, {"pooling_mode_cls_token": True}, "so give `pooling`: 'cls_token'"),
        (
            MODULES,
            {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            "several poolings",
        ),
        ([*MODULES, {"type": "a.Dense", "path": "3_Dense"}], {}, "the module Dense"),
        ([{"path": ""}], {}, "modules.json does not say"),
        ([{"type": "a.Pooling", "path": 5}], {}, "modules.json does not say"),
        (7, {}, "modules.json does not say"),
    ],
    ids=range(10),
)
def test_files_of_sentence_transformers(make_pair, tmp_path, modules, pooling_config, expected):
    directory, oracle = make_pair("qwen3")
    for path in directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling_config))
    with LLM(tmp_path) as llm:
        if expected in ("last", "mean"):
            check(llm.embed(PROMPTS), oracle, expected)
        else:
            with pytest.raises(ValueError, match=expected):
                llm.embed(PROMPTS)
            check(llm.embed(PROMPTS, "mean"), oracle, "mean")
