"""Checks the messages of a chat and prepares them for the checkpoint's chat template.

A template prints whatever it gets, such as a dict as its Python repr. Messages must therefore be
what OpenAI's API allows: https://platform.openai.com/docs/api-reference/chat/create
"""

from typing import Any

from nanovllm.checks import invalid, show

# {"role": one of ROLES, "content": text}, where the text is a str or a list of parts
# {"type": "text", "text": str}. An assistant's content may be None.
Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED = ("tool_calls", "function_call", "audio")
TEXTS = ("name", "tool_call_id", "refusal", "reasoning_content")  # a str, or None


def prepare_messages(conversation: Any) -> list[Message]:
    """Return the messages with their content as one str. Other fields are left to the template.

    Raises ValueError that names the field at fault.
    """
    if not isinstance(conversation, (list, tuple)) or not conversation:
        raise invalid("messages", f"must be a list of dicts, not {show(conversation)}")
    prepared: list[Message] = []
    for index, message in enumerate(conversation):
        name = f"messages[{index}]"
        _require(isinstance(message, dict), name, "a dict with role and content", message)
        role = message.get("role")
        is_known = isinstance(role, str) and role in ROLES
        _require(is_known, f"{name}.role", f"one of {', '.join(map(repr, ROLES))}", role)
        for field in UNSUPPORTED:
            if message.get(field) not in (None, []):
                raise invalid(f"{name}.{field}", "is not supported: leave it out")
        for field in TEXTS:
            text = message.get(field)
            _require(text is None or isinstance(text, str), f"{name}.{field}", "a str", text)
        content = message.get("content")
        if content is None and role == "assistant":
            content = ""
        prepared.append({**message, "content": _join_parts(f"{name}.content", content)})
    return prepared


def _join_parts(name: str, content: Any) -> str:
    """Return the content of a message as one str. Parts are joined by newlines, as in vLLM."""
    if isinstance(content, str):
        return content
    is_list = isinstance(content, (list, tuple)) and len(content) > 0
    _require(is_list, name, "a str or a list of parts", content)
    texts: list[str] = []
    for index, part in enumerate(content):
        part_name = f"{name}[{index}]"
        _require(isinstance(part, dict), part_name, "a dict with type and text", part)
        kind = part.get("type")
        _require(kind == "text", f"{part_name}.type", "'text', the only one supported", kind)
        text = part.get("text")
        _require(isinstance(text, str), f"{part_name}.text", "a str", text)
        texts.append(text)
    return "\n".join(texts)


def _require(condition: bool, name: str, meaning: str, value: object) -> None:
    if not condition:
        raise invalid(name, f"must be {meaning}, not {show(value)}")
