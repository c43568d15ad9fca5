package dev.dragoman;

import java.time.Duration;
import java.util.Optional;

/**
 * Options of embeddings.
 *
 * @param model the model; may be left out where one is served
 * @param dimensions length of the vectors: cut, then normalised again
 * @param deadline bounds the whole call
 */
public record EmbedOptions(Optional<String> model, Optional<Integer> dimensions, Optional<Duration> deadline) {
  /** No option is given. */
  public static final EmbedOptions NONE = new EmbedOptions(Optional.empty(), Optional.empty(), Optional.empty());
}
