"""A one-minute tour of nanovllm for any machine: chat, prefix caching, streaming, and the steps of
the scheduler.

python example.py                              # the demo model that ships with the package
python example.py --model Qwen/Qwen3-0.6B      # any supported checkpoint: a directory or a Hub id
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from unittest.mock import patch

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.batch import Batch
from nanovllm.config import QUANTIZATIONS
from nanovllm.engine.sequence import Sequence
from nanovllm.trace import make_page, read, render
from nanovllm.utils.terminal import run_program

QUESTIONS = [
    "introduce yourself",
    "list all prime numbers within 100",
    "What is 27 + 58?",
    "Spell the word planet backwards.",
    "Which day comes after Sunday?",
    "Who wrote Hamlet?",
]
STREAMED = {"role": "user", "content": "count from 3 to 17"}
SYSTEM_PROMPT = (
    "You are a small and friendly assistant that runs inside nanovllm. Answer every question in as"
    " few words as you can, and if you do not know the answer, say so."
)
# The four requests whose steps are shown, of 22, 16, 30 and 9 tokens. B is a prefix of A.
PROMPTS = {
    "A": "You are a small and friendly assistant. What is 12 + 30?",
    "B": "You are a small and friendly assistant. What is ",
    "C": "All prime numbers within 100: 2, 3, 5, 7, 11, 13, 17, 19,",
    "D": "count from 3 to 17",
}
NUM_OUTPUT_TOKENS = 14


def tour(model: str, max_tokens: int, quantization: Literal["int8", "int4"] | None) -> None:
    """Chat with the model in a batch, with a shared system prompt, and as a stream."""
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with LLM(model, quantization=quantization) as llm:
        print("\n--- Six conversations in one batch")
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
        for question, output in zip(QUESTIONS, llm.chat(conversations, greedy)):
            print(f"\n> {question}\n{output['text']}")

        print("\n--- The same with a shared system prompt, whose full blocks are computed once")
        system = {"role": "system", "content": SYSTEM_PROMPT}
        with_system = [[system, *conversation] for conversation in conversations]
        for question, output in zip(QUESTIONS, llm.chat(with_system, greedy)):
            num_cached, num_tokens = output["num_cached_tokens"], len(output["prompt_token_ids"])
            print(
                f"{num_cached:4} of {num_tokens} prompt tokens from the prefix cache  > {question}"
            )

        print("\n--- Streaming: one answer, token by token\n\n> " + STREAMED["content"])
        text = ""
        for output in llm.stream(llm.encode_chats([[STREAMED]]), greedy):
            print(output["text"][len(text) :], end="", flush=True)
            text = output["text"]

        print("\n\n--- Statistics of the engine")
        for name, value in llm.stats.items():
            print(f"{name:20} {value}")


def show_scheduling(trace: Path, enable_chunked_prefill: bool) -> None:
    """Print the timeline of four requests, on the demo model with a small KV cache."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
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
                "  Blocks 0 to 3 hold all tokens of B, but B's last token must be computed for its"
                "\n  logits. Block 7 is therefore a duplicate of block 3."
                "\n  Block 14 has 3 of its 4 tokens, because the token budget is used up. The next"
                "\n  step fills and caches it."
            )
            show_step(llm, 4, block_ids=[14])
        while not llm.is_finished():
            llm.step()
    policy = "mixed steps" if enable_chunked_prefill else "prefill first"
    print(f"\n{policy}\n{render(read(trace))}")


def show_step(llm: LLM, number: int, block_ids: list[int]) -> None:
    """Run one step. Print its batch, and which of `block_ids` are cached afterwards."""
    prepare_batch = llm.model_runner.prepare_batch
    prepared: list[tuple[list[Sequence], Batch]] = []

    def keep_batch(seqs: list[Sequence]) -> Batch:
        batch = prepare_batch(seqs)
        prepared.append((seqs, batch))
        return batch

    with patch.object(llm.model_runner, "prepare_batch", keep_batch):
        llm.step()
    seqs, batch = prepared[0]
    print(f"\nStep {number} as the model receives it (slot = block * 4 + position % 4)")
    for index, seq in enumerate(seqs):
        start, end = batch.cu_seqlens_q[index : index + 2].tolist()
        num_cached = int(batch.positions[start])
        name = "ABCD"[seq.seq_id]
        print(f"  {name}: {num_cached} tokens in the KV cache, {end - start} to compute")
        print(f"     block_table  {seq.block_table}")
        print(f"     slot_mapping {batch.slot_mapping[start:end].tolist()}")
    for block_id in block_ids:
        block = llm.scheduler.block_manager.blocks[block_id]
        if block.is_cached:
            print(f"  block {block_id}: cached, hash {block.hash:032x}, tokens {block.token_ids}")
        else:
            print(f"  block {block_id}: not cached")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        default=DEMO_MODEL,
        help="checkpoint directory or Hub id (default: the demo model)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=256,
        help="maximum number of generated tokens per answer (default: 256)",
    )
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="quantize the weights while loading"
    )
    args = parser.parse_args()
    try:
        tour(args.model, args.max_tokens, args.quantization)
        print(
            f"\n--- Inside the scheduler: 4 requests of {NUM_OUTPUT_TOKENS} output tokens,"
            " 24 blocks of 4 tokens, at most 32 tokens per step\n"
        )
        for name, prompt in PROMPTS.items():
            print(f"{name}: {prompt}")
        with TemporaryDirectory() as directory:
            traces = [Path(directory, "mixed.json"), Path(directory, "prefill_first.json")]
            show_scheduling(traces[0], enable_chunked_prefill=True)
            show_scheduling(traces[1], enable_chunked_prefill=False)
            page = make_page([read(trace) for trace in traces])
        try:
            Path("timeline.html").write_text(page, "utf-8")
        except OSError as error:
            problem = "cannot write timeline.html to the current directory"
            raise ValueError(f"{problem}: {error}") from error
        print("\n--- All steps of both policies: open timeline.html in a browser")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    run_program(main)
