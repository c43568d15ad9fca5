"""Grammars compiled and followed with llguidance: which tokens may come next in an output that must have a form.

Compiling runs in threads of its own, which the library does without the interpreter lock, so that other requests stream on.
A grammar whose masks hold up the engine's steps is refused, or its request ended: some take a second for each token.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from dragoman_agent.device.base import Int32Array
from dragoman_agent.engine.messages import GrammarSpec
from dragoman_text import TextTokenizer

COMPILE_SECONDS = 2.0  # a request whose grammar takes longer is refused
MAX_REASON_CHARS = 300
# What all others wait for the masks of one request: more than SPARE_SECONDS a step runs up, and above MAX_OWED_SECONDS it
# ends. Masks of common schemas take well under a millisecond, and rarely some ten when a part is met first.
SPARE_SECONDS = 0.005
MAX_OWED_SECONDS = 1.0
SLOW_MASK_SECONDS = 0.05  # a grammar that takes as long for one of its first masks is refused
# Runs of white space between JSON tokens end: a weak model would go on with them to its token limit.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
_MAX_CACHED = 64
_NUM_THREADS = 2
_MAX_THREADS = 8
_HELD_UP_SECONDS = 0.25  # a thread that is at one grammar for longer is not counted on: another takes its place
_NUM_TRIED_TOKENS = 3
# Steps of many forms that are not timed, after one that was slow although no form alone was.
_NUM_TRUSTED_STEPS = 64
_NO_TEXT = "no text can have this form; check it for parts that contradict each other"


class GrammarError(Exception):
    """A grammar that cannot be used; the text says why, in at most 300 characters."""


class GrammarsBusyError(GrammarError):
    """This grammar may be good: it was not reached in time for the hard ones of others."""


class Account:
    """How long the masks of one request, of all its choices, have held up all others. Single slow ones are forgiven."""

    def __init__(self) -> None:
        self.owed_seconds = 0.0

    def spend(self, seconds: float) -> None:
        """Count what the masks of one step took."""
        self.owed_seconds = max(0.0, self.owed_seconds + seconds - SPARE_SECONDS)


class Form:
    """Where one choice stands in its grammar. Owned by the engine's thread once made."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int], account: Account) -> None:
        self.matcher = matcher
        self.account = account
        self._eos_token_ids = eos_token_ids

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow any more."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def failure(self) -> str:
        """Why the grammar cannot be followed on, empty while it can."""
        if self.matcher.is_error():
            return _shortened(self.matcher.get_error())
        owed_seconds = self.account.owed_seconds
        if owed_seconds > MAX_OWED_SECONDS:
            return f"finding its next tokens held up all other requests for over {owed_seconds:.1f} s"
        return ""

    def take(self, token_ids: list[int]) -> None:
        """Go on by tokens of the output; `failure` tells of one that does not fit."""
        self.matcher.consume_tokens(token_ids)

    def allowed_ids(self) -> set[int]:
        """Ids that may come next; for messages, not for the loop."""
        return set(np.flatnonzero(self.allowed()).tolist())

    def allowed(self) -> npt.NDArray[np.uint8]:
        """1 for each id that may come next, 0 for the others."""
        return np.unpackbits(np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")

    def hide_end(self, mask: Int32Array) -> None:
        """Take the end tokens out of a packed mask: the request asked to go on past them."""
        for token_id in self._eos_token_ids:
            mask[token_id >> 5] &= np.int32(~(1 << (token_id & 31)) if token_id & 31 != 31 else 0x7FFFFFFF)


class GrammarMasks:
    """Fills the masks of a step, on several cores and without the interpreter lock."""

    def __init__(self, vocab_size: int, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock` gives the seconds that this thread was at work: what other processes take is no form's fault."""
        self.num_words = -(-vocab_size // 32)
        self._clock = clock
        self._executor: LLExecutor | None = None
        self._is_one_slow = False
        self._num_trusted_steps = 0

    def fill(self, forms: Sequence[Form]) -> Int32Array:
        """Packed masks [len(forms), num_words] of what may come next. A form that has failed gets whatever comes."""
        masks = np.zeros((len(forms), self.num_words), dtype=np.int32)
        if len(forms) == 1 or self._is_one_slow:
            self._is_one_slow = self._fill_one_by_one(forms, masks) > SPARE_SECONDS
            self._num_trusted_steps = 0 if self._is_one_slow else _NUM_TRUSTED_STEPS
            return masks
        if self._executor is None:
            self._executor = LLExecutor()
        pairs = [(form.matcher, index) for index, form in enumerate(forms)]
        began = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, self.num_words * 4, len(forms))
        # Whose it was shows when each is filled alone, at the next step. Many quick ones together are nobody's fault.
        self._num_trusted_steps = max(self._num_trusted_steps - 1, 0)
        self._is_one_slow = not self._num_trusted_steps and time.perf_counter() - began > SPARE_SECONDS
        return masks

    def _fill_one_by_one(self, forms: Sequence[Form], masks: Int32Array) -> float:
        """Seconds of the request that took longest."""
        seconds: dict[Account, float] = {}
        for form, row in zip(forms, masks, strict=True):
            began = self._clock()
            form.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            seconds[form.account] = seconds.get(form.account, 0.0) + self._clock() - began
        for account, spent in seconds.items():
            account.spend(spent)
        return max(seconds.values())


class CompiledGrammar:
    """A grammar from which each choice starts."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def start(self, account: Account | None = None) -> Form:
        """A form at its beginning; those of one request share an `account`."""
        return Form(self._matcher.deep_copy(), self._eos_token_ids, account or Account())


class GrammarCompiler:
    """Compiles grammars for one vocabulary; keeps the latest. Threads start with the first grammar."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        """`vocab_size` is the width of the logits, which may be more than the tokenizer's own."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(i for i in tokenizer.eos_ids if i < vocab_size)
        self._cache: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._jobs: queue.SimpleQueue[tuple[GrammarSpec, Future[CompiledGrammar]]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._began: dict[threading.Thread, float] = {}  # when those at work began what they are at
        self._lock = threading.Lock()  # guards the tokenizer's making and the cache
        self._ll_tokenizer: LLTokenizer | None = None

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Compile in a thread; the future raises GrammarError. Done at once for a grammar of late.

        A future that is cancelled before its turn costs nothing.
        """
        future: Future[CompiledGrammar] = Future()
        with self._lock:
            cached = self._cache.get(_key(spec))
            if cached is not None:
                self._cache.move_to_end(_key(spec))
        if cached is not None:
            future.set_result(cached)
            return future
        self._jobs.put((spec, future))
        self.replace_held_up()
        return future

    def replace_held_up(self) -> None:
        """Let others take the place of threads that a hard grammar holds up: nothing can end it before its time."""
        now = time.monotonic()
        num_held_up = sum(now - began > _HELD_UP_SECONDS for began in list(self._began.values()))
        while len(self._threads) < min(_NUM_THREADS + num_held_up, _MAX_THREADS):
            # Daemons: a grammar that takes for ever must not hold up the end of the process.
            thread = threading.Thread(target=self._work, name=f"grammar-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        thread = threading.current_thread()
        while True:
            self._began.pop(thread, None)
            spec, future = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            self._began[thread] = time.monotonic()
            try:
                future.set_result(self._compile(spec))
            except GrammarError as error:
                future.set_exception(error)
            except Exception as error:
                # The library's own failures must end the request and not the thread.
                future.set_exception(GrammarError(_shortened(str(error)) or type(error).__name__))

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        tokenizer = self._make_tokenizer()
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)
        matcher = LLMatcher(tokenizer, _source(spec), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask costs most; some contradictions show only here
        if matcher.is_error():
            reason = _shortened(matcher.get_error())
            if spec.kind == "lark" and "::=" in spec.text:  # what other servers take under the same name
                reason = _shortened(f"a rule of a Lark grammar is `start: ...`, `::=` is none: {reason}")
            raise GrammarError(reason)
        compiled = CompiledGrammar(matcher, self._eos_token_ids)
        self._try(compiled.start())
        with self._lock:
            self._cache[_key(spec)] = compiled
            while len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return compiled

    def _try(self, form: Form) -> None:
        """Follow a grammar for some tokens here, where it holds up nobody. Raises GrammarError where that fails or is slow."""
        for num_taken in range(_NUM_TRIED_TOKENS + 1):
            began = time.thread_time()
            allowed = form.allowed()
            seconds = time.thread_time() - began
            if seconds > SLOW_MASK_SECONDS:
                raise GrammarError(
                    f"finding its next token takes {seconds:.1f} s, which holds up all others; make it smaller"
                )
            if form.failure:
                raise GrammarError(
                    f"it becomes too hard to follow after {num_taken} tokens ({form.failure}); make it simpler"
                )
            allowed[self._eos_token_ids] = 0
            if not allowed.any():
                return
            form.take([int(allowed.argmax())])

    def _make_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._ll_tokenizer is None:
                if not self._eos_token_ids:
                    raise GrammarError("this model names no end token, without which no form can end")
                vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids[0])
                self._ll_tokenizer = LLTokenizer(
                    TokenizerWrapper(vocabulary), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                )
            return self._ll_tokenizer


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    bos_token_id: int | None = None

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, eos_token_id: int) -> None:
        known = min(vocab_size, tokenizer.vocab_size)
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (vocab_size - known)
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text.decode() if isinstance(text, bytes) else text
        return self._tokenizer.encode(whole, add_special_tokens=False)


def _key(spec: GrammarSpec) -> str:
    return json.dumps((spec.kind, spec.text, spec.choices))


def _source(spec: GrammarSpec) -> str:
    """The grammar in llguidance's form. Raises GrammarError."""
    if spec.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            _checked_schema(spec.text), overrides={"whitespace_pattern": _WHITESPACE}
        )
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choices":
        return LLMatcher.grammar_from_regex("|".join(map(_literal, spec.choices)))
    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(spec.text)
    raise GrammarError(f"the kind {spec.kind!r} is not known")


def _checked_schema(text: str) -> str:
    """The text of a schema that is an object. Raises GrammarError."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarError(_shortened(f"the schema is not JSON: {error}")) from None
    if schema is True:
        return "{}"
    if schema is False:
        raise GrammarError("the schema false allows nothing")
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be a JSON object, true or false")
    return text


def _literal(text: str) -> str:
    """A regular expression of exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _shortened(reason: str) -> str:
    """A reason of the library as one short line: it may quote a whole pattern, with the point of it only after that."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()] or [""]
    points = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = f"regular expression: {points[-1]}" if points else lines[0]
    if line.startswith("NoExtension"):
        return _NO_TEXT
    if line.startswith("recursion limit"):
        return "the schema is nested too deeply"
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."
