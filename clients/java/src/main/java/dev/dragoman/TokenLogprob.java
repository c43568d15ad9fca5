package dev.dragoman;

import com.google.protobuf.ByteString;
import java.util.List;

/**
 * Log-probability of one token.
 *
 * @param tokenId the token
 * @param logprob natural logarithm of its probability, finite
 * @param tokenBytes the token's own bytes
 * @param top the best alternatives, best first
 */
public record TokenLogprob(int tokenId, float logprob, ByteString tokenBytes, List<TokenLogprob> top) {
  static List<TokenLogprob> listOf(List<dev.dragoman.v1.TokenLogprob> received) {
    return received.isEmpty() ? List.of() : received.stream().map(TokenLogprob::of).toList();
  }

  private static TokenLogprob of(dev.dragoman.v1.TokenLogprob entry) {
    List<TokenLogprob> top =
        entry.getTopList().stream()
            .map(other -> new TokenLogprob(other.getTokenId(), other.getLogprob(), other.getTokenBytes(), List.of()))
            .toList();
    return new TokenLogprob(entry.getTokenId(), entry.getLogprob(), entry.getTokenBytes(), top);
  }
}
