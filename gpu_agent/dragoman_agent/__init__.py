"""The GPU agent: owns one device (measure, plan, cache, kernels, decode loop) and serves it over gRPC."""
