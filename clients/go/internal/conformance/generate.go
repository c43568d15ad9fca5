package main

import (
	"context"
	"errors"
	"time"

	"dragoman.dev/clients/go/dragoman"
)

type actions struct {
	CancelAfterTokens  *int    `json:"cancel_after_tokens"`
	CancelAfterSeconds float64 `json:"cancel_after_seconds"`
	PauseAfterTokens   int     `json:"pause_after_tokens"`
	PauseSeconds       float64 `json:"pause_seconds"`
}

// generate streams, with the actions of the call, to the one end.
func (c call) generate(ctx context.Context, client *dragoman.Client, index int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if after := c.Actions.CancelAfterSeconds; after > 0 {
		defer time.AfterFunc(seconds(after), cancel).Stop()
	}
	stream := client.Generate(ctx, c.Prompt.value(), c.Options.value())
	defer stream.Close()
	cancelled := line{"event": "cancelled", "call": index}
	stopAfter := c.Actions.CancelAfterTokens
	if stopAfter != nil && *stopAfter == 0 {
		emit(cancelled)
		return nil
	}
	numTokens, paused := 0, false
	for token, err := range stream.Tokens() {
		if err != nil {
			if errors.Is(err, context.Canceled) && ctx.Err() != nil {
				emit(cancelled)
				return nil
			}
			return err
		}
		numTokens += len(token.TokenIDs)
		emit(tokenLine(token, index))
		if stopAfter != nil && numTokens >= *stopAfter {
			emit(cancelled)
			return nil // leaving the loop is what cancels
		}
		if after := c.Actions.PauseAfterTokens; after > 0 && numTokens >= after && !paused {
			paused = true
			time.Sleep(seconds(c.Actions.PauseSeconds))
		}
	}
	result, err := stream.Result()
	if err != nil {
		return err
	}
	emit(resultLine(result, index))
	return nil
}

func tokenLine(token dragoman.Token, index int) line {
	return line{
		"event": "token", "call": index, "cursor": token.Cursor, "choice": token.Choice, "token_ids": listOf(token.TokenIDs),
		"text": token.Text, "finish_reason": orNull(string(token.FinishReason)), "num_logprobs": len(token.Logprobs),
	}
}

func resultLine(result *dragoman.Result, index int) line {
	choices := []line{}
	for _, choice := range result.Choices {
		choices = append(choices, line{
			"text": choice.Text, "token_ids": listOf(choice.TokenIDs), "finish_reason": choice.FinishReason,
			"stop_string": orNull(choice.StopString), "stop_token_id": choice.StopTokenID, "num_logprobs": len(choice.Logprobs),
		})
	}
	return line{
		"event": "result", "call": index, "request_id": result.RequestID, "model": result.Model, "choices": choices,
		"usage": line{
			"prompt_tokens": result.Usage.PromptTokens, "cached_tokens": result.Usage.CachedTokens,
			"output_tokens": result.Usage.OutputTokens,
		},
		"seed": result.Seed, "agent_id": result.AgentID, "num_resumes": result.NumResumes,
	}
}

func orNull(text string) any {
	if text == "" {
		return nil
	}
	return text
}

func listOf(ids []uint32) []uint32 {
	if ids == nil {
		return []uint32{}
	}
	return ids
}
