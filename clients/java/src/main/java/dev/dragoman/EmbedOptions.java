package dev.dragoman;

import java.time.Duration;
import java.util.Optional;

/**
 * Options of embeddings.
 *
 * @param model the model; may be left out where one is served
 * @param dimensions length of the vectors: cut, then normalised again
 * @param promptName the model's own prompt that goes before each text, such as "query"; the files' default otherwise
 * @param instruction the task of the queries that the texts are, in the form that the model was trained with; not with a
 *     prompt's name
 * @param deadline bounds the whole call
 */
public record EmbedOptions(
    Optional<String> model,
    Optional<Integer> dimensions,
    Optional<String> promptName,
    Optional<String> instruction,
    Optional<Duration> deadline) {
  /** No option is given. */
  public static final EmbedOptions NONE = new EmbedOptions(Optional.empty(), Optional.empty(), Optional.empty());

  /** Texts go to the model with the prompt that its files put before all. */
  public EmbedOptions(Optional<String> model, Optional<Integer> dimensions, Optional<Duration> deadline) {
    this(model, dimensions, Optional.empty(), Optional.empty(), deadline);
  }
}
