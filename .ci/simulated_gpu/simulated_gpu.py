"""A pytest plugin that simulates a GPU.

torch's CUDA build runs on runtime.cpp: its allocators, streams, events and graphs are torch's own.
Its kernels do not run. Each operator of a CUDA tensor enqueues a call of the same operator on CPU
tensors with the same memory, so results are exact. They are as late as CUDA allows. Where an
operator returns a new tensor, its shape is that of the operator on the meta device.

Triton's kernels do not run either, because their interpreter is slow. Plain layers, plain attention
and `lay_out` of the tests stand for them. The tests therefore check everything around kernels: the
order of launches, host synchronizations, captures, and the reuse of memory.
"""

import ctypes
import os
import sys
import warnings
from dataclasses import fields, replace
from functools import cache
from itertools import count

import pytest
import torch
from graph_helpers import lay_out
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from nanovllm.kernels import replacement
from nanovllm.kernels.cuda import attention as triton_attention
from nanovllm.kernels.cuda import graphs
from nanovllm.layers import attention

runtime = ctypes.CDLL(os.environ["SIMULATED_GPU"])
runtime.simulate_call.argtypes = [ctypes.c_void_p, ctypes.c_long]
numbers = count()
calls = {}  # by number. Captured calls stay, because graphs repeat them.
# Calls that have run. Their tensors are freed later, because torch can hold locks now.
finished = []
errors = []  # raised by calls
# Operators that compute nothing. All others with CUDA kernels are replaced, except views.
NATIVE = {"empty_strided", "set_", "resize_", "record_stream", "is_pinned", "_pin_memory"}


@ctypes.CFUNCTYPE(None, ctypes.c_long)
def run(number):
    tracing = sys.gettrace()  # tests that interrupt the engine trace its lines
    sys.settrace(None)
    call, is_captured = calls[number]
    try:
        # A default device of the caller is not for tensors of the call.
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            call()
    except Exception as error:
        errors.append(error)
    finally:
        sys.settrace(tracing)
    if not is_captured:
        finished.append(calls.pop(number))


runtime.simulate(run)


def enqueue(call):
    finished.clear()
    number = next(numbers)
    calls[number] = (call, torch.cuda.is_current_stream_capturing())
    if runtime.simulate_call(torch.cuda.current_stream().cuda_stream, number) != 0:
        raise RuntimeError("an earlier operation has invalidated the capture")


def wait():
    """Wait for the current stream. During a capture this fails."""
    if torch.cuda.get_sync_debug_mode() == 2:
        raise RuntimeError("a host synchronization, which this test forbids")
    torch.cuda.current_stream().synchronize()


@pytest.fixture(autouse=True)
def no_call_fails():
    yield
    torch.cuda.synchronize()
    if errors:
        raise errors.pop()


def on_host(value):
    """Return a CPU tensor on the memory of a CUDA tensor, and what stands for other arguments."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return find_generator(value.initial_seed())
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_cuda:
        return value.clone()  # the host can change it before the call runs
    if value.numel() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    storage = value.untyped_storage()
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    size = storage.nbytes() // value.element_size()
    flat = torch.frombuffer(memory, dtype=value.dtype, count=size)
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def on_meta(value):
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, torch.Tensor) and value.is_cuda:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def on_device(value):
    return value.cuda() if isinstance(value, torch.Tensor) else value


@cache
def find_generator(seed):
    """Return the CPU generator that stands for the CUDA generators with this seed."""
    return torch.Generator("cpu").manual_seed(seed)


def allocate_like(value):
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def simulate(operator):
    """Return what computes an operator of CUDA tensors."""
    schema = operator._schema
    name = schema.name.removeprefix("aten::")
    arguments = schema.arguments
    written = [i for i, each in enumerate(arguments) if each.alias_info is not None]
    tensors = [i for i, each in enumerate(arguments) if str(each.type) == "Tensor"]
    is_random = any(each.name == "generator" for each in arguments)

    def call(*args, **options):
        compute = operator
        # torch gives a Tensor that stands for a number as a number. Another overload takes these.
        if any(i < len(args) and not isinstance(args[i], torch.Tensor) for i in tensors):
            compute = operator.overloadpacket
        if name == "_conv_depthwise2d":  # the CPU has the general one only
            x, weight, _, bias, *sizes = args
            compute = torch.ops.aten.convolution.default
            args = (x, weight, bias, *sizes, False, [0, 0], x.shape[1])
        if is_random and options.get("generator") is None:
            options["generator"] = torch.cuda.default_generators[torch.cuda.current_device()]
        if written:
            return write(compute, args, options)
        try:
            shapes = compute(*tree_map(on_meta, args), **tree_map(on_meta, options))
        except NotImplementedError:  # because the shape depends on values, so the host waits
            wait()
            result = compute(*tree_map(on_host, args), **tree_map(on_host, options))
            return tree_map(on_device, result)
        leaves, structure = tree_flatten(shapes)
        results = [allocate_like(each) for each in leaves]
        enqueue_into(results, compute, args, options)
        return tree_unflatten(results, structure)

    def write(compute, args, options):
        """Call an operator that writes to its arguments."""
        for each in arguments:
            output = options.get(each.name)
            # An empty output gets the shape of the result.
            if each.kwarg_only and isinstance(output, torch.Tensor) and output.numel() == 0:
                shapes = tree_map(on_meta, options)
                compute(*tree_map(on_meta, args), **shapes)
                output.resize_(shapes[each.name].shape)
        enqueue_into([], compute, args, options)
        results = []
        for i in written:
            results.append(args[i] if i < len(args) else options[arguments[i].name])
        return results[0] if len(results) == 1 else tuple(results)

    return call


def enqueue_into(results, compute, args, options):
    """Enqueue a call, and copies of what it returns to `results`."""
    targets = tree_map(on_host, results)
    args = tree_map(on_host, args)
    options = tree_map(on_host, options)

    def run_and_copy():
        for target, value in zip(targets, tree_leaves(compute(*args, **options))):
            target.copy_(value)

    enqueue(run_and_copy)


def copy(self, source, non_blocking=False):
    """Copy on the device, or between it and the host."""
    if source.numel() == 0:
        return self
    target = on_host(self) if self.is_cuda else self
    value = on_host(source) if source.is_cuda else source
    are_alike = self.dtype == source.dtype and self.shape == source.shape
    are_contiguous = self.is_contiguous() and source.is_contiguous()
    is_pinned = self.is_pinned() or source.is_pinned()
    can_be_late = non_blocking and are_alike and are_contiguous and is_pinned
    if (self.is_cuda and source.is_cuda) or can_be_late:
        enqueue(lambda: target.copy_(value))
    else:
        wait()
        target.copy_(value)
    return self


def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    """Allocate, and fill the memory when the device comes to it, also in each replay of a graph."""
    shape = torch.empty(size, dtype=dtype, device="meta")
    result = allocate_like(shape)
    memory = on_host(result)
    value = torch.nan if memory.is_floating_point() else 1
    enqueue(lambda: memory.fill_(value))
    return result


def read_number(tensor):
    wait()
    return on_host(tensor).item()


def attend(query, kv_cache, batch, shape):
    output = torch.empty_like(query)
    values = {each.name: on_host(getattr(batch, each.name)) for each in fields(batch)}
    args = (query, kv_cache, replace(batch, **values), shape)
    enqueue_into([output], attention.attend, args, {})
    return output


def store_kvcache(*args):
    enqueue_into([], attention.store_kvcache, args, {})


def lay_out_later(captured):
    enqueue_into([], lay_out, (captured.packed, captured.buffer, captured.rows), {})


def install(library):
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        namespace, _, rest = full_name.partition("::")
        name, _, overload = rest.partition(".")
        operator = getattr(getattr(torch.ops, namespace), name, None)
        if namespace != "aten" or name in NATIVE or operator is None:
            continue
        operator = getattr(operator, overload or "default", None)
        if operator is None:
            continue
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write
            for each in operator._schema.returns
        )
        if not is_view:
            library.impl(rest, simulate(operator), "CUDA", allow_override=True)
    library.impl("copy_", copy, "CUDA", allow_override=True)
    library.impl("empty.memory_format", empty, "CUDA", allow_override=True)
    library.impl("_local_scalar_dense", read_number, "CUDA", allow_override=True)


library = torch.library.Library("aten", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # each operator is overridden
    install(library)
for kind in ("flash", "mem_efficient", "cudnn"):
    getattr(torch.backends.cuda, f"enable_{kind}_sdp")(False)
find_layers = replacement.find_optimized_layers
replacement.find_optimized_layers = lambda kind, dtype: (
    [] if kind == "cuda" else find_layers(kind, dtype)
)
graphs.CudaGraphs.lay_out = lay_out_later
triton_attention.attend = attend
triton_attention.store_kvcache = store_kvcache
triton_attention.make_cache = attention.make_cache
