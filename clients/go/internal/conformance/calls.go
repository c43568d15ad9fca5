package main

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"syscall"
	"time"

	"dragoman.dev/clients/go/dragoman"
)

type call struct {
	Do        string            `json:"do"`
	Prompt    prompt            `json:"prompt"`
	Options   options           `json:"options"`
	Actions   actions           `json:"actions"`
	Inputs    []json.RawMessage `json:"inputs"`
	Text      string            `json:"text"`
	TokenIDs  []uint32          `json:"token_ids"`
	RequestID string            `json:"request_id"`
	AgentID   string            `json:"agent_id"`
	Streams   int               `json:"streams"`
}

type prompt struct {
	Text     *string            `json:"text"`
	TokenIDs []uint32           `json:"token_ids"`
	Messages []dragoman.Message `json:"messages"`
	Repeat   string             `json:"repeat"`
	Times    int                `json:"times"`
}

func (p prompt) value() dragoman.Prompt {
	switch {
	case p.Text != nil:
		return dragoman.Text(*p.Text)
	case p.TokenIDs != nil:
		return dragoman.Tokens(p.TokenIDs)
	case p.Messages != nil:
		return dragoman.Conversation(p.Messages)
	}
	return dragoman.Text(strings.Repeat(p.Repeat, p.Times))
}

type options struct {
	Model              string   `json:"model"`
	RequestID          string   `json:"request_id"`
	MaxOutputTokens    *uint32  `json:"max_output_tokens"`
	MinOutputTokens    *uint32  `json:"min_output_tokens"`
	Temperature        *float32 `json:"temperature"`
	TopP               *float32 `json:"top_p"`
	TopK               *uint32  `json:"top_k"`
	MinP               *float32 `json:"min_p"`
	Seed               *uint64  `json:"seed"`
	N                  *uint32  `json:"n"`
	Stop               []string `json:"stop"`
	StopTokenIDs       []uint32 `json:"stop_token_ids"`
	IgnoreEOS          bool     `json:"ignore_eos"`
	Logprobs           *uint32  `json:"logprobs"`
	PromptLogprobs     *uint32  `json:"prompt_logprobs"`
	AddSpecialTokens   *bool    `json:"add_special_tokens"`
	ParseSpecialTokens *bool    `json:"parse_special_tokens"`
	SkipSpecialTokens  *bool    `json:"skip_special_tokens"`
	Deadline           float64  `json:"deadline"`
	MaxQueueWait       float64  `json:"max_queue_wait"`
	Priority           string   `json:"priority"`
	Dimensions         uint32   `json:"dimensions"`
}

func (o options) value() dragoman.Options {
	priorities := map[string]dragoman.Priority{
		"interactive": dragoman.PriorityInteractive, "batch": dragoman.PriorityBatch,
	}
	return dragoman.Options{
		Model: o.Model, RequestID: o.RequestID, MaxOutputTokens: o.MaxOutputTokens, MinOutputTokens: o.MinOutputTokens,
		Temperature: o.Temperature, TopP: o.TopP, TopK: o.TopK, MinP: o.MinP, Seed: o.Seed, NumChoices: o.N, Stop: o.Stop,
		StopTokenIDs: o.StopTokenIDs, IgnoreEOS: o.IgnoreEOS, Logprobs: o.Logprobs, PromptLogprobs: o.PromptLogprobs,
		AddSpecialTokens: o.AddSpecialTokens, Deadline: seconds(o.Deadline), MaxQueueWait: seconds(o.MaxQueueWait),
		Priority: priorities[o.Priority],
	}
}

func (o options) tokenize() dragoman.TokenizeOptions {
	return dragoman.TokenizeOptions{
		Model: o.Model, AddSpecialTokens: o.AddSpecialTokens, ParseSpecialTokens: o.ParseSpecialTokens,
		SkipSpecialTokens: o.SkipSpecialTokens,
	}
}

// play makes one call with its one end; an error is for the caller to report.
func (c call) play(ctx context.Context, client *dragoman.Client, index int) error {
	if c.Do == "generate" {
		return c.generate(ctx, client, index)
	}
	value, known, err := c.value(ctx, client)
	switch {
	case !known:
		emit(line{"event": "unsupported", "call": index, "what": c.Do})
	case err == nil:
		emit(line{"event": "value", "call": index, "value": value})
	}
	return err
}

func (c call) value(ctx context.Context, client *dragoman.Client) (value any, known bool, err error) {
	switch c.Do {
	case "load_streams":
		value, err = c.loadStreams(ctx, client)
	case "embed":
		value, err = c.embed(ctx, client)
	case "tokenize":
		value, err = client.Tokenize(ctx, c.Text, c.Options.tokenize())
	case "detokenize":
		value, err = client.Detokenize(ctx, c.TokenIDs, c.Options.tokenize())
	case "quote":
		value, err = c.quote(ctx, client)
	case "cancel":
		err = client.Cancel(ctx, c.RequestID)
	case "models":
		value, err = client.Models(ctx)
	case "agents":
		value, err = agents(ctx, client)
	case "hardware":
		value, err = c.hardware(ctx, client)
	case "load":
		value, err = load(ctx, client)
	default:
		return nil, false, nil
	}
	return value, true, err
}

func (c call) embed(ctx context.Context, client *dragoman.Client) (any, error) {
	inputs := make([]dragoman.Prompt, len(c.Inputs))
	for index, raw := range c.Inputs {
		var text string
		var ids []uint32
		if json.Unmarshal(raw, &text) == nil {
			inputs[index] = dragoman.Text(text)
		} else if err := json.Unmarshal(raw, &ids); err != nil {
			panic(err)
		} else {
			inputs[index] = dragoman.Tokens(ids)
		}
	}
	answer, err := client.Embed(ctx, inputs, dragoman.EmbedOptions{Model: c.Options.Model, Dimensions: c.Options.Dimensions})
	if err != nil {
		return nil, err
	}
	return line{"vectors": answer.Vectors, "prompt_tokens": answer.PromptTokens}, nil
}

func (c call) quote(ctx context.Context, client *dragoman.Client) (any, error) {
	answer, err := client.Quote(ctx, c.Prompt.value(), c.Options.value())
	if err != nil {
		return nil, err
	}
	estimate := func(one dragoman.Estimate) []float64 {
		return []float64{one.P10.Seconds(), one.Expected.Seconds(), one.P90.Seconds()}
	}
	return line{
		"agent_id": answer.AgentID, "time_to_first_token": estimate(answer.TimeToFirstToken),
		"time_per_output_token": estimate(answer.TimePerOutputToken), "finish": estimate(answer.Finish),
	}, nil
}

func (c call) hardware(ctx context.Context, client *dragoman.Client) (any, error) {
	answer, err := client.Hardware(ctx, c.AgentID)
	if err != nil {
		return nil, err
	}
	chosen := []bool{}
	for _, candidate := range answer.GetCandidates() {
		chosen = append(chosen, candidate.GetChosen())
	}
	return line{"kind": answer.GetProfile().GetDevice().GetKind(), "chosen": chosen}, nil
}

func agents(ctx context.Context, client *dragoman.Client) (any, error) {
	members, err := client.Agents(ctx)
	found := []line{}
	for _, member := range members {
		models := []string{}
		for _, served := range member.GetAgent().GetModels() {
			models = append(models, served.GetModel())
		}
		found = append(found, line{
			"agent_id": member.GetAgent().GetAgentId(), "state": int(member.GetState()), "models": models,
			"heartbeat_age_seconds": member.GetHeartbeatAge().AsDuration().Seconds(),
		})
	}
	return found, err
}

func load(ctx context.Context, client *dragoman.Client) (any, error) {
	samples, err := client.Load(ctx)
	found := []line{}
	for _, sample := range samples {
		found = append(found, line{
			"agent_id": sample.GetAgentId(), "running_requests": sample.GetLoad().GetRunningRequests(),
			"waiting_requests": sample.GetLoad().GetWaitingRequests(), "free_kv_blocks": sample.GetLoad().GetFreeKvBlocks(),
		})
	}
	return found, err
}

// loadStreams opens many streams at once and counts the CPU seconds of this process for them.
func (c call) loadStreams(ctx context.Context, client *dragoman.Client) (any, error) {
	before, began := cpuSeconds(), time.Now()
	counts, items, failures := make([]int, c.Streams), make([]int, c.Streams), make([]error, c.Streams)
	var all sync.WaitGroup
	for index := range c.Streams {
		all.Go(func() {
			for token, err := range client.Generate(ctx, c.Prompt.value(), c.Options.value()).Tokens() {
				counts[index] += len(token.TokenIDs)
				items[index]++
				failures[index] = err
			}
		})
	}
	all.Wait()
	tokens, numItems := 0, 0
	for index, count := range counts {
		if failures[index] != nil {
			return nil, failures[index]
		}
		tokens += count
		numItems += items[index]
	}
	return line{"tokens": tokens, "items": numItems, "cpu_seconds": cpuSeconds() - before, "wall_seconds": time.Since(began).Seconds()}, nil
}

func cpuSeconds() float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e9
}
