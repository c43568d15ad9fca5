package dragoman

import (
	"slices"
	"strings"
	"sync"
)

// controllers are those of a cell, any of which answers: one is asked until it fails, then the next. Everything of one
// client moves on together.
type controllers struct {
	targets []string

	mu    sync.Mutex
	index int
}

// newControllers reads host:port, several with commas.
func newControllers(list string) (*controllers, *Error) {
	c := &controllers{}
	for part := range strings.SplitSeq(list, ",") {
		if part = strings.TrimSpace(part); part != "" && !slices.Contains(c.targets, part) {
			c.targets = append(c.targets, part)
		}
	}
	if len(c.targets) == 0 {
		return nil, invalid("Controller", "the address is empty; give host:port, several with commas")
	}
	return c, nil
}

// current is the one to ask.
func (c *controllers) current() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.targets[c.index]
}

// failed moves on from a controller that does not answer, or is shutting down. Late news of one that is no longer asked changes
// nothing.
func (c *controllers) failed(target string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if target == c.targets[c.index] {
		c.index = (c.index + 1) % len(c.targets)
	}
}

// isAway tells whether another controller may do better.
func isAway(failure *Error) bool { return failure.unreachable || failure.Reason == ReasonAgentDraining }
