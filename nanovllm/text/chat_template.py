"""Turns the messages and tools of a chat into a prompt, by the checkpoint's chat template.

A template prints whatever it gets, such as a dict as its Python repr. Messages must therefore be
what OpenAI's API allows: https://platform.openai.com/docs/api-reference/chat/create
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any

from nanovllm.text.foreign_code import call_foreign
from nanovllm.utils.checks import check_bool, check_choice, check_type, invalid, show
from nanovllm.utils.helpers import as_list

JsonObject = dict[str, Any]
# {"role": one of ROLES, "content": text}, where the text is a str or a list of parts
# {"type": "text", "text": str}. The content of an assistant or a tool may be None or []. That of an
# assistant may have parts {"type": "refusal", "refusal": str}. Its "tool_calls" are a list of
# {"type": "function", "id": str, "function": {"name": str, "arguments": JSON of a dict}}.
# Models do not always write valid JSON, so the arguments of a call can be any str.
Message = JsonObject
# {"type": "function", "function": {"name": str, "parameters": JSON schema, ...}}
Tool = JsonObject

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)  # name of a function
ROLES = ("system", "developer", "user", "assistant", "tool")


def uses_tools(tokenizer: Any) -> bool:
    """Return whether the chat template of a tokenizer shows tools to the model."""
    template = str(getattr(tokenizer, "chat_template", ""))
    # Phi-4-mini's has message['tools'], which is not the variable.
    return "tools" in template.replace("'tools'", "")


def render_chats(
    tokenizer: Any,
    conversations: list[list[Message]],
    tools: list[Tool] | None = None,
    chat_template_kwargs: JsonObject | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> list[str]:
    """Return the texts of conversations, see `LLM.chat`. Raises ValueError or TypeError."""
    if tools and not uses_tools(tokenizer):
        raise invalid("tools", "need a chat template that uses them: this model's does not")
    variables = chat_template_kwargs or {}
    check_type("chat_template_kwargs", variables, dict, "a dict")
    # Clients of a server must not set parameters of apply_chat_template. chat_template, for
    # example, would run their own code.
    reserved = {"self", "messages", *signature(tokenizer.apply_chat_template).parameters}
    for name in sorted(reserved & (variables.keys() - {"documents"})):
        raise invalid(f"chat_template_kwargs.{name}", "is no variable of the chat template")
    apply = partial(
        tokenizer.apply_chat_template,
        tools=check_tools(tools) if tools else None,
        add_generation_prompt=check_bool("add_generation_prompt", add_generation_prompt),
        continue_final_message=check_bool("continue_final_message", continue_final_message),
        tokenize=False,
        **variables,
    )
    problem = "the checkpoint's chat template cannot format these messages"
    return [
        str(call_foreign(problem, partial(apply, prepare_messages(conversation))))
        for conversation in conversations
    ]


def prepare_messages(conversation: Any) -> list[Message]:
    """Return the messages with their content as one str, and arguments of tool calls as dicts.

    Other fields are left to the template. Raises ValueError that names the field at fault.
    """
    prepared: list[Message] = []
    for name, message in _list_dicts("messages", conversation):
        role = check_choice(f"{name}.role", message.get("role"), ROLES)
        content = message.get("content")
        if role in ("assistant", "tool") and content in (None, []):
            content = ""
        kinds = ("text", "refusal") if role == "assistant" else ("text",)
        message = {**message, "content": _join_parts(f"{name}.content", content, kinds)}
        calls = message.pop("tool_calls", None)
        if calls not in (None, []):
            message["tool_calls"] = [
                _prepare_call(call_name, call)
                for call_name, call in _list_dicts(f"{name}.tool_calls", calls)
            ]
        prepared.append(message)
    return prepared


def check_tools(tools: Any) -> list[Tool]:
    """Require tools with the names that OpenAI allows, and objects as parameters."""
    for name, tool in _list_dicts("tools", tools):
        parameters = _read_function(name, tool).get("parameters")
        is_object = parameters is None or (
            isinstance(parameters, dict) and "object" in as_list(parameters.get("type", "object"))
        )
        _require(is_object, f"{name}.function.parameters", "a schema of an object", parameters)
    return list(tools)


def _read_function(name: str, call: JsonObject) -> JsonObject:
    """Return the function of a tool, or of a call."""
    check_choice(f"{name}.type", call.get("type"), ("function",))
    function: Any = call.get("function")
    _require(isinstance(function, dict), f"{name}.function", "a dict with a name", function)
    text = function.get("name")
    is_valid = isinstance(text, str) and NAME.fullmatch(text) is not None
    meaning = "a str of up to 64 letters, digits and _.-"
    _require(is_valid, f"{name}.function.name", meaning, text)
    return function


def _prepare_call(name: str, call: JsonObject) -> JsonObject:
    """Return a call with its arguments as a dict, because templates loop over them.

    Arguments that are not JSON of an object become the value of one argument, which shows the model
    its mistake.
    """
    function = _read_function(name, call)
    given = function.get("arguments") or {}
    arguments = given
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(given)
    if not isinstance(arguments, dict):
        arguments = {"arguments": given} if arguments is not None else {}
    return {**call, "function": {**function, "arguments": arguments}}


def _join_parts(name: str, content: Any, kinds: tuple[str, ...]) -> str:
    """Return the content of a message as one str. Parts are joined by newlines, as in vLLM.

    A part has its text in the field of its type, which is one of `kinds`.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part_name, part in _list_dicts(name, content, "a str or a list of parts"):
        kind = check_choice(f"{part_name}.type", part.get("type"), kinds)
        text: Any = part.get(kind)
        _require(isinstance(text, str), f"{part_name}.{kind}", "a str", text)
        texts.append(text)
    return "\n".join(texts)


def _list_dicts(
    name: str, values: Any, meaning: str = "a list of dicts"
) -> Iterator[tuple[str, JsonObject]]:
    """Require dicts in a list or a tuple, at least one. Yield each with its name."""
    _require(isinstance(values, (list, tuple)) and len(values) > 0, name, meaning, values)
    for index, value in enumerate(values):
        _require(isinstance(value, dict), f"{name}[{index}]", "a dict", value)
        yield f"{name}[{index}]", value


def _require(condition: bool, name: str, meaning: str, value: object) -> None:
    if not condition:
        raise invalid(name, f"must be {meaning}, not {show(value)}")
