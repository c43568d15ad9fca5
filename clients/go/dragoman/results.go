package dragoman

import (
	"time"

	"dragoman.dev/clients/go/dragomanv1"
)

// A FinishReason says how a choice ended; empty while it has not.
type FinishReason string

// The finish reasons. One of a newer version reads as FinishStop.
const (
	FinishStop      FinishReason = "stop"
	FinishLength    FinishReason = "length"
	FinishCancelled FinishReason = "cancelled"
)

// A TokenLogprob is the log-probability of one token: natural logarithm, finite.
type TokenLogprob struct {
	TokenID uint32
	Logprob float32
	// TokenBytes are the token's own bytes.
	TokenBytes []byte
	// Top holds the best alternatives, best first.
	Top []TokenLogprob
}

// A Token is one item of a stream: new tokens of one choice.
type Token struct {
	// Text is what became certain with them; it may be empty while a character or a stop string is incomplete.
	Text     string
	TokenIDs []uint32
	// Cursor is the position of the first of them in the output of the choice; it grows without gaps.
	Cursor   int
	Choice   int
	Logprobs []TokenLogprob
	// FinishReason is set with the last tokens of the choice.
	FinishReason FinishReason
}

// A Choice is one complete output.
type Choice struct {
	Text         string
	TokenIDs     []uint32
	FinishReason FinishReason
	// StopString is the one that matched, empty where none did; StopTokenID the token that ended it.
	StopString  string
	StopTokenID *uint32
	Logprobs    []TokenLogprob
}

// Usage counts tokens; those of the output over all choices.
type Usage struct{ PromptTokens, CachedTokens, OutputTokens int }

// Timings are seen by the client, from its call on, with admission and resumes in them; Agent is the finishing agent's own
// account, from acceptance, nil where it did not say.
type Timings struct {
	TimeToFirstToken time.Duration
	Total            time.Duration
	Agent            *AgentTimings
}

// AgentTimings count from acceptance at the agent.
type AgentTimings struct{ Queue, TimeToFirstToken, Total time.Duration }

// A Result is a complete generation.
type Result struct {
	RequestID      string
	Model          string
	Choices        []Choice
	Usage          Usage
	Timings        Timings
	Seed           uint64
	AgentID        string
	NumResumes     int
	Quote          *Quote
	PromptLogprobs []TokenLogprob
}

// Text returns the text of the first choice.
func (r *Result) Text() string { return r.Choices[0].Text }

// An Estimate is one prediction: the middle, and the interval that holds eight in ten outcomes.
type Estimate struct{ Expected, P10, P90 time.Duration }

// A Quote is what the controller predicts for a request, and the agent it would go to.
type Quote struct {
	TimeToFirstToken   Estimate
	TimePerOutputToken Estimate
	Finish             Estimate
	AgentID            string
}

// Embeddings hold one vector of Euclidean norm 1 an input, in order.
type Embeddings struct {
	Vectors      [][]float32
	PromptTokens int
}

func finishReasonOf(reason dragomanv1.FinishReason) FinishReason {
	switch reason {
	case dragomanv1.FinishReason_FINISH_REASON_LENGTH:
		return FinishLength
	case dragomanv1.FinishReason_FINISH_REASON_CANCELLED:
		return FinishCancelled
	}
	return FinishStop
}

func logprobsOf(entries []*dragomanv1.TokenLogprob) []TokenLogprob {
	if len(entries) == 0 {
		return nil
	}
	logprobs := make([]TokenLogprob, len(entries))
	for index, entry := range entries {
		top := make([]TokenLogprob, len(entry.GetTop()))
		for place, other := range entry.GetTop() {
			top[place] = TokenLogprob{TokenID: other.GetTokenId(), Logprob: other.GetLogprob(), TokenBytes: other.GetTokenBytes()}
		}
		logprobs[index] = TokenLogprob{entry.GetTokenId(), entry.GetLogprob(), entry.GetTokenBytes(), top}
	}
	return logprobs
}

func quoteOf(quote *dragomanv1.LatencyQuote, agentID string) *Quote {
	if quote == nil {
		return nil
	}
	return &Quote{
		TimeToFirstToken:   estimateOf(quote.GetTimeToFirstToken()),
		TimePerOutputToken: estimateOf(quote.GetTimePerOutputToken()),
		Finish:             estimateOf(quote.GetFinish()),
		AgentID:            agentID,
	}
}

func estimateOf(estimate *dragomanv1.LatencyEstimate) Estimate {
	return Estimate{estimate.GetExpected().AsDuration(), estimate.GetP10().AsDuration(), estimate.GetP90().AsDuration()}
}
