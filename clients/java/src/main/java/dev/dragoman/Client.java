package dev.dragoman;

import dev.dragoman.Channels.Address;
import dev.dragoman.Requests.Prepared;
import dev.dragoman.v1.AcquireTicketRequest;
import dev.dragoman.v1.AdmissionServiceGrpc;
import dev.dragoman.v1.AgentLoadSample;
import dev.dragoman.v1.ApplyTemplateRequest;
import dev.dragoman.v1.CancelGenerationRequest;
import dev.dragoman.v1.ChatMessage;
import dev.dragoman.v1.DetokenizeRequest;
import dev.dragoman.v1.EmbedRequest;
import dev.dragoman.v1.EmbedResponse;
import dev.dragoman.v1.EmbeddingServiceGrpc;
import dev.dragoman.v1.FleetMember;
import dev.dragoman.v1.GenerationServiceGrpc;
import dev.dragoman.v1.GetHardwareRequest;
import dev.dragoman.v1.GetHardwareResponse;
import dev.dragoman.v1.HardwareServiceGrpc;
import dev.dragoman.v1.QuoteRequest;
import dev.dragoman.v1.Ticket;
import dev.dragoman.v1.TokenIds;
import dev.dragoman.v1.TokenizeRequest;
import dev.dragoman.v1.TokenizerServiceGrpc;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;

/**
 * Talks to a controller, or to one agent that was started with --open. May be used by several threads. Errors are {@link
 * DragomanException}; interrupting a thread that waits ends its call with CANCELLED.
 */
public final class Client implements AutoCloseable {
  // How long a client that is closed waits for tickets on their way back.
  private static final long RELEASE_SECONDS = 1;

  private final ClientConfig config;
  private final Channels channels;
  private final Calls calls;
  private final Directory directory;
  private final Tickets tickets;
  private final Generation.Context context;
  private final Set<Generation> live = ConcurrentHashMap.newKeySet();

  private Client(ClientConfig config) {
    this.config = config;
    if (config.agent.filter(String::isBlank).isPresent()) {
      throw Errors.invalid("agent", "the address is empty; give host:port");
    }
    Optional<Controllers> controllers =
        config.agent.isPresent() ? Optional.empty() : Optional.of(new Controllers(config.controllerAddresses()));
    channels = new Channels(config.credentials);
    calls = new Calls(channels);
    directory = new Directory(calls, controllers, config.agent);
    tickets =
        controllers
            .<Tickets>map(cell -> new Tickets.OfControllers(calls, cell))
            .orElseGet(() -> new Tickets.OpenAgent(config.agent.orElseThrow()));
    context = new Generation.Context(channels, tickets, config.retry, new Retry.Budget(config.retry.budget()));
  }

  /** A client of the controller at $DRAGOMAN_CONTROLLER, else at 127.0.0.1:50050. */
  public static Client create() {
    return create(ClientConfig.builder().build());
  }

  /** A client with these settings. It connects when it is first used. */
  public static Client create(ClientConfig config) {
    return new Client(config);
  }

  /** Generates after a text, token ids, or a conversation. Nothing is sent until the stream is read. */
  public GenerationStream generate(Prompt prompt, GenerateOptions options) {
    Supplier<CompletableFuture<Prepared>> prepare;
    if (prompt instanceof Prompt.Conversation conversation) {
      List<ChatMessage> messages = Requests.conversation(conversation);
      prepare = () -> render(messages, options);
    } else {
      Prepared prepared = Requests.prepare(prompt, options, config.tenant);
      prepare = () -> directory.resolve(options.model).thenApply(prepared::forModel);
    }
    Optional<Long> seed =
        options.sampling.hasSeed() ? Optional.of(options.sampling.getSeed()) : Optional.empty();
    Generation generation = new Generation(context, prepare, options.deadline, seed);
    live.add(generation);
    var unused = generation.outcome().whenComplete((result, error) -> live.remove(generation));
    return new GenerationStream(generation, config.executor);
  }

  /** As {@code generate}, the whole result at once. */
  public GenerationResult complete(Prompt prompt, GenerateOptions options) {
    try (GenerationStream stream = generate(prompt, options)) {
      return stream.result();
    }
  }

  private CompletableFuture<Prepared> render(List<ChatMessage> messages, GenerateOptions options) {
    return directory
        .resolve(options.model)
        .thenCompose(
            model -> {
              ApplyTemplateRequest request =
                  ApplyTemplateRequest.newBuilder().setModel(model).addAllMessages(messages).build();
              return directory
                  .agentOf(model)
                  .thenCompose(
                      agent ->
                          calls.askAgent(
                              agent, TokenizerServiceGrpc.getApplyTemplateMethod(), request, Calls.CALL_TIMEOUT))
                  .thenApply(rendered -> new Prompt.Tokens(rendered.getTokenIds().getIdsList()))
                  .thenApply(prompt -> Requests.prepare(prompt, options, config.tenant).forModel(model));
            });
  }

  /** One vector of norm 1 an input (texts or token ids), in order. */
  public Embeddings embed(List<? extends Prompt> inputs, EmbedOptions options) {
    Optional<Long> until =
        options.deadline().map(limit -> System.nanoTime() + Requests.positive("deadline", limit).toNanos());
    EmbedRequest.Builder request = EmbedRequest.newBuilder().setRequestId(UUID.randomUUID().toString());
    options.dimensions().ifPresent(width -> request.setDimensions(Requests.notNegative("dimensions", width)));
    options.promptName().ifPresent(name -> request.setPromptNameBytes(Requests.utf8("promptName", name)));
    options.instruction().ifPresent(task -> request.setInstructionBytes(Requests.utf8("instruction", task)));
    AcquireTicketRequest unnamed = Requests.embed(request, inputs, config.tenant);
    String model = await(directory.resolve(options.model()));
    AcquireTicketRequest.Builder acquire = unnamed.toBuilder().setModel(model);
    Duration left = left(until);
    until.ifPresent(at -> acquire.setDeadline(Durations.wire(left)));
    Ticket ticket = await(tickets.acquire(acquire.build(), left)).tickets().get(0);
    EmbedRequest sent = request.setModel(model).setTicketToken(ticket.getToken()).build();
    EmbedResponse answer =
        await(
            calls.askAgent(
                new Address(ticket.getDataAddress(), ticket.getAgentId()),
                EmbeddingServiceGrpc.getEmbedMethod(),
                sent,
                left(until)));
    return new Embeddings(
        answer.getEmbeddingsList().stream().map(vector -> vector.getValuesList()).toList(), answer.getPromptTokens());
  }

  private static Duration left(Optional<Long> until) {
    Duration left = until.map(at -> Duration.ofNanos(at - System.nanoTime())).orElse(Calls.QUEUE_TIMEOUT);
    if (left.isNegative() || left.isZero()) {
      throw Errors.deadlinePassed();
    }
    return left;
  }

  /** The token ids of a text. */
  public List<Integer> tokenize(String text, TokenizeOptions options) {
    TokenizeRequest.Builder request = TokenizeRequest.newBuilder().setTextBytes(Requests.utf8("text", text));
    options.addSpecialTokens().ifPresent(request::setAddSpecialTokens);
    options.parseSpecialTokens().ifPresent(request::setParseSpecialTokens);
    String model = await(directory.resolve(options.model()));
    Address agent = await(directory.agentOf(model));
    var asked = request.setModel(model).build();
    var answer = calls.askAgent(agent, TokenizerServiceGrpc.getTokenizeMethod(), asked, Calls.CALL_TIMEOUT);
    return await(answer).getTokenIds().getIdsList();
  }

  /** The text of token ids; bytes that form no character appear as U+FFFD. */
  public String detokenize(List<Integer> tokenIds, DetokenizeOptions options) {
    DetokenizeRequest.Builder request =
        DetokenizeRequest.newBuilder().setTokenIds(TokenIds.newBuilder().addAllIds(tokenIds));
    options.skipSpecialTokens().ifPresent(request::setSkipSpecialTokens);
    String model = await(directory.resolve(options.model()));
    Address agent = await(directory.agentOf(model));
    var asked = request.setModel(model).build();
    return await(calls.askAgent(agent, TokenizerServiceGrpc.getDetokenizeMethod(), asked, Calls.CALL_TIMEOUT)).getText();
  }

  /** Cancels a request that was started anywhere. One that is unknown or has ended is no error. */
  public void cancel(String requestId) {
    CancelGenerationRequest request = CancelGenerationRequest.newBuilder().setRequestId(requestId).build();
    for (Address agent : await(directory.addresses())) {
      try {
        await(calls.askAgent(agent, GenerationServiceGrpc.getCancelGenerationMethod(), request, Calls.CALL_TIMEOUT));
      } catch (DragomanException error) {
        if (error.reason() != Reason.NO_AGENT) { // a dead agent runs nothing
          throw error;
        }
      }
    }
  }

  /** What a request would cost now, and where it would go. Grants nothing. */
  public Quote quote(Prompt prompt, GenerateOptions options) {
    Controllers controllers = directory.controllers("a quote");
    Prepared prepared = Requests.prepare(prompt, options, config.tenant);
    AcquireTicketRequest acquire = prepared.forModel(await(directory.resolve(options.model))).acquire();
    QuoteRequest request = QuoteRequest.newBuilder().setRequest(acquire).build();
    var answer =
        await(calls.askController(controllers, AdmissionServiceGrpc.getQuoteMethod(), request, Calls.CALL_TIMEOUT));
    return Quote.of(answer.getQuote(), answer.getAgentId());
  }

  /** Names of the served models, sorted. */
  public List<String> models() {
    return await(directory.models());
  }

  /** Every agent with its state and load, as the controller sees it. */
  public List<FleetMember> agents() {
    return await(directory.members());
  }

  /** Measured profile of the one agent there is, and every device that was looked at with the reason. */
  public GetHardwareResponse hardware() {
    return hardware(Optional.empty());
  }

  /** The same of the agent with this id. */
  public GetHardwareResponse hardware(String agentId) {
    return hardware(Optional.of(agentId));
  }

  private GetHardwareResponse hardware(Optional<String> agentId) {
    return await(
        calls.askAgent(
            await(directory.agentById(agentId)),
            HardwareServiceGrpc.getGetHardwareMethod(),
            GetHardwareRequest.getDefaultInstance(),
            Calls.CALL_TIMEOUT));
  }

  /** Load of each agent now: running and waiting requests, free KV blocks, step time. */
  public List<AgentLoadSample> load() {
    return await(directory.load());
  }

  /** Ends what still runs and closes all connections. */
  @Override
  public void close() {
    live.forEach(Generation::cancel);
    try {
      tickets.returned().get(RELEASE_SECONDS, TimeUnit.SECONDS);
    } catch (InterruptedException error) {
      Thread.currentThread().interrupt();
    } catch (ExecutionException | java.util.concurrent.TimeoutException error) {
      // they expire by themselves
    } finally {
      channels.close();
    }
  }

  /** Waits for a call on the thread of the caller. */
  static <R> R await(CompletableFuture<R> call) {
    try {
      return call.get();
    } catch (InterruptedException error) {
      Thread.currentThread().interrupt();
      call.cancel(false);
      throw Readers.interrupted(error);
    } catch (ExecutionException error) {
      if (error.getCause() instanceof DragomanException failure) {
        throw failure.withMessage(failure.getMessage());
      }
      throw new IllegalStateException(error.getCause());
    }
  }
}
