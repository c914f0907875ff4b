"""POST /tokenize and POST /detokenize, as in vLLM."""

from typing import Any

from nanovllm import LLM
from nanovllm.server.chat_completions import encode_chat
from nanovllm.server.errors import JsonObject
from nanovllm.server.parameters import TOKENIZE_CHAT, select
from nanovllm.utils.checks import check_bool, check_int, check_ints, check_str, invalid, naming


def tokenize(body: JsonObject, llm: LLM) -> JsonObject:
    """Return the reply for `messages` or for a `prompt`."""
    is_chat = "messages" in body
    given = select(body, TOKENIZE_CHAT if is_chat else {"model", "prompt", "add_special_tokens"})
    if is_chat:
        ids = encode_chat(given, given.get("tools", []), llm)
    else:
        prompt: Any = given.get("prompt")
        check_str("prompt", prompt)
        adds_special = check_bool("add_special_tokens", given.get("add_special_tokens", True))
        ids = llm.input_processor.encoder.tokenize(prompt, adds_special)
    return {"tokens": ids, "count": len(ids), "max_model_len": llm.max_model_len}


def detokenize(body: JsonObject, llm: LLM) -> JsonObject:
    """Return the reply for `tokens`: their text, with special tokens."""
    given = select(body, {"model", "tokens"})
    tokens: Any = given.get("tokens")
    ids = check_ints("tokens", tokens, 0)
    check_int("tokens", max(ids, default=0), 0, llm.vocab_size - 1)
    if llm.tokenizer is None:
        raise invalid("tokens", "need a tokenizer, which the checkpoint does not have")
    with naming("the tokenizer cannot decode the tokens", Exception):
        return {"prompt": llm.tokenizer.decode(ids, clean_up_tokenization_spaces=False)}
