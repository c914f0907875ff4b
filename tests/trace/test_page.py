"""The page of `python -m nanovllm.trace trace.json -o timeline.html` shows the engine's state.

Most tests run the page in a headless browser. They are skipped if there is none.
"""

import re
from contextlib import suppress
from itertools import count

import pytest
import torch
from browser import FIND_WIDE, needs_browser, run_script
from conftest import greedy, make_drafts_free, random_prompt
from families import make_family
from project_helpers import SMALL

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.engine.scheduler import Scheduler
from nanovllm.features.windows import Windows
from nanovllm.trace import save_page
from nanovllm.trace.__main__ import main as trace_main
from nanovllm.trace.tour import NUM_OUTPUT_TOKENS, PROMPTS, show_scheduling


def describe(scheduler, step):
    """The state of the engine while it computes a step, in the form of DUMP."""
    manager = scheduler.block_manager
    running = scheduler.running
    attributes = {}  # of all features
    for each in scheduler.features:
        attributes |= vars(each)
    drafts = attributes.get("drafts", {})
    slots = attributes.get("slots", {})
    free = list(manager.free_block_ids)
    cached = {block.block_id: block.hash for block in manager.blocks if block.hash != -1}
    num_used = manager.num_blocks - len(free)
    num_reusable = len(cached.keys() & free)
    return {
        "waiting": [seq.seq_id for seq in scheduler.waiting][:10],
        "running": [seq.seq_id for seq in running],
        "tables": [list(seq.block_table) for seq in running],
        "computed": [seq.num_computed_tokens for seq in running],
        "tokens": [
            seq.token_ids[: len(seq.token_ids) - len(drafts.get(seq, []))] for seq in running
        ],
        "scheduled": [[seq.seq_id, num_tokens] for seq, num_tokens, _ in step],
        "refs": [block.ref_count for block in manager.blocks],
        "cached": {str(block_id): f"{hash_:032x}" for block_id, hash_ in cached.items()},
        "free": free[:40],
        "used": num_used,
        "reusable": num_reusable,
        "held": [slots[seq].read for seq in running] if slots else [0] * len(running),
        "snapshots": [
            [slot, f"{hash_:032x}"] for hash_, slot in attributes.get("snapshots", {}).items()
        ],
        "windows": describe_windows(scheduler),
        "counts": [24, 4, num_used, num_reusable, len(free) - num_reusable],
    }


def describe_windows(scheduler):
    """For each running sequence, its first logical block in the second pool, and all of them."""
    windows = next((each for each in scheduler.features if type(each) is Windows), None)
    described = []
    for seq in scheduler.running if windows else []:
        window = windows.held[seq]
        blocks = windows.tables[seq.lane, window.start : window.end].tolist()
        described.append([window.start, blocks])
    return described


DUMP = r"""
    const PARTS = ["timelines", "words", "budget", "queues", "count", "sequence"];
    const text = (id) => $(id).textContent.replace(/\s+/g, " ");
    const listWindows = () =>
        currentSettings().window ? now.running.map((id) => now.seqs.get(id)) : [];
    const dump = () => ({
        waiting: now.waiting.map(([id]) => id),
        running: now.running,
        tables: now.running.map((id) => now.seqs.get(id).table),
        computed: now.running.map((id) => now.seqs.get(id).computed),
        tokens: now.running.map((id) => currentRun().tokens[id].slice(0, now.seqs.get(id).size)),
        scheduled: now.work.map((seq) => [seq.id, countTokens(seq)]),
        refs: now.users.map((users) => users.length),
        cached: Object.fromEntries([...now.cached].map((id) => [id, now.blocks[id].hash])),
        free: now.free,
        held: now.running.map((id) => now.seqs.get(id).held ?? 0),
        snapshots: now.snapshots,
        windows: listWindows().map((seq) => [seq.window_start, seq.window_blocks]),
        ...currentRun().pool[view.step],
        counts: text("count").match(/\d+/g).map(Number),
    });
    const states = [];
    const words = [];
    const pages = [];
    const drafts = [];
    for (let step = 0; step <= lastStep(); step++) {
        go({ step });
        states.push(dump());
        words.push(text("words"));
        pages.push(PARTS.map(text).join(" "));
        drafts.push(...document.querySelectorAll('[title*="draft"]'));
    }
    for (let step = lastStep(); step >= 0; step--) {
        go({ step });
        const isEqual = JSON.stringify(dump()) === JSON.stringify(states[step]);
        if (!isEqual) return `step ${step} differs when it is reached backwards`;
    }
    const ends = {};
    for (const { lane, step, end } of runs[0].stretches) {
        if (step < (ends[lane] ?? 0)) return `stretches of lane ${lane} overlap at ${step}`;
        ends[lane] = end;
    }
    const looks = drafts.map((cell) => `${cell.title.split(" ").pop()} ${cell.className}`);
    return [states, words.join(" "), looks.join(), pages];
"""


def serve_busily(llm):
    """Serve prefix hits, duplicates, chunks, preemptions, aborts, NaN logits and an interrupt."""
    for seed, length in ((1, 22), (1, 16), (2, 30), (3, 9), (1, 22)) * 2:
        llm.add_request(random_prompt(seed, length), greedy(14))
    last = llm.add_request(random_prompt(9, 12), greedy(30))
    sample = llm.model_runner.sample
    calls = count()

    def disturbed_sample(logits, step):
        number = next(calls)
        if number == 30:
            raise KeyboardInterrupt
        if number in (12, 14):
            logits = logits.clone()
            logits[-1] = torch.nan
        return sample(logits, step)

    llm.model_runner.sample = disturbed_sample
    for number in count():
        if llm.is_finished():
            break
        if number == 45:
            llm.abort(llm.scheduler.running[-1].seq_id)
            llm.abort(last)
        with suppress(KeyboardInterrupt):
            llm.step()
    assert llm.stats["num_preemptions"]


class Proposer:
    """Proposes one correct token, none or no draft at all, depending on the position in a block."""

    def __init__(self, token_ids, answer):
        self.token_ids = token_ids
        self.answer = answer

    def propose(self, num_tokens):
        length = len(self.token_ids)
        correct = self.answer[length : length + 1]
        return [[*correct, 96, 95], [*correct, 96, 95], [96, 95, 94], []][length % 4]


def serve_drafts(llm):
    prompt = random_prompt(2, 13)
    answer = prompt + llm.generate(prompt, greedy(20))[0]["token_ids"]
    drafts = make_drafts_free(llm)
    drafts.proposer.make_lookup = lambda token_ids: Proposer(token_ids, answer)
    llm.generate(prompt, greedy(20))


def serve_drafts_between_prompts(llm):
    """Sequences with rejected drafts wait, because new prompts go first."""
    make_drafts_free(llm).proposer.make_lookup = lambda token_ids: Proposer(token_ids, [])
    llm.add_request(random_prompt(2, 13), greedy(30))
    for number in count():
        if llm.is_finished():
            break
        if number % 2:
            llm.add_request(random_prompt(number, 5), greedy(1))
        llm.step()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """The path of a model with recurrent states."""
    path = tmp_path_factory.mktemp("hybrid")
    make_family(path, "qwen3.5-moe")
    return str(path)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    """The path of a model with windows of 9 tokens."""
    path = tmp_path_factory.mktemp("gemma3")
    make_family(path, "gemma3", sliding_window=9)
    return str(path)


WITH_STATES = {"model": "hybrid", "load_format": "dummy", "dtype": "float32"}
WITH_WINDOWS = {"model": "gemma3"}
plan = Scheduler.plan
odd_calls = count()


def plan_oddly(self, step):
    """Preempt the oldest sequence, admit the shortest, and evict in reverse order."""
    if next(odd_calls) % 5 == 4 and len(self.running) > 1:
        self.preempt(self.running[0])
    for seq in sorted(self.waiting, key=lambda seq: len(seq.token_ids)):
        self.waiting.move_to_end(seq)
    free = self.block_manager.free_block_ids
    for block_id in list(free):
        free.move_to_end(block_id, last=False)
    plan(self, step)


@needs_browser
@pytest.mark.filterwarnings("ignore:request .* ends with an error")
@pytest.mark.parametrize(
    "serve, options, policy, narrative",
    [
        (serve_busily, {}, plan, "NaN.*NaN.*reset.*abort"),
        (
            serve_busily,
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}
            | {"enable_prefix_caching": False},
            plan,
            "",
        ),
        (serve_busily, {}, plan_oddly, "oldest.*preempted"),
        (
            serve_busily,
            {"kv_offloading_size": 1.0},
            plan,
            "K/V of . that the pool has evicted come back to block",
        ),
        (serve_busily, WITH_STATES, plan, "K/V of the first 12 tokens of B, but not the state"),
        (
            serve_drafts,
            {**WITH_STATES, "num_speculative_tokens": 3},
            plan,
            "a snapshot is kept here.*from the state before the last draft",
        ),
        (
            serve_busily,
            WITH_WINDOWS,
            plan,
            "windows of A and B have moved, so they have released blocks 2 and 1 of the second.*"
            "blocks 0 to 2, and blocks 1 and 2 of the second pool, for its first 12 tokens",
        ),
        (serve_busily, WITH_WINDOWS, plan_oddly, "oldest.*preempted.*second pool"),
        (
            serve_drafts,
            {**WITH_WINDOWS, "num_speculative_tokens": 3, "max_num_batched_tokens": 5},
            plan,
            "3 draft.*window of B has moved",
        ),
        (
            serve_drafts_between_prompts,
            {**WITH_WINDOWS, "num_speculative_tokens": 3, "max_num_batched_tokens": 64}
            | {"policy": "prefill_first"},
            plan,
            "all are rejected.*A is not scheduled",
        ),
    ],
)
def test_it_shows_the_state_of_the_engine(
    tiny, hybrid, gemma3, tmp_path, monkeypatch, serve, options, policy, narrative
):
    """In every step, forwards and backwards, also under policies that the page does not know."""
    monkeypatch.setattr(Scheduler, "plan", policy)
    path, page = tmp_path / "trace.json", tmp_path / "timeline.html"
    states = []
    models = {"tiny": tiny[0], "hybrid": hybrid, "gemma3": gemma3}
    model = models[options.get("model", "tiny")]
    with LLM(trace=path, **{**SMALL, **options, "model": model}) as llm:
        read = llm.model_runner.read

        def keep_state(sampled):
            states.append(describe(llm.scheduler, sampled.step))
            return read(sampled)

        llm.model_runner.read = keep_state
        serve(llm)
        stats = llm.stats
    trace_main([str(path), "-o", str(page)])
    page.write_text(page.read_text().replace("STRIDE = 400;", "STRIDE = 20;"))
    shown, words, looks, pages = run_script(page, DUMP)
    for step, (seen, expected) in enumerate(zip(shown, states, strict=True)):
        assert seen == expected, f"step {step}"
    assert re.search(narrative, words)
    num_accepted = stats["num_accepted_tokens"]
    assert looks.count("accepted cell written sampled") == num_accepted
    assert looks.count("rejected cell written") == stats["num_draft_tokens"] - num_accepted
    for shown in pages:
        check_numbers(shown)


def check_numbers(text):
    """Nouns agree with their numbers, and no sequence computes more tokens than it has."""
    assert not re.search(r"\b1 (draft )?(token|step|block|slot|lane)s\b", text)
    for end, size in re.findall(r"→ (\d+) of (\d+) tokens? computed", text):
        assert int(end) <= int(size)


# --- The requests of example.py


@pytest.fixture(scope="module")
def example_page(tmp_path_factory):
    page = tmp_path_factory.mktemp("page") / "timeline.html"
    save_page(show_scheduling(DEMO_MODEL), str(page))
    return page


def test_the_demo_model_continues_the_texts_of_the_tour():
    """They are the first output of the model that many readers see."""
    with LLM(DEMO_MODEL, dtype="float32") as llm:
        outputs = llm.generate(list(PROMPTS.values()), greedy(NUM_OUTPUT_TOKENS))
    assert [output["text"] for output in outputs] == [
        " continuous batching, a paged KV cache and prefix caching. I can add",
        " ship inside nanovllm to show how its engine works: continuous batching, a",
        ", 11, 12, 13, 14, 1",
        " 2, 3, 5, 7, 11, 13",
    ]


def test_it_is_self_contained(example_page):
    pattern = r"https?:|src=|@import|url\(|<link|import\(|fetch\("
    assert not re.search(pattern, example_page.read_text())


@needs_browser
def test_the_narrative_of_the_example(example_page):
    narratives = {
        (0, 3): "B .*hit on blocks 0 to 2.*block 7, a duplicate of block 3.*"
        "C is admitted.* 27 of its 30 tokens.*budget.*D waits.*budget",
        (0, 4): "D is admitted.* all 9 tokens.*C .*last chunk.*3 tokens.*A and B decode",
        (0, 11): "A needs a block.*D, the newest .*preempted.* 23, 19, 18 and 17.*3 of these 4.*"
        "Block 23 goes to A. Block 19 of D goes to C. It is evicted.*"
        "D waits.*16 tokens need 4 blocks.* 2 are free",
        (0, 13): r'A, B and C decode: .*A finishes \("length"\)',
        (0, 14): "D is readmitted.*hit.*block 17.* 4 tokens.*recomputes the other 12",
        (1, 4): "A and B are not scheduled.*D waits.* 2 tokens",
        (1, 17): "D is readmitted.*recomputes all 16 tokens",
    }
    texts = run_script(
        example_page,
        r"""
        return runs.map(({ steps }, run) => steps.map((_, step) => {
            go({ run, step });
            return ["words", "budget"].map((id) => $(id).textContent.replace(/\s+/g, " "));
        }));
        """,
    )
    for (run, step), pattern in narratives.items():
        assert re.search(pattern, texts[run][step][0])
    assert "1 + 4 + 27 = 32 of 32" in texts[0][3][1]


@needs_browser
def test_it_can_be_walked_through(example_page):
    """The slider, keys and clicks work. Pointing explains a block or a token."""
    seen = run_script(
        example_page,
        r"""
        const all = (selector) => [...document.querySelectorAll(selector)];
        const text = (id) => $(id).textContent.replace(/\s+/g, " ").trim();
        const send = (target, type, options) => {
            const kind = type === "keydown" ? KeyboardEvent : MouseEvent;
            target.dispatchEvent(new kind(type, { bubbles: true, ...options }));
        };
        const press = (key) => send(document.body, "keydown", { key });
        const over = (selector) => send(all(selector)[0], "mouseover");
        const seen = {};
        $("slider").value = 3;
        $("slider").dispatchEvent(new Event("input"));
        seen.slider = [text("place"), location.hash];
        over('[data-block="7"]');
        seen.block = [text("about"), all("#blocks .near").length, $("links").children.length];
        over('[data-position="13"]');
        seen.slot = [text("slot"), all("#blocks .read").length, all("#blocks .own")[0].textContent];
        all('[data-seq="2"]')[0].click();
        seen.selected = text("sequence");
        press("Escape");
        press("ArrowRight");
        $("next").click();
        $("next").click();
        $("back").click();
        press("p");
        seen.moved = [view.step, view.run];
        press("End");
        press(" ");
        seen.end = [view.step, timer];
        send(all("svg")[0], "click", { clientX: 1 + all(".timeline")[0].offsetLeft });
        seen.timeline = [view.run, view.step];
        return seen;
        """,
    )
    assert seen["slider"] == ["3 / 20", "#run=0&step=3"]
    about, num_marked, num_arrow_parts = seen["block"]
    assert re.search("^Block 7 .*slots 28 to 31.*B as logical block 3.*duplicate of block 3", about)
    assert num_marked == 5  # block 7, its prefix of three blocks, and block 3
    assert num_arrow_parts == 8  # a line and a head of each arrow
    slot, num_read, own = seen["slot"]
    assert "block_table[3] = 7" in slot
    assert "slot = 7 * 4 + 1 = 29" in slot
    assert num_read == 14
    assert own.strip() == "parameters"
    assert re.search("C .*running.* 27 this step.* 3 not computed", seen["selected"])
    assert seen["moved"] == [5, 1]
    assert seen["end"] == [23, None]
    assert seen["timeline"] == [0, 0]


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(example_page, tmp_path, scheme):
    """Titles have contrast, cut tokens show that they are cut, and no line begins with a comma."""
    page = tmp_path / "page.html"
    text = example_page.read_text()
    is_dark = "(prefers-color-scheme: dark)"
    assert is_dark in text
    page.write_text(text.replace(is_dark, "all" if scheme == "dark" else "not all"))
    contrasts, cells, numbers, wide = run_script(
        page,
        r"""
        const all = (selector) => [...document.querySelectorAll(selector)];
        go({ step: 11 });
        const seen = (element) => getComputedStyle(element);
        const parse = (color) => color.match(/[\d.]+/g).slice(0, 3).map((n) => n / 255);
        const paper = parse(seen(document.body).backgroundColor);
        const luminance = (rgb) => {
            const [r, g, b] = rgb.map((c) => (c > 0.04 ? ((c + 0.055) / 1.055) ** 2.4 : c / 12.92));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const contrast = (element) => {
            let opacity = 1;
            for (let e = element; e; e = e.parentElement) opacity *= seen(e).opacity;
            const ink = parse(seen(element).color);
            const mixed = ink.map((c, i) => opacity * c + (1 - opacity) * paper[i]);
            const [low, high] = [mixed, paper].map(luminance).sort((a, b) => a - b);
            return (high + 0.05) / (low + 0.05);
        };
        const contrasts = all("h2, h2 *:not(.chip)").map(contrast);
        const cut = all(".cell").filter((cell) => cell.scrollWidth > cell.clientWidth);
        const cells = cut.map((cell) => {
            return [seen(cell).textOverflow, cell.textContent, cell.title.split(", position")[0]];
        });
        const numbers = { chips: 0, breaks: 0 };
        for (let width = 150; width < 600; width++) {
            $("words").style.width = `${width}px`;
            for (const chip of all("#words .chip")) {
                const range = document.createRange();
                const { nextSibling: next } = chip;
                if (!/^[,.]/.test(next.data)) continue;
                range.setStart(next, 0);
                range.setEnd(next, 1);
                const { top } = range.getBoundingClientRect();
                numbers.chips += 1;
                if (top > chip.getBoundingClientRect().bottom) numbers.breaks += 1;
            }
        }
        $("words").style.width = "";
        FIND_WIDE
        return [contrasts, cells, numbers, findWide()];
        """.replace("FIND_WIDE", FIND_WIDE),
        "--window-size=500,900",
    )
    assert len(contrasts) > 8 and min(contrasts) >= 4.5
    assert ["ellipsis", " language", " language"] in cells
    assert {overflow for overflow, *_ in cells} == {"ellipsis"}
    assert all(text == title for _, text, title in cells)
    assert numbers["chips"] > 1000 and numbers["breaks"] == 0
    assert wide == []


# --- Recurrent states and structured outputs


@needs_browser
def test_the_choice_of_a_grammar(tmp_path):
    path, page = tmp_path / "trace.json", tmp_path / "timeline.html"
    with LLM(DEMO_MODEL, trace=path, **SMALL) as llm:
        params = SamplingParams(temperature=0.0, structured_outputs={"regex": "[0-9]{9}"})
        llm.generate("What is 12 + 30?", params)
    trace_main([str(path), "-o", str(page)])
    prefers, allows, words = run_script(
        page,
        """
        go({ step: 1 });
        const read = (list) => [...list.children].map((token) => [
            token.textContent, token.className.replace("mini", "").trim(),
        ]);
        const [prefers, allows] = document.querySelectorAll(".choice");
        return [read(prefers), read(allows), $("words").textContent];
        """,
    )
    assert re.search("does not allow the token “.+”, which\\s+the model prefers", words)
    assert "It allows 10 other tokens." in words
    assert sorted(text for text, _ in allows) == list("0123456789")
    assert [kind for _, kind in allows] == ["sampled"] + [""] * 9
    assert len(prefers) == 12
    for text, kind in prefers:
        assert (kind == "rejected") == (text not in "0123456789")
