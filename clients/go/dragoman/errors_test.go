package dragoman

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"dragoman.dev/clients/go/dragomanv1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
)

// The table is generated from the file; here it is compared with the descriptor, which protoc made.
func TestCatalogueIsTheDescriptors(t *testing.T) {
	values := dragomanv1.ErrorReason(0).Descriptor().Values()
	if values.Len() != len(catalogue) {
		t.Errorf("%d reasons in the descriptor, %d in the catalogue", values.Len(), len(catalogue))
	}
	for index := range values.Len() {
		value := values.Get(index)
		entry := proto.GetExtension(value.Options().(*descriptorpb.EnumValueOptions), dragomanv1.E_Traits).(*dragomanv1.ErrorTraits)
		reason := Reason(value.Number())
		if reason.GRPCCode() != codes.Code(entry.GetGrpcCode()) || reason.HTTPStatus() != int(entry.GetHttpStatus()) ||
			reason.Retryable() != entry.GetRetryable() || reason.Remedy() != entry.GetRemedy() {
			t.Errorf("%v: %+v, want %v", reason, reason.traits(), entry)
		}
	}
}

func TestErrorsAreFoundByTheirReason(t *testing.T) {
	err := fmt.Errorf("around it: %w", error(&Error{Reason: ReasonQueueFull, Message: "full"}))
	if !errors.Is(err, ReasonQueueFull) || errors.Is(err, ReasonInternal) || ReasonOf(err) != ReasonQueueFull {
		t.Error("errors.Is finds the reason")
	}
	if ReasonOf(nil) != ReasonUnspecified || ReasonOf(context.Canceled) != ReasonUnspecified {
		t.Error("any other error has no reason")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if over := ended(ctx); !errors.Is(over, context.Canceled) || !errors.Is(over, ReasonCancelled) {
		t.Error("an error of the context is both")
	}
	if unknown := Reason(99); unknown.String() != "unknown_99" || unknown.Retryable() || unknown.HTTPStatus() != 500 {
		t.Error("a reason of a newer version counts as internal")
	}
}

func TestDetailOfATrailer(t *testing.T) {
	if detailOf(metadata.MD{}) != nil {
		t.Error("no detail, no error")
	}
	raw, _ := proto.Marshal(&dragomanv1.ErrorDetail{Reason: dragomanv1.ErrorReason_ERROR_REASON_QUEUE_FULL, Message: "full"})
	if said := detailOf(metadata.Pairs(errorKey, string(raw))); said.Reason != ReasonQueueFull || said.Message != "full" {
		t.Errorf("%+v", said)
	}
	if said := detailOf(metadata.Pairs(errorKey, "\xff")); said.Reason != ReasonInternal {
		t.Errorf("bytes that are no detail: %+v", said)
	}
	if failure := fromStatus(status.Error(codes.DataLoss, "")); failure.Reason != ReasonInternal || failure.Message != "DataLoss" {
		t.Errorf("%+v", failure)
	}
}
