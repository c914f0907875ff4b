"""Tries every causal decoder of the installed transformers, and prints what becomes of it.

    python tests/models/all_decoders.py [NAME ...]

A name is a model_type. Each decoder gets a random checkpoint, and is served in chunks, cold and
from a warm cache, after preemptions. `served` ones give the tokens of transformers. CI does not run
this.
"""

import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "helpers")]

import torch
from conftest import VOCAB_SIZE, generate_ids, random_prompt
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from nanovllm import LLM, SamplingParams

# Small values for the fields that configs have under one name or another.
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "rotary_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "moe_num_experts": 4,
    "moe_num_shared_experts": 1,
    "n_shared_experts": 1,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "initializer_range": 0.3,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
MAX_PARAMETERS = 20_000_000  # of a model that is small


def make_config(config_class):
    """Make a small config. Lists with a value for each layer keep their first values."""
    default = config_class()
    names = {*vars(default), *getattr(config_class, "attribute_map", {})}
    sizes = {name: size for name, size in SIZES.items() if name in names}
    heads = [getattr(default, f"num_{kind}_heads", None) for kind in ("attention", "key_value")]
    if heads[0] == heads[1]:  # the K/V heads of some families cannot be fewer
        sizes.pop("num_key_value_heads", None)
        if heads[1] is not None:
            sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    for name, value in vars(default).items():
        if isinstance(value, list) and len(value) == default.num_hidden_layers:
            sizes[name] = value[: SIZES["num_hidden_layers"]]
    # The vocabulary does not have the default ids, and some families require one.
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return config_class(**sizes, **ids)


def make_model(config_class):
    config = make_config(config_class)
    with torch.device("meta"):
        num_parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters are too many")
    return AutoModelForCausalLM.from_config(config).float().eval()


@torch.inference_mode()
def continue_greedily(model, prompt):
    """Choose 8 tokens without a cache. Some families generate other tokens with theirs."""
    ids = list(prompt)
    for _ in range(8):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def try_decoder(config_class, directory):
    """Return what becomes of a decoder, and why."""
    torch.manual_seed(0)
    try:
        model = make_model(config_class)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # mistakes would not show at 1 and 0
                torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.3)
        model.save_pretrained(directory)
        prompts = [random_prompt(length, length) for length in (1, 5, 33, 70)]
        expected = [continue_greedily(model, prompt) for prompt in prompts]
    except Exception as error:
        return "not tried", f"transformers: {error}"
    options = {"num_kvcache_blocks": 36, "kvcache_block_size": 4, "max_num_batched_tokens": 24}
    try:
        with LLM(directory, model_impl="transformers", **options) as llm:
            found = [generate_ids(llm, prompts, PARAMS) for _ in range(2)]
    except ValueError as error:
        return "rejected", str(error).partition("cannot be served: ")[2] or str(error)
    except Exception as error:
        return "failed", repr(error)
    return ("served", "") if found == [expected] * 2 else ("WRONG TOKENS", "")


def main():
    warnings.simplefilter("ignore")
    counts = Counter()
    for config_class in sorted(MODEL_FOR_CAUSAL_LM_MAPPING, key=lambda each: each.model_type):
        name = config_class.model_type
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as directory:
            outcome, reason = try_decoder(config_class, directory)
        counts[outcome] += 1
        reason = re.sub(r"\s+", " ", reason)[:150]
        print(f"{outcome:12} {name:24} {reason}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))


if __name__ == "__main__":
    main()
