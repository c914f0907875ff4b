"""Makes structured_outputs out of response_format and of tools that a reply calls.

    response_format            the format
    tools, tool_choice auto    anything, or beside response_format: calls or the format
    required, or a function    calls, also beside response_format

With a reasoning parser, reasoning comes first, unless the prompt has closed it.
"""

from typing import Any

from nanovllm import LLM
from nanovllm.features.structured_outputs.grammar_writer import (
    allow_reasoning,
    naming_outputs,
    write_rules,
)
from nanovllm.features.structured_outputs.schemas import relax
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.server.errors import JsonObject
from nanovllm.server.message_parser import find_last_tag, read_continued
from nanovllm.server.tools import choose_tools, write_grammar
from nanovllm.text.chat_template import Tool
from nanovllm.text.vocabulary import END_THINK, THINK
from nanovllm.utils.checks import check_bool, invalid, show

FORMAT_KEYS = {
    "text": ["type"],
    "json_object": ["type", "schema"],  # the schema is an extension of llama.cpp
    "json_schema": ["type", "json_schema"],
}


def constrain(given: JsonObject, llm: LLM, is_chat: bool) -> list[Tool]:
    """Add structured_outputs to the parameters of a request, and return tools for the template.

    given["tools"] becomes those that the reply may call. given["constrained_by"] is the parameter
    that the constraint was made from, if it is not structured_outputs.
    """
    schema = read_format(given)
    tools: list[Tool] = []
    if is_chat:
        tools, required = choose_tools(given)
        given["tools"] = tools
        is_parallel = check_bool("parallel_tool_calls", given.get("parallel_tool_calls", True))
        if required:
            with naming_outputs("tools"):
                grammar = write_grammar(required, is_parallel)
            _add(given, "tool_choice", "tools", {"grammar": grammar})
            # Without tools in the template, the grammar alone makes the model write a call.
            return tools if llm.chat_template.uses_tools else []
    if schema is not None:
        outputs: JsonObject = {"json": schema}
        if tools:
            outputs = {"grammar": _write_alternatives(tools, is_parallel, schema)}
        _add(given, "response_format", "response_format", outputs)
    return tools


def read_format(given: JsonObject) -> JsonObject | None:
    """Return the schema of response_format, if it has one."""
    response_format: Any = given.get("response_format", {"type": "text"})
    match response_format:
        case {"type": "text" | "json_object" | "json_schema" as kind}:
            _check_keys("response_format", response_format, FORMAT_KEYS[kind])
    strict: Any = False
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"} if response_format.get("schema") in (None, {}):
            return {"type": "object"}
        case {"type": "json_object", "schema": dict(schema)}:
            pass
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)} as details}:
            name = "response_format.json_schema"
            _check_keys(name, details, ["name", "description", "schema", "strict"])
            strict = details.get("strict") or False
            check_bool(f"{name}.strict", strict)
        case other:
            meaning = "of type text, json_object, or json_schema with json_schema.schema"
            raise invalid("response_format", f"must be {meaning}, not {show(other)}")
    with naming_outputs("response_format"):
        return schema if strict else relax(schema)


def _write_alternatives(tools: list[Tool], is_parallel: bool, schema: JsonObject) -> str:
    """Write a grammar of calls or JSON.

    A call is optional, so unsupported keys of the tools' schemas are ignored.
    """
    with naming_outputs("tools"):
        calls = write_grammar(tools, is_parallel, is_lenient=True)
    with naming_outputs("response_format"):
        text = write_rules(StructuredOutputsParams(json=schema))
    parts = f"calls: %lark {{ {calls}\n}}\nformat: %lark {{ {text}\n}}"
    return f"start: calls | format\n{parts}"


def _check_keys(name: str, value: JsonObject, known: list[str]) -> None:
    """Reject other keys than the known ones, because they could change the result."""
    for key in value:
        if key not in known and value[key] is not None:
            raise invalid(f"{name}.{key}", "is not supported: leave it out")


def _add(given: JsonObject, name: str, source: str, structured_outputs: JsonObject) -> None:
    """Let the parameter `name` constrain the reply, with schemas of the parameter `source`."""
    if "structured_outputs" in given:
        meaning = "and structured_outputs both constrain the reply: leave one of them out"
        raise invalid(name, meaning)
    given |= {"structured_outputs": structured_outputs, "constrained_by": source}


def delay_constraint(
    outputs: StructuredOutputsParams, given: JsonObject, prompt: list[int], llm: LLM
) -> StructuredOutputsParams:
    """Let reasoning come before a constraint, unless the prompt has closed it."""
    tag = find_last_tag(prompt, read_continued(given), llm.vocabulary)
    return outputs if tag == END_THINK else allow_reasoning(outputs, is_open=tag == THINK)
