"""Prompts as a family writes them: one BOS, however a prompt is written, chat templates, and several tokens that end a text."""

from pathlib import Path

import pytest
from conftest import Oracle, make_checkpoint, random_prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import OPTConfig, PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams

SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA_TEMPLATE = (  # which writes BOS, as a Llama tokenizer does too
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi there"}]
SHORT = SamplingParams(temperature=0.0, max_tokens=2)


def make_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """A token per byte; its encoding of a text begins with BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *SPECIAL])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    bos = SPECIAL[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token="<|eot_id|>", chat_template=chat_template)


def test_bos_comes_once(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab_size=260)
    tokenizer = make_tokenizer(LLAMA_TEMPLATE)
    tokenizer.save_pretrained(tmp_path)
    llm, bos = LLM(str(tmp_path), num_kvcache_blocks=32), tokenizer.bos_token_id

    (chat,) = llm.chat(MESSAGES, SHORT, use_tqdm=False)
    rendered = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert rendered.startswith("<|begin_of_text|><|start_header_id|>system")
    assert chat["prompt_token_ids"] == tokenizer.encode(rendered, add_special_tokens=False)
    assert chat["prompt_token_ids"].count(bos) == 1 and chat["prompt_token_ids"][0] == bos

    (text,) = llm.generate("hi there", SHORT, use_tqdm=False)
    assert text["prompt_token_ids"] == tokenizer.encode("hi there") == [bos, *map(tokenizer.convert_tokens_to_ids, "hiĠthere")]


def test_no_template(tmp_path: Path) -> None:
    """OPT's tokenizers have none; a text goes on to be served."""
    make_checkpoint(tmp_path, family=OPTConfig, ffn_dim=40, vocab_size=260)
    make_tokenizer(None).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), num_kvcache_blocks=32)
    with pytest.raises(ValueError, match="the checkpoint's tokenizer has no chat template: use generate"):
        llm.chat(MESSAGES)
    assert len(llm.generate("hi there", SHORT, use_tqdm=False)[0]["token_ids"]) == 2


def test_several_tokens_end_a_text(tmp_path: Path) -> None:
    """As in Llama 3's generation_config.json: each of them, and where transformers ends."""
    oracle = Oracle(make_checkpoint(tmp_path))
    prompts = [random_prompt(seed, 9) for seed in range(2)]
    ends = [oracle(prompt, 8)[5] for prompt in prompts]
    oracle.known.clear()
    oracle.model.generation_config.eos_token_id = ends
    oracle.model.generation_config.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), num_kvcache_blocks=32)
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [oracle(prompt, 20) for prompt in prompts]
    assert [output["finish_reason"] for output in outputs] == ["stop"] * 2
    assert {output["token_ids"][-1] for output in outputs} == set(ends) and len(set(ends)) == 2
