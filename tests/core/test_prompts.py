"""Texts, token ids and conversations become prompts. Those that cannot be served are rejected."""

import numpy as np
import pytest
import torch
from conftest import VOCAB_SIZE, generate_ids, greedy
from tokenizers.processors import TemplateProcessing

from nanovllm import DEMO_MODEL, LLM

GREEDY = greedy(6)
TEXT = "What is 1 + 2?"
USER = {"role": "user", "content": TEXT}


@pytest.fixture(scope="module")
def demo():
    return LLM(DEMO_MODEL, dtype="float32", num_kvcache_blocks=512)


def ask(content):
    """A conversation of one message."""
    return [{"role": "user", "content": content}]


def test_a_prompt_is_a_text_or_token_ids(demo):
    ids = demo.tokenizer.encode(TEXT)
    outputs = []
    for prompts, params in (TEXT, GREEDY), (ids, GREEDY), ([TEXT, ids], [GREEDY, GREEDY]):
        outputs += demo.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        assert output["prompt_token_ids"] == ids
        assert output["token_ids"] == outputs[0]["token_ids"]
    request_ids = [output["request_id"] for output in outputs]
    assert request_ids == sorted(set(request_ids))
    assert demo.generate([], GREEDY) == []


def test_numpy_numbers_and_tuples_are_token_ids(make_llm):
    llm = make_llm()
    expected = generate_ids(llm, [3, 4], GREEDY)
    for prompts in ([np.int64(3), np.int32(4)], [(3, 4)], [[np.uint8(3), 4]]):
        assert generate_ids(llm, prompts, GREEDY) == expected


@pytest.mark.parametrize(
    "prompts, complaint",
    [
        ([[]], "at least one token"),
        ([[1, 2], [VOCAB_SIZE]], f"{VOCAB_SIZE}"),
        ([[1, -1]], "-1"),
        ([[1, "a"]], "'str' object cannot be interpreted as an integer"),
        # Arrays have __index__, which raises.
        ([[1, 2], [torch.tensor(1.5)]], "only integer .* index"),
        ([[1, 2], [np.array([1, 2])]], "only integer .* index"),
        ([[1, 2], None], "None"),
        (None, "None"),
        ([[1] * 39, [1] * 40], "max_model_len=40"),
        (["text"], "no tokenizer"),
    ],
)
def test_a_rejected_call_queues_nothing(make_llm, prompts, complaint):
    llm = make_llm(num_kvcache_blocks=10)
    for call in (llm.generate, llm.stream):
        with pytest.raises((ValueError, TypeError), match=complaint):
            call(prompts, GREEDY)
    assert llm.is_finished()
    assert llm.stats["num_waiting"] == 0


def test_sampling_params_must_fit_the_prompts(make_llm):
    llm = make_llm()
    with pytest.raises(ValueError, match="2 prompts but 1"):
        llm.generate([[1], [2]], [GREEDY])
    for params in ({"temperature": 0}, {}, 0):
        with pytest.raises(TypeError, match="sampling_params"):
            llm.generate([[1]], params)


def test_a_prompt_above_the_budget_needs_chunked_prefill(make_llm):
    with pytest.raises(ValueError, match="max_num_batched_tokens=8"):
        make_llm(enable_chunked_prefill=False, max_num_batched_tokens=8).add_request([1] * 9)
    chunked = make_llm(max_num_batched_tokens=8)
    assert len(generate_ids(chunked, [1] * 9, GREEDY)[0]) == 6


# Chat


def test_a_conversation_becomes_a_prompt_by_the_template(demo):
    (one,) = demo.chat([USER], GREEDY, use_tqdm=False)
    system = {"role": "system", "content": "Be brief."}
    two = demo.chat([[USER], [system, USER]], GREEDY, use_tqdm=False)
    assert one["token_ids"] == two[0]["token_ids"]
    assert "Be brief." in demo.tokenizer.decode(two[1]["prompt_token_ids"])
    rendered = demo.tokenizer.apply_chat_template(
        [USER], add_generation_prompt=True, tokenize=False
    )
    assert demo.tokenizer.decode(one["prompt_token_ids"]) == rendered
    assert demo.chat([], GREEDY) == []


def test_text_parts_of_a_message_are_joined(demo):
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "12 + 30?"}]
    assert demo.encode_chats([ask(parts)]) == demo.encode_chats([ask("What is\n12 + 30?")])


@pytest.mark.parametrize(
    "part, complaint",
    [
        ({"type": "image_url", "image_url": {"url": "data:" + "x" * 10000}}, "'image_url'"),
        ("text", "'str'"),
        ({"type": "text"}, "'text'"),
        ({"text": "hi"}, "None"),
    ],
    ids=["image", "str", "without-text", "without-type"],
)
def test_other_parts_of_a_message_are_named(demo, part, complaint):
    with pytest.raises(ValueError, match=complaint) as caught:
        demo.chat(ask([part]))
    assert len(str(caught.value)) < 200


def test_messages_that_are_none_are_rejected(demo, make_llm):
    with pytest.raises(TypeError, match="messages"):
        demo.chat("hi")
    for messages in ([["a"]], [3], [USER, "x"]):
        with pytest.raises(ValueError, match="messages do not fit"):
            demo.chat(messages)
    with pytest.raises(ValueError, match="no tokenizer"):
        make_llm().chat([USER])


def test_a_failing_chat_template_is_a_value_error(demo, monkeypatch):
    for template in (
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content.x.y }}",
        "{{ raise_exception('no') }}",
        "{{",
        None,
    ):
        monkeypatch.setattr(demo.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match="chat template"):
            demo.chat([USER])


def test_a_lone_surrogate_is_rejected(demo):
    """Half of an emoji cannot be encoded as UTF-8."""
    text = "x" * 50 + "\ud83d"
    for call, prompt in (demo.generate, text), (demo.add_request, text), (demo.chat, ask(text)):
        with pytest.raises(ValueError, match="lone surrogate"):
            call(prompt)
    with pytest.raises(ValueError, match="a conversation .* position"):
        demo.chat(ask([{"type": "text", "text": text}]))


def test_bos_comes_once(demo, monkeypatch):
    """As for Llama, the tokenizer puts BOS before a text, and the chat template writes it, too."""
    bos = "<|endoftext|>"
    bos_id = demo.tokenizer.convert_tokens_to_ids(bos)
    expected = [bos_id, *demo.tokenizer.encode(TEXT)]
    add_bos = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, bos_id)])
    monkeypatch.setattr(demo.tokenizer.backend_tokenizer, "post_processor", add_bos)
    monkeypatch.setattr(demo.tokenizer, "chat_template", bos + "{{ messages[0].content }}")
    (text,) = demo.generate(TEXT, GREEDY, use_tqdm=False)
    (chat,) = demo.chat([USER], GREEDY, use_tqdm=False)
    assert text["prompt_token_ids"] == expected
    assert chat["prompt_token_ids"] == expected
