"""Streams of text: no broken characters, nothing lost, the same text however the tokens arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman_text import StreamDetokenizer, TextTokenizer, TokenizerFiles, byte_tokenizer_files

BYTES = TextTokenizer.from_files(byte_tokenizer_files())
B01 = "naïve 你好 👩\u200d👩\u200d👧 e\u0301 🏳️\u200d🌈"

byte_ids = st.lists(st.integers(0, 258), max_size=60)
text_ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(BYTES.encode)


def stream(tokenizer: TextTokenizer, ids: list[int], sizes: list[int], *, skip: bool) -> list[str]:
    """Pieces of text for `ids` pushed in groups of the given sizes, then one at a time, the flush last."""
    detokenizer = StreamDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    pieces += [detokenizer.push_token(token_id) for token_id in ids[start:]]
    return [*pieces, detokenizer.flush()]


@given(ids=st.one_of(byte_ids, text_ids), sizes=st.lists(st.integers(0, 5), max_size=20), skip=st.booleans())
def test_joined_pieces_are_the_decoded_whole(ids: list[int], sizes: list[int], skip: bool) -> None:
    assert "".join(stream(BYTES, ids, sizes, skip=skip)) == BYTES.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans())
def test_joined_pieces_with_the_model_tokenizer(smol_tokenizer: TextTokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, smol_tokenizer.vocab_size - 1), max_size=30))
    joined = "".join(stream(smol_tokenizer, ids, [], skip=skip))
    assert joined == smol_tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=st.one_of(byte_ids, text_ids), split=st.integers(0, 60))
def test_text_up_to_a_token_depends_on_nothing_after_it(ids: list[int], split: int) -> None:
    """A stream resumed by replaying its tokens continues exactly where the first one stood."""
    first, resumed = StreamDetokenizer(BYTES), StreamDetokenizer(BYTES)
    before = "".join(first.push([token_id]) for token_id in ids[:split])
    assert resumed.push(ids[:split]) == before
    assert first.push(ids[split:]) + first.flush() == resumed.push(ids[split:]) + resumed.flush()


@given(ids=text_ids)
def test_valid_text_never_shows_a_replacement_character_early(ids: list[int]) -> None:
    text = BYTES.decode(ids)
    shown = ""
    detokenizer = StreamDetokenizer(BYTES)
    for token_id in ids:
        shown += detokenizer.push([token_id])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.flush() == ""


def test_characters_of_several_tokens_come_whole(smol_tokenizer: TextTokenizer) -> None:
    ids = smol_tokenizer.encode(B01, add_special_tokens=False)
    assert len(ids) > len(B01)  # several tokens a character, or this shows nothing
    pieces = stream(smol_tokenizer, ids, [], skip=True)
    assert "".join(pieces) == B01
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_cut_character_ends_as_one_replacement_character() -> None:
    for cut in range(1, len("🙂".encode())):
        assert "".join(stream(BYTES, list(b"a" + "🙂".encode()[:cut]), [], skip=True)) == "a\ufffd"


def test_the_model_stops_inside_the_family(smol_tokenizer: TextTokenizer) -> None:
    ids = smol_tokenizer.encode(B01, add_special_tokens=False)
    for cut in range(len(ids)):
        text = "".join(stream(smol_tokenizer, ids[:cut], [], skip=True))
        assert text == smol_tokenizer.decode(ids[:cut])
        assert text.count("\ufffd") <= 1
        assert B01.startswith(text.rstrip("\ufffd"))


@pytest.mark.parametrize("text", ["\nword", "    four spaces", "The end.", "\ttab\t", "a\r\nb", " lead", "trail "])
def test_spaces_are_kept(smol_tokenizer: TextTokenizer, text: str) -> None:
    ids = smol_tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(smol_tokenizer, ids, [], skip=True)) == text


def test_special_tokens_are_shown_only_when_asked_for() -> None:
    ids = [*b"a", 258, *b"b"]
    assert "".join(stream(BYTES, ids, [], skip=True)) == "ab"
    assert "".join(stream(BYTES, ids, [], skip=False)) == "a<|im_end|>b"


@given(text=st.text(alphabet="ab hello", max_size=20))
def test_sentencepiece_style_drops_one_leading_space(sentencepiece_files: TokenizerFiles, text: str) -> None:
    tokenizer = TextTokenizer.from_files(sentencepiece_files)
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids, [], skip=True)) == tokenizer.decode(ids) == text


@given(
    text=st.text(st.one_of(st.sampled_from("ab é漢🙂\u200d"), st.characters(exclude_categories=["Cs"])), max_size=20)
)
def test_characters_made_of_byte_pieces_come_whole(sentencepiece_files: TokenizerFiles, text: str) -> None:
    """A vocabulary of words that spells other characters as bytes, a token each."""
    text = text.replace("▁", "").replace("\x00", "")  # its own sign of a space; a null has no piece
    tokenizer = TextTokenizer.from_files(sentencepiece_files)
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids, [], skip=True)
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    if text.endswith("🙂"):
        assert "".join(stream(tokenizer, ids[:-1], [], skip=True)) == text[:-1] + "\ufffd"


def test_an_unknown_id_is_refused() -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        StreamDetokenizer(BYTES).push([5000])
