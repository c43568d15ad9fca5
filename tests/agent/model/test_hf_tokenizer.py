"""Tokenizers of model directories beside transformers' own, chat templates, and end tokens from three files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.agent.model.checkpoints import TEMPLATE, save_checkpoint, save_tokenizer

from dragoman_agent.model.errors import ModelFileError
from dragoman_agent.model.generation import GenerationDefaults, read_beside
from dragoman_agent.model.hf_tokenizer import HfTokenizer
from dragoman_agent.model.source import open_model
from dragoman_text import ChatTemplate, StreamDetokenizer, TextTokenizer, TokenizerFiles

TEXTS = [
    "",
    " ",
    "Hello, world! 12345 and 1 23 456",
    "it's  they'LL\n\n\tindented\r\n  end ",
    "Größe naïve ﬁ Å e\u0301 漢字かな 한국어 🙂👨‍👩‍👧 \u200d",
    "def f(x):\n    return x ** 2  # square\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaa" * 4,
    "\x00\x7f\u0085\u2028",
    (Path(__file__).parents[3] / "README.md").read_text()[:3000],
]
MESSAGES = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "What is 2+2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Größer? 🙂"},
]


def files_of(directory: Path, eos: tuple[int, ...] = (2,)) -> TokenizerFiles:
    return HfTokenizer(directory).files(eos, 400)


@pytest.mark.parametrize("kind", ["llama3", "qwen"])
def test_ids_and_text_equal_transformers(tmp_path: Path, kind: str) -> None:
    save_tokenizer(tmp_path, kind)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = TextTokenizer.from_files(files_of(tmp_path))
    assert (ours.files.bos_token, ours.files.eos_token) == (theirs.bos_token, theirs.eos_token)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        detokenizer = StreamDetokenizer(ours)
        pieces = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join(pieces) + detokenizer.flush() == ours.decode(ids)


def test_the_two_kinds_differ() -> None:
    """What the comparison above could miss: both kinds being the same tokenizer."""
    from tests.agent.model.checkpoints import trained_tokenizer

    assert json.loads(trained_tokenizer("llama3"))["normalizer"] is None
    assert json.loads(trained_tokenizer("qwen"))["normalizer"] == {"type": "NFC"}


@pytest.mark.parametrize("kind", ["llama3", "qwen"])
@pytest.mark.parametrize("place", ["jinja", "string", "list", "one"])
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_equal_transformers(tmp_path: Path, kind: str, place: str, prompt: bool) -> None:
    save_tokenizer(tmp_path, kind)
    if place != "jinja":
        (tmp_path / "chat_template.jinja").unlink()
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
        change(tmp_path, chat_template={"string": TEMPLATE, "list": named, "one": named[1:]}[place])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    files = files_of(tmp_path)
    assert files.chat_template == TEMPLATE
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=prompt, tokenize=True, return_dict=False)
    found = ChatTemplate(files).encode(TextTokenizer.from_files(files), MESSAGES, add_generation_prompt=prompt)
    assert found == expected


def change(directory: Path, name: str = "tokenizer_config.json", **changes: Any) -> None:
    path = directory / name
    value = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: item for key, item in (value | changes).items() if item is not ...}))


def test_the_template_file_wins(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    change(tmp_path, chat_template="old")
    assert files_of(tmp_path).chat_template == TEMPLATE
    (tmp_path / "chat_template.jinja").unlink()
    assert files_of(tmp_path).chat_template == "old"
    change(tmp_path, chat_template=...)
    assert files_of(tmp_path).chat_template is None


@pytest.mark.parametrize("add", [True, False, ...])
@pytest.mark.parametrize("kind", ["llama3", "qwen"])
def test_one_bos_at_most(tmp_path: Path, add: Any, kind: str) -> None:
    """`add_bos_token` adds one where the post-processor adds none; it never takes the post-processor's away."""
    save_tokenizer(tmp_path, kind)
    change(tmp_path, add_bos_token=add, bos_token={"content": "<|bos|>", "special": True})
    tokenizer = TextTokenizer.from_files(files_of(tmp_path))
    due = kind == "llama3" or add is True
    assert tokenizer.encode("hello").count(0) == due
    assert tokenizer.encode("<|bos|>hello", parse_special=True).count(0) == 1


def test_a_tokenizer_config_may_be_absent(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    files = files_of(tmp_path, (3,))
    assert (files.bos_token, files.bos_token_id, files.eos_token, files.add_bos_token) == (
        None,
        None,
        "<|stop|>",
        False,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bos_token": "<s>"}, "'bos_token' is '<s>': it is not in the vocabulary; use files of one model"),
        ({"bos_token": 7}, "'bos_token' is 7"),
        ({"add_bos_token": "yes"}, "'add_bos_token' is 'yes', true or false"),
        ({"chat_template": 7}, "'chat_template' is 7, a template or a list of named templates"),
        ({"chat_template": [{"name": "default"}]}, "a template or a list of named templates"),
        (
            {"chat_template": [{"name": "rag", "template": ""}, {"name": "tool_use", "template": ""}]},
            "none of rag, tool_use is called 'default'",
        ),
    ],
)
def test_tokenizer_configs_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    change(tmp_path, **changes)
    with pytest.raises(ModelFileError, match=message):
        files_of(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no vocabulary under 'model.vocab'"),
        ("[]", "a JSON object was expected"),
        ('{"model": {"vo', "not valid JSON"),
        ('{"model": {"vocab": [["a", -1.0]]}}', "a unigram tokenizer, which is not supported"),
        ('{"model": {"vocab": {"a": "0"}}}', "token 'a' has id '0', a number from 0"),
        ('{"model": {"vocab": {}}, "added_tokens": [{"id": 0}]}', "an entry of 'added_tokens' lacks"),
    ],
)
def test_tokenizers_that_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=message):
        HfTokenizer(tmp_path)


def test_other_kinds_of_tokenizer_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        ModelFileError, match=r"tokenizer.json: is missing; tokenizer.model alone is not supported; conv"
    ):
        HfTokenizer(tmp_path)


def test_a_template_that_is_not_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: cannot be read"):
        files_of(tmp_path)


def test_end_tokens_are_the_union_of_three_files(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama", eos_token_id=5)
    change(tmp_path, "generation_config.json", eos_token_id=[5, 7])
    change(tmp_path, eos_token="<|stop|>")
    source = open_model(str(tmp_path), tmp_path)
    source.check()
    assert source.generation.eos_token_ids == (3, 5, 7)
    assert source.config.eos_token_ids == (3, 5, 7)
    assert TextTokenizer.from_files(source.tokenizer).eos_ids == {3, 5, 7}
    assert source.tokenizer.eos_token == "<|stop|>"


def test_ids_beyond_the_tokenizer_have_no_text(tmp_path: Path) -> None:
    """Publishers pad the embedding; a model may produce such an id, which must not end its stream with an error."""
    save_checkpoint(tmp_path, "llama")
    tokenizer = TextTokenizer.from_files(open_model(str(tmp_path), tmp_path).tokenizer)
    ids = [*tokenizer.encode("ab", add_special_tokens=False), 380, 399]
    detokenizer = StreamDetokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids][-2:] == ["", ""]
    assert tokenizer.decode(ids) == "ab"
    with pytest.raises(ValueError, match="token id 400 is outside the vocabulary"):
        tokenizer.token_bytes(400)


def test_generation_defaults_come_from_generation_config(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    transformers.GenerationConfig(do_sample=True, eos_token_id=4, **values).save_pretrained(tmp_path)
    assert read_beside(tmp_path, GenerationDefaults(), {}) == GenerationDefaults(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1, eos_token_ids=(4,)
    )


@pytest.mark.parametrize(
    ("vocab_size", "name", "changes", "message"),
    [
        (300, "", {}, "has token id 379, the model has 300 tokens; use files of one model"),
        (400, "generation_config.json", {"eos_token_id": 400}, "end token id 400 is outside the model's 400 tokens"),
        (400, "generation_config.json", {"eos_token_id": "x"}, "eos_token_id holds 'x', a token id was expected"),
        (400, "tokenizer_config.json", {"eos_token": "</s>"}, "eos_token '</s>' is not in the vocabulary"),
    ],
)
def test_tokens_without_a_row_are_refused(
    tmp_path: Path, vocab_size: int, name: str, changes: dict[str, Any], message: str
) -> None:
    save_checkpoint(tmp_path, "llama", vocab_size=vocab_size)
    if name:
        change(tmp_path, name, **changes)
    with pytest.raises(ModelFileError, match=message):
        open_model(str(tmp_path), tmp_path)
