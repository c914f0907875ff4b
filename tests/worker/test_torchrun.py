"""Under torchrun, and any launcher that sets its variables, ranks meet, serve and exit."""

import socket
import subprocess
import sys
from multiprocessing import get_context

import pytest
import torch.distributed as dist
from conftest import generate_ids, greedy
from rank_helpers import check_nothing_is_left, join_as_rank_1

nothing_is_left = pytest.fixture(autouse=True)(check_nothing_is_left)


def find_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def describe(rank, port=1):
    """The variables that torchrun sets for a rank of two."""
    ranks = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def set_environment(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_launcher_that_sets_too_little(make_llm, monkeypatch, rank, missing):
    """Such as srun and mpirun: every rank names the variable, and none waits for the others."""
    set_environment(monkeypatch, describe(rank))
    monkeypatch.delenv(missing)
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.setattr(rendezvous, "TCPStore", lambda *_: pytest.fail("a rendezvous"))
    with pytest.raises(ValueError, match=rf"\b{missing}\b"):
        make_llm(tensor_parallel_size=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_of_another_size(make_llm, monkeypatch, rank):
    set_environment(monkeypatch, describe(rank))
    monkeypatch.setattr(dist, "rendezvous", lambda *_: iter([(dist.HashStore(), rank, 2)]))
    expected = "tensor_parallel_size=4, but torchrun has started 2 processes"
    with pytest.raises(ValueError, match=expected):
        make_llm(tensor_parallel_size=4)


@pytest.mark.parametrize("is_failing", [False, True])
def test_the_end_of_a_serving_rank(tiny, make_llm, monkeypatch, tmp_path, is_failing):
    """This process is rank 0 and continues. Rank 1 exits as soon as its engine has ended.

    If rank 1 fails, it prints its traceback and exits at once: CUDA graphs in the traceback would
    block the end of NCCL.
    """
    make_llm(tensor_parallel_size=2).exit()  # starts the fork server
    port = find_port()
    log = tmp_path / "log"
    args = (tiny[0], describe(1, port), log, is_failing)
    rank_1 = get_context("forkserver").Process(target=join_as_rank_1, args=args, daemon=True)
    rank_1.start()
    set_environment(monkeypatch, describe(0, port))
    llm = make_llm(tensor_parallel_size=2)
    if is_failing:
        with pytest.raises(RuntimeError):
            generate_ids(llm, [[1, 2, 3]], greedy(8))
    else:
        generate_ids(llm, [[1, 2, 3]], greedy(8))
    llm.exit()
    rank_1.join(30)
    assert rank_1.exitcode == is_failing
    last = "ZeroDivisionError: division by zero" if is_failing else "disconnected\nunwound"
    text = log.read_text()
    assert text.endswith(f"{last}\n")
    assert ("unwound" in text) != is_failing


SCRIPT = """
import os, sys
import torch
from nanovllm import LLM, SamplingParams

options = {"tensor_parallel_size": 2, "num_kvcache_blocks": 64, "kvcache_block_size": 4}
with torch.autocast("cpu"):  # which would change tokens, and has no effect
    llm = LLM(sys.argv[1], **options, enable_kernels=False)
params = SamplingParams(temperature=0.0, max_tokens=8)
outputs = llm.generate([[1, 2, 3], [4] * 20], params, use_tqdm=False)
print("rank", os.environ["RANK"], [output["token_ids"] for output in outputs], flush=True)
try:
    LLM(sys.argv[1], tensor_parallel_size=2)
except RuntimeError as error:
    print(error)
"""
AGAIN = "torchrun's processes serve one engine only: run torchrun again for another one"


def test_two_machines(tmp_path, tiny):
    """Two agents of torchrun on this machine. The end of rank 0's process ends the others."""
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
    options = [f"--rdzv-endpoint=127.0.0.1:{find_port()}", "--nnodes=2", "--nproc-per-node=1"]
    command = [*torchrun, *options, str(tmp_path / "script.py"), tiny[0]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    agents = [subprocess.Popen(command, **pipes) for _ in range(2)]
    outputs = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    expected = [tiny[1]([1, 2, 3], 8), tiny[1]([4] * 20, 8)]
    printed = "".join(stdout for stdout, _ in outputs)
    assert printed == f"rank 0 {expected}\n{AGAIN}\n"
