"""A tour of nanovllm in one minute, on any machine: chat, prefix caching, streaming, statistics.

    python example.py                              # the demo model that ships with the package
    python example.py --model Qwen/Qwen3-0.6B      # any Qwen3 checkpoint: a directory or a Hub id
"""

import argparse

from nanovllm import DEMO_MODEL, LLM, SamplingParams

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
        prompt = llm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        text = ""
        for output in llm.stream(prompt, greedy):
            print(output["text"][len(text) :], end="", flush=True)
            text = output["text"]

        print("\n\n--- What the engine did")
        for name, value in llm.stats.items():
            print(f"{name:20} {value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help="checkpoint directory or Hub id")
    parser.add_argument("--max-tokens", type=int, default=256)
    args = parser.parse_args()
    try:
        tour(args.model, args.max_tokens)
    except ValueError as error:  # names what is wrong: the model, or the number
        parser.error(str(error))


if __name__ == "__main__":
    main()
