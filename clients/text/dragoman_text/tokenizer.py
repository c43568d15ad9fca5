"""Text to token ids and back, on the `tokenizers` library, with control tokens only where they are asked for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from dragoman_text.files import TokenizerFiles, TokenizerFilesError

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# Tokenizers that shorten a text before they cut it (normal forms, stripped spaces) take off less than this.
_SHORTENING = 4
_LONG_CHARS = 1000  # of a text that takes some milliseconds
_FIRST_CHARS = 8  # of a long text are tokenized first, for each token that fits: more than most texts have


class TextTooLong(ValueError):
    """A text that cannot fit however it is tokenized, found without tokenizing it."""

    def __init__(self, num_tokens: int, max_num_tokens: int) -> None:
        """`num_tokens`: a lower bound of what it has."""
        super().__init__(f"the text has at least {num_tokens} tokens, at most {max_num_tokens} fit; shorten it")
        self.num_tokens = num_tokens


class TextTokenizer:
    """The tokenizer of one model. Threads may share it.

    Text is never normalised here; a tokenizer whose own file asks for a normalisation gets exactly that one.
    """

    def __init__(self, files: TokenizerFiles, tokenizer: Tokenizer) -> None:
        self.files = files
        self._tokenizer = tokenizer
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self._num_ids = max(max(vocabulary.values(), default=-1) + 1, files.vocab_size or 0)
        self._bytes: list[bytes | None] = [None] * self._num_ids
        self.ascii_texts: dict[int, str] = {}  # of the tokens streamed so far whose bytes are ASCII
        self._style, self.strips_leading_space = _decoder_style(tokenizer)
        self._special_ids = frozenset(token_id for token_id, token in self._added.items() if token.special)
        self._special_contents = {self._added[token_id].content: token_id for token_id in self._special_ids}

    @classmethod
    def from_files(cls, files: TokenizerFiles) -> TextTokenizer:
        """Build from `files`. Raises TokenizerFilesError when the tokenizer cannot be read or is of an unknown kind."""
        tokenizer = _load(files)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        built = cls(files, tokenizer)
        for name, token_id in [("bos", files.bos_token_id), *(("eos", eos) for eos in files.eos_token_ids)]:
            if token_id is not None and not 0 <= token_id < built.vocab_size:
                raise TokenizerFilesError(
                    f"tokenizer: the {name} token id {token_id} is outside the vocabulary of {built.vocab_size} tokens; "
                    "the model's files contradict each other, fetch them again"
                )
        return built

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id, or the model's own number of ids where the files give it."""
        return self._num_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens: never made from text unless `parse_special`, never shown when skipped."""
        return self._special_ids

    @property
    def special_tokens(self) -> dict[str, int]:
        """Control tokens as text -> id."""
        return dict(self._special_contents)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        return frozenset(self.files.eos_token_ids)

    def added_token(self, token_id: int) -> AddedToken | None:
        """The added-token record of `token_id`, None for a plain vocabulary entry."""
        return self._added.get(token_id)

    def check_size(self, text: str, max_num_tokens: int) -> None:
        """Raises TextTooLong for a text with too many bytes for `max_num_tokens`, in the time that counting them takes."""
        # A lone surrogate is refused by `encode`; here it only counts.
        least = len(text.encode("utf-8", "surrogatepass")) // (self._max_token_bytes * _SHORTENING)
        if least > max_num_tokens and not self._merges_unknown:
            raise TextTooLong(least, max_num_tokens)

    def check_beginning(self, text: str, max_num_tokens: int) -> None:
        """Raises TextTooLong for a text whose beginning has too many tokens alone: a long one need not be tokenized whole.

        It takes less than twice the time of the part that is looked at. Raises ValueError as `encode` does.
        """
        num_chars = _FIRST_CHARS * (max_num_tokens + 64)
        while 2 * num_chars < len(text) and not self._merges_unknown:
            # Read as control tokens where it could be: no other reading has fewer. The cut may have made some more.
            num_tokens = len(self.encode(text[:num_chars], add_special_tokens=False, parse_special=True))
            least = num_tokens - num_tokens // 16 - 64
            if least > max_num_tokens:
                raise TextTooLong(least, max_num_tokens)
            num_chars *= 2

    @cached_property
    def _max_token_bytes(self) -> int:
        return max((len(self.token_bytes(token_id)) for token_id in range(self._num_ids)), default=1) or 1

    @cached_property
    def _merges_unknown(self) -> bool:
        """Whether any number of characters that the vocabulary has not become one token."""
        model = json.loads(self._tokenizer.to_str())["model"]
        return bool(model.get("fuse_unk")) and not model.get("byte_fallback")

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds what the model's files say (exactly one BOS, even if the text begins with one).
        `parse_special` turns a control token's text into that token; without it such text stays text.
        Raises ValueError for text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text is not valid Unicode: a lone surrogate at character {error.start}; remove it or send its pair"
            ) from None
        tokenizer = self._tokenizer if parse_special else self._without_special
        ids: list[int]
        if len(text) > _LONG_CHARS:
            # The library gives up the interpreter lock for batches alone: other threads go on. It is quicker, too.
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
            ids = encoding.ids
        else:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        if not parse_special and not self._special_ids.isdisjoint(ids):
            ids = self._spelled_out(ids)
        return self._framed(ids) if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; each invalid UTF-8 sequence becomes one U+FFFD. Raises ValueError for an unknown id."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in skipped).decode(
            "utf-8", "replace"
        )
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes a token stands for, never the tokenizer's internal alphabet.

        Empty for an id without a token. Raises ValueError outside 0 .. vocab_size - 1.
        """
        if not 0 <= token_id < self._num_ids:
            raise ValueError(f"token id {token_id} is outside the vocabulary (0 to {self._num_ids - 1})")
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            content: str = added.content
            return content.encode()
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._style == "byte_level":
            return _from_byte_alphabet(piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    @cached_property
    def _without_special(self) -> Tokenizer:
        # A second instance: the switch is a property of the whole tokenizer, and threads share this one.
        tokenizer = _load(self.files)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _spelled_out(self, ids: list[int]) -> list[int]:
        """Replace control tokens that the model's own vocabulary made from text by the tokens of their bytes."""
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        result: list[int] = []
        for token_id in ids:
            if token_id not in self._special_ids or self._added[token_id].content == unknown:
                result.append(token_id)
                continue
            result.extend(self._byte_id(byte) for byte in self.token_bytes(token_id))
        return result

    def _byte_id(self, byte: int) -> int:
        piece = BYTE_ALPHABET[byte] if self._style == "byte_level" else f"<0x{byte:02X}>"
        token_id: int | None = self._tokenizer.token_to_id(piece)
        if token_id is None:
            raise ValueError(
                f"text holds a control token's spelling that this vocabulary cannot write otherwise (no token for byte "
                f"0x{byte:02X}); remove it or pass parse_special"
            )
        return token_id

    def _framed(self, ids: list[int]) -> list[int]:
        """`ids` with what the tokenizer's post-processor adds around a text, and exactly one BOS where one is due."""
        before, after = self._frame
        bos = self.files.bos_token_id
        if self.files.add_bos_token and bos is not None and bos not in before:
            before = (bos, *before)
        if before and ids[: len(before)] == list(before):
            before = ()
        return [*before, *ids, *after]

    @cached_property
    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids the post-processor puts before and after a text, found from what it does to one."""
        inner: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids
        framed: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(framed) - len(inner) + 1):
            if framed[start : start + len(inner)] == inner:
                return tuple(framed[:start]), tuple(framed[start + len(inner) :])
        raise TokenizerFilesError(
            "tokenizer: its post-processor changes the text's own tokens, which is not supported; use another model file"
        )


def _load(files: TokenizerFiles) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(files.tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerFilesError(
            f"tokenizer: tokenizer.json cannot be read ({str(error)[:200]}); fetch the model again"
        ) from None


def _decoder_style(tokenizer: Tokenizer) -> tuple[str, bool]:
    """("byte_level" | "sentencepiece", whether one leading space is dropped from a text)."""
    state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
    steps: list[dict[str, Any]] = [] if state is None else state.get("decoders", [state])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    strips = any(step["type"] == "Strip" and step.get("content") == " " and step.get("start") == 1 for step in steps)
    if kinds == ["Metaspace"]:
        return "sentencepiece", steps[0].get("prepend_scheme") in ("first", "always")
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replaced = [step for step in steps if step["type"] == "Replace"]
        if [(step["pattern"], step["content"]) for step in replaced] == [({"String": "▁"}, " ")]:
            return "sentencepiece", strips
    raise TokenizerFilesError(
        f"tokenizer: decoder {'+'.join(kinds) or 'none'} is not supported (byte-level and sentencepiece styles are); "
        "use another model file"
    )


def _byte_alphabet() -> tuple[str, ...]:
    """Character of each byte in byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 up (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(spare)) for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF = {ord(character): byte for byte, character in enumerate(BYTE_ALPHABET)}


def _from_byte_alphabet(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF[ord(character)] for character in piece)
    except KeyError:
        return piece.encode()  # a vocabulary entry outside the alphabet stands for itself


def byte_tokenizer_files() -> TokenizerFiles:
    """A tokenizer without a model: token id = byte value, then three ChatML control tokens (256, 257, 258)."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {character: byte for byte, character in enumerate(BYTE_ALPHABET)}
    value = {
        "version": "1.0",
        "added_tokens": [added_token_json(256 + i, content, special=True) for i, content in enumerate(specials)],
        # Split into words, though nothing is merged: the library keeps each piece it has seen, and whole prompts are all new.
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return TokenizerFiles(
        tokenizer_json=json.dumps(value, ensure_ascii=False).encode(),
        chat_template=CHATML_TEMPLATE,
        eos_token="<|im_end|>",
        eos_token_ids=(258,),
    )


def added_token_json(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    """One entry of tokenizer.json's `added_tokens`, matched exactly as written."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
