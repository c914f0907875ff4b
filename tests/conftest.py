"""What tests share: tiny random checkpoints, the greedy tokens of transformers, and checks."""

import functools
import gc
import importlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # each process has a core
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads this when it is imported
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")  # where the kernels for GPUs run
if not ON_GPU:
    # Triton reads this when it is imported. Kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3Config

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.batch import batch as batches
from nanovllm.batch.batch import Batch, SamplingBatch
from nanovllm.batch.packing import copy_to
from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.feature import Feature, Features
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.features.windows import Windows
from nanovllm.kernels.cpu.decoder import FastDecoderLayers
from nanovllm.kernels.select import BACKENDS
from nanovllm.layers import sampler
from nanovllm.layers.attention import AttentionShape
from nanovllm.utils.helpers import cdiv

Kind = TypeVar("Kind", bound=Feature)
VOCAB_SIZE = 97
# The batch of batch.py's picture, but for the slots of its states.
DRAWN_BATCH = dict(
    positions=[0, 1, 2, 7, 4, 5],
    slot_mapping=[20, 21, 22, 27, 36, 37],
    cu_seqlens_q=[0, 3, 4, 6],
    context_lens=[3, 8, 6],
    logits_indices=[2, 3, 5],
    window_slots=[],
    window_tables=[[], [], []],
    long_queries=[0, 2],
    max_seqlen_q=3,
    max_seqlen_k=8,
)
DEFAULTS = Config.__init__.__kwdefaults__
LLM.generate.__defaults__ = (None, False)  # sampling_params, and no progress bar

if ON_GPU:
    # A test without the marker `gpu` runs on the CPU, as do the processes that it starts.
    torch.cuda.init()
    torch.cuda.device_count()  # torch remembers the number
    VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    DEFAULTS["device"] = "cpu"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n, give each process a half of the tests in order, and the rest of the slower one.

    By default processes take turns, so that both start the server and the engine of each file.
    """
    if config.option.dist == "load":
        return importlib.import_module("xdist.scheduler").WorkStealingScheduling(config, log)
    return None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name != "test_compiled.py")  # a minute for one test
    for item in items:
        if item.get_closest_marker("gpu") and not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def gpus_are_seen(request, monkeypatch):
    """Show the GPUs to tests with the marker `gpu`, and free their memory afterwards."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    monkeypatch.setitem(DEFAULTS, "device", "auto")
    if VISIBLE is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE)
    yield
    gc.collect()
    torch.cuda.empty_cache()


def make_checkpoint(
    directory: Path,
    max_shard_size: str = "5GB",
    dtype: torch.dtype = torch.float32,
    family: type[PretrainedConfig] = Qwen3Config,
    **changes,
) -> PreTrainedModel:
    """Save a random model of 2 layers.

    Its weights are large, so that different prompts give different tokens.
    """
    torch.manual_seed(0)
    settings = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(family(**{**settings, **changes})).eval()
    for name, parameter in model.named_parameters():
        # model.to(dtype) would round RoPE's frequencies, a buffer, as loading does not.
        parameter.data = parameter.data.to(dtype)
        if parameter.dim() == 1:  # Mistakes would not show at 1 and 0, where transformers starts.
            torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.3)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():  # such as a bias of a router
            torch.nn.init.normal_(buffer, 0.0, 0.3)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def copy_tokenizer(directory: Path) -> None:
    """Give a checkpoint the tokenizer of the demo model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(DEMO_MODEL) / name, directory)


def edit_weights(directory: Path, edit: Callable) -> None:
    """Change the tensors in a checkpoint's only file with `edit`."""
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors")


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class Oracle:
    """The greedy continuation of a prompt by transformers, one prompt at a time, cached."""

    def __init__(self, model):
        self.model = model
        self.known = {}

    def __call__(self, prompt: list[int], num_tokens: int) -> list[int]:
        known = self.known.get(tuple(prompt), [])
        if len(known) < num_tokens:
            ids = torch.tensor([prompt])
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            known = out[0, len(prompt) :].tolist()
            self.known[tuple(prompt)] = known
        return known[:num_tokens]

    @torch.inference_mode()
    def find_logprobs(self, prompt: list[int]) -> torch.Tensor:
        """Log probabilities [len(prompt) - 1, vocab_size] of the tokens of a prompt."""
        return self.model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The path of a checkpoint, and its oracle."""
    directory = tmp_path_factory.mktemp("tiny")
    return str(directory), Oracle(make_checkpoint(directory))


@pytest.fixture
def make_llm(tiny):
    """A function that makes engines for the tiny checkpoint, by default with a small pool."""

    def make(model: str = tiny[0], **options) -> LLM:
        return LLM(model, **{"num_kvcache_blocks": 64, "kvcache_block_size": 4, **options})

    return make


@pytest.fixture(scope="module")
def llm():
    """The demo model with sequences of up to 1,024 tokens, or what a module puts in its place."""
    with LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=64) as llm:
        yield llm


@pytest.fixture(scope="module")
def demo():
    """The demo model with sequences of up to 2,048 tokens."""
    return LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=512)


@pytest.fixture
def layer_calls(monkeypatch):
    """How many layers each call of the C++ kernels computes."""
    calls = []
    compute = FastDecoderLayers._compute

    def record(layers, first, kv_caches, *args, **options):
        calls.append(len(kv_caches))
        compute(layers, first, kv_caches, *args, **options)

    monkeypatch.setattr(FastDecoderLayers, "_compute", record)
    return calls


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens)


def generate_ids(llm: LLM, prompts, params=None) -> list[list[int]]:
    """Generate, and return the token ids of each completion."""
    return [output["token_ids"] for output in llm.generate(prompts, params)]


def random_prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def cover_pairs(*factors: Iterable, allowed: Callable[..., bool] = lambda *_: True) -> list[tuple]:
    """Choose a covering array greedily: few combinations in which any two values occur together.

    Combinations that are not `allowed` are left out.
    """
    combinations = [each for each in itertools.product(*factors) if allowed(*each)]
    pairs = []
    for combination in combinations:
        values = enumerate(map(repr, combination))
        pairs.append(set(itertools.combinations(values, 2)))
    uncovered = set().union(*pairs)
    chosen = []
    while uncovered:
        best = max(range(len(combinations)), key=lambda i: len(pairs[i] & uncovered))
        chosen.append(combinations[best])
        uncovered -= pairs[best]
    return chosen


def load_backend(name: str) -> ModuleType:
    """Load a registered attention backend. Raises ImportError if a package is missing."""
    backend = importlib.import_module(BACKENDS[name].module)
    assert backend.NAME == name
    return backend


def make_shape(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.1, window=None) -> AttentionShape:
    """Describe the attention of a layer."""
    return AttentionShape(num_heads, num_kv_heads, head_dim, scale, window)


def find_obstacle(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int = 64,
    block_size: int | None = None,
    window: int | None = None,
) -> str | None:
    """Return why a registered attention backend cannot run here, or None.

    Unlike select_backend, this does not check results. A wrong backend is therefore not skipped.
    """
    try:
        backend = load_backend(name)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == "nanovllm":  # a mistake, not a missing package
            raise
        return str(error)
    shape = make_shape(head_dim=head_dim, window=window)
    return backend.reason_unavailable(
        device, dtype, shape, block_size or backend.PREFERRED_BLOCK_SIZE
    )


@functools.cache
def list_ways() -> list[dict[str, Any]]:
    """List the ways to compute on a CPU in float32: attention backends, and without kernels."""
    ways: list[dict[str, Any]] = [{"enable_kernels": False}]
    for name in BACKENDS:
        if find_obstacle(name, torch.device("cpu"), torch.float32, 16, 4) is None:
            ways.append({"attention_backend": name})
    return ways


def make_batch(query_lens, context_lens, block_tables, device="cpu") -> Batch:
    """Make a batch for attention. Tokens and states are 0, and all K/V go to slot 0."""
    batch = batches.make_batch(
        query_lens, context_lens, block_tables.cpu().numpy(), max(context_lens)
    )
    zeros = np.zeros_like(batch.input_ids)
    batch = replace(batch, positions=zeros, slot_mapping=zeros)
    return copy_to(batch, torch.device(device))


def find_feature(llm: LLM, kind: type[Kind]) -> Kind | None:
    """Return the feature of an engine that is of this class, or None if it uses none."""
    return next((each for each in llm.features if isinstance(each, kind)), None)


def attach(scheduler: Scheduler, *features: Feature) -> None:
    """Let features act on a scheduler without an engine."""
    scheduler.features = Features(features)
    for feature in features:
        feature.scheduler = scheduler
        feature.reset()


def make_drafts_free(llm: LLM) -> Drafts:
    """Let an engine draft as if draft tokens cost nothing. Return the feature."""
    drafts = find_feature(llm, Drafts)
    drafts.costs = StepCosts(per_token=0.0)
    return drafts


def disturb_logits(llm: LLM, is_bad: Callable[[Sequence], bool]) -> None:
    """Let the logits of some sequences be NaN."""
    sample = llm.model_runner.sample

    def sample_disturbed(logits, step):
        rows, _ = step.list_rows()
        bad = [index for index, seq in enumerate(rows) if is_bad(seq)]
        logits = logits.clone()
        logits[bad] = torch.nan
        return sample(logits, step)

    llm.model_runner.sample = sample_disturbed


def finish_step(scheduler: Scheduler, step: Step, sampled: list[list[int]]) -> None:
    """Record the sampled tokens of a step, as an engine without overlap does."""
    for feature in reversed(scheduler.features):
        sampled = feature.sampled(step, sampled)
    scheduler.advance(step)
    scheduler.postprocess(step, sampled)


def check_invariants(llm: LLM) -> None:
    """Check the block pool, the queues and the limits of an engine between two steps."""
    scheduler = llm.scheduler
    manager = scheduler.block_manager
    held = [block_id for seq in scheduler.running for block_id in seq.block_table]
    assert sorted([*set(held), *manager.free_block_ids]) == list(range(manager.num_blocks))
    check_blocks(manager, held)
    windows = find_feature(llm, Windows)
    if windows is not None:
        check_windows(windows)
    for seq in scheduler.running:
        assert seq.num_computed_tokens < len(seq.token_ids) <= llm.max_model_len
        assert len(seq.block_table) * manager.block_size >= seq.num_computed_tokens
    assert len(scheduler.running) <= llm.config.max_num_seqs
    lanes = [seq.lane for seq in scheduler.running]
    assert sorted(lanes + scheduler.free_lanes) == list(range(scheduler.max_num_seqs))
    # Threads can queue ids in another order.
    assert [*scheduler.running, *scheduler.waiting] == llm._list_requests()


def check_idle(llm: LLM) -> None:
    """Check that nothing of any request is left."""
    check_invariants(llm)
    assert not llm.requests
    assert not llm.scheduler.waiting
    assert llm.stats["num_free_blocks"] == llm.stats["num_blocks"]
    drafts = find_feature(llm, Drafts)
    assert drafts is None or not drafts.proposals
    if llm.in_flight is not None:  # only of requests that ended while it was in flight
        assert all(seq.finish_reason is not None for seq in llm.in_flight.step.seqs)


def check_windows(windows: Windows) -> None:
    """Check the second pool of blocks between two steps."""
    pool = windows.pool
    held = []
    for seq in windows.scheduler.running:
        window = windows.held[seq]
        table = windows.tables[seq.lane]
        own = table[window.start : window.end].tolist()
        held += own
        assert not table[: window.start].any() and not table[window.end :].any()
        if seq.num_computed_tokens > 0:
            assert len(own) <= cdiv(windows.window, pool.block_size) + 2
            assert window.end == cdiv(seq.num_computed_tokens, pool.block_size)
            first = max(0, seq.num_computed_tokens + 1 - windows.window)
            assert window.start <= first // pool.block_size
    assert sorted([*set(held), *pool.free_block_ids]) == list(range(pool.num_blocks))
    check_blocks(pool, held)
    assert set(pool.passed) <= set(pool.free_block_ids)


def check_blocks(manager: BlockManager, held: list[int]) -> None:
    """Check that reference counts and hashes agree. `held` has the entries of all block tables."""
    listed = []
    for block in manager.blocks:
        assert block.ref_count == held.count(block.block_id)
        if block.hash != -1:
            listed.append((block.hash, block.block_id))
    assert sorted(manager.hash_to_block_id.items()) == sorted(listed)
    free = [manager.blocks[block_id] for block_id in manager.free_block_ids]
    assert manager.count_states()["reusable"] == sum(block.is_cached for block in free)


def make_sampling_batch(
    params: list[SamplingParams],
    seeds: list[int],
    positions: list[int],
    vocab_size: int,
    device: str = "cpu",
) -> SamplingBatch:
    """Prepare the SamplingBatch of rows that sample the tokens at `positions`."""
    rows = [Sequence(0, [0], p, seed=seed) for p, seed in zip(params, seeds, strict=True)]
    return sampler.make_sampling_batch(rows, positions, vocab_size, torch.device(device))
