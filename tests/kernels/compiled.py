"""Compiles the Triton kernels for GPUs that are not here, as the engine launches them, and reads what came out.

    python tests/kernels/compiled.py 90              the kernels of a few models on sm_90, a line of JSON each
    python tests/kernels/compiled.py 90 --all        of many models: all numbers of heads, sizes and dtypes that matter to a kernel
    python tests/kernels/compiled.py 90 --serving    what an engine compiles at its start and while it serves
    python tests/kernels/compiled.py 90 --twice      what a step launches, and what it launches when it has all been compiled

Triton gets a driver that claims to drive such a GPU, and whose launches do nothing. Layers and launchers are the engine's
own, on CPU tensors: so tiles, warps, stages and the specialisation of arguments are those of real launches. The compiler
and the tool that reads its output come with Triton. A process of its own, since the other tests interpret the kernels.
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

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton")
os.environ["TRITON_DEFAULT_FP_FUSION"] = (
    "0"  # as of Triton 3.10: the kernels must ask for it themselves
)
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
from nanovllm.kernels.cuda import attention, attention_kernels, graphs, layers, sampler
from nanovllm.layers.rotary import RopeSpec
from nanovllm.layers.sampler import Sampler
from nanovllm.models.decoder import DecoderSpec
from nanovllm.packing import pack, unpack

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_LIMIT = {
    80: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}  # bytes of a block
MATRIX = {"wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma": r"\bmma\.sync"}
BLOCK_SIZE = 16


class FakeDriver:
    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.launched: list[list[str]] = []
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (
                1,
                1,
                0,
                0,
                1024,
            ),  # module, function, registers, spills, threads at most
            unload_module=lambda *_: None,
            get_device_properties=lambda *_: {
                "max_shared_mem": SHARED_LIMIT[arch],
                "multiprocessor_count": 132,
            },
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
        return lambda *arguments, **options: self.launched.append(
            [source.fn.__name__, *map(describe, arguments)]
        )


def describe(argument: object) -> str:
    if isinstance(argument, torch.Tensor):
        return f"{argument.dtype} {list(argument.shape)}"
    return repr(argument) if isinstance(argument, (int, float, tuple)) else type(argument).__name__


def make_spec(dtype: torch.dtype, head_dim: int, group_size: int, **options) -> DecoderSpec:
    sizes = dict(
        hidden_size=1024,
        intermediate_size=3072,
        vocab_size=4100,
        num_layers=2,
        max_len=4096,
        norm_eps=1e-6,
    )
    options = {
        "tie_embeddings": True,
        "rope": RopeSpec.from_base(1e4, head_dim),
        **sizes,
        **options,
    }
    return DecoderSpec(
        num_heads=2 * group_size, num_kv_heads=2, head_dim=head_dim, dtype=dtype, **options
    )


@torch.inference_mode()
def launch(spec: DecoderSpec) -> None:
    """A mixed step, and sampling from its logits in all ways."""
    device = torch.device("cuda")
    model = spec.make_model(attention)
    kernels.kernelize(model, device, spec.dtype)
    kv_caches = [
        torch.empty(2, 8, BLOCK_SIZE, 2, spec.head_dim, dtype=spec.dtype)
        for _ in range(spec.num_layers)
    ]
    batch = worker.copy_to(
        make_batch([1, 5, 33], [300, 5, 133], torch.zeros(3, 19, dtype=torch.int32)), device
    )
    logits = model.compute_logits(model(batch, kv_caches))
    rows = torch.arange(3)
    noise = {"temperatures": torch.ones(3), "noise_keys": torch.ones(3, 2, dtype=torch.int32)}
    filters = {
        "filtered_rows": rows,
        "filtered_temperatures": torch.ones(3),
        "top_ks": rows + 1,
        "top_ps": torch.ones(3),
    }
    sampler = Sampler(spec.vocab_size)
    kernels.kernelize(sampler, device, spec.dtype)
    launch_sampler(sampler, logits, SamplingBatch(**noise))
    filters["min_ps"] = torch.ones(3)
    launch_sampler(sampler, logits, SamplingBatch(**noise, **filters, max_top_k=spec.vocab_size))


def inspect(kernel: triton.compiler.CompiledKernel) -> dict:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", "--dump-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", code)}
    constants = {
        kernel.src.fn.arg_names[path[0]]: value for path, value in kernel.src.constants.items()
    }
    return {
        "kernel": kernel.metadata.name,
        "is_decode": constants.get("IS_DECODE"),
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],  # bytes of a thread
        "shared": kernel.metadata.shared,
        "fuses": kernel.metadata.enable_fp_fusion,  # a product and a sum in one instruction, rounded once
        "loops": sorted(find_loops(code)),
        "matrix": [
            name for name, pattern in MATRIX.items() if re.search(pattern, kernel.asm["ptx"])
        ],
    }


def find_loops(code: str) -> Iterator[int]:
    """The numbers of instructions of the loops that have no loop inside."""
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
    for module in (attention, attention_kernels, layers, sampler):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                for cache, *_ in kernel.device_caches.values():
                    yield from cache.values()


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FEW = [(BF16, 128, 2), (F16, 64, 7), (F32, 128, 2)]  # dtype, head_dim, group_size
ALL = list(product((BF16, F16, F32), (64, 80, 96, 128, 256), (1, 2, 4, 7, 8, 16)))


def compile_all(models: list[tuple[torch.dtype, int, int]]) -> None:
    seen: set[int] = set()
    for dtype, head_dim, group_size in models:
        launch(make_spec(dtype, head_dim, group_size, qk_norm=group_size % 2 == 0))
        for kernel in find_compiled():
            if id(kernel) not in seen:
                seen.add(id(kernel))
                setting = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "head_dim": head_dim,
                    "group_size": group_size,
                }
                print(json.dumps({**setting, **inspect(kernel)}), flush=True)


def launch_twice(arch: int) -> None:
    """What is launched, and by Triton's own way or directly."""
    fake, run, ways = FakeDriver(arch), JITFunction.run, []
    driver.set_active(fake)
    JITFunction.run = lambda self, *args, **options: (
        ways.append(self.__name__),
        run(self, *args, **options),
    )[1]
    for _ in range(2):
        fake.launched, ways[:] = [], []
        launch(make_spec(torch.bfloat16, 128, 2, qk_norm=True))
        print(json.dumps({"launched": fake.launched, "searched": ways}))


LIFE = {  # lengths of prompts, and what their sampling params say
    "greedy": ([20], {"temperature": 0.0}),
    "lengths of 1 to 33": ([1, 2, 15, 16, 17, 31, 32, 33], {"temperature": 0.0}),
    "33 of 100, sampled": ([100] * 33, {}),
    "top-p": ([50, 3], {"top_p": 0.5}),
    "top-k": ([7] * 5, {"top_k": 5}),
    "all filters": ([70] * 3, {"top_p": 0.9, "top_k": 900, "min_p": 0.1}),
    "penalties": ([9, 30], {"presence_penalty": 0.5}),
    "penalties, greedy": ([9, 30], {"temperature": 0.0, "repetition_penalty": 1.5}),
    "logprobs": ([9], {"logprobs": 3}),
    "1,500 tokens": ([1500], {}),
    "one token": ([1], {}),
}


def serve(num_heads: int, num_kv_heads: int, vocab_size: int, enforce_eager: bool) -> None:
    """A life of an engine on CPU tensors, whose kernels do nothing: all tokens are 0."""
    attention.reason_unavailable = lambda *_: None
    graphs.capture = lambda step, device, previous: (SimpleNamespace(replay=lambda: None), step())
    model_runner.find_logprobs = lambda logits, tokens, rows: [{0: 0.0} for _ in rows]
    Sampler.forward = launch_sampler
    with tempfile.TemporaryDirectory() as directory:
        Qwen3Config(
            architectures=["Qwen3ForCausalLM"], vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
            num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=64, max_position_embeddings=2048,
            tie_word_embeddings=True, dtype="bfloat16",
        ).save_pretrained(directory)  # fmt: skip
        options = {
            "max_num_seqs": 40,
            "max_num_batched_tokens": 512,
            "num_kvcache_blocks": 600,
            "enforce_eager": enforce_eager,
        }
        llm = LLM(
            directory, load_format="dummy", attention_backend="triton", device="cpu", **options
        )
    parts = ["start"]
    triton.knobs.runtime.jit_post_compile_hook = lambda **details: print(
        json.dumps({"part": parts[-1], "kernel": details["fn"].name}), flush=True
    )
    runner, executor = llm.model_runner, llm.model_runner.executor.worker
    if not enforce_eager:
        with torch.inference_mode():
            sizes = graphs.list_batch_sizes(40)
            executor.graphs = graphs.CudaGraphs(
                executor.model, executor.kv_caches, sizes, executor.block_table_width
            )
    for query_lens in ([2, 1], [1]):  # the start of an engine on a GPU
        batch = executor._make_dummy_batch(query_lens)
        profile_sampling(runner.sample, executor.max_model_len, executor.compute(batch))
    for part, (lengths, params) in LIFE.items():
        parts.append(part)
        prompts = [
            [(i * 7 + j) % vocab_size for j in range(length)] for i, length in enumerate(lengths)
        ]
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=4, ignore_eos=True, **params), use_tqdm=False
        )
        assert all(len(output["token_ids"]) == 4 for output in outputs)


plain_forward = Sampler.forward


def launch_sampler(sampler: Sampler, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    with suppress(RuntimeError, IndexError):  # torch gathers by numbers that no kernel has written
        plain_forward(sampler, logits, batch)
    return torch.zeros(len(logits), dtype=torch.int64)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("arch", type=int, choices=SHARED_LIMIT)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--serving", action="store_true")
    parser.add_argument("--twice", action="store_true")
    args = parser.parse_args()
    driver.set_active(FakeDriver(args.arch))
    kernels.find_optimized_layers = lambda device_type, dtype: layers.OPTIMIZED_LAYERS
    worker.copy_to = lambda batch, device: unpack(
        pack(batch)
    )  # its tensors lie in one, as on a GPU
    attention._describe_gpu = lambda device: (args.arch // 10, 132)
    if args.twice:
        launch_twice(args.arch)
    elif args.serving:
        serve(16, 8, 20_000, enforce_eager=False)
        serve(14, 2, 1009, enforce_eager=True)
    else:
        compile_all(ALL if args.all else FEW)
