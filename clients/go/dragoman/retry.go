package dragoman

import (
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// maxResumes is how often one stream may be continued.
const maxResumes = 3

// A RetryPolicy says how hard a client tries.
//
// A request of which nothing was delivered is asked for MaxAttempts times in all. One that was cut in the middle is worth
// more: it is pursued for ResumePatience after the cut, through at most 3 resumes; for RefusedPatience only while every
// connection is refused, which is how a stopped server looks. Delays double from BaseDelay up to MaxDelay, each shortened
// at random by up to a half; a delay that the server named is the least. Budget limits the retries of one client: each costs
// 1, each accepted request gives back a tenth, so that many failing requests do not become a storm.
type RetryPolicy struct {
	MaxAttempts     int
	BaseDelay       time.Duration
	MaxDelay        time.Duration
	ResumePatience  time.Duration
	RefusedPatience time.Duration
	Budget          float64
}

// DefaultRetryPolicy returns what a client uses unless told otherwise.
func DefaultRetryPolicy() RetryPolicy {
	return RetryPolicy{
		MaxAttempts:     4,
		BaseDelay:       100 * time.Millisecond,
		MaxDelay:        5 * time.Second,
		ResumePatience:  30 * time.Second,
		RefusedPatience: 5 * time.Second,
		Budget:          50,
	}
}

func (p RetryPolicy) check() *Error {
	if p.MaxAttempts < 1 || p.BaseDelay < 0 || p.MaxDelay < 0 || p.Budget < 0 {
		return invalid("Retry", "MaxAttempts is at least 1, and no delay or budget is negative; start from DefaultRetryPolicy()")
	}
	return nil
}

// delay returns the wait after failure number failures, from 1 on; random is in [0, 1).
func (p RetryPolicy) delay(failures int, failure *Error, random float64) time.Duration {
	longest := min(float64(p.BaseDelay)*math.Exp2(float64(min(failures-1, 30))), float64(p.MaxDelay))
	return max(time.Duration(longest*(0.5+0.5*random)), failure.RetryDelay)
}

// retryBudget is what is left of RetryPolicy.Budget. It is counted in tenths: ten successes make one retry exactly.
type retryBudget struct {
	mu       sync.Mutex
	capacity int
	left     int
}

func newRetryBudget(capacity float64) *retryBudget {
	tenths := int(math.Round(capacity * 10))
	return &retryBudget{capacity: tenths, left: tenths}
}

// spend pays for one retry; false when there is nothing left for it.
func (b *retryBudget) spend() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left < 10 {
		return false
	}
	b.left -= 10
	return true
}

// succeeded gives a tenth of a retry back.
func (b *retryBudget) succeeded() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = min(b.capacity, b.left+1)
}

type step int

const (
	giveUp   step = iota
	askAgain      // it was refused: same request, new ticket
	resume        // it may have been running: next attempt, from the last cursor
)

// mayPass tells whether a refusal may be another answer later or at another agent. A resume can reach the agent it was cut
// from before that agent has noticed the cut: the request is still under way there.
func mayPass(failure *Error, resuming bool) bool {
	return failure.Retryable() || (resuming && failure.Reason == ReasonDuplicateRequest)
}

// stepAfter returns what the reason of a failure asks for. accepted: the agent had started the request on this attempt.
func stepAfter(failure *Error, accepted, resuming bool) step {
	switch failure.Reason {
	case ReasonAgentLost, ReasonDeviceFault:
		return resume
	case ReasonAgentDraining, ReasonCreditTimeout:
		if accepted {
			return resume
		}
	}
	if !accepted && mayPass(failure, resuming) {
		return askAgain
	}
	return giveUp
}

// pursuit is how far one stream has got with failing: what decides whether it is tried again, and when.
type pursuit struct {
	failures     int
	cut          *Error // what the last cut said, until the stream goes on
	cutTime      time.Time
	refusedSince time.Time
}

// next returns the wait before the next try, and false when there is none.
func (p *pursuit) next(policy RetryPolicy, failure *Error, started bool, now, deadline time.Time) (time.Duration, bool) {
	if !failure.refused {
		p.refusedSince = time.Time{}
	} else if p.refusedSince.IsZero() {
		p.refusedSince = now
	}
	if started && p.cut == nil {
		p.cut, p.cutTime = failure, now
		return 0, true
	}
	p.failures++
	delay := policy.delay(p.failures, failure, rand.Float64())
	if !deadline.IsZero() && !now.Add(delay).Before(deadline) {
		return 0, false
	}
	if !started {
		return delay, p.failures < policy.MaxAttempts
	}
	patience := p.cutTime.Add(policy.ResumePatience).Sub(now)
	if !p.refusedSince.IsZero() {
		patience = min(patience, p.refusedSince.Add(policy.RefusedPatience).Sub(now))
	}
	return delay, delay <= patience
}

// wentOn forgets the failures: the stream has a new token.
func (p *pursuit) wentOn() { p.failures, p.cut = 0, nil }
