"""Chat templates that rename roles and reject some messages, as Gemma's."""

from functools import partial

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nanovllm.text.chat_template import render_chats

# As Gemma 3's: the system message becomes a part of the first turn, the assistant is "model", and
# the content of a message can be a str or parts.
GEMMA = """{{ bos_token }}
{%- set system = "" %}{% set turns = messages %}
{%- if messages[0].role == "system" %}
{%- set system = messages[0].content + "\n\n" %}{% set turns = messages[1:] %}
{%- endif %}
{%- for message in turns %}
{%- if (message.role == "user") != (loop.index0 is even) %}
{{- raise_exception("roles must alternate") }}
{%- endif %}
{{- "<start>" + {"assistant": "model"}.get(message.role, message.role) + "\n" }}
{{- system if loop.first else "" }}
{%- if message.content is string %}{{ message.content | trim }}{% else %}parts{% endif %}
{{- "<end>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<start>model\n" }}{% endif %}"""


@pytest.fixture
def template():
    backend = Tokenizer(models.BPE({"<bos>": 0}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")
    tokenizer.chat_template = GEMMA
    return partial(render_chats, tokenizer)


def message(role, content):
    return {"role": role, "content": content}


def test_a_template_can_rename_roles(template):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [message("system", "s"), message("user", parts), message("assistant", " c ")]
    rendered = template([chat, [*chat, message("user", "d")]])
    start = "<bos><start>user\ns\n\na\nb<end>\n<start>model\nc<end>\n"
    assert rendered[0] == f"{start}<start>model\n"
    assert rendered[1] == f"{start}<start>user\nd<end>\n<start>model\n"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert template([chat], **options) == [start.removesuffix("<end>\n")]


@pytest.mark.parametrize("roles", [["assistant"], ["user", "user"], ["system", "assistant"]])
def test_roles_that_a_template_rejects(template, roles):
    chat = [message(role, "a") for role in roles]
    with pytest.raises(ValueError, match="cannot format these messages: roles must alternate"):
        template([chat])
