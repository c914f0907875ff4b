"""Several ranks give the tokens of one, and a lost rank ends the call and leaves nothing behind."""

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from queue import SimpleQueue
from unittest.mock import MagicMock

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import Oracle, check_invariants, greedy, make_checkpoint, random_prompt

from nanovllm import LLM, SamplingParams
from nanovllm.batch import Batch
from nanovllm.config import Config
from nanovllm.engine import executor as executor_module
from nanovllm.engine.executor import Failure, Model, MultiRankExecutor, Task
from nanovllm.engine.worker import Place, Worker, connect
from nanovllm.layers.tensor_parallel import FIRST_PART, TensorParallel
from nanovllm.packing import list_sizes, pack, unpack

POOL = {"num_kvcache_blocks": 64, "kvcache_block_size": 4}


def find_ranks(process=None):
    """The processes of the other ranks, in order of rank. They are children of the fork server."""
    children = (process or psutil.Process()).children()
    return [
        rank
        for child in children
        if "forkserver" in " ".join(child.cmdline())
        for rank in child.children()
    ]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Check that no process of a rank and no shared memory is left."""
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    gc.collect()
    assert find_ranks() == []
    if before:
        assert {
            name for name in set(os.listdir("/dev/shm")) - before if not name.startswith("sem.")
        } == set()


# --- One rank's tokens

SHAPES = {
    "gqa": dict(),  # 4 heads, 2 K/V heads, tied, an odd vocabulary
    "mqa": dict(num_key_value_heads=1, attention_bias=True, tie_word_embeddings=False),
    "mha": dict(num_key_value_heads=4, vocab_size=96, hidden_size=24),
}


@pytest.mark.parametrize("name, size", [("gqa", 2), ("gqa", 4), ("mqa", 2), ("mqa", 4), ("mha", 4)])
def test_tokens(tmp_path, name, size):
    """They match transformers, cold, warm, in chunks and after preemptions."""
    oracle = Oracle(make_checkpoint(tmp_path, **SHAPES[name]))
    prompts = [
        [token_id % 90 for token_id in random_prompt(seed, length)]
        for seed, length in enumerate((1, 3, 4, 5, 17, 33))
    ]
    expected = [oracle(prompt, 16) for prompt in prompts]
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": 20, "max_num_batched_tokens": 12}
    with LLM(str(tmp_path), tensor_parallel_size=size, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, greedy(16), use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == expected
            check_invariants(llm)
        assert llm.stats["num_preemptions"] and llm.stats["num_cached_tokens"]


def test_everything_sampled_is_equal(tiny):
    """Seeds, filters, penalties, logprobs, n and beams give the same on 1, 2 and 4 ranks."""
    prompts = [random_prompt(seed, 5 + 3 * seed) for seed in range(5)]
    params = [
        SamplingParams(seed=7, max_tokens=12),
        SamplingParams(top_k=9, top_p=0.8, min_p=0.02, n=3, max_tokens=12),
        SamplingParams(
            temperature=0.7,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.2,
            max_tokens=12,
        ),
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=12),
        SamplingParams(
            temperature=1.5, min_tokens=4, stop_token_ids=list(range(40)), max_tokens=12
        ),
    ]
    token_ids, logprobs = {}, {}
    for size in (1, 2, 4):
        with LLM(tiny[0], tensor_parallel_size=size, **POOL) as llm:
            outputs = (
                llm.generate(prompts, params, use_tqdm=False)
                + llm.beam_search(prompts[0], beam_width=3, max_tokens=6)[0]
            )
        token_ids[size] = [output["token_ids"] for output in outputs]
        logprobs[size] = torch.tensor(
            [output["cumulative_logprob"] for output in outputs if output["logprobs"]]
        )
    assert token_ids[1] == token_ids[2] == token_ids[4]
    for size in (2, 4):
        torch.testing.assert_close(logprobs[size], logprobs[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(tmp_path, dtype):
    """The shards of a weight give the result of the whole up to rounding, prepacked or not."""
    make_checkpoint(tmp_path, dtype=dtype)
    prompts = [random_prompt(seed, 20) for seed in range(8)]
    values = []
    for size in (1, 2):
        with LLM(str(tmp_path), tensor_parallel_size=size, **POOL) as llm:
            outputs = llm.generate(
                prompts, SamplingParams(temperature=0.0, max_tokens=1, logprobs=97), use_tqdm=False
            )
        values.append(
            torch.tensor(
                [[output["logprobs"][0][token_id] for token_id in range(97)] for output in outputs]
            )
        )
    assert (values[0] - values[1]).abs().mean() < 0.02 * values[0].std()


def test_dummy_weights_are_the_same_on_any_number_of_ranks(tiny):
    prompts, token_ids = [random_prompt(seed, 9) for seed in range(3)], []
    for size in (1, 2):
        with LLM(tiny[0], load_format="dummy", tensor_parallel_size=size, **POOL) as llm:
            token_ids.append(
                [output["token_ids"] for output in llm.generate(prompts, greedy(8), use_tqdm=False)]
            )
    assert token_ids[0] == token_ids[1]


def test_two_engines_at_once(tiny):
    prompt = random_prompt(3, 9)
    engines = [LLM(tiny[0], tensor_parallel_size=2, **POOL) for _ in range(2)]
    assert len(find_ranks()) == 2
    for _ in range(2):
        for llm in engines:
            assert llm.generate(prompt, greedy(5), use_tqdm=False)[0]["token_ids"] == tiny[1](
                prompt, 5
            )
    engines.pop().exit()
    assert engines[0].generate(prompt, greedy(5), use_tqdm=False)[0]["token_ids"] == tiny[1](
        prompt, 5
    )
    assert len(find_ranks()) == 1
    del engines, llm  # the end of `nothing_is_left` collects the other one


@pytest.mark.parametrize("num_seqs, width", [(1, 1), (2, 1), (3, 7), (300, 70)])
def test_a_batch_survives_packing(num_seqs, width):
    shapes = [(2 * num_seqs - 1,)] * 3 + [
        (num_seqs + 1,),
        (num_seqs,),
        (num_seqs, width),
        (num_seqs - 1,),
    ]
    *tensors, logits_indices = [
        torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32) for shape in shapes
    ]
    batch = Batch(*tensors, 3, 99, logits_indices, 2)
    packed = pack(batch)
    for unpacked in (unpack(packed), unpack(torch.cat((packed, packed)), list_sizes(batch))):
        for name, value in vars(batch).items():
            other = getattr(unpacked, name)
            if isinstance(value, torch.Tensor):
                assert (
                    torch.equal(value, other)
                    and value.dtype == other.dtype
                    and other.is_contiguous()
                )
            else:
                assert value == other


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_long_messages_arrive(kind, monkeypatch):
    """They are sent in two parts. Messages go from host to host, without NCCL."""
    store, received, nccl = dist.HashStore(), [], MagicMock()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    messages = [
        torch.randint(2**31 - 1, (length,), dtype=torch.int32)
        for length in (FIRST_PART - 1, FIRST_PART, 3 * FIRST_PART, 5, 0)
    ]

    def meet(rank):
        return connect(torch.device(kind), 2, Place(rank, rank, store))

    def receive():
        tp = meet(1)
        received.extend(tp.receive().clone() for _ in messages)

    thread = threading.Thread(target=receive)
    thread.start()
    tp = meet(0)
    for message in messages:
        tp.send(message)
    thread.join(60)
    assert [message.tolist() for message in received] == [message.tolist() for message in messages]
    assert not nccl.return_value.mock_calls


def test_sizes_that_do_not_divide(tmp_path):
    make_checkpoint(tmp_path, num_attention_heads=6, num_key_value_heads=2, intermediate_size=50)
    for size, name in ((4, "num_attention_heads=6"), (3, "intermediate_size=50")):
        with pytest.raises(ValueError, match=f"tensor_parallel_size={size} does not divide {name}"):
            LLM(str(tmp_path), tensor_parallel_size=size, **POOL)
    make_checkpoint(tmp_path, num_attention_heads=12, num_key_value_heads=4, intermediate_size=48)
    with pytest.raises(
        ValueError, match="tensor_parallel_size=6 must divide num_key_value_heads=4"
    ):
        LLM(str(tmp_path), tensor_parallel_size=6, **POOL)


def test_the_cache_is_divided(tiny, capfd):
    """With one KV head per rank, blocks have half the bytes, so memory holds twice as many."""
    num_blocks = []
    for size in (1, 2):
        with LLM(
            tiny[0], tensor_parallel_size=size, kvcache_block_size=4, kvcache_memory_bytes=1 << 20
        ) as llm:
            num_blocks.append(llm.stats["num_blocks"])
    assert num_blocks[1] == 2 * num_blocks[0]
    assert f"the smallest of 2 ranks = {num_blocks[1]} blocks" in capfd.readouterr().err


# --- Lost ranks


def lose_within(seconds, llm, match, max_tokens=190):
    """The call fails and names the rank, as do later ones, and nothing is left."""
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=match):
        while time.monotonic() - start < seconds:
            llm.generate(
                [random_prompt(seed, 60) for seed in range(8)], greedy(max_tokens), use_tqdm=False
            )
    with pytest.raises(RuntimeError, match=match):
        llm.generate([1], greedy(1), use_tqdm=False)
    with pytest.raises(RuntimeError, match=match):
        llm.add_request([1])
    assert find_ranks() == []
    llm.exit()
    with pytest.raises(RuntimeError, match=match):
        llm.step()


def test_a_rank_dies_while_idle(tiny):
    llm = LLM(tiny[0], tensor_parallel_size=4, **POOL)
    llm.generate([1, 2], greedy(2), use_tqdm=False)
    find_ranks()[1].kill()
    lose_within(10, llm, "rank 2 of 4 has ended with exit code -9")


@pytest.mark.parametrize("max_tokens", [1, 190], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    "dtype", ["float32", "float16"]
)  # which meet in shared memory, and by gloo
def test_a_rank_dies_in_a_step(tiny, dtype, max_tokens):
    llm = LLM(
        tiny[0],
        dtype=dtype,
        tensor_parallel_size=2,
        enable_prefix_caching=False,
        num_kvcache_blocks=1024,
    )
    threading.Timer(0.3, find_ranks()[0].kill).start()
    lose_within(10, llm, "rank 1 of 2 has ended with exit code -9", max_tokens)


def test_a_gpu_waits_for_a_lost_rank(tiny, monkeypatch):
    """Tokens never arrive until NCCL is aborted. The call ends nevertheless."""
    llm, aborted = LLM(tiny[0], tensor_parallel_size=2, **POOL), threading.Event()
    executor, tokens = (
        llm.model_runner.executor.worker,
        MagicMock(tolist=lambda: [0] * aborted.wait(60)),
    )
    monkeypatch.setattr(llm.model_runner.sampler, "forward", lambda logits, batch: tokens)
    monkeypatch.setattr(executor, "disconnect", aborted.set)
    monkeypatch.setattr(executor, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize := MagicMock())
    monkeypatch.setattr("nanovllm.engine.worker.copy_to", lambda self, device: self)
    threading.Timer(0.3, find_ranks()[0].kill).start()
    lose_within(10, llm, "rank 1 of 2 has ended with exit code -9")
    assert not synchronize.mock_calls, "the host waits before it has sampled"


def test_a_rank_dies_at_the_start(tiny):
    def kill_when_it_comes():
        while not (ranks := find_ranks()):
            time.sleep(0.001)
        ranks[0].kill()

    threading.Thread(target=kill_when_it_comes).start()
    with pytest.raises(RuntimeError, match="rank 1 of 2 has ended with exit code -9"):
        LLM(tiny[0], tensor_parallel_size=2, **POOL)


FAILING = """
    import os, sys
    from nanovllm import LLM
    from nanovllm.engine import executor
    from nanovllm.engine.worker import Worker

    compute, serve = Worker.compute, executor._serve

    def fail(self, batch, *reduce):
        if self.tp.rank == self.tp.size // 2 and len(batch.input_ids) > 1:
            raise ZeroDivisionError(os.environ["PURPOSE"])
        return compute(self, batch, *reduce)

    def fail_at_work(*args):
        Worker.compute = fail
        serve(*args)

    if __name__ == "__main__":
        Worker.compute = fail
        llm = LLM(sys.argv[1], tensor_parallel_size=2, num_kvcache_blocks=8)
        llm.generate([1, 2, 3], use_tqdm=False)
"""


def test_a_rank_fails(tmp_path, tiny, monkeypatch):
    """The error has its traceback. Ranks that fail because of it are not named."""
    LLM(
        tiny[0], tensor_parallel_size=2, **POOL
    ).exit()  # the fork server is there, which knows no PURPOSE
    monkeypatch.setenv("PURPOSE", "on purpose")
    (tmp_path / "failing.py").write_text(textwrap.dedent(FAILING))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(executor_module, "_serve", importlib.import_module("failing").fail_at_work)
    with LLM(tiny[0], tensor_parallel_size=4, **POOL) as llm:
        llm.generate([1], greedy(3), use_tqdm=False)
        monkeypatch.setattr(
            executor_module, "_GRACE", 1.5
        )  # in which the others would fail, if it ended
        with pytest.raises(
            RuntimeError, match=r"^rank 2 of 4 has failed:\n(?s:.*)ZeroDivisionError: on purpose\n$"
        ):
            llm.generate([1, 2, 3], greedy(3), use_tqdm=False)


def make_executor(worker=None):
    """An executor without the processes of its other ranks."""
    made = object.__new__(MultiRankExecutor)
    made.stop_reason, made.processes, made.tasks = None, {}, SimpleQueue()
    made.thread = threading.Thread(target=made._work_off_tasks, daemon=True)
    made.thread.start()
    if worker is not None:
        made.worker = worker
    return made


class FakeProcess:
    name, exitcode = "rank 3 of 4", -11

    def kill(self): ...
    def join(self, timeout): ...


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_dead_rank_is_the_cause(is_dead):
    """Also if it is noticed together with ranks that failed because of it. A ValueError stays one."""
    seen, others = make_executor(), []
    for _ in range(2):
        pipe, other = Pipe()
        other.send(Failure(True, True, "rank 1 of 4 has failed"))
        seen.processes[pipe] = others.append(other) or FakeProcess()
    if is_dead:
        pipe, other = Pipe()
        other.close()
        seen.processes[pipe] = FakeProcess()
    expected = "rank 3 of 4 has ended with exit code -11" if is_dead else "rank 1 of 4 has failed"
    for kind in (RuntimeError if is_dead else ValueError, RuntimeError):
        with pytest.raises(kind) as caught:
            seen.check()
        assert str(caught.value) == expected


LOST = """
    import os, sys, psutil
    from nanovllm import LLM

    llm = LLM(sys.argv[1], tensor_parallel_size=2, num_kvcache_blocks=8)
    executor = llm.model_runner.executor.worker
    psutil.Process().children(recursive=True)[-1].kill()
    try:
        while True:
            llm.generate([1, 2, 3], use_tqdm=False)
    except RuntimeError as error:
        print(error, flush=True)
    if child := os.fork():
        print(os.waitpid(child, 0)[1])
"""


def test_a_fork_of_an_engine_that_is_lost(tiny):
    """The forked process exits without waiting for threads that it does not have."""
    command = [sys.executable, "-c", textwrap.dedent(LOST), tiny[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "rank 1 of 2 has ended with exit code -9\n0\n", done.stderr


def test_a_checkpoint_that_does_not_fit(tmp_path):
    make_checkpoint(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(2000)
    with pytest.raises(ValueError, match="model.safetensors"):
        LLM(str(tmp_path), tensor_parallel_size=2, **POOL)


def test_rank_0_fails(tiny, monkeypatch):
    """In the middle of a step, while the others wait for it."""
    llm = LLM(tiny[0], tensor_parallel_size=2, **POOL)
    monkeypatch.setattr(llm.model_runner.executor.worker, "compute", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate([1, 2], greedy(2), use_tqdm=False)
    lose_within(1, llm, "rank 0 has failed: ZeroDivisionError")


def test_exit_in_a_step(tiny):
    """By another thread or a signal handler. It returns at once."""
    llm = LLM(tiny[0], tensor_parallel_size=2, **POOL)
    llm.generate([1], greedy(2), use_tqdm=False)
    seconds: list[float] = []

    def leave():
        start = time.monotonic()
        llm.exit()
        seconds.append(time.monotonic() - start)

    timer = threading.Timer(0.3, leave)
    timer.start()
    with pytest.raises(RuntimeError, match="exit"):
        while True:
            llm.generate([[1, 2]] * 8, greedy(100), use_tqdm=False)
    timer.join()
    assert seconds[0] < 3


class GroupOfGraphs:
    """Like NCCL's group: abort waits until all CUDA graphs with collectives are gone."""

    def __init__(self):
        graphs = threading.Event()  # any object that can be referred to weakly
        self.graphs, self.is_aborted = weakref.ref(graphs), False
        self.worker = object.__new__(Worker)
        vars(self.worker).update(
            device=torch.device("cuda"), graphs=graphs, tp=TensorParallel(0, 2, self)
        )

    def abort(self):
        deadline = time.monotonic() + 60
        while self.graphs() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        self.is_aborted = self.graphs() is None


@pytest.mark.parametrize("is_stuck", [False, True])
def test_graphs_end_before_the_group(is_stuck, monkeypatch):
    """On rank 0, whether or not its thread waits for a lost rank."""
    monkeypatch.setattr(executor_module, "_EXIT_TIMEOUT", 1.0)
    group, done = GroupOfGraphs(), threading.Event()
    seen = make_executor(group.worker)
    seen.processes[None] = FakeProcess()
    if is_stuck:
        seen.tasks.put(Task(Future(), done.wait, (30,)))
    start = time.monotonic()
    seen.stop("of the test")
    assert time.monotonic() - start < 5 and group.is_aborted
    done.set()
    seen.thread.join(30)
    assert not seen.thread.is_alive()


def test_an_abort_that_does_not_return(monkeypatch):
    """A traceback can keep the graphs alive. The engine's end does not wait for that."""
    monkeypatch.setattr(executor_module, "_EXIT_TIMEOUT", 0.5)
    group = GroupOfGraphs()
    held = group.worker.graphs
    start = time.monotonic()
    make_executor(group.worker).stop("of the test")
    assert time.monotonic() - start < 5 and not group.is_aborted
    del held


@pytest.mark.parametrize("error", [None, ZeroDivisionError("on purpose")])
def test_the_end_of_a_serving_rank(error, monkeypatch, capfd):
    """Under torchrun: when rank 0 exits, the graphs end before the group.

    If the rank fails, a traceback can keep the graphs alive, and nothing waits for the group.
    """
    group, messages = GroupOfGraphs(), [torch.zeros(1)]

    def receive(self):
        if not messages:
            raise RuntimeError("Connection closed by peer")
        return messages.pop()

    def compute(self, batch, *reduce):
        graphs = self.graphs
        if error is not None:
            raise error
        del graphs

    monkeypatch.setattr(TensorParallel, "receive", receive)
    monkeypatch.setattr(Worker, "allocate_kv_cache", lambda self: None)
    monkeypatch.setattr("nanovllm.engine.worker.unpack", lambda message: message)
    monkeypatch.setattr(Worker, "compute", compute)
    monkeypatch.setattr(executor_module, "Worker", lambda *args: group.worker)
    monkeypatch.setattr(dist, "rendezvous", lambda *_: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(os, "_exit", lambda status: sys.exit(f"at once, with {status}"))
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        executor_module._join_torchrun(Model(Config("", tensor_parallel_size=2), None, None))
    assert caught.value.code == (error and "at once, with 1") and not messages
    assert group.is_aborted == (error is None)
    assert ("ZeroDivisionError: on purpose" in capfd.readouterr().err) == (error is not None)


def test_interrupted_calls_are_undone(tiny):
    """Ctrl-C at any moment of a step: ranks stay in step, and the next call is correct."""
    prompt = random_prompt(5, 12)
    handler = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs start without
    with LLM(tiny[0], tensor_parallel_size=2, **POOL) as llm:
        num_interrupts = 0
        for attempt in range(30):
            timer = threading.Timer(0.002 * attempt, signal.raise_signal, [signal.SIGINT])
            try:
                timer.start()
                llm.generate(
                    [random_prompt(attempt, 20) for _ in range(4)], greedy(50), use_tqdm=False
                )
                timer.join()
                time.sleep(0.01)
            except KeyboardInterrupt:
                num_interrupts += 1
            assert llm.generate(prompt, greedy(4), use_tqdm=False)[0]["token_ids"] == tiny[1](
                prompt, 4
            )
            check_invariants(llm)
        assert num_interrupts > 10
    signal.signal(signal.SIGINT, handler)


# --- In other processes


def test_no_guard(tmp_path, tiny):
    script = tmp_path / "script.py"
    script.write_text(f"from nanovllm import LLM\nLLM({tiny[0]!r}, tensor_parallel_size=2)")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert (
        "does the script make the engine under `if __name__ == '__main__':`"
        in done.stderr.splitlines()[-1]
    )


SERVING = """
    import os, signal, sys, threading, time, torch
    for name in ("init", "_lazy_init", "is_available", "device_count", "current_device"):
        setattr(torch.cuda, name, None)  # the fork server may import this package, but must not initialise CUDA
    from nanovllm import LLM, SamplingParams

    assert threading.active_count() == 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    llm = LLM(sys.argv[1], device="cpu", tensor_parallel_size=2, num_kvcache_blocks=8)
    if not (child := os.fork()):
        try:
            llm.add_request([1])
        except RuntimeError as error:
            print(error, flush=True)
        llm.exit()
        sys.exit()
    print("child", os.waitpid(child, 0)[1], flush=True)
    if not os.fork():
        time.sleep(1000)
    try:
        while True:
            print(llm.generate([1, 2, 3], SamplingParams(max_tokens=100), use_tqdm=False)[0]["finish_reason"], flush=True)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("how", ["kill", "ctrl-c"])
def test_rank_0_is_ended(tiny, how):
    """By SIGKILL, or by Ctrl-C, which reaches the whole process group: no rank is left.

    A forked process is rejected and exits at once. The script is `python -c`, which cannot be
    imported.
    """
    command = [sys.executable, "-c", textwrap.dedent(SERVING), tiny[0]]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            rejection, child, reason = (process.stdout.readline() for _ in range(3))
            assert "forked" in rejection and (child, reason) == ("child 0\n", "length\n")
            (rank,) = find_ranks(psutil.Process(process.pid))
            if how == "kill":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGINT)
            assert psutil.wait_procs([rank], 10)[1] == []
            if how == "ctrl-c":
                assert process.stdout.read().endswith("interrupted\n") and process.wait() == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if how == "kill":
            assert "Traceback" not in process.stderr.read(), "of the forked process's end"


LAUNCHED = {
    "WORLD_SIZE": "2",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_launcher_that_sets_too_little(tiny, monkeypatch, rank, missing):
    """Such as srun and mpirun: every rank names the variable and exits."""
    for name, value in {**LAUNCHED, "RANK": rank, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    monkeypatch.setattr(
        sys.modules["torch.distributed.rendezvous"],
        "TCPStore",
        lambda *_: pytest.fail("a rendezvous"),
    )
    with pytest.raises(ValueError, match=rf"\b{missing}\b"):
        LLM(tiny[0], tensor_parallel_size=2, **POOL)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_of_another_size(tiny, monkeypatch, rank):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", lambda *_: iter([(dist.HashStore(), rank, 2)]))
    with pytest.raises(
        ValueError, match="tensor_parallel_size=4, but torchrun has started 2 processes"
    ):
        LLM(tiny[0], tensor_parallel_size=4, **POOL)


TORCHRUN = """
    import os, sys
    from nanovllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], tensor_parallel_size=2, num_kvcache_blocks=64, kvcache_block_size=4)
    outputs = llm.generate([[1, 2, 3], [4] * 20], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    print("rank", os.environ["RANK"], [output["token_ids"] for output in outputs], flush=True)
    try:
        LLM(sys.argv[1], tensor_parallel_size=2)
    except RuntimeError as error:
        print(error)
"""
AGAIN = "torchrun's processes serve one engine, and it has ended: start them again"


def run_torchrun(tmp_path, num_agents, num_ranks, script, *args):
    """Status, output and errors of each agent, started as on several machines."""
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_agents}", f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", str(tmp_path / "script.py"), *args,
    ]  # fmt: skip
    agents = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(num_agents)
    ]
    outputs = [agent.communicate(timeout=120) for agent in agents]
    return [(agent.returncode, *output) for agent, output in zip(agents, outputs)]


def test_two_machines(tmp_path, tiny):
    """Two agents of torchrun on this machine. The end of rank 0's process ends the others."""
    results = run_torchrun(tmp_path, 2, 1, TORCHRUN, tiny[0])
    assert [status for status, *_ in results] == [0, 0], results
    expected = [tiny[1]([1, 2, 3], 8), tiny[1]([4] * 20, 8)]
    assert "".join(out for _, out, _ in results) == f"rank 0 {expected}\n{AGAIN}\n"


EXITING = """
    import atexit, os, sys, time
    from pathlib import Path
    from nanovllm import LLM

    atexit.register(Path(sys.argv[2], os.environ["RANK"]).touch)
    llm = LLM(sys.argv[1], tensor_parallel_size=2, num_kvcache_blocks=8)
    llm.generate([1, 2, 3], use_tqdm=False)
    executor = llm.model_runner.executor.worker
    llm.exit()
    deadline = time.monotonic() + 60
    while not Path(sys.argv[2], "1").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    print(os.listdir(sys.argv[2]))
"""


def test_exit_under_torchrun(tmp_path, tiny):
    """The other ranks exit, while rank 0's process continues."""
    (tmp_path / "left").mkdir()
    ((status, out, err),) = run_torchrun(tmp_path, 1, 2, EXITING, tiny[0], str(tmp_path / "left"))
    assert (status, out) == (0, "['1']\n"), err


def test_a_rank_of_torchrun_fails(tmp_path, tiny, monkeypatch):
    """The rank prints its traceback itself, because torchrun may end rank 0 first."""
    monkeypatch.setenv("PURPOSE", "on purpose")
    ((status, _, err),) = run_torchrun(tmp_path, 1, 2, FAILING, tiny[0])
    assert status != 0 and "ZeroDivisionError: on purpose" in err
