package dev.dragoman;

import dev.dragoman.v1.LatencyQuote;

/**
 * What the controller predicts for a request.
 *
 * @param timeToFirstToken from acceptance at the agent to the first token
 * @param timePerOutputToken between two tokens
 * @param finish from acceptance to the last token, were all asked-for tokens generated
 * @param agentId the agent it would go to
 */
public record Quote(Estimate timeToFirstToken, Estimate timePerOutputToken, Estimate finish, String agentId) {
  static Quote of(LatencyQuote quote, String agentId) {
    return new Quote(
        Estimate.of(quote.getTimeToFirstToken()),
        Estimate.of(quote.getTimePerOutputToken()),
        Estimate.of(quote.getFinish()),
        agentId);
  }
}
