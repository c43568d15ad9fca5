"""What the rpc process and the engine process say to each other; frames.py puts it on the wire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(slots=True)
class GrammarSpec:
    """The form an output must have. `kind`: json_schema, regex, lark (`text` is its source) or choices."""

    kind: str
    text: str = ""
    choices: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Sampling:
    """Sampling of one request, defaults already resolved and validated by the rpc process."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = -1  # -1 none, 0 the sampled token's own, k alternatives
    num_prompt_logprobs: int = -1  # the same for each prompt token
    bad_word_ids: list[list[int]] = field(default_factory=list)  # token sequences that must not be completed
    grammar: GrammarSpec | None = None


@dataclass(slots=True)
class Stop:
    """When one request ends."""

    max_output_tokens: int = 16
    min_output_tokens: int = 0
    strings: list[str] = field(default_factory=list)
    include_stop_string: bool = False
    stop_token_ids: list[int] = field(default_factory=list)  # the user's own
    eos_token_ids: list[int] = field(default_factory=list)  # the model's; empty with ignore_eos
    masked_until_min: list[int] = field(default_factory=list)  # ids banned before min_output_tokens


@dataclass(slots=True)
class Start:
    """Start one request. Each choice is one sequence; `delivered` carries a resumed stream's tokens by choice."""

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    stop: Stop
    num_choices: int = 1
    priority: int = 1  # 0 interactive, 1 standard, 2 batch
    tenant: str = ""
    deadline_seconds: float | None = None  # from receipt
    credit: int = 256  # tokens below this cursor may be sent, in every choice
    cache_salt: str = ""
    skip_special_tokens: bool = True
    delivered: list[list[int]] = field(default_factory=list)
    finished_choices: list[int] = field(default_factory=list)
    key: int = -1  # 0 or more: the tokens of choice c leave in a Step's columns under key + c, without text
    received: float | None = None  # `time.monotonic` of this machine when the agent got it; None: as it is read

    @property
    def is_plain(self) -> bool:
        """Whether nothing that the engine decides needs the text: tokens may leave as columns, see `key`."""
        sampling = self.sampling
        return not (self.stop.strings or self.opens_late or sampling.num_logprobs >= 0)

    @property
    def opens_late(self) -> bool:
        """Whether the engine says itself when the request is accepted, by Opened: its form must compile, or its
        prompt's log-probabilities be computed."""
        return self.sampling.grammar is not None or self.sampling.num_prompt_logprobs >= 0


@dataclass(slots=True)
class StartEmbed:
    """Embed one input; answered by one Embedded or Failed event."""

    request_id: str
    prompt_ids: list[int]
    priority: int = 1
    tenant: str = ""
    deadline_seconds: float | None = None


@dataclass(slots=True)
class Cancel:
    """Cancel a request; unknown ids are ignored. Answered by a Finished event with reason "cancelled" if it was alive."""

    request_id: str


@dataclass(slots=True)
class Credit:
    """Tokens below `until` may be sent, in every choice."""

    request_id: str
    until: int


@dataclass(slots=True)
class Tune:
    """What may change while the engine runs; each value is bounded by what the plan at start took memory for."""

    max_step_tokens: int  # tokens a step may compute while sequences decode
    max_num_seqs: int  # sequences that run at once
    num_usable_blocks: int  # KV blocks that may be in use, the null block not counted
    max_lone_tokens: int = 0  # while none decodes, no fewer than that; 0: as many as the plan has
    num_ready_blocks: int = 0  # blocks kept free ahead of need: cached ones are released behind the device's work
    prefetch_ahead: bool = (
        False  # blocks of a lower tier come while a sequence waits for its turn, not only once it is its turn
    )
    attention_rows: int = 1  # short sequences that share a program of decode attention, on a device that groups them


@dataclass(slots=True)
class ExportBlocks:
    """Read cached blocks out: of `digests` in order, or those that lead to the last cached one of `units`.

    Answered by BlocksExported. `first` and `max_num_blocks` take a part, so that a step is never held up for long.
    """

    exchange_id: str
    units: list[bytes] = field(default_factory=list)  # first 8 bytes of the units' hashes, first unit first
    digests: list[bytes] = field(default_factory=list)  # 32 bytes each
    first: int = 0
    max_num_blocks: int = 1


@dataclass(slots=True)
class CachedBlock:
    """One cached block with its names, 32 bytes each; `parent` is empty for the first block of a prefix."""

    digest: bytes
    parent: bytes
    units: list[bytes]
    data: bytes


@dataclass(slots=True)
class ImportBlocks:
    """Write blocks in and enter them into the prefix cache, in order. Answered by BlocksImported."""

    exchange_id: str
    blocks: list[CachedBlock]


@dataclass(slots=True)
class BringBlocks:
    """Bring a prefix up from the tiers below the device, towards the last unit that they hold. Answered by BlocksImported."""

    exchange_id: str
    units: list[bytes]  # first 8 bytes of the units' hashes, first unit first


@dataclass(slots=True)
class Shutdown:
    """Stop now: each live request gets a Failed event, then the process ends."""


# Engine to rpc.


@dataclass(slots=True)
class Progress:
    """Loading progress; see LoadProgress in device/base.py."""

    phase: str
    done: int
    total: int
    unit: str


@dataclass(slots=True)
class Ready:
    """The model is loaded and a first step has run."""

    info: dict[str, Any]  # facts for display: weights bytes, load seconds, device road...


@dataclass(slots=True)
class Warmed:
    """What the start left for later is done, or ended for `problem`; sent once, by a device that leaves something."""

    info: dict[str, Any]  # what is otherwise than Ready said
    problem: str = ""


@dataclass(slots=True)
class Fatal:
    """The engine cannot go on; the process ends after this."""

    reason: int  # ErrorReason number
    message: str


@dataclass(slots=True)
class BlocksExported:
    """The part that was asked for, and how many blocks there are in all."""

    exchange_id: str
    blocks: list[CachedBlock]
    num_cached: int


@dataclass(slots=True)
class BlocksImported:
    """How many blocks are new in the cache, and how many were there before; the others were not taken."""

    exchange_id: str
    num_imported: int
    num_present: int
    problem: str = ""  # why there are not more, where that is known


@dataclass(slots=True)
class BlocksUsed:
    """A request starts from blocks that this exchange brought. Said once for each."""

    exchange_id: str


@dataclass(slots=True)
class TierCounts:
    """One KV tier below the device; what was moved is since the start."""

    name: str  # "host" or "disk"
    capacity_blocks: int  # 0 once it is off
    held_blocks: int
    written_bytes: int
    write_seconds: float
    read_bytes: int  # to the device
    read_seconds: float
    read_blocks: int
    problem: str = ""  # why it is off or smaller than planned


@dataclass(slots=True)
class TierReport:
    """The tiers below the device, the quicker first; sent when something has changed, at most four times a second."""

    tiers: list[TierCounts]
    dropped_blocks: int  # that went without being kept further down
    declined: int  # prefixes found below and computed all the same, as that is quicker
    bring_bytes_per_second: float = (
        0.0  # to the device, of the tier that holds most; measured or planned, 0 is not known
    )


@dataclass(slots=True)
class LogprobEntry:
    """Log-probability of one token: its id, value, and the best alternatives."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Opened:
    """A request that opens late is accepted. Arrays are little-endian bytes, for the prompt's tokens from the second on."""

    request_id: str
    logprobs: bytes = b""  # float32 [num_prompt - 1]; empty when none were asked for
    num_top: int = 0
    top_ids: bytes = b""  # int32 [num_prompt - 1, num_top], best first
    top_logprobs: bytes = b""  # float32 [num_prompt - 1, num_top]


@dataclass(slots=True)
class Delta:
    """New tokens of one choice; `finish` is "" or "stop", "length", "cancelled". The text of a stream with a key is empty."""

    request_id: str
    choice: int
    cursor: int
    token_ids: list[int]
    text: str
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish: str = ""
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(slots=True)
class Finished:
    """Terminal: all choices have ended."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_seconds: float
    first_token_seconds: float
    total_seconds: float
    cancelled: bool = False


@dataclass(slots=True)
class Failed:
    """Terminal: the request failed after it was accepted."""

    request_id: str
    reason: int  # ErrorReason number
    message: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    param: str = ""  # the field of the request that is to blame


@dataclass(slots=True)
class Embedded:
    """Terminal of StartEmbed: the unnormalised last-token hidden state."""

    request_id: str
    values: bytes  # float32, little-endian: a list would cost more than the rest of an input's host work


@dataclass(slots=True)
class Load:
    """Load after a step or an idle tick."""

    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    total_blocks: int
    pending_prefill_tokens: int
    running_context_tokens: int
    preemptions: int  # since start
    step_count: int  # since start
    prefill_tokens: int = 0  # computed in this step
    decode_tokens: int = 0  # computed in this step
    unused_blocks: int = 0  # neither referenced nor cached
    eviction_seconds: float = 0.0  # spent since start on evicting cached blocks because one was needed at once
    max_step_tokens: int = 0  # in force, see Tune
    lost_blocks: int = 0  # see BlockAccount; counted once a second
    waste_tokens: int = 0


@dataclass(slots=True)
class Step:
    """One frame a step (or an idle tick at 1 Hz): its events in order, and the load after it.

    Tokens of streams with a key are columns, one row a token; they come before the events. The token that ends such a stream
    is a Delta without text.
    """

    number: int
    events: list[Opened | Delta | Finished | Failed | Embedded]
    load: Load
    step_seconds: float  # device time; 0 for an idle tick
    host_seconds: float  # work of the engine's thread since the last step's frame; 0 for an idle tick
    stored_hashes: list[bytes] = field(default_factory=list)  # prefix units that became cached, first 8 bytes each
    removed_hashes: list[bytes] = field(default_factory=list)
    lower_stored_hashes: list[bytes] = field(default_factory=list)  # the same for the tiers below the device
    lower_removed_hashes: list[bytes] = field(default_factory=list)
    keys: bytes = b""  # int32 little-endian [num_tokens], see Start.key
    token_ids: bytes = b""  # int32 little-endian [num_tokens]


ToEngine: TypeAlias = Start | StartEmbed | Cancel | Credit | Tune | ExportBlocks | ImportBlocks | BringBlocks | Shutdown
FromEngine: TypeAlias = (
    Progress | Ready | Warmed | Fatal | Step | BlocksExported | BlocksImported | BlocksUsed | TierReport
)
Message: TypeAlias = ToEngine | FromEngine | Opened | Delta | Finished | Failed | Embedded
