package dragoman

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"dragoman.dev/clients/go/dragomanv1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// deadlineSlack: the agent ends a request at its deadline by itself, with a reason; the transport cuts it this much later.
const deadlineSlack = 500 * time.Millisecond

// attempt is one stream at one agent: opened with a ticket, accepted, read to its one end. It knows nothing of retries.
type attempt struct {
	ticket  *dragomanv1.Ticket
	started *dragomanv1.GenerationStarted
	call    grpc.ServerStreamingClient[dragomanv1.GenerateResponse]
	// ctx is the caller's: when it ends, that is why the call ends.
	ctx    context.Context
	cancel context.CancelFunc
}

// openAttempt sends the request and waits until it is accepted. remaining is 0 where there is no deadline.
func openAttempt(
	ctx context.Context, channels *channels, ticket *dragomanv1.Ticket, request *dragomanv1.GenerateRequest, remaining time.Duration,
) (*attempt, *Error) {
	connection, failure := channels.get(address{ticket.GetDataAddress(), ticket.GetAgentId()})
	if failure != nil {
		return nil, failure
	}
	sent := proto.CloneOf(request)
	sent.TicketToken = ticket.GetToken()
	a := &attempt{ticket: ticket, ctx: ctx}
	var bounded context.Context
	if remaining > 0 {
		sent.Deadline = durationOf(remaining)
		bounded, a.cancel = context.WithTimeout(ctx, remaining+deadlineSlack)
	} else {
		bounded, a.cancel = context.WithCancel(ctx)
	}
	if failure = a.open(bounded, connection, sent); failure != nil {
		a.cancel()
		return nil, failure
	}
	return a, nil
}

func (a *attempt) open(ctx context.Context, connection *grpc.ClientConn, sent *dragomanv1.GenerateRequest) *Error {
	call, err := dragomanv1.NewGenerationServiceClient(connection).Generate(ctx, sent)
	if err != nil {
		return a.failure(err)
	}
	a.call = call
	response, err := call.Recv()
	if err != nil {
		return a.failure(err)
	}
	switch event := response.GetEvent().(type) {
	case *dragomanv1.GenerateResponse_Failed:
		return fromDetail(event.Failed.GetError())
	case *dragomanv1.GenerateResponse_Started:
		a.started = event.Started
	default:
		return lost(a.ticket, "sent tokens before it accepted the request")
	}
	if a.ticket.GetEpoch() != 0 && a.started.GetEpoch() != a.ticket.GetEpoch() {
		return lost(a.ticket, "is in another life than the ticket is for")
	}
	return nil
}

// read returns the next event: a delta, or the end.
func (a *attempt) read() (*dragomanv1.GenerationDelta, *dragomanv1.GenerationFinished, *Error) {
	response, err := a.call.Recv()
	if err != nil {
		return nil, nil, a.failure(err)
	}
	switch event := response.GetEvent().(type) {
	case *dragomanv1.GenerateResponse_Delta:
		return event.Delta, nil, nil
	case *dragomanv1.GenerateResponse_Finished:
		return nil, event.Finished, nil
	case *dragomanv1.GenerateResponse_Failed:
		return nil, nil, fromDetail(event.Failed.GetError())
	case *dragomanv1.GenerateResponse_Started:
		// A second start is the agent's next life, or another one behind the same address.
		return nil, nil, lost(a.ticket, "started the request a second time")
	}
	return nil, nil, lost(a.ticket, "sent an event that this version does not know")
}

func (a *attempt) failure(err error) *Error {
	if over := ended(a.ctx); over != nil {
		return over
	}
	if errors.Is(err, io.EOF) {
		return lost(a.ticket, "ended the stream without saying how the request ended")
	}
	if a.call != nil {
		if said := detailOf(a.call.Trailer()); said != nil {
			return said
		}
	}
	switch status.Code(err) {
	// In these a connection or a process that went away shows itself.
	case codes.Unavailable, codes.Canceled, codes.Unknown, codes.Internal:
		text, refused := plain(err)
		failure := lost(a.ticket, "cannot be reached: "+text)
		failure.refused = refused && a.ticket.GetAgentId() == "" // an open agent is the only one there is
		return failure
	case codes.DeadlineExceeded:
		return &Error{Reason: ReasonDeadlineExceeded, Message: "the deadline of the request passed"}
	}
	return fromStatus(err)
}

// lost is the error of an agent that can no longer be trusted with this stream.
func lost(ticket *dragomanv1.Ticket, what string) *Error {
	name := "at " + ticket.GetDataAddress()
	if ticket.GetAgentId() != "" {
		name = ticket.GetAgentId() + " " + name
	}
	return &Error{Reason: ReasonAgentLost, Message: fmt.Sprintf("the agent %s %s", name, what)}
}
