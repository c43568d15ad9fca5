package dragoman

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sync"
	"time"

	"dragoman.dev/clients/go/dragomanv1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	// callTimeout is the longest wait for a call that does not wait for capacity.
	callTimeout = 30 * time.Second
	// queueTimeout is the longest wait in the controller's queue when the request does not bound it sooner.
	queueTimeout = 600 * time.Second
	// releaseTimeout is how long Close waits for tickets on their way back.
	releaseTimeout = time.Second
)

// grant holds tickets in the order in which they are to be tried.
type grant struct {
	tickets []*dragomanv1.Ticket
	quote   *dragomanv1.LatencyQuote
}

// admission grants requests.
type admission interface {
	// acquire waits for capacity.
	acquire(ctx context.Context, request *dragomanv1.AcquireTicketRequest) (grant, *Error)
	// release returns a ticket that was not used, in the background; one that cannot be returned expires by itself.
	release(ticket *dragomanv1.Ticket)
	// close waits shortly for the tickets on their way back.
	close()
}

// openAgent is one agent that was started with --open: every request goes to it, without a ticket.
type openAgent struct{ target string }

func (a openAgent) acquire(context.Context, *dragomanv1.AcquireTicketRequest) (grant, *Error) {
	return grant{tickets: []*dragomanv1.Ticket{{DataAddress: a.target}}}, nil
}

func (openAgent) release(*dragomanv1.Ticket) {}

func (openAgent) close() {}

// controllerAdmission takes tickets from the controllers of a cell.
type controllerAdmission struct {
	channels    *channels
	controllers *controllers

	mu       sync.Mutex
	releases map[chan struct{}]struct{}
}

func (a *controllerAdmission) acquire(ctx context.Context, request *dragomanv1.AcquireTicketRequest) (grant, *Error) {
	// Until a ticket is back, asking again gives the same one.
	if !a.wait(ctx.Done()) {
		return grant{}, ended(ctx)
	}
	granted, failure := askController(ctx, a.channels, a.controllers, queueTimeout,
		func(ctx context.Context, connection *grpc.ClientConn, options ...grpc.CallOption) (*dragomanv1.AcquireTicketResponse, error) {
			return dragomanv1.NewAdmissionServiceClient(connection).AcquireTicket(ctx, request, options...)
		})
	if failure != nil {
		return grant{}, failure
	}
	tickets := []*dragomanv1.Ticket{granted.GetTicket()}
	if granted.GetFallbackTicket() != nil {
		tickets = append(tickets, granted.GetFallbackTicket())
	}
	return grant{tickets: tickets, quote: granted.GetQuote()}, nil
}

func (a *controllerAdmission) release(ticket *dragomanv1.Ticket) {
	connection, failure := a.channels.get(address{target: a.controllers.current()})
	if failure != nil {
		return
	}
	done := make(chan struct{})
	a.mu.Lock()
	a.releases[done] = struct{}{}
	a.mu.Unlock()
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
		defer cancel()
		request := &dragomanv1.ReleaseTicketRequest{Token: ticket.GetToken()}
		_, _ = dragomanv1.NewAdmissionServiceClient(connection).ReleaseTicket(ctx, request) // else it expires by itself
		a.mu.Lock()
		delete(a.releases, done)
		a.mu.Unlock()
		close(done)
	}()
}

func (a *controllerAdmission) close() {
	limit := make(chan struct{})
	timer := time.AfterFunc(releaseTimeout, func() { close(limit) })
	defer timer.Stop()
	a.wait(limit)
}

// wait returns true once the tickets now on their way are back, false when stop was closed before.
func (a *controllerAdmission) wait(stop <-chan struct{}) bool {
	a.mu.Lock()
	pending := make([]chan struct{}, 0, len(a.releases))
	for done := range a.releases {
		pending = append(pending, done)
	}
	a.mu.Unlock()
	for _, done := range pending {
		select {
		case <-done:
		case <-stop:
			return false
		}
	}
	return true
}

type unary[R any] func(ctx context.Context, connection *grpc.ClientConn, options ...grpc.CallOption) (R, error)

// askController asks one controller after the other: one that is away or shutting down is passed over, each one once.
func askController[R any](ctx context.Context, channels *channels, controllers *controllers, timeout time.Duration, call unary[R]) (R, *Error) {
	for asked := 1; ; asked++ {
		target := controllers.current()
		answer, failure := ask(
			ctx, channels, address{target: target}, timeout, "controller", "start one with 'dragoman up', or give its address", call,
		)
		if failure == nil || asked == len(controllers.targets) || !isAway(failure) {
			return answer, failure
		}
		controllers.failed(target)
	}
}

func askAgent[R any](ctx context.Context, channels *channels, where address, timeout time.Duration, call unary[R]) (R, *Error) {
	return ask(ctx, channels, where, timeout, "agent", "see 'dragoman ps' for the agents that are up", call)
}

func ask[R any](ctx context.Context, channels *channels, where address, timeout time.Duration, whom, remedy string, call unary[R]) (R, *Error) {
	var nothing R
	connection, failure := channels.get(where)
	if failure != nil {
		return nothing, failure
	}
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var trailer metadata.MD
	answer, err := call(bounded, connection, grpc.Trailer(&trailer))
	if err == nil {
		return answer, nil
	}
	if over := ended(ctx); over != nil {
		return nothing, over
	}
	if said := detailOf(trailer); said != nil {
		return nothing, said
	}
	switch status.Code(err) {
	case codes.Unavailable:
		text, refused := plain(err)
		message := fmt.Sprintf("cannot reach the %s at %s: %s; %s", whom, where.target, text, remedy)
		return nothing, &Error{Reason: ReasonNoAgent, Message: message, unreachable: true, refused: refused}
	case codes.DeadlineExceeded:
		message := fmt.Sprintf("the %s at %s did not answer in time", whom, where.target)
		return nothing, &Error{Reason: ReasonDeadlineExceeded, Message: message}
	}
	return nothing, fromStatus(err)
}

// digestOfText returns what a ticket binds of a prompt sent as text.
func digestOfText(text string) []byte {
	digest := sha256.Sum256([]byte(text))
	return digest[:]
}

// digestOfTokens returns what a ticket binds of a prompt sent as ids: little-endian words.
func digestOfTokens(ids []uint32) []byte {
	words := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		words = binary.LittleEndian.AppendUint32(words, id)
	}
	digest := sha256.Sum256(words)
	return digest[:]
}

// digestOfInputs returns what a ticket binds of an embedding request.
func digestOfInputs(digests [][]byte) []byte {
	if len(digests) == 1 {
		return digests[0]
	}
	hash := sha256.New()
	for _, digest := range digests {
		hash.Write(digest)
	}
	return hash.Sum(nil)
}
