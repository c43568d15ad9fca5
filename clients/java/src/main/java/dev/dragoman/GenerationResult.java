package dev.dragoman;

import java.util.List;
import java.util.Optional;

/**
 * A complete generation.
 *
 * @param requestId id of the request
 * @param model the model
 * @param choices the outputs, at least one
 * @param usage tokens used
 * @param timings how long it took
 * @param seed the seed it ran with, unsigned
 * @param agentId the agent that finished it, empty for an open agent
 * @param numResumes how often it was continued after a cut
 * @param quote what the controller promised, absent for an open agent
 * @param promptLogprobs one a prompt token from the second on, where asked for
 */
public record GenerationResult(
    String requestId,
    String model,
    List<Choice> choices,
    Usage usage,
    Timings timings,
    long seed,
    String agentId,
    int numResumes,
    Optional<Quote> quote,
    List<TokenLogprob> promptLogprobs) {
  /**
   * Returns the text of the first choice.
   *
   * @return the text
   */
  public String text() {
    return choices.get(0).text();
  }
}
