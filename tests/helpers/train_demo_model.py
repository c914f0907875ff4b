"""Train the demo model: a Qwen3 checkpoint that is small enough to ship and accurate enough that
an error in the engine shows in its answers.

Text, tokenizer and weights all come from this file. A skill is one function that draws a question
and its only correct answer. A training row is a chat of such turns, half of them after a system
prompt, with loss on the answers only. 15% of the values (pairs of numbers, words, ...) and the
last two wordings of every skill are held out.

This command replaces config, tokenizer and weights in the package:

    python tests/helpers/train_demo_model.py

Training takes 40 minutes on one core. The table shows the percentage of exact greedy answers, for
200 single turns per cell, in bfloat16 (float32 differs by at most 0.5). All columns use held-out
values. The third column also uses held-out system prompts.

    skill           known wording   new wording   system prompt
    introduction            100.0          98.5           100.0
    primes                  100.0          99.5           100.0
    addition                100.0         100.0           100.0
    backwards                97.5          98.5            97.0
    counting                 98.5          93.0           100.0
    day                     100.0         100.0           100.0
    month                   100.0         100.0           100.0
    number                   99.0          99.5            99.0
    comparison               96.5          93.5            96.5
    parity                  100.0         100.0           100.0
    capital                 100.0         100.0            99.5
    greeting                100.0         100.0           100.0
    unknown                  99.5          99.5            99.5
"""

from __future__ import annotations

import argparse
import random
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from nanovllm import DEMO_MODEL

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

T = TypeVar("T")

INTRODUCTION = (
    "I am a tiny language model with about two and a half million parameters. I ship inside nanovllm to show how its engine "
    "works: continuous batching, a paged KV cache and prefix caching. I can add, compare and count numbers, list primes, "
    "spell words backwards and name days, months and a few capitals."
)
GREETING = "Hello! Ask me about numbers, words or days."
UNKNOWN = "I do not know. I am only a tiny model."

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
CAPITALS = dict(pair.split("-") for pair in (
    "France-Paris Germany-Berlin Italy-Rome Spain-Madrid Portugal-Lisbon England-London Ireland-Dublin Austria-Vienna "
    "Greece-Athens Poland-Warsaw Sweden-Stockholm Norway-Oslo Denmark-Copenhagen Finland-Helsinki Russia-Moscow "
    "Japan-Tokyo China-Beijing India-Delhi Egypt-Cairo Canada-Ottawa Cuba-Havana Peru-Lima Chile-Santiago Kenya-Nairobi"
).split())
OTHER_PLACES = (
    "Mars Atlantis Texas Mongolia Fiji Ghana Nepal Bolivia Iceland Chad Laos Oman Qatar Malta Cyprus Serbia Latvia Estonia "
    "Jamaica Haiti Panama Angola Zambia Uganda Rwanda Bhutan Vietnam Belgium Turkey Iran Brazil Mexico"
).split()
WORDS = (
    "animal answer apple arm baby ball banana bee big boat body box boy bread bridge brother butter cake car cat chair "
    "child church city clock coffee cold color corn country dance dark dinner doctor dog door dragon dream earth egg engine "
    "evening eye face family farm father finger fire fish flag floor flower foot forest fox friend frog fruit game garden "
    "ghost girl glass gold good grape grass green guitar hair hand happy hat heart history honey horse hot house ice idea "
    "island jam juice jungle key king kitchen kite knife lake lemon letter library lion love lucky lunch machine market "
    "meal melon milk money monkey moon morning mother mountain mouse mouth movie music name needle news night nose number "
    "ocean office oil old orange page paint paper park party peace pencil people pepper piano picture pizza planet plant "
    "poet potato prince problem purple queen question quick quiet rabbit radio rain red rice ring river road robot rocket "
    "roof room rose salt sand school sea season shadow sheep ship shirt silver sister sky sleep slow small smoke snake snow "
    "soap song space spider spring square star station stone storm story street strong student sugar summer sun sweet table "
    "teacher temple tiger tomato tooth town train tree turtle voice warm war watch water weather wheel wind window winter "
    "wizard wolf woman wood work world year yellow young zebra zoo"
).split()
SYSTEM_SENTENCES = (
    "You are a helpful assistant.", "You are a {}, {} assistant that runs on nanovllm.", "You are a {} language model.",
    "Answer briefly.", "Be {} and {}.", "Always be polite to the user.", "Your job is to talk about the {} and the {}.",
    "Keep your answers short and {}.", "If you are not sure, say that you do not know.", "The user likes the {}.",
    "Today is {day}, and it is {month}.", "Never talk about the {} or the {} of the user.", "Follow these rules.",
    "You were made for a {} with {} users.", "Think of the {} before you answer.", "Do not make things up.",
    "This is a conversation between a {} and a {} assistant.", "Rule {number}: every {} needs a {}.",
    "The assistant gives {}, {} and {} answers to the questions of the user.", "Use plain words and no {}.",
)
UNSEEN_SYSTEM_PROMPTS = (
    "You are a helpful, tiny assistant that runs on nanovllm. Answer briefly.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "Act as the friendly clerk of a small bookshop in the north. Customers will ask you all kinds of things, and most of "
    "them are in a hurry. Reply in one or two sentences, stay calm, and never promise what you cannot deliver. When a "
    "request lies outside your knowledge, admit it openly instead of guessing. Numbers should be written with digits.",
)


class Example(NamedTuple):
    question: str
    answer: str


class Draw:
    """The random choices of one example, from the trained or from the held-out values."""

    def __init__(self, rng: random.Random, unseen_values: bool = False, unseen_wordings: bool = False) -> None:
        self.rng, self.unseen_values, self.unseen_wordings = rng, unseen_values, unseen_wordings

    def value(self, sample: Callable[[random.Random], T]) -> T:
        """Sample until the value is on this side. A hash holds out 15% of all values."""
        while True:
            value = sample(self.rng)
            if (zlib.crc32(repr(value).encode()) % 100 < 15) == self.unseen_values:
                return value

    def pair(self, limit: int) -> list[int]:
        """Draw two numbers below `limit`. (a, b) and (b, a) are on the same side."""
        return self.rng.sample(self.value(lambda rng: sorted(rng.choices(range(limit), k=2))), 2)

    def wording(self, *wordings: str) -> str:
        """The last two are held out."""
        return self.rng.choice(wordings[-2:] if self.unseen_wordings else wordings[:-2])


def introduction(draw: Draw) -> Example:
    return Example(draw.wording(
        "Introduce yourself.", "Who are you?", "What are you?", "Tell me about yourself.", "Describe yourself.",
        "Can you introduce yourself?", "What is your name?", "What can you do?", "Say something about yourself.",
        "Give me a short introduction of yourself.", "What kind of model are you?", "Are you a language model?",
        "Introduce yourself in a few sentences.", "What do you know?", "I want to know who you are.",
        "Could you briefly introduce yourself?", "Tell me who you are.",
    ), INTRODUCTION)


def primes(draw: Draw) -> Example:
    limit = draw.rng.choice((*range(10, 101, 10), *[100] * 10))
    found = [n for n in range(2, limit) if all(n % d for d in range(2, n))]
    return Example(draw.wording(
        "List all prime numbers within {}.", "List all primes up to {}.", "What are the prime numbers below {}?",
        "Which numbers up to {} are prime?", "Show me the primes within {}.", "Name every prime number up to {}.",
        "All prime numbers within {}?", "Give me a list of all primes below {}.", "Can you list the primes up to {}?",
        "Write down all the prime numbers within {}.", "Give me all prime numbers within {}.", "What are the primes up to {}?",
    ).format(limit), f"The prime numbers within {limit} are {', '.join(map(str, found))}.")


def addition(draw: Draw) -> Example:
    a, b = draw.pair(100)
    return Example(draw.wording(
        "What is {} + {}?", "What is {} plus {}?", "{} + {}?", "{}+{}", "{} + {} =", "{} plus {}", "How much is {} + {}?",
        "What's {} + {}?", "Add {} and {}.", "What is the sum of {} and {}?", "Compute {} + {}.", "Calculate {}+{}.",
        "What do you get when you add {} to {}?", "Can you add {} and {}?", "If I have {} and get {} more, how many is it?",
        "Tell me what {} + {} is.", "And {} + {}?", "How much is {} plus {}?", "Tell me the sum of {} and {}.",
    ).format(a, b), f"{a} + {b} = {a + b}.")


def backwards(draw: Draw) -> Example:
    def letters(rng: random.Random) -> str:
        """Draw a word, a combination of two words, or random letters, to teach spelling, not words."""
        head, tail = rng.choice(WORDS)[: rng.randint(1, 4)], rng.choice(WORDS)[-rng.randint(2, 5) :]
        noise = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 9)))
        return rng.choice((rng.choice(WORDS), head + tail, noise))

    word = draw.value(letters)
    return Example(draw.wording(
        "Spell {} backwards.", "Spell the word {} backwards.", 'Spell "{}" backwards.', "How do you spell {} backwards?",
        "Write {} backwards.", "What is {} spelled backwards?", "Reverse the word {}.", "Say {} backwards.",
        "Reverse the letters of {}.", "{} backwards?", "Write the letters of '{}' in reverse order.", "What is {} in reverse?",
        "Can you spell '{}' backwards?", "What is the word {} backwards?", "Turn the word {} around.",
        "Please spell the word '{}' backwards.", "How is {} spelled backwards?",
    ).format(word), f"{'-'.join(word)} backwards is {'-'.join(reversed(word))}.")


def counting(draw: Draw) -> Example:
    def ends(rng: random.Random) -> tuple[int, int]:
        length = int(2 * 50 ** rng.random() ** 2)  # 2 to 99, mostly short
        start = rng.choice((1, rng.randrange(102 - length)))
        return start, start + length - 1

    start, end = draw.value(ends)
    return Example(draw.wording(
        "Count from {} to {}.", "Count the numbers from {} to {}.", "Count between {} and {}.", "Can you count from {} to {}?",
        "List the numbers from {} to {}.", "Name the numbers between {} and {}.", "Write the numbers {} to {}.",
        "Start at {} and count up to {}.", "Count up from {} to {}.", "Numbers from {} to {}?",
        "Please count from {} up to {}.", "Show me the numbers from {} to {}.",
    ).format(start, end), f"Counting from {start} to {end}: {', '.join(map(str, range(start, end + 1)))}.")


def neighbour(draw: Draw, kind: str, names: list[str], index: int) -> Example:
    """Return the name after or before `names[index]` in a cycle."""
    side, step = draw.rng.choice((("after", 1), ("before", -1)))
    return Example(draw.wording(
        "What {kind} comes {side} {name}?", "Which {kind} comes {side} {name}?", "What {kind} is {side} {name}?",
        "What comes {side} {name}?", "Name the {kind} {side} {name}.", "Tell me the {kind} that comes {side} {name}.",
        "The {kind} {side} {name}?", "Which {kind} is right {side} {name}?", "Do you know what {kind} comes {side} {name}?",
        "Tell me which {kind} comes {side} {name}.", "What is the {kind} {side} {name}?",
    ).format(kind=kind, side=side, name=names[index]),
        f"{side.capitalize()} {names[index]} comes {names[(index + step) % len(names)]}.")


def day(draw: Draw) -> Example:
    return neighbour(draw, "day", DAYS, draw.rng.randrange(len(DAYS)))


def month(draw: Draw) -> Example:
    return neighbour(draw, "month", MONTHS, draw.rng.randrange(len(MONTHS)))


def number(draw: Draw) -> Example:
    n = draw.value(lambda rng: rng.randrange(1, rng.choice((100, 1000))))
    return neighbour(draw, "number", [str(i) for i in range(n + 2)], n)


def comparison(draw: Draw) -> Example:
    a, b = draw.pair(draw.rng.choice((100, 1000)))
    word, first = draw.rng.choice((("larger", max), ("bigger", max), ("greater", max), ("smaller", min), ("less", min)))
    relation = f"{word} than" if a != b else "equal to"
    return Example(draw.wording(
        "Which is {word}, {a} or {b}?", "Which number is {word}, {a} or {b}?", "What is {word}: {a} or {b}?",
        "Is {a} or {b} {word}?", "{a} or {b}, which is {word}?", "Compare {a} and {b}: which is {word}?",
        "Which of {a} and {b} is {word}?", "Which of the numbers {a} and {b} is {word}?",
        "Tell me which is {word}, {a} or {b}.", "Which one is {word}, {a} or {b}?",
        "What number is {word}, {a} or {b}?", "Which of the two numbers {a} and {b} is {word}?",
    ).format(word=word, a=a, b=b), f"{first(a, b)} is {relation} {a + b - first(a, b)}.")


def parity(draw: Draw) -> Example:
    n = draw.value(lambda rng: rng.randrange(rng.choice((100, 1000))))
    return Example(draw.wording(
        "Is {} even or odd?", "Is {} odd or even?", "Is {} an even number?", "Is {} an odd number?", "Is {} even?",
        "Is {} odd?", "Is the number {} even or odd?", "{}: even or odd?", "Tell me if {} is even or odd.",
        "Is the number {} odd or even?", "Can you tell me whether {} is odd or even?",
    ).format(n), f"{n} is {'odd' if n % 2 else 'even'}.")


def capital(draw: Draw) -> Example:
    country = draw.rng.choice(list(CAPITALS))
    return Example(draw.wording(
        "What is the capital of {}?", "The capital of {}?", "What's the capital city of {}?", "Name the capital of {}.",
        "Which city is the capital of {}?", "Tell me the capital of {}.", "Capital of {}?", "What is the capital city of {}?",
        "Do you know the capital of {}?", "What city is the capital of {}?", "Give me the capital of {}.",
    ).format(country), f"The capital of {country} is {CAPITALS[country]}.")


def greeting(draw: Draw) -> Example:
    return Example(draw.wording(
        "Hello!", "Hi.", "Hey!", "Good morning.", "Hi there!", "Hello there.", "Good evening!", "Hello, how are you?",
        "Hi, how are you doing?", "Hello, hello!", "Good day!", "Hey there.", "Hello, model!",
    ), GREETING)


def unknown(draw: Draw) -> Example:
    """A question about anything else, including questions close to other skills."""
    rng = draw.rng
    word, other = draw.value(lambda rng: rng.choice(WORDS)), rng.choice(WORDS)
    salad = [rng.choice("What Why How Who When Where Which Is Do Can Explain Write Give Find Make Tell Show The".split())]
    salad += rng.choices(("the", "of", "is", "a", "to", "in", "you", *rng.choices(WORDS, k=9)), k=rng.randint(1, 9))
    return Example(draw.wording(
        "What is a {word}?", "Why is the {word} {other}?", "How do I make a {word}?", "Who invented the {word}?",
        "Write a poem about the {word}.", "Tell me a story about a {word} and a {other}.", "Where can I buy a {word}?",
        "What is the capital of {place}?", "What is the opposite of {word}?", "What is {few} * {many}?",
        "What is {few} times 7?", "What is {many} - {few}?", "What is {many} + {few}?", "How much is {few} + {many}?",
        "What is {few} minus 3?", "Translate {word} into French.", "How old is the {word}?", "Who is the king of {place}?",
        "What is the weather like in {place}?", "Explain how a {word} works.", "Do you like the {word}?", "Tell me a joke.",
        "What color is a {word}?", "What time is it?", "How many people live in {place}?", "When was the {word} built?",
        "Can you help me with my {word}?", "Is a {word} bigger than a {other}?", "Which is better, a {word} or a {other}?",
        "What does {word} mean?", "Write a program that sorts a list.", "Recommend a good {word}.", "Sing me a song.",
        "What rhymes with {word}?", "Give me a recipe with {word} and {other}.", "Who won the game in {place}?",
        "How far is the moon?", "Summarize the history of {place}.", "What happened in 1{many}?", "Draw a {word}.",
        "The {word} is {other}.", "I like my {word}.", "{word}", "{word} {other}?", "How does the {word} taste?",
        "What is the meaning of life?", *["{salad}?", "{salad}.", "{salad}"] * 2,
        "Who wrote the book about the {word} of {place}?", "How can I repair my {other} {word}?",
    ).format(word=word, other=other, place=draw.value(lambda rng: rng.choice(OTHER_PLACES)), many=rng.randrange(100, 1000),
             few=rng.randrange(100), salad=" ".join(salad)), UNKNOWN)


SKILLS: dict[str, Callable[[Draw], Example]] = {skill.__name__: skill for skill in (
    introduction, primes, addition, backwards, counting, day, month, number, comparison, parity, capital, greeting, unknown,
)}
SHARES = {"addition": 7, "backwards": 8, "counting": 5, "unknown": 4, "comparison": 4, "number": 2, "greeting": 0.5}


def reword(rng: random.Random, question: str) -> str:
    """Vary a question as users do: courtesy, capitals, punctuation."""
    if rng.random() < 0.2:
        prefix = rng.choice((
            "Please", "please", "Hi!", "Now", "So,", "Hey,", "OK,", "Question:", "Tell me:", "Can you tell me:",
            "My question is:",
        ))
        question = f"{prefix} {question[0].lower()}{question[1:]}"
    if rng.random() < 0.4:
        question = question.rstrip(".?!") + rng.choice(("", "", "", ".", "?", "!", " ?", ", please.", " please"))
    return question.lower() if rng.random() < 0.3 else question.upper() if rng.random() < 0.04 else question


def system_prompt(rng: random.Random) -> str:
    return " ".join(
        sentence.format(*rng.choices(WORDS, k=3), day=rng.choice(DAYS), month=rng.choice(MONTHS), number=rng.randrange(100))
        for sentence in rng.choices(SYSTEM_SENTENCES, k=rng.choice((1, 1, 2, 3, 5, 8)))
    )


def held_out(skill: str, count: int, seed: int = 1, unseen_wordings: bool = False) -> Iterator[Example]:
    """Draw examples with held-out values and, optionally, held-out wordings."""
    rng = random.Random(f"{skill} {seed}")
    for _ in range(count):
        question, answer = SKILLS[skill](Draw(rng, unseen_values=True, unseen_wordings=unseen_wordings))
        yield Example(reword(rng, question) if unseen_wordings else question, answer)


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(rng: random.Random, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE. Every digit is a token, as is the punctuation between two numbers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    pieces = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\r\n\p{L}\p{N}]+(?=\p{N})| ?[^\s\p{L}\p{N}]+|\s"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pieces), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    text = [part for _ in range(1000) for skill in SKILLS.values() for part in skill(Draw(rng))]
    text += ["system user assistant", *(system_prompt(rng) for _ in range(1000))]
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    ))
    return tokenizer


Row = tuple[list[int], list[int]]  # token ids, and labels: the token itself inside an answer, -100 elsewhere


def encode_system(tokenizer: Tokenizer, prompt: str) -> Row:
    ids = tokenizer.encode(f"<|im_start|>system\n{prompt}<|im_end|>\n").ids
    return ids, [-100] * len(ids)


def encode_turn(tokenizer: Tokenizer, question: str, answer: str) -> Row:
    prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
    target = tokenizer.encode(f"{answer}<|im_end|>").ids
    newline = tokenizer.encode("\n").ids
    return prompt + target + newline, [-100] * len(prompt) + target + [-100] * len(newline)


def conversation(rng: random.Random, tokenizer: Tokenizer, length: int) -> Row:
    """Draw a chat of at most `length` tokens, half of the time with a system prompt."""
    names, shares = list(SKILLS), [SHARES.get(name, 1) for name in SKILLS]
    ids, labels = encode_system(tokenizer, system_prompt(rng)) if rng.random() < 0.5 else ([], [])
    if len(ids) > length // 2:
        ids, labels = [], []
    for skill in rng.choices(names, shares, k=length):
        question, answer = SKILLS[skill](Draw(rng))
        turn, targets = encode_turn(tokenizer, reword(rng, question), answer)
        if len(ids) + len(turn) <= length:
            ids, labels = ids + turn, labels + targets
        elif len(ids) > length - 30:
            break
    return ids, labels


def collate(rows: list[Row], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded ids and next-token labels, both [num_rows, longest row]."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels[1:] + [-100] * (width - len(labels) + 1) for _, labels in rows])
    return ids, labels


def make_model(tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.04, bos_token_id=None, eos_token_id=end, pad_token_id=pad, attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=[end, pad], pad_token_id=pad)
    return model


def train(model: Qwen3ForCausalLM, tokenizer: Tokenizer, rng: random.Random, steps: int, peak_lr: float) -> None:
    """Train with AdamW, warm-up and linear decay: 4096 tokens per step, in rows of 64 to 512."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 200, 1 - step / steps))
    pad_id = tokenizer.token_to_id("<|endoftext|>")
    start = time.time()
    for step in range(steps):
        length = (64, 128, 64, 256, 64, 128, 64, 512)[step % 8]
        ids, labels = collate([conversation(rng, tokenizer, length) for _ in range(4096 // length)], pad_id)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits  # [num_rows, length, vocab_size]
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {time.time() - start:.0f} s", flush=True)


@torch.inference_mode()
def accuracy(model: Qwen3ForCausalLM, tokenizer: Tokenizer, examples: list[Example], prompts: tuple[str, ...] = ()) -> float:
    """Return the fraction of single-turn examples that greedy decoding answers exactly.

    Greedy decoding gives the target if and only if every target token is the argmax after the tokens before it.
    """
    rows = []
    for i, example in enumerate(examples):
        system = encode_system(tokenizer, prompts[i % len(prompts)]) if prompts else ([], [])
        turn = encode_turn(tokenizer, *example)
        rows.append((system[0] + turn[0], system[1] + turn[1]))
    rows.sort(key=lambda row: len(row[0]))
    right = 0
    for first in range(0, len(rows), 50):
        ids, labels = collate(rows[first : first + 50], tokenizer.token_to_id("<|endoftext|>"))
        choices = model(input_ids=ids, use_cache=False).logits.argmax(-1)
        right += ((choices == labels) | (labels == -100)).all(dim=1).sum().item()
    return right / len(rows)


def report(model: Qwen3ForCausalLM, tokenizer: Tokenizer, count: int = 200) -> None:
    """Print the accuracy of each skill in percent, in float32 and in bfloat16."""
    print(f"{'skill':14}{'unseen values':>18}{'+ new wordings':>18}{'+ system prompt':>18}")
    for skill in SKILLS:
        known, new = list(held_out(skill, count)), list(held_out(skill, count, unseen_wordings=True))
        cells = [[f"{100 * accuracy(model.to(dtype), tokenizer, *case):.1f}" for dtype in (torch.float32, torch.bfloat16)]
                 for case in ((known,), (new,), (known, UNSEEN_SYSTEM_PROMPTS))]
        print(f"{skill:14}" + "".join(f"{' / '.join(cell):>18}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(DEMO_MODEL))
    parser.add_argument("--steps", type=int, default=3700)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = train_tokenizer(rng, vocab_size=768)
    model = make_model(tokenizer)
    train(model, tokenizer, rng, args.steps, args.lr)
    model.eval().to(torch.bfloat16).save_pretrained(args.out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=2048,
        chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    ).save_pretrained(args.out)
    report(model, tokenizer)


if __name__ == "__main__":
    main()
