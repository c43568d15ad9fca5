package dev.dragoman;

import io.grpc.ChannelCredentials;
import java.util.Optional;
import java.util.concurrent.Executor;
import java.util.concurrent.ForkJoinPool;

/** Whom a client talks to, and how. */
public final class ClientConfig {
  /** Where a controller is looked for when neither the configuration nor the environment names one. */
  public static final String DEFAULT_CONTROLLER = "127.0.0.1:50050";

  private static final String CONTROLLER_VARIABLE = "DRAGOMAN_CONTROLLER";

  final Optional<String> controller;
  final Optional<String> agent;
  final String tenant;
  final Optional<ChannelCredentials> credentials;
  final RetryPolicy retry;
  final Executor executor;

  private ClientConfig(Builder builder) {
    controller = Optional.ofNullable(builder.controller);
    agent = Optional.ofNullable(builder.agent);
    tenant = builder.tenant;
    credentials = Optional.ofNullable(builder.credentials);
    retry = builder.retry;
    executor = builder.executor;
  }

  /** Starts with a controller at $DRAGOMAN_CONTROLLER, else at 127.0.0.1:50050, without TLS. */
  public static Builder builder() {
    return new Builder();
  }

  String controllerAddresses() {
    String found = System.getenv(CONTROLLER_VARIABLE);
    return controller.orElse(found == null || found.isEmpty() ? DEFAULT_CONTROLLER : found);
  }

  /** Collects the settings. */
  public static final class Builder {
    private String controller;
    private String agent;
    private String tenant = "";
    private ChannelCredentials credentials;
    private RetryPolicy retry = RetryPolicy.DEFAULT;
    private Executor executor = ForkJoinPool.commonPool();

    private Builder() {}

    /** The settings so far. Throws where a controller and an agent are both given. */
    public ClientConfig build() {
      if (controller != null && agent != null) {
        throw Errors.invalid("agent", "controller and agent are both given; a client talks to one of them");
      }
      return new ClientConfig(this);
    }

    /** Address of a controller, host:port; several of one cell are listed with commas. */
    public Builder controller(String controller) {
      this.controller = controller;
      return this;
    }

    /** Address of one agent that was started with --open; no controller is asked. */
    public Builder agent(String agent) {
      this.agent = agent;
      return this;
    }

    /** The tenant that is charged. */
    public Builder tenant(String tenant) {
      this.tenant = tenant;
      return this;
    }

    /** TLS; an agent's certificate must name its id. Without it, connections are not encrypted: for loopback only. */
    public Builder credentials(ChannelCredentials credentials) {
      this.credentials = credentials;
      return this;
    }

    /** How hard the client tries. */
    public Builder retry(RetryPolicy retry) {
      this.retry = retry;
      return this;
    }

    /**
     * Where subscribers are called; the common pool by default. {@code Runnable::run} calls them on the thread that reads the
     * connection, which is cheapest, and right for subscribers that never wait.
     */
    public Builder executor(Executor executor) {
      this.executor = executor;
      return this;
    }
  }
}
