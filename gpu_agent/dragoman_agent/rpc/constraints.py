"""The parts of a request that restrict its output or look at its prompt: grammar, bad words, prompt log-probabilities. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dragoman.v1 import generation_service_pb2
from dragoman_agent.engine.messages import GrammarSpec
from dragoman_agent.rpc.refusal import invalid

MAX_NUM_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_NUM_PROMPT_LOGPROBS = 20
MAX_NUM_PROMPT_LOGPROB_VALUES = 400_000  # they travel in one message of at most 16 MB
MAX_GRAMMAR_CHARS = 1 << 20
MAX_NUM_GRAMMAR_CHOICES = 4096
ANY_JSON_OBJECT = '{"type": "object"}'

EncodeWord = Callable[[str], list[int]]


def cannot_encode(text: str) -> list[int]:
    """For callers without a tokenizer: refuses every bad word."""
    invalid("sampling.bad_words", "there is no tokenizer here to read them with; leave them out")


def bad_word_ids(words: Sequence[str], encode_word: EncodeWord) -> list[list[int]]:
    """Token sequences of the words, each alone and after a space, which most vocabularies write with other tokens.

    Spaces around a word do not count. A word that the model writes with yet other tokens (split in the middle of a longer
    one, say) is not caught: tokens are compared, not text.
    """
    if len(words) > MAX_NUM_BAD_WORDS:
        invalid("sampling.bad_words", f"has {len(words)} words, at most {MAX_NUM_BAD_WORDS} are allowed")
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        bare = word.strip()
        param = f"sampling.bad_words[{index}]"
        if not bare:
            invalid(param, "is empty; a word needs a character that is not a space")
        if len(word) > MAX_BAD_WORD_CHARS:
            invalid(param, f"has {len(word)} characters, at most {MAX_BAD_WORD_CHARS} are allowed")
        for text in (bare, f" {bare}"):
            ids = tuple(encode_word(text))
            if ids:
                found[ids] = None
    return [list(ids) for ids in found]


def num_prompt_logprobs(message: generation_service_pb2.SamplingParameters, num_prompt: int) -> int:
    """Alternatives wanted with each prompt token, -1 when none are asked for."""
    if not message.HasField("num_prompt_logprobs"):
        return -1
    count, param = message.num_prompt_logprobs, "sampling.num_prompt_logprobs"
    if count > MAX_NUM_PROMPT_LOGPROBS:
        invalid(param, f"is {count}, must be 0 to {MAX_NUM_PROMPT_LOGPROBS}")
    if (count + 1) * num_prompt > MAX_NUM_PROMPT_LOGPROB_VALUES:
        most = MAX_NUM_PROMPT_LOGPROB_VALUES // num_prompt - 1
        invalid(param, f"is {count}; for a prompt of {num_prompt} tokens at most {most} fit one message")
    return int(count)


def grammar_spec(message: generation_service_pb2.SamplingParameters) -> GrammarSpec | None:
    """The form the output must have. Whether it can be compiled is found by the engine."""
    if not message.HasField("grammar"):
        return None
    grammar = message.grammar
    kind = grammar.WhichOneof("kind")
    if kind is None:
        invalid("sampling.grammar", "is empty; give json_schema, json_object, regex, choices or lark, or leave it out")
    param = f"sampling.grammar.{kind}"
    if kind == "json_object":
        if not grammar.json_object:
            invalid(param, "is false; leave grammar out for free text")
        return GrammarSpec("json_schema", ANY_JSON_OBJECT)
    if kind == "choices":
        return GrammarSpec("choices", choices=_choices(list(grammar.choices.texts), param))
    text = getattr(grammar, kind)
    if len(text) > MAX_GRAMMAR_CHARS:
        invalid(param, f"has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are allowed")
    if not text:
        invalid(param, "is empty; leave grammar out for free text")
    return GrammarSpec(kind, text)


def _choices(texts: list[str], param: str) -> list[str]:
    if not texts:
        invalid(param, "has no texts; give at least one")
    if len(texts) > MAX_NUM_GRAMMAR_CHOICES:
        invalid(param, f"has {len(texts)} texts, at most {MAX_NUM_GRAMMAR_CHOICES} are allowed")
    if "" in texts:
        invalid(f"{param}.texts[{texts.index('')}]", "is empty; an output has at least one character")
    if sum(map(len, texts)) > MAX_GRAMMAR_CHARS:
        invalid(param, f"has over {MAX_GRAMMAR_CHARS} characters; give shorter texts")
    return texts
