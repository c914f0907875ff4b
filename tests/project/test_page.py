"""The page of `python -m nanovllm.trace trace.json -o timeline.html`, tested in a headless browser.

Skipped without chromium. The page must show the state that the engine had in every step.
"""

import json
import re
import struct
import zlib
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import browse, needs_browser, run_script
from conftest import greedy, random_prompt

from nanovllm import LLM, trace
from nanovllm.engine.scheduler import Scheduler
from nanovllm.trace import recorder
from nanovllm.trace.__main__ import main as trace_main

TEMPLATE = Path(trace.__file__).with_name("page.html")
State = dict[str, Any]


def count_blocks(manager):
    """Used and reusable blocks, and the text that the page shows for them."""
    free = manager.free_block_ids
    reusable = sum(manager.blocks[block_id].hash != -1 for block_id in free)
    used = manager.num_blocks - len(free)
    empty = len(free) - reusable
    counts = f"{used} used, {reusable} reusable, {empty} empty"
    return [used, reusable, f"{manager.num_blocks} blocks of {manager.block_size} slots: {counts}"]


@pytest.fixture
def record(tiny, tmp_path, monkeypatch):
    """Serve a load. Return the page of its trace, and the engine's state in each step."""
    states: list[State] = []
    postprocess = recorder._TracedScheduler.postprocess

    def keep_state(self, seqs, samples):
        manager = self.block_manager
        state = {
            "waiting": [seq.seq_id for seq in self.waiting][:10],
            "running": [seq.seq_id for seq in self.running],
            "tables": [seq.block_table[:] for seq in self.running],
            "computed": [seq.num_computed_tokens for seq in self.running],
            "tokens": [seq.token_ids[:] for seq in self.running],
            "scheduled": [[seq.seq_id, seq.num_scheduled_tokens] for seq in seqs],
            "refs": [block.ref_count for block in manager.blocks],
            "listed": {
                str(block.block_id): f"{block.hash:032x}"
                for block in manager.blocks
                if block.hash != -1
            },
            "free": list(manager.free_block_ids)[:40],
            "counts": count_blocks(manager),
        }
        postprocess(self, seqs, samples)
        states.append(state)

    monkeypatch.setattr(recorder._TracedScheduler, "postprocess", keep_state)

    def serve(load, **options):
        path = tmp_path / "trace.json"
        settings = {
            "kvcache_block_size": 4,
            "num_kvcache_blocks": 24,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
            **options,
        }
        states.clear()
        with LLM(tiny[0], trace=path, **settings) as llm:
            load(llm)
        trace_main([str(path), "-o", str(tmp_path / "timeline.html")])
        return tmp_path / "timeline.html", list(states)

    return serve


def busy(llm):
    """Serve requests with prefix hits, duplicates, chunks, preemptions, aborts and NaN logits.

    One step is interrupted.
    """
    for seed, length in ((1, 22), (1, 16), (2, 30), (3, 9), (1, 22)) * 2:
        llm.add_request(random_prompt(seed, length), greedy(14))
    last = llm.add_request(random_prompt(9, 12), greedy(30))
    sample = llm.model_runner.sample
    num_steps = 0

    def disturbed_sample(logits, seqs):
        if num_steps == 30:
            raise KeyboardInterrupt
        if num_steps in (12, 14):
            logits = torch.cat((logits[:-1], torch.full_like(logits[-1:], torch.nan)))
        return sample(logits, seqs)

    llm.model_runner.sample = disturbed_sample
    while not llm.is_finished():
        try:
            llm.step()
        except KeyboardInterrupt:
            assert num_steps == 30
        num_steps += 1
        if num_steps == 45:
            for seq in llm.scheduler.running[-1:]:
                llm.abort(seq.seq_id)
            llm.abort(last)
    assert llm.stats["num_preemptions"]


DUMP = """
    const states = [];
    const dump = () => ({
        waiting: now.waiting.map(([id]) => id),
        running: now.running,
        free: now.free,
        refs: now.users.map((users) => users.length),
        tables: now.running.map((id) => now.seqs.get(id).table),
        computed: now.running.map((id) => now.seqs.get(id).computed),
        tokens: now.running.map((id) => currentRun().tokens[id].slice(0, now.seqs.get(id).size)),
        scheduled: now.work.map(({ id, num_tokens }) => [id, num_tokens]),
        counts: [
            currentRun().pool[view.step].used,
            currentRun().pool[view.step].reusable,
            $("count").textContent,
        ],
        listed: Object.fromEntries([...now.listed].map((id) => [id, now.blocks[id].hash])),
    });
    for (let step = 0; step <= lastStep(); step++) {
        go({ step });
        states.push(dump());
    }
    for (let step = lastStep(); step >= 0; step--) {
        go({ step });
        const isEqual = JSON.stringify(dump()) === JSON.stringify(states[step]);
        if (!isEqual) return `step ${step} differs when it is reached backwards`;
    }
    return states;
"""

# The texts of the elements `ids`, for each timeline and step.
TEXTS = r"""
    const text = (id) => $(id).textContent.replace(/\s+/g, " ");
    const textsOf = (ids) => runs.map(({ steps }, run) => steps.map((_, step) => {
        go({ run, step });
        return ids.map(text);
    }));
"""


def read_narrative(page):
    """The sentences of all steps of the first timeline."""
    steps = run_script(page, f'{TEXTS} return textsOf(["words"])[0];')
    return " ".join(words for (words,) in steps)


@needs_browser
@pytest.mark.filterwarnings("ignore:request .* ends with an error")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        {"enable_prefix_caching": False},
    ],
)
def test_it_shows_the_state_of_the_engine(record, options):
    """Queues, block tables, reference counts, listed blocks and eviction order match.

    They match in every step, forwards and backwards.
    """
    page, states = record(busy, **options)
    template = page.read_text()
    page.write_text(template.replace("STRIDE = 400;", "STRIDE = 20;"))
    assert page.read_text() != template
    shown = run_script(page, DUMP)
    assert len(shown) == len(states) > 40, shown
    for step, (seen, expected) in enumerate(zip(shown, states)):
        assert seen == expected, f"step {step}"


@needs_browser
@pytest.mark.filterwarnings("ignore:request .* ends with an error")
def test_errors_resets_and_aborts_are_narrated(record):
    page, _ = record(busy)
    narrative = read_narrative(page)
    error = r'The logits of (\w) are NaN\. \1 finishes with "error", and its blocks are removed'
    assert len(re.findall(error, narrative)) == 2
    assert "The previous call was interrupted, so the engine was reset." in narrative
    assert re.search(r"\w was aborted before this step\.", narrative)


def preempt_the_oldest(scheduler, num_steps):
    if num_steps % 5 == 4 and len(scheduler.running) > 1:
        scheduler.preempt(scheduler.running[0])


def admit_the_shortest(scheduler, num_steps):
    for seq in sorted(scheduler.waiting, key=lambda seq: len(seq.token_ids)):
        scheduler.waiting.move_to_end(seq)


def evict_in_reverse_order(scheduler, num_steps):
    for block_id in list(scheduler.block_manager.free_block_ids):
        scheduler.block_manager.free_block_ids.move_to_end(block_id, last=False)


@needs_browser
@pytest.mark.filterwarnings("ignore:request .* ends with an error")
@pytest.mark.parametrize("change", [preempt_the_oldest, admit_the_shortest, evict_in_reverse_order])
def test_unknown_policies_are_shown(record, change, monkeypatch):
    schedule = Scheduler.schedule
    num_steps = count()

    def changed_schedule(self):
        change(self, next(num_steps))
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", changed_schedule)
    page, states = record(busy)
    shown = run_script(page, DUMP)
    assert shown == states
    if change is preempt_the_oldest:
        assert "the oldest sequence, is preempted" in read_narrative(page)


# --- The requests of example.py


@pytest.fixture(scope="module")
def example_page(tmp_path_factory):
    from example import show_scheduling

    directory = tmp_path_factory.mktemp("page")
    page = directory / "timeline.html"
    traces = [directory / "mixed.json", directory / "prefill_first.json"]
    for path, enable_chunked_prefill in zip(traces, (True, False)):
        show_scheduling(path, enable_chunked_prefill)
    trace_main([*map(str, traces), "-o", str(page)])
    return page


SENTENCES = {
    (0, 3): [
        "B is admitted with a prefix hit on blocks 0 to 2. Block 3 matches too, but the last token"
        " must be computed because its logits are needed. B therefore recomputes this block as"
        " block 7, a duplicate of block 3.",
        "C is admitted. This step computes a chunk of 27 of its 30 tokens, because the token budget"
        " is used up.",
        "D waits, because the token budget is used up.",
    ],
    (0, 4): [
        "D is admitted. This step computes all 9 tokens of its prompt.",
        "C computes the last chunk of its prompt (3 tokens) and samples its first token.",
        "A and B decode: each computes the K/V of its newest token",
    ],
    (0, 11): [
        "A needs a block, but no block is free. D, the newest sequence, is preempted and frees"
        " blocks 23, 19, 18 and 17, the tail first. 3 of these 4 blocks stay in the prefix cache.",
        "Block 19 is allocated to C and evicted from the prefix cache. The K/V that D computed"
        " there can no longer be reused.",
        "D waits: its 16 tokens need 4 blocks, but only 2 are free.",
    ],
    (0, 13): [
        'A finishes ("length"). Its full blocks stay in the prefix cache until they are evicted.',
    ],
    (0, 14): [
        "D is readmitted with a prefix hit: it reuses block 17 for its first 4 tokens. This step"
        " recomputes the other 12.",
    ],
    (1, 4): [
        "A and B are not scheduled: with prefill first, a step with prompts has no decodes.",
        "D waits: prefill first does not split prompts, and only 2 tokens of the budget are left.",
    ],
    (1, 17): ["D is readmitted. This step recomputes all 16 tokens, prompt and generated."],
}


@needs_browser
def test_the_narrative_of_the_example(example_page):
    texts = run_script(example_page, f'{TEXTS} return textsOf(["words", "budget", "count"]);')
    for (number, step), sentences in SENTENCES.items():
        narrative = texts[number][step][0]
        for sentence in sentences:
            assert sentence in narrative
    _, budget, count = texts[0][3]
    assert budget.strip().startswith("1 + 4 + 27 = 32 of 32 tokens (max_num_batched_tokens")
    assert count == "24 blocks of 4 slots: 16 used, 0 reusable, 8 empty"


@needs_browser
def test_it_can_be_walked_through(example_page):
    """The slider, keys and clicks work. Pointing explains a block or a token."""
    seen = run_script(
        example_page,
        r"""
        const seen = {};
        const $$ = (selector) => document.querySelectorAll(selector);
        const text = (id) => $(id).textContent.replace(/\s+/g, " ").trim();
        const send = (target, type, options) => {
            const kind = type === "keydown" ? KeyboardEvent : MouseEvent;
            target.dispatchEvent(new kind(type, { bubbles: true, ...options }));
        };
        const press = (key) => send(document.body, "keydown", { key });
        const over = (selector) => send($$(selector)[0], "mouseover");
        seen.keys = text("keys");
        $("slider").value = 3;
        $("slider").dispatchEvent(new Event("input"));
        seen.slider = [view.step, text("place"), location.hash];
        over('[data-block="7"]');
        seen.block = [text("about"), $$("#blocks .near").length, $("links").children.length];
        over('[data-position="13"]');
        seen.slot = [text("slot"), $$("#blocks .read").length, $$("#blocks .own")[0].textContent];
        $$('[data-seq="2"]')[0].click();
        seen.selected = text("sequence");
        press("Escape");
        press("ArrowRight");
        press("ArrowRight");
        press("p");
        seen.moved = [view.step, view.run];
        press("End");
        press(" ");
        seen.end = [view.step, timer];
        send($$("svg")[0], "click", { clientX: 1 + $$(".timeline")[0].offsetLeft });
        seen.timeline = [view.run, view.step];
        return seen;
        """,
    )
    assert "P switch timeline" in seen["keys"]
    assert seen["slider"] == [3, "3 / 20", "#run=0&step=3"]
    about, num_marked, num_arrow_parts = seen["block"]
    assert about.startswith("Block 7 (slots 28 to 31) is used by B as logical block 3.")
    assert about.endswith("It is a duplicate of block 3 and is not listed.")
    assert num_marked == 5  # block 7, its prefix of three blocks, and block 3
    assert num_arrow_parts == 8  # a line and a head of each arrow
    slot, num_read, own = seen["slot"]
    assert "logical block 13 // 4 = 3, block_table[3] = 7" in slot
    assert "slot = 7 * 4 + 1 = 29" in slot
    assert "attends to positions 0 to 13, in 4 blocks" in slot
    assert num_read == 14
    assert own == "What"
    assert seen["selected"].startswith("Sequence C · running")
    assert "0 reused + 0 computed + 27 this step + 3 not computed" in seen["selected"]
    assert seen["moved"] == [5, 1]
    assert seen["end"] == [23, None]
    assert seen["timeline"] == [0, 0]


def read_png(path):
    """The rows of a picture."""
    content = path.read_bytes()
    _, height = struct.unpack(">II", content[16:24])
    position = 8
    data = b""
    while position < len(content):
        length, kind = struct.unpack(">I4s", content[position : position + 8])
        if kind == b"IDAT":
            data += content[position + 8 : position + 8 + length]
        position += length + 12
    raw = zlib.decompress(data)
    stride = len(raw) // height
    return [raw[y * stride : (y + 1) * stride] for y in range(height)]


@needs_browser
@pytest.mark.parametrize("options", [[], ["--blink-settings=preferredColorScheme=0"]])
def test_a_screenshot(example_page, tmp_path, options):
    picture = tmp_path / "page.png"
    browse(
        example_page,
        "--window-size=1400,940",
        f"--screenshot={picture}",
        *options,
        fragment="#step=3&block=7",
    )
    rows = read_png(picture)
    assert len(rows) == 940 and len(set(rows)) > 400


# --- Traces that are written by hand

Event = dict[str, Any]


def make_event(phase, lane, name, args):
    return {"ph": phase, "tid": lane + 1, "name": name, "args": args}


def make_step(step, kind, **results):
    """The event of a step of one sequence."""
    counts = {f"num_{name}_tokens": 0 for name in ("prefill", "decode", "draft", "accepted")}
    times = {f"{phase}_ms": 1.0 for phase in ("schedule", "prepare", "forward", "sample")}
    args = {"step": step, "kind": kind, "num_tokens": 4, **counts, **times}
    queues = {"running_requests": [0], "waiting_requests": [], "next_free_blocks": [3]}
    return make_event("X", -1, "step", {**args, **queues, "accepted": [], "ended": [], **results})


def make_page(directory, events):
    """Write a trace of one lane and four blocks of 4 tokens, and make its page."""
    settings = {
        "num_blocks": 4,
        "block_size": 4,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 8,
        "enable_chunked_prefill": True,
    }
    path = directory / "trace.json"
    path.write_text(json.dumps([make_event("M", -1, "process_name", settings), *events]))
    trace_main([str(path), "-o", str(directory / "timeline.html")])
    return directory / "timeline.html"


@needs_browser
def test_drafts(tmp_path):
    """One of three draft tokens is accepted, so the step yields two tokens.

    The block of the third draft token leaves the block table.
    """
    works: list[tuple[str, Event, Event]] = [  # kind, plan and results of each step
        (
            "prefill",
            {
                "num_tokens": 5,
                "num_prompt_tokens": 5,
                "token_ids": [7, 8, 9, 7, 8],
                "blocks": [0, 1],
            },
            {"drawn_token_ids": [9]},
        ),
        (
            "decode",
            {"num_tokens": 1, "blocks": [1, 2], "draft_token_ids": [7, 6, 5]},
            {
                "drawn_token_ids": [7, 4, 0, 0],
                "accepted": [[0, {"num_accepted_tokens": 1}]],
                "num_draft_tokens": 3,
                "num_accepted_tokens": 1,
            },
        ),
        (
            "decode",
            {"num_tokens": 1},
            {"drawn_token_ids": [3], "ended": [[0, {"finish_reason": "length"}]]},
        ),
    ]
    counters = {"waiting": 0, "running": 1, "used": 2, "reusable": 0, "empty": 2}
    events: list[Event] = []
    for step, (kind, plan, results) in enumerate(works):
        work = {"request_id": 0, "num_reused_tokens": 0, **plan}
        events.append(make_step(step, kind, **results))
        events.append(make_event("X", 0, f"{kind} 0", work))
        events.append(make_event("C", -1, "counters", counters))
    page = make_page(tmp_path, events)
    text = trace.render(trace.read(tmp_path / "trace.json"))
    assert "|A5 a+1 a" in text
    assert "1 of 3 draft tokens accepted" in text
    words, cells, table, counts, status = run_script(
        page,
        r"""
        go({ step: 1 });
        const words = $("words").textContent.replace(/\s+/g, " ");
        const cells = [...document.querySelectorAll("[data-position]")].slice(5);
        const looks = cells.map((cell) => [cell.className.trim(), cell.textContent, cell.title]);
        go({ step: 2 });
        const { table, computed, size } = now.seqs.get(0);
        return [words, looks, table, [computed, size], $("words").textContent];
        """,
    )
    assert "A decodes with 3 draft tokens: 1 is accepted. The step yields 2 tokens." in words
    assert cells == [
        ["cell written", "9", "position 5"],
        ["cell written sampled", "7", "position 6, draft token accepted"],
        ["cell written sampled", "4", "position 7, draft token 6 rejected"],
        ["cell written rejected", "5", "position 8, draft token 5 rejected"],
    ]
    assert table == [0, 1]
    assert counts == [7, 8]
    assert 'A finishes ("length").' in status


@needs_browser
def test_a_preemption_and_an_admission_share_a_column(tmp_path):
    """A lane shows both if they happen in one step."""
    counters = {"waiting": 0, "running": 1, "used": 1, "reusable": 0, "empty": 3}
    work = {"request_id": 0, "num_reused_tokens": 0, "num_prompt_tokens": 2, "blocks": [0]}
    events: list[Event] = []
    for step in range(2):
        num_tokens = 2 + step
        token_ids = [7, 8, 9][:num_tokens]
        events.append(make_step(step, "prefill", drawn_token_ids=[9]))
        if step == 1:
            events.append(make_event("i", 0, "preempted 0", {"request_id": 0, "blocks": [0]}))
        args = {**work, "num_tokens": num_tokens, "token_ids": token_ids}
        events.append(make_event("X", 0, "prefill 0", args))
        events.append(make_event("C", -1, "counters", counters))
    page = make_page(tmp_path, events)
    shown = run_script(
        page, "return runs[0].stretches.map(({ step, end, text }) => [step, end, String(text)]);"
    )
    assert shown == [[0, 1, "2"], [1, 1.5, "×A"], [1.5, 2, "3"]]


def test_it_is_self_contained(record, capsys):
    page, _ = record(lambda llm: llm.generate([random_prompt(1, 9)], greedy(3), use_tqdm=False))
    content = page.read_text()
    assert not re.search(r"https?:|src=|@import|url\(|<link|import\(|fetch\(", content)
    assert len(content) < len(TEMPLATE.read_text()) + 4000
    with pytest.raises(SystemExit):
        trace_main([str(page.with_name("trace.json"))] * 2)
    assert "only a page" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        trace_main(
            [
                str(page.with_name("trace.json")),
                "-o",
                str(page.with_name("nowhere") / "timeline.html"),
            ]
        )
    assert "No such file" in capsys.readouterr().err
