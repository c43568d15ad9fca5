"""The gRPC options of every server and channel of Dragoman, in one place, each with its reason."""

from __future__ import annotations

import os

# Half a second short of 5: noticing that a peer is silent and going on elsewhere shall take no more than 7 s together.
KEEPALIVE_SECONDS = 4.5
KEEPALIVE_TIMEOUT_SECONDS = 2
MAX_MESSAGE_BYTES = 16 << 20
STREAM_WINDOW_BYTES = 64 << 10

Options = list[tuple[str, int]]


def quiet_grpc() -> None:
    """Keep gRPC's own notices off stderr, unless the user has set GRPC_VERBOSITY. To be called before grpc is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _shared_options() -> Options:
    return [
        # A silent peer is noticed within 4.5 + 2 s. Without the HTTP/2 ping timeout gRPC waits a minute for the answer.
        ("grpc.keepalive_time_ms", int(1000 * KEEPALIVE_SECONDS)),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        # An idle connection is watched too, so that the next request does not find it dead.
        ("grpc.keepalive_permit_without_calls", 1),
        # A prefill sends nothing for seconds; the default of two pings without data would end the watch in it.
        ("grpc.http2.max_pings_without_data", 0),
        # A prompt of 1M token ids takes 4 MB at most and the tokenizer's files more; the default limit is 4 MB.
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Token streams are many small messages: the probe adds pings and grows the window, which hides a slow reader.
        ("grpc.http2.bdp_probe", 0),
    ]


def server_options() -> Options:
    """Options for `grpc.aio.server` and `grpc.server`."""
    return [
        *_shared_options(),
        # The clients' keepalive of 4.5 s must not count as a flood (the default allows one ping in 5 minutes).
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        # A gateway that reconnects opens thousands of streams at once; the default limiter cancels some of them.
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        # Two processes on one port would share its connections silently; the second must fail to bind instead.
        ("grpc.so_reuseport", 0),
    ]


def channel_options() -> Options:
    """Options for `grpc.aio.insecure_channel` and its relatives."""
    return [
        *_shared_options(),
        # What a reader that stalls can have in flight before the agent's write waits: about 1,000 tokens.
        ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
        # A ticket is accepted once: only `retry.py` may send a request again, with a new ticket.
        ("grpc.enable_retries", 0),
        # An agent that restarts is found again within 2 s; the default backs off to 2 minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Agents are dialled at the address in the ticket; a proxy meant for the web would swallow loopback addresses.
        ("grpc.enable_http_proxy", 0),
    ]
