"""Text sources, and the spans of tokens taken from them."""

from __future__ import annotations

import hashlib

import pytest

from quantize_state.evals.text import load_text, tokenise
from quantize_state.quant.errors import FileFormatError, InvalidValueError


class Bytes:
    """A byte-level tokenizer in the form of a Hugging Face one."""

    def __init__(self) -> None:
        self.characters = 0

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        self.characters += len(text)
        return {"input_ids": list(text.encode())}


def test_pydoc_is_the_language_reference():
    source = load_text("pydoc")
    assert len(source.text) > 300_000 and "yield" in source.text
    assert source.sha256 == hashlib.sha256(source.text.encode()).hexdigest()
    assert load_text("pydoc") == source


def test_stdlib_has_sources_but_neither_tests_nor_the_held_out_text():
    source = load_text("stdlib")
    assert "class OrderedDict(dict)" in source.text
    assert "import unittest\n\nif __name__ ==" not in source.text
    assert "topics = {'assert'" not in source.text
    assert source == load_text("stdlib")


def test_a_file(tmp_path):
    path = tmp_path / "some.txt"
    path.write_bytes(b"\xef\xbb\xbfpl\xc3\xa4in")
    assert (load_text(str(path)).name, load_text(str(path)).text) == ("some.txt", "pl\u00e4in")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\x89PNG\r\n", "byte 0"), (b"abc\x00def", "NUL at character 3"), (b"  \n", "is empty"), (b"caf\xe9", "UTF-8")],
)
def test_a_file_that_is_no_text(tmp_path, content, message):
    path = tmp_path / "some.txt"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        load_text(str(path))


def test_a_source_that_is_not_there(tmp_path):
    with pytest.raises(InvalidValueError, match="Did you mean 'pydoc'"):
        load_text("pydocs")
    with pytest.raises(InvalidValueError, match="does not exist"):
        load_text(str(tmp_path / "no.txt"))
    with pytest.raises(InvalidValueError, match="is a folder"):
        load_text(str(tmp_path))


def test_spans_are_contiguous_apart_and_decided_by_the_seed():
    text = "".join(chr(33 + i % 90) + chr(33 + i // 90 % 90) for i in range(5000))
    spans = tokenise(Bytes(), text, 700, 4, seed=1)
    assert [len(span) for span in spans] == [700] * 4
    whole, at = text.encode(), 0
    for span in spans:
        at = whole.index(bytes(span), at) + 700
    assert tokenise(Bytes(), text, 700, 4, seed=1) == spans
    assert tokenise(Bytes(), text, 700, 4, seed=2) != spans


def test_the_whole_text_can_be_used():
    spans = tokenise(Bytes(), "abcdefgh", 4, 2)
    assert [bytes(span) for span in spans] == [b"abcd", b"efgh"]


def test_too_short_a_text_says_what_it_gives():
    with pytest.raises(
        InvalidValueError, match=r"gives 1,000 tokens, fewer than the 2,048 asked for \(2 × 1,024\); ask for 500"
    ):
        tokenise(Bytes(), "x" * 1000, 1024, 2)
    with pytest.raises(InvalidValueError, match="fewer than 8 sequences"):
        tokenise(Bytes(), "abc", 1, 8)


@pytest.mark.parametrize(("tokens", "sequences"), [(0, 1), (-5, 1), (10, 0)])
def test_numbers_below_one(tokens, sequences):
    with pytest.raises(InvalidValueError, match="must be 1 or more"):
        tokenise(Bytes(), "abc", tokens, sequences)


def test_a_long_text_is_not_tokenised_whole():
    tokenizer = Bytes()
    text = "".join(f"line {i}\n" for i in range(400_000))
    (span,) = tokenise(tokenizer, text, 64)
    assert bytes(span) in text.encode()
    assert tokenizer.characters <= 1 << 20 < len(text)
