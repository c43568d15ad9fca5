"""One request and its sequences: what the scheduler decides about. A sequence is one choice, keyed (request id, choice)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from dragoman_agent.cache.hashing import PageHasher
from dragoman_agent.engine.messages import Sampling, Start, StartEmbed, Stop

if TYPE_CHECKING:
    from dragoman_agent.engine.grammar import Form
    from dragoman_agent.engine.output import OutputStream
    from dragoman_agent.engine.prompt_scores import PromptScores

_LOWEST_CLASS = 2
MAX_ON_ITS_WAY_SECONDS = 60.0  # from the agent to its engine; one that was received before that has a wrong time
AGING_SECONDS = 5.0  # a waiting sequence rises one class each time this passes


class Status(Enum):
    """Life of a sequence. WAITING and PARKED hold no block; RUNNING holds blocks and a batch row."""

    BLOCKED = auto()  # waits for choice 0 to have computed the prompt they share, or for its grammar to be compiled
    WAITING = auto()
    RUNNING = auto()
    PARKED = auto()  # out of credit for long: its blocks went back to the cache
    ENDED = auto()  # no further token is wanted; its last text may still be on its way out
    FINISHED = auto()


_ALLOWED: dict[Status, frozenset[Status]] = {
    Status.BLOCKED: frozenset({Status.WAITING, Status.FINISHED}),
    Status.WAITING: frozenset({Status.BLOCKED, Status.RUNNING, Status.PARKED, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.PARKED, Status.ENDED, Status.FINISHED}),
    Status.PARKED: frozenset({Status.WAITING, Status.FINISHED}),
    Status.ENDED: frozenset({Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """A request as the engine keeps it. Times are seconds of the engine's monotonic clock."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    stop: Stop
    num_choices: int
    priority: int  # 0 interactive, 1 standard, 2 batch
    tenant: str
    credit: int
    arrived: float
    deadline: float | None  # absolute
    is_embedding: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    num_unfinished: int = 0
    num_delivered_tokens: int = 0  # of choices that had ended before a resume
    num_cached_tokens: int = 0  # prompt tokens choice 0 found in the cache when it first ran
    started: float | None = None  # first step that computed for it
    first_token: float | None = None
    is_over: bool = False  # its terminal event is decided
    is_serial: bool = False  # the next step needs the result of this one on the host, so it cannot be launched ahead
    draws_by_text: bool = False  # what may be sampled next hangs on the tokens before, which the host has to know
    scores: PromptScores | None = None  # of the prompt, where asked for: the first sequence computes them

    @property
    def num_sent_tokens(self) -> int:
        """Output tokens handed out over all choices, those delivered before a resume included."""
        return self.num_delivered_tokens + sum(s.num_sent for s in self.sequences)

    def lacks_credit_since(self, moment: float) -> bool:
        """Whether none of its live choices could go on since then for want of credit. One that could waits for the engine, and its
        client, whose credit counts from the choice furthest behind, for its tokens.
        """
        return all(s.credit_since is not None and s.credit_since <= moment for s in self.sequences if s.is_alive)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice under way. `token_ids` is the prompt and then the output."""

    request: Request
    choice: int
    token_ids: list[int]
    num_prompt: int
    max_num_tokens: int  # prompt and output; it ends with "length" there
    hasher: PageHasher
    status: Status = Status.WAITING
    num_computed: int = 0  # tokens whose K and V are in the cache once the steps under way are done
    future_step: int = 0  # newest step under way that samples a token for it; 0 when all its tokens are known
    quiet_tokens: int = 0  # with fewer tokens than these it goes on in decode, whatever else happens
    cut_step: int = 0  # tokens of steps up to this one are dropped: it lost its blocks while they were under way
    num_published: int = 0  # pages of this sequence offered to the prefix cache
    num_waits: int = 0  # times it waited for blocks of a lower tier
    is_looked_ahead: bool = False  # its blocks of a lower tier were asked for while it waited for its turn
    block_table: list[int] = field(default_factory=list)
    row: int = -1  # row of the persistent batch while RUNNING
    effective_class: int = 0
    queued: float | None = None  # since when it waits, where it ran before; else since its request arrived
    num_charged: int = 0  # tokens that its tenant has paid for: a preempted sequence does not pay twice
    credit_since: float | None = None  # since when it is out of credit
    stop_ids: frozenset[int] = frozenset()
    min_num_tokens: int = 0  # prompt and output tokens before a stop id counts
    key: int = -1  # 0 or more: its tokens leave as columns under this key as they are taken, and it has no `output`
    output: OutputStream | None = None
    form: Form | None = None  # where it stands in its grammar

    @property
    def scores_due(self) -> PromptScores | None:
        """The prompt's scores while this sequence has some to compute."""
        scores = self.request.scores
        if scores is None or scores.is_complete or self.request.sequences[0] is not self:
            return None
        return scores

    @property
    def num_output(self) -> int:
        """Output tokens so far; also the cursor of the next one."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_sent(self) -> int:
        """Cursor of the next token to be handed out."""
        if self.key >= 0:
            return self.num_output
        return 0 if self.output is None else self.output.num_sent

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, the one under way included."""
        return len(self.token_ids) + (self.future_step > 0)

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the next can be sampled: 1 in decode."""
        return self.num_tokens - self.num_computed

    @property
    def is_alive(self) -> bool:
        """Whether more tokens are wanted."""
        return self.status not in (Status.ENDED, Status.FINISHED)

    @property
    def has_credit(self) -> bool:
        """Whether the next token may be sent. An embedding needs none."""
        return self.num_tokens - self.num_prompt < self.request.credit or self.request.is_embedding

    @property
    def can_park(self) -> bool:
        """Whether it runs with no token under way: that one would be lost, though it may be sent, and nobody would ask for it."""
        return self.status is Status.RUNNING and not self.future_step

    def move_to(self, status: Status) -> None:
        """Change state. Raises RuntimeError for a change that has no meaning."""
        if status not in _ALLOWED[self.status]:
            raise RuntimeError(f"{self.request.request_id}/{self.choice}: {self.status.name} -> {status.name}")
        self.status = status

    def lose(self, newest_step: int) -> None:
        """Row and blocks are gone: nothing is computed any more, and what steps up to this one sample is dropped."""
        self.row = -1
        self.future_step = 0
        self.cut_step = newest_step
        self.num_computed = 0
        self.num_published = 0
        self.quiet_tokens = 0

    def class_at(self, now: float) -> int:
        """Priority class with aging: waiting long makes any sequence interactive."""
        return max(0, self.request.priority - int((now - self.waits_since) / AGING_SECONDS))

    @property
    def waits_since(self) -> float:
        """What it aged by before it ran is spent: who has run long would else come before all who are new, and be preempted by none."""
        return self.request.arrived if self.queued is None else self.queued


def new_request(message: Start | StartEmbed, now: float, root: bytes, page_size: int, capacity_tokens: int) -> Request:
    """The request of a message, with its sequences. `capacity_tokens` is the longest sequence that can ever run.

    A choice that was finished before a resume has no sequence. Output streams are attached by the caller.
    """
    is_embedding = isinstance(message, StartEmbed)
    arrived = now if isinstance(message, StartEmbed) else _arrival(message.received, now)
    request = Request(
        request_id=message.request_id,
        prompt_ids=message.prompt_ids,
        sampling=Sampling() if isinstance(message, StartEmbed) else message.sampling,
        stop=Stop(max_output_tokens=0) if isinstance(message, StartEmbed) else message.stop,
        num_choices=1 if isinstance(message, StartEmbed) else message.num_choices,
        priority=min(max(message.priority, 0), _LOWEST_CLASS),
        tenant=message.tenant,
        credit=0 if isinstance(message, StartEmbed) else message.credit,
        arrived=arrived,
        deadline=None if message.deadline_seconds is None else arrived + message.deadline_seconds,
        is_embedding=is_embedding,
    )
    request.is_serial = request.sampling.num_prompt_logprobs >= 0
    request.draws_by_text = _draws_by_text(request)
    hasher = PageHasher(root, page_size)
    num_prompt = len(message.prompt_ids)
    stop = request.stop
    key = -1 if isinstance(message, StartEmbed) else message.key
    for choice in range(request.num_choices):
        delivered: list[int] = []
        if not isinstance(message, StartEmbed):
            delivered = message.delivered[choice] if choice < len(message.delivered) else []
            if choice in message.finished_choices:
                request.num_delivered_tokens += len(delivered)
                continue
        request.sequences.append(
            Sequence(
                request=request,
                choice=choice,
                token_ids=[*message.prompt_ids, *delivered],
                num_prompt=num_prompt,
                max_num_tokens=min(num_prompt + stop.max_output_tokens, capacity_tokens),
                hasher=hasher.copy(),
                stop_ids=frozenset((*stop.stop_token_ids, *stop.eos_token_ids)),
                min_num_tokens=num_prompt + stop.min_output_tokens,
                key=key + choice if key >= 0 else -1,
            )
        )
    request.num_unfinished = len(request.sequences)
    return request


def _arrival(received: float | None, now: float) -> float:
    """When a request came, by the clock of `now`. A time that cannot be is not taken."""
    if received is None or not now - MAX_ON_ITS_WAY_SECONDS <= received <= now:
        return now
    return received


def _draws_by_text(request: Request) -> bool:
    """Whether what may be sampled next depends on tokens that only the host knows."""
    sampling = request.sampling
    return bool(
        sampling.grammar is not None
        or has_penalties(sampling)
        or sampling.bad_word_ids
        or request.stop.masked_until_min
    )


def has_penalties(sampling: Sampling) -> bool:
    """Whether a row's logits depend on the tokens before."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
