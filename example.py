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
from nanovllm.trace import read, render

QUESTIONS = [
    "introduce yourself",
    "list all prime numbers within 100",
    "What is 27 + 58?",
    "Spell the word planet backwards.",
    "Which day comes after Sunday?",
    "Who wrote Hamlet?",
]
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
        shared = [[{"role": "system", "content": SYSTEM}, *conversation] for conversation in conversations]
        for question, output in zip(QUESTIONS, llm.chat(shared, greedy)):
            total = len(output["prompt_token_ids"])
            print(f"{output['num_cached_tokens']:4} of {total} prompt tokens from the cache  > {question}")

        print("\n--- One answer, as it is written\n\n> count from 3 to 17")
        chat = [{"role": "user", "content": "count from 3 to 17"}]
        assert llm.tokenizer is not None  # or chat would have refused above
        token_ids = llm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        text = ""
        for output in llm.stream(cast(list[int], token_ids), greedy):
            print(output["text"][len(text) :], end="", flush=True)
            text = output["text"]

        print("\n\n--- What the engine did")
        for name, value in llm.stats.items():
            print(f"{name:20} {value}")


def look_inside(trace: Path, enable_chunked_prefill: bool) -> None:
    """The timeline of four requests in a small pool: the demo model, blocks of 4 tokens, 24 of them, at most 32 tokens a step."""
    prompts = [list(range(100, 122)), list(range(100, 116)), list(range(200, 230)), list(range(300, 309))]
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
        llm.add_request(prompts[0], params)
        for _ in range(3):
            llm.step()
        for prompt in prompts[1:]:
            llm.add_request(prompt, params)
        if enable_chunked_prefill:
            show_step(llm)
        while not llm.is_finished():
            llm.step()
    print(f"\n{'mixed steps' if enable_chunked_prefill else 'prefill first'}\n{render(read(trace))}")


def show_step(llm: LLM) -> None:
    """Run one step, and show what the model got, and where it was put."""
    assert llm.model_runner is not None  # before exit()
    prepare_batch = llm.model_runner.prepare_batch
    prepared: list[tuple[list[Sequence], Batch]] = []

    def keep_batch(seqs: list[Sequence]) -> Batch:
        prepared.append((seqs, prepare_batch(seqs)))
        return prepared[-1][1]

    computed = {seq.seq_id: seq.num_computed_tokens for seq in llm.scheduler.running}
    with patch.object(llm.model_runner, "prepare_batch", keep_batch):
        llm.step()
    ((seqs, batch),) = prepared
    bounds = batch.cu_seqlens_q.tolist()
    print("\none step, as the model got it (block size 4: slot = block * 4 + position % 4)")
    for seq, start, end in zip(seqs, bounds, bounds[1:]):
        num_computed = computed.get(seq.seq_id, seq.num_cached_tokens)
        print(
            f"  request {seq.seq_id}: {num_computed} tokens computed before ({seq.num_cached_tokens} cached), {end - start} new\n"
            f"    block_table  {seq.block_table}\n    slot_mapping {batch.slot_mapping[start:end].tolist()}"
        )
    print("  the blocks of request 0, each known by the hash of its tokens and of the hash before it")
    for block_id in seqs[0].block_table:
        block = llm.scheduler.block_manager.blocks[block_id]
        known = f"{block.hash:016x} of {block.token_ids}" if block.hash != -1 else "not full, so it has no hash"
        print(f"    block {block_id:2} held by {block.ref_count}: {known}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint directory or Hub id")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    try:
        tour(args.model, args.max_tokens)
        print("\n--- Inside: a prefix hit, pieces of prompts beside decodes, and what happens when blocks run out")
        with TemporaryDirectory() as directory:
            for enable_chunked_prefill in (True, False):
                look_inside(Path(directory, "trace.json"), enable_chunked_prefill)
    except ValueError as error:  # names what is wrong: the model, or the number
        parser.error(str(error))


if __name__ == "__main__":
    run_program(main)
