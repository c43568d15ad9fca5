package dragoman

import (
	"crypto/tls"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

const (
	maxMessageBytes = 16 << 20
	// What a reader that stalls can have in flight before the agent's write waits: about 1,000 tokens.
	streamWindowBytes = 64 << 10
	// One stalled stream must not hold up the others of its connection.
	connectionWindowBytes = 4 << 20
	// gRPC for Go allows no shorter interval.
	keepaliveInterval = 10 * time.Second
	keepaliveTimeout  = 2 * time.Second
)

// channels holds one connection an address.
type channels struct {
	mu     sync.Mutex
	tls    *tls.Config
	open   map[address]*grpc.ClientConn
	closed bool
}

// address is where a server is dialled; with TLS, an agent's certificate must name its id.
type address struct{ target, agentID string }

func (c *channels) get(where address) (*grpc.ClientConn, *Error) {
	if c.tls == nil {
		where.agentID = ""
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, &Error{Reason: ReasonCancelled, Message: "the client is closed"}
	}
	if connection, ok := c.open[where]; ok {
		return connection, nil
	}
	connection, err := grpc.NewClient("passthrough:///"+where.target, c.options(where)...)
	if err != nil {
		return nil, invalid("address", "%q cannot be dialled: %v; give host:port", where.target, err)
	}
	if c.open == nil {
		c.open = map[address]*grpc.ClientConn{}
	}
	c.open[where] = connection
	return connection, nil
}

func (c *channels) options(where address) []grpc.DialOption {
	security := insecure.NewCredentials()
	if c.tls != nil {
		config := c.tls.Clone()
		if where.agentID != "" {
			config.ServerName = where.agentID
		}
		security = credentials.NewTLS(config)
	}
	return []grpc.DialOption{
		grpc.WithTransportCredentials(security),
		// An idle connection is watched too, so that the next request does not find it dead.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: keepaliveInterval, Timeout: keepaliveTimeout, PermitWithoutStream: true,
		}),
		grpc.WithIdleTimeout(0),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes),
		),
		// Static windows turn the bandwidth probe off: it grows the window, which hides a slow reader.
		grpc.WithStaticStreamWindowSize(streamWindowBytes),
		grpc.WithStaticConnWindowSize(connectionWindowBytes),
		// A ticket is accepted once: only retry.go may send a request again, with a new ticket.
		grpc.WithDisableRetry(),
		// Agents are dialled at the address in the ticket; a proxy meant for the web would swallow loopback addresses.
		grpc.WithNoProxy(),
		// An agent that restarts is found again within 2 s; the default backs off to 2 minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
	}
}

func (c *channels) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, connection := range c.open {
		_ = connection.Close() // the only error says that it was closed before
	}
	c.open = nil
}
