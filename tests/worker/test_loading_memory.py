"""A weight is in memory once, at every moment of a start and after it."""

import subprocess
import sys
from select import select

import psutil
import pytest
import torch
from conftest import make_checkpoint
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
OTHERS = 16_000_000  # bytes for all else, less than a second matrix
LOAD = """
import sys
from nanovllm import DEMO_MODEL, LLM

options = dict(quantization=sys.argv[2] or None, kvcache_memory_bytes=1 << 20, device="cpu")
LLM(DEMO_MODEL, **options).exit()  # imports and compiles what every engine needs
print("ready", flush=True)
sys.stdin.readline()
llm = LLM(sys.argv[1], **options)
print("loaded", flush=True)
sys.stdin.readline()
"""


def read_anonymous_memory(process):
    """Bytes that are not pages of a file, which the system can drop."""
    info = process.memory_info()
    return info.rss - info.shared


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(
        directory,
        dtype=torch.bfloat16,
        vocab_size=16384,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    )
    return directory


# Bytes of a weight in the head, and of one in a layer: codes, scales and zeros.
@pytest.mark.parametrize(
    "option, head_bytes, layer_bytes",
    [("", 2, 2), ("int4", 1 + 6 / 128, 0.5 + 6 / 64)],
)
def test_a_weight_is_in_memory_once(checkpoint, option, head_bytes, layer_bytes):
    """At the peak, one matrix is in memory twice: as it is read, and as it is kept."""
    stored = load_file(checkpoint / "model.safetensors")
    sizes = {name: tensor.numel() for name, tensor in stored.items()}
    head = sizes.pop("model.embed_tokens.weight")
    weights = head * head_bytes + sum(sizes.values()) * layer_bytes
    largest = head * head_bytes  # gate_up_proj has as many numbers

    command = [sys.executable, "-c", LOAD, str(checkpoint), option]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with psutil.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        before = peak = read_anonymous_memory(process)
        process.stdin.write("\n")
        process.stdin.flush()
        while not select([process.stdout], [], [], 0.001)[0]:
            peak = max(peak, read_anonymous_memory(process))
        assert process.stdout.readline() == "loaded\n"
        final = read_anonymous_memory(process)
        process.stdin.write("\n")
    assert final - before < weights + OTHERS
    assert peak - before < weights + largest + OTHERS
