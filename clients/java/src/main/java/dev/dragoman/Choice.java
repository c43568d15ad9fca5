package dev.dragoman;

import java.util.List;
import java.util.Optional;

/**
 * One complete output.
 *
 * @param text the text
 * @param tokenIds the ids, unsigned
 * @param finishReason why it ended
 * @param stopString the stop string that matched
 * @param stopTokenId the token that ended it
 * @param logprobs one a token, where asked for
 */
public record Choice(
    String text,
    List<Integer> tokenIds,
    FinishReason finishReason,
    Optional<String> stopString,
    Optional<Integer> stopTokenId,
    List<TokenLogprob> logprobs) {}
