"""Small tokenizers of two kinds: byte-level, and characters with a fallback to bytes."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ["<s>", "</s>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = bytes_to_unicode()  # GPT-2's names of the bytes
WORDS = [*"abcdehnorst", "the", "cat"]


def wrap(model, decoder, pre_tokenizer=None, normalizer=None):
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def number(tokens):
    return {token: index for index, token in enumerate(tokens)}


def byte_level():
    """As in GPT-2, Qwen and Llama 3. Tokens such as b".\\xe2" end within a character."""
    merges = [("Ġ", "t"), ("Ã", "©"), (".", "â"), ("ä", "½")]
    vocabulary = number([*LETTERS.values(), *map("".join, merges)])
    return wrap(
        models.BPE(vocabulary, merges),
        decoders.ByteLevel(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )


def byte_fallback(strip):
    """As in Llama 2, which strips the first space, and in Gemma, which does not."""
    vocabulary = number(["<unk>", *BYTES, "▁", "▁the", *WORDS])
    model = models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    normalizer = [normalizers.Replace(" ", "▁")]
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        normalizer.insert(0, normalizers.Prepend("▁"))
        decoder.append(decoders.Strip(" ", 1, 0))
    return wrap(model, decoders.Sequence(decoder), None, normalizers.Sequence(normalizer))
