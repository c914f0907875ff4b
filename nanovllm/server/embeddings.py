"""POST /v1/embeddings: a vector for each input."""

import base64
from dataclasses import dataclass, field
from typing import Any

from nanovllm import LLM
from nanovllm.engine.input_processor import PreparedPrompt
from nanovllm.features.embeddings import read_vectors
from nanovllm.server.errors import JsonObject
from nanovllm.server.parameters import select
from nanovllm.server.replies import Generation, Reply, StreamOptions
from nanovllm.utils.checks import check_choice, check_type

MAX_INPUTS = 2048  # OpenAI's limit


def parse_embeddings(model: str, body: JsonObject, llm: LLM) -> Generation:
    """Return the prompts that a request embeds, checked."""
    given = select(body, {"model", "input", "encoding_format", "pooling", "cache_salt"})
    meaning = "a str, a list of token ids, or a list of these"
    inputs = check_type("input", given.get("input"), (str, list), meaning)
    prepared = llm.prepare_embeddings(inputs, given.get("pooling"), given.get("cache_salt"))
    if not 1 <= len(prepared) <= MAX_INPUTS:
        raise ValueError(f"input must have 1 to {MAX_INPUTS} entries, not {len(prepared)}")
    encoding = given.get("encoding_format", "float")
    check_choice("encoding_format", encoding, ("float", "base64"))
    reply = EmbeddingReply(model, StreamOptions(), llm.vocabulary, prepared, encoding == "base64")
    return Generation(prepared, reply)


@dataclass
class EmbeddingReply(Reply):
    """Writes vectors, normalized, as numbers or as base64 of little-endian float32."""

    ID_PREFIX = "embd"
    KIND = "list"

    prompts: list[PreparedPrompt] = field(default_factory=list)
    is_base64: bool = False

    def write_whole(self) -> JsonObject:
        data: list[JsonObject] = []
        for index, vector in enumerate(read_vectors(self.prompts, normalize=True)):
            embedding: Any = vector.tolist()
            if self.is_base64:
                embedding = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        return {**self.head, "data": data, "usage": self.write_usage()}
