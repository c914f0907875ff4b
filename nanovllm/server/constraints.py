"""Tools and formats: what constrains a reply, as structured_outputs.

    response_format            the format
    tools, tool_choice auto    anything, or beside response_format: calls or the format
    required, or a function    calls, also beside response_format

A call is written as in the chat templates of Qwen3 and Hermes, or as in that of Qwen3.5:

    <tool_call>                                                <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}    <function=get_weather>
    </tool_call>                                               <parameter=city>
                                                               Paris
                                                               </parameter>
                                                               </function>
                                                               </tool_call>

Where a call is required, a grammar makes any model write the first form.
"""

import json
from typing import Any, NamedTuple

from nanovllm.features.structured_outputs.grammar_writer import (
    JSON_DEFAULTS,
    NO_FORCING,
    naming_outputs,
)
from nanovllm.features.structured_outputs.grammars import check_in_process
from nanovllm.features.structured_outputs.schemas import write_schema
from nanovllm.server.errors import JsonObject
from nanovllm.server.parameters import select
from nanovllm.text.chat_template import Tool, check_tools
from nanovllm.text.vocabulary import END_TOOL_CALL, TOOL_CALL
from nanovllm.utils.checks import check_bool, check_type, invalid, show

# As json.dumps and templates write JSON. Small models can repeat optional spaces forever.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A function takes only the arguments that its schema names. Parts of a combination can name more.
OBJECT = {"type": "object", "additionalProperties": False}
ANY_OBJECT = {"type": "object", "additionalProperties": True}
COMBINATIONS = {"$ref", "allOf", "anyOf", "oneOf"}


class ToolChoice(NamedTuple):
    """What a request says of calls."""

    tools: list[Tool]  # that the reply may call
    required: list[Tool]  # of which it must call one
    is_parallel: bool  # it may have several calls
    is_named: bool  # the request names the function to call


def choose_tools(given: JsonObject) -> ToolChoice:
    """Read tools, tool_choice and parallel_tool_calls.

    Raises ValueError or TypeError that names the parameter at fault.
    """
    choice = given.get("tool_choice", "auto")
    tools = given.get("tools", [])
    if tools != []:
        check_tools(tools)
    required: list[Tool] = []
    for tool in tools:
        named = {"type": "function", "function": {"name": tool["function"]["name"]}}
        if choice in ("required", named):
            required.append(tool)
    if choice not in ("none", "auto") and not required:
        meaning = "'none' or 'auto', or with tools 'required' or the name of one"
        raise invalid("tool_choice", f"must be {meaning}, not {show(choice)}")
    is_parallel = check_bool("parallel_tool_calls", given.get("parallel_tool_calls", True))
    is_named = isinstance(choice, dict)
    is_parallel = is_parallel and not is_named
    return ToolChoice([] if choice == "none" else tools, required, is_parallel, is_named)


def choose_constraint(given: JsonObject, tools: ToolChoice) -> Any:
    """Return the structured_outputs that hold all that a request asks for, or None."""
    text_format = read_format(given)
    outputs = given.get("structured_outputs")
    if not tools.required and text_format is None:
        return outputs
    if outputs is not None:
        name = "tool_choice" if tools.required else "response_format"
        advice = "leave one of them out"
        raise invalid(name, f"and structured_outputs both constrain the reply: {advice}")
    if tools.required:
        return {"grammar": write_required(tools)}
    if tools.tools:
        return {"grammar": write_alternatives(tools, str(text_format))}
    return {"grammar": f"start: {text_format}"}


def write_required(tools: ToolChoice) -> str:
    """Write a grammar of required calls. Raises ValueError that names the tool at fault."""
    try:
        return write_checked("tools", tools.required, tools.is_parallel)
    except ValueError:
        for tool in tools.required:
            name = f"tools[{tools.tools.index(tool)}].function.parameters"
            write_checked(name, [tool], tools.is_parallel)
        raise


def read_format(given: JsonObject) -> str | None:
    """Return response_format as an expression of a grammar, if it constrains the text."""
    response_format: Any = given.get("response_format", {})
    if response_format == {}:
        return None
    prefix = "response_format."
    strict = False
    match response_format:
        case {"type": "text"}:
            select(response_format, {"type"}, prefix)
            return None
        case {"type": "json_object"}:
            schema = response_format.get("schema")
            if schema is None or schema == {}:
                schema = {"type": "object"}
            keys = {"type", "schema"}  # the schema is an extension of llama.cpp
        case {"type": "json_schema", "json_schema": {"schema": schema} as details}:
            keys = {"type", "json_schema"}
            name = "response_format.json_schema."
            details = select(details, {"name", "description", "schema", "strict"}, name)
            strict = check_bool(f"{name}strict", details.get("strict", False))
        case other:
            meaning = "of type text, json_object, or json_schema with json_schema.schema"
            raise invalid("response_format", f"must be {meaning}, not {show(other)}")
    select(response_format, keys, prefix)
    with naming_outputs("response_format"):
        check_type("schema", schema, (dict,), "an object")
        return f"%json {write_schema(schema, JSON_DEFAULTS, strict)}"


def write_alternatives(tools: ToolChoice, text_format: str) -> str:
    """Write a grammar of calls or of a format.

    A call is optional. If no grammar holds the arguments of all tools, they are any objects.
    """
    try:
        return write_checked("tools", tools.tools, tools.is_parallel, text_format)
    except ValueError:
        names = [tool["function"]["name"] for tool in tools.tools]
        loose = [{"function": {"name": name, "parameters": ANY_OBJECT}} for name in names]
        return write_grammar(loose, tools.is_parallel, text_format)


def write_checked(name: str, *args: Any) -> str:
    """Write a grammar that can be compiled. Otherwise, the error begins with `name`."""
    with naming_outputs(name):
        grammar = write_grammar(*args)
        check_in_process(grammar + NO_FORCING)
        return grammar


def write_grammar(tools: list[Tool], is_parallel: bool, *others: str) -> str:
    """Write a grammar, in llguidance's variant of Lark, of a call of one of `tools`, or of more.

    `others` are expressions of what may come in place of calls.
    """
    calls: list[str] = []
    for tool in tools:
        function = tool["function"]
        head = f'{TOOL_CALL}\n{{"name": "{function["name"]}", "arguments": '
        parameters = function.get("parameters") or {}
        if "type" in parameters:  # an object is one of several types
            parameters = {**parameters, "type": "object"}
        defaults = {} if COMBINATIONS & parameters.keys() else OBJECT
        is_strict = function.get("strict") is True
        schema = write_schema({**defaults, **parameters, "x-guidance": {}}, JSON_STYLE, is_strict)
        tail = f"}}\n{END_TOOL_CALL}"
        calls.append(f"{json.dumps(head)} %json {schema} {json.dumps(tail)}")
    several = 'call ("\\n" call)*' if is_parallel else "call"
    return f"start: {' | '.join([several, *others])}\ncall: {' | '.join(calls)}"
