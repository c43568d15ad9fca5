package dev.dragoman;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.dragoman.v1.ChoiceFinish;
import dev.dragoman.v1.GenerateRequest;
import dev.dragoman.v1.GenerateResponse;
import dev.dragoman.v1.GenerationDelta;
import dev.dragoman.v1.GenerationFinished;
import dev.dragoman.v1.GenerationServiceGrpc;
import dev.dragoman.v1.GenerationStarted;
import io.grpc.Server;
import io.grpc.netty.shaded.io.grpc.netty.NettyServerBuilder;
import io.grpc.stub.ServerCallStreamObserver;
import io.grpc.stub.StreamObserver;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Flow;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.logging.Level;
import java.util.logging.Logger;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;

/** Streams over a real connection, from an agent that sends as many tokens as it is asked for, as fast as they are taken. */
@Timeout(20)
final class StreamTest {
  private static final String PADDING = "x".repeat(500);
  // The server complains of every stream that is cut under it. The logger is kept, or its level is forgotten.
  private static final Logger SERVER_LOG = Logger.getLogger("io.grpc.netty.shaded.io.grpc.netty.NettyServerHandler");

  private final AtomicInteger numSent = new AtomicInteger();
  private final AtomicInteger numRequests = new AtomicInteger();
  private final CompletableFuture<Void> cancelled = new CompletableFuture<>();
  private Server server;
  private Client client;

  @BeforeEach
  void start() throws Exception {
    SERVER_LOG.setLevel(Level.OFF);
    server =
        NettyServerBuilder.forAddress(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0)).addService(new Agent()).build().start();
    client = Client.create(ClientConfig.builder().agent("127.0.0.1:" + server.getPort()).build());
  }

  @AfterEach
  void stop() throws InterruptedException {
    client.close();
    server.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
  }

  private final class Agent extends GenerationServiceGrpc.GenerationServiceImplBase {
    @Override
    public void generate(GenerateRequest request, StreamObserver<GenerateResponse> observer) {
      numRequests.incrementAndGet();
      var call = (ServerCallStreamObserver<GenerateResponse>) observer;
      int numTokens = request.getStop().getMaxOutputTokens();
      AtomicInteger next = new AtomicInteger();
      call.setOnCancelHandler(() -> cancelled.complete(null));
      call.setOnReadyHandler(
          () -> {
            while (call.isReady() && next.get() < numTokens) {
              call.onNext(delta(next.getAndIncrement(), numTokens));
              numSent.incrementAndGet();
              if (next.get() == numTokens) {
                call.onNext(
                    GenerateResponse.newBuilder().setFinished(GenerationFinished.getDefaultInstance()).build());
                call.onCompleted();
              }
            }
          });
      call.onNext(GenerateResponse.newBuilder().setStarted(GenerationStarted.newBuilder().setSeed(5)).build());
    }
  }

  private static GenerateResponse delta(int cursor, int numTokens) {
    GenerationDelta.Builder delta =
        GenerationDelta.newBuilder().setCursor(cursor).addTokenIds(cursor).setText(PADDING);
    if (cursor == numTokens - 1) {
      delta.setFinish(ChoiceFinish.newBuilder().setReason(dev.dragoman.v1.FinishReason.FINISH_REASON_LENGTH));
    }
    return GenerateResponse.newBuilder().setDelta(delta).build();
  }

  private GenerationStream generate(int numTokens) {
    return client.generate(
        Prompt.of("hi"), GenerateOptions.builder().model("m").maxOutputTokens(numTokens).build());
  }

  private static final class Collector implements Flow.Subscriber<Token> {
    private final List<Long> cursors = new ArrayList<>();
    private final CompletableFuture<Flow.Subscription> subscription = new CompletableFuture<>();
    private final CompletableFuture<Throwable> end = new CompletableFuture<>();

    @Override
    public void onSubscribe(Flow.Subscription given) {
      subscription.complete(given);
    }

    @Override
    public synchronized void onNext(Token token) {
      cursors.add(token.cursor());
    }

    @Override
    public void onError(Throwable error) {
      end.complete(error);
    }

    @Override
    public void onComplete() {
      end.complete(null);
    }

    synchronized int size() {
      return cursors.size();
    }
  }

  private static void until(java.util.function.BooleanSupplier holds) throws InterruptedException {
    while (!holds.getAsBoolean()) {
      Thread.sleep(5);
    }
  }

  @Test
  void anIteratorGivesEveryTokenAndTheResultIsTheirSum() {
    List<Long> cursors = new ArrayList<>();
    try (GenerationStream stream = generate(1000)) {
      assertEquals(0, numRequests.get());
      for (Token token : stream) {
        cursors.add(token.cursor());
      }
      assertEquals(1000, cursors.size());
      assertEquals(999L, cursors.get(999));
      GenerationResult result = stream.result();
      assertEquals(1000, result.usage().outputTokens());
      assertEquals(1000 * PADDING.length(), result.text().length());
      assertEquals(5, result.seed());
    }
  }

  @Test
  void aResultAfterAPartOfTheTokensIsWhole() {
    try (GenerationStream stream = generate(100)) {
      var tokens = stream.iterator();
      tokens.next();
      tokens.next();
      assertEquals(100, stream.result().choices().get(0).tokenIds().size());
      assertFalse(tokens.hasNext());
    }
  }

  @Test
  void aStreamHasOneReader() {
    try (GenerationStream stream = generate(3)) {
      assertTrue(stream.iterator().hasNext());
      assertThrows(IllegalStateException.class, stream::iterator);
      Collector late = new Collector();
      stream.subscribe(late);
      assertInstanceOf(IllegalStateException.class, late.end.join());
      assertEquals(3, stream.result().usage().outputTokens());
    }
  }

  @Test
  void aSubscriberGetsWhatItAsksFor() throws Exception {
    Collector collector = new Collector();
    GenerationStream stream = generate(2000);
    stream.subscribe(collector);
    collector.subscription.join().request(3);
    until(() -> collector.size() == 3);
    Thread.sleep(100);
    assertEquals(3, collector.size());
    assertTrue(numSent.get() < 1000, "the window held the agent back: it sent " + numSent.get());
    collector.subscription.join().request(Long.MAX_VALUE);
    assertEquals(null, collector.end.join());
    assertEquals(2000, collector.size());
    assertEquals(2000, stream.result().usage().outputTokens());
  }

  @Test
  void aCancelledSubscriptionCancelsAtTheAgent() throws Exception {
    Collector collector = new Collector();
    generate(100_000).subscribe(collector);
    collector.subscription.join().request(2);
    until(() -> collector.size() == 2);
    collector.subscription.join().cancel();
    cancelled.get(5, TimeUnit.SECONDS);
    assertFalse(collector.end.isDone());
  }

  @Test
  void askingForNothingIsAnErrorOfTheSubscriber() {
    Collector collector = new Collector();
    generate(10).subscribe(collector);
    collector.subscription.join().request(0);
    assertInstanceOf(IllegalArgumentException.class, collector.end.join());
  }

  @Test
  void aStalledStreamDoesNotHoldUpTheOthersOfItsConnection() throws Exception {
    List<Collector> stalled = new ArrayList<>();
    for (int index = 0; index < 4; index++) {
      Collector collector = new Collector();
      generate(5000).subscribe(collector);
      collector.subscription.join().request(1);
      stalled.add(collector);
    }
    for (Collector collector : stalled) {
      until(() -> collector.size() == 1);
    }
    try (GenerationStream stream = generate(2000)) {
      assertEquals(2000, stream.result().usage().outputTokens());
    }
  }

  @Test
  void closingEndsAReaderThatWaits() throws Exception {
    GenerationStream stream = generate(100_000);
    var tokens = stream.iterator();
    tokens.next();
    stream.close();
    cancelled.get(5, TimeUnit.SECONDS);
    DragomanException error =
        assertThrows(DragomanException.class, () -> tokens.forEachRemaining(token -> assertFalse(token.text().isEmpty())));
    assertEquals(Reason.CANCELLED, error.reason());
    assertEquals(Reason.CANCELLED, assertThrows(DragomanException.class, stream::result).reason());
  }

  @Test
  void closingTheClientEndsItsStreams() throws Exception {
    var tokens = generate(100_000).iterator();
    tokens.next();
    client.close();
    cancelled.get(5, TimeUnit.SECONDS);
    var late = generate(1);
    assertEquals(Reason.CANCELLED, assertThrows(DragomanException.class, late::result).reason());
  }

  @Test
  void anInterruptCancels() throws Exception {
    server.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    var tokens = generate(10).iterator();
    Thread.currentThread().interrupt();
    DragomanException error = assertThrows(DragomanException.class, tokens::hasNext);
    assertTrue(Thread.interrupted());
    assertEquals(Reason.CANCELLED, error.reason());
  }
}
