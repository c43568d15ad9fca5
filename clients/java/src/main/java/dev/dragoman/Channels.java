package dev.dragoman;

import io.grpc.ChannelCredentials;
import io.grpc.ConnectivityState;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.netty.shaded.io.grpc.netty.NettyChannelBuilder;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.TimeUnit;

/** One channel an address, kept open until {@code close}. */
final class Channels {
  static final int MAX_MESSAGE_BYTES = 16 << 20;
  // What a reader that stalls can have in flight before the agent's write waits: about 1,000 tokens. gRPC refills the window
  // of the connection by itself, so that a stalled stream does not hold up the others.
  private static final int STREAM_WINDOW_BYTES = 64 << 10;
  // gRPC for Java allows no shorter interval.
  private static final int KEEPALIVE_SECONDS = 10;
  private static final int KEEPALIVE_TIMEOUT_SECONDS = 2;
  private static final int NEVER_IDLE_DAYS = 365;

  /** Where a server is dialled; with TLS, an agent's certificate must name its id. */
  record Address(String target, String agentId) {
    static Address of(String target) {
      return new Address(target, "");
    }
  }

  private final Optional<ChannelCredentials> credentials;
  private final Map<Address, ManagedChannel> open = new HashMap<>();
  private boolean closed;

  Channels(Optional<ChannelCredentials> credentials) {
    this.credentials = credentials;
  }

  /** The channel to an address. */
  synchronized ManagedChannel get(Address address) {
    if (closed) {
      throw new DragomanException(Reason.CANCELLED, "the client is closed");
    }
    Address key = credentials.isPresent() ? address : Address.of(address.target());
    ManagedChannel channel = open.get(key);
    if (channel != null && channel.getState(false) == ConnectivityState.TRANSIENT_FAILURE) {
      // gRPC for Java would dial again after up to 2 minutes. How soon a server is asked again is for Retry to say.
      channel.shutdown();
      channel = null;
    }
    if (channel == null) {
      channel = dial(key);
      open.put(key, channel);
    }
    return channel;
  }

  private ManagedChannel dial(Address address) {
    NettyChannelBuilder builder;
    try {
      builder =
          NettyChannelBuilder.forTarget(
              "dns:///" + address.target(), credentials.orElseGet(InsecureChannelCredentials::create));
    } catch (IllegalArgumentException error) {
      throw Errors.invalid("address", "\"" + address.target() + "\" cannot be dialled; give host:port");
    }
    if (!address.agentId().isEmpty()) {
      builder.overrideAuthority(address.agentId());
    }
    return builder
        // Nothing that is called back here waits; what a subscriber does is done by the client's executor.
        .directExecutor()
        // An idle connection is watched too, so that the next request does not find it dead.
        .keepAliveTime(KEEPALIVE_SECONDS, TimeUnit.SECONDS)
        .keepAliveTimeout(KEEPALIVE_TIMEOUT_SECONDS, TimeUnit.SECONDS)
        .keepAliveWithoutCalls(true)
        .idleTimeout(NEVER_IDLE_DAYS, TimeUnit.DAYS)
        .maxInboundMessageSize(MAX_MESSAGE_BYTES)
        // A static window turns the bandwidth probe off: it grows the window, which hides a slow reader.
        .initialFlowControlWindow(STREAM_WINDOW_BYTES)
        // A ticket is accepted once: only Retry may send a request again, with a new ticket.
        .disableRetry()
        .disableServiceConfigLookUp()
        // Agents are dialled at the address in the ticket; a proxy meant for the web would swallow loopback addresses.
        .proxyDetector(target -> null)
        .build();
  }

  /** Closes all channels and cancels what runs on them. */
  void close() {
    List<ManagedChannel> channels;
    synchronized (this) {
      closed = true;
      channels = new ArrayList<>(open.values());
      open.clear();
    }
    channels.forEach(ManagedChannel::shutdownNow);
  }
}
