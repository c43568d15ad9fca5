package dragoman

import (
	"crypto/rand"
	"fmt"
	"time"
	"unicode/utf8"

	"dragoman.dev/clients/go/dragomanv1"
	"google.golang.org/protobuf/proto"
)

// A Prompt is a Text, Tokens or a Conversation.
type Prompt interface{ isPrompt() }

// Text is a prompt as text; the agent tokenizes it.
type Text string

// Tokens is a prompt as token ids, used as they are.
type Tokens []uint32

// Conversation is a prompt that is rendered with the model's own chat template.
type Conversation []Message

// A Message is one turn of a conversation. Role is such as "system", "user" or "assistant".
type Message struct{ Role, Content string }

func (Text) isPrompt()         {}
func (Tokens) isPrompt()       {}
func (Conversation) isPrompt() {}

// Priority is the class of service.
type Priority int32

// The classes. The zero value is PriorityStandard.
const (
	PriorityStandard    Priority = Priority(dragomanv1.Priority_PRIORITY_UNSPECIFIED)
	PriorityInteractive Priority = Priority(dragomanv1.Priority_PRIORITY_INTERACTIVE)
	PriorityBatch       Priority = Priority(dragomanv1.Priority_PRIORITY_BATCH)
)

// A Form is what the output must look like; see JSONSchema, JSONObject, Regex, OneOf and Lark.
type Form struct{ grammar *dragomanv1.Grammar }

// JSONSchema makes the output an instance of a schema, given as its text.
func JSONSchema(schema string) *Form {
	return &Form{&dragomanv1.Grammar{Kind: &dragomanv1.Grammar_JsonSchema{JsonSchema: schema}}}
}

// JSONObject makes the output any JSON object.
func JSONObject() *Form {
	return &Form{&dragomanv1.Grammar{Kind: &dragomanv1.Grammar_JsonObject{JsonObject: true}}}
}

// Regex makes the whole output match an expression.
func Regex(expression string) *Form {
	return &Form{&dragomanv1.Grammar{Kind: &dragomanv1.Grammar_Regex{Regex: expression}}}
}

// OneOf makes the output one of these texts.
func OneOf(texts ...string) *Form {
	choices := &dragomanv1.GrammarChoices{Texts: texts}
	return &Form{&dragomanv1.Grammar{Kind: &dragomanv1.Grammar_Choices{Choices: choices}}}
}

// Lark makes the output follow a Lark grammar.
func Lark(grammar string) *Form {
	return &Form{&dragomanv1.Grammar{Kind: &dragomanv1.Grammar_Lark{Lark: grammar}}}
}

// Options are the options of one generation. The zero value of a field, nil for a pointer, means the model's own default;
// new(value) makes a pointer. Ranges are those of SamplingParameters and StopCriteria in generation_service.proto.
type Options struct {
	// Model may be empty where one model is served.
	Model string
	// RequestID names the request for Cancel; empty draws one.
	RequestID string
	// Deadline bounds everything, the wait in the queue included. The context's own deadline counts too.
	Deadline time.Duration
	// MaxQueueWait is the longest wait in the controller's queue; 0 leaves it to the policy.
	MaxQueueWait time.Duration
	Priority     Priority
	// CacheSalt separates prefix caches that must not be shared.
	CacheSalt string

	MaxOutputTokens   *uint32
	MinOutputTokens   *uint32
	Stop              []string
	StopTokenIDs      []uint32
	IncludeStopString bool
	IgnoreEOS         bool

	Temperature       *float32
	TopP              *float32
	TopK              *uint32
	MinP              *float32
	Seed              *uint64
	RepetitionPenalty *float32
	FrequencyPenalty  *float32
	PresencePenalty   *float32
	LogitBias         map[uint32]float32
	AllowedTokenIDs   []uint32
	BadWords          []string
	Form              *Form

	// NumChoices is how many outputs to generate; nil means 1.
	NumChoices *uint32
	// Logprobs is how many alternatives to report with each token; nil reports no log-probabilities.
	Logprobs       *uint32
	PromptLogprobs *uint32

	AddSpecialTokens   *bool
	ParseSpecialTokens *bool
	SkipSpecialTokens  *bool
}

func (o Options) check() *Error {
	if o.Deadline < 0 {
		return invalid("deadline", "must be above 0, not %v", o.Deadline)
	}
	if o.MaxQueueWait < 0 {
		return invalid("max_queue_wait", "must be above 0, not %v", o.MaxQueueWait)
	}
	for _, text := range append(append([]string{o.Model, o.RequestID, o.CacheSalt}, o.Stop...), o.BadWords...) {
		if !utf8.ValidString(text) {
			return invalid("options", "%q is not valid UTF-8", text)
		}
	}
	for _, text := range o.Stop {
		if text == "" {
			return invalid("stop", "a stop string has at least one character")
		}
	}
	return nil
}

// prepared is a request that is ready to be admitted and sent.
type prepared struct {
	generate *dragomanv1.GenerateRequest
	acquire  *dragomanv1.AcquireTicketRequest
}

// prepare builds the messages for a Text or Tokens.
func prepare(prompt Prompt, options Options, model, tenant string) (*prepared, *Error) {
	generate := &dragomanv1.GenerateRequest{
		RequestId: options.RequestID,
		Model:     model,
		CacheSalt: options.CacheSalt,
		Sampling:  options.sampling(),
		Stop: &dragomanv1.StopCriteria{
			MaxOutputTokens: options.MaxOutputTokens, MinOutputTokens: options.MinOutputTokens, Strings: options.Stop,
			TokenIds: options.StopTokenIDs, IncludeStopString: options.IncludeStopString, IgnoreEos: options.IgnoreEOS,
		},
		TextOptions: &dragomanv1.TextOptions{
			AddSpecialTokens: options.AddSpecialTokens, ParseSpecialTokens: options.ParseSpecialTokens,
			SkipSpecialTokens: options.SkipSpecialTokens,
		},
	}
	if generate.RequestId == "" {
		generate.RequestId = newID()
	}
	acquire := &dragomanv1.AcquireTicketRequest{
		RequestId:       generate.RequestId,
		Model:           model,
		MaxOutputTokens: generate.Stop.GetMaxOutputTokens(),
		NumChoices:      generate.Sampling.GetNumChoices(),
		Tenant:          tenant,
		Priority:        priorityOf(options.Priority),
	}
	if options.MaxQueueWait > 0 {
		acquire.MaxQueueWait = durationOf(options.MaxQueueWait)
	}
	switch given := prompt.(type) {
	case Text:
		if given == "" {
			return nil, invalid("prompt", "the text is empty; give at least one character")
		}
		if !utf8.ValidString(string(given)) {
			return nil, invalid("prompt", "is not valid UTF-8; give its bytes as token ids, or correct them")
		}
		generate.Prompt = &dragomanv1.GenerateRequest_Text{Text: string(given)}
		acquire.PromptBytes, acquire.PromptDigest = uint64(len(given)), digestOfText(string(given))
	case Tokens:
		if len(given) == 0 {
			return nil, invalid("prompt", "the list of token ids is empty; give at least one")
		}
		generate.Prompt = &dragomanv1.GenerateRequest_TokenIds{TokenIds: &dragomanv1.TokenIds{Ids: given}}
		acquire.PromptTokens = proto.Uint32(uint32(len(given)))
		acquire.PromptBytes, acquire.PromptDigest = 4*uint64(len(given)), digestOfTokens(given)
	default:
		return nil, invalid("prompt", "must be Text, Tokens or a Conversation, not %T", prompt)
	}
	return &prepared{generate, acquire}, nil
}

func (o Options) sampling() *dragomanv1.SamplingParameters {
	sampling := &dragomanv1.SamplingParameters{
		Temperature: o.Temperature, TopP: o.TopP, TopK: o.TopK, MinP: o.MinP, Seed: o.Seed,
		RepetitionPenalty: o.RepetitionPenalty, FrequencyPenalty: o.FrequencyPenalty, PresencePenalty: o.PresencePenalty,
		LogitBias: o.LogitBias, AllowedTokenIds: o.AllowedTokenIDs, BadWords: o.BadWords,
		NumChoices: o.NumChoices, NumLogprobs: o.Logprobs, NumPromptLogprobs: o.PromptLogprobs,
	}
	if o.Form != nil {
		sampling.Grammar = o.Form.grammar
	}
	return sampling
}

func priorityOf(priority Priority) dragomanv1.Priority {
	if priority == PriorityStandard {
		return dragomanv1.Priority_PRIORITY_STANDARD
	}
	return dragomanv1.Priority(priority)
}

func messagesOf(conversation Conversation) ([]*dragomanv1.ChatMessage, *Error) {
	if len(conversation) == 0 {
		return nil, invalid("messages", "the conversation is empty; give at least one message")
	}
	messages := make([]*dragomanv1.ChatMessage, len(conversation))
	for index, message := range conversation {
		if !utf8.ValidString(message.Role) || !utf8.ValidString(message.Content) {
			return nil, invalid(fmt.Sprintf("messages[%d]", index), "is not valid UTF-8")
		}
		messages[index] = &dragomanv1.ChatMessage{Role: message.Role, Content: message.Content}
	}
	return messages, nil
}

// newID returns a random UUID, version 4.
func newID() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}
