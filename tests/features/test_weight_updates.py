"""An engine with new weights computes what an engine of a checkpoint with these weights does."""

import shutil
import time
from threading import Thread
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from conftest import check_idle, find_feature, generate_ids, greedy, make_checkpoint, random_prompt
from families import make_family
from transformers import AutoModelForCausalLM

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.checkpoints.tensor_files import TensorFiles
from nanovllm.course import grpo
from nanovllm.features import weight_updates
from nanovllm.features.kv_store.stored_prefixes import StoredPrefixes
from nanovllm.worker.worker import Worker

PROMPTS = [random_prompt(seed, 30) for seed in range(3)]
ASLEEP = "the engine is asleep: call wake_up"


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def shake(model, seed=0):
    """Change all weights of a trainer."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=random))
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two checkpoints of one shape, and the trainer that has the weights of the second one."""
    old, new = [tmp_path_factory.mktemp("checkpoints") / name for name in ("old", "new")]
    make_checkpoint(old)
    trainer = shake(load(old))
    make_checkpoint(new)
    trainer.save_pretrained(new)
    return str(old), str(new), trainer


@pytest.fixture(scope="module")
def expected(pair):
    """The tokens of both checkpoints."""
    tokens = []
    for path in pair[:2]:
        with LLM(path, max_model_len=100) as llm:
            tokens.append(generate_ids(llm, PROMPTS, greedy(8)))
    assert tokens[0] != tokens[1]
    return tokens


@pytest.fixture
def engine(pair):
    with LLM(pair[0], max_model_len=100, kvcache_block_size=4) as llm:
        yield llm


@pytest.mark.parametrize(
    "name, options",
    [
        ("gemma3", {}),  # a tied head, windows
        ("gemma3-untied", {"enable_kernels": False}),
        ("qwen3-moe", {}),
        ("qwen3-moe", {"quantization": "int8"}),
        ("qwen3.5-moe", {}),
        ("smollm3", {"model_impl": "transformers"}),
    ],
    ids=str,
)
def test_any_family_takes_new_weights(tmp_path, name, options):
    old, new = tmp_path / "old", tmp_path / "new"
    make_family(old, name)
    make_family(new, name)
    trainer = shake(load(old))
    trainer.save_pretrained(new)
    with LLM(new, max_model_len=100, **options) as llm:
        expected = generate_ids(llm, PROMPTS, greedy(8))
    with LLM(old, max_model_len=100, **options) as llm:
        assert generate_ids(llm, PROMPTS, greedy(8)) != expected
        llm.update_weights(trainer.state_dict())
        assert generate_ids(llm, PROMPTS, greedy(8)) == expected
        check_idle(llm)


def test_tensors_are_converted_and_not_kept(pair, expected, engine):
    _, _, trainer = pair
    tensors = {
        name: each.detach().double().requires_grad_() for name, each in trainer.state_dict().items()
    }
    engine.update_weights((name, tensors[name]) for name in reversed(tensors))
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.zero_()
    assert generate_ids(engine, PROMPTS, greedy(8)) == expected[1]


def drop(tensors):
    del tensors["model.norm.weight"]


def add(tensors):
    tensors["model.layers.0.extra.weight"] = torch.ones(2)


def cut(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][1:]


def use_integers(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].int()


def leave_on_meta(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to("meta")


def make_sparse(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to_sparse()


def use_numpy(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].numpy()


def repeat(tensors):
    tensors["norm.weight"] = tensors["model.norm.weight"]


@pytest.mark.parametrize(
    "change, message",
    [
        (drop, "missing tensors: model.norm.weight"),
        (add, "unexpected tensors: model.layers.0.extra.weight"),
        (cut, r"model.norm.weight is \[31\]"),
        (use_integers, "model.norm.weight is .* torch.int32, .* needs dense floats"),
        (leave_on_meta, "model.norm.weight is .* on meta"),
        (make_sparse, "model.norm.weight is .* torch.sparse_coo"),
        (use_numpy, "tensors must be a state dict, or pairs of a name and a tensor"),
        (repeat, "norm.weight is given twice"),
    ],
)
def test_what_does_not_match_changes_nothing(pair, expected, engine, change, message):
    tensors = dict(pair[2].state_dict())
    change(tensors)
    generate_ids(engine, PROMPTS, greedy(8))
    with pytest.raises((ValueError, TypeError), match=message):
        engine.update_weights(tensors)
    assert generate_ids(engine, PROMPTS, greedy(8)) == expected[0]
    assert engine.stats["num_cached_tokens"] > 0


@pytest.mark.parametrize("tensors", [None, 3, {1: torch.ones(1)}, [("a",)]], ids=str)
def test_what_is_no_state_dict_is_a_type_error(engine, tensors):
    with pytest.raises(TypeError, match="tensors must be a state dict"):
        engine.update_weights(tensors)


def test_an_update_after_exit_says_so(pair):
    llm = LLM(pair[0], max_model_len=100)
    llm.exit()
    with pytest.raises(RuntimeError, match="exit"):
        llm.update_weights(pair[2].state_dict())


def test_weights_in_8_bits_are_converted(pair, tmp_path):
    """Also where a folder asks whether they are those of the checkpoint."""
    tensors = {name: each.to(torch.float8_e4m3fn) for name, each in pair[2].state_dict().items()}
    with LLM(pair[0], max_model_len=100, kv_cache_dir=tmp_path) as llm:
        llm.update_weights(tensors)
        given = generate_ids(llm, PROMPTS, greedy(8))
        llm.update_weights({name: each.float() for name, each in tensors.items()})
        assert generate_ids(llm, PROMPTS, greedy(8)) == given


def test_an_interrupted_update_leaves_the_old_weights(pair, expected, engine, monkeypatch):
    load_checkpoint = weight_updates.weights.load_checkpoint

    def load_in_part(model, files, *args):
        load_checkpoint(model, files, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(weight_updates.weights, "load_checkpoint", load_in_part)
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights(pair[2].state_dict())
    monkeypatch.undo()
    assert generate_ids(engine, PROMPTS, greedy(8)) == expected[0]


@pytest.mark.parametrize("overlaps", [False, True])
def test_running_requests_go_on_with_new_weights(pair, engine, overlaps):
    """Tokens stay, and K/V of all of them are computed with the new weights."""
    _, new, trainer = pair
    engine.overlaps = overlaps
    engine.add_request(PROMPTS[0], greedy(20))
    outputs = [engine.step() for _ in range(6)][-1]
    engine.update_weights(trainer.state_dict())
    while not engine.is_finished():
        outputs = engine.step() or outputs
    tokens = outputs[0]["token_ids"]
    num_old = 6
    with LLM(new, max_model_len=100) as llm:
        prompt = PROMPTS[0] + tokens[:num_old]
        assert tokens[num_old:] == generate_ids(llm, [prompt], greedy(20 - num_old))[0]


def test_a_waiting_call_waits_for_wake_up(pair, expected, engine):
    results = []
    params = greedy(60)
    thread = Thread(target=lambda: results.append(generate_ids(engine, PROMPTS, params)))
    thread.start()
    while engine.stats["num_decode_tokens"] < 5:
        time.sleep(0.001)
    engine.sleep()
    assert engine.is_sleeping
    assert not engine.executor.worker.kv_caches
    for call in (
        lambda: engine.generate(PROMPTS),
        lambda: engine.add_request(PROMPTS[0]),
        engine.step,
        engine.reset_prefix_cache,
        lambda: next(engine.stream(PROMPTS)),
    ):
        with pytest.raises(RuntimeError, match=ASLEEP):
            call()
    engine.sleep()  # no effect
    engine.abort(99)
    assert not engine.is_finished()
    assert engine.stats["num_waiting"] == 3
    time.sleep(0.05)
    assert thread.is_alive()
    engine.wake_up()
    thread.join(30)
    with LLM(pair[0], max_model_len=100) as llm:
        assert results == [generate_ids(llm, PROMPTS, params)]
    check_idle(engine)


@pytest.mark.parametrize("level, is_updated", [(1, False), (1, True), (2, False), (2, True)])
def test_what_is_released_comes_back(pair, expected, engine, level, is_updated):
    assert generate_ids(engine, PROMPTS, greedy(8)) == expected[0]
    engine.sleep(level)
    assert (engine.executor.worker.model is None) == (level == 2)
    if is_updated:
        engine.update_weights(pair[2].state_dict())
        assert engine.is_sleeping
    engine.wake_up()
    engine.wake_up()  # no effect
    assert not engine.is_sleeping
    assert generate_ids(engine, PROMPTS, greedy(8)) == expected[is_updated]
    with pytest.raises(ValueError, match="level"):
        engine.sleep(3)


def test_memory_can_be_missing_at_wake_up(expected, engine, monkeypatch):
    engine.sleep()

    def fail(*args):
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(Worker, "make_caches", fail)
    with pytest.raises(ValueError, match="no memory for"):
        engine.wake_up()
    assert engine.is_sleeping
    with pytest.raises(RuntimeError, match=ASLEEP):
        engine.generate(PROMPTS)
    monkeypatch.undo()
    engine.wake_up()
    assert generate_ids(engine, PROMPTS, greedy(8)) == expected[0]


def test_a_sleeping_engine_can_exit(pair):
    llm = LLM(pair[0], max_model_len=100)
    errors = []

    def wait():
        try:
            llm.generate(PROMPTS, greedy(60))
        except RuntimeError as error:
            errors.append(str(error))

    thread = Thread(target=wait)
    thread.start()
    while llm.stats["num_decode_tokens"] < 5:
        time.sleep(0.001)
    llm.sleep()
    llm.exit()
    thread.join(30)
    assert errors == ["this engine has been shut down by exit()"]


def test_the_prefix_cache_can_be_emptied(expected, engine):
    for _ in range(2):
        assert generate_ids(engine, PROMPTS, greedy(8)) == expected[0]
        engine.reset_prefix_cache()
    assert engine.stats["num_cached_tokens"] == 0


def test_a_folder_belongs_to_the_weights_of_the_checkpoint(pair, expected, tmp_path):
    """Training neither fills it nor takes anything away from other engines."""
    old, _, trainer = pair
    options = {"max_model_len": 100, "kv_cache_dir": tmp_path / "kv", "kvcache_block_size": 4}
    with LLM(old, **options) as llm:
        generate_ids(llm, PROMPTS, greedy(8))
    files = sorted(tmp_path.glob("kv/*/*"))
    with LLM(old, **options) as llm:
        for seed in range(10):
            llm.update_weights(shake(load(old), seed).state_dict())
            generate_ids(llm, PROMPTS, greedy(8))
        assert llm.stats["num_restored_tokens"] == 0
        llm.update_weights(trainer.state_dict())
        assert generate_ids(llm, PROMPTS, greedy(8)) == expected[1]
        llm.update_weights(load(old).state_dict())
        assert generate_ids(llm, PROMPTS, greedy(8)) == expected[0]
        assert llm.stats["num_restored_tokens"] > 0
    assert sorted(tmp_path.glob("kv/*/*")) == files


@pytest.mark.parametrize("way", ["update", "wake_up"])
def test_a_folder_belongs_to_the_files_of_the_start(pair, expected, tmp_path, way):
    """A trainer saves over the checkpoint that the engine has read."""
    old, new, trainer = pair
    directory = shutil.copytree(old, tmp_path / "model")
    options = {"max_model_len": 100, "kv_cache_dir": tmp_path / "kv", "kvcache_block_size": 4}
    with LLM(directory, **options) as llm:
        generate_ids(llm, PROMPTS, greedy(8))
        llm.sleep(2)
        shutil.copy(f"{new}/model.safetensors", tmp_path / "file")
        (tmp_path / "file").rename(directory / "model.safetensors")
        if way == "update":
            llm.update_weights(trainer.state_dict())
        llm.wake_up()
        assert generate_ids(llm, PROMPTS, greedy(8)) == expected[1]
        assert llm.stats["num_restored_tokens"] == 0


def test_rounded_weights_are_others(pair, tmp_path):
    with LLM(pair[0], max_model_len=100, kv_cache_dir=tmp_path, kvcache_block_size=4) as llm:
        generate_ids(llm, PROMPTS, greedy(8))
        tensors = load(pair[0]).state_dict()
        llm.update_weights({name: tensor.bfloat16() for name, tensor in tensors.items()})
        generate_ids(llm, PROMPTS, greedy(8))
        assert llm.stats["num_restored_tokens"] == 0
        llm.update_weights(tensors)
        generate_ids(llm, PROMPTS, greedy(8))
        assert llm.stats["num_restored_tokens"] > 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_a_store_hears_of_an_update_before_it_begins(pair, expected, tmp_path, monkeypatch, error):
    """It may be interrupted afterwards, or the checkpoint may be gone."""
    directory = shutil.copytree(pair[0], tmp_path / "model")
    options = {"max_model_len": 100, "kv_offloading_size": 1.0, "kvcache_block_size": 4}
    with LLM(directory, **options) as llm:
        generate_ids(llm, PROMPTS, greedy(8))
        if error is None:
            shutil.rmtree(directory)
            llm.update_weights(pair[2].state_dict())
        else:
            monkeypatch.setattr(TensorFiles, "has_same", Mock(side_effect=error))
            with pytest.raises(error):
                llm.update_weights(pair[2].state_dict())
        assert generate_ids(llm, PROMPTS, greedy(8)) == expected[1]
        assert llm.stats["num_restored_tokens"] == 0


def test_a_beam_search_waits_for_wake_up(pair, engine):
    with LLM(pair[0], max_model_len=100) as llm:
        expected = llm.beam_search(PROMPTS, 3, 40)
    results = []
    thread = Thread(target=lambda: results.append(engine.beam_search(PROMPTS, 3, 40)))
    thread.start()
    while engine.stats["num_prefill_tokens"] < 200:
        time.sleep(0.001)
    engine.sleep()
    with pytest.raises(RuntimeError, match=ASLEEP):
        engine.beam_search(PROMPTS, 3, 40)
    time.sleep(0.05)
    engine.wake_up()
    thread.join(30)
    (found,) = results
    for beams, others in zip(found, expected):
        assert [beam["token_ids"] for beam in beams] == [beam["token_ids"] for beam in others]


def test_the_store_in_ram_is_emptied(pair, expected):
    with LLM(pair[0], max_model_len=100, kv_offloading_size=1.0, kvcache_block_size=4) as llm:
        generate_ids(llm, PROMPTS, greedy(8))
        store = find_feature(llm, StoredPrefixes).store
        assert store.entries
        llm.update_weights(pair[2].state_dict())
        assert not store.entries
        assert generate_ids(llm, PROMPTS, greedy(8)) == expected[1]


def test_ranks_and_stored_codes_are_rejected(pair, monkeypatch, engine):
    spec = SimpleNamespace(quantization=SimpleNamespace(format="gptq"))
    monkeypatch.setattr(engine.executor.worker, "spec", spec)
    with pytest.raises(ValueError, match="not stored quantized"):
        engine.update_weights({})
    monkeypatch.setattr(engine, "config", SimpleNamespace(tensor_parallel_size=2))
    for call in (engine.sleep, lambda: engine.update_weights({})):
        with pytest.raises(ValueError, match="tensor_parallel_size must be 1"):
            call()


def score(trainer, output):
    """Log probabilities of generated tokens, by the trainer."""
    prompt, reply = output["prompt_token_ids"], output["token_ids"]
    logits = trainer(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(reply)), reply]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7, "kvcache_block_size": 4}])
def test_the_trainer_and_the_engine_agree(pair, options):
    """On log probabilities of sampled tokens, after each of several optimizer steps."""
    trainer = load(pair[0])
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    params = SamplingParams(max_tokens=9, logprobs=0, ignore_eos=True, seed=1)
    with LLM(pair[0], max_model_len=100, num_speculative_tokens=2, **options) as llm:
        for _ in range(4):
            outputs = llm.generate(PROMPTS, params)
            theirs = torch.cat([score(trainer, output) for output in outputs])
            ours = [
                entry[token]
                for output in outputs
                for entry, token in zip(output["logprobs"], output["token_ids"])
            ]
            torch.testing.assert_close(torch.tensor(ours), theirs.detach(), atol=2e-5, rtol=0)
            optimizer.zero_grad()
            theirs.mean().backward()
            optimizer.step()
            llm.update_weights(trainer.state_dict())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_do_not_depend_on_the_batch(dtype):
    """To the last bit, on a CPU. So samples of one round are those of any other round."""
    prompts = [random_prompt(seed, 3 + 9 * seed % 40) for seed in range(9)]
    params = SamplingParams(max_tokens=12, logprobs=3, ignore_eos=True, seed=1)
    options = {"dtype": dtype, "max_model_len": 100, "enable_prefix_caching": False}
    with LLM(DEMO_MODEL, device="cpu", **options) as llm:
        together = llm.generate(prompts, params)
        for prompt, output in zip(prompts, together):
            (alone,) = llm.generate(prompt, params)
            assert alone["logprobs"] == output["logprobs"]


def test_grpo_raises_the_reward(capsys):
    shares = grpo.main(num_rounds=3)
    assert shares[-1] > shares[0]
    gaps = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(gaps) == 4
    assert max(gaps) < 1e-4


def test_a_store_outlives_the_cache_that_sleep_releases(pair, expected):
    with LLM(pair[0], max_model_len=100, kv_offloading_size=1.0, kvcache_block_size=4) as llm:
        for num_restored in (0, 84, 168):
            assert generate_ids(llm, PROMPTS, greedy(8)) == expected[0]
            assert llm.stats["num_restored_tokens"] == num_restored
            llm.sleep()
            llm.wake_up()


@pytest.mark.gpu
@pytest.mark.parametrize("store", [{}, {"kv_offloading_size": 1.0}])
def test_on_a_gpu(pair, monkeypatch, store):
    """Weights are copied to the tensors that CUDA graphs have, or moved to the host and back."""
    old, new, trainer = pair
    options = {"max_model_len": 100, "kvcache_block_size": 16, "num_kvcache_blocks": 30, **store}
    prompts = [random_prompt(seed, 50) for seed in range(9)]
    expected = []
    for path in (old, new):
        with LLM(path, **options) as llm:
            expected.append(generate_ids(llm, prompts, greedy(8)))
    with LLM(old, **options) as llm:
        assert llm.device.type == "cuda"
        assert generate_ids(llm, prompts, greedy(8)) == expected[0]
        load_checkpoint = weight_updates.weights.load_checkpoint

        def load_in_part(model, files, *args):
            load_checkpoint(model, files, *args)
            if model is llm.executor.worker.model:
                raise KeyboardInterrupt

        monkeypatch.setattr(weight_updates.weights, "load_checkpoint", load_in_part)
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(trainer.state_dict())
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="the weights are incomplete"):
            llm.generate(prompts)
        llm.update_weights(trainer.state_dict())
        assert generate_ids(llm, prompts, greedy(8)) == expected[1]
        for level in (1, 2):
            llm.sleep(level)
            if level == 1:
                assert next(llm.executor.worker.model.parameters()).device.type == "cpu"
                llm.update_weights(trainer.state_dict())
            llm.wake_up()
            assert generate_ids(llm, prompts, greedy(8)) == expected[2 - level]
        llm.sleep(2)
        llm.update_weights(trainer.state_dict())
        llm.wake_up()
        for _ in range(2):
            assert generate_ids(llm, prompts, greedy(8)) == expected[1]
        assert (llm.stats["num_restored_tokens"] > 0) == bool(store)
