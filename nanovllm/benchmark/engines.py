"""The engines that bench.py can time: nanovllm, transformers, vLLM and nano-vLLM."""

import atexit
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nanovllm import DEMO_MODEL, LLM, SamplingParams
from nanovllm.benchmark.setting import Setting
from nanovllm.benchmark.workloads import Request
from nanovllm.checkpoints.checkpoint import LOCAL

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


class Engine(Protocol):
    """An engine that can be timed."""

    description: str
    stats: dict[str, int] = {}  # noqa: RUF012  from the last run

    def run(self, requests: list[Request]) -> list[list[int]]:
        """Return the generated token ids of each request."""


class NanoVLLM(Engine):
    def __init__(self, setting: Setting) -> None:
        self.llm = LLM(setting.model, **setting.options)
        atexit.register(self.llm.exit)
        self.make_params = partial(SamplingParams, temperature=setting.temperature, ignore_eos=True)
        # The parts that its speed depends on.
        worker = self.llm.executor.worker
        self.description = (
            f"attention backend {worker.backend.NAME}, {worker.plan.num_blocks} KV cache blocks"
        )

    def run(self, requests: list[Request]) -> list[list[int]]:
        params = [self.make_params(max_tokens=request.num_tokens) for request in requests]
        prompts = [request.prompt for request in requests]
        before: Any = self.llm.stats
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        after: Any = self.llm.stats
        names = ("num_cached_tokens", "num_preemptions")
        self.stats = {name: after[name] - before[name] for name in names}
        return [output["token_ids"] for output in outputs]


class Transformers(Engine):
    """Runs all requests as one static batch, which ends with its longest output."""

    description = "sdpa attention, one static batch"

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(setting.options["seed"])
        self.device = setting.device
        options = {"dtype": setting.spec.dtype, "attn_implementation": "sdpa"}
        if setting.options["load_format"] == "dummy":
            with self.device:
                self.model = AutoModelForCausalLM.from_config(
                    setting.hf_config, trust_remote_code=False, **options
                )
        else:
            self.model = AutoModelForCausalLM.from_pretrained(setting.model, **LOCAL, **options)
            self.model.to(self.device)
        self.model.eval()
        # This replaces the checkpoint's own, which can set EOS and top_k. Without top_k,
        # transformers uses 50.
        sampling: dict[str, Any] = {}
        if setting.temperature > 0:
            sampling = {"do_sample": True, "temperature": setting.temperature, "top_k": 0}
        self.model.generation_config = GenerationConfig(pad_token_id=0, **sampling)

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> list[list[int]]:
        prompts = [torch.tensor(request.prompt, device=self.device) for request in requests]
        padded = pad_sequence(
            prompts, batch_first=True, padding_value=-1, padding_side="left"
        )  # [num_requests, width]
        mask = (padded >= 0).long()
        longest = max(request.num_tokens for request in requests)
        # Padding is masked, and needs an id of the vocabulary nevertheless.
        input_ids = padded.clamp(min=0)
        output = self.model.generate(input_ids, attention_mask=mask, max_new_tokens=longest)
        generated = output[:, padded.shape[1] :].tolist()
        return [token_ids[: each.num_tokens] for token_ids, each in zip(generated, requests)]


class VLLM(Engine):
    description = "vLLM's defaults for all other options"

    def __init__(self, setting: Setting) -> None:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        import vllm

        options = {
            name: setting.options[name] for name in _OPTIONS_OF_VLLM & setting.options.keys()
        }
        self.llm = vllm.LLM(model=setting.model, skip_tokenizer_init=True, **options)
        self.make_params = partial(
            vllm.SamplingParams,
            temperature=setting.temperature,
            ignore_eos=True,
            detokenize=False,
        )

    def run(self, requests: list[Request]) -> list[list[int]]:
        params = [self.make_params(max_tokens=request.num_tokens) for request in requests]
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class NanoVLLMCheckout(Engine):
    """A checkout of nano-vLLM, in a process of its own because its package has our name."""

    description = "nano-vLLM's defaults for all other options"

    def __init__(self, setting: Setting) -> None:
        if setting.options["load_format"] == "dummy":
            # nano-vLLM reads weights and a tokenizer.
            model = AutoModelForCausalLM.from_config(setting.hf_config, dtype=setting.spec.dtype)
            model.save_pretrained(setting.model)
            AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(setting.model)
        # Its share of the memory includes what other engines have already.
        free, total = torch.cuda.mem_get_info()
        share = setting.options["gpu_memory_utilization"] + 1 - free / total
        options = {**setting.options, "gpu_memory_utilization": share}
        self.temperature = setting.temperature
        self.submit = ProcessPoolExecutor(1, get_context("spawn")).submit
        self.submit(start_checkout, setting.nano_vllm, setting.model, options).result()

    def run(self, requests: list[Request]) -> list[list[int]]:
        return self.submit(run_checkout, requests, self.temperature).result()


_checkout: Any = None  # the LLM of the process of a checkout


def start_checkout(path: str, model: str, options: dict[str, Any]) -> None:
    """Replace the package nanovllm in this process, except for benchmark/, and start its LLM."""
    global _checkout
    for name in list(sys.modules):
        if name.startswith("nanovllm") and "benchmark" not in name:
            del sys.modules[name]
    sys.path.insert(0, path)
    _checkout = import_module("nanovllm").LLM(model, **options)  # it ignores unknown options


def run_checkout(requests: list[Request], temperature: float) -> list[list[int]]:
    make_params = import_module("nanovllm").SamplingParams
    params = [make_params(temperature, request.num_tokens, ignore_eos=True) for request in requests]
    outputs = _checkout.generate([request.prompt for request in requests], params, use_tqdm=False)
    return [output["token_ids"] for output in outputs]


ENGINES: dict[str, Callable[[Setting], Engine]] = {
    "nanovllm": NanoVLLM,
    "transformers": Transformers,
    "vllm": VLLM,
    "nano-vllm": NanoVLLMCheckout,
}


def start_engines(settings: Mapping[str, Setting]) -> dict[str, Engine]:
    """Start the engines that `settings` name. Other names are those of variants of nanovllm."""
    return {name: ENGINES.get(name, NanoVLLM)(setting) for name, setting in settings.items()}
