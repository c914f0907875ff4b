"""The page of `python -m nanovllm.trace trace.json -o timeline.html`, in a browser, where there is one: what it shows is what
the engine had, step for step."""

import json
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Oracle, greedy, random_prompt

from nanovllm import LLM, trace
from nanovllm.engine import timeline

TEMPLATE = Path(trace.__file__).with_name("page.html")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome is installed")

State = dict[str, Any]


def browse(page: Path, *options: str, fragment: str = "") -> subprocess.CompletedProcess[str]:
    """Open `page` headless. Nothing may be on its console."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", *options]
    done = subprocess.run([*command, page.as_uri() + fragment], capture_output=True, text=True, check=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done


def run_script(page: Path, script: str) -> Any:
    """What `script`, run in `page`, returns."""
    probe = page.with_suffix(".probe.html")
    probe.write_text(f"{page.read_text()}<script>document.body.textContent = JSON.stringify((() => {{{script}}})())</script>")
    done = browse(probe, "--dump-dom")
    found = re.search("<body>(.*?)</body>", done.stdout, flags=re.DOTALL)
    assert found, done.stdout[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", " ").replace("&amp;", "&"))


@pytest.fixture
def record(tiny: tuple[str, Oracle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, list[State]]]:
    """Serve a load; the page of its trace, and what the engine had when each step was planned."""
    states: list[State] = []
    postprocess = timeline._Scheduler.postprocess

    def keep_state(self: Any, seqs: list[Any], token_ids: list[int]) -> list[Any]:
        manager = self.block_manager
        state = {
            "waiting": [seq.seq_id for seq in self.waiting][:10],
            "running": [seq.seq_id for seq in self.running],
            "tables": [seq.block_table[:] for seq in self.running],
            "computed": [seq.num_computed_tokens for seq in self.running],
            "tokens": [seq.token_ids[:] for seq in self.running],
            "scheduled": [[seq.seq_id, seq.num_scheduled_tokens] for seq in seqs],
            "refs": [block.ref_count for block in manager.blocks],
            "found": {str(block.block_id): f"{block.hash:016x}" for block in manager.blocks if block.hash != -1},
            "free": list(manager.free_block_ids)[:40],
        }
        caught_up = postprocess(self, seqs, token_ids)
        states.append(state)
        return caught_up

    monkeypatch.setattr(timeline._Scheduler, "postprocess", keep_state)

    def serve(load: Callable[[LLM], None], **options: Any) -> tuple[Path, list[State]]:
        path = tmp_path / "trace.json"
        settings = {"kvcache_block_size": 4, "num_kvcache_blocks": 24, "max_num_batched_tokens": 16, "max_num_seqs": 4, **options}
        states.clear()
        with LLM(tiny[0], trace=path, **settings) as llm:
            load(llm)
        trace.main([str(path), "-o", str(tmp_path / "timeline.html")])
        return tmp_path / "timeline.html", list(states)

    return serve


def busy(llm: LLM) -> None:
    """Prefix hits, duplicates, pieces of prompts, preemptions, aborts, a step that is cut short, logits that are NaN."""
    for seed, length in ((1, 22), (1, 16), (2, 30), (3, 9), (1, 22)) * 2:
        llm.add_request(random_prompt(seed, length), greedy(14))
    last = llm.add_request(random_prompt(9, 12), greedy(30))
    assert llm.model_runner is not None
    sample, num_steps = llm.model_runner.sample, 0

    def disturbed_sample(logits: torch.Tensor, seqs: list[Any]) -> Any:
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
            llm.abort(llm.scheduler.running[-1].seq_id)
            llm.abort(last)
    assert llm.stats["num_preemptions"] and llm.stats["num_cached_tokens"]


DUMP = """
    const states = [], dump = () => ({
        waiting: now.waiting.map(([id]) => id), running: now.running, free: now.free, refs: now.holders.map((held) => held.length),
        tables: now.running.map((id) => now.seqs.get(id).table), computed: now.running.map((id) => now.seqs.get(id).computed),
        tokens: now.running.map((id) => run().tokens[id].slice(0, now.seqs.get(id).size)),
        scheduled: now.work.map(({ id, num_tokens }) => [id, num_tokens]),
        found: Object.fromEntries(now.blocks.flatMap(({ hash }, id) => isFound(now, id) ? [[id, hash]] : [])),
    });
    for (let step = 0; step <= last(); step++) { go({ step }); states.push(dump()); }
    for (let step = last(); step >= 0; step--) {  // and back
        go({ step });
        if (JSON.stringify(dump()) !== JSON.stringify(states[step])) return `step ${step} is another one from behind`;
    }
    return states;
"""


@needs_browser
@pytest.mark.filterwarnings("ignore:request .* ends with an error")
@pytest.mark.parametrize("options", [{}, {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, {"enable_prefix_caching": False}])
def test_it_shows_what_the_engine_had(record: Callable[..., tuple[Path, list[State]]], options: dict[str, Any]) -> None:
    """Queues, block tables, reference counts, what a hash finds, the order of eviction: at every step, forwards and backwards."""
    page, states = record(busy, **options)
    page.write_text(page.read_text().replace("STRIDE = 400", "STRIDE = 20"))
    shown = run_script(page, DUMP)
    assert len(shown) == len(states) > 50, shown
    for step, (seen, had) in enumerate(zip(shown, states)):
        assert seen == had, f"step {step}"
