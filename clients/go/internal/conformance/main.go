// Command conformance is the Go client driven by the harness of clients/conformance; its README has the protocol.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"dragoman.dev/clients/go/dragoman"
)

type instruction struct {
	ID         string             `json:"id"`
	Controller string             `json:"controller"`
	Agent      string             `json:"agent"`
	Tenant     string             `json:"tenant"`
	TLS        *certificates      `json:"tls"`
	Retry      map[string]float64 `json:"retry"`
	Calls      []call             `json:"calls"`
}

type certificates struct {
	CA          string `json:"ca_pem"`
	Certificate string `json:"certificate_pem"`
	Key         string `json:"key_pem"`
}

type line map[string]any

var out = bufio.NewWriter(os.Stdout)

// emit writes one observation, seen by the harness at once.
func emit(observation line) {
	text, err := json.Marshal(observation)
	if err != nil {
		panic(err)
	}
	_, _ = out.Write(append(text, '\n'))
	_ = out.Flush()
}

func main() {
	emit(line{"event": "hello", "protocol": 1, "language": "go"})
	in := bufio.NewReader(os.Stdin)
	for {
		text, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		var todo instruction
		if err := json.Unmarshal(text, &todo); err != nil {
			fmt.Fprintln(os.Stderr, "conformance: not an instruction:", err)
			os.Exit(1)
		}
		run(todo)
	}
}

func run(todo instruction) {
	retry := policyOf(todo.Retry)
	config := dragoman.Config{Controller: todo.Controller, Agent: todo.Agent, Tenant: todo.Tenant, Retry: &retry}
	if todo.TLS != nil {
		config.TLS = tlsOf(*todo.TLS)
	}
	client, err := dragoman.New(config)
	if err != nil {
		panic(err)
	}
	for index, one := range todo.Calls {
		began := time.Now()
		if err := one.play(context.Background(), client, index); err != nil {
			emit(errorLine(err, index, time.Since(began)))
		}
	}
	client.Close()
	emit(line{"event": "done", "id": todo.ID})
}

func policyOf(given map[string]float64) dragoman.RetryPolicy {
	policy := dragoman.DefaultRetryPolicy()
	for name, value := range given {
		switch name {
		case "max_attempts":
			policy.MaxAttempts = int(value)
		case "base_seconds":
			policy.BaseDelay = seconds(value)
		case "max_delay_seconds":
			policy.MaxDelay = seconds(value)
		case "resume_patience_seconds":
			policy.ResumePatience = seconds(value)
		case "refused_patience_seconds":
			policy.RefusedPatience = seconds(value)
		case "budget":
			policy.Budget = value
		}
	}
	return policy
}

func tlsOf(given certificates) *tls.Config {
	own, err := tls.X509KeyPair([]byte(given.Certificate), []byte(given.Key))
	if err != nil {
		panic(err)
	}
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM([]byte(given.CA))
	return &tls.Config{RootCAs: trusted, Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS12}
}

func errorLine(err error, index int, elapsed time.Duration) line {
	var known *dragoman.Error
	if !errors.As(err, &known) {
		panic(err) // every error of the client is one of its own
	}
	observation := line{
		"event": "error", "call": index, "reason": known.Reason.String(), "message": known.Message, "retryable": known.Retryable(),
		"retry_delay_seconds": nil, "metadata": known.Metadata, "http_status": known.Reason.HTTPStatus(),
		"grpc_code": int(known.Reason.GRPCCode()), "seconds": elapsed.Seconds(),
	}
	if known.RetryDelay > 0 {
		observation["retry_delay_seconds"] = known.RetryDelay.Seconds()
	}
	return observation
}

func seconds(value float64) time.Duration { return time.Duration(value * float64(time.Second)) }
