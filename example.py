"""An engine at work, on any machine, in a minute: python example.py [--model NAME]"""

from argparse import ArgumentParser

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.utils.helpers import run_program

QUESTIONS = [
    "introduce yourself",
    "list all prime numbers within 100",
    "What is 27 + 58?",
    "Spell the word planet backwards.",
    "Which day comes after Sunday?",
    "Who wrote Hamlet?",
]
SYSTEM = {"role": "system", "content": "You are a small and friendly assistant. Be brief."}


def converse(llm: LLM, params: SamplingParams) -> None:
    print("\n--- Six conversations in one batch")
    users = [{"role": "user", "content": question} for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.chat([[user] for user in users], params)):
        print(f"\n> {question}\n{output['text']}")

    print("\n--- The same with a shared system prompt, whose full blocks are computed once")
    for question, output in zip(QUESTIONS, llm.chat([[SYSTEM, user] for user in users], params)):
        hits = f"{output['num_cached_tokens']:4} of {len(output['prompt_token_ids'])}"
        print(f"{hits} prompt tokens from the prefix cache  > {question}")

    print("\n--- Streaming: one answer, token by token\n\n> count from 3 to 17")
    text = ""
    prompts = llm.encode_chats([[{"role": "user", "content": "count from 3 to 17"}]])
    for output in llm.stream(prompts, params):
        print(output["text"][len(text) :], end="", flush=True)
        text = output["text"]

    print("\n\n--- Statistics of the engine")
    for name, value in llm.stats.items():
        print(f"{name:20} {value}")
    if llm.stats["num_draft_tokens"]:
        share = llm.stats["num_accepted_tokens"] / llm.stats["num_draft_tokens"]
        print(f"{share:.0%} of the draft tokens were accepted")


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint directory or Hub id")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (default: 256)")
    parser.add_argument("--quantization", choices=["int8", "int4"], help="of the weights")
    parser.add_argument("--drafts", type=int, default=0, help="draft tokens in a step (default: 0)")
    args = parser.parse_args()
    try:
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
        options = {"quantization": args.quantization, "num_speculative_tokens": args.drafts}
        with LLM(args.model, **options) as llm:
            converse(llm, params)
        print("\n--- Inside the scheduler: python -m nanovllm.trace.tour")
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    run_program(main)
