"""Tool calls: which ones a request allows, and how they are written.

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
from typing import NamedTuple

from nanovllm.features.structured_outputs.schemas import COMBINATIONS, relax, write_schema
from nanovllm.server.errors import JsonObject
from nanovllm.text.chat_template import Tool, check_tools
from nanovllm.text.vocabulary import END_TOOL_CALL, TOOL_CALL
from nanovllm.utils.checks import check_bool, invalid, show

# As json.dumps and templates write JSON. Small models can repeat optional spaces forever.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A function takes only the arguments that its schema names. Parts of a combination can name more.
OBJECT = {"type": "object", "additionalProperties": False}


class ToolChoice(NamedTuple):
    """What a request says of calls."""

    tools: list[Tool]  # that the reply may call
    required: list[Tool]  # of which it must call one
    is_parallel: bool = True  # it may have several calls
    is_named: bool = False  # the request names the function to call


NO_TOOLS = ToolChoice([], [])


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
    return ToolChoice([] if choice == "none" else tools, required, is_parallel, is_named)


def write_grammar(tools: list[Tool], is_parallel: bool, is_lenient: bool = False) -> str:
    """Write a grammar, in llguidance's variant of Lark, of a call of one of `tools`, or of more.

    If it `is_lenient`, unsupported keys of all schemas are ignored.
    """
    style = {**JSON_STYLE, "lenient": is_lenient}
    calls: list[str] = []
    for tool in tools:
        function = tool["function"]
        head = f'{TOOL_CALL}\n{{"name": "{function["name"]}", "arguments": '
        parameters = function.get("parameters") or {}
        defaults = {} if COMBINATIONS & parameters.keys() else OBJECT
        if True not in (function.get("strict"), tool.get("strict")):
            parameters = relax(parameters)
        schema = write_schema({**defaults, **parameters, "x-guidance": style}, {})
        tail = f"}}\n{END_TOOL_CALL}"
        calls.append(f"{json.dumps(head)} %json {schema} {json.dumps(tail)}")
    more = ' ("\\n" call)*' if is_parallel else ""
    return f"start: call{more}\ncall: {' | '.join(calls)}"
