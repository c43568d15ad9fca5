package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"dragoman.dev/clients/go/dragoman"
)

func main() {
	client, err := dragoman.New(dragoman.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err = client.Complete(ctx, dragoman.Text("Hello"), dragoman.Options{Model: "no-such-model"})
	if errors.Is(err, dragoman.ReasonModelNotServed) {
		fmt.Println(dragoman.ReasonOf(err).Remedy())
	}
	var failure *dragoman.Error
	if errors.As(err, &failure) {
		fmt.Println(failure.Reason, failure.Retryable(), failure.Message)
	}
}
