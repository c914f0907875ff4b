"""The engines that bench.py can time: nanovllm, transformers, vLLM and nano-vLLM."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.benchmark.workloads import Request
from nanovllm.checkpoints.checkpoint import LOCAL, Checkpoint

Options = dict[str, Any]  # of nanovllm's LLM
# Options that mean the same in vLLM.
_OPTIONS_OF_VLLM = {
    "dtype",
    "seed",
    "load_format",
    "tensor_parallel_size",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enforce_eager",
}


class Engine:
    """An engine that can be timed."""

    description: str

    def run(self, requests: list[Request]) -> list[list[int]]:
        """Return the generated token ids of each request."""
        raise NotImplementedError

    def read_stats(self) -> dict[str, int]:
        """Return counters of all runs."""
        return {}

    def exit(self) -> None:
        """Release memory, if dropping the engine does not."""


class NanoVLLM(Engine):
    def __init__(self, checkpoint: Checkpoint, options: Options, _: str) -> None:
        self.llm = LLM(str(checkpoint.directory), **options)
        # The parts that its speed depends on.
        worker = self.llm.executor.worker
        self.description = (
            f"attention backend {worker.backend.NAME}, {worker.plan.num_blocks} KV cache blocks"
        )

    def run(self, requests: list[Request]) -> list[list[int]]:
        return generate(self.llm, SamplingParams, requests)

    def read_stats(self) -> dict[str, int]:
        stats = self.llm.stats
        return {name: stats[name] for name in ("num_cached_tokens", "num_preemptions")}

    def exit(self) -> None:
        self.llm.exit()


def generate(llm: Any, params_class: Any, requests: list[Request]) -> list[list[int]]:
    """Call an LLM of nanovllm or of nano-vLLM, which have the same interface."""
    prompts = [request.prompt for request in requests]
    params = [request.make_params(params_class) for request in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output["token_ids"] for output in outputs]


class Transformers(Engine):
    """Runs all requests as one static batch, which ends with its longest output."""

    description = "sdpa attention, one static batch"

    def __init__(self, checkpoint: Checkpoint, options: Options, _: str) -> None:
        self.device = options["device"]
        kind = {"dtype": checkpoint.dtype, "attn_implementation": "sdpa"}
        if options["load_format"] == "dummy":
            model = AutoModelForCausalLM.from_config(checkpoint.hf_config, **kind)
        else:
            model = AutoModelForCausalLM.from_pretrained(checkpoint.directory, **LOCAL, **kind)
        self.model = model.to(self.device).eval()

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> list[list[int]]:
        prompts = [torch.tensor(request.prompt, device=self.device) for request in requests]
        padded = pad_sequence(
            prompts, batch_first=True, padding_value=-1, padding_side="left"
        )  # [num_requests, width]
        mask = (padded >= 0).long()
        # Padding is masked, and needs an id of the vocabulary nevertheless.
        input_ids = padded.clamp(min=0)
        # This replaces the checkpoint's own, which can set EOS and top_k. Without top_k,
        # transformers uses 50.
        temperature = requests[0].temperature
        self.model.generation_config = GenerationConfig(
            max_new_tokens=max(request.num_tokens for request in requests),
            do_sample=temperature > 0,
            temperature=temperature or None,
            top_k=0,
            pad_token_id=0,
        )
        output = self.model.generate(input_ids, attention_mask=mask)
        generated = output[:, padded.shape[1] :].tolist()
        return [token_ids[: each.num_tokens] for token_ids, each in zip(generated, requests)]


class VLLM(Engine):
    description = "vLLM's defaults for all other options"

    def __init__(self, checkpoint: Checkpoint, options: Options, _: str) -> None:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        import vllm

        shared = {name: options[name] for name in _OPTIONS_OF_VLLM & options.keys()}
        self.llm = vllm.LLM(model=str(checkpoint.directory), skip_tokenizer_init=True, **shared)
        self.params_class = partial(vllm.SamplingParams, detokenize=False)

    def run(self, requests: list[Request]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [request.make_params(self.params_class) for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class NanoVLLMCheckout(Engine):
    """A checkout of nano-vLLM, in a process of its own because its package has our name."""

    description = "nano-vLLM's defaults for all other options"

    def __init__(self, checkpoint: Checkpoint, options: Options, path: str) -> None:
        if not Path(path, "nanovllm", "llm.py").is_file():
            raise ValueError(
                f"--nano-vllm {path}: no checkout of nano-vLLM is there, get one with"
                " git clone https://github.com/GeeeekExplorer/nano-vllm"
            )
        model = str(checkpoint.directory)
        if options["load_format"] == "dummy":
            # nano-vLLM reads weights and a tokenizer.
            self.folder = TemporaryDirectory()
            model = self.folder.name
            weights = AutoModelForCausalLM.from_config(checkpoint.hf_config, dtype=checkpoint.dtype)
            weights.save_pretrained(model)
            AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(model)
        # Its share of the memory includes what other engines have already.
        free, total = torch.cuda.mem_get_info()
        share = options["gpu_memory_utilization"] + 1 - free / total
        options = options | {"gpu_memory_utilization": share}
        self.pool = ProcessPoolExecutor(1, get_context("spawn"))
        self.pool.submit(start_checkout, path, model, options).result()

    def run(self, requests: list[Request]) -> list[list[int]]:
        return self.pool.submit(run_checkout, requests).result()

    def exit(self) -> None:
        self.pool.shutdown()


_checkout: Any = None  # the LLM of the process of a checkout


def start_checkout(path: str, model: str, options: dict[str, Any]) -> None:
    """Replace the package nanovllm in this process, except for benchmark/, and start its LLM."""
    global _checkout
    for name in list(sys.modules):
        if name.startswith("nanovllm") and "benchmark" not in name:
            del sys.modules[name]
    sys.path.insert(0, path)
    _checkout = import_module("nanovllm").LLM(model, **options)  # it ignores unknown options


def run_checkout(requests: list[Request]) -> list[list[int]]:
    return generate(_checkout, import_module("nanovllm").SamplingParams, requests)


# By name. An engine is made from a checkpoint, options of LLM, and the path of a nano-vLLM.
ENGINES: dict[str, Callable[[Checkpoint, Options, str], Engine]] = {
    "nanovllm": NanoVLLM,
    "transformers": Transformers,
    "vllm": VLLM,
    "nano-vllm": NanoVLLMCheckout,
}
