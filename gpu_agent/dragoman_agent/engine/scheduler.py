"""What runs in the next step. A pure decision: no clock, no device, no I/O; the same state and time give the same plan.

Decode goes first, one token a sequence; what is left of the step's token budget goes to prefill chunks, sequences under way
before new ones. A sequence that needs a block when there is none preempts the lowest and youngest, which is computed again later;
one that waits preempts only work of a lower class.
"""

from __future__ import annotations

from collections.abc import Iterable

from dragoman_agent.cache.block_pool import BlockPool
from dragoman_agent.cache.hashing import Pages
from dragoman_agent.engine.memory_limit import MemoryLimit
from dragoman_agent.engine.messages import Tune
from dragoman_agent.engine.queue import WaitingQueue
from dragoman_agent.engine.request import Request, Sequence, Status
from dragoman_agent.engine.running import RunningSequences
from dragoman_agent.engine.step_plan import StepPlan, preemption_key
from dragoman_agent.engine.tier_waits import LowerTiers, TierWaits
from dragoman_agent.pal.plan import Plan

PARK_SECONDS = 10.0  # without credit: blocks go back to the cache
CREDIT_TIMEOUT_SECONDS = 60.0  # without credit: the request fails
PROMPTS_SHARE = 4  # of a step one in so many tokens is for prompts, where sequences that decode would take all
RELEASED_AT_ONCE = 16  # blocks: about 50 us of host work behind a step


class Scheduler:
    """Owns the running list, the waiting queue, the parked sequences, the rows of the batch and the block pool."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pool = BlockPool(plan.num_blocks)
        self.page_size = plan.page_size
        self.capacity_tokens = min(plan.max_context_tokens, (plan.num_blocks - 1) * plan.page_size)
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.parked: set[Sequence] = set()
        self.blocked: set[Sequence] = set()
        self.num_preemptions = 0
        self._free_rows = list(range(plan.max_num_seqs - 1, -1, -1))
        self._out_of_credit: set[Sequence] = set()
        self._first_decode = 0
        self.num_steps = 0  # launched
        self.newest_cut = 0  # in steps after this one nobody's token is to be dropped
        self._prefilling_tokens = 0
        self._running = RunningSequences(plan.page_size)
        self._without_room: Sequence | None = None  # next in line, for whom the last step had no room
        self.max_step_tokens = plan.max_company_tokens  # while sequences decode
        self._max_lone_tokens = plan.max_batch_tokens
        self.memory_limit = MemoryLimit(plan.max_batch_tokens)
        self._num_spare_rows = 0  # rows that stay empty, see `tune`
        self._num_withheld = 0
        self._num_ready = 0
        self.tier_waits: TierWaits | None = None
        self.prefetch_ahead = plan.prefetch

    @property
    def pending_prefill_tokens(self) -> int:
        """Tokens to compute before the sequences that wait or are in prefill can go on."""
        return self.waiting.num_tokens + self._prefilling_tokens

    @property
    def running_context_tokens(self) -> int:
        """Of the sequences that ran at the last decision."""
        return self._running.context_tokens

    def use_tiers(self, tiers: LowerTiers) -> None:
        """Prefixes may lie below the pool from now on."""
        self.tier_waits = TierWaits(tiers, self.waiting, self.blocked, self.page_size)

    # What changes the state from outside.

    def add(self, request: Request, now: float) -> None:
        """Queue the sequences of a request; choices after the first wait for the prompt it will have computed."""
        first = True
        for sequence in request.sequences:
            if sequence.status is not Status.WAITING:
                continue
            if first:
                self.waiting.push(sequence, now)
                first = False
            else:
                sequence.status = Status.BLOCKED
                self.blocked.add(sequence)

    def unblock(self, request: Request, now: float) -> None:
        """Let the other choices of `request` start: the prompt they share is computed, or nobody will compute it."""
        for sequence in request.sequences:
            if sequence.status is Status.BLOCKED:
                self.blocked.discard(sequence)
                sequence.move_to(Status.WAITING)
                self.waiting.push(sequence, now)

    def leave(self, sequences: Iterable[Sequence], status: Status) -> None:
        """Take sequences out for good (ENDED or FINISHED): row and blocks are free again when this returns."""
        left = False
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                self._release(sequence)
                left = True
            elif sequence.status is Status.WAITING:
                self.waiting.remove(sequence)
            self.parked.discard(sequence)
            self.blocked.discard(sequence)
            self._out_of_credit.discard(sequence)
            if sequence.is_alive:
                self.waiting.charge_output(sequence)
            sequence.move_to(status)
        if left:
            self.running = [s for s in self.running if s.row >= 0]

    def grant(self, request: Request, until: int, now: float) -> None:
        """Raise the credit of a request; parked sequences that have some again wait for their turn."""
        request.credit = max(request.credit, until)
        for sequence in request.sequences:
            if not sequence.has_credit:
                continue
            self._forget_credit_since(sequence)
            if sequence.status is Status.PARKED:
                self.parked.discard(sequence)
                sequence.move_to(Status.WAITING)
                self.waiting.push(sequence, now)

    def credit_timeouts(self, now: float) -> list[Request]:
        """Park what lacked credit for 10 s; the requests of which no choice had any for 60 s."""
        overdue: dict[int, Request] = {}
        for sequence in list(self._out_of_credit):
            since = sequence.credit_since
            if since is None or not sequence.is_alive:
                self._out_of_credit.discard(sequence)
            elif sequence.request.lacks_credit_since(now - CREDIT_TIMEOUT_SECONDS):
                overdue[id(sequence.request)] = sequence.request
            elif now - since >= PARK_SECONDS and sequence.can_park:
                self._park(sequence)
        return list(overdue.values())

    def tune(self, wanted: Tune) -> None:
        """Take new limits, each within what the plan took memory for. What runs goes on; blocks follow as they get free."""
        plan = self.plan
        self.max_step_tokens = min(max(wanted.max_step_tokens, 1), plan.max_batch_tokens)
        # Prompts alone, for which nobody's stream waits, are never held to less than prompts beside streams.
        lone = max(wanted.max_lone_tokens or plan.max_batch_tokens, self.max_step_tokens)
        self._max_lone_tokens = min(lone, plan.max_batch_tokens)
        self._num_spare_rows = max(plan.max_num_seqs - max(wanted.max_num_seqs, 1), 0)
        # A sequence that was accepted must be able to reach its full length, else it would wait for ever.
        fewest = min(-(-self.capacity_tokens // self.page_size), self.pool.num_blocks - 1)
        usable = min(max(wanted.num_usable_blocks, fewest), self.pool.num_blocks - 1)
        self._num_withheld = self.pool.num_blocks - 1 - usable
        self._num_ready = min(max(wanted.num_ready_blocks, 0), usable // 2)
        self.pool.withhold(self._num_withheld)
        self.prefetch_ahead = plan.prefetch or wanted.prefetch_ahead

    def withdraw(self, plan: StepPlan, now: float) -> None:
        """A step that was launched did not run: its sequences wait again, and what they had is computed anew."""
        undone = StepPlan()
        for sequence in plan.sequences:
            if sequence.status is Status.RUNNING:
                self._preempt(sequence, undone)
        self._requeue(undone.preempted, now)

    def release_ahead(self) -> None:
        """Release a few cached blocks when fewer are unused than wanted. Call it while the device works."""
        missing = self._num_ready - self.pool.num_unused
        if missing > 0:
            self.pool.evict(min(missing, RELEASED_AT_ONCE))

    # The decision.

    def schedule(self, now: float) -> StepPlan:
        """The next step, which may go behind one that is under way. Blocks and rows it needs are taken; see `launched`."""
        plan = StepPlan()
        if self.pool.num_withheld < self._num_withheld:
            self.pool.withhold(self._num_withheld)
        self._make_room(plan, now)
        num_preempted = len(plan.preempted)
        ready = self._running.ready(self.running)
        for sequence in ready.without_credit:
            self._note_credit_since(sequence, now)
        decodes, prefilling, growing = ready.decodes, ready.prefilling, ready.growing
        # Streams wait for the step that their tokens are in; prompts alone keep nobody's stream waiting.
        most = self.max_step_tokens if decodes else self._max_lone_tokens
        budget = min(most, self.memory_limit.max_step_tokens)
        most_decodes = budget
        if prefilling or (self.waiting and self._has_row):
            # Else streams that fill a step would keep prompts out of it until some of them end.
            most_decodes = max(budget - max(budget // PROMPTS_SHARE, 1), 1)
        if len(decodes) > most_decodes:
            # More sequences than tokens in a step: take turns.
            self._running.changed()
            start = self._first_decode % len(decodes)
            self._first_decode = start + most_decodes
            decodes = (decodes[start:] + decodes[:start])[:most_decodes]
            chosen = set(decodes)
            growing = [s for s in growing if s in chosen]
        for sequence in growing:
            if sequence.status is Status.RUNNING and self._grow(sequence, plan):
                plan.grown.append(sequence)
        if len(plan.preempted) > num_preempted:
            decodes = [s for s in decodes if s.status is Status.RUNNING]
            prefilling = [s for s in prefilling if s.status is Status.RUNNING]
            plan.grown = [s for s in plan.grown if s.status is Status.RUNNING]
            self._requeue(plan.preempted[num_preempted:], now)
        plan.decodes = decodes
        budget -= len(decodes)
        self._prefilling_tokens = sum(s.num_uncomputed for s in prefilling)
        for sequence in prefilling:
            if budget <= 0:
                break
            budget -= plan.add_prefill(sequence, budget)
        if len(plan.preempted) == num_preempted:
            self._admit(plan, budget, now)
        self._prefilling_tokens -= plan.num_prefill_tokens
        return plan

    def _note_credit_since(self, sequence: Sequence, now: float) -> None:
        if sequence.credit_since is None:
            sequence.credit_since = now
            self._out_of_credit.add(sequence)

    def _forget_credit_since(self, sequence: Sequence) -> None:
        sequence.credit_since = None
        self._out_of_credit.discard(sequence)

    def _grow(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Give `sequence` the block its next token needs, preempting others; False when it was preempted itself."""
        while self.pool.append(sequence.block_table) is None:
            victim = max((s for s in self.running if s.status is Status.RUNNING), key=preemption_key)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        self._release(victim)
        if victim.has_credit:  # for the token that was under way, which is lost
            self._forget_credit_since(victim)
        victim.move_to(Status.WAITING)
        plan.preempted.append(victim)
        self.num_preemptions += 1

    def _requeue(self, preempted: list[Sequence], now: float) -> None:
        self.running = [s for s in self.running if s.row >= 0]
        for sequence in preempted:
            self.waiting.push(sequence, now)

    def _make_room(self, plan: StepPlan, now: float) -> None:
        """Preempt work of a lower class for the next in line, if that is enough to start it."""
        head, self._without_room = self._without_room, None
        if head is None or self.waiting.peek(now) is not head:
            return
        level = head.class_at(now)
        lower = [s for s in self.running if s.effective_class > level and s.request.priority > head.request.priority]
        room = self.pool.num_free + sum(len(s.block_table) for s in lower)
        if not lower or room < -(-len(head.token_ids) // self.page_size) + self._num_spare(len(lower)):
            return
        lower.sort(key=preemption_key)
        while lower and not (self._has_row and self._num_missing(head, self.lookup(head)) <= 0):
            self._preempt(lower.pop(), plan)
        self._requeue(plan.preempted, now)

    @property
    def _has_row(self) -> bool:
        return len(self._free_rows) > self._num_spare_rows

    def _num_spare(self, num_leaving: int = 0) -> int:
        """One spare block a running sequence, else a newcomer would be preempted at once."""
        num_running = self.plan.max_num_seqs - len(self._free_rows)  # a row each
        return min(num_running - num_leaving, self.pool.num_blocks // 16)

    def _num_missing(self, sequence: Sequence, cached: list[int]) -> int:
        """Blocks lacking for `sequence` to start; none when 0 or less."""
        num_needed = -(-len(sequence.token_ids) // self.page_size) - len(cached) + self.pool.num_idle_of(cached)
        return num_needed + self._num_spare() - self.pool.num_free

    def _admit(self, plan: StepPlan, budget: int, now: float) -> None:
        """Start waiting sequences while rows, blocks and budget last. The next in line is never overtaken."""
        while budget > 0 and self.waiting:
            sequence = self.waiting.peek(now)
            if sequence is None:
                return
            if not sequence.has_credit:
                # It cannot send a token: its wait for credit counts, and others go first.
                self._set_aside(sequence, now)
                continue
            cached = self.lookup(sequence) if self._has_row else []
            if not self._has_row or self._num_missing(sequence, cached) > 0:
                if self._park_one():
                    continue
                self._without_room = sequence
                if self.tier_waits is not None and self.prefetch_ahead and not sequence.is_looked_ahead:
                    self._look_ahead(sequence, self.tier_waits)
                return
            tiers = self.tier_waits
            if tiers is not None and tiers.begin(sequence, self._startable_pages(sequence), cached):
                continue
            self.pool.acquire(cached)
            num_new = -(-len(sequence.token_ids) // self.page_size) - len(cached)
            sequence.block_table[:] = cached + (self.pool.allocate(num_new) or [])
            self._start(sequence, len(cached) * self.page_size)
            self._prefilling_tokens += sequence.num_uncomputed
            budget -= plan.add_prefill(sequence, budget)

    def _look_ahead(self, sequence: Sequence, tiers: TierWaits) -> None:
        """Let its blocks of a lower tier come while it waits for a row, where there is room for all of it. Once a sequence."""
        sequence.is_looked_ahead = True
        cached = self.lookup(sequence)
        if self._num_missing(sequence, cached) <= 0:
            tiers.look_ahead(sequence, self._startable_pages(sequence), cached)

    def _set_aside(self, sequence: Sequence, now: float) -> None:
        self.waiting.remove(sequence)
        sequence.move_to(Status.PARKED)
        self.parked.add(sequence)
        self._note_credit_since(sequence, now)
        # Choices that were ahead when the stream was cut must not hold up those that were behind.
        self.unblock(sequence.request, now)

    def _park_one(self) -> bool:
        """Take row and blocks from a sequence that cannot use them for want of credit; False when there is none."""
        idle = next((s for s in self._out_of_credit if s.can_park), None)
        if idle is not None:
            self._park(idle)
        return idle is not None

    def _park(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.running.remove(sequence)
        sequence.move_to(Status.PARKED)
        self.parked.add(sequence)

    def _start(self, sequence: Sequence, num_cached: int) -> None:
        num_uncached = len(sequence.token_ids) - num_cached
        self.waiting.take(sequence, num_uncached)
        sequence.num_computed = num_cached
        sequence.num_published = num_cached // self.page_size
        sequence.row = self._free_rows.pop()
        self._running.changed()
        sequence.move_to(Status.RUNNING)
        self.running.append(sequence)

    def lookup(self, sequence: Sequence) -> list[int]:
        """Cached blocks `sequence` can start from; its last token is computed again in any case, for its logits."""
        return self.pool.lookup_prefix(self._startable_pages(sequence))

    def _startable_pages(self, sequence: Sequence) -> Pages:
        """The pages it need not compute where they are cached."""
        num_pages = (len(sequence.token_ids) - 1) // self.page_size
        scores = sequence.scores_due
        if scores is not None:
            # A cached token has no logits: what is still to be scored is computed.
            num_pages = min(num_pages, scores.num_done // self.page_size)
        return Pages(sequence.hasher, sequence.token_ids, num_pages)

    # Results.

    def launched(self, plan: StepPlan, sampled: list[Sequence], step: int) -> None:
        """`step` of `plan` is under way: what it computes counts as computed, `sampled` (decodes first) have a token coming."""
        self.num_steps = step
        for sequence in plan.decodes:  # all are sampled
            sequence.num_computed += 1
            sequence.future_step = step
        for sequence, count in plan.prefills:
            sequence.num_computed += count
        for sequence in sampled[len(plan.decodes) :]:
            sequence.future_step = step

    def hash_ahead(self, plan: StepPlan) -> None:
        """Hash the pages that a step under way fills, by which `publish` will name them. Call it while the device works."""
        for sequence, _ in plan.prefills:
            sequence.hasher.extend(sequence.token_ids, sequence.num_computed // self.page_size)

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Offer the full pages among the first `num_tokens` of a sequence to the prefix cache.

        Call it once they are computed and their logits were seen to be finite.
        """
        num_pages = min(num_tokens // self.page_size, len(sequence.block_table))
        if num_pages <= sequence.num_published:
            return
        pages = sequence.hasher.extend(sequence.token_ids, num_pages)
        for index in range(sequence.num_published, num_pages):
            parent = pages[index - 1] if index else None
            self.pool.cache_full_block(sequence.block_table[index], pages[index], parent)
        sequence.num_published = num_pages

    def forget(self, sequence: Sequence) -> None:
        """Drop every block of a sequence from the prefix cache: its contents are not to be trusted."""
        self.pool.uncache(sequence.block_table)
        if self.tier_waits is not None:
            self.tier_waits.forget(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_table)
        self._free_rows.append(sequence.row)
        self._running.changed()
        if sequence.future_step:
            self.newest_cut = self.num_steps
        sequence.lose(self.num_steps)
