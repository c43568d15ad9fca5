// Package dragoman is the Go client of Dragoman: it asks a controller for a ticket, follows the agent that runs the request, and
// resumes at the next token elsewhere when that agent dies.
package dragoman

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"math"
	"os"
	"strings"
	"time"

	"dragoman.dev/clients/go/dragomanv1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// DefaultController is where a client looks for a controller when neither Config nor $DRAGOMAN_CONTROLLER names one.
const DefaultController = "127.0.0.1:50050"

const controllerVariable = "DRAGOMAN_CONTROLLER"

// Config says whom a client talks to. The zero value is a controller at $DRAGOMAN_CONTROLLER, else at DefaultController.
type Config struct {
	// Controller is host:port; several controllers of one cell are listed with commas: another is asked when one is away.
	Controller string
	// Agent is host:port of one agent that was started with --open; there is no controller then.
	Agent string
	// Tenant is charged for the requests; empty is the default tenant.
	Tenant string
	// TLS encrypts connections; an agent's certificate must name its id. Nil is for loopback only.
	TLS *tls.Config
	// Retry says how hard to try; nil means DefaultRetryPolicy().
	Retry *RetryPolicy
}

// A Client talks to a controller and its agents. It is safe for concurrent use. Every error is an *Error.
type Client struct {
	tenant    string
	retry     RetryPolicy
	budget    *retryBudget
	channels  *channels
	directory *directory
	admission admission
}

// New returns a client; nothing is dialled before the first call. Close it.
func New(config Config) (*Client, error) {
	if config.Controller != "" && config.Agent != "" {
		return nil, invalid("Agent", "controller and agent are both given; an open agent has no controller")
	}
	if config.Agent != strings.TrimSpace(config.Agent) {
		return nil, invalid("Agent", "%q begins or ends with a space; give host:port", config.Agent)
	}
	retry := DefaultRetryPolicy()
	if config.Retry != nil {
		retry = *config.Retry
	}
	if failure := retry.check(); failure != nil {
		return nil, failure
	}
	client := &Client{
		tenant:   config.Tenant,
		retry:    retry,
		budget:   newRetryBudget(retry.Budget),
		channels: &channels{tls: config.TLS},
	}
	client.directory = &directory{channels: client.channels, agent: config.Agent}
	if config.Agent != "" {
		client.admission = openAgent{config.Agent}
		return client, nil
	}
	controllers, failure := newControllers(cmp.Or(config.Controller, os.Getenv(controllerVariable), DefaultController))
	if failure != nil {
		return nil, failure
	}
	client.directory.controllers = controllers
	client.admission = &controllerAdmission{
		channels: client.channels, controllers: controllers, releases: map[chan struct{}]struct{}{},
	}
	return client, nil
}

// Close closes all connections; streams under way are cancelled.
func (c *Client) Close() {
	c.admission.close()
	c.channels.close()
}

// Generate generates after a Text, Tokens, or a Conversation. Nothing is sent before the stream is read; read it to its end or
// Close it. Cancelling ctx cancels the request.
func (c *Client) Generate(ctx context.Context, prompt Prompt, options Options) *Stream {
	stream := &Stream{client: c, prompt: prompt, options: options, began: time.Now()}
	stream.ctx, stream.cancel = context.WithCancel(ctx)
	if options.Deadline > 0 {
		stream.deadline = stream.began.Add(options.Deadline)
	}
	if until, ok := ctx.Deadline(); ok && (stream.deadline.IsZero() || until.Before(stream.deadline)) {
		stream.deadline = until
	}
	if failure := options.check(); failure != nil {
		stream.failure = failure
	}
	return stream
}

// Complete is Generate with the whole result at once.
func (c *Client) Complete(ctx context.Context, prompt Prompt, options Options) (*Result, error) {
	return c.Generate(ctx, prompt, options).Result()
}

// EmbedOptions are the options of Embed.
type EmbedOptions struct {
	// Model may be empty where one model is served.
	Model string
	// Dimensions cuts the vectors and normalises them again; 0 means the model's width.
	Dimensions uint32
	// PromptName is the model's own prompt that goes before each text, such as "query"; empty means the files' default.
	PromptName string
	// Instruction is the task of the queries that the texts are, in the form that the model was trained with; not with
	// PromptName.
	Instruction string
}

// Embed returns one vector an input, in order. An input is a Text or Tokens.
func (c *Client) Embed(ctx context.Context, inputs []Prompt, options EmbedOptions) (*Embeddings, error) {
	if len(inputs) == 0 {
		return nil, invalid("inputs", "is empty; give at least one text")
	}
	model, failure := c.directory.resolve(ctx, options.Model)
	if failure != nil {
		return nil, failure
	}
	request := &dragomanv1.EmbedRequest{RequestId: newID(), Model: model}
	if options.Dimensions > 0 {
		request.Dimensions = &options.Dimensions
	}
	if options.PromptName != "" {
		request.PromptName = &options.PromptName
	}
	if options.Instruction != "" {
		request.Instruction = &options.Instruction
	}
	acquire := &dragomanv1.AcquireTicketRequest{
		RequestId: request.RequestId, Model: model, MaxOutputTokens: 1, Tenant: c.tenant,
		NumInputs: uint32(min(len(inputs), math.MaxUint32)), // #nosec G115 -- bounded
	}
	digests := make([][]byte, len(inputs))
	for index, input := range inputs {
		one, failure := prepare(input, Options{}, model, c.tenant)
		if failure != nil {
			return nil, failure
		}
		digests[index] = one.acquire.PromptDigest
		acquire.PromptBytes += one.acquire.PromptBytes
		request.Inputs = append(request.Inputs, embedInputOf(one.generate))
	}
	acquire.PromptDigest = digestOfInputs(digests)
	granted, failure := c.admission.acquire(ctx, acquire)
	if failure != nil {
		return nil, failure
	}
	ticket := granted.tickets[0]
	request.TicketToken = ticket.GetToken()
	where := address{ticket.GetDataAddress(), ticket.GetAgentId()}
	answer, failure := askAgent(ctx, c.channels, where, queueTimeout,
		func(ctx context.Context, connection *grpc.ClientConn, options ...grpc.CallOption) (*dragomanv1.EmbedResponse, error) {
			return dragomanv1.NewEmbeddingServiceClient(connection).Embed(ctx, request, options...)
		})
	if failure != nil {
		return nil, failure
	}
	embeddings := &Embeddings{PromptTokens: int(answer.GetPromptTokens())}
	for _, vector := range answer.GetEmbeddings() {
		embeddings.Vectors = append(embeddings.Vectors, vector.GetValues())
	}
	return embeddings, nil
}

func embedInputOf(request *dragomanv1.GenerateRequest) *dragomanv1.EmbedInput {
	if ids := request.GetTokenIds(); ids != nil {
		return &dragomanv1.EmbedInput{Input: &dragomanv1.EmbedInput_TokenIds{TokenIds: ids}}
	}
	return &dragomanv1.EmbedInput{Input: &dragomanv1.EmbedInput_Text{Text: request.GetText()}}
}

// TokenizeOptions are the options of Tokenize and Detokenize; nil means the agent's default.
type TokenizeOptions struct {
	// Model may be empty where one model is served.
	Model              string
	AddSpecialTokens   *bool
	ParseSpecialTokens *bool
	SkipSpecialTokens  *bool
}

// Tokenize returns the token ids of a text.
func (c *Client) Tokenize(ctx context.Context, text string, options TokenizeOptions) ([]uint32, error) {
	answer, failure := atAgentOf(ctx, c, options.Model,
		func(ctx context.Context, stub dragomanv1.TokenizerServiceClient, model string, calls ...grpc.CallOption) (*dragomanv1.TokenizeResponse, error) {
			return stub.Tokenize(ctx, &dragomanv1.TokenizeRequest{
				Model: model, Text: text, AddSpecialTokens: options.AddSpecialTokens, ParseSpecialTokens: options.ParseSpecialTokens,
			}, calls...)
		})
	if failure != nil {
		return nil, failure
	}
	return answer.GetTokenIds().GetIds(), nil
}

// Detokenize returns the text of token ids; bytes that form no character appear as U+FFFD.
func (c *Client) Detokenize(ctx context.Context, tokenIDs []uint32, options TokenizeOptions) (string, error) {
	answer, failure := atAgentOf(ctx, c, options.Model,
		func(ctx context.Context, stub dragomanv1.TokenizerServiceClient, model string, calls ...grpc.CallOption) (*dragomanv1.DetokenizeResponse, error) {
			return stub.Detokenize(ctx, &dragomanv1.DetokenizeRequest{
				Model: model, TokenIds: &dragomanv1.TokenIds{Ids: tokenIDs}, SkipSpecialTokens: options.SkipSpecialTokens,
			}, calls...)
		})
	if failure != nil {
		return "", failure
	}
	return answer.GetText(), nil
}

// Cancel cancels a request that was started anywhere. One that is unknown or has ended is no error.
func (c *Client) Cancel(ctx context.Context, requestID string) error {
	addresses, failure := c.directory.addresses(ctx)
	if failure != nil {
		return failure
	}
	for _, where := range addresses {
		_, failure := askAgent(ctx, c.channels, where, callTimeout,
			func(ctx context.Context, connection *grpc.ClientConn, options ...grpc.CallOption) (*dragomanv1.CancelGenerationResponse, error) {
				request := &dragomanv1.CancelGenerationRequest{RequestId: requestID}
				return dragomanv1.NewGenerationServiceClient(connection).CancelGeneration(ctx, request, options...)
			})
		if failure != nil && failure.Reason != ReasonNoAgent { // a dead agent runs nothing
			return failure
		}
	}
	return nil
}

// Quote returns what the request would cost now, and where it would go. It grants nothing.
func (c *Client) Quote(ctx context.Context, prompt Prompt, options Options) (*Quote, error) {
	if failure := c.needController("a quote"); failure != nil {
		return nil, failure
	}
	request, failure := c.prepare(ctx, prompt, options)
	if failure != nil {
		return nil, failure
	}
	answer, failure := askController(ctx, c.channels, c.directory.controllers, callTimeout,
		func(ctx context.Context, connection *grpc.ClientConn, options ...grpc.CallOption) (*dragomanv1.QuoteResponse, error) {
			return dragomanv1.NewAdmissionServiceClient(connection).Quote(ctx, &dragomanv1.QuoteRequest{Request: request.acquire}, options...)
		})
	if failure != nil {
		return nil, failure
	}
	return quoteOf(answer.GetQuote(), answer.GetAgentId()), nil
}

// Models returns the names of the served models.
func (c *Client) Models(ctx context.Context) ([]string, error) {
	names, failure := c.directory.models(ctx)
	return names, orNil(failure)
}

// Agents returns every agent with its state and load, as the controller sees it.
func (c *Client) Agents(ctx context.Context) ([]*dragomanv1.FleetMember, error) {
	if failure := c.needController("the list of agents"); failure != nil {
		return nil, failure
	}
	members, failure := c.directory.members(ctx)
	return members, orNil(failure)
}

// Hardware returns the measured profile of an agent's device, and every device that was looked at with the reason. An empty
// agentID is the only agent there is.
func (c *Client) Hardware(ctx context.Context, agentID string) (*dragomanv1.GetHardwareResponse, error) {
	where, failure := c.directory.agentByID(ctx, agentID)
	if failure != nil {
		return nil, failure
	}
	answer, failure := askAgent(ctx, c.channels, where, callTimeout,
		func(ctx context.Context, connection *grpc.ClientConn, options ...grpc.CallOption) (*dragomanv1.GetHardwareResponse, error) {
			return dragomanv1.NewHardwareServiceClient(connection).GetHardware(ctx, &dragomanv1.GetHardwareRequest{}, options...)
		})
	return answer, orNil(failure)
}

// Load returns the load of each agent now: running and waiting requests, free KV blocks, step time.
func (c *Client) Load(ctx context.Context) ([]*dragomanv1.AgentLoadSample, error) {
	samples, failure := c.directory.load(ctx)
	return samples, orNil(failure)
}

// prepare resolves the model, renders a conversation, and builds the messages.
func (c *Client) prepare(ctx context.Context, prompt Prompt, options Options) (*prepared, *Error) {
	if failure := options.check(); failure != nil {
		return nil, failure
	}
	model, failure := c.directory.resolve(ctx, options.Model)
	if failure != nil {
		return nil, failure
	}
	if conversation, ok := prompt.(Conversation); ok {
		messages, failure := messagesOf(conversation)
		if failure != nil {
			return nil, failure
		}
		rendered, failure := atAgentOf(ctx, c, model,
			func(ctx context.Context, stub dragomanv1.TokenizerServiceClient, model string, calls ...grpc.CallOption) (*dragomanv1.ApplyTemplateResponse, error) {
				return stub.ApplyTemplate(ctx, &dragomanv1.ApplyTemplateRequest{Model: model, Messages: messages}, calls...)
			})
		if failure != nil {
			return nil, failure
		}
		prompt = Tokens(rendered.GetTokenIds().GetIds())
	}
	return prepare(prompt, options, model, c.tenant)
}

// atAgentOf calls the tokenizer of an agent that serves the model.
func atAgentOf[R proto.Message](
	ctx context.Context, c *Client, model string,
	call func(context.Context, dragomanv1.TokenizerServiceClient, string, ...grpc.CallOption) (R, error),
) (R, *Error) {
	var nothing R
	model, failure := c.directory.resolve(ctx, model)
	if failure != nil {
		return nothing, failure
	}
	where, failure := c.directory.agentOf(ctx, model)
	if failure != nil {
		return nothing, failure
	}
	return askAgent(ctx, c.channels, where, callTimeout,
		func(ctx context.Context, connection *grpc.ClientConn, options ...grpc.CallOption) (R, error) {
			return call(ctx, dragomanv1.NewTokenizerServiceClient(connection), model, options...)
		})
}

func (c *Client) needController(what string) *Error {
	if c.directory.agent != "" {
		return invalid("Controller", "%s comes from a controller, and this client has an agent only", what)
	}
	return nil
}

// orNil keeps a nil *Error from becoming an error that is not nil.
func orNil(failure *Error) error {
	if failure == nil {
		return nil
	}
	return failure
}

// ReasonOf returns the reason of an error of this package, and ReasonUnspecified for any other and for nil.
func ReasonOf(err error) Reason {
	var known *Error
	if errors.As(err, &known) {
		return known.Reason
	}
	return ReasonUnspecified
}
