"""A tour of the scheduler: four requests under each policy and with drafts, and what a model gets.

    python -m nanovllm.trace.tour              prints it, and writes timeline.html to step through

Any engine can be watched in this way: add a feature to it.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from nanovllm.batch.batch import Batch
from nanovllm.config import Config
from nanovllm.engine.feature import Feature
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import POLICIES
from nanovllm.engine.step import Step
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.sampling_params import SamplingParams
from nanovllm.trace.page import save_page
from nanovllm.trace.recorder import Recorder
from nanovllm.trace.step import Trace
from nanovllm.trace.text import render
from nanovllm.utils.helpers import run_program

MODEL = str(Path(__file__).parents[1] / "checkpoints" / "demo_model")
# Four texts of 22, 16, 30 and 9 tokens, which the demo model can continue. B is a prefix of A, and
# arrives with C and D later.
_INTRODUCTION = "I am a tiny language model with about two and a half million parameters. I"
PROMPTS = {
    "A": f"{_INTRODUCTION} show how an engine works:",
    "B": _INTRODUCTION,
    "C": "Counting from 1 to 100: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "D": "The prime numbers within 100 are",
}
NUM_OUTPUT_TOKENS = 14
NUM_STEPS_OF_A = 3  # before the others arrive
OPTIONS: dict[str, Any] = {
    "kvcache_block_size": 4,
    "num_kvcache_blocks": 24,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
}
TIMELINES = [*[(name, 0) for name in POLICIES], ("mixed", 3)]  # policies and lengths of drafts
SHOWN_STEPS = (3, 4)  # of the first timeline
REMARK = """
A block is cached if it is full and no duplicate. B's prompt is in the cache, but its last token
must be computed for its logits, so its last block is a duplicate. The token budget cuts the prompt
of C in step 3, and step 4 fills the block that is cut."""


def show_scheduling(model: str) -> list[Trace]:
    """Print the timelines of the four requests, and return their traces."""
    print(
        f"\n--- Inside the scheduler: 4 requests of {NUM_OUTPUT_TOKENS} output tokens,"
        " 24 blocks of 4 tokens, at most 32 tokens per step\n"
    )
    for name, prompt in PROMPTS.items():
        print(f"{name}: {prompt}")
    traces: list[Trace] = []
    for name, max_draft_len in TIMELINES:
        drafts, recorder = Drafts(), Recorder()
        options = {**OPTIONS, "policy": name, "num_speculative_tokens": max_draft_len}
        with LLMEngine(Config.from_options(model, **options), [drafts, recorder]) as engine:
            drafts.costs = StepCosts(per_token=0.0)  # on any machine
            if not traces:
                engine.add_feature(StepPrinter())
            serve(engine)
        traces.append(recorder.trace)
        addition = ", with drafts of the model's MTP head" if max_draft_len else ""
        print(f"\n{POLICIES[name].title}{addition}\n{render(recorder.trace.steps)}")
    return traces


def serve(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    first, *others = PROMPTS.values()
    engine.add_request(first, params)
    for _ in range(NUM_STEPS_OF_A):
        engine.step()
    for prompt in others:
        engine.add_request(prompt, params)
    while not engine.is_finished():
        engine.step()


class StepPrinter(Feature):
    """Prints SHOWN_STEPS as the model receives them."""

    number = -1  # of the step

    def prepared(self, step: Step, batch: Batch) -> Batch:
        self.number += 1
        if self.number not in SHOWN_STEPS:
            return batch
        print(f"\nStep {self.number} as the model receives it (slot = block * 4 + position % 4)")
        blocks = self.scheduler.block_manager.blocks
        for index, seq in enumerate(step.seqs):
            start, end = batch.cu_seqlens_q[index : index + 2].tolist()
            name = list(PROMPTS)[seq.seq_id]
            cached = int(batch.positions[start])
            print(f"  {name}: {cached} tokens in the KV cache, {end - start} to compute")
            print(f"     block_table  {seq.block_table}")
            print(f"     slot_mapping {batch.slot_mapping[start:end].tolist()}")
            print(f"     not cached   {[i for i in seq.block_table if not blocks[i].is_cached]}")
        if self.number == SHOWN_STEPS[-1]:
            print(REMARK)
        return batch


def main() -> None:
    parser = ArgumentParser(description="Print a tour of the scheduler, and write its page.")
    parser.add_argument("-o", "--output", default="timeline.html", help="default: timeline.html")
    path = parser.parse_args().output
    save_page(show_scheduling(MODEL), path)
    print(f"\n--- All steps of all policies: open {path} in a browser")


if __name__ == "__main__":
    run_program(main)
