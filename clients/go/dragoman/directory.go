package dragoman

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"dragoman.dev/clients/go/dragomanv1"
	"google.golang.org/grpc"
)

// freshness is how long a list of members is good enough to find an agent for a template or the name of the one model.
const freshness = 2 * time.Second

// directory finds models and agents: the members of the fleet as the controller lists them, or the one agent of a direct client.
type directory struct {
	channels    *channels
	controllers *controllers
	agent       string // not empty: an open agent, and no controller

	mu          sync.Mutex
	listed      []*dragomanv1.FleetMember
	readTime    time.Time
	agentsModel string
}

// members returns every member, read now.
func (d *directory) members(ctx context.Context) ([]*dragomanv1.FleetMember, *Error) {
	answer, failure := askController(ctx, d.channels, d.controllers, callTimeout,
		func(ctx context.Context, connection *grpc.ClientConn, options ...grpc.CallOption) (*dragomanv1.ListAgentsResponse, error) {
			return dragomanv1.NewFleetServiceClient(connection).ListAgents(ctx, &dragomanv1.ListAgentsRequest{}, options...)
		})
	if failure != nil {
		return nil, failure
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.listed, d.readTime = answer.GetMembers(), time.Now()
	return d.listed, nil
}

func (d *directory) fresh(ctx context.Context) ([]*dragomanv1.FleetMember, *Error) {
	d.mu.Lock()
	listed, readTime := d.listed, d.readTime
	d.mu.Unlock()
	if len(listed) > 0 && time.Since(readTime) <= freshness {
		return listed, nil
	}
	return d.members(ctx)
}

// models returns the names of the served models, sorted.
func (d *directory) models(ctx context.Context) ([]string, *Error) {
	if d.agent != "" {
		model, failure := d.modelOfAgent(ctx)
		return []string{model}, failure
	}
	members, failure := d.fresh(ctx)
	return namesOf(members), failure
}

func namesOf(members []*dragomanv1.FleetMember) []string {
	names := []string{}
	for _, member := range members {
		for _, served := range member.GetAgent().GetModels() {
			names = append(names, served.GetModel())
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// resolve returns the model to ask for: the one named, or the only one served.
func (d *directory) resolve(ctx context.Context, model string) (string, *Error) {
	if model != "" {
		return model, nil
	}
	if d.agent != "" {
		return d.modelOfAgent(ctx)
	}
	members, failure := d.fresh(ctx)
	if failure != nil {
		return "", failure
	}
	// An agent lists one model under each of its names; the first is the one it is shown by.
	byDigest := map[string]string{}
	for _, member := range members {
		for _, served := range member.GetAgent().GetModels() {
			if digest := string(served.GetModelDigest()); byDigest[digest] == "" {
				byDigest[digest] = served.GetModel()
			}
		}
	}
	names := []string{}
	for _, name := range byDigest {
		names = append(names, name)
	}
	slices.Sort(names)
	switch len(names) {
	case 1:
		return names[0], nil
	case 0:
		return "", noAgent("no agent has registered with the controller yet; start one, or wait until it is ready")
	}
	return "", invalid("model", "several are served (%s); name one", strings.Join(names, ", "))
}

// agentOf returns a serving agent of the model.
func (d *directory) agentOf(ctx context.Context, model string) (address, *Error) {
	if d.agent != "" {
		return address{target: d.agent}, nil
	}
	members, failure := d.fresh(ctx)
	if failure != nil {
		return address{}, failure
	}
	for _, member := range members {
		if member.GetState() != dragomanv1.AgentState_AGENT_STATE_SERVING {
			continue
		}
		for _, served := range member.GetAgent().GetModels() {
			if served.GetModel() == model {
				return addressOf(member), nil
			}
		}
	}
	names := namesOf(members)
	if len(names) == 0 || slices.Contains(names, model) {
		return address{}, noAgent(fmt.Sprintf("no agent that serves %q is ready now; see 'dragoman ps'", model))
	}
	message := fmt.Sprintf("model %q is not served; served: %s", model, strings.Join(names, ", "))
	return address{}, &Error{Reason: ReasonModelNotServed, Message: message}
}

// agentByID returns the agent of that id; empty is the only one there is.
func (d *directory) agentByID(ctx context.Context, agentID string) (address, *Error) {
	if d.agent != "" {
		return address{target: d.agent}, nil
	}
	members, failure := d.members(ctx)
	if failure != nil {
		return address{}, failure
	}
	ids, wanted := []string{}, []*dragomanv1.FleetMember{}
	for _, member := range members {
		ids = append(ids, member.GetAgent().GetAgentId())
		if agentID == "" || agentID == member.GetAgent().GetAgentId() {
			wanted = append(wanted, member)
		}
	}
	known := strings.Join(ids, ", ")
	switch {
	case len(wanted) == 1:
		return addressOf(wanted[0]), nil
	case len(members) == 0:
		return address{}, noAgent("no agent has registered with the controller yet")
	case agentID == "":
		return address{}, invalid("agent_id", "there are several agents (%s); name one", known)
	}
	return address{}, invalid("agent_id", "there is no agent %q (agents: %s)", agentID, known)
}

// addresses returns every agent that may run requests.
func (d *directory) addresses(ctx context.Context) ([]address, *Error) {
	if d.agent != "" {
		return []address{{target: d.agent}}, nil
	}
	members, failure := d.members(ctx)
	found := make([]address, len(members))
	for index, member := range members {
		found[index] = addressOf(member)
	}
	return found, failure
}

func (d *directory) modelOfAgent(ctx context.Context) (string, *Error) {
	d.mu.Lock()
	known := d.agentsModel
	d.mu.Unlock()
	if known != "" {
		return known, nil
	}
	// The header comes first and is all that is wanted.
	part, failure := askAgent(ctx, d.channels, address{target: d.agent}, callTimeout,
		firstOf(dragomanv1.TokenizerServiceClient.GetTokenizer, dragomanv1.NewTokenizerServiceClient, &dragomanv1.GetTokenizerRequest{}))
	if failure != nil {
		return "", failure
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.agentsModel = part.GetHeader().GetModel()
	return d.agentsModel, nil
}

// load returns one sample of each agent's load.
func (d *directory) load(ctx context.Context) ([]*dragomanv1.AgentLoadSample, *Error) {
	call := firstOf(dragomanv1.TelemetryServiceClient.WatchLoad, dragomanv1.NewTelemetryServiceClient, &dragomanv1.WatchLoadRequest{})
	var response *dragomanv1.WatchLoadResponse
	var failure *Error
	if d.agent != "" {
		response, failure = askAgent(ctx, d.channels, address{target: d.agent}, callTimeout, call)
	} else {
		response, failure = askController(ctx, d.channels, d.controllers, callTimeout, call)
	}
	return response.GetAgents(), failure
}

// firstOf makes a call of the first message of a stream; the rest is cancelled.
func firstOf[Stub, Request, Response any](
	method func(Stub, context.Context, *Request, ...grpc.CallOption) (grpc.ServerStreamingClient[Response], error),
	stub func(grpc.ClientConnInterface) Stub,
	request *Request,
) unary[*Response] {
	return func(ctx context.Context, connection *grpc.ClientConn, options ...grpc.CallOption) (*Response, error) {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := method(stub(connection), ctx, request, options...)
		if err != nil {
			return nil, err
		}
		return stream.Recv()
	}
}

func addressOf(member *dragomanv1.FleetMember) address {
	return address{member.GetAgent().GetDataAddress(), member.GetAgent().GetAgentId()}
}

func noAgent(message string) *Error { return &Error{Reason: ReasonNoAgent, Message: message} }
