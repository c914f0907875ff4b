"""The engine as its users see it: inputs, outputs, errors, and random use of all calls together."""

import inspect
import pydoc
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import VOCAB_SIZE, check_invariants, greedy, random_prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.config import MAX_DRAFT_STEP, Config
from nanovllm.engine.memory import count_blocks, find_available_memory, profile_sampling
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.penalties import Penalties

GREEDY = greedy(6)


@pytest.fixture(scope="module")
def demo():
    return LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=512)


# --- options


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"max_num_seq": 3}, "max_num_seq"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": 3}, "device"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 257}, "max_model_len.* 256"),
        (
            {"max_model_len": 100, "num_kvcache_blocks": 5, "kvcache_block_size": 4},
            "max_model_len.* 20.*num_kvcache_blocks",
        ),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 2.5}, "max_num_seqs"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"kvcache_block_size": 1}, "kvcache_block_size"),
        ({"num_kvcache_blocks": 0}, "num_kvcache_blocks"),
        ({"num_kvcache_blocks": 10**12}, "num_kvcache_blocks"),
        ({"num_kvcache_blocks": 2**31 - 1}, "num_kvcache_blocks"),
        ({"kvcache_block_size": 2**31 - 1}, "kvcache_block_size"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        ({"max_num_seqs": 10**30}, "max_num_seqs"),
        ({"kvcache_block_size": 10**30}, "kvcache_block_size"),
        ({"num_kvcache_blocks": 10**30}, "num_kvcache_blocks"),
        ({"kvcache_memory_bytes": 10**30, "num_kvcache_blocks": None}, "kvcache_memory_bytes"),
        ({"kvcache_memory_bytes": 100, "num_kvcache_blocks": None}, "kvcache_memory_bytes"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
        (
            {"attention_backend": "fast"},
            "attention_backend must be one of 'auto', .*'torch', not 'fast'",
        ),
        ({"enable_kernels": 1}, "enable_kernels must be True or False"),
        (
            {"enable_kernels": False, "attention_backend": "cpp"},
            "attention_backend='cpp' needs enable_kernels=True",
        ),
        ({"load_format": "gguf"}, "load_format"),
        ({"seed": -1}, "seed"),
        ({"trace": 3}, "trace must be"),
    ],
    ids=str,
)
def test_wrong_options_are_named(make_llm, options, complaint):
    with pytest.raises((ValueError, TypeError), match=complaint):
        make_llm(**options)


def test_every_option_is_seen_with_its_default():
    """`help` and `inspect` show the options, and editors read the annotations of Config."""
    parameters = inspect.signature(LLM).parameters
    assert (
        list(parameters) == [field.name for field in fields(Config)]
        and parameters["model"].default is inspect.Parameter.empty
    )
    defaults = {
        name: parameter.default for name, parameter in parameters.items() if name != "model"
    }
    config = Config("", **defaults)
    assert (
        all(getattr(config, name) == default for name, default in defaults.items())
        and defaults["max_num_seqs"] == 256
    )
    assert "max_num_seqs: int = 256" in pydoc.render_doc(LLM) and all(
        f"        {name}: " in Config.__doc__ for name in parameters
    )
    assert {
        f"        {field.name}: " in SamplingParams.__doc__ for field in fields(SamplingParams)
    } == {True}


def test_options_hold_under_python_O(tiny):
    code = f"from nanovllm import LLM\ntry: LLM({tiny[0]!r}, max_num_seqs=0)\nexcept ValueError as e: print(e)"
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True
    )
    assert "max_num_seqs" in done.stdout


def test_max_model_len_defaults(make_llm):
    assert make_llm().max_model_len == 256
    assert make_llm(num_kvcache_blocks=10).max_model_len == 40
    assert make_llm(max_model_len=30).max_model_len == 30
    assert LLM(DEMO_MODEL, num_kvcache_blocks=1000).max_model_len <= 4096


def test_kv_cache_size(make_llm):
    block_bytes = (
        4 * 2 * 2 * 2 * 16 * 4
    )  # block size, K and V, layers, KV heads, head_dim, bytes of a float32
    llm = make_llm(num_kvcache_blocks=None, kvcache_memory_bytes=10 * block_bytes + 1)
    assert llm.stats["num_blocks"] == 10
    assert (
        make_llm(num_kvcache_blocks=7, kvcache_memory_bytes=10 * block_bytes).stats["num_blocks"]
        == 7
    )


@pytest.mark.parametrize(
    "memberships, limits, left",
    [
        ("0::/", {}, None),
        ("9:cpu,memory:/a\n1:name=systemd:/b:c\n0::/a/b", {"a/b": {"memory.max": 1000, "memory.high": "max"}}, 500),
        ("0::/a/b", {"a/b": {"memory.max": 1000}, "a": {"memory.high": 900}}, 400),
        ("0::/docker/unseen", {".": {"memory.max": 400}}, 0),
        ("9:memory:/a", {"a": {"memory.max": 1000}}, None),
    ],
    ids=["none", "own", "parent", "container", "not-version-2"],
)  # fmt: skip
def test_memory_of_a_cgroup(tmp_path, memberships, limits, left):
    """Each cgroup uses 700 bytes, of which 200 can be reclaimed."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(memberships + "\n")
    for group, files in limits.items():
        (tmp_path / "sys/fs/cgroup" / group).mkdir(parents=True, exist_ok=True)
        for name, content in {
            **files,
            "memory.current": 700,
            "memory.stat": "anon 500\ninactive_file 200",
        }.items():
            (tmp_path / "sys/fs/cgroup" / group / name).write_text(f"{content}\n")
    found = find_available_memory(tmp_path)
    assert found == left if left is not None else found > 2**20
    assert find_available_memory(tmp_path / "another system") > 2**20


class FakeGPU:
    """A MemoryMeter of a GPU with 100,000 bytes, where a token takes 1000."""

    device = torch.device("cuda")
    total = 100_000_000

    def __init__(self, free_before):
        self.free_before = free_before

    def peak(self):
        return 10_000_000


@pytest.mark.parametrize(
    "free, utilization, tokens",
    [(100_000_000, 0.9, 80_000), (100_000_000, 0.5, 40_000), (40_000_000, 0.9, 28_000)],
)
def test_kv_cache_size_on_a_gpu(make_llm, free, utilization, tokens):
    """The cache gets a share of the GPU, or of what is free, without weights and the largest step."""
    llm = make_llm()
    spec = replace(
        llm.model_runner.executor.worker.spec, num_layers=125, num_kv_heads=1, head_dim=1
    )
    config = Config(model="", gpu_memory_utilization=utilization)
    steps = []
    num_blocks, line = count_blocks(config, spec, 10, 1000, FakeGPU(free), lambda: steps.append(1))
    assert num_blocks * 10 == tokens and steps == [1] and str(num_blocks) in line
    assert count_blocks(config, spec, 10, 91, FakeGPU(free), lambda: None)[0] == 256 * 10, (
        "that is all that can be used"
    )
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        count_blocks(config, spec, 10, 1000, FakeGPU(10_000_000), lambda: None)


def test_the_largest_step_is_one(make_llm, monkeypatch):
    """The profile run samples with every kind of parameters and leaves no state."""
    llm = make_llm(max_num_batched_tokens=301, max_num_seqs=7)
    runner, seen = llm.model_runner, []
    apply, lengths = Penalties.apply, []
    monkeypatch.setattr(Penalties, "apply", lambda *args: seen.append(apply(*args)) or seen[-1])
    penalize = Penalties._penalize
    monkeypatch.setattr(
        Penalties,
        "_penalize",
        lambda *args: lengths.extend(len(s.token_ids) for s in args[3]) or penalize(*args),
    )
    batch = runner.executor.worker.make_largest_batch()
    profile_sampling(
        runner.sample, runner.executor.worker.max_model_len, runner.executor.worker.run(batch)
    )
    runner.penalties.reset()
    assert len(lengths) == 7 and max(lengths) == runner.executor.worker.max_model_len, (
        "of penalties, the longest sequence takes most"
    )
    assert (
        len(batch.input_ids) == 301 and len(batch.logits_indices) == 7 and batch.max_seqlen_q == 256
    )
    assert (
        len(seen) == 1
        and seen[0].shape == (7, VOCAB_SIZE)
        and seen[0].isinf().any()
        and not len(runner.penalties.counts)
    )
    prompt = random_prompt(0, 9)
    assert len(llm.generate(prompt, GREEDY, use_tqdm=False)[0]["token_ids"]) == 6
    drafts = make_llm(
        max_num_batched_tokens=301, max_num_seqs=7, num_speculative_tokens=2
    ).model_runner.executor.worker.make_largest_batch()
    assert len(drafts.logits_indices) == MAX_DRAFT_STEP, "a draft has logits, too"


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", 10**400),
        ("temperature", "hot"), ("top_p", 0.0), ("top_p", 1.1), ("top_k", 0),
        ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1), ("max_tokens", 0), ("max_tokens", None), ("seed", "x"),
        ("ignore_eos", 1), ("n", 0), ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3.0),
        ("repetition_penalty", 0.0), ("repetition_penalty", 1e300), ("repetition_penalty", 1e-300), ("repetition_penalty", -1.0),
        ("min_tokens", -1), ("min_tokens", 65), ("stop", ""), ("stop", ["a", 3]), ("stop", 5),
        ("stop_token_ids", [-1]), ("stop_token_ids", 3), ("stop_token_ids", ["x"]), ("logprobs", -1), ("logprobs", True),
        ("max_tokens", np.float64(3.0)), ("max_tokens", np.bool_(True)),
        ("temperature", np.float32("nan")), ("temperature", np.bool_(True)),
    ],
)  # fmt: skip
def test_wrong_sampling_params_are_named(field, value):
    with pytest.raises((ValueError, TypeError), match=field):
        SamplingParams(**{field: value})


def test_numbers_of_numpy_are_numbers():
    """They are converted to Python's numbers, which do not overflow."""
    given = {"temperature": np.float32(0.5), "top_p": np.float16(0.5), "top_k": np.int8(5), "max_tokens": np.int64(70),
             "seed": np.uint64(2**64 - 1), "stop_token_ids": np.array([3, 4]), "logprobs": np.int32(2), "min_p": 0}  # fmt: skip
    params = SamplingParams(**given)
    assert params == SamplingParams(**{**given, "seed": 2**64 - 1, "stop_token_ids": [3, 4]})
    kept = [getattr(params, name) for name in given] + params.stop_token_ids
    assert {type(value) for value in kept} == {int, float, list} and type(
        params.stop_token_ids[0]
    ) is int
    assert SamplingParams(
        stop=("a", "b"), stop_token_ids=(np.int64(1),), seed=2**70
    ).stop_token_ids == [1]
    config = Config(
        model="",
        max_num_seqs=np.int64(3),
        gpu_memory_utilization=np.float32(0.5),
        seed=np.uint8(255),
    )
    assert [
        type(value) for value in (config.max_num_seqs, config.gpu_memory_utilization, config.seed)
    ] == [int, float, int]


# --- generate


def test_forms_of_prompts(demo):
    ids = demo.tokenizer.encode("What is 1 + 2?")
    outputs = [
        *demo.generate("What is 1 + 2?", GREEDY, use_tqdm=False),
        *demo.generate(ids, GREEDY, use_tqdm=False),
        *demo.generate(["What is 1 + 2?", ids], [GREEDY, GREEDY], use_tqdm=False),
    ]
    assert all(o["prompt_token_ids"] == ids for o in outputs)
    assert len({tuple(o["token_ids"]) for o in outputs}) == 1
    assert demo.generate([], GREEDY, use_tqdm=False) == []
    request_ids = [o["request_id"] for o in outputs]
    assert request_ids == sorted(set(request_ids))


@pytest.mark.parametrize(
    "prompts, complaint",
    [
        ([[]], "at least one token"),
        ([[1, 2], [VOCAB_SIZE]], f"{VOCAB_SIZE}"),
        ([[1, -1]], "-1"),
        ([[1, "a"]], "'str' object cannot be interpreted as an integer"),
        ([[1, 2], None], "None"),
        (None, "None"),
        ([[1] * 39, [1] * 40], "max_model_len=40"),
        (["text"], "no tokenizer"),
    ],
)
def test_a_refused_call_queues_nothing(make_llm, prompts, complaint):
    llm = make_llm(num_kvcache_blocks=10)
    for call in (llm.generate, llm.stream):
        with pytest.raises((ValueError, TypeError), match=complaint):
            call(prompts, GREEDY)
    assert llm.is_finished() and llm.stats["num_waiting"] == 0 and llm.step() == []
    with pytest.raises(ValueError, match="2 prompts but 1"):
        llm.generate([[1], [2]], [GREEDY], use_tqdm=False)
    for params in ({"temperature": 0}, {}, 0):
        with pytest.raises(TypeError, match="sampling_params"):
            llm.generate([[1]], params, use_tqdm=False)


@pytest.mark.parametrize("wrong", [torch.tensor(1.5), np.array([1, 2])], ids=str)
def test_numbers_that_look_like_an_index(make_llm, wrong):
    """Arrays have __index__, and raise in it."""
    llm = make_llm()
    with pytest.raises(TypeError, match="only integer .* index"):
        llm.generate([[1], [2, wrong], [3]], GREEDY, use_tqdm=False)
    assert llm.is_finished()


def test_numbers_that_are_not_int_serve_as_token_ids(make_llm):
    llm = make_llm()
    expected = llm.generate([3, 4], GREEDY, use_tqdm=False)[0]["token_ids"]
    for prompts in ([np.int64(3), np.int32(4)], [(3, 4)], [[np.uint8(3), 4]]):
        (output,) = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert output["token_ids"] == expected and output["prompt_token_ids"] == [3, 4]


def test_prompt_above_the_budget_of_whole_prompts(make_llm):
    with pytest.raises(ValueError, match="max_num_batched_tokens=8"):
        make_llm(enable_chunked_prefill=False, max_num_batched_tokens=8).add_request([1] * 9)
    assert (
        len(
            make_llm(max_num_batched_tokens=8).generate([1] * 9, GREEDY, use_tqdm=False)[0][
                "token_ids"
            ]
        )
        == 6
    )


def test_finish_reasons(tiny, make_llm):
    prompt = random_prompt(4, 7)
    expected = tiny[1](prompt, 33)
    llm = make_llm(num_kvcache_blocks=10)
    whole = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=100), use_tqdm=False)[0]
    assert (whole["token_ids"], whole["finish_reason"]) == (expected, "length"), (
        "ends at max_model_len=40"
    )
    llm.eos_token_ids = frozenset({expected[3]})
    first = expected.index(expected[3]) + 1
    stopped = llm.generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=first), use_tqdm=False
    )[0]
    assert (stopped["token_ids"], stopped["finish_reason"]) == (expected[:first], "stop"), (
        "stop before length"
    )
    ignored = llm.generate(
        prompt, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True), use_tqdm=False
    )[0]
    assert (ignored["token_ids"], ignored["finish_reason"]) == (expected[:9], "length")
    assert whole["text"] == "" and whole["logprobs"] is None and whole["cumulative_logprob"] is None


def test_eos_comes_from_both_configs(demo):
    assert demo.eos_token_ids == set(
        demo.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    )


def test_prefix_hits_are_reported(make_llm):
    llm = make_llm(max_num_batched_tokens=64)
    shared = random_prompt(0, 12)
    prompts = [shared + random_prompt(i, 3) for i in range(1, 4)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o["num_cached_tokens"] for o in outputs] == [0, 12, 12], (
        "shared within the first step already"
    )
    assert llm.stats["num_cached_tokens"] == 24 and llm.stats["num_prefill_tokens"] == 15 + 3 + 3
    assert llm.stats["num_decode_tokens"] == 3 * (GREEDY.max_tokens - 1)
    assert llm.stats["num_free_blocks"] == llm.stats["num_blocks"] == 64


# --- sharing an engine


def test_step_reports_what_others_gained_meanwhile(make_llm):
    llm = make_llm()
    mine = llm.add_request(random_prompt(0, 5), GREEDY)
    outputs = llm.generate(random_prompt(1, 5), SamplingParams(max_tokens=9), use_tqdm=False)
    assert [o["request_id"] for o in outputs] == [mine + 1]
    assert not llm.is_finished(), "the other one has ended, but it has not been reported"
    (news,) = llm.step()
    assert (news["request_id"], news["finish_reason"], len(news["token_ids"])) == (
        mine,
        "length",
        6,
    )
    assert llm.is_finished() and llm.step() == []


def test_stream(demo):
    whole = demo.generate(["count", "7"], GREEDY, use_tqdm=False)
    seen: dict[int, list] = {}
    for output in demo.stream(["count", "7"], GREEDY):
        seen.setdefault(output["request_id"], []).append(output)
    for outputs, expected in zip(seen.values(), whole):
        assert [len(o["token_ids"]) for o in outputs] == list(
            range(1, len(expected["token_ids"]) + 1)
        )
        assert all(
            later["text"].startswith(earlier["text"]) for earlier, later in pairwise(outputs)
        )
        assert (
            outputs[-1]["text"] == expected["text"]
            and outputs[-1]["finish_reason"] == expected["finish_reason"]
        )


def test_leaving_a_stream_takes_its_requests_back(make_llm):
    llm = make_llm(max_num_seqs=2)
    stream = llm.stream([random_prompt(i, 5) for i in range(5)], GREEDY)
    assert llm.is_finished(), "queued when the first output is asked for"
    next(stream)
    assert not llm.is_finished()
    stream.close()
    assert llm.is_finished() and llm.stats["num_free_blocks"] == 64 and llm.step() == []


def test_abort_and_generate_inside_a_stream(make_llm):
    llm = make_llm()
    last: dict[int, dict] = {}
    for output in llm.stream([random_prompt(i, 5) for i in range(3)], GREEDY):
        if not last:
            llm.abort(output["request_id"] + 1)
            llm.generate(random_prompt(9, 4), SamplingParams(max_tokens=2), use_tqdm=False)
        last[output["request_id"]] = output
    assert [o["finish_reason"] for o in last.values()] == ["length", "abort", "length"]
    assert len(last[0]["token_ids"]) == 6 and llm.is_finished()


def test_abort(make_llm):
    llm = make_llm(max_num_seqs=1)
    first, second = llm.add_request([1, 2], GREEDY), llm.add_request([3], GREEDY)
    llm.step()
    llm.abort(first)
    llm.abort(second)
    llm.abort(first)
    llm.abort(12345)
    assert llm.is_finished() and llm.stats["num_free_blocks"] == 64
    assert [(o["request_id"], o["finish_reason"], len(o["token_ids"])) for o in llm.step()] == [
        (first, "abort", 1),
        (second, "abort", 0),
    ]


def test_several_engines_and_exit(tiny, make_llm):
    prompt = random_prompt(0, 9)
    with make_llm(kvcache_block_size=2) as one, make_llm(kvcache_block_size=8) as two:
        streams = [one.stream(prompt, GREEDY), two.stream(prompt, GREEDY)]
        pairs = list(zip(*streams, strict=True))
        assert [o["token_ids"] for o in pairs[-1]] == [tiny[1](prompt, 6)] * 2
    one.exit()
    for call in (one.generate, one.add_request):
        with pytest.raises(RuntimeError, match="exit"):
            call(prompt)


def test_no_module_is_needed_that_a_laptop_lacks():
    code = "import sys, nanovllm; print(sorted({'triton', 'flash_attn'} & set(sys.modules)))"
    blocked = (
        "import sys; sys.modules['triton'] = sys.modules['flash_attn'] = None; import nanovllm"
    )
    subprocess.run([sys.executable, "-c", blocked], check=True)
    assert (
        "flash_attn"
        not in subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )


def test_no_global_state_is_left(make_llm):
    before = (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.get_rng_state(),
    )
    make_llm(dtype="bfloat16").generate([1, 2, 3], use_tqdm=False)
    after = (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.get_rng_state(),
    )
    assert before[:3] == after[:3] and torch.equal(before[3], after[3])


# --- text


@pytest.mark.parametrize(
    "text",
    ["naïve café", "你好，世界", "👩‍👩‍👧 family", "é̂ combining", "plain", " leading", "a\ufffdb"],
)
def test_text_grows_whole_characters_only(demo, text, monkeypatch):
    """Streamed text is append-only, has no broken character, and ends as the tokenizer decodes it."""
    token_ids = demo.tokenizer.encode(text)
    script = iter(token_ids)
    monkeypatch.setattr(ModelRunner, "sample", lambda self, logits, seqs: ([[next(script)]], None))
    texts = [o["text"] for o in demo.stream([1], SamplingParams(max_tokens=len(token_ids)))]
    assert texts[-1] == text
    for shown in texts:
        assert text.startswith(shown)


def test_text_cut_inside_a_character(demo, monkeypatch):
    token_ids = demo.tokenizer.encode("ab👧")[:-1]
    script = iter(token_ids)
    monkeypatch.setattr(ModelRunner, "sample", lambda self, logits, seqs: ([[next(script)]], None))
    texts = [o["text"] for o in demo.stream([1], SamplingParams(max_tokens=len(token_ids)))]
    assert "\ufffd" not in texts[-2] and texts[-1] == demo.tokenizer.decode(token_ids)


def test_chat(demo):
    user = {"role": "user", "content": "What is 2 + 3?"}
    (one,) = demo.chat([user], GREEDY, use_tqdm=False)
    two = demo.chat(
        [[user], [{"role": "system", "content": "Be brief."}, user]], GREEDY, use_tqdm=False
    )
    assert one["token_ids"] == two[0]["token_ids"]
    rendered = demo.tokenizer.apply_chat_template(
        [user], add_generation_prompt=True, tokenize=False
    )
    assert demo.tokenizer.decode(one["prompt_token_ids"]) == rendered
    assert demo.chat([], GREEDY, use_tqdm=False) == []


def test_chat_wants_messages(demo):
    with pytest.raises(TypeError, match="messages"):
        demo.chat("hi")
    for wrong in ([["a"]], [3], [{"role": "user", "content": "hi"}, "x"]):
        with pytest.raises(ValueError, match="messages do not fit"):
            demo.chat(wrong)


def test_chat_with_parts(demo):
    """Text parts are joined, as OpenAI's clients send them. Other types are rejected by name."""
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "12 + 30?"}]
    (joined,) = demo.chat(
        [{"role": "user", "content": "What is\n12 + 30?"}], GREEDY, use_tqdm=False
    )
    (output,) = demo.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert (
        output["prompt_token_ids"] == joined["prompt_token_ids"]
        and output["text"] == joined["text"]
    )
    image = {"type": "image_url", "image_url": {"url": "data:" + "x" * 10000}}
    for wrong, name in (
        (image, "'image_url'"),
        ("text", "'str'"),
        ({"type": "text"}, "'text'"),
        ({"text": "hi"}, "None"),
    ):
        with pytest.raises(ValueError, match=name) as caught:
            demo.chat([{"role": "user", "content": [parts[0], wrong]}])
        assert len(str(caught.value)) < 200


def test_chat_template_that_fails(demo, monkeypatch):
    """An error of the template becomes a ValueError."""
    for template in (
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x.y }}",
        "{{ raise_exception('no') }}",
        "{{",
    ):
        monkeypatch.setattr(demo.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match="chat template"):
            demo.chat([{"role": "user", "content": "hi"}])
    assert demo.is_finished()


def test_half_a_character(demo):
    """The error names the prompt and the position of the surrogate."""
    text = "x" * 50 + "\ud83d"  # of an emoji
    for call in (
        demo.generate,
        demo.add_request,
        lambda text: demo.chat([{"role": "user", "content": text}]),
    ):
        with pytest.raises(ValueError, match="lone surrogate"):
            call(text)
    with pytest.raises(ValueError, match="a conversation .* position"):
        demo.chat([{"role": "user", "content": [{"type": "text", "text": text}]}])


def test_chat_needs_a_tokenizer(make_llm):
    with pytest.raises(ValueError, match="no tokenizer"):
        make_llm().chat([{"role": "user", "content": "hi"}])


# --- a random life


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_life(tiny, data):
    """Requests are added, aborted, streamed and generated in any order on a small pool."""
    draw = data.draw
    llm = LLM(
        tiny[0],
        kvcache_block_size=draw(st.sampled_from([2, 4, 5])),
        num_kvcache_blocks=draw(st.integers(12, 24)),
        max_num_batched_tokens=draw(st.sampled_from([24, 30, 64])),
        max_num_seqs=draw(st.integers(1, 5)),
        enable_chunked_prefill=draw(st.booleans()),
        enable_prefix_caching=draw(st.booleans()),
        num_speculative_tokens=draw(st.sampled_from([0, 3])),
    )
    prompts: dict[int, list[int]] = {}
    outputs: dict[int, dict] = {}

    def new_request():
        seed, length = draw(st.integers(0, 3)), draw(st.integers(1, 15))
        return random_prompt(seed, length), SamplingParams(
            temperature=0.0, max_tokens=draw(st.integers(1, 8))
        )

    for action in draw(
        st.lists(
            st.sampled_from(["add", "add", "step", "step", "abort", "generate", "stream"]),
            max_size=30,
        )
    ):
        if action == "add":
            prompt, params = new_request()
            prompts[llm.add_request(prompt, params)] = prompt
        elif action == "step":
            outputs.update((o["request_id"], o) for o in llm.step())
        elif action == "abort" and prompts:
            llm.abort(draw(st.sampled_from(sorted(prompts))))
        elif action == "generate":
            prompt, params = new_request()
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            assert output["token_ids"] == tiny[1](prompt, params.max_tokens)
        elif action == "stream":
            for _, output in zip(range(draw(st.integers(1, 9))), llm.stream(*new_request())):
                assert output["request_id"] not in prompts
        check_invariants(llm)
    for _ in range(1000):
        if llm.is_finished():
            break
        outputs.update((o["request_id"], o) for o in llm.step())
        check_invariants(llm)
    outputs.update((o["request_id"], o) for o in llm.step())
    assert outputs.keys() == prompts.keys()
    for request_id, output in outputs.items():
        assert output["finish_reason"] in ("length", "abort")
        assert output["token_ids"] == tiny[1](prompts[request_id], 8)[: len(output["token_ids"])]
    assert llm.stats["num_free_blocks"] == llm.stats["num_blocks"]
