"""Names and bytes of single tokens, taken from the vocabulary.

Decoding a token alone loses what depends on its neighbors: a leading space, or a part of a
character. The vocabulary has both:

    GPT-2, Qwen, Llama 3       "Ġworld"             each sign stands for a byte
    Llama 2, Mistral 7B        "▁world", "<0xE4>"   signs for the space and for single bytes
"""

import re

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

# Tags around the reasoning and the tool calls of a reply. Some tokenizers have special tokens for
# them, which are text nevertheless.
THINK = "<think>"
END_THINK = "</think>"
TOOL_CALL = "<tool_call>"
END_TOOL_CALL = "</tool_call>"
TAGS = (THINK, END_THINK, TOOL_CALL, END_TOOL_CALL)
_BYTES = {sign: byte for byte, sign in bytes_to_unicode().items()}


class Vocabulary:
    """The tokens of a tokenizer, or of none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.added: dict[int, str] = {}  # special tokens and others that are written as they are
        self.special_ids: set[int] = set()
        if tokenizer is not None:
            self.special_ids.update(tokenizer.all_special_ids)
            for token_id, token in tokenizer.added_tokens_decoder.items():
                self.added[token_id] = token.content
                if token.special:
                    self.special_ids.add(token_id)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = repr(getattr(backend, "decoder", None))
        self.is_byte_level = "ByteLevel" in decoder
        self.is_sentencepiece = "▁" in decoder
        # Special tokens that are no text.
        self.hidden_ids = frozenset(i for i in self.special_ids if self.name(i) not in TAGS)

    def name(self, token_id: int) -> str:
        """The text of a token. Bytes that are no character are escaped, as in OpenAI's API."""
        return self.read_bytes(token_id).decode(errors="backslashreplace")

    def read_bytes(self, token_id: int) -> bytes:
        """The bytes of a token. A token without a text, such as padding, has a made-up one."""
        if token_id in self.added:
            return self.added[token_id].encode()
        piece = None
        if self.tokenizer is not None and token_id < len(self.tokenizer):
            piece = self.tokenizer.convert_ids_to_tokens(token_id)
        if self.tokenizer is None or not isinstance(piece, str):
            return f"token_id:{token_id}".encode()
        if self.is_byte_level and _BYTES.keys() >= set(piece):
            return bytes([_BYTES[sign] for sign in piece])
        if self.is_sentencepiece:
            byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace("▁", " ").encode()
        return str(self.tokenizer.decode([token_id])).encode()
