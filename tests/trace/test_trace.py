"""The trace file is valid after every step, matches the engine, and is shown as text."""

import json
import os
import resource
import subprocess
import sys
import warnings

import pytest
from conftest import (
    check_invariants,
    find_feature,
    generate_ids,
    greedy,
    make_drafts_free,
    random_prompt,
)
from families import make_family
from front_helpers import finish, interrupt_in
from project_helpers import SMALL, reject

from nanovllm import DEMO_MODEL, LLM, SamplingParams, trace
from nanovllm.trace.__main__ import main as trace_main
from nanovllm.trace.timeline import TraceFile

PROMPTS = [
    random_prompt(1, 22),
    random_prompt(2, 30),
    random_prompt(3, 9),
    random_prompt(1, 22)[:16],
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.json"


def check_trace(path, llm):
    """Check the events against each other and against the engine's statistics."""
    events = json.loads(path.read_bytes())
    spans = [event for event in events if event["ph"] == "X"]
    steps = [event for event in events if event["cat"] == "step"]
    lanes = [event for event in spans if event["tid"] > 0]
    blocks = [event["args"] for event in events if event["name"] == "blocks"]
    assert [step["args"]["step"] for step in steps] == list(range(len(steps)))
    for kind in ("prefill", "decode"):
        works = [event["args"] for event in lanes if event["name"].startswith(kind)]
        assert sum(work["num_tokens"] for work in works) == llm.stats[f"num_{kind}_tokens"]
    preempted = [event for event in events if event["name"].startswith("preempted")]
    assert len(preempted) == llm.stats["num_preemptions"]
    cached = {}  # of the first admission, as stats count
    ends = {}
    for event in lanes:
        cached.setdefault(event["args"]["request_id"], event["args"]["num_reused_tokens"])
        assert event["ts"] >= ends.get(event["tid"], 0)
        ends[event["tid"]] = event["ts"] + event["dur"]
    assert sum(cached.values()) == llm.stats["num_cached_tokens"]
    for step in steps:
        phases = ("schedule", "prepare", "forward", "sample")
        milliseconds = [step["args"][f"{phase}_ms"] for phase in phases]
        assert min(milliseconds) >= 0
        assert sum(milliseconds) * 1e3 <= step["dur"] + 2
    assert len(blocks) == len(steps)
    for counts in blocks:
        assert sum(counts.values()) == llm.stats["num_blocks"]


# --- The file


@pytest.mark.parametrize("options", [{}, {"policy": "prefill_first", "max_num_batched_tokens": 64}])
def test_it_is_true_after_every_step(tiny, path, options):
    with LLM(tiny[0], trace=path, **{**SMALL, **options}) as llm:
        assert json.loads(path.read_bytes())  # before the first step
        for prompt in PROMPTS * 2:
            llm.add_request(prompt, greedy(14))
        long = llm.add_request(PROMPTS[0], greedy(200))
        while not llm.is_finished():
            llm.step()
            check_trace(path, llm)
            check_invariants(llm)
            if llm.stats["num_preemptions"] > 2:
                llm.abort(long)
        assert llm.stats["num_preemptions"]
        assert llm.stats["num_cached_tokens"]
        assert generate_ids(llm, PROMPTS[1], greedy(5)) == [tiny[1](PROMPTS[1], 5)]
        recorder = find_feature(llm, TraceFile)
    assert recorder.file.closed


def test_a_trace_is_read_as_it_was_recorded(tiny, path, monkeypatch):
    recorded = []
    write = TraceFile.write

    def write_and_keep(self, step):
        recorded.append(step)
        write(self, step)

    monkeypatch.setattr(TraceFile, "write", write_and_keep)
    with LLM(tiny[0], trace=path, num_speculative_tokens=2, **SMALL) as llm:
        make_drafts_free(llm)
        generate_ids(llm, PROMPTS, greedy(14))
        assert llm.stats["num_preemptions"]
    read, expected = [
        json.dumps(steps, default=vars) for steps in (trace.read(path).steps, recorded)
    ]
    assert read == expected


def test_a_duplicate_is_cached_when_its_copy_is_evicted_in_the_same_step(tiny, path):
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": 5, "max_model_len": 16}
    with LLM(tiny[0], trace=path, **options) as llm:
        prompt = random_prompt(1, 8)
        llm.generate([prompt], greedy(1), use_tqdm=False)  # leaves two cached blocks
        # The first request has a duplicate of the second one, which the other request takes.
        llm.generate([prompt, random_prompt(2, 12)], greedy(1), use_tqdm=False)
        cached = llm.scheduler.block_manager.hash_to_block_id
    _, step = trace.read(path).steps
    work = step.work[0]
    (planned,) = work.full_blocks
    (late,) = work.late_blocks
    block_id, is_cached, block_hash = late
    assert [*planned] == [block_id, False, block_hash]
    assert is_cached and cached[int(block_hash, 16)] == block_id


def test_a_step_that_is_written_and_interrupted_is_followed_by_a_reset(tiny, path, monkeypatch):
    """An interrupt before it is written is one of test_page.py's."""
    llm = LLM(tiny[0], trace=path, **SMALL)
    recorder = find_feature(llm, TraceFile)
    write = recorder.write

    def interrupt(step):
        write(step)
        raise KeyboardInterrupt

    llm.add_request(PROMPTS[0], greedy(5))
    llm.step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recorder, "write", interrupt)
        llm.step()
    finish(llm)
    assert [step.is_reset for step in trace.read(path).steps][:3] == [True, False, True]


def test_texts_of_a_step_that_was_not_written_are_recorded_later(path):
    with LLM(DEMO_MODEL, trace=path, **SMALL) as llm:
        llm.add_request("What is 12 + 30?", greedy(5))
        interrupt_in(find_feature(llm, TraceFile), "write", llm.step)
        finish(llm)
    texts = [text for step in trace.read(path).steps for text in step.texts.values()]
    assert "".join(texts).count("What") == 1


def test_a_full_disk_ends_the_timeline_and_nothing_else(tiny, path):
    llm = LLM(tiny[0], trace=path, **SMALL)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Beyond this limit, writes are partial or fail, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limits[1]))
    try:
        with pytest.warns(RuntimeWarning, match="trace='.*' is incomplete") as warned:
            outputs = generate_ids(llm, PROMPTS, greedy(8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(warned) == 1
    assert outputs == [tiny[1](prompt, 8) for prompt in PROMPTS]
    content = path.read_bytes()
    assert len(trace.read(path).steps) > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate_ids(llm, PROMPTS[0], greedy(5))
    assert path.read_bytes() == content


def test_paths_that_cannot_be_written_are_rejected(tiny, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # without a reader: opened only for writing, it would block
    for path, reason in {
        tmp_path / "nowhere" / "trace.json": "No such file",
        tmp_path / "pipe": "Illegal seek",
        tmp_path: "Is a directory",
        "a\0b": "null",
        "/dev/full": "No space left",
    }.items():
        with pytest.raises(ValueError, match=rf"trace='.*' cannot be written: .*{reason}"):
            LLM(tiny[0], trace=path, **SMALL)


def test_each_text_is_recorded_once_and_cannot_end_the_page(path):
    with LLM(DEMO_MODEL, trace=path, **SMALL) as llm:
        for prompt in ("a </script> b", "a <!-- b"):
            generate_ids(llm, prompt, greedy(4))
        decode = llm.tokenizer.decode
    read = trace.read(path)
    recorded = {}
    for step in read.steps:
        assert not recorded.keys() & step.texts.keys()
        recorded |= step.texts
        for work in step.work:
            for token_id in work.token_ids + work.new_token_ids:
                assert recorded[str(token_id)] == decode([token_id])
    assert "<" in "".join(recorded.values())
    _, _, data = trace.make_page([read]).partition('<script id="data"')
    assert "<" not in data.partition("</script>")[0]


def test_the_choice_of_a_grammar_is_recorded(path):
    """Also in steps with drafts, where it concerns the first of several tokens."""
    text = "a b " * 4 + "a"
    params = SamplingParams(temperature=0.0, structured_outputs={"regex": "( a b)+"})
    with LLM(DEMO_MODEL, trace=path, num_speculative_tokens=2, **SMALL) as llm:
        make_drafts_free(llm)
        free = llm.add_request(text, greedy(30))
        llm.add_request(text, params)
        finish(llm)
        assert llm.stats["num_accepted_tokens"]
    works = [work for step in trace.read(path).steps for work in step.work]
    assert not any(
        "allowed_token_ids" in work.features for work in works if work.request_id == free
    )
    num_forbidden = 0  # steps in which the model prefers another token
    for work in works:
        if work.request_id != free:
            allowed = work.features["allowed_token_ids"]
            preferred = work.features["preferred_token_ids"]
            assert work.features["num_allowed_tokens"] == len(allowed)
            assert allowed[0] == work.new_token_ids[0]
            likely = [each for each in preferred if each in allowed]
            assert likely == allowed[: len(likely)], "both begin with the most probable one"
            assert len(preferred) == 12
            if preferred[0] not in allowed:
                num_forbidden += 1
    assert num_forbidden > 0


# --- Windows


def test_blocks_of_the_second_pool_are_counted(path, tmp_path):
    """The simulation in test_windows.py checks which blocks they are."""
    make_family(tmp_path, "gemma3")
    with LLM(tmp_path, trace=path, **SMALL) as llm:
        generate_ids(llm, PROMPTS, greedy(14))
    read = trace.read(path)
    counts = [step.features["window_pool"] for step in read.steps]
    num_blocks = read.settings["num_window_blocks"]
    assert {sum(each.values()) for each in counts} == {num_blocks}
    events = json.loads(path.read_bytes())
    assert [each["args"] for each in events if each["name"] == "window blocks"] == counts
    lines = trace.render(read.steps, 300).splitlines()
    (row,) = [line.partition("|")[2] for line in lines if line.startswith("  window |")]
    assert row.split() == [str(each["used"]) for each in counts]


# --- Text


@pytest.fixture(scope="module")
def recorded(tiny, tmp_path_factory):
    """A trace with a prefix hit, chunks beside decodes, and preemptions."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    llm = LLM(tiny[0], trace=path, **SMALL)
    generate_ids(llm, PROMPTS[0], greedy(6))
    generate_ids(llm, PROMPTS, greedy(14))
    return path


def test_text_shows_what_each_lane_computes(recorded, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    trace_main([str(recorded)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:6] == [
        "  lane 0 |A16 A6 a  a  a  a  a  B+2 b   b   b  b  b  b  b  b  b  b  b  b  b  D+4 d  d",
        "  lane 1 |                      C14 C15 C1  c  c  c  c  c  c  c  c  c  c  c  c   c",
        "  lane 2 |                              D9  d  d  d  d  d  d  d  d  d  d  !D E+8 e  e  e"
        "  e  e",
        "  lane 3 |                              E+4 e  e  e  e  e  e  !E !E",
        "  tokens |16  6  1  1  1  1  1  16  16  15  4  4  4  4  4  4  6  3  3  3  2  13  3  2  1"
        "  1  1",
    ]
    assert any(line.startswith("A22: prefill of 22 tokens of A") for line in lines)


def test_steps_that_do_not_fit_are_counted(recorded):
    lines = trace.render(trace.read(recorded).steps, 50).splitlines()
    assert lines[:3] == [
        "    step |0   1  2  3  4  5  6  7   8   9   10 11",
        "  lane 0 |A16 A6 a  a  a  a  a  B+2 b   b   b  b",
        "  lane 1 |                      C14 C15 C1  c  c",
    ]
    assert "12 of 27 steps are shown: -o timeline.html" in " ".join(lines)


def test_text_is_ascii_and_fits(recorded):
    steps = trace.read(recorded).steps
    for num_repeats in (1, 10):
        for width in (8, 20, 60, 200):
            text = trace.render(steps * num_repeats, width)
            assert text.isascii()
            assert max(map(len, text.splitlines())) <= max(width, len("  lane 0 |"))
            assert text.count("lane 3") == 1


# --- The command


def test_command_ends_quietly_if_its_reader_stops(recorded):
    command = [sys.executable, "-m", "nanovllm.trace", str(recorded)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # as `| head` does
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_files_that_are_no_trace_are_rejected(recorded, path, capsys):
    foreign = '[{"ph": "X", "name": "foreign", "ts": 0, "dur": 1, "tid": 1}]'
    truncated = recorded.read_text()[:3000]
    for content in ("", "{}", "[]", "[1]", "[" * 10**5, foreign, truncated):
        path.write_text(content)
        assert str(path) in reject(capsys, trace_main, [str(path)])


def test_invalid_paths_are_rejected(recorded, capsys):
    path = str(recorded)
    for arguments, complaint in (
        ([f"{path}/nothing"], "nothing"),
        ([path, "-o", f"{path}/page.html"], "page.html"),
        ([path, path], "only a page"),
    ):
        assert complaint in reject(capsys, trace_main, arguments)
