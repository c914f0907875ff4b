"""Train the demo model's MTP head, which is mtp.safetensors in the package:

    python tests/helpers/train_demo_head.py

The model stays as it is and is the teacher. Each step runs the head three times over a batch of
chats: on the model's hidden states, and then twice on its own output, as for longer drafts. A draft
of several tokens attends to rows of the first run, but here all rows of a run attend to each other,
which is simpler and nearly the same.
"""

import random
import time
from argparse import ArgumentParser
from pathlib import Path

import torch
from mtp_heads import Head, shift
from torch.nn.functional import cross_entropy
from train_demo_model import collate, conversation
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm import DEMO_MODEL

NUM_RUNS = 3
TOKENS_PER_STEP = 4096


def make_head(model):
    """Make a head that begins as the model's last layer, on the hidden states alone."""
    head = Head(model)
    size = head.norm.weight.numel()
    with torch.no_grad():
        head.fc.weight.normal_(0.0, 0.02)
        head.fc.weight[:, size:] += torch.eye(size)
    return head


def compute_losses(model, head, ids, labels):
    """Return the loss of each run, over the tokens of answers, and the shares of right tokens."""
    is_answer = labels != -100
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        expected = model.lm_head(hidden[is_answer]).float().softmax(-1)
    losses, shares = [], []
    for _ in range(NUM_RUNS):
        hidden = head(model.model, ids, shift(hidden)[:, :-1])
        logits = model.lm_head(hidden[is_answer]).float()
        losses.append(cross_entropy(logits, expected))
        shares.append((logits.argmax(-1) == expected.argmax(-1)).float().mean().item())
    return losses, shares


def main():
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(DEMO_MODEL))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    model.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    head = make_head(model)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1 - step / args.steps)
    )
    start = time.time()
    for step in range(args.steps):
        length = (64, 128, 64, 256)[step % 4]
        rows = [
            conversation(rng, tokenizer.backend_tokenizer, length)
            for _ in range(TOKENS_PER_STEP // length)
        ]
        ids, labels = collate(rows, tokenizer.pad_token_id)
        with torch.autocast("cpu", torch.bfloat16):
            losses, shares = compute_losses(model, head, ids, labels)
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            right = " ".join(f"{share:.1%}" for share in shares)
            print(f"step {step}: right {right}  {time.time() - start:.0f} s", flush=True)
    head.to(torch.bfloat16).save(args.out)


if __name__ == "__main__":
    main()
