"""Stand-ins for CUDA graphs, which need no GPU."""

from types import SimpleNamespace

import torch

from nanovllm.batch import packing
from nanovllm.kernels.cuda import graphs
from nanovllm.worker import startup
from nanovllm.worker.dummy_steps import make_dummy_batch


def repeat_steps(monkeypatch):
    """Let a replay compute the captured step again on the static batch. It needs no GPU."""
    monkeypatch.setattr(graphs, "capture", lambda step, *_: SimpleNamespace(replay=step))
    monkeypatch.setattr(
        graphs.CudaGraphs, "lay_out", lambda each: lay_out(each.packed, each.buffer, each.rows)
    )


def lay_out(packed, buffer, arrays):
    """Do what lay_out_kernel does. The interpreter takes longer."""
    num_seqs = packed[packing.HEAD.index("num_seqs")]
    first = len(packing.HEAD)
    for size, start, length, stride, padding in arrays.tolist():
        source = packed[first : first + packed[size]]
        first += len(source)
        if length == 0 and len(source) > 0:
            table = source.view(num_seqs, -1)
            buffer.as_strided(table.shape, (stride, 1), start).copy_(table)
        elif length > 0:
            target = buffer[start : start + length]
            padded = target[len(source) :]
            target[: len(source)] = source
            if padding == 2:
                torch.arange(num_seqs, num_seqs + len(padded), out=padded)
            else:
                padded.fill_(source[-1] if padding == 1 and len(source) > 0 else min(padding, 0))


def make_graphs(worker, max_num_tokens):
    """Make graphs for a worker, also on the CPU."""
    batch = make_dummy_batch(
        worker, [1] * min(worker.plan.num_lanes, worker.max_num_batched_tokens)
    )
    step = startup.make_step(worker)
    with torch.inference_mode():
        captured = graphs.CudaGraphs(step, worker.model, batch, worker.device, max_num_tokens)
        captured.capture(minimum=list)
    return captured


def capture_on_the_cpu(monkeypatch, decoder, backend, decodes, **options):
    """Call make_cuda_graphs as for a GPU."""
    repeat_steps(monkeypatch)
    with monkeypatch.context() as patch:
        make = graphs.CudaGraphs
        patch.setattr(
            graphs, "CudaGraphs", lambda *args: make(*args[:3], torch.device("cpu"), *args[4:])
        )
        device = torch.device("cuda")
        options = {"max_num_tokens": 2048, "minimum": list, **options}
        return graphs.make_cuda_graphs(decoder, decoder, backend, decodes, device, **options)


def replay_on_the_cpu(monkeypatch, max_num_tokens=64):
    """Let plain engines on the CPU replay their steps, from their start on."""

    allocate = startup.allocate_caches

    def allocate_and_capture(worker, *args):
        allocate(worker, *args)
        if worker.kernels is None:
            worker.graphs = make_graphs(worker, max_num_tokens)

    repeat_steps(monkeypatch)
    monkeypatch.setattr(startup, "allocate_caches", allocate_and_capture)
