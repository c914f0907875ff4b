"""Weights that do not match config.json are rejected with an error that names the tensor."""

import json
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import edit_config, edit_weights, generate_ids, greedy, make_checkpoint, random_prompt
from families import make_family
from safetensors.torch import load_file, save_file
from torch import ones

from nanovllm import LLM

UP = "model.layers.1.mlp.up_proj.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb"
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def checkpoint(tmp_path):
    make_checkpoint(tmp_path)
    return tmp_path


def load(directory, **options):
    return LLM(directory, num_kvcache_blocks=16, **options)


def reject(complaint, directory, **options):
    with pytest.raises(ValueError, match=complaint):
        load(directory, **options)


@pytest.mark.parametrize(
    "family, changes, complaint",
    [
        ("qwen3", {UP: None}, f"missing tensors: {UP}"),
        ("qwen3", {"extra": ones(2)}, "unexpected tensors: extra in model.safetensors"),
        ("qwen3", {UP: ones(3, 4)}, rf"{UP} has shape \[3, 4\], the model needs \[48, 32\]"),
        ("qwen3", {UP: ones(48, 32).bool()}, f"model.safetensors: .*{UP} is stored as BOOL"),
        ("qwen3", {UP: ones(48, 32).to(torch.float8_e4m3fn)}, f"{UP} is stored as F8_E4M3"),
        ("qwen3", {"lm_head.weight": ones(97, 32)}, "lm_head.weight differs"),
        ("qwen3", {f"{FREQUENCIES}.weight": ones(8)}, f"unexpected.*: {FREQUENCIES}.weight"),
        ("qwen3", {"norm.weight": ones(32)}, "norm.weight repeats model.norm.weight"),
        ("qwen3-moe", {f"{EXPERTS}.3.up_proj.weight": None}, "missing .*experts.3.up_proj"),
        ("qwen3-moe", {f"{EXPERTS}.8.up_proj.weight": ones(24, 32)}, "unexpected .*experts.8"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, family, changes, complaint):
    """`changes` replaces, adds or removes (None) tensors."""
    make_family(tmp_path, family)
    removed = [name for name, tensor in changes.items() if tensor is None]
    added = {name: tensor for name, tensor in changes.items() if tensor is not None}

    def edit(weights):
        for name in removed:
            del weights[name]
        weights.update(added)

    edit_weights(tmp_path, edit)
    reject(complaint, tmp_path)


@pytest.mark.parametrize(
    "family, changes, complaint",
    [
        ("qwen3", {"num_hidden_layers": 3, "layer_types": None}, "missing tensors: model.layers.2"),
        ("qwen3", {"num_hidden_layers": 1, "layer_types": None}, "unexpected.*model.layers.1"),
        ("qwen3", {"vocab_size": 98}, r"embed_tokens.weight has shape \[97, 32\]"),
        ("qwen3", {"tie_word_embeddings": False}, "missing tensors: lm_head.weight"),
        ("qwen3-moe", {"num_local_experts": 5}, r"gate.weight has shape \[8, 32\]"),
        ("qwen3-moe", {"mlp_only_layers": [0]}, "missing tensors: .*layers.0.mlp.gate_proj"),
    ],
)
def test_configs_that_contradict_the_weights(tmp_path, family, changes, complaint):
    make_family(tmp_path, family)
    edit_config(tmp_path, **changes)
    reject(complaint, tmp_path)


def test_harmless_copies_are_accepted(checkpoint):
    """A tied head that is stored, and the RoPE buffer that transformers once saved."""
    expected = generate_ids(load(checkpoint), [[5, 6, 7]], greedy(8))

    def edit(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{FREQUENCIES}.inv_freq"] = ones(8)

    edit_weights(checkpoint, edit)
    assert generate_ids(load(checkpoint), [[5, 6, 7]], greedy(8)) == expected


@pytest.mark.parametrize("prefix, size", [("", 2), ("model.", 1)])
def test_a_tied_head_fills_the_embedding(tmp_path, prefix, size):
    """Its shape is checked as well, and one of the two must be there."""
    oracle = make_family(tmp_path, "qwen3", tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    weights = {prefix + key.removeprefix("model."): w for key, w in load_file(path).items()}
    head = weights.pop(f"{prefix}embed_tokens.weight")
    save_file({**weights, "lm_head.weight": head}, path)
    prompt = random_prompt(0, 9)
    with load(tmp_path, tensor_parallel_size=size) as llm:
        assert generate_ids(llm, [prompt], greedy(12)) == [oracle(prompt, 12)]
    save_file({**weights, "lm_head.weight": head[:50].clone()}, path)
    reject(r"lm_head.weight has shape \[50, 32\]", tmp_path)
    save_file(weights, path)
    reject("missing tensors: model.embed_tokens.weight$", tmp_path)


@pytest.fixture
def shards(tmp_path):
    make_checkpoint(tmp_path, max_shard_size="10KB")
    return sorted(tmp_path.glob("*.safetensors"))


def edit_index(directory, edit):
    """Change the weight_map of a checkpoint with `edit`."""
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_missing_shard_is_noticed(shards, tmp_path):
    shards[1].unlink()
    reject(f"{shards[1]}: No such file", tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    reject("missing tensors: model", tmp_path)


def test_a_tensor_in_two_shards_is_noticed_without_an_index(shards, tmp_path):
    name = next(iter(load_file(shards[0])))
    save_file({**load_file(shards[1]), name: ones(3)}, shards[1])
    load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    reject(f"{shards[1]}: {name} repeats {name} in {shards[0].name}", tmp_path)


def test_only_tensors_of_the_index_are_read(shards, tmp_path):
    """Not the files of an earlier save, nor superseded tensors. The dtype, too, is theirs."""
    expected = generate_ids(load(tmp_path), [[5, 6, 7]], greedy(8))
    edit_config(tmp_path, dtype=None)
    stale = {name: ones(2).half() for path in shards for name in load_file(path)}
    save_file(stale, tmp_path / "model-00000-of-00001.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    for path in shards:
        save_file({"a": ones(2).half(), **stale, **load_file(path)}, path)
    llm = load(tmp_path)
    assert llm.executor.worker.spec.dtype == torch.float32
    assert generate_ids(llm, [[5, 6, 7]], greedy(8)) == expected


def test_a_tensor_that_is_not_in_its_file_is_named(shards, tmp_path):
    edit_index(tmp_path, lambda weight_map: weight_map.update({UP: shards[0].name}))
    reject(f"not match the model: missing tensors: {UP}$", tmp_path)
    edit_index(tmp_path, lambda weight_map: weight_map.pop(UP))
    reject(f"not match the model: missing tensors: {UP}$", tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "[" * 10**5]
)
def test_a_damaged_index_is_named(shards, tmp_path, content):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    reject(str(path), tmp_path)


def test_which_files_hold_the_weights(shards, tmp_path):
    """An index is not needed, and copies for other programs are not read."""
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"tok_embeddings.weight": ones(1)}, tmp_path / "consolidated.safetensors")
    load(tmp_path)
    for number, path in enumerate(shards):
        path.rename(tmp_path / f"part-{number}.safetensors")
    reject("unexpected tensors: tok_embeddings.weight in consolidated.safetensors", tmp_path)
    (tmp_path / "consolidated.safetensors").unlink()
    load(tmp_path)


def test_a_checkpoint_without_weights_needs_dummy_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    reject("contains no", checkpoint)
    llm = load(checkpoint, load_format="dummy")
    assert [len(ids) for ids in generate_ids(llm, [[1, 2], [3]], greedy(4))] == [4, 4]


def test_a_truncated_file_is_named(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    reject(str(path), checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 2**31 - 1},
        {"hidden_size": 2**31 - 1},
        {"intermediate_size": 2**31 - 1},
        {"num_hidden_layers": 200, "layer_types": None, "intermediate_size": 50_000},
    ],
    ids=str,
)
def test_sizes_beyond_all_memory_are_rejected(checkpoint, changes, monkeypatch):
    """Before anything is allocated. The layers are small, but together they need 2 GB."""
    memory = SimpleNamespace(total=1e9, available=1e9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=0))
    edit_config(checkpoint, **changes)
    for load_format in ("auto", "dummy"):
        reject("config.json: .* (need|overflow)", checkpoint, load_format=load_format)


def test_weights_that_just_fit_are_accepted(checkpoint, monkeypatch):
    num_bytes = (checkpoint / "model.safetensors").stat().st_size
    memory = SimpleNamespace(total=num_bytes, available=num_bytes)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    load(checkpoint)
