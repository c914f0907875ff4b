"""A tour of nanovllm in one minute, on any machine: chat, prefix caching, streaming, and a look inside.

python example.py                              # the demo model that ships with the package
python example.py --model Qwen/Qwen3-0.6B      # any checkpoint that is served: a directory or a Hub id
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast
from unittest.mock import patch

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.batch import Batch
from nanovllm.engine.sequence import Sequence
from nanovllm.terminal import run_program
from nanovllm.trace import make_page, read, render

QUESTIONS = [
    "introduce yourself",
    "list all prime numbers within 100",
    "What is 27 + 58?",
    "Spell the word planet backwards.",
    "Which day comes after Sunday?",
    "Who wrote Hamlet?",
]
PROMPTS = {
    "A": list(range(100, 122)),
    "B": list(range(100, 116)),
    "C": list(range(200, 230)),
    "D": list(range(300, 309)),
}
SYSTEM = (
    "You are a small and friendly assistant that runs inside nanovllm. Answer every question in as few words as you can,"
    " and if you do not know the answer, say so."
)


def tour(model: str, max_tokens: int) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with LLM(model) as llm:
        print("\n--- Six conversations, one batch")
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for question, output in zip(QUESTIONS, llm.chat(conversations, greedy)):
            print(f"\n> {question}\n{output['text']}")

        print("\n--- The same behind one system prompt: its K/V are computed once and shared")
        shared = [
            [{"role": "system", "content": SYSTEM}, *conversation] for conversation in conversations
        ]
        for question, output in zip(QUESTIONS, llm.chat(shared, greedy)):
            total = len(output["prompt_token_ids"])
            print(
                f"{output['num_cached_tokens']:4} of {total} prompt tokens from the cache  > {question}"
            )

        print("\n--- One answer, as it is written\n\n> count from 3 to 17")
        chat = [{"role": "user", "content": "count from 3 to 17"}]
        assert llm.tokenizer is not None  # or chat would have refused above
        token_ids = llm.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        text = ""
        for output in llm.stream(cast(list[int], token_ids), greedy):
            print(output["text"][len(text) :], end="", flush=True)
            text = output["text"]

        print("\n\n--- What the engine did")
        for name, value in llm.stats.items():
            print(f"{name:20} {value}")


def look_inside(trace: Path, enable_chunked_prefill: bool) -> None:
    """The timeline of four requests in a small pool: the demo model, blocks of 4 tokens, 24 of them, at most 32 tokens a step."""
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    with LLM(
        DEMO_MODEL,
        kvcache_block_size=4,
        num_kvcache_blocks=24,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        enable_chunked_prefill=enable_chunked_prefill,
        trace=trace,
    ) as llm:
        llm.add_request(PROMPTS["A"], params)
        for _ in range(3):
            llm.step()
        for name in "BCD":
            llm.add_request(PROMPTS[name], params)
        if enable_chunked_prefill:
            show_step(llm, 3, block_ids=[3, 7, 14])
            print(
                "  Blocks 0 to 3 have all tokens of B, but the logits of its last are needed: block 7 is a duplicate of block 3."
            )
            print(
                "  Block 14 has 3 of its 4 tokens, the budget has no more: it is full in the next step, and gets a hash."
            )
            show_step(llm, 4, block_ids=[14])
        while not llm.is_finished():
            llm.step()
    print(
        f"\n{'mixed steps' if enable_chunked_prefill else 'prefill first'}\n{render(read(trace))}"
    )


def show_step(llm: LLM, number: int, block_ids: list[int]) -> None:
    """Run one step, and show what the model got, where it was put, and what the cache then knows of some blocks."""
    assert llm.model_runner is not None  # before exit()
    prepare_batch = llm.model_runner.prepare_batch
    prepared: list[tuple[list[Sequence], Batch]] = []

    def keep_batch(seqs: list[Sequence]) -> Batch:
        prepared.append((seqs, prepare_batch(seqs)))
        return prepared[-1][1]

    with patch.object(llm.model_runner, "prepare_batch", keep_batch):
        llm.step()
    ((seqs, batch),) = prepared
    bounds = batch.cu_seqlens_q.tolist()
    print(f"\nstep {number}, as the model gets it (slot = block * 4 + position % 4)")
    for seq, start, end in zip(seqs, bounds, bounds[1:]):
        print(
            f"  {'ABCD'[seq.seq_id]}: {int(batch.positions[start])} tokens are in the cache, {end - start} new"
        )
        print(
            f"     block_table  {seq.block_table}\n     slot_mapping {batch.slot_mapping[start:end].tolist()}"
        )
    for block_id in block_ids:
        block = llm.scheduler.block_manager.blocks[block_id]
        print(
            f"  block {block_id}: {'no hash' if block.hash == -1 else f'hash {block.hash:016x}, tokens {block.token_ids}'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint directory or Hub id")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    try:
        tour(args.model, args.max_tokens)
        print("\n--- Inside: four requests, 24 blocks of 4 tokens, at most 32 tokens a step\n")
        for name, prompt in PROMPTS.items():
            print(
                f"{name}: the tokens {prompt[0]} to {prompt[-1]}{', as A begins' if name == 'B' else ''}; 14 more are generated"
            )
        with TemporaryDirectory() as directory:
            traces = [Path(directory, "mixed.json"), Path(directory, "prefill_first.json")]
            look_inside(traces[0], enable_chunked_prefill=True)
            look_inside(traces[1], enable_chunked_prefill=False)
            page = make_page([read(trace) for trace in traces])
        try:
            Path("timeline.html").write_text(page, "utf-8")
        except OSError as error:
            raise ValueError(f"timeline.html cannot be written here: {error}") from error
        print("\n--- Every step of both: open timeline.html in a browser")
    except ValueError as error:  # names what is wrong: the model, the number, the folder
        parser.error(str(error))


if __name__ == "__main__":
    run_program(main)
