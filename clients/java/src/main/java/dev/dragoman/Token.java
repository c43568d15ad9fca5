package dev.dragoman;

import java.util.List;
import java.util.Optional;

/**
 * New tokens of one choice; one item of a stream.
 *
 * @param text what became certain with them; empty while a character or a stop string is incomplete
 * @param tokenIds the ids, unsigned
 * @param cursor position of the first of them in the output of the choice
 * @param choice the choice, from 0 on
 * @param logprobs one a token, where asked for
 * @param finishReason present with the last tokens of the choice
 */
public record Token(
    String text,
    List<Integer> tokenIds,
    long cursor,
    int choice,
    List<TokenLogprob> logprobs,
    Optional<FinishReason> finishReason) {}
