package dragoman

import (
	"testing"
	"time"
)

func failed(reason Reason) *Error { return &Error{Reason: reason, Message: "it went wrong"} }

func TestSteps(t *testing.T) {
	for _, c := range []struct {
		reason       Reason
		refused, cut step
	}{
		{ReasonAgentLost, resume, resume},
		{ReasonDeviceFault, resume, resume},
		{ReasonAgentDraining, askAgain, resume},
		{ReasonCreditTimeout, askAgain, resume},
		{ReasonQueueFull, askAgain, giveUp},
		{ReasonTicketExpired, askAgain, giveUp},
		{ReasonInternal, giveUp, giveUp},
		{ReasonCancelled, giveUp, giveUp},
		{ReasonPromptQuarantined, giveUp, giveUp},
		{Reason(99), giveUp, giveUp},
	} {
		if got := stepAfter(failed(c.reason), false, false); got != c.refused {
			t.Errorf("%v refused: %v, want %v", c.reason, got, c.refused)
		}
		if got := stepAfter(failed(c.reason), true, false); got != c.cut {
			t.Errorf("%v cut: %v, want %v", c.reason, got, c.cut)
		}
	}
	if stepAfter(failed(ReasonDuplicateRequest), false, false) != giveUp {
		t.Error("a new request under an id in use is final")
	}
	if stepAfter(failed(ReasonDuplicateRequest), false, true) != askAgain {
		t.Error("a resume may meet its old self")
	}
}

func TestDelaysDoubleWithinTheirJitterAndHeedTheServer(t *testing.T) {
	policy := RetryPolicy{MaxAttempts: 4, BaseDelay: 100 * time.Millisecond, MaxDelay: time.Second}
	for failures, longest := range map[int]time.Duration{
		1: 100 * time.Millisecond, 2: 200 * time.Millisecond, 4: 800 * time.Millisecond, 5: time.Second, 60: time.Second,
	} {
		if got := policy.delay(failures, failed(ReasonQueueFull), 0); got != longest/2 {
			t.Errorf("failure %d: the least delay is %v, want %v", failures, got, longest/2)
		}
		if got := policy.delay(failures, failed(ReasonQueueFull), 0.999); got <= longest*9/10 || got > longest {
			t.Errorf("failure %d: the longest delay is %v, want nearly %v", failures, got, longest)
		}
	}
	slow := &Error{Reason: ReasonQueueFull, RetryDelay: 3 * time.Second}
	if got := policy.delay(1, slow, 0.5); got != 3*time.Second {
		t.Errorf("the server named 3 s, got %v", got)
	}
}

func TestBudget(t *testing.T) {
	budget := newRetryBudget(2)
	for retry, want := range []bool{true, true, false} {
		if budget.spend() != want {
			t.Errorf("retry %d of a budget of 2: want %v", retry, want)
		}
	}
	for range 10 {
		budget.succeeded()
	}
	for retry, want := range []bool{true, false} {
		if budget.spend() != want {
			t.Errorf("retry %d after ten successes: want %v", retry, want)
		}
	}
}

func TestPursuit(t *testing.T) {
	policy := DefaultRetryPolicy()
	now, never := time.Unix(1000, 0), time.Time{}
	var fresh pursuit
	for attempt := 1; attempt < policy.MaxAttempts; attempt++ {
		if _, ok := fresh.next(policy, failed(ReasonQueueFull), false, now, never); !ok {
			t.Fatalf("attempt %d of a new request is made", attempt+1)
		}
	}
	if _, ok := fresh.next(policy, failed(ReasonQueueFull), false, now, never); ok {
		t.Error("no attempt after the fourth")
	}

	var cut pursuit
	if delay, ok := cut.next(policy, failed(ReasonAgentLost), true, now, never); delay != 0 || !ok {
		t.Error("a cut stream is resumed at once")
	}
	if _, ok := cut.next(policy, failed(ReasonNoAgent), true, now.Add(20*time.Second), never); !ok {
		t.Error("and pursued for its patience")
	}
	if _, ok := cut.next(policy, failed(ReasonNoAgent), true, now.Add(31*time.Second), never); ok {
		t.Error("and not for longer")
	}
	cut.wentOn()
	if delay, ok := cut.next(policy, failed(ReasonAgentLost), true, now.Add(60*time.Second), never); delay != 0 || !ok {
		t.Error("a stream that went on has all its patience again")
	}

	refusal := &Error{Reason: ReasonNoAgent, refused: true}
	var stopped pursuit
	stopped.next(policy, refusal, true, now, never)
	if _, ok := stopped.next(policy, refusal, true, now.Add(4*time.Second), never); !ok {
		t.Error("a server that may be restarting is waited for")
	}
	if _, ok := stopped.next(policy, refusal, true, now.Add(6*time.Second), never); ok {
		t.Error("one that refuses every connection only for 5 s")
	}

	var bounded pursuit
	slow := &Error{Reason: ReasonQueueFull, RetryDelay: 3 * time.Second}
	if _, ok := bounded.next(policy, slow, false, now, now.Add(2*time.Second)); ok {
		t.Error("no retry after the deadline")
	}
}
