"""Compiles the Triton kernels for GPUs that are not here, and inspects the machine code.

    python tests/kernels/compiled.py 90              kernels of a few models on sm_90, as JSON lines
    python tests/kernels/compiled.py 90 --serving    what an engine compiles at start and afterwards

Several GPUs can be given, as in `compiled.py 80 90 100`. Triton gets a driver that claims to drive
such a GPU, and whose launches do nothing. Layers and launchers are the engine's own, on CPU
tensors, so tiles, warps, stages and the specialization of arguments are those of real launches. The
compiler and the disassembler come with Triton. This is a process of its own, because the other
tests interpret the kernels.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton")
# The default from Triton 3.10 on. The kernels must request fusion themselves.
os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import torch
import torch.nn.functional as F
import triton
from conftest import make_batch, make_checkpoint, make_sampling_batch
from kernel_helpers import make_delta_rule, make_delta_step, make_spec
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from nanovllm import LLM, SamplingParams
from nanovllm.batch.packing import pack, unpack
from nanovllm.engine import model_runner
from nanovllm.kernels import kernelize, replacement
from nanovllm.kernels.cuda import attention, gated_delta, graphs, layers, linear, moe
from nanovllm.layers.attention import AttentionShape
from nanovllm.layers.linear import ColumnParallelLinear
from nanovllm.layers.quantized import INT4, INT8
from nanovllm.layers.rotary import RopeSpec
from nanovllm.layers.sampler import Sampler
from nanovllm.models.moe import Experts
from nanovllm.worker import worker
from nanovllm.worker.dummy_steps import make_dummy_batch, run_dummy_step
from nanovllm.worker.startup import make_step

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_LIMIT = {
    75: 64 << 10,
    80: 163 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
}  # bytes of a block
MATRIX_INSTRUCTIONS = ["mma.sync", "wgmma", "tcgen05.mma"]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MODELS = {  # dtype, head_dim and group_size, by compute capability
    75: [(F16, 128, 2)],
    80: [(BF16, 64, 8), (F32, 128, 7)],
    89: [(BF16, 128, 2), (F16, 256, 1)],
    90: [(BF16, 128, 2), (BF16, 256, 4)],
    100: [(BF16, 128, 2)],
}


def make_driver(arch):
    """Make the driver of a GPU. Its launches do nothing."""
    utils = SimpleNamespace(
        # A module, a function, registers, spills and the largest number of threads.
        load_binary=lambda *_: (1, 1, 0, 0, 1024),
        unload_module=lambda module: None,
        # Triton raises OutOfResources for a kernel that needs more.
        get_device_properties=lambda device: {"max_shared_mem": SHARED_LIMIT[arch]},
    )
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=lambda *_: lambda *arguments: None,
        utils=utils,
    )


@torch.inference_mode()
def launch_model(dtype, head_dim, group_size):
    """Launch a mixed step of a model, and sample from its logits with noise and filters."""
    # Some models have partial RoPE.
    rotary_dim = head_dim if group_size % 4 != 0 else head_dim // 4 * 3
    spec = make_spec(
        dtype, head_dim, hidden_size=1024, intermediate_size=3072, vocab_size=4100, max_len=4096,
        num_heads=2 * group_size, num_kv_heads=2, qk_norm=group_size % 2 == 0,
        windows=(None, 100), ropes=(RopeSpec.from_base(1e4, rotary_dim),),
    )  # fmt: skip
    device = torch.device("cuda")
    model = spec.make_model(attention)
    sampler = Sampler(spec.vocab_size)
    for module in (model, sampler):
        kernelize(module, device, dtype)
    kv_caches = [torch.empty(2, 8, 16, 2, head_dim, dtype=dtype) for _ in range(2)]
    tables = torch.zeros(3, 19, dtype=torch.int32)
    batch = replace(make_batch([1, 5, 33], [300, 5, 133], tables), max_seqlen_k=4096)
    batch = worker.copy_to(batch, device)
    step = partial(model, kv_caches=kv_caches)
    graphs.CudaGraphs(step, model, batch, torch.device("cpu"), 40)  # computes the largest step
    num_heads = 2 * group_size
    shape = AttentionShape(num_heads, 2, head_dim, 0.1, 100, softcap=50.0, has_sinks=True)
    query = torch.empty(len(batch.input_ids), num_heads, head_dim, dtype=dtype)
    attention.attend(query, kv_caches[0], batch, shape, query[0, :, 0].contiguous())
    for query_lens in ([1] * 40, [300]):  # the tiles of many decodes and of prompts
        tables = torch.zeros(len(query_lens), 200, dtype=torch.int32)
        model(worker.copy_to(make_batch(query_lens, query_lens, tables), device), kv_caches)
    logits = model.compute_logits(step(batch))
    for params in (SamplingParams(), SamplingParams(top_p=0.5)):
        rows = make_sampling_batch([params] * 3, [0] * 3, [0] * 3, spec.vocab_size)
        sample(sampler, logits, rows)


@torch.inference_mode()
def launch_linear(dtype, scheme):
    """Launch linear layers with and without a bias, of sizes that do and do not fill tiles."""
    sizes = [(1024, 3072), (1009, 336)]
    for out_features, in_features in sizes:
        bias = in_features <= 1024
        layer = ColumnParallelLinear(in_features, [("", out_features)], bias, dtype)
        if scheme:
            layer.quantize(scheme)
        kernelize(layer, torch.device("cuda"), dtype)


@torch.inference_mode()
def launch_experts(dtype):
    """Launch 100 experts for few and for many tokens."""
    experts = Experts(num_experts=100, hidden_size=256, width=96, dtype=dtype)
    kernelize(experts, torch.device("cuda"), dtype)
    for num_tokens in (1, 33):
        chosen = torch.zeros(num_tokens, 8, dtype=torch.int64)
        experts(torch.empty(num_tokens, 256, dtype=dtype), chosen, chosen.float())


@torch.inference_mode()
def launch_gated_delta(dtype):
    """Launch a mixed step and decodes."""
    layer = make_delta_rule((16, 32, 128, 128), dtype)
    kernelize(layer, torch.device("cuda"), dtype)
    for query_lens in ([1, 33], [1, 1]):
        layer(*make_delta_step(layer, query_lens))


plain_forward = Sampler.forward


def sample(sampler, logits, batch):
    """Launch the kernels of the sampler. All tokens are 0."""
    # torch gathers with indices that no kernel has written.
    with suppress(RuntimeError, IndexError):
        plain_forward(sampler, logits, batch)
    return torch.zeros(len(logits), dtype=torch.int64)


def inspect(kernel):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    names = kernel.src.fn.arg_names
    constants = {names[path[0]]: value for path, value in kernel.src.constants.items()}
    ptx = kernel.asm["ptx"]
    return {
        "kernel": kernel.metadata.name,
        "is_decode": constants.get("IS_DECODE"),
        "window": constants.get("WINDOW"),
        "rows": constants.get("M"),
        "is_partial": constants.get("ROTATED") != constants.get("HALF"),
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],  # bytes of a thread
        "shared": kernel.metadata.shared,
        "fuses": kernel.metadata.enable_fp_fusion,
        "matrix": [name for name in MATRIX_INSTRUCTIONS if name in ptx],
    }


def compile_models(arch):
    """Print the kernels of each model."""
    compiled = []
    compile = triton.compiler.compile

    def record_kernel(*args, **options):
        compiled.append(compile(*args, **options))
        return compiled[-1]

    triton.compiler.compile = record_kernel
    for dtype, head_dim, group_size in MODELS[arch]:
        launch_model(dtype, head_dim, group_size)
        for scheme in (None, INT4, INT8):
            launch_linear(dtype, scheme)
        if dtype != F32:
            launch_experts(dtype)
        launch_gated_delta(dtype)
        while compiled:
            setting = {"arch": arch, "dtype": str(dtype), "head_dim": head_dim}
            print(json.dumps({**setting, **inspect(compiled.pop())}), flush=True)


LIFE = {  # prompt lengths and sampling params
    "lengths of 1 to 33": ([1, 2, 15, 16, 17, 31, 32, 33], {"temperature": 0.0}),
    "33 of 100, sampled": ([100] * 33, {}),
    "all filters": ([70] * 3, {"top_p": 0.9, "top_k": 900, "min_p": 0.1}),
    "penalties and logprobs": ([9, 30], {"repetition_penalty": 1.5, "logprobs": 3}),
    "1,500 tokens": ([1500], {}),
}


def serve(num_heads, num_kv_heads, vocab_size, enforce_eager):
    """Run an engine on CPU tensors, and print the kernels that Triton is asked to compile."""
    part = "start"

    def report(fn, **_):
        print(json.dumps({"part": part, "kernel": fn.name}), flush=True)

    triton.knobs.runtime.jit_post_compile_hook = report
    triton.compiler.compile = MagicMock()  # no kernel is compiled in fact
    attention.reason_unavailable = lambda *_: None
    graphs.capture = lambda step, device, previous: SimpleNamespace(replay=lambda: None)
    model_runner.find_logprobs = lambda *_: []
    Sampler.forward = sample
    with tempfile.TemporaryDirectory() as directory:
        make_checkpoint(
            Path(directory), dtype=BF16, vocab_size=vocab_size, num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads, head_dim=128, max_position_embeddings=2048,
            use_sliding_window=True, sliding_window=100, max_window_layers=1,
        )  # fmt: skip
        llm = LLM(
            directory, attention_backend="triton", device="cpu", max_num_seqs=40,
            max_num_batched_tokens=512, num_kvcache_blocks=600, enforce_eager=enforce_eager,
        )  # fmt: skip
    runner = llm.model_runner
    rank = runner.executor.worker
    if not enforce_eager:
        most_tokens = 64  # longer steps have no graph
        batch = make_dummy_batch(rank, [1] * 40)
        step = make_step(rank)
        with torch.inference_mode():
            rank.graphs = graphs.CudaGraphs(step, rank.model, batch, rank.device, most_tokens)
            rank.graphs.capture(minimum=list)
    for query_lens in ([2, *[1] * 32], [1]):  # as at the start of an engine on a GPU
        logits = run_dummy_step(rank, query_lens)
        # As of three ranks, whose padding is cut off. Later logits are contiguous.
        logits = F.pad(logits, (0, 1))[:, :-1]
        runner.sample_each_kind(logits)
    for name, (lengths, settings) in LIFE.items():
        part = name
        prompts = [[i + 1] * length for i, length in enumerate(lengths)]
        params = SamplingParams(max_tokens=4, ignore_eos=True, **settings)
        llm.generate(prompts, params, use_tqdm=False)


def run(arch, is_serving):
    driver.set_active(make_driver(arch))
    replacement.find_optimized_layers = lambda device_type, dtype: layers.OPTIMIZED_LAYERS
    # The tensors of a batch are parts of one, as on a GPU.
    worker.copy_to = lambda batch, device: unpack(pack(batch))
    for module in (attention, gated_delta, linear, moe):
        module.describe_gpu = lambda device: (arch // 10, 132)
    if is_serving:
        serve(16, 8, 2000, enforce_eager=False)
        serve(14, 2, 1009, enforce_eager=True)
    else:
        compile_models(arch)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("archs", type=int, nargs="+", choices=SHARED_LIMIT, metavar="ARCH")
    parser.add_argument("--serving", action="store_true")
    args = parser.parse_args()
    for arch in args.archs:
        # A process for each GPU, because launchers keep the kernels of the first.
        process = get_context("fork").Process(target=run, args=(arch, args.serving))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
