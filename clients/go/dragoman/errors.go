package dragoman

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"dragoman.dev/clients/go/dragomanv1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
)

// errorKey is where servers put the ErrorDetail of a failed call.
const errorKey = "dragoman-error-bin"

// A Reason says why a call failed. It is an error itself, so that errors.Is(err, dragoman.ReasonQueueFull) works.
type Reason int32

type traits struct {
	name       string
	grpcCode   codes.Code
	httpStatus int
	retryable  bool
	remedy     string
}

func (r Reason) traits() traits {
	if entry, ok := catalogue[r]; ok {
		return entry
	}
	return catalogue[ReasonInternal]
}

// String returns a name such as "queue_full"; a reason of a newer version is "unknown_99" and counts as internal.
func (r Reason) String() string {
	if entry, ok := catalogue[r]; ok {
		return entry.name
	}
	return fmt.Sprintf("unknown_%d", int32(r))
}

// Error returns the name.
func (r Reason) Error() string { return r.String() }

// Retryable tells whether the same request may succeed later or elsewhere.
func (r Reason) Retryable() bool { return r.traits().retryable }

// GRPCCode returns the canonical status code.
func (r Reason) GRPCCode() codes.Code { return r.traits().grpcCode }

// HTTPStatus returns the status of the gateway.
func (r Reason) HTTPStatus() int { return r.traits().httpStatus }

// Remedy returns what the caller should do, in one sentence.
func (r Reason) Remedy() string { return r.traits().remedy }

// An Error is every failure of this package.
type Error struct {
	Reason Reason
	// Message says what happened, why, and what to do.
	Message string
	// RetryDelay is how long the server asks to wait; 0 where it named nothing.
	RetryDelay time.Duration
	// Metadata holds facts such as "param", the path of a bad field.
	Metadata map[string]string

	// cause is the context's own error, where the context ended the call.
	cause error
	// unreachable is set where the transport speaks, not the server; refused where nobody listens at the address.
	unreachable, refused bool
}

// Error returns the reason and the message.
func (e *Error) Error() string { return e.Reason.String() + ": " + e.Message }

// Is reports whether target is the reason of the error.
func (e *Error) Is(target error) bool {
	reason, ok := target.(Reason)
	return ok && reason == e.Reason
}

// Unwrap returns context.Canceled or context.DeadlineExceeded where the caller's context ended the call.
func (e *Error) Unwrap() error { return e.cause }

// Retryable tells whether the same request may succeed later or elsewhere.
func (e *Error) Retryable() bool { return e.Reason.Retryable() }

func invalid(param, format string, arguments ...any) *Error {
	message := param + ": " + fmt.Sprintf(format, arguments...)
	return &Error{Reason: ReasonInvalidRequest, Message: message, Metadata: map[string]string{"param": param}}
}

func fromDetail(detail *dragomanv1.ErrorDetail) *Error {
	return &Error{
		Reason:     Reason(detail.GetReason()),
		Message:    detail.GetMessage(),
		RetryDelay: detail.GetRetryDelay().AsDuration(),
		Metadata:   detail.GetMetadata(),
	}
}

// detailOf returns the server's own word on a failure, nil where only the transport has spoken.
func detailOf(trailer metadata.MD) *Error {
	values := trailer.Get(errorKey)
	if len(values) == 0 {
		return nil
	}
	detail := &dragomanv1.ErrorDetail{}
	if err := proto.Unmarshal([]byte(values[0]), detail); err != nil {
		return &Error{Reason: ReasonInternal, Message: "the server sent an error that cannot be read: " + err.Error()}
	}
	return fromDetail(detail)
}

var nearestReasons = map[codes.Code]Reason{
	codes.Canceled:          ReasonCancelled,
	codes.DeadlineExceeded:  ReasonDeadlineExceeded,
	codes.InvalidArgument:   ReasonInvalidRequest,
	codes.Unimplemented:     ReasonUnimplemented,
	codes.Unavailable:       ReasonAgentLost,
	codes.ResourceExhausted: ReasonRequestTooLarge,
	codes.Unauthenticated:   ReasonInvalidAPIKey,
	codes.PermissionDenied:  ReasonPermissionDenied,
	codes.NotFound:          ReasonModelNotServed,
}

// fromStatus returns the error of a status without a detail: the nearest reason of its code.
func fromStatus(err error) *Error {
	said := status.Convert(err)
	reason, ok := nearestReasons[said.Code()]
	if !ok {
		reason = ReasonInternal
	}
	message := said.Message()
	if message == "" {
		message = said.Code().String()
	}
	return &Error{Reason: reason, Message: message}
}

// ended returns the error of a context that is over, nil while it is not.
func ended(ctx context.Context) *Error {
	cause := ctx.Err()
	switch {
	case cause == nil:
		return nil
	case errors.Is(cause, context.DeadlineExceeded):
		return &Error{Reason: ReasonDeadlineExceeded, Message: "the deadline of the request passed", cause: cause}
	default:
		return &Error{Reason: ReasonCancelled, Message: "the caller cancelled", cause: cause}
	}
}

// plain returns what the transport says, without the layers it wraps around a connection that nobody accepts.
func plain(err error) (text string, refused bool) {
	text = status.Convert(err).Message()
	if strings.Contains(text, "connection refused") {
		return "connection refused", true
	}
	return text, false
}

func durationOf(duration time.Duration) *durationpb.Duration { return durationpb.New(max(duration, 0)) }
