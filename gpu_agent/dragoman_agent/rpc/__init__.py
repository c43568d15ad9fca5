"""gRPC services of the agent: they translate between the protocol and the engine, nothing else."""
