"""Makes structured_outputs out of response_format and of tools that a reply calls.

response_format            the format
tools, tool_choice auto    anything, or beside response_format: calls or the format
required, or a function    calls, also beside response_format
"""

from typing import Any, NamedTuple

from nanovllm.features.structured_outputs.grammar_writer import naming_outputs, write_rules
from nanovllm.features.structured_outputs.schemas import relax
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.server.errors import JsonObject
from nanovllm.server.tools import NO_TOOLS, ToolChoice, write_grammar
from nanovllm.utils.checks import check_bool, invalid, show

FORMAT_KEYS = {
    "text": ["type"],
    "json_object": ["type", "schema"],  # the schema is an extension of llama.cpp
    "json_schema": ["type", "json_schema"],
}


class Constraint(NamedTuple):
    """What constrains a reply."""

    outputs: Any  # structured_outputs of SamplingParams. None: nothing
    source: str = "structured_outputs"  # the parameter that they are made from, for errors


def choose_constraint(given: JsonObject, tools: ToolChoice = NO_TOOLS) -> Constraint:
    """Return what the parameters of a request, together, constrain."""
    schema = read_format(given)
    given_outputs = given.get("structured_outputs")
    if not tools.required and schema is None:
        return Constraint(given_outputs)
    name = "tool_choice" if tools.required else "response_format"
    if given_outputs is not None:
        meaning = "and structured_outputs both constrain the reply: leave one of them out"
        raise invalid(name, meaning)
    if tools.required:
        with naming_outputs("tools"):
            grammar = write_grammar(tools.required, tools.is_parallel)
        return Constraint({"grammar": grammar}, "tools")
    if tools.tools:
        return Constraint({"grammar": _write_alternatives(tools, schema)}, name)
    return Constraint({"json": schema}, name)


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


def _write_alternatives(tools: ToolChoice, schema: Any) -> str:
    """Write a grammar of calls or JSON.

    A call is optional, so unsupported keys of the tools' schemas are ignored.
    """
    with naming_outputs("tools"):
        calls = write_grammar(tools.tools, tools.is_parallel, is_lenient=True)
    with naming_outputs("response_format"):
        text = write_rules(StructuredOutputsParams(json=schema))
    parts = f"calls: %lark {{ {calls}\n}}\nformat: %lark {{ {text}\n}}"
    return f"start: calls | format\n{parts}"


def _check_keys(name: str, value: JsonObject, known: list[str]) -> None:
    """Reject other keys than the known ones, because they could change the result."""
    for key in value:
        if key not in known and value[key] is not None:
            raise invalid(f"{name}.{key}", "is not supported: leave it out")
