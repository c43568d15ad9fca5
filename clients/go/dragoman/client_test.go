package dragoman

import (
	"context"
	"errors"
	"regexp"
	"testing"
	"time"

	"dragoman.dev/clients/go/dragomanv1"
)

func TestBadArgumentsAreNamedBeforeAnythingIsSent(t *testing.T) {
	client, err := New(Config{Agent: "127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx := context.Background()
	for param, call := range map[string]func() error{
		"prompt": func() error {
			_, err := client.Complete(ctx, Text(""), Options{Model: "m"})
			return err
		},
		"deadline": func() error {
			_, err := client.Complete(ctx, Text("x"), Options{Model: "m", Deadline: -time.Second})
			return err
		},
		"stop": func() error {
			_, err := client.Complete(ctx, Text("x"), Options{Model: "m", Stop: []string{""}})
			return err
		},
		"options": func() error {
			_, err := client.Complete(ctx, Text("x"), Options{Model: "\xff"})
			return err
		},
		"messages": func() error {
			_, err := client.Complete(ctx, Conversation{}, Options{Model: "m"})
			return err
		},
		"messages[0]": func() error {
			_, err := client.Complete(ctx, Conversation{{"user", "\xff"}}, Options{Model: "m"})
			return err
		},
		"inputs": func() error {
			_, err := client.Embed(ctx, nil, EmbedOptions{})
			return err
		},
		"Controller": func() error {
			_, err := client.Agents(ctx)
			return err
		},
		"Agent": func() error {
			_, err := New(Config{Agent: "a:1", Controller: "b:2"})
			return err
		},
		"Retry": func() error {
			_, err := New(Config{Retry: &RetryPolicy{}})
			return err
		},
	} {
		var failure *Error
		if err := call(); !errors.As(err, &failure) || failure.Reason != ReasonInvalidRequest || failure.Metadata["param"] != param {
			t.Errorf("%s: %v", param, err)
		}
	}
}

func TestAStreamHasOneReaderAndEndsWhenItsClientIsClosed(t *testing.T) {
	client, err := New(Config{Agent: "127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	stream := client.Generate(context.Background(), Text("x"), Options{Model: "m"})
	stream.reading.Store(true)
	if _, err := stream.Result(); !errors.Is(err, ReasonInvalidRequest) {
		t.Errorf("a second reader: %v", err)
	}
	stream.reading.Store(false)
	client.Close()
	if _, err := stream.Result(); !errors.Is(err, ReasonCancelled) {
		t.Errorf("a closed client: %v", err)
	}
}

func TestACancelledContextEndsAStreamBeforeItIsSent(t *testing.T) {
	client, err := New(Config{Agent: "127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := client.Complete(ctx, Text("x"), Options{Model: "m"}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestMessages(t *testing.T) {
	one, failure := prepare(Tokens{1, 2}, Options{MaxOutputTokens: new(uint32(7)), Priority: PriorityBatch}, "m", "t")
	if failure != nil {
		t.Fatal(failure)
	}
	if one.acquire.GetPromptTokens() != 2 || one.acquire.GetPromptBytes() != 8 || one.acquire.GetMaxOutputTokens() != 7 {
		t.Errorf("%v", one.acquire)
	}
	if one.acquire.GetPriority() != dragomanv1.Priority_PRIORITY_BATCH || one.acquire.GetTenant() != "t" {
		t.Errorf("%v", one.acquire)
	}
	if !regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`).MatchString(one.generate.GetRequestId()) {
		t.Errorf("%q is no UUID", one.generate.GetRequestId())
	}
	for form, kind := range map[*Form]any{
		JSONSchema("{}"): &dragomanv1.Grammar_JsonSchema{}, JSONObject(): &dragomanv1.Grammar_JsonObject{},
		Regex("a"): &dragomanv1.Grammar_Regex{}, OneOf("a"): &dragomanv1.Grammar_Choices{}, Lark("x"): &dragomanv1.Grammar_Lark{},
	} {
		one, _ := prepare(Text("x"), Options{Form: form}, "m", "")
		if got := one.generate.GetSampling().GetGrammar().GetKind(); got == nil {
			t.Errorf("%T is not set", kind)
		}
	}
}
