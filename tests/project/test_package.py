"""Modules import only what their part of the package may, and the engine works without kernels.

The tests also break each rule about imports once.
"""

import ast
import json
import re
import shutil
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from conftest import generate_ids, greedy, random_prompt
from project_helpers import start

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.backends import BACKENDS
from nanovllm.layers import attention, sampler
from nanovllm.layers.norm import RMSNorm
from nanovllm.models import decoder

PACKAGE = Path(nanovllm.__file__).parent

# --- Imports point down

MAY_IMPORT = {  # part of the package -> parts
    "batch": set(),
    "arithmetic": set(),
    "backends": set(),
    "packing": {"batch"},
    "transfers": {"batch", "packing"},
    "layers": {"batch", "layers", "arithmetic"},
    "models": {"arithmetic", "batch", "layers", "models", "checks", "config"},
    "kernels": {
        "arithmetic",
        "backends",
        "batch",
        "kernels",
        "layers",
        "models",
        "packing",
        "transfers",
        "terminal",
    },
    "trace": {
        "arithmetic",
        "batch",
        "checks",
        "config",
        "engine",
        "models",
        "terminal",
        "trace",
        "vocabulary",
    },
}
MAY_IMPORT_KERNELS = {"nanovllm.worker.worker", "nanovllm.engine.model_runner"}
# Rare mechanisms, which the rest of the engine does not know.
OUTSIDE_THE_CORE = (
    "nanovllm.features.speculation.drafts",
    "nanovllm.features.structured_outputs.grammars",
    "nanovllm.features.structured_outputs.masks",
    "nanovllm.features.thread_safety",
    "nanovllm.trace",
    "nanovllm.server",
)
WITHOUT_TORCH = {
    "nanovllm.backends",
    "nanovllm.engine.scheduler",
    "nanovllm.engine.block_manager",
    "nanovllm.engine.sequence",
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


@cache
def find_imports(module, source):
    """Return the modules that `source` imports, also in functions and for type checkers.

    Strings that name a module count, because import_module may get them. In the registry of
    backends they count as imports of nanovllm.kernels.
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
        elif isinstance(node, ast.Constant) and module != "nanovllm.backends":
            found.update({node.value} & SOURCES.keys() - {"nanovllm"})
    if module == "nanovllm.kernels":
        found.update(registration.module for registration in BACKENDS.values())
    return found


def find_part(module):
    """The part of the package that a module belongs to. Empty for the package itself."""
    return f"{module}.".split(".")[1]


def is_forbidden(module, target):
    if target.partition(".")[0] == "torch":
        return module in WITHOUT_TORCH
    if target not in SOURCES:
        return False
    part, target_part = find_part(module), find_part(target)
    if target_part not in MAY_IMPORT.get(part, {target_part}):
        return True
    if target_part == "kernels" and part != "kernels":
        return module not in MAY_IMPORT_KERNELS
    if part != "engine":
        return False
    is_core = not module.startswith(OUTSIDE_THE_CORE)
    is_above = target_part in ("llm", "")  # the package itself imports llm
    return is_above or (is_core and target.startswith(OUTSIDE_THE_CORE))


def find_wrong_imports(sources):
    imports = {module: find_imports(module, source) for module, source in sources.items()}
    wrong = []
    for module, targets in imports.items():
        wrong += [f"{module} imports {each}" for each in targets if is_forbidden(module, each)]
    graph = {module: targets & imports.keys() for module, targets in imports.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        wrong.append(f"circle: {error.args[1]}")
    return wrong


def test_imports_point_down():
    assert find_wrong_imports(SOURCES) == []


def add_line(module, line):
    name = f"nanovllm.{module}"
    return {**SOURCES, name: f"{SOURCES[name]}\n{line}\n"}


@pytest.mark.parametrize(
    "module, line",
    [
        ("batch", "from nanovllm.utils.checks import naming"),
        ("batch", "import nanovllm"),
        ("arithmetic", "from nanovllm.utils.checks import naming"),
        ("packing", "from nanovllm.utils.checks import naming"),
        ("backends", "from nanovllm.kernels.cpu import attention"),
        ("backends", "import torch"),
        ("config", "from nanovllm.kernels import select_backend"),
        ("layers.norm", "from nanovllm.models.decoder import MLP"),
        ("layers.norm", "from nanovllm import kernels"),
        ("models.decoder", "def load():\n    import nanovllm.kernels.cpu.layers"),
        ("models.decoder", "from nanovllm.engine.sequence import Sequence"),
        ("kernels.cpu.layers", "from nanovllm.config import Config"),
        ("trace.text", "from nanovllm.layers.norm import RMSNorm"),
        ("engine.llm_engine", "from nanovllm.kernels import kernelize"),
        ("engine.memory", "import_module('nanovllm.kernels.cpu.library')"),
        ("engine.request", "from nanovllm.llm import LLM"),
        ("engine.request", "from nanovllm import LLM"),
        ("engine.scheduler", "from nanovllm.engine import speculation"),
        ("engine.llm_engine", "from nanovllm.trace.recorder import Timeline"),
        ("engine.block_manager", "from torch.nn import Module"),
        ("engine.sequence", "if TYPE_CHECKING:\n    from torch import Tensor"),
    ],
)
def test_a_forbidden_import_is_found(module, line):
    first, *_ = find_wrong_imports(add_line(module, line))
    assert first.startswith(f"nanovllm.{module} imports")


@pytest.mark.parametrize(
    "module, line",
    [
        ("checks", "def check():\n    from nanovllm.sampling_params import SamplingParams"),
        ("layers.norm", "from nanovllm.layers import norm"),
        ("kernels.cuda.attention", "from nanovllm.kernels import kernelize"),
    ],
)
def test_a_circle_is_found(module, line):
    (wrong,) = find_wrong_imports(add_line(module, line))
    assert wrong.startswith("circle")
    assert module in wrong


# --- A whole engine without kernels


class WithoutKernels(ast.NodeTransformer):
    """Removes imports of nanovllm.kernels and the code that depends on enable_kernels."""

    def visit_ImportFrom(self, node):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return None if any(name.startswith("nanovllm.kernels") for name in names) else node

    def visit_If(self, node):
        return None if "enable_kernels" in ast.unparse(node.test) else node


SCRIPT = """
import json, os, sys, nanovllm

assert nanovllm.__file__.startswith(os.getcwd())
for model, options, prompts, params in json.load(sys.stdin):
    with nanovllm.LLM(model, **options) as llm:
        params = [nanovllm.SamplingParams(**settings) for settings in params]
        print(json.dumps([llm.generate(prompts, params, use_tqdm=False), llm.stats]))
"""


def test_the_engine_is_complete_without_kernels(tiny, tmp_path, monkeypatch):
    """A copy of the package without nanovllm/kernels serves a model in float32 and in bfloat16."""
    ignored = shutil.ignore_patterns("kernels", "demo_model", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "nanovllm", ignore=ignored)
    for path in (tmp_path / "nanovllm" / "engine").glob("*.py"):
        source = ast.unparse(WithoutKernels().visit(ast.parse(path.read_text())))
        assert not re.search(r"\bkernels\.\w", source)
        path.write_text(source)

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
            llm.generate(prompts, SamplingParams(max_tokens=2, top_p=0.9), use_tqdm=False)
        assert called == set(parts), options
        if "dtype" not in options:
            assert outputs == [tiny[1](prompt, 8) for prompt in prompts]
