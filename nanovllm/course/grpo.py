"""Teaches the demo model larger numbers with GRPO (Shao et al. 2024), in a minute on a laptop.

The model knows whether numbers below 1,000 are even or odd. Of larger ones it loses digits. The
reward of an answer is 1 for the right word, and 2 if the number is right, too. In each round the
engine samples a group of answers to each question, transformers computes the gradient, and the
engine gets the new weights. The log probabilities of both agree, so no ratio corrects the gradient.
"""

import random
from argparse import ArgumentParser

import torch
from transformers import AutoModelForCausalLM

from nanovllm import DEMO_MODEL, LLM, SamplingParams

NUM_QUESTIONS = 12  # in a round
GROUP_SIZE = 8  # answers to a question


def ask(rng: random.Random) -> tuple[str, str]:
    number = rng.randrange(1_000, 100_000)
    return f"Is {number} even or odd?", f"{number} is {'odd' if number % 2 else 'even'}."


def reward(text: str, answer: str) -> float:
    return float(text.split()[-1:] == answer.split()[-1:]) + float(text == answer)


def main(num_rounds: int = 20) -> list[float]:
    """Train, and return the share of right answers in each round."""
    rng = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    params = SamplingParams(max_tokens=16, n=GROUP_SIZE, logprobs=0)
    shares: list[float] = []
    with LLM(DEMO_MODEL, dtype="float32", max_model_len=64) as llm:
        for number in range(1 + num_rounds):
            questions = [ask(rng) for _ in range(NUM_QUESTIONS)]
            chats = [[{"role": "user", "content": question}] for question, _ in questions]
            outputs = llm.chat(chats, params, use_tqdm=False)
            answers = [answer for _, answer in questions for _ in range(GROUP_SIZE)]
            rewards = torch.tensor([reward(o["text"], a) for o, a in zip(outputs, answers)])
            groups = rewards.view(NUM_QUESTIONS, GROUP_SIZE)
            centered = groups - groups.mean(1, keepdim=True)
            advantages = (centered / (groups.std(1, keepdim=True) + 1e-2)).flatten()
            losses: list[torch.Tensor] = []
            gap = 0.0  # between the log probabilities of the engine and of transformers
            for output, advantage in zip(outputs, advantages):
                prompt, reply = output["prompt_token_ids"], output["token_ids"]
                logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
                logprobs = logits.log_softmax(-1)[range(len(reply)), reply]
                entries = zip(output["logprobs"] or [], reply)
                own = torch.tensor([entry[token] for entry, token in entries])
                gap = max(gap, (logprobs.detach() - own).abs().max().item())
                losses.append(-advantage * logprobs.sum())
            shares.append((rewards == 2).float().mean().item())
            print(f"round {number:2}: {shares[-1]:4.0%} right, gap {gap:.1e}", flush=True)
            optimizer.zero_grad()
            (torch.stack(losses).sum() / sum(len(o["token_ids"]) for o in outputs)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            llm.update_weights(model.state_dict())
    return shares


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    main(parser.parse_args().rounds)
