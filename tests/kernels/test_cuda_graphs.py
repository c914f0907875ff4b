"""A replayed CUDA graph computes the same as an eager step.

Without a GPU, a stand-in for a graph calls the captured function again on the static batch.
"""

import gc
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    DEVICE,
    ON_GPU,
    generate_ids,
    greedy,
    make_batch,
    random_prompt,
)
from families import make_family
from graph_helpers import capture_on_the_cpu, make_graphs, repeat_steps
from torch import nn

from nanovllm.batch.packing import ARRAYS
from nanovllm.kernels.cuda import graphs
from nanovllm.kernels.cuda.graphs import CudaGraphs
from nanovllm.layers import attention
from nanovllm.worker.startup import make_step

pytest.importorskip("triton", reason="triton is not installed")


class Recorder(nn.Module):
    """Stands for the decoder, and keeps the batches that it computes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(30))
        self.seen = []

    def forward(self, batch, kv_caches=()):
        self.seen.append(replace(batch, **{name: getattr(batch, name).clone() for name in ARRAYS}))
        return batch.positions[batch.logits_indices]


def make_decoder_graphs(decoder, batch, max_num_tokens=0):
    captured = CudaGraphs(decoder, decoder, batch, torch.device("cpu"), max_num_tokens)
    captured.capture(minimum=list)
    return captured


def make_decodes(num_seqs):
    return make_batch([1] * num_seqs, [5] * num_seqs, torch.zeros(num_seqs, 9, dtype=torch.int32))


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 40, 300])
def test_little_of_a_graph_is_padding(max_num_seqs, monkeypatch):
    repeat_steps(monkeypatch)
    captured = make_decoder_graphs(Recorder(), make_decodes(max_num_seqs), 2048)
    for num_seqs in range(1, max_num_seqs + 1):
        size, num_decodes, num_long_queries = captured.find_kind(make_decodes(num_seqs))
        assert size == num_decodes <= max_num_seqs
        assert num_long_queries == 0
        assert 0 <= size - num_seqs < max(8, num_seqs / 4)
        batch = SimpleNamespace(input_ids=range(2 * num_seqs), context_lens=range(num_seqs))
        for num_long in (1, num_seqs // 3 + 1, num_seqs):
            batch.long_queries = range(num_long)
            num_tokens, num_decodes, num_long_queries = captured.find_kind(batch)
            assert 0 <= num_tokens - 2 * num_seqs < max(16, 2 * num_seqs / 2)
            rows = max(num_long, num_seqs - num_long)
            assert num_decodes == num_long_queries == min(max_num_seqs, 16 if rows <= 16 else 300)


class Backend:
    GRAPHS_HAVE_DECODES_ONLY = False


@pytest.mark.parametrize("decodes_only", [False, True])
def test_all_graphs_are_captured_at_the_start(monkeypatch, decodes_only):
    monkeypatch.setattr(Backend, "GRAPHS_HAVE_DECODES_ONLY", decodes_only)
    monkeypatch.setattr(graphs, "_TOKENS_TIMES_WEIGHT", 30 * 50)
    captured = capture_on_the_cpu(monkeypatch, Recorder(), Backend, make_decodes(40))
    kinds = {(size, size, 0) for size in (1, 2, 4, 8, 16, 24, 32, 40)}
    if not decodes_only:
        kinds |= {(size, 16, 16) for size in (16, 24, 32, 48, 50)}
        kinds |= {(size, 40, 40) for size in (24, 32, 48, 50)}
    assert captured.graphs.keys() == kinds
    # The largest one comes first, so that the others find room in its memory.
    assert list(captured.graphs) == sorted(kinds, reverse=True)


def test_a_server_needs_no_capture(monkeypatch):
    """A trace of 20 requests a second: 256 to 1,024 tokens of a prompt, 64 to 256 of the reply.

    A step takes 3 ms, and 1 ms more for each 100 tokens.
    """
    captured = capture_on_the_cpu(monkeypatch, Recorder(), Backend, make_decodes(256))
    assert len(captured.graphs) < 60
    rng = random.Random(0)
    now = next_arrival = 0.0
    running = []
    used = set()
    while now < 10:
        prompts = []
        while next_arrival <= now:
            prompts.append(rng.randint(256, 1024))
            running.append(rng.randint(64, 256))
            next_arrival += rng.expovariate(20)
        num_decodes = len(running) - len(prompts)
        num_tokens = sum(prompts) + num_decodes
        if 0 < num_tokens <= 2048:
            batch = SimpleNamespace(
                input_ids=range(num_tokens), context_lens=running, long_queries=prompts
            )
            kind = captured.find_kind(batch)
            assert kind in captured.graphs
            used.add(kind)
        running = [number - 1 for number in running if number > 1]
        now += 0.003 + num_tokens / 100_000
    assert len(used) > 15


def test_no_graph_is_larger_than_a_step_can_be(monkeypatch):
    captured = capture_on_the_cpu(
        monkeypatch, Recorder(), Backend, make_decodes(2), max_num_tokens=28
    )
    assert captured.kinds[-1] == (28, 2, 2)


@pytest.mark.parametrize("failing", [1, 2])
def test_graphs_of_prompts_can_fail_alone(monkeypatch, failing):
    """As a kernel for prompts or for decodes can fail on some GPU."""
    prompt = make_batch([2], [2], torch.zeros(1, 9, dtype=torch.int32))
    captured = capture_on_the_cpu(monkeypatch, Recorder(), Backend, make_decodes(1))
    monkeypatch.setattr(graphs, "can_replay", lambda _, batch: len(batch.input_ids) != failing)
    captured.check([prompt], minimum=list)
    expected = None if failing == 1 else (1, 1, 0)
    assert captured.find_kind(make_decodes(1)) == expected
    assert captured.find_kind(prompt) is None


def fail_for(monkeypatch, num_tokens):
    """Let captures of steps with so many tokens fail."""
    capture = graphs.capture

    def fail_for_some(step, *args):
        (kind,) = step.args
        if kind.num_tokens == num_tokens:
            raise RuntimeError("out of memory")
        return capture(step, *args)

    monkeypatch.setattr(graphs, "capture", fail_for_some)


def test_a_capture_can_fail(monkeypatch, capsys):
    """Larger steps run eagerly, and smaller ones are replayed."""
    graphs.report_once.cache_clear()
    repeat_steps(monkeypatch)
    fail_for(monkeypatch, 32)
    captured = make_decoder_graphs(Recorder(), make_decodes(4), 64)
    (message,) = capsys.readouterr().err.splitlines()
    assert "steps of 32 tokens and more run eagerly" in message
    assert "out of memory" in message
    tables = torch.zeros(1, 9, dtype=torch.int32)
    for num_tokens, expected in ((24, (24, 4, 4)), (25, None), (64, None)):
        batch = make_batch([num_tokens], [num_tokens], tables)
        assert captured.find_kind(batch) == expected
    three = replace(make_decodes(3), positions=torch.arange(3, dtype=torch.int32))
    assert captured.run(three, captured.find_kind(three)).tolist() == [0, 1, 2]


def test_ranks_replay_the_same_steps(monkeypatch):
    """Also if only one of them can capture a graph, because padding is all-reduced."""
    repeat_steps(monkeypatch)
    numbers = []
    ranks = []
    for rank in range(2):
        if rank == 1:
            fail_for(monkeypatch, 32)
        decoder = Recorder()
        captured = CudaGraphs(decoder, decoder, make_decodes(4), torch.device("cpu"), 64)
        captured.capture(lambda own: numbers.append(own) or own)
        ranks.append((decoder, captured))
    for decoder, captured in ranks:
        captured.agree(lambda own: [min(both) for both in zip(*numbers)])
        decoder.seen.clear()
    reduced = [[], []]  # rows of each all-reduce
    for num_tokens in (24, 30, 50, 3, 30, 50, 21):
        batch = make_batch([num_tokens], [num_tokens], torch.zeros(1, 9, dtype=torch.int32))
        for rows, (decoder, captured) in zip(reduced, ranks):
            kind = captured.find_kind(batch)
            captured.run(batch, kind) if kind is not None else decoder(batch)
            rows.append(len(decoder.seen[-1].input_ids))
    assert reduced == [[24, 30, 50, 16, 30, 50, 24]] * 2


def make_random_batch(rng, max_num_seqs, has_windows):
    """Make a batch without zeros, in which padding would be noticed."""
    num_seqs = rng.randint(1, max_num_seqs)
    query_lens = [rng.choice([1, 1, 2, 7]) for _ in range(num_seqs)]
    tables = torch.randint(1, 99, (num_seqs, rng.randint(1, 9)), dtype=torch.int32)
    batch = make_batch(query_lens, [length + 3 for length in query_lens], tables)
    numbers = {}
    for name in ("input_ids", "positions", "slot_mapping", "read_slots", "write_slots"):
        numbers[name] = torch.randint_like(getattr(batch, name), 1, 99)
    if has_windows:
        numbers["window_slots"] = numbers["slot_mapping"] + 1
        numbers["window_tables"] = tables + 1
    if rng.random() < 0.2:
        numbers["logits_indices"] = batch.logits_indices[:0]
    return replace(batch, **numbers)


@pytest.mark.parametrize("is_interpreted", [False, True])
@pytest.mark.parametrize("has_windows", [False, True])
def test_padding_reads_and_writes_nothing(monkeypatch, has_windows, is_interpreted):
    """Whatever earlier steps have left in the static batch."""
    lay_out = CudaGraphs.lay_out
    repeat_steps(monkeypatch)
    if is_interpreted:  # or the stand-in of these tests
        monkeypatch.setattr(CudaGraphs, "lay_out", lay_out)
        monkeypatch.setattr(graphs, "_PROGRAMS_PER_ARRAY", 2)
    rng = random.Random(0)
    decodes = make_decodes(6)
    if has_windows:
        decodes = replace(
            decodes, window_slots=decodes.slot_mapping, window_tables=decodes.block_tables
        )
    decoder = Recorder()
    captured = make_decoder_graphs(decoder, decodes, 48)
    names = "input_ids positions context_lens logits_indices read_slots write_slots"
    paddings = dict.fromkeys(names.split(), 0)
    paddings |= {"slot_mapping": -1, "window_slots": -1}
    for _ in range(6 if is_interpreted else 60):
        batch = make_random_batch(rng, 6, has_windows)
        hidden = captured.run(batch, captured.find_kind(batch))
        assert len(hidden) == len(batch.logits_indices)
        seen = decoder.seen[-1]
        num_seqs = len(batch.context_lens)
        num_long = len(batch.long_queries)
        assert (seen.max_seqlen_q > 1) == (num_long > 0)
        for name, padding in paddings.items():
            numbers = getattr(seen, name).tolist()
            own = getattr(batch, name).tolist()
            assert numbers == own + [padding] * (len(numbers) - len(own)), name
        for name in ("block_tables", "window_tables"):
            own = getattr(batch, name)
            rows, columns = own.shape
            assert torch.equal(getattr(seen, name)[:rows, :columns], own)
        query_lens = seen.cu_seqlens_q.diff().tolist()
        assert query_lens == batch.cu_seqlens_q.diff().tolist() + [0] * (len(query_lens) - num_seqs)
        surplus = seen.long_queries[num_long:].tolist()
        assert seen.long_queries[:num_long].tolist() == batch.long_queries.tolist()
        # Kernels count tiles from the number of decodes before a query, see find_tile.
        assert surplus == list(range(num_seqs, num_seqs + len(surplus)))
        assert num_seqs + len(surplus) <= len(seen.context_lens)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 2]])
def test_pending_ids_are_filled_in_on_the_static_buffer(monkeypatch, query_lens):
    """From the tokens of the step before the replay, not before the capture."""
    repeat_steps(monkeypatch)
    newest_tokens = torch.zeros(4, dtype=torch.int32)
    decoder = Recorder()
    step = make_step(SimpleNamespace(model=decoder, kv_caches=[], newest_tokens=newest_tokens))
    captured = CudaGraphs(step, decoder, make_decodes(4), torch.device("cpu"), 8)
    captured.capture(minimum=list)
    tables = torch.zeros(len(query_lens), 1, dtype=torch.int32)
    batch = make_batch(query_lens, query_lens, tables)
    batch = replace(batch, input_ids=torch.tensor([-3, 2, -1], dtype=torch.int32))
    for tokens in ([7, 8, 9], [4, 5, 6]):
        newest_tokens[:3] = torch.tensor(tokens)
        captured.run(batch, captured.find_kind(batch))
        assert decoder.seen[-1].input_ids[:3].tolist() == [tokens[2], 2, tokens[0]]


def test_some_steps_are_not_replays(monkeypatch):
    """Long ones, those with many sequences, and those with hooks."""
    repeat_steps(monkeypatch)
    tables = torch.zeros(6, 9, dtype=torch.int32)
    prompts = {length: make_batch([length], [length], tables[:1]) for length in (2, 30, 33)}
    decoder = Recorder()
    captured = make_decoder_graphs(decoder, make_decodes(4), 32)
    assert captured.find_kind(prompts[30]) == (32, 4, 4)  # rounded up
    assert captured.find_kind(make_decodes(3)) == (4, 4, 0)
    for batch in (prompts[33], make_decodes(5), make_batch([1] * 5 + [2], [5] * 6, tables)):
        assert captured.find_kind(batch) is None
    hook = decoder.register_forward_hook(lambda *args: None)
    assert captured.find_kind(prompts[2]) is None
    hook.remove()
    assert captured.find_kind(prompts[2]) in captured.graphs


def test_engines_in_several_threads_capture_in_turn(monkeypatch):
    """torch allows one capture at a time in a process."""
    active = []

    @contextmanager
    def graph(*args, **options):
        active.append(args)
        yield
        active.pop()

    def step():
        sleep(0.01)
        assert len(active) == 1
        assert not gc.isenabled()  # it could unload a Triton module

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(graphs, "CUDAGraph", object)
    monkeypatch.setattr(graphs, "_find_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with ThreadPoolExecutor() as pool:
        assert len(list(pool.map(graphs.capture, [step] * 3, [None] * 3, [None] * 3))) == 3
    assert gc.isenabled()


@pytest.fixture
def make_replaying(make_llm, monkeypatch):
    """A function that makes an engine, and a list of the kinds and rows of its replays."""

    def make(model, **options):
        llm = make_llm(
            str(model), device=DEVICE.type, attention_backend="triton", max_model_len=32,
            kvcache_block_size=16, **options,
        )  # fmt: skip
        worker = llm.executor.worker
        if not ON_GPU:
            repeat_steps(monkeypatch)
            worker.graphs = make_graphs(worker, 16)
        replay = worker.graphs.run
        steps = []

        def record(batch, kind):
            hidden = replay(batch, kind)
            assert len(hidden) == len(batch.logits_indices)
            num_long = len(batch.long_queries)
            steps.append((num_long < len(batch.context_lens), num_long > 0, len(hidden)))
            return hidden

        monkeypatch.setattr(worker.graphs, "run", record)
        return llm, steps

    return make


@pytest.mark.parametrize(
    "name, overlaps, model_impl",
    [("qwen3", False, "auto"), ("gemma3-untied", True, "auto"), ("gemma3", True, "transformers")],
)
def test_engine_with_graphs_matches_transformers(
    tmp_path, make_replaying, name, overlaps, model_impl
):
    """Of batches that grow and shrink, with padding, chunks and windows of 2, in Triton."""
    oracle = make_family(tmp_path, name)
    llm, steps = make_replaying(
        tmp_path, max_num_seqs=5, max_num_batched_tokens=5, model_impl=model_impl
    )
    llm.overlaps = overlaps
    lengths = [8, 1, 2, 3]  # of the prompts
    prompts = [random_prompt(i, length) for i, length in enumerate(lengths)]
    numbers = [4, 3, 5, 2]
    expected = [oracle(prompt, number) for prompt, number in zip(prompts, numbers)]
    assert generate_ids(llm, prompts, [greedy(number) for number in numbers]) == expected
    kinds = {(has_decodes, has_prompts) for has_decodes, has_prompts, _ in steps}
    assert kinds == {(True, False), (False, True), (True, True)}


@pytest.mark.parametrize("budget", [1, 15])
def test_chunks_of_one_token_without_logits_are_replayed(tmp_path, make_replaying, budget):
    """By the budget, or because a chunk ends where the state is kept: 18 = 15 + 1 + 2 tokens."""
    layer_types = ["linear_attention", "full_attention"]
    oracle = make_family(tmp_path, "qwen3.5", num_hidden_layers=2, layer_types=layer_types)
    llm, steps = make_replaying(tmp_path, max_num_batched_tokens=budget)
    prefix = random_prompt(0, 16)
    for last in (1, 2, 3):
        prompt = [*prefix, last, last]
        assert generate_ids(llm, [prompt], greedy(2)) == [oracle(prompt, 2)]
    assert (True, False, 0) in steps


def test_a_graph_that_repeats_a_branch_is_not_replayed(monkeypatch):
    """A branch of Python on the positions of a step. The stand-in for a graph repeats it, too."""

    class Branching(Recorder):
        is_replay = False
        is_late = False

        def forward(self, batch, kv_caches=()):
            if not self.is_replay:
                self.is_late = bool((batch.positions > 2).any())
            return batch.positions[batch.logits_indices] + 10 * self.is_late

    decoder = Branching()

    def capture(step, *_):
        captured = decoder.is_late

        def replay():
            decoder.is_replay, decoder.is_late = True, captured
            step()
            decoder.is_replay = False

        return SimpleNamespace(replay=replay)

    repeat_steps(monkeypatch)
    monkeypatch.setattr(graphs, "capture", capture)
    batch = make_decodes(2)
    assert not graphs.can_replay(make_decoder_graphs(decoder, batch), batch)


def test_torch_attention_is_not_captured(monkeypatch):
    """It reads lengths on the host."""
    assert capture_on_the_cpu(monkeypatch, Recorder(), attention, make_decodes(1)) is None
