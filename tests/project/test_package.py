"""Which module may import which, and that the engine is complete without kernels.

Each rule is also broken on purpose.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from conftest import VOCAB_SIZE, make_checkpoint, random_prompt

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
    "packing": {"batch"},
    "layers": {"batch", "layers", "arithmetic"},
    "models": {"batch", "layers", "models", "checks", "config"},
    "kernels": {"arithmetic", "batch", "layers", "models", "kernels", "backends", "packing"},
    "trace": {"arithmetic", "batch", "config", "engine", "models", "terminal", "trace"},
    "backends": set(),
}
REGISTRY = "nanovllm.backends"  # names modules, which nanovllm.kernels imports
MAY_IMPORT_KERNELS = {"nanovllm.engine.worker", "nanovllm.engine.model_runner"}
# Rare mechanisms, which the rest of the engine does not know.
OUTSIDE_THE_CORE = (
    "nanovllm.engine.speculation",
    "nanovllm.engine.turns",
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
    """Map module names to sources, without the demo model's training script."""
    paths = [
        path.relative_to(PACKAGE.parent)
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "demo_model"
    ]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {name: (PACKAGE.parent / path).read_text() for name, path in zip(names, paths)}


def find_imports(source, modules):
    """The modules that `source` imports, also in functions and for type checkers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from [name if name in modules else node.module for name in names]


def find_names(source, modules):
    """The modules that `source` names in quotes, for import_module."""
    constants = [
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)
    ]
    return {value for value in constants if isinstance(value, str)} & modules - {"nanovllm"}


def is_wrong(name, target):
    """Return whether module `name` must not import `target`."""
    (_, part), (package, target_part) = ([*module.split("."), ""][:2] for module in (name, target))
    if package != "nanovllm":
        return package == "torch" and name in WITHOUT_TORCH
    if part in MAY_IMPORT and target_part not in MAY_IMPORT[part]:
        return True
    if target_part == "kernels" and part != "kernels":
        return name not in MAY_IMPORT_KERNELS
    if part == "engine" and not name.startswith(OUTSIDE_THE_CORE):
        if target.startswith(OUTSIDE_THE_CORE):
            return True
    return part == "engine" and target_part in ("llm", "")  # the package itself imports llm


def find_wrong_imports(sources):
    imports = {name: set(find_imports(source, set(sources))) for name, source in sources.items()}
    for name, source in sources.items():
        importer = "nanovllm.kernels" if name == REGISTRY else name
        imports[importer] |= find_names(source, set(sources))
    wrong = [
        f"{name} imports {target}"
        for name in imports
        for target in imports[name]
        if is_wrong(name, target)
    ]
    try:
        TopologicalSorter(
            {name: targets & imports.keys() for name, targets in imports.items()}
        ).prepare()
    except CycleError as error:
        wrong.append(f"circle: {error.args[1]}")
    return wrong


def test_imports_point_down():
    assert find_wrong_imports(read_sources()) == []


@pytest.mark.parametrize(
    "module, line, target",
    [
        ("batch", "from nanovllm.checks import naming", "nanovllm.checks"),
        ("batch", "import nanovllm", "nanovllm"),
        (
            "backends",
            "from nanovllm.kernels.cpu import attention",
            "nanovllm.kernels.cpu.attention",
        ),
        ("backends", "from nanovllm.layers.attention import Backend", "nanovllm.layers.attention"),
        ("backends", "import torch", "torch"),
        ("config", "from nanovllm.kernels import select_backend", "nanovllm.kernels"),
        ("layers.norm", "from nanovllm.models.decoder import MLP", "nanovllm.models.decoder"),
        ("layers.norm", "from nanovllm import kernels", "nanovllm.kernels"),
        ("layers.norm", "from nanovllm.checks import naming", "nanovllm.checks"),
        (
            "models.decoder",
            "def load():\n    import nanovllm.kernels.cpu.layers",
            "nanovllm.kernels.cpu.layers",
        ),
        (
            "models.decoder",
            "from nanovllm.engine.sequence import Sequence",
            "nanovllm.engine.sequence",
        ),
        ("kernels.cpu.layers", "from nanovllm.config import Config", "nanovllm.config"),
        ("kernels.cuda.graphs", "from nanovllm.engine import executor", "nanovllm.engine.executor"),
        ("engine.llm_engine", "from nanovllm.kernels import kernelize", "nanovllm.kernels"),
        (
            "engine.memory",
            "import_module('nanovllm.kernels.cpu.library')",
            "nanovllm.kernels.cpu.library",
        ),
        ("llm", "from nanovllm import kernels", "nanovllm.kernels"),
        ("engine.request", "from nanovllm.llm import LLM", "nanovllm.llm"),
        ("engine.request", "from nanovllm import LLM", "nanovllm"),
        (
            "engine.scheduler",
            "from nanovllm.engine import speculation",
            "nanovllm.engine.speculation",
        ),
        (
            "engine.llm_engine",
            "from nanovllm.trace.recorder import Timeline",
            "nanovllm.trace.recorder",
        ),
        ("engine.scheduler", "import torch", "torch"),
        ("engine.block_manager", "from torch.nn import Module", "torch.nn"),
        ("engine.sequence", "if TYPE_CHECKING:\n    from torch import Tensor", "torch"),
    ],
)
def test_a_wrong_import_is_found(module, line, target):
    sources = read_sources()
    sources[f"nanovllm.{module}"] += f"\n{line}\n"
    assert f"nanovllm.{module} imports {target}" in find_wrong_imports(sources)


@pytest.mark.parametrize(
    "module, line",
    [
        (
            "engine.sequence",
            "if TYPE_CHECKING:\n    from nanovllm.engine.scheduler import Scheduler",
        ),
        ("checks", "def check():\n    from nanovllm.sampling_params import SamplingParams"),
        ("layers.norm", "from nanovllm.layers import norm"),
    ],
)
def test_a_circle_is_found(module, line):
    sources = read_sources()
    sources[f"nanovllm.{module}"] += f"\n{line}\n"
    (wrong,) = find_wrong_imports(sources)
    assert wrong.startswith("circle") and f"nanovllm.{module}" in wrong


def test_registered_modules_are_imported_by_kernels():
    sources = read_sources()
    sources["nanovllm.kernels.cuda.attention"] += "\nfrom nanovllm.kernels import kernelize\n"
    (wrong,) = find_wrong_imports(sources)
    assert wrong.startswith("circle") and "nanovllm.kernels.cuda.attention" in wrong


# --- A whole engine without kernels


class WithoutKernels(ast.NodeTransformer):
    """Removes imports of nanovllm.kernels and the code that depends on enable_kernels."""

    def visit_ImportFrom(self, node):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return None if any(name.startswith("nanovllm.kernels") for name in names) else node

    def visit_If(self, node):
        return None if "enable_kernels" in ast.unparse(node.test) else node


@pytest.fixture(scope="module")
def plain_package(tmp_path_factory):
    """A copy of the package without nanovllm/kernels and the engine's uses of it."""
    folder = tmp_path_factory.mktemp("without_kernels")
    ignored = shutil.ignore_patterns("kernels", "demo_model", "__pycache__")
    shutil.copytree(PACKAGE, folder / "nanovllm", ignore=ignored)
    for path in (folder / "nanovllm" / "engine").glob("*.py"):
        source = ast.unparse(WithoutKernels().visit(ast.parse(path.read_text())))
        assert not re.search(r"\bkernels\.\w", source)
        path.write_text(source)
    return folder


SCRIPT = """
import json, sys, nanovllm

folder, model, options, prompts, params = json.loads(sys.argv[1])
assert nanovllm.__file__.startswith(folder)
with nanovllm.LLM(model, **options) as llm:
    params = [nanovllm.SamplingParams(**settings) for settings in params]
    print(json.dumps([llm.generate(prompts, params, use_tqdm=False), llm.stats]))
"""


def generate(folder, model, options, prompts, params):
    """Outputs and stats of an engine in another process, with the package in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([str(folder), model, options, prompts, params])],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_tokens_without_kernels(plain_package, tiny):
    """They match transformers, with chunks, prefix hits and preemptions."""
    prompts = [random_prompt(i // 2, 1 + 9 * (i // 2)) for i in range(12)]
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": 24, "max_num_batched_tokens": 40}
    outputs, stats = generate(
        plain_package, tiny[0], options, prompts, [{"temperature": 0.0, "max_tokens": 12}] * 12
    )
    assert [output["token_ids"] for output in outputs] == [
        tiny[1](prompt, 12) for prompt in prompts
    ]
    assert stats["num_cached_tokens"] and stats["num_preemptions"]


def test_bfloat16_without_kernels(plain_package, tmp_path):
    make_checkpoint(tmp_path, dtype=torch.bfloat16)
    settings = [
        {"temperature": 0.0},
        {},
        {"top_k": 5, "top_p": 0.9},
        {"repetition_penalty": 1.2, "logprobs": 2},
    ]
    params = [{"max_tokens": 12, **each} for each in settings]
    prompts = [random_prompt(i, 10 + 20 * i) for i in range(4)]
    outputs, _ = generate(plain_package, str(tmp_path), {"num_kvcache_blocks": 64}, prompts, params)
    for output in outputs:
        assert output["finish_reason"] == "length" and len(output["token_ids"]) == 12
        assert all(0 <= token_id < VOCAB_SIZE for token_id in output["token_ids"])


def test_enable_kernels(tiny, monkeypatch):
    """If it is False, only files of the tour run, in float32 and 16 bits, on one rank and on two."""
    met: set[str] = set()
    parts = [
        (decoder.DecoderLayer, "forward"), (decoder.Attention, "forward"), (decoder.MLP, "forward"), (RMSNorm, "forward"),
        (decoder, "apply_rotary"), (attention, "store_kvcache"), (attention, "attend"), (sampler, "gumbel_noise"),
        (sampler, "filter_logits"),
    ]  # fmt: skip
    for owner, name in parts:
        original = getattr(owner, name)
        part = f"{owner.__name__}.{name}"
        monkeypatch.setattr(
            owner,
            name,
            lambda *args, part=part, original=original, **options: (
                met.add(part),
                original(*args, **options),
            )[1],
        )
    prompts = [random_prompt(i, 5 + 9 * i) for i in range(3)]
    for options in ({}, {"dtype": "bfloat16"}, {"tensor_parallel_size": 2}):
        with LLM(tiny[0], num_kvcache_blocks=64, enable_kernels=False, **options) as llm:
            outputs = llm.generate(
                prompts, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False
            )
            llm.generate(prompts, SamplingParams(max_tokens=2, top_p=0.9), use_tqdm=False)
        assert met == {f"{owner.__name__}.{name}" for owner, name in parts}, options
        met.clear()
        if "dtype" not in options:
            assert [output["token_ids"] for output in outputs] == [
                tiny[1](prompt, 8) for prompt in prompts
            ]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"])
def test_enable_kernels_and_a_backend_of_theirs(tiny, backend):
    with pytest.raises(
        ValueError, match=f"attention_backend='{backend}' needs enable_kernels=True"
    ):
        LLM(tiny[0], enable_kernels=False, attention_backend=backend)
    LLM(tiny[0], enable_kernels=False, attention_backend="torch", num_kvcache_blocks=8).exit()
