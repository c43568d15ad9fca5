package dev.dragoman;

import java.util.Optional;

/**
 * Options of detokenizing.
 *
 * @param model the model; may be left out where one is served
 * @param skipSpecialTokens leave control tokens out; left out, no
 */
public record DetokenizeOptions(Optional<String> model, Optional<Boolean> skipSpecialTokens) {
  /** No option is given. */
  public static final DetokenizeOptions NONE = new DetokenizeOptions(Optional.empty(), Optional.empty());
}
