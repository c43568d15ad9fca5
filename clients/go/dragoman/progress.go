package dragoman

import (
	"fmt"
	"strings"

	"dragoman.dev/clients/go/dragomanv1"
)

// progress owns the delivered tokens of one generation, choice by choice.
type progress struct{ choices []delivered }

type delivered struct {
	tokenIDs []uint32
	text     strings.Builder
	logprobs []TokenLogprob
	finish   *dragomanv1.ChoiceFinish
}

func newProgress(numChoices uint32) *progress {
	return &progress{choices: make([]delivered, max(1, numChoices))}
}

// numTokens counts over all choices.
func (p *progress) numTokens() int {
	total := 0
	for index := range p.choices {
		total += len(p.choices[index].tokenIDs)
	}
	return total
}

// complete tells whether every choice has ended.
func (p *progress) complete() bool {
	for index := range p.choices {
		if p.choices[index].finish == nil {
			return false
		}
	}
	return true
}

// take returns the delta as an item of the stream, and false when all of it was delivered before.
//
// It fails, and takes nothing, when the delta leaves tokens out, overlaps in part (its text cannot be cut), comes after the end
// of its choice, or is of a choice that was not asked for: taking it would lose or double a token.
func (p *progress) take(delta *dragomanv1.GenerationDelta) (Token, bool, error) {
	index := delta.GetChoiceIndex()
	if int64(index) >= int64(len(p.choices)) {
		return Token{}, false, fmt.Errorf("choice %d was not asked for", index)
	}
	choice := &p.choices[index]
	cursor, expected, count := delta.GetCursor(), uint64(len(choice.tokenIDs)), uint64(len(delta.GetTokenIds()))
	if cursor+count <= expected && (cursor < expected || choice.finish != nil) {
		return Token{}, false, nil
	}
	if cursor != expected {
		return Token{}, false, fmt.Errorf("choice %d: cursor %d came where %d is next", index, cursor, expected)
	}
	if choice.finish != nil {
		return Token{}, false, fmt.Errorf("choice %d: tokens came after its end", index)
	}
	token := Token{
		Text:     delta.GetText(),
		TokenIDs: delta.GetTokenIds(),
		Cursor:   int(cursor),
		Choice:   int(index),
		Logprobs: logprobsOf(delta.GetLogprobs()),
	}
	choice.tokenIDs = append(choice.tokenIDs, delta.GetTokenIds()...)
	choice.text.WriteString(delta.GetText())
	choice.logprobs = append(choice.logprobs, token.Logprobs...)
	if delta.GetFinish() != nil {
		choice.finish = delta.GetFinish()
		token.FinishReason = finishReasonOf(delta.GetFinish().GetReason())
	}
	return token, true, nil
}

// resumeState is what the next agent needs to go on exactly where the last one was cut.
func (p *progress) resumeState(attempt uint32, originEpoch, seed uint64) *dragomanv1.ResumeState {
	state := &dragomanv1.ResumeState{Attempt: attempt, OriginEpoch: originEpoch, Seed: seed}
	for index := range p.choices {
		choice := &p.choices[index]
		state.Choices = append(state.Choices, &dragomanv1.ChoiceProgress{
			ChoiceIndex: uint32(index),
			TokenIds:    &dragomanv1.TokenIds{Ids: choice.tokenIDs},
			Finish:      choice.finish,
		})
	}
	return state
}

// results are the outputs, once complete.
func (p *progress) results() []Choice {
	results := make([]Choice, len(p.choices))
	for index := range p.choices {
		choice := &p.choices[index]
		results[index] = Choice{
			Text:         choice.text.String(),
			TokenIDs:     choice.tokenIDs,
			FinishReason: finishReasonOf(choice.finish.GetReason()),
			Logprobs:     choice.logprobs,
		}
		switch stop := choice.finish.GetStop().(type) {
		case *dragomanv1.ChoiceFinish_StopString:
			results[index].StopString = stop.StopString
		case *dragomanv1.ChoiceFinish_StopTokenId:
			results[index].StopTokenID = &stop.StopTokenId
		}
	}
	return results
}
