"""Compiles the Triton kernels for GPUs that are not here, and inspects the machine code.

    python tests/kernels/compiled.py 90              kernels of a few models on sm_90, as JSON lines
    python tests/kernels/compiled.py 90 --all        the same for many models
    python tests/kernels/compiled.py 90 --serving    what an engine compiles at start and afterwards

Triton gets a driver that claims to drive such a GPU, and whose launches do nothing. Layers and
launchers are the engine's own, on CPU tensors, so tiles, warps, stages and the specialization of
arguments are those of real launches. The compiler and the disassembler come with Triton. This is a
process of its own, because the other tests interpret the kernels.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton")
# The default from Triton 3.10 on. The kernels must request fusion themselves.
os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import torch
import triton
from conftest import make_batch
from transformers import Qwen3Config
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from nanovllm import LLM, SamplingParams, kernels
from nanovllm.batch import SamplingBatch
from nanovllm.engine import model_runner, worker
from nanovllm.engine.memory import profile_sampling
from nanovllm.kernels.cuda import (
    attention,
    attention_kernels,
    graphs,
    layer_kernels,
    layers,
    sampler,
)
from nanovllm.layers.rotary import RopeSpec
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import DecoderSpec
from nanovllm.packing import pack, unpack

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of a block
MATRIX = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma": r"\bmma\.sync"}
BLOCK_SIZE = 16


class FakeDriver:
    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.launched: list[list[str]] = []
        properties = {"max_shared_mem": SHARED_LIMIT[arch], "multiprocessor_count": 132}
        # A module, a function, registers, spills and the largest number of threads.
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 1, 0, 0, 1024),
            unload_module=lambda *_: None,
            get_device_properties=lambda *_: properties,
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        def launch(*arguments: object, **options) -> None:
            self.launched.append([source.fn.__name__, *map(describe, arguments)])

        return launch


def describe(argument: object) -> str:
    if isinstance(argument, torch.Tensor):
        return f"{argument.dtype} {list(argument.shape)}"
    if isinstance(argument, (int, float, tuple)):
        return repr(argument)
    return type(argument).__name__


@torch.inference_mode()
def launch(dtype: torch.dtype, head_dim: int, group_size: int) -> None:
    """Launch a mixed step of a model, and sample from its logits with noise and filters."""
    spec = DecoderSpec(
        hidden_size=1024, intermediate_size=3072, vocab_size=4100, num_layers=2, max_len=4096,
        norm_eps=1e-6, tie_embeddings=True, rope=RopeSpec.from_base(1e4, head_dim), dtype=dtype,
        num_heads=2 * group_size, num_kv_heads=2, head_dim=head_dim, qk_norm=group_size % 2 == 0,
    )  # fmt: skip
    device = torch.device("cuda")
    model = spec.make_model(attention)
    kernels.kernelize(model, device, dtype)
    kv_caches = [torch.empty(2, 8, BLOCK_SIZE, 2, head_dim, dtype=dtype) for _ in range(2)]
    tables = torch.zeros(3, 19, dtype=torch.int32)
    batch = worker.copy_to(make_batch([1, 5, 33], [300, 5, 133], tables), device)
    logits = model.compute_logits(model(batch, kv_caches))
    sampler = Sampler(spec.vocab_size)
    kernels.kernelize(sampler, device, dtype)
    ones = torch.ones(3)
    noise = {"temperatures": ones, "noise_keys": torch.ones(3, 2, dtype=torch.int32)}
    filters = {
        "filtered_rows": torch.arange(3),
        "filtered_temperatures": ones,
        "top_ks": torch.arange(3) + 1,
        "top_ps": ones,
        "min_ps": ones,
        "max_top_k": spec.vocab_size,
    }
    launch_sampler(sampler, logits, SamplingBatch(**noise))
    launch_sampler(sampler, logits, SamplingBatch(**noise, **filters))


def inspect(kernel: triton.compiler.CompiledKernel) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", "--dump-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", code)}
    constants = {}
    for path, value in kernel.src.constants.items():
        constants[kernel.src.fn.arg_names[path[0]]] = value
    ptx = kernel.asm["ptx"]
    return {
        "kernel": kernel.metadata.name,
        "is_decode": constants.get("IS_DECODE"),
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],  # bytes of a thread
        "shared": kernel.metadata.shared,
        "fuses": kernel.metadata.enable_fp_fusion,
        "loops": sorted(find_loops(code)),
        "matrix": [name for name, pattern in MATRIX.items() if re.search(pattern, ptx)],
    }


def find_loops(code: str) -> Iterator[int]:
    """Yield the number of instructions of each innermost loop."""
    instructions = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)
    index = {int(address, 16): i for i, (address, _) in enumerate(instructions)}
    spans = []
    for i, (_, text) in enumerate(instructions):
        target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if target and index.get(int(target[1], 16), i) < i:
            spans.append((index[int(target[1], 16)], i))
    for first, last in spans:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans):
            yield last - first + 1


def find_compiled() -> Iterator[triton.compiler.CompiledKernel]:
    for module in (attention, attention_kernels, layer_kernels, sampler):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                for cache, *_ in kernel.device_caches.values():
                    yield from cache.values()


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FEW = {  # dtype, head_dim and group_size, by compute capability
    80: [(BF16, 128, 2), (F32, 128, 2)],
    90: [(BF16, 128, 2), (F16, 64, 7), (F32, 128, 2)],
    100: [(BF16, 128, 2)],
}
ALL = list(product((BF16, F16, F32), (64, 80, 96, 128, 256), (1, 2, 4, 7, 8, 16)))


def compile_all(models: list[tuple[torch.dtype, int, int]]) -> None:
    seen: set[int] = set()
    for dtype, head_dim, group_size in models:
        launch(dtype, head_dim, group_size)
        setting = {"dtype": str(dtype).removeprefix("torch."), "head_dim": head_dim}
        for kernel in find_compiled():
            if id(kernel) not in seen:
                seen.add(id(kernel))
                print(json.dumps({**setting, **inspect(kernel)}), flush=True)


def launch_twice(fake: FakeDriver) -> None:
    """Print the launches of two equal steps, and which of them went through Triton's dispatch."""
    dispatched = []
    run = JITFunction.run

    def record(kernel: JITFunction, *args: object, **options) -> object:
        dispatched.append(kernel.__name__)
        return run(kernel, *args, **options)

    with patch.object(JITFunction, "run", record):
        for _ in range(2):
            fake.launched.clear()
            dispatched.clear()
            launch(BF16, 128, 2)
            print(json.dumps({"launched": fake.launched, "dispatched": dispatched}))


LIFE = {  # prompt lengths and sampling params
    "lengths of 1 to 33": ([1, 2, 15, 16, 17, 31, 32, 33], {"temperature": 0.0}),
    "33 of 100, sampled": ([100] * 33, {}),
    "top-p": ([50, 3], {"top_p": 0.5}),
    "top-k": ([7] * 5, {"top_k": 5}),
    "all filters": ([70] * 3, {"top_p": 0.9, "top_k": 900, "min_p": 0.1}),
    "penalties, greedy": ([9, 30], {"temperature": 0.0, "repetition_penalty": 1.5}),
    "logprobs": ([9], {"logprobs": 3}),
    "1,500 tokens": ([1500], {}),
}


def serve(num_heads: int, num_kv_heads: int, vocab_size: int, enforce_eager: bool) -> None:
    """Run an engine on CPU tensors with kernels that do nothing. All tokens are 0."""
    attention.reason_unavailable = lambda *_: None
    graphs.capture = lambda step, device, previous: (SimpleNamespace(replay=lambda: None), step())
    model_runner.find_logprobs = lambda logits, tokens, nums: [{0: 0.0} for _ in nums]
    Sampler.forward = launch_sampler
    with tempfile.TemporaryDirectory() as directory:
        Qwen3Config(
            architectures=["Qwen3ForCausalLM"], vocab_size=vocab_size, hidden_size=64,
            intermediate_size=128, num_hidden_layers=1, num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads, head_dim=64, max_position_embeddings=2048,
            tie_word_embeddings=True, dtype="bfloat16",
        ).save_pretrained(directory)  # fmt: skip
        llm = LLM(
            directory, load_format="dummy", attention_backend="triton", device="cpu",
            max_num_seqs=40, max_num_batched_tokens=512, num_kvcache_blocks=600,
            enforce_eager=enforce_eager,
        )  # fmt: skip
    part = "start"

    def report(fn: JITFunction, **_) -> None:
        print(json.dumps({"part": part, "kernel": fn.name}), flush=True)

    triton.knobs.runtime.jit_post_compile_hook = report
    runner = llm.model_runner
    rank = runner.executor.worker
    if not enforce_eager:
        sizes = graphs.list_batch_sizes(40)
        with torch.inference_mode():
            rank.graphs = graphs.CudaGraphs(
                rank.model, rank.kv_caches, sizes, rank.block_table_width
            )
    for query_lens in ([2, 1], [1]):  # as at the start of an engine on a GPU
        logits = rank.compute(rank._make_dummy_batch(query_lens))
        profile_sampling(runner.sample, rank.max_model_len, logits)
    for name, (lengths, settings) in LIFE.items():
        part = name
        prompts = []
        for i, length in enumerate(lengths):
            prompts.append([(i * 7 + j) % vocab_size for j in range(length)])
        params = SamplingParams(max_tokens=4, ignore_eos=True, **settings)
        for output in llm.generate(prompts, params, use_tqdm=False):
            assert len(output["token_ids"]) == 4


plain_forward = Sampler.forward


def launch_sampler(sampler: Sampler, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    # torch gathers with indices that no kernel has written.
    with suppress(RuntimeError, IndexError):
        plain_forward(sampler, logits, batch)
    return torch.zeros(len(logits), dtype=torch.int64)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arch", type=int, choices=SHARED_LIMIT)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--serving", action="store_true")
    args = parser.parse_args()
    fake = FakeDriver(args.arch)
    driver.set_active(fake)
    kernels.find_optimized_layers = lambda device_type, dtype: layers.OPTIMIZED_LAYERS
    # The tensors of a batch are parts of one, as on a GPU.
    worker.copy_to = lambda batch, device: unpack(pack(batch))
    attention._describe_gpu = lambda device: (args.arch // 10, 132)
    if args.serving:
        serve(16, 8, 20_000, enforce_eager=False)
        serve(14, 2, 1009, enforce_eager=True)
    elif args.all:
        compile_all(ALL)
    else:
        launch_twice(fake)
        compile_all(FEW[args.arch])
