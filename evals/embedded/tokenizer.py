"""A byte-level tokenizer: 256 ids, each the value of its byte.

It is an ordinary Hugging Face fast tokenizer, a BPE without merges over the byte-level alphabet, so it loads
anywhere with ``AutoTokenizer``. Text of n bytes gives n ids, which makes bits per byte the loss itself.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE, mapped to the byte.

    Bytes that print stand for themselves, the others for 256, 257, … in order: GPT-2's convention,
    which the tokenizers library implements.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {characters[byte]: byte for byte in range(256)}


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer and make sure that ids are bytes."""
    core = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=max_length, clean_up_tokenization_spaces=False
    )
    sample = "".join(chr(code) for code in range(0x800)) + " \t\n don't  €漢🙂"
    assert tokenizer(sample)["input_ids"] == list(sample.encode())
    assert tokenizer.decode(list(sample.encode())) == sample
    return tokenizer
