package dev.dragoman;

import java.util.Optional;

/**
 * Options of tokenizing.
 *
 * @param model the model; may be left out where one is served
 * @param addSpecialTokens add what the tokenizer adds at the beginning; left out, yes
 * @param parseSpecialTokens read control tokens written out in the text as such; left out, yes
 */
public record TokenizeOptions(
    Optional<String> model, Optional<Boolean> addSpecialTokens, Optional<Boolean> parseSpecialTokens) {
  /** No option is given. */
  public static final TokenizeOptions NONE =
      new TokenizeOptions(Optional.empty(), Optional.empty(), Optional.empty());
}
