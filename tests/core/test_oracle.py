"""Greedy float32 tokens match transformers, whatever the blocks, budgets, pools, caches and
policies.
"""

from itertools import product

import pytest
import torch
from conftest import (
    VOCAB_SIZE,
    Oracle,
    check_invariants,
    cover_pairs,
    find_obstacle,
    greedy,
    make_checkpoint,
    random_prompt,
)

from nanovllm import LLM
from nanovllm.backends import BACKENDS
from nanovllm.engine.model_runner import ModelRunner


def list_ways(dtype):
    """List the ways to compute a model on a CPU: every registered backend, and without kernels."""
    on_cpu = [name for name, entry in BACKENDS.items() if "cpu" in entry.device_types]
    runnable = [
        name for name in on_cpu if find_obstacle(name, torch.device("cpu"), dtype, 16, 4) is None
    ]
    # The default is the first one.
    return [{}, *[{"attention_backend": name} for name in runnable[1:]], {"enable_kernels": False}]


WAYS = list_ways(torch.float32)


@pytest.mark.parametrize(
    "how, block_size, chunked, caching",
    cover_pairs(WAYS, [4, 16], [True, False], [True, False]),
    ids=str,
)
def test_grid(tiny, make_llm, how, block_size, chunked, caching):
    b, oracle = block_size, tiny[1]
    lengths = [1, b - 1, b, b + 1, 2 * b, 2 * b + 1]
    prompts = [random_prompt(length, length) for length in lengths]
    prompts += [
        prompts[-1][: b + 1] + random_prompt(9, b),
        prompts[-1],
    ]  # share blocks with another of the batch
    prompts += [
        random_prompt(8, b) + prompts[-1][b:]
    ]  # has the same second block, behind another first one
    params = [greedy(5 + i) for i in range(len(prompts))]
    expected = [oracle(prompt, p.max_tokens) for prompt, p in zip(prompts, params)]
    budgets = [1, b, b + 1, 8192] if chunked else [3 * b, 8192]
    longest = max(len(prompt) + p.max_tokens for prompt, p in zip(prompts, params))
    tight = (
        -(-longest // b) + 1
    )  # blocks for hardly more than one sequence: the others are preempted
    for budget, num_blocks in product(budgets, [tight, 64]):
        llm = make_llm(
            kvcache_block_size=b, num_kvcache_blocks=num_blocks, max_num_batched_tokens=budget, max_model_len=longest,
            enable_chunked_prefill=chunked, enable_prefix_caching=caching, **how,
        )  # fmt: skip
        for temperature in ("cold", "warm"):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [o["token_ids"] for o in outputs] == expected, (budget, num_blocks, temperature)
            check_invariants(llm)
        assert num_blocks == 64 or llm.stats["num_preemptions"] > 0 or budget < b
        assert bool(llm.stats["num_cached_tokens"]) == caching


def test_recomputation_longer_than_a_step(tiny, make_llm):
    """Prefill first: a preempted sequence that exceeds the token budget is recomputed and finishes."""
    prompts = [random_prompt(1, 6), random_prompt(2, 6)]
    llm = make_llm(
        enable_chunked_prefill=False,
        max_num_batched_tokens=8,
        num_kvcache_blocks=10,
        max_model_len=40,
        enable_prefix_caching=False,
    )
    outputs = llm.generate(prompts, greedy(30), use_tqdm=False)
    assert llm.stats["num_preemptions"] > 0
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 30) for prompt in prompts]


SHAPES = {
    "untied": dict(tie_word_embeddings=False),
    "bias": dict(attention_bias=True),
    "mha": dict(num_key_value_heads=4),
    "mqa": dict(num_key_value_heads=1),
    "odd_head_dim": dict(head_dim=10),
    "gqa_3": dict(num_attention_heads=6, head_dim=24),
    "theta": dict(rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    "linear": dict(rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}),
    "yarn": dict(
        rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    ),
    "yarn_untruncated": dict(
        head_dim=32,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
            "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(tmp_path, name):
    oracle = Oracle(make_checkpoint(tmp_path, **SHAPES[name]))
    llm = LLM(str(tmp_path), num_kvcache_blocks=64, kvcache_block_size=4, max_num_batched_tokens=24)
    prompts = [random_prompt(seed, 10 * seed + 1) for seed in range(5)]
    outputs = llm.generate(prompts, greedy(24), use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [oracle(prompt, 24) for prompt in prompts]


def test_sharded_checkpoint(tmp_path):
    oracle = Oracle(make_checkpoint(tmp_path, max_shard_size="10KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = random_prompt(0, 9)
    assert LLM(str(tmp_path), num_kvcache_blocks=8).generate(prompt, greedy(9), use_tqdm=False)[0][
        "token_ids"
    ] == oracle(prompt, 9)


@pytest.mark.parametrize(
    "dtype, options",
    [(dtype, way) for dtype in (torch.bfloat16, torch.float16) for way in list_ways(dtype)],
    ids=str,
)
def test_low_precision_logits(tmp_path, monkeypatch, dtype, options):
    """Logits differ from float32 by at most 1.5 times as much as those of transformers."""
    reference = make_checkpoint(tmp_path, dtype=dtype)
    seen: list[torch.Tensor] = []
    llm = LLM(str(tmp_path), num_kvcache_blocks=64, **options)
    compute_logits = llm.model_runner.executor.worker.model.compute_logits
    monkeypatch.setattr(
        llm.model_runner.executor.worker.model,
        "compute_logits",
        lambda hidden: seen.append(compute_logits(hidden)) or seen[-1],
    )
    prompt = random_prompt(3, 40)
    llm.generate([prompt[:n] for n in range(1, 41)], greedy(1), use_tqdm=False)
    ours = torch.cat(seen).float().cpu()
    with torch.inference_mode():
        theirs = reference(torch.tensor([prompt])).logits[0].float()
        exact = reference.float()(torch.tensor([prompt])).logits[0]
    assert ours.shape == theirs.shape == (40, VOCAB_SIZE)
    assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


def test_batch_is_flat_and_tight(make_llm, monkeypatch):
    """slot_mapping and block_tables are as batch.py says, for prefills, chunks and decodes."""
    llm = make_llm(max_num_batched_tokens=16)
    batches = []
    prepare = ModelRunner.prepare_batch
    monkeypatch.setattr(
        ModelRunner,
        "prepare_batch",
        lambda self, seqs: batches.append((list(seqs), prepare(self, seqs))) or batches[-1][1],
    )
    llm.generate([random_prompt(seed, 7 + seed) for seed in range(4)], greedy(4), use_tqdm=False)
    assert any(batch.max_seqlen_q == 1 for _, batch in batches)
    assert any(
        batch.max_seqlen_q > 1 and (batch.cu_seqlens_q.diff() == 1).any() for _, batch in batches
    )
    for seqs, batch in batches:
        assert (
            batch.cu_seqlens_q[-1]
            == len(batch.input_ids)
            == len(batch.positions)
            == len(batch.slot_mapping)
            <= 16
        )
        assert (
            batch.cu_seqlens_q.diff().max() == batch.max_seqlen_q
            and batch.context_lens.max() == batch.max_seqlen_k
        )
        assert len(set(batch.slot_mapping.tolist())) == len(batch.slot_mapping)
        for i, seq in enumerate(seqs):
            span = slice(batch.cu_seqlens_q[i], batch.cu_seqlens_q[i + 1])
            positions = batch.positions[span]
            assert positions[-1] + 1 == batch.context_lens[i]
            assert batch.input_ids[span].tolist() == [
                seq.token_ids[position] for position in positions
            ]
            expected = batch.block_tables[i].long()[positions // 4] * 4 + positions % 4
            assert batch.slot_mapping[span].tolist() == expected.tolist()
