package dragoman

import (
	"context"
	"fmt"
	"iter"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"dragoman.dev/clients/go/dragomanv1"
	"google.golang.org/protobuf/proto"
)

// A Stream is one generation as the client follows it: admission, an agent's stream, fallback, resume at the last cursor, one end.
//
// Nothing is sent before it is first read. An agent that dies is replaced and the stream goes on at the next token, at most
// 3 times; the reader only sees a pause. A stream has one reader; Close and the methods that tell of its state may be called from any goroutine.
type Stream struct {
	client   *Client
	ctx      context.Context
	cancel   context.CancelFunc
	prompt   Prompt
	options  Options
	began    time.Time
	deadline time.Time // zero: none
	reading  atomic.Bool
	closed   atomic.Bool

	// Owned by the reader.
	progress   *progress
	attempt    *attempt
	first      *dragomanv1.GenerationStarted
	seed       *uint64
	finished   *dragomanv1.GenerationFinished
	failure    *Error
	origin     *dragomanv1.Ticket // where the stream was cut
	pursuit    pursuit
	firstToken time.Time
	end        time.Time

	mu         sync.Mutex // guards what follows, which the reader writes and anyone reads
	request    *prepared
	ticket     *dragomanv1.Ticket
	quote      *Quote
	numResumes int
}

// Tokens iterates over the items as they come. It ends after the last one, or with one error, which is an *Error. Leaving the
// loop cancels what still runs.
func (s *Stream) Tokens() iter.Seq2[Token, error] {
	return func(yield func(Token, error) bool) {
		if !s.reading.CompareAndSwap(false, true) {
			yield(Token{}, &Error{Reason: ReasonInvalidRequest, Message: "a stream has one reader; do not iterate over it twice at once"})
			return
		}
		defer func() {
			s.Close()
			s.reading.Store(false)
		}()
		for {
			token, ok, failure := s.next()
			if failure != nil {
				yield(Token{}, failure)
				return
			}
			if !ok || !yield(token, nil) {
				return
			}
		}
	}
}

// Result reads what is left and returns the whole. After Close it fails with ReasonCancelled, unless the stream had ended.
func (s *Stream) Result() (*Result, error) {
	for _, err := range s.Tokens() {
		if err != nil {
			return nil, err
		}
	}
	return s.result(), nil
}

// Close cancels what still runs. It may be called more than once.
func (s *Stream) Close() {
	s.closed.Store(true)
	s.cancel()
}

// RequestID returns the id of the request, empty until the stream was first read.
func (s *Stream) RequestID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.request == nil {
		return ""
	}
	return s.request.generate.GetRequestId()
}

// AgentID returns the agent that runs it now, empty before it is placed and for an open agent.
func (s *Stream) AgentID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ticket.GetAgentId()
}

// NumResumes returns how often it was continued after a cut.
func (s *Stream) NumResumes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.numResumes
}

// Quote returns what the controller promised, nil until it is placed and for an open agent.
func (s *Stream) Quote() *Quote {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.quote
}

func (s *Stream) over() bool { return s.finished != nil || s.progress != nil && s.progress.complete() }

func (s *Stream) next() (Token, bool, *Error) {
	for s.failure == nil && !s.over() {
		if s.closed.Load() {
			s.failure = &Error{Reason: ReasonCancelled, Message: "the stream was closed before its end", cause: context.Canceled}
			break
		}
		token, ok, failure := s.advance()
		if failure != nil {
			accepted := s.attempt != nil
			s.dropAttempt()
			s.recover(failure, accepted)
			continue
		}
		if ok {
			return token, true, nil
		}
	}
	if s.failure != nil {
		s.dropAttempt()
		return Token{}, false, s.failure
	}
	s.readEnd()
	return Token{}, false, nil
}

// advance takes one event, after having the request accepted where it is not.
func (s *Stream) advance() (Token, bool, *Error) {
	if s.attempt == nil {
		accepted, failure := s.start()
		if failure != nil {
			return Token{}, false, failure
		}
		s.attempt = accepted
		if s.first == nil {
			s.first = accepted.started
		}
		s.seed = &accepted.started.Seed
		s.client.budget.succeeded()
	}
	delta, finished, failure := s.attempt.read()
	if failure != nil {
		return Token{}, false, failure
	}
	if finished != nil {
		if !s.progress.complete() {
			return Token{}, false, lost(s.attempt.ticket, "finished the request before all its choices had ended")
		}
		s.finished = finished
		return Token{}, false, nil
	}
	token, ok, err := s.progress.take(delta)
	if err != nil {
		return Token{}, false, lost(s.attempt.ticket, "sent a frame that does not fit: "+err.Error())
	}
	if ok {
		if s.firstToken.IsZero() {
			s.firstToken = time.Now()
		}
		s.pursuit.wentOn()
	}
	return token, ok, nil
}

// start has the request admitted and accepted: by the first agent, or by the second where the first refuses.
func (s *Stream) start() (*attempt, *Error) {
	ctx, cancel, failure := s.bounded()
	if failure != nil {
		return nil, failure
	}
	defer cancel()
	if s.request == nil {
		request, failure := s.client.prepare(ctx, s.prompt, s.options)
		if failure != nil {
			return nil, s.timely(failure)
		}
		s.progress = newProgress(request.generate.GetSampling().GetNumChoices())
		s.mu.Lock()
		s.request = request
		s.mu.Unlock()
	}
	granted, failure := s.client.admission.acquire(ctx, s.acquireMessage())
	if failure != nil {
		return nil, s.timely(failure)
	}
	request := s.generateMessage()
	var first *Error
	for _, ticket := range granted.tickets {
		s.placed(ticket, granted)
		remaining, failure := s.remaining()
		if failure == nil {
			var accepted *attempt
			if accepted, failure = openAttempt(s.ctx, s.client.channels, ticket, request, remaining); failure == nil {
				return accepted, nil
			}
		}
		s.client.admission.release(ticket)
		if first == nil {
			first = failure
		}
		if !mayPass(failure, s.origin != nil) {
			return nil, failure
		}
	}
	return nil, first
}

func (s *Stream) placed(ticket *dragomanv1.Ticket, granted grant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ticket = ticket
	if s.quote == nil {
		s.quote = quoteOf(granted.quote, granted.tickets[0].GetAgentId())
	}
}

func (s *Stream) acquireMessage() *dragomanv1.AcquireTicketRequest {
	message := proto.CloneOf(s.request.acquire)
	if !s.deadline.IsZero() {
		message.Deadline = durationOf(time.Until(s.deadline))
	}
	if s.origin != nil {
		message.Resume = &dragomanv1.ResumeRequest{
			OriginEpoch:   s.origin.GetEpoch(),
			OriginAgentId: s.origin.GetAgentId(),
			Attempt:       uint32(s.numResumes),
			FromCursor:    uint64(s.progress.numTokens()),
		}
	}
	return message
}

func (s *Stream) generateMessage() *dragomanv1.GenerateRequest {
	if s.origin == nil {
		return s.request.generate
	}
	if s.seed == nil {
		// It was lost before the agent named the seed it drew: nothing was delivered, so any will do.
		s.seed = s.request.generate.GetSampling().Seed
		if s.seed == nil {
			s.seed = new(rand.Uint64() >> 1)
		}
	}
	message := proto.CloneOf(s.request.generate)
	message.Resume = s.progress.resumeState(uint32(s.numResumes), s.origin.GetEpoch(), *s.seed)
	return message
}

// recover waits until the request may be tried again, or makes failure the end of the stream.
func (s *Stream) recover(failure *Error, accepted bool) {
	todo := stepAfter(failure, accepted, s.origin != nil)
	if todo == resume && s.ticket == nil {
		todo = askAgain
	}
	if todo == giveUp || todo == resume && s.numResumes >= maxResumes {
		s.failure = s.notResumed(failure)
		return
	}
	delay, ok := s.pursuit.next(s.client.retry, failure, s.first != nil, time.Now(), s.deadline)
	if !ok || !s.client.budget.spend() {
		s.failure = s.notResumed(failure)
		return
	}
	if todo == resume {
		s.mu.Lock()
		s.origin = s.ticket
		s.numResumes++
		s.mu.Unlock()
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.ctx.Done():
		s.failure = ended(s.ctx)
	}
}

// notResumed is the end of a stream: when it had been cut, what cut it comes first.
func (s *Stream) notResumed(failure *Error) *Error {
	cut := s.pursuit.cut
	if cut == nil || cut == failure || failure.cause != nil {
		return failure
	}
	whole := *failure
	whole.Message = fmt.Sprintf("the stream was cut (%s) and could not be resumed: %s", cut.Message, failure.Message)
	return &whole
}

// remaining returns what is left until the deadline, 0 where there is none.
func (s *Stream) remaining() (time.Duration, *Error) {
	if s.deadline.IsZero() {
		return 0, nil
	}
	if left := time.Until(s.deadline); left > 0 {
		return left, nil
	}
	return 0, &Error{Reason: ReasonDeadlineExceeded, Message: "the deadline of the request passed"}
}

// bounded returns the stream's context with its deadline, for calls that the deadline ends at once.
func (s *Stream) bounded() (context.Context, context.CancelFunc, *Error) {
	remaining, failure := s.remaining()
	if failure != nil {
		return nil, nil, failure
	}
	if remaining == 0 {
		return s.ctx, func() {}, nil
	}
	ctx, cancel := context.WithTimeout(s.ctx, remaining)
	return ctx, cancel, nil
}

// timely says that the deadline passed where that is why a call failed, whatever the call says.
func (s *Stream) timely(failure *Error) *Error {
	if _, late := s.remaining(); late != nil && failure.cause != nil {
		return late
	}
	return failure
}

// readEnd reads the usage after the last token. All tokens are here, so an agent lost now costs only its figures.
func (s *Stream) readEnd() {
	if s.attempt != nil && s.finished == nil {
		if _, finished, failure := s.attempt.read(); failure == nil {
			s.finished = finished
		}
	}
	s.dropAttempt()
	if s.end.IsZero() {
		s.end = time.Now()
	}
}

func (s *Stream) dropAttempt() {
	if s.attempt != nil {
		s.attempt.cancel()
		s.attempt = nil
	}
}

func (s *Stream) result() *Result {
	result := &Result{
		RequestID: s.request.generate.GetRequestId(),
		Model:     s.request.generate.GetModel(),
		Choices:   s.progress.results(),
		// Output tokens are counted here: an agent that took over counts only from its own start.
		Usage: Usage{
			PromptTokens: int(s.first.GetPromptTokens()),
			CachedTokens: int(s.finished.GetUsage().GetCachedTokens()),
			OutputTokens: s.progress.numTokens(),
		},
		Timings:        Timings{Total: s.end.Sub(s.began)},
		Seed:           *s.seed,
		AgentID:        s.ticket.GetAgentId(),
		NumResumes:     s.numResumes,
		Quote:          s.quote,
		PromptLogprobs: logprobsOf(s.first.GetPromptLogprobs()),
	}
	if !s.firstToken.IsZero() {
		result.Timings.TimeToFirstToken = s.firstToken.Sub(s.began)
	}
	if s.finished != nil {
		result.Timings.Agent = &AgentTimings{
			Queue:            s.finished.GetQueueTime().AsDuration(),
			TimeToFirstToken: s.finished.GetTimeToFirstToken().AsDuration(),
			Total:            s.finished.GetTotalTime().AsDuration(),
		}
	}
	return result
}
