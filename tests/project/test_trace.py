"""The trace file is valid after every step, matches the engine, and is shown as text and plot."""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import warnings
import weakref
from collections import Counter
from contextlib import contextmanager

import pytest
from conftest import check_invariants, greedy, random_prompt

from nanovllm import DEMO_MODEL, LLM, trace
from nanovllm.engine.scheduler import Scheduler
from nanovllm.trace.__main__ import main as trace_main

SMALL = {
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 24,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
}
PROMPTS = [
    random_prompt(1, 22),
    random_prompt(2, 30),
    random_prompt(3, 9),
    random_prompt(1, 22)[:16],
]


def check_trace(path, llm):
    """Return the events, after checking them against the engine's statistics."""
    events = json.loads(path.read_bytes())
    steps = [event for event in events if event["ph"] == "X" and "kind" in event["args"]]
    lanes = [event for event in events if event["ph"] == "X" and event["tid"] > 0]
    assert [step["args"]["step"] for step in steps] == list(range(len(steps)))
    for name in ("prefill", "decode"):
        in_lanes = sum(
            event["args"]["num_tokens"] for event in lanes if event["name"].startswith(name)
        )
        in_steps = sum(step["args"][f"num_{name}_tokens"] for step in steps)
        assert in_lanes == in_steps == llm.stats[f"num_{name}_tokens"]
    assert (
        sum(event["name"].startswith("preempted") for event in events)
        == llm.stats["num_preemptions"]
    )
    admitted = {}  # the first time, which is what stats count
    for event in lanes:
        admitted.setdefault(event["args"]["request_id"], event["args"]["num_reused_tokens"])
    assert sum(admitted.values()) == llm.stats["num_cached_tokens"]
    for lane in {event["tid"] for event in lanes}:
        ends = 0.0
        for event in (event for event in lanes if event["tid"] == lane):
            assert event["ts"] >= ends - 0.2
            ends = event["ts"] + event["dur"]
    for step in steps:
        milliseconds = [
            step["args"][f"{phase}_ms"] for phase in ("schedule", "prepare", "forward", "sample")
        ]
        assert min(milliseconds) >= 0 and sum(milliseconds) * 1e3 <= step["dur"] + 2
    blocks = [event["args"] for event in events if event["name"] == "blocks"]
    assert len(blocks) == len(steps) and all(
        sum(counts.values()) == llm.stats["num_blocks"] for counts in blocks
    )
    return events


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        {"tensor_parallel_size": 2},
    ],
)
def test_it_is_true_after_every_step(tiny, tmp_path, options):
    path = tmp_path / "trace.json"
    with LLM(tiny[0], trace=path, **{**SMALL, **options}) as llm:
        assert json.loads(path.read_bytes())  # before the first one
        for prompt in PROMPTS * 2:
            llm.add_request(prompt, greedy(14))
        first = llm.add_request(PROMPTS[0], greedy(200))
        while not llm.is_finished():
            llm.step()
            check_trace(path, llm)
            check_invariants(llm)
            if llm.stats["num_preemptions"] > 2:
                llm.abort(first)
        assert llm.stats["num_preemptions"] and llm.stats["num_cached_tokens"]
        assert llm.generate(PROMPTS[1], greedy(5), use_tqdm=False)[0]["token_ids"] == tiny[1](
            PROMPTS[1], 5
        )


def test_an_interrupted_step_leaves_it_whole(tiny, tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    llm = LLM(tiny[0], trace=path, **SMALL)
    sample = llm.model_runner.sampler.forward
    for fails in (False, True, False):

        def forward(*args, fails=fails):
            if fails:
                raise KeyboardInterrupt
            return sample(*args)

        monkeypatch.setattr(llm.model_runner.sampler, "forward", forward)
        try:
            llm.generate(PROMPTS, greedy(5), use_tqdm=False)
        except KeyboardInterrupt:
            assert fails
        json.loads(path.read_bytes())
    assert trace.read(path)


def test_ctrl_c_once_a_step_is_written(tiny, tmp_path):
    """The file stays valid, and the next step reports the reset."""
    path = tmp_path / "trace.json"
    llm = LLM(tiny[0], trace=path, **SMALL)
    timeline, file = llm.scheduler.timeline, llm.scheduler.timeline.file

    class Interrupted:
        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, data):
            timeline.file = file
            file.write(data)
            raise KeyboardInterrupt

    llm.add_request(PROMPTS[0], greedy(5))
    llm.step()
    timeline.file = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        llm.step()
    while not llm.is_finished():
        llm.step()
    assert [step.info["starts_over"] for step in trace.read(path)] == [
        True,
        False,
        True,
        *[False] * 5,
    ]


def test_nothing_is_paid_when_it_is_off(tiny):
    llm = LLM(tiny[0], **SMALL)
    assert type(llm.scheduler) is Scheduler and not hasattr(llm.scheduler, "timeline")


def test_exit_leaves_nothing_to_the_garbage_collector(tiny, tmp_path):
    """The timeline does not keep the parts that it records alive."""
    llm = LLM(tiny[0], trace=tmp_path / "trace.json", **SMALL)
    llm.generate(PROMPTS, greedy(3), use_tqdm=False)
    left = [weakref.ref(kv_cache) for kv_cache in llm.model_runner.executor.worker.kv_caches]
    gc.collect()
    gc.disable()
    try:
        llm.exit()
        assert not any(ref() is not None for ref in left)
    finally:
        gc.enable()


def test_a_killed_process_leaves_it_whole(tiny, tmp_path):
    path = tmp_path / "trace.json"
    script = f"""
import itertools, os, signal
from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import ModelRunner
llm, run, steps = LLM({tiny[0]!r}, num_kvcache_blocks=64, trace={str(path)!r}), ModelRunner.run, itertools.count()
ModelRunner.run = lambda self, seqs: run(self, seqs) if next(steps) < 50 else os.kill(os.getpid(), signal.SIGKILL)
llm.generate([[1, 2, 3]] * 20, SamplingParams(max_tokens=100), use_tqdm=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], stderr=subprocess.DEVNULL, check=False, timeout=100
    )
    assert done.returncode == -signal.SIGKILL
    assert len(trace.read(path)) == 50


@contextmanager
def file_size_limit(num_bytes):
    """Writes beyond it fail as on a full disk: the first can be partial, the next raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_timeline_and_nothing_else(tiny, tmp_path):
    path = tmp_path / "trace.json"
    llm = LLM(tiny[0], trace=path, **SMALL)
    with (
        file_size_limit(8000),
        pytest.warns(
            RuntimeWarning, match=r"trace='.*' is incomplete, recording stopped: .*File too large"
        ) as warned,
    ):
        outputs = llm.generate(PROMPTS, greedy(8), use_tqdm=False)
    assert len(warned) == 1
    assert [output["token_ids"] for output in outputs] == [tiny[1](prompt, 8) for prompt in PROMPTS]
    content = path.read_bytes()
    assert 1 < len(trace.read(path)) and len(content) <= 8000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llm.generate(PROMPTS[0], greedy(5), use_tqdm=False)[0]["token_ids"] == tiny[1](
            PROMPTS[0], 5
        )
    assert path.read_bytes() == content


def test_paths_that_cannot_be_written(tiny, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # without a reader: to open it for writing only would wait for one
    paths = {
        tmp_path / "nowhere" / "trace.json": "No such file",
        "a\0b": "null",
        pipe: "Illegal seek",
    }
    paths |= {tmp_path: "Is a directory", "/dev/full": "No space left"}
    for path, reason in paths.items():
        with pytest.raises(ValueError, match=rf"trace='.*' cannot be written: .*{reason}"):
            LLM(tiny[0], trace=path, **SMALL)


def test_a_file_without_room_for_its_first_byte(tiny, tmp_path):
    with (
        file_size_limit(0),
        pytest.raises(ValueError, match=r"trace='.*' cannot be written: .*File too large"),
    ):
        LLM(tiny[0], trace=tmp_path / "trace.json", **SMALL)


@pytest.fixture(scope="module")
def recorded(tiny, tmp_path_factory):
    """A trace with a prefix hit, chunks beside decodes, and preemptions."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    llm = LLM(tiny[0], trace=path, **SMALL)
    llm.generate(PROMPTS[0], greedy(6), use_tqdm=False)
    llm.generate(PROMPTS, greedy(14), use_tqdm=False)
    return path


def test_text(recorded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    trace_main([str(recorded)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:6] == [
        "  lane 0 |A16 A6 a  a  a  a  a  B+2 b   b   b  b  b  b  b  b  b  b  b  b  b  D+4 d  d",
        "  lane 1 |                      C14 C15 C1  c  c  c  c  c  c  c  c  c  c  c  c   c",
        "  lane 2 |                              D9  d  d  d  d  d  d  d  d  d  d  !D E+8 e  e  e  e  e",
        "  lane 3 |                              E+4 e  e  e  e  e  e  !E !E",
        "  tokens |16  6  1  1  1  1  1  16  16  15  4  4  4  4  4  4  6  3  3  3  2  13  3  2  1  1  1",
    ]
    assert "step 7: 2 + 14 = 16 tokens, the whole budget" in lines
    assert "B: 22 prompt tokens (20 reused), 14 generated tokens, 13 decodes" in lines
    assert "27 steps, 5 requests, 82 prefill and 54 decode tokens, 3 preemptions" in lines


def test_text_of_a_character_per_column(recorded):
    """The most important of several steps is shown: a preemption, then a prefill."""
    assert trace.render(trace.read(recorded), 20).splitlines()[1:7] == [
        "  lane 0 |AaBbbbbD",
        "  lane 1 |  CCcccc",
        "  lane 2 |   Ddd!Ee",
        "  lane 3 |   Ee!",
        "  tokens |@.@@-=:%.",
        " waiting |  @  +@",
    ]


def test_readers_that_leave(recorded):
    command = [sys.executable, "-m", "nanovllm.trace", str(recorded)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # as `| head` does
        assert process.stderr.read() == b"" and process.wait() == 1


def test_text_is_ascii(recorded):
    """Also with more steps than columns."""
    steps = trace.read(recorded)
    assert all(trace.render(steps * repeat).isascii() for repeat in (1, 10))


@pytest.mark.parametrize("width", [20, 30, 60, 200])
def test_text_fits(recorded, width):
    lines = trace.render(trace.read(recorded), width).splitlines()
    assert max(map(len, lines)) <= width
    assert Counter(line[:8].strip() for line in lines)["lane 3"] == 1


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture(recorded, tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / f"timeline.{suffix}"
    trace_main([str(recorded), "-o", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.parametrize(
    "content",
    ["", "[", "{}", "[]", "[1]", '[{"ph": "X", "name": "foreign", "ts": 0, "dur": 1, "tid": 1}]'],
)
def test_files_that_are_no_timeline(tmp_path, content, capsys):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(SystemExit):
        trace_main([str(path)])
    assert str(path) in capsys.readouterr().err


def test_a_file_that_is_cut_off(recorded, tmp_path, capsys):
    path = tmp_path / "trace.json"
    path.write_bytes(recorded.read_bytes()[:3000])
    with pytest.raises(SystemExit):
        trace_main([str(path)])
    assert "is not a nanovllm trace, or it is truncated" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        trace_main([str(tmp_path / "nothing")])
    assert "No such file" in capsys.readouterr().err


def test_each_text_is_recorded_once_and_cannot_end_the_page(tmp_path):
    path = tmp_path / "trace.json"
    with LLM(DEMO_MODEL, trace=path, **SMALL) as llm:
        for prompt in ("a </script> b", "a <!-- b"):
            llm.generate(prompt, greedy(4), use_tqdm=False)
        tokenizer = llm.tokenizer
    recorded: dict[str, str] = {}
    for step in trace.read(path):
        texts = step.info.get("texts", {})
        assert not recorded.keys() & texts.keys()
        recorded |= texts
        for work in step.lanes.values():
            for token_id in [*work.get("token_ids", []), *work["new_token_ids"]]:
                assert recorded[str(token_id)] == tokenizer.decode([token_id])
    page = trace.make_page([trace.read(path)])
    template = trace.make_page([trace.read(path)[:1]])
    assert page.count("</script") == template.count("</script") == 2
    assert "<!-- b" not in page
