"""Chat in the terminal: python -m nanovllm.chat [MODEL].

Ctrl-C stops an answer, Ctrl-D ends the program.
"""

import argparse
import time

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.config import QUANTIZATIONS
from nanovllm.text.chat_template import Message


def answer(llm: LLM, messages: list[Message], params: SamplingParams) -> str:
    """Print the next message of a conversation as it is generated, then its figures."""
    start = time.perf_counter()
    first = 0.0  # when the first token came
    newest = None
    text = ""
    try:
        for newest in llm.stream(llm.encode_chats([messages]), params):
            first = first or time.perf_counter()
            print(newest["text"][len(text) :], end="", flush=True)
            text = newest["text"]
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    if newest is not None:
        rate = (len(newest["token_ids"]) - 1) / (time.perf_counter() - first)
        num_prompt_tokens = len(newest["prompt_token_ids"])
        print(
            f"\n\033[2m{1e3 * (first - start):.0f} ms to the first token, {rate:.0f} tokens/s,"
            f" {newest['num_cached_tokens']} of {num_prompt_tokens} prompt tokens from the prefix"
            " cache\033[0m"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nanovllm.chat", description=__doc__)
    add = parser.add_argument
    add("model", nargs="?", default=DEMO_MODEL, help="default: the demo model")
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--max-tokens", type=int, default=512, help="per answer (default: 512)")
    add("--quantization", choices=QUANTIZATIONS, help="quantize the weights while loading")
    args = parser.parse_args()
    try:
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
        llm = LLM(args.model, quantization=args.quantization)
    except ValueError as error:
        parser.error(str(error))
    messages: list[Message] = []
    with llm:
        while True:
            try:
                question = {"role": "user", "content": input("\n> ")}
                text = answer(llm, [*messages, question], params)
                messages += [question, {"role": "assistant", "content": text}]
            except KeyboardInterrupt:
                continue
            except EOFError:
                break
            except ValueError as error:  # such as a conversation above max_model_len
                print(error)


if __name__ == "__main__":
    main()
