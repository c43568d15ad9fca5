package dev.dragoman;

import dev.dragoman.v1.GenerateRequest;
import dev.dragoman.v1.GenerationDelta;
import dev.dragoman.v1.GenerationFinished;
import dev.dragoman.v1.GenerationStarted;
import dev.dragoman.v1.ResumeState;
import dev.dragoman.v1.Ticket;
import java.time.Duration;
import java.util.Optional;
import java.util.concurrent.ThreadLocalRandom;

/** Owner of what came of one generation, over all attempts, and of when; the result is made of it. */
final class Received {
  private final long began = System.nanoTime();
  private Progress progress = new Progress(1);
  private GenerationStarted firstStarted = GenerationStarted.getDefaultInstance();
  private boolean wasStarted;
  private Optional<Long> seed = Optional.empty();
  private GenerationFinished finished = GenerationFinished.getDefaultInstance();
  private Optional<Long> firstTokenAt = Optional.empty();

  /** When the generation was asked for, of {@link System#nanoTime}. */
  long began() {
    return began;
  }

  /** How many choices were asked for. To be called before anything comes. */
  void expect(int numChoices) {
    progress = new Progress(numChoices);
  }

  void started(GenerationStarted started) {
    seed = Optional.of(started.getSeed());
    firstStarted = wasStarted ? firstStarted : started;
    wasStarted = true;
  }

  /** See {@link Progress#take}. */
  Optional<Token> take(GenerationDelta delta) throws Progress.MisfitException {
    Optional<Token> token = progress.take(delta);
    if (token.isPresent() && firstTokenAt.isEmpty()) {
      firstTokenAt = Optional.of(System.nanoTime());
    }
    return token;
  }

  void finished(GenerationFinished finished) {
    this.finished = finished;
  }

  long numTokens() {
    return progress.numTokens();
  }

  boolean complete() {
    return progress.complete();
  }

  /** What the next agent needs to go on. */
  ResumeState resumeState(int attempt, long originEpoch, Optional<Long> seedGiven) {
    // Where it was lost before the agent named the seed it drew, nothing was delivered: any will do.
    seed = seed.or(() -> seedGiven).or(() -> Optional.of(ThreadLocalRandom.current().nextLong(Long.MAX_VALUE)));
    return progress.resumeState(attempt, originEpoch, seed.get());
  }

  /** The whole. To be called when complete. */
  GenerationResult result(GenerateRequest request, Optional<Ticket> ticket, int numResumes, Optional<Quote> quote) {
    Optional<Timings.Agent> agent = Optional.empty();
    if (finished.hasTotalTime()) {
      agent =
          Optional.of(
              new Timings.Agent(
                  Durations.of(finished.getQueueTime()),
                  Durations.of(finished.getTimeToFirstToken()),
                  Durations.of(finished.getTotalTime())));
    }
    Optional<Duration> firstToken = firstTokenAt.map(at -> Duration.ofNanos(at - began));
    return new GenerationResult(
        request.getRequestId(),
        request.getModel(),
        progress.results(),
        // Output tokens are counted here: an agent that took over counts only from its own start.
        new Usage(
            firstStarted.getPromptTokens(), finished.getUsage().getCachedTokens(), (int) progress.numTokens()),
        new Timings(firstToken, Duration.ofNanos(System.nanoTime() - began), agent),
        seed.orElse(0L),
        ticket.map(Ticket::getAgentId).orElse(""),
        numResumes,
        quote,
        TokenLogprob.listOf(firstStarted.getPromptLogprobsList()));
  }
}
