"""Draws the course's pictures of runs: python tests/project/pictures.py

The docstring of each one is its title and its description for readers who cannot see it. What they
show comes from runs of the demo model and of the block manager. Each run writes the same files. The
other pictures in the folder show no run, and are only files.
"""

from html import escape
from inspect import getdoc
from pathlib import Path

from nanovllm import DEMO_MODEL, SamplingParams
from nanovllm.benchmark.arguments import make_parser
from nanovllm.benchmark.workloads import WORKLOADS, make_requests
from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.features.speculation.costs import StepCosts
from nanovllm.features.speculation.drafts import Drafts
from nanovllm.features.structured_outputs.grammars import StructuredOutputs
from nanovllm.features.structured_outputs.masks import compute_mask, list_tokens
from nanovllm.trace.tour import OPTIONS, PROMPTS

FOLDER = Path(__file__).parents[2] / "nanovllm/course/pictures"
GREEDY = SamplingParams(temperature=0.0)
# Grays and colors that can be read on white and on black.
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {0}" width="760" height="{0}">
<title>{1}</title>
<desc>{2}</desc>
<style>
text {{ font: 12px system-ui, sans-serif; fill: #6e7781; }}
.title {{ font-size: 13px; font-weight: 700; }}
.middle {{ text-anchor: middle; }}
.on {{ fill: #ffffff; text-anchor: middle; }}
.small {{ font-size: 10px; }}
.A {{ fill: #4c8dd6; }} .B {{ fill: #d9822b; }} .C {{ fill: #3fa66a; }} .D {{ fill: #b05fc4; }}
.E {{ fill: #7d8590; }} .bare {{ fill: none; }}
.box {{ fill: #8c959f; fill-opacity: 0.1; stroke: #8c959f; }}
.gone {{ fill: none; stroke: #8c959f; stroke-dasharray: 3 3; }}
.arrow {{ fill: none; stroke: #8c959f; stroke-width: 1.5; marker-end: url(#head); }}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
 orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#8c959f"/></marker></defs>
<text x="20" y="24" class="title">{1}</text>
{3}
</svg>
"""
CLASSES = {".": "box", "x": "gone", " ": "bare"}  # capital letters are filled with a color


class Picture:
    """The parts of an SVG of 760 pixels in width."""

    def __init__(self):
        self.parts = []
        self.height = 0

    def text(self, x, y, text, style="note"):
        self.height = max(self.height, y + 16)
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(str(text))}</text>')

    def box(self, x, y, width, height, kind, label=""):
        self.height = max(self.height, y + height + 16)
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {place} rx="2" class="{CLASSES.get(kind, kind)}"/>')
        if label != "":
            style = "on" if kind.isupper() else "middle"
            self.text(x + width / 2, y + height / 2 + 4, label, style)

    def row(self, x, y, labels, kinds, width, gap=2):
        """Draw boxes side by side, one for each letter of `kinds`."""
        for label, kind in zip(labels, kinds):
            self.box(x, y, width - gap, 22, kind, label)
            x += width

    def notes(self, notes):
        """Write lines of the form `x y text`. Those that begin with M are arrows."""
        for note in notes.strip().splitlines():
            x, y, *text = note.split(maxsplit=2)
            if x.startswith("M"):
                self.parts.append(f'<path d="{note.strip()}" class="arrow"/>')
            else:
                self.text(int(x), int(y), *text)


def start_engine(*features, **options):
    """Start the demo model, with arithmetic that is the same on all machines."""
    options |= {"dtype": "float32", "device": "cpu", "enable_kernels": False}
    return LLMEngine(Config.from_options(DEMO_MODEL, **options), list(features))


def memory(picture):
    """Five requests in the memory of five reservations, to scale

    Reservations of 4,096 tokens are almost empty. In blocks of 16 tokens, the same requests take
    less than a tenth of the memory, and only the last block of each is partly empty.
    """
    # The first requests of `bench.py --workload quick`. They grow together.
    args = make_parser().parse_args(WORKLOADS["quick"].lines[""].split())
    requests = make_requests(args, vocab_size=768, run=0)[:5]
    seqs = [Sequence(i, request.prompt, GREEDY) for i, request in enumerate(requests)]
    manager = BlockManager(num_blocks=5 * 256, block_size=16)
    for num_generated in range(256):
        for seq, request in zip(seqs, requests):
            if num_generated < request.num_tokens:
                seq.token_ids.append(0)
            manager.grow(seq)
    x = 20
    for seq, kind in zip(seqs, "ABCDE"):
        num_tokens = len(seq.token_ids)
        start = 20 + 144 * seq.seq_id
        picture.box(start, 62, 142, 24, ".", f"{num_tokens} of 4,096")
        picture.box(start, 62, 142 * num_tokens / 4096, 24, kind)
        width = 720 * len(seq.block_table) / manager.num_blocks
        picture.box(x, 126, width, 24, kind)
        x += width
        for index, block_id in enumerate(seq.block_table):
            line, column = divmod(block_id, 48)
            place = (20 + 15 * column, 200 + 26 * line)
            picture.box(*place, 13, 22, ".")
            picture.box(*place, 13 * min(1, num_tokens / 16 - index), 22, kind)
    used = manager.count_states()["used"]
    more = 5 * (manager.num_blocks - used) // used
    picture.box(x, 126, 738 - x, 24, ".", f"free blocks, enough for {more} more such requests")
    picture.notes(f"""
        20 54 a reservation of 4,096 tokens for each request
        20 118 the same memory in blocks of 16 tokens
        20 192 the {used} blocks in use: only the last one of a request is partly empty
    """)


def prefix_hit(picture):
    """A prefix hit: B begins with the text of A

    Before, A holds blocks 0 to 5. The hashes of B's first three blocks lead to blocks 0 to 2.
    After, these have a reference count of 2, and B's fourth block is block 7, a new one.
    """
    with start_engine(**OPTIONS) as engine:  # the tour without C and D
        for name, num_steps, y in (("A", 3, 66), ("B", 1, 256)):
            engine.add_request(PROMPTS[name], GREEDY)
            for _ in range(num_steps):
                engine.step()
            picture.row(140, y, range(8), "." * 8, 74)
            for kind, seq in zip("AB", engine.scheduler.running):
                y += 24
                kinds = [kind if block_id in seq.block_table else " " for block_id in range(8)]
                picture.row(140, y, [""] * 8, kinds, 74)
            counts = [block.ref_count for block in engine.scheduler.block_manager.blocks]
            picture.row(140, y + 24, counts, " " * 8, 74)
        for index, block_id in enumerate(seq.block_table):
            text = engine.tokenizer.decode(seq.token_ids[4 * index : 4 * index + 4])
            x = 140 + 148 * index
            picture.box(x, 172, 146, 22, "B")
            picture.text(x + 73, 187, text, "on small")
            picture.notes(f"M{x + 73},218 L{176 + 74 * block_id},250")
    picture.notes("""
        20 54 before: A runs
        20 81 block
        20 105 table of A
        20 129 ref_count
        20 162 lookup: the hash of each full block of B, chained to the one before it
        20 187 prompt of B
        164 212 H(root, tokens): hit
        318 212 H(h0, tokens): hit
        466 212 H(h1, tokens): hit
        602 212 must be computed
        20 271 block
        20 295 table of A
        20 319 table of B
        20 343 ref_count
    """)


def draft(picture):
    """A draft of four tokens, of which one is accepted

    The step computes the newest token and four draft tokens. The first of them is accepted, the
    others are rejected, and the block that only these needed is released.
    """
    drafts = Drafts()
    lookups = {"num_speculative_tokens": 4, "speculative_method": "prompt_lookup"}
    with start_engine(drafts, **lookups, **OPTIONS) as engine:
        drafts.costs = StepCosts(per_token=0.0)  # as if draft tokens cost nothing, on any machine
        prompt = "<|im_start|>user\nIs 162 odd or even?<|im_end|>\n<|im_start|>assistant\n"
        engine.add_request(prompt, GREEDY)
        for _ in range(3):
            engine.step()
        ((seq, draft),) = drafts.drafts.items()
        names = [engine.tokenizer.decode(each) for each in seq.token_ids[16:] + draft]
    picture.row(140, 40, range(16, 28), " " * 12, 50)
    picture.row(140, 64, names[:6] + names[8:], "AAAAABDDDD", 50)
    picture.row(440, 96, [*names[6:8], "", "", ""], "CCxxx", 50)
    picture.row(140, 128, [4, 5, 6], "...", 200)
    picture.row(140, 180, names, "AAAAAAAB", 50)
    kinds = ["." if block_id in seq.block_table else "x" for block_id in (4, 5, 6)]
    picture.row(140, 212, [4, 5, 6], kinds, 200)
    picture.notes("""
        20 55 position
        20 79 newest, draft
        20 111 sampled
        20 143 block table
        20 195 after the step
        20 227 block table
        140 262 "2" is accepted. "is" differs from "odd": it is the next token. The rest is removed.
    """)


def grammar(picture):
    """The regex -?[0-9]+ as states, and the mask of some tokens in each

    At the start, a minus or a digit may come. After the minus, a digit must come. After a digit,
    another digit or the end may come.
    """
    structured = StructuredOutputs()
    params = SamplingParams(structured_outputs={"regex": "-?[0-9]+"})
    tokens = ["-", "4", "7", "x", "<|im_end|>"]
    with start_engine(structured) as engine:
        fields = structured.prepare(params, 1)
        ids = engine.tokenizer.convert_tokens_to_ids(tokens)
    masks = []
    for num_generated in range(3):
        fields["constraint"].restart(ids[:num_generated])
        masks.append(list_tokens(compute_mask(fields["constraint"].matcher)))
    for x, state, mask in zip((140, 360, 580), ("start", "after -", "after a digit"), masks):
        picture.box(x, 70, 120, 26, "A", state)
        picture.text(x, 304, f"{len(mask)} of 768 tokens")
    for y, token, token_id in zip(range(150, 300, 26), tokens, ids):
        picture.text(20, y + 15, token)
        kinds = ["C" if token_id in mask else "x" for mask in masks]
        labels = ["allowed" if kind == "C" else "-inf" for kind in kinds]
        picture.row(140, y, labels, kinds, 220, gap=100)
    picture.notes("""
        M260,83 H354
        M480,83 H574
        M200,70 C240,36 590,36 626,64
        M680,96 C700,128 610,128 626,102
        306 78 -
        510 78 digit
        400 58 digit
        688 124 digit
        20 138 next token
        20 304 allowed
    """)


def render(draw):
    title, _, description = getdoc(draw).partition("\n\n")
    picture = Picture()
    draw(picture)
    return SVG.format(picture.height, title, description, "\n".join(picture.parts))


PICTURES = (memory, prefix_hit, draft, grammar)

if __name__ == "__main__":
    for draw in PICTURES:
        (FOLDER / f"{draw.__name__}.svg").write_text(render(draw))
