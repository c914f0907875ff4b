"""What comes from outside, at the wrong moment or in the wrong state: aborts within a step, other threads, forks, the
caller's torch settings, numbers that are none, tokens that are no text. Never a wrong token, and harm to one request only."""

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, LineInterrupts, Oracle, check_invariants, make_checkpoint, random_prompt
from safetensors.torch import load_file, save_file

from nanovllm import DEMO_MODEL, LLM, SamplingParams, kernels
from nanovllm.engine import executor, model_runner
from nanovllm.engine.executor import Executor, find_device, find_rank_device
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.penalties import Penalties

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPTS = [random_prompt(i, 5 + i) for i in range(4)]


@pytest.fixture
def within_a_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Have something called in the middle of every step, when the sequences are chosen and not yet computed."""

    def install(call: Callable[[], object]) -> None:
        prepare_batch = ModelRunner.prepare_batch
        monkeypatch.setattr(ModelRunner, "prepare_batch", lambda self, seqs: call() and None or prepare_batch(self, seqs))

    return install


# --- aborts within a step


def test_abort_within_a_step(tiny: tuple[str, Oracle], make_llm: MakeLLM, within_a_step: Callable) -> None:
    llm = make_llm()
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    llm.step()
    within_a_step(lambda: llm.abort(ids[1]))
    last: dict[int, dict] = {}
    while not llm.is_finished():
        last.update((output["request_id"], output) for output in llm.step())
        check_invariants(llm)
    assert [last[i]["finish_reason"] for i in ids] == ["length", "abort", "length", "length"]
    assert [last[i]["token_ids"] for i in ids] == [tiny[1](p, len(last[i]["token_ids"])) for i, p in zip(ids, PROMPTS)]
    assert len(last[ids[1]]["token_ids"]) == 2, "the step that it was aborted in still counts"


def test_a_stream_is_collected_within_a_step(tiny: tuple[str, Oracle], make_llm: MakeLLM, within_a_step: Callable) -> None:
    llm = make_llm(max_num_seqs=8)

    def abandon_a_stream() -> None:
        stream = llm.stream(PROMPTS[3], SamplingParams(max_tokens=30))
        next(stream)
        cycle: list = [stream]
        cycle.append(cycle)

    abandon_a_stream()
    within_a_step(gc.collect)
    outputs = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 6) for prompt in PROMPTS[:3]]
    assert llm.is_finished() and llm.stats["num_free_blocks"] == 64


def test_a_signal_handler_may_abort(tiny: tuple[str, Oracle], make_llm: MakeLLM, within_a_step: Callable) -> None:
    llm = make_llm()
    other = llm.add_request(PROMPTS[0], GREEDY)
    refusals: list[str] = []

    def handler(*_: object) -> None:
        llm.abort(other)
        for call in (llm.step, lambda: llm.generate(PROMPTS[0], use_tqdm=False), lambda: llm.add_request([1])):
            try:
                call()
            except RuntimeError as error:
                refusals.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        within_a_step(lambda: os.kill(os.getpid(), signal.SIGUSR1))
        outputs = llm.generate(PROMPTS[1:], GREEDY, use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 6) for prompt in PROMPTS[1:]]
    assert refusals and all("within its own step" in refusal for refusal in refusals)
    check_invariants(llm)


@pytest.mark.parametrize("wrong", [None, [3], {"request_id": 0}, "0", 1.0])
def test_abort_of_what_is_no_id(make_llm: MakeLLM, wrong: object) -> None:
    llm = make_llm()
    with pytest.raises(TypeError):
        llm.abort(wrong)
    assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == 4


def test_abort_of_samples(make_llm: MakeLLM) -> None:
    """By the first one's id all, also when it has ended; by another one's that one."""
    llm = make_llm()
    params = SamplingParams(n=3, ignore_eos=True)
    first, second, third = (llm.add_request(PROMPTS[0], params) for _ in range(3))
    llm.abort(second + 2)
    assert set(llm.requests) == set(range(9)) - {second + 2}
    llm.scheduler.finish(llm.requests[second].seq, "length")
    llm.requests.pop(second)
    llm.abort(second)
    assert set(llm.requests) == {0, 1, 2, 6, 7, 8}
    llm.abort(first)
    llm.abort(third + 5)
    assert set(llm.requests) == {6, 7, 8}


# --- other threads, other processes


def test_two_threads(tiny: tuple[str, Oracle], make_llm: MakeLLM) -> None:
    """Each call is right or a RuntimeError that says so; an abort from another thread takes effect."""
    llm = make_llm()
    expected = [tiny[1](prompt, 6) for prompt in PROMPTS]
    rights, refusals, wrongs = [], [], []

    def serve() -> None:
        for _ in range(20):
            try:
                outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            except RuntimeError as error:
                refusals.append(str(error))
            else:
                (rights if [o["token_ids"] for o in outputs] == expected else wrongs).append(1)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert rights and not wrongs and all("one thread" in refusal for refusal in refusals)
    check_invariants(llm)
    assert llm.is_finished()


def test_a_refused_thread_waits_for_nothing(make_llm: MakeLLM, within_a_step: Callable) -> None:
    llm = make_llm()
    errors: list[BaseException] = []
    request_id = llm.add_request(PROMPTS[0], GREEDY)

    def call() -> None:
        llm.abort(request_id)
        for refused in (llm.step, lambda: next(llm.stream(PROMPTS[1])), lambda: llm.beam_search(PROMPTS[1], 2, 2)):
            try:
                refused()
            except RuntimeError as error:
                errors.append(error)

    def from_another_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    within_a_step(from_another_thread)
    llm.generate(PROMPTS[2], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(errors) == 3 and all("one thread" in str(error) for error in errors)
    assert llm.is_finished() and [o["finish_reason"] for o in llm.step()] == ["abort"]


def test_aborts_from_another_thread_are_in_nobodys_way(tiny: tuple[str, Oracle], make_llm: MakeLLM) -> None:
    llm, stop = make_llm(), threading.Event()

    def abort_often() -> None:
        while not stop.wait(1e-5):
            llm.abort(10**9)

    thread = threading.Thread(target=abort_often)
    thread.start()
    try:
        for _ in range(20):
            (output, *_) = [o for o in llm.stream(PROMPTS[0], GREEDY)][::-1]
            assert output["token_ids"] == tiny[1](PROMPTS[0], 6)
    finally:
        stop.set()
        thread.join()


def test_exit_from_another_thread(make_llm: MakeLLM, within_a_step: Callable) -> None:
    llm = make_llm()
    within_a_step(llm.exit)
    with pytest.raises(RuntimeError, match="exit"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_after_a_fork(tiny: tuple[str, Oracle]) -> None:
    """Neither the parent's engine nor a new one can compute there: OpenMP would wait for threads that are not there."""
    code = f"""if True:
        import os, sys
        from nanovllm import LLM
        llm = LLM({tiny[0]!r}, num_kvcache_blocks=64)
        llm.generate([1, 2, 3], use_tqdm=False)
        if os.fork() == 0:
            for call in (lambda: llm.generate([1, 2], use_tqdm=False), llm.step, lambda: LLM({tiny[0]!r}, num_kvcache_blocks=64)):
                try:
                    call()
                except RuntimeError as error:
                    print("refused:", error, flush=True)
            os._exit(0)
        os.wait()
        print(len(llm.generate([1, 2, 3], use_tqdm=False)[0]["token_ids"]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.count("refused: this process was forked") == 3 and done.stdout.endswith("64\n")


# --- what the caller has set


@contextmanager
def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> AbstractContextManager[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def matmul_precision() -> AbstractContextManager[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        assert torch.get_float32_matmul_precision() == "medium"
        torch.set_float32_matmul_precision("highest")


SURROUNDINGS: dict[str, Callable[[], list[AbstractContextManager]]] = {
    "autocast": lambda: [torch.autocast("cpu", dtype=torch.bfloat16)],
    "autocast float16": lambda: [torch.autocast("cpu", dtype=torch.float16)],
    "float64": lambda: [default_dtype(torch.float64)],
    "bfloat16": lambda: [default_dtype(torch.bfloat16)],
    "device": lambda: [torch.device("meta")],
    "grad": lambda: [torch.enable_grad()],
    "inference": lambda: [torch.inference_mode()],
    "deterministic": lambda: [deterministic()],
    "matmul precision": lambda: [matmul_precision()],
    "all": lambda: [torch.autocast("cpu"), default_dtype(torch.float64), torch.device("meta"), deterministic()],
}


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_the_callers_settings_change_nothing(
    tiny: tuple[str, Oracle], make_llm: MakeLLM, surroundings: str, backend: str
) -> None:
    kinds = [
        {},
        {"presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01},
        {"logprobs": 2, "min_tokens": 2},
    ]
    params = [SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "seed": 5, **kind}) for kind in kinds]

    def serve(llm: LLM) -> list:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [(o["token_ids"], o["finish_reason"]) for o in outputs]

    llm = make_llm(attention_backend=backend)
    expected = serve(make_llm(attention_backend=backend))
    with ExitStack() as stack:
        for context in SURROUNDINGS[surroundings]():
            stack.enter_context(context)
        before = (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.is_autocast_enabled("cpu"),
            torch.is_grad_enabled(),
        )
        for engine in (llm, make_llm(attention_backend=backend)):  # made outside, made within
            assert serve(engine) == expected
        after = torch.get_default_dtype(), torch.get_default_device(), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
        assert before == after
    assert serve(llm) == expected, "and nothing wrong is left in the prefix cache"


def test_the_engines_gpu_is_the_current_one(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine is made and while it computes and samples. Before and after it is the caller's. Played on the CPU."""
    current, seen = ["the caller's"], set()

    @contextmanager
    def use_device(device: torch.device) -> AbstractContextManager[None]:
        current.append(f"the engine's, {device}")
        try:
            yield
        finally:
            current.pop()

    def watch(owner: object, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: seen.add((name, current[-1])) or original(*args, **options))

    for module in (executor, model_runner):
        monkeypatch.setattr(module, "use_device", use_device)
    steps = [(ModelRunner, "prepare_batch"), (Executor, "compute"), (ModelRunner, "prepare_sampling"), (Penalties, "apply")]
    parts = [(kernels, "select_backend"), (Executor, "_allocate"), (kernels, "capture_decode_steps"), *steps]
    for owner, name in parts:
        watch(owner, name)
    llm = make_llm()
    assert current == ["the caller's"]
    llm.generate(PROMPTS, SamplingParams(presence_penalty=1.0, max_tokens=3), use_tqdm=False)
    assert seen == {(name, "the engine's, cpu") for _, name in parts} and current == ["the caller's"]
    monkeypatch.setattr(ModelRunner, "prepare_batch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert current == ["the caller's"]


def test_graphs_are_recorded_undisturbed(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They repeat what the caller's settings were when the engine was made."""
    seen: list[tuple[bool, str]] = []

    def note(*_: object) -> None:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()))

    monkeypatch.setattr(kernels, "capture_decode_steps", note)
    with torch.autocast("cpu", dtype=torch.bfloat16), matmul_precision():
        make_llm()
    assert set(seen) == {(False, "highest")}


def test_which_gpu_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is current when the engine is made, also when another one is afterwards."""
    for name, value in {"is_available": True, "device_count": 4, "current_device": 2}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    names = "auto", "cuda", "cuda:1", "cpu"
    assert [str(find_device(name)) for name in names] == ["cuda:2", "cuda:2", "cuda:1", "cpu"]
    assert [str(find_rank_device(name, 3)) for name in ("auto", "cuda", "cpu")] == ["cuda:3", "cuda:3", "cpu"]
    with pytest.raises(ValueError, match="every rank needs its own"):
        find_rank_device("cuda:1", 0)
    executor.use_device(find_device("cuda"))
    with executor.use_device(find_device("cpu")):
        assert entered == [torch.device("cuda:2")]


def test_exit_leaves_nothing_to_the_garbage_collector(make_llm: MakeLLM) -> None:
    """The memory is free when exit returns, though the caller still has the engine."""
    llm = make_llm(max_num_seqs=4)
    llm.generate(PROMPTS, SamplingParams(repetition_penalty=1.3, max_tokens=3), use_tqdm=False)
    runner = llm.model_runner
    tensors = [*runner.executor.kv_caches, runner.penalties.counts, *runner.executor.model.parameters()]
    left = [weakref.ref(tensor) for tensor in tensors]
    gc.collect()
    gc.disable()
    try:
        del runner, tensors
        llm.exit()
        assert not any(ref() is not None for ref in left)
    finally:
        gc.enable()


# --- numbers that are none, tokens that are no text


@pytest.fixture
def poisoned(tmp_path: Path) -> tuple[str, Oracle]:
    """A checkpoint in which whoever reads token 96 computes NaN."""
    make_checkpoint(tmp_path, tie_word_embeddings=False)
    weights = load_file(tmp_path / "model.safetensors")
    oracle = Oracle(make_checkpoint(tmp_path, tie_word_embeddings=False))
    weights["model.embed_tokens.weight"][VOCAB_SIZE - 1] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    return str(tmp_path), oracle


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"logprobs": 2, "repetition_penalty": 1.2}], ids=str
)
def test_nan_logits_end_one_request(poisoned: tuple[str, Oracle], dtype: str, params: dict) -> None:
    llm = LLM(poisoned[0], dtype=dtype, num_kvcache_blocks=64, kvcache_block_size=4)
    healthy = [[token_id % 90 for token_id in prompt] for prompt in PROMPTS]
    shared = healthy[0] * 2
    prompts = [healthy[0], [*shared, VOCAB_SIZE - 1, 3], healthy[1], [VOCAB_SIZE - 1], shared]
    params = SamplingParams(max_tokens=6, seed=1, **params)
    barred = {"stop_token_ids": [VOCAB_SIZE - 1]}  # healthy requests may come to draw the token, which ends them here
    with pytest.warns(RuntimeWarning, match="request 1 ends with an error: its logits are NaN"):
        outputs = llm.generate(prompts, [SamplingParams(**{**vars(params), **barred})] * 5, use_tqdm=False)
    assert [o["finish_reason"] == "error" for o in outputs] == [False, True, False, True, False]
    for output in (outputs[1], outputs[3]):
        assert output["token_ids"] == [] and output["logprobs"] in (None, [])
    if dtype == "float32" and params.temperature == 0.0:
        for i in (0, 2, 4):
            token_ids = outputs[i]["token_ids"]
            assert token_ids == poisoned[1](prompts[i], len(token_ids))
    check_invariants(llm)


def test_beams_whose_logits_are_nan(poisoned: tuple[str, Oracle]) -> None:
    llm = LLM(poisoned[0], num_kvcache_blocks=64)
    with pytest.warns(RuntimeWarning, match="NaN"):
        failed, found = llm.beam_search([[VOCAB_SIZE - 1], [3, 4]], 2, 1)
    assert [(o["finish_reason"], o["token_ids"]) for o in failed] == [("error", [])]
    assert [o["finish_reason"] for o in found] == ["length"] * 2


class Mute:
    """A tokenizer that cannot decode one token."""

    def __init__(self, tokenizer: object, bad_token: int) -> None:
        self.tokenizer, self.bad_token = tokenizer, bad_token

    def __getattr__(self, name: str) -> object:
        return getattr(self.tokenizer, name)

    def decode(self, token_ids: list[int], **options: object) -> str:
        if self.bad_token in token_ids:
            raise OverflowError("out of range integral type conversion attempted")
        return self.tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("stop", [None, "#"])
def test_tokens_that_cannot_be_decoded_end_one_request(stop: str | None) -> None:
    llm = LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=512)
    questions = ["What is 1 + 2?", "1, 2, 3, 4, 5"]
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=stop, ignore_eos=True)
    expected = llm.generate(questions, params, use_tqdm=False)
    bad_token = next(token_id for token_id in expected[1]["token_ids"][3:] if token_id not in expected[0]["token_ids"])
    llm.tokenizer = Mute(llm.tokenizer, bad_token)

    def collect(outputs: list[dict]) -> None:
        by_id: dict[int, dict] = {o["request_id"]: o for o in outputs}
        right, wrong = (by_id[i] for i in sorted(by_id))
        assert (right["text"], right["finish_reason"]) == (expected[0]["text"], expected[0]["finish_reason"])
        assert wrong["finish_reason"] == "error" and expected[1]["text"].startswith(wrong["text"])

    with pytest.warns(RuntimeWarning, match="cannot be decoded: OverflowError"):
        collect(llm.generate(questions, params, use_tqdm=False))
    with pytest.warns(RuntimeWarning, match="cannot be decoded"):
        collect(list(llm.stream(questions, params)))
    ids = [llm.add_request(question, params) for question in questions]
    outputs: list[dict] = []
    with pytest.warns(RuntimeWarning, match=f"request {ids[1]} ends"):
        while not llm.is_finished():
            outputs += llm.step()
    collect(outputs)
    check_invariants(llm)
    before = expected[1]["token_ids"][: expected[1]["token_ids"].index(bad_token)]
    with pytest.warns(RuntimeWarning, match="cannot be decoded"):
        (beams,) = llm.beam_search([*expected[1]["prompt_token_ids"], *before], 2, 1)
    assert [(beam["token_ids"] == [bad_token], beam["finish_reason"]) for beam in beams] == [(True, "error"), (False, "length")]


def test_a_warning_that_is_an_error_harms_nobody() -> None:
    llm = LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=512)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop="#")
    expected = llm.generate(["1 + 2", "3, 4"], params, use_tqdm=False)
    tokenizer, llm.tokenizer = llm.tokenizer, Mute(llm.tokenizer, expected[0]["token_ids"][2])
    bad = llm.add_request("1 + 2", params)
    llm.tokenizer = tokenizer
    good = llm.add_request("3, 4", params)
    outputs: list[dict] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=f"request {bad}"):
            while True:
                outputs += llm.step()
    while not llm.is_finished():
        outputs += llm.step()
    last = {output["request_id"]: output for output in outputs}
    assert last[bad]["finish_reason"] == "error" and last[good]["text"] == expected[1]["text"]
    assert [output["finish_reason"] for output in outputs if output["request_id"] == bad].count("error") == 1
    check_invariants(llm)


# --- interruptions of interruptions


def test_ctrl_c_again_during_recovery(tiny: tuple[str, Oracle], make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    other = llm.add_request(PROMPTS[3], GREEDY)
    llm.step()
    with monkeypatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(ModelRunner, "run", interrupt)
        patch.setattr(type(llm.scheduler.block_manager), "reset", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o["token_ids"] for o in outputs] == [tiny[1](prompt, 6) for prompt in PROMPTS]
    check_invariants(llm)
    assert [(o["request_id"], o["token_ids"]) for o in llm.step()] == [(other, tiny[1](PROMPTS[3], 6))]


def test_ctrl_c_in_the_cleaning_up(tiny: tuple[str, Oracle], make_llm: MakeLLM) -> None:
    """Twice, at every pair of lines of a transaction: the thread is served on, and so is another one."""
    expected = tiny[1](PROMPTS[0], 3)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    llm = make_llm()
    for first in range(1, 60, 2):
        for gap in (1, 2, 3, 5):
            targets = (first, first + gap)
            llm.add_request(PROMPTS[0], params)
            with suppress(KeyboardInterrupt), LineInterrupts(lambda code: code.co_filename.endswith("transaction.py"), *targets):
                llm.step()
            served: list[dict] = []
            thread = threading.Thread(target=lambda: served.extend(llm.generate(PROMPTS[0], params, use_tqdm=False)))
            thread.start()
            thread.join()
            (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
            assert [output["token_ids"]] == [served[0]["token_ids"]] == [expected], targets
            check_invariants(llm)


def test_text_of_a_token_that_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the search for a stop string and the token's being noted, then an abort: no text without its token."""
    llm = LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=64)
    request_id = llm.add_request("1, 2, 3", SamplingParams(temperature=0.0, stop="#"))
    llm.step()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nanovllm.engine.request.Request.note", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    llm.abort(request_id)
    (output,) = llm.step()
    assert output["text"] == llm.tokenizer.decode(output["token_ids"]) and len(output["token_ids"]) == 1


def test_penalties_interrupted_while_they_count(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every line of it: what was not counted is counted the next time, and nothing twice."""
    params = SamplingParams(temperature=0.0, max_tokens=12, frequency_penalty=1.0, repetition_penalty=1.3)
    (expected,) = make_llm().generate(PROMPTS[0], params, use_tqdm=False)
    for target in range(1, 200, 3):
        llm, interrupts = make_llm(), LineInterrupts(lambda code: code is Penalties._count.__code__, target)
        request_id = llm.add_request(PROMPTS[0], params)
        outputs: list[dict] = []
        while not llm.is_finished():
            with suppress(KeyboardInterrupt), interrupts:
                outputs += llm.step()
        assert (outputs[-1]["request_id"], outputs[-1]["token_ids"]) == (request_id, expected["token_ids"]), target
        if interrupts.num_lines < target:
            break
    assert target > 20
