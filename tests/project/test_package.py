"""Modules import only from their own floor and from lower ones, and the core stands alone."""

import ast
import json
import shutil
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import generate_ids, greedy, random_prompt
from project_helpers import start

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.layers import attention, sampler
from nanovllm.layers.norm import RMSNorm
from nanovllm.models import decoder

PACKAGE = Path(nanovllm.__file__).parent

# --- Imports point down

FLOORS = [  # top down; a module imports from its own floor and from lower ones
    {"chat", "benchmark", "course", "server"},
    {"llm"},
    {"trace"},
    {"features"},
    {"engine"},
    {"worker"},
    {"kernels"},
    {"models"},
    {"checkpoints"},
    {"layers", "config", "sampling_params", "text"},
    {"batch"},
    {"utils"},
]
WITHOUT_TORCH = {
    "nanovllm.engine.scheduler",
    "nanovllm.engine.block_manager",
    "nanovllm.engine.sequence",
    "nanovllm.engine.step",
}


def read_sources():
    """Map the names of modules to their sources."""
    sources = {}
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "demo_model":
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return sources


SOURCES = read_sources()


def find_imports(module, source):
    """Return the modules that `source` imports, also in functions and for type checkers.

    Strings that name a module count, because import_module may get them.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports must be absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in SOURCES else node.module)
        elif isinstance(node, ast.Constant):
            found.update({node.value} & SOURCES.keys() - {"nanovllm"})
    return found


def find_floor(module):
    """The floor of a module. The package itself, which imports llm, is on that of llm."""
    room = f"{module}.".split(".")[1] or "llm"
    (floor,) = [number for number, rooms in enumerate(FLOORS) if room in rooms]
    return floor


def is_forbidden(module, target):
    if target.partition(".")[0] == "torch":
        return module in WITHOUT_TORCH
    return target in SOURCES and find_floor(target) < find_floor(module)


def test_imports_point_down():
    imports = {module: find_imports(module, source) for module, source in SOURCES.items()}
    wrong = []
    for module, targets in imports.items():
        wrong += [f"{module} imports {each}" for each in targets if is_forbidden(module, each)]
    assert wrong == []
    graph = {module: targets & imports.keys() for module, targets in imports.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError for a circle


# --- The core alone

OPTIONAL = ("llm.py", "chat.py", "features", "trace", "server", "benchmark", "kernels")
SCRIPT = """
import json, os, sys
from nanovllm import sampling_params
from nanovllm.config import Config
from nanovllm.engine.llm_engine import LLMEngine

assert sampling_params.__file__.startswith(os.getcwd())
for model, options, prompts, settings in json.load(sys.stdin):
    engine = LLMEngine(Config(model, enable_kernels=False, **options))
    params = [sampling_params.SamplingParams(**each) for each in settings]
    ids = [engine.add_request(*each) for each in zip(prompts, params, strict=True)]
    outputs = {}
    while not engine.is_finished():
        outputs.update({output["request_id"]: output for output in engine.step()})
    print(json.dumps([[outputs[request_id] for request_id in ids], engine.stats]))
"""


def test_the_core_stands_alone(tiny, tmp_path, monkeypatch):
    """A copy of the package without its optional rooms serves a model in float32 and bfloat16."""
    ignored = shutil.ignore_patterns(*OPTIONAL, "demo_model", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "nanovllm", ignore=ignored)
    (tmp_path / "nanovllm" / "__init__.py").write_text("")
    prompts = [random_prompt(i // 2, 1 + 9 * (i // 2)) for i in range(12)]
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": 24, "max_num_batched_tokens": 40}
    in_float32 = tiny[0], options, prompts, [{"temperature": 0.0, "max_tokens": 12}] * 12
    params = [{}, {"top_k": 5, "top_p": 0.9}, {"repetition_penalty": 1.2, "logprobs": 2}]
    in_bfloat16 = tiny[0], {**options, "dtype": "bfloat16"}, prompts[-3:], params
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = start("-c", SCRIPT, input=json.dumps([in_float32, in_bfloat16]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (outputs, stats), (outputs_16, _) = map(json.loads, done.stdout.splitlines())
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["token_ids"] == tiny[1](prompt, 12)
    assert stats["num_cached_tokens"]
    assert stats["num_preemptions"]
    assert [output["finish_reason"] for output in outputs_16] == ["length"] * 3


def test_enable_kernels(tiny, monkeypatch):
    """With False, only files of the tour run, in float32 and 16 bits, on one rank and on two."""
    parts = [
        (decoder.DecoderLayer, "forward"),
        (decoder.Attention, "forward"),
        (decoder.MLP, "forward"),
        (RMSNorm, "forward"),
        (decoder, "apply_rotary"),
        (attention, "store_kvcache"),
        (attention, "attend"),
        (sampler, "gumbel_noise"),
        (sampler, "filter_logits"),
    ]
    called = set()

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*args, **options):
            called.add((owner, name))
            return original(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    for part in parts:
        watch(*part)
    prompts = [random_prompt(i, 5 + 9 * i) for i in range(3)]
    for options in ({}, {"dtype": "bfloat16"}, {"tensor_parallel_size": 2}):
        called.clear()
        with LLM(tiny[0], num_kvcache_blocks=64, enable_kernels=False, **options) as llm:
            outputs = generate_ids(llm, prompts, greedy(8))
            llm.generate(prompts, SamplingParams(max_tokens=2, top_p=0.9))
        assert called == set(parts), options
        if "dtype" not in options:
            assert outputs == [tiny[1](prompt, 8) for prompt in prompts]
