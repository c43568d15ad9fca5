"""The live requests of an engine: begun, admitted, expired, failed, finished; and the events that say so."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from dragoman.prefix_hash import root_hash
from dragoman.v1 import error_pb2
from dragoman_agent.engine import intake
from dragoman_agent.engine.compiling import CompilingRequests
from dragoman_agent.engine.constraints import nothing_left
from dragoman_agent.engine.events import Event, closing_delta, failed, finished
from dragoman_agent.engine.grammar import Account, CompiledGrammar, GrammarError, GrammarsBusyError
from dragoman_agent.engine.messages import Opened, Start, StartEmbed
from dragoman_agent.engine.output import Piece
from dragoman_agent.engine.prompt_scores import PromptScores
from dragoman_agent.engine.request import Request, Sequence, Status, new_request
from dragoman_agent.engine.scheduler import Scheduler
from dragoman_agent.pal.plan import Plan
from dragoman_text import TextTokenizer

Clock = Callable[[], float]


class LiveRequests:
    """Owns the requests by id and the events not yet sent. Every request ends through `end`, exactly once."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: TextTokenizer,
        model_digest: bytes,
        plan: Plan,
        clock: Clock,
        vocab_size: int,
    ) -> None:
        self.by_id: dict[str, Request] = {}
        self.events: list[Event] = []
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._model_digest = model_digest
        self._plan = plan
        self._clock = clock
        self._compiling = CompilingRequests(tokenizer, vocab_size)
        self._deadlines: list[tuple[float, int, Request]] = []
        self._order = itertools.count()

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        events, self.events = self.events, []
        return events

    def start(self, message: Start | StartEmbed) -> None:
        """Begin a request. A bad one is answered by a Failed event."""
        refusal = intake.refusal(message, self.by_id.keys(), self._scheduler.capacity_tokens, self._plan)
        if refusal is not None:
            self.events.append(refusal)
            return
        now = self._clock()
        salt = message.cache_salt if isinstance(message, Start) else ""
        root = root_hash(self._model_digest, cache_salt=salt)
        request = new_request(message, now, root, self._plan.page_size, self._scheduler.capacity_tokens)
        self.by_id[request.request_id] = request
        if isinstance(message, Start):
            for sequence in request.sequences:
                self._open_output(message, sequence)
        if request.deadline is not None:
            if len(self._deadlines) > 2 * len(self.by_id) + 64:
                # Requests that ended long before their deadline would pile up here.
                self._deadlines = [entry for entry in self._deadlines if not entry[2].is_over]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, next(self._order), request))
        if isinstance(message, Start):
            self._admit_start(message, request, now)
        else:
            self._scheduler.add(request, now)

    def _admit_start(self, message: Start, request: Request, now: float) -> None:
        sampling = message.sampling
        if sampling.num_prompt_logprobs >= 0 and request.sequences:
            request.scores = PromptScores(len(message.prompt_ids), sampling.num_prompt_logprobs)
        if sampling.grammar is not None:
            for sequence in request.sequences:
                if sequence.status is Status.WAITING:
                    sequence.move_to(Status.BLOCKED)
            self._compiling.add(request, sampling.grammar, now)
            return
        if request.scores is not None and request.scores.is_complete:
            self.events.append(request.scores.opened(request.request_id))  # a prompt of one token
        self._scheduler.add(request, now)
        self._finish_if_done(request)

    def admit_compiled(self, now: float) -> None:
        """Let the requests go on whose grammar is compiled; refuse those whose cannot be."""
        for request, outcome in self._compiling.ready(now):
            if isinstance(outcome, GrammarError):
                assert request.sampling.grammar is not None
                param = f"sampling.grammar.{request.sampling.grammar.kind}"
                if isinstance(outcome, GrammarsBusyError):
                    self.fail(request, error_pb2.ERROR_REASON_QUEUE_FULL, str(outcome))
                else:
                    self.fail(request, error_pb2.ERROR_REASON_INVALID_REQUEST, f"{param}: {outcome}", param)
                continue
            if not self._start_forms(request, outcome):
                continue
            if request.scores is None or request.scores.is_complete:
                opened = (
                    Opened(request.request_id) if request.scores is None else request.scores.opened(request.request_id)
                )
                self.events.append(opened)
            for sequence in request.sequences:
                if sequence.form is None:
                    continue
                sequence.move_to(Status.WAITING)
                if sequence.form.is_complete and sequence.output is not None:
                    sequence.move_to(Status.FINISHED)
                    request.num_unfinished -= 1
                    piece = Piece(sequence.output.flush(), "stop", None, None)
                    self.events.append(closing_delta(sequence, piece))
            self._scheduler.add(request, now)
            self._finish_if_done(request)

    def _start_forms(self, request: Request, compiled: CompiledGrammar) -> bool:
        """Give each open choice its place in the grammar, what was delivered replayed; False when that does not fit."""
        account = Account()
        for sequence in request.sequences:
            if sequence.status is not Status.BLOCKED:
                continue
            sequence.form = form = compiled.start(account)
            form.take(sequence.token_ids[sequence.num_prompt :])
            if form.failure:
                reason = error_pb2.ERROR_REASON_RESUME_REFUSED
                text = f"resume.choices: what was delivered of choice {sequence.choice} does not fit the grammar"
                self.fail(request, reason, text, "resume.choices")
                return False
        return True

    def _open_output(self, message: Start, sequence: Sequence) -> None:
        """The output stream of a choice, with what was delivered before a resume replayed."""
        piece = intake.open_output(message, sequence, self._tokenizer)
        if piece.finish:
            sequence.move_to(Status.FINISHED)
            sequence.request.num_unfinished -= 1
            self.events.append(closing_delta(sequence, piece))

    def cancel(self, request: Request) -> None:
        """End it with what text was held back."""
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED and not request.is_embedding:
                text = "" if sequence.output is None else sequence.output.flush()
                piece = Piece(text, "cancelled", None, None)
                self.events.append(closing_delta(sequence, piece))
        self.end(request, finished(request, self._clock(), cancelled=True))

    def fail(self, request: Request, reason: error_pb2.ErrorReason, message: str, param: str = "") -> None:
        """End a request with a Failed event and free all it held. `param` is the field that is to blame."""
        self.end(request, failed(request, reason, message, param))

    def end(self, request: Request, event: Event) -> None:
        """Free all that a request held; `event` is its last."""
        request.is_over = True
        alive = [s for s in request.sequences if s.status is not Status.FINISHED]
        self._scheduler.leave(alive, Status.FINISHED)
        del self.by_id[request.request_id]
        self.events.append(event)

    def expire(self, now: float) -> None:
        """Fail what is past its deadline or was without credit for too long."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if not request.is_over:
                self.fail(request, error_pb2.ERROR_REASON_DEADLINE_EXCEEDED, intake.deadline_message(request, now))
        for request in self._scheduler.credit_timeouts(now):
            self.fail(request, error_pb2.ERROR_REASON_CREDIT_TIMEOUT, intake.CREDIT_TIMEOUT_MESSAGE)

    def fail_form(self, sequence: Sequence, reason: str) -> None:
        """Its grammar became too hard to follow."""
        kind = sequence.request.sampling.grammar
        param = f"sampling.grammar.{kind.kind}" if kind is not None else "sampling.grammar"
        text = f"{param}: it became too hard to follow after {sequence.num_output} tokens ({reason}); make it simpler"
        self.fail(sequence.request, error_pb2.ERROR_REASON_INVALID_REQUEST, text, param)

    def fail_non_finite(self, sequence: Sequence) -> None:
        """Its logits were not finite: its blocks are not to be trusted."""
        if nothing_left(sequence):
            self.fail(sequence.request, error_pb2.ERROR_REASON_INVALID_REQUEST, intake.NOTHING_LEFT_MESSAGE, "sampling")
            return
        self._scheduler.forget(sequence)
        self.fail(sequence.request, error_pb2.ERROR_REASON_NON_FINITE_LOGITS, intake.NON_FINITE_MESSAGE)

    def finish_choice(self, sequence: Sequence) -> None:
        """A choice has handed out its last text."""
        request = sequence.request
        self._scheduler.leave([sequence], Status.FINISHED)
        request.num_unfinished -= 1
        self._scheduler.unblock(request, self._clock())
        self._finish_if_done(request)

    def _finish_if_done(self, request: Request) -> None:
        if request.num_unfinished == 0 and not request.is_over:
            self.end(request, finished(request, self._clock(), cancelled=False))
