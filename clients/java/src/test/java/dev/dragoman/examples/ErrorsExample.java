package dev.dragoman.examples;

import dev.dragoman.Client;
import dev.dragoman.DragomanException;
import dev.dragoman.GenerateOptions;
import dev.dragoman.Prompt;

/** What a failure tells. */
final class ErrorsExample {
  private ErrorsExample() {}

  /** The program. */
  public static void main(String[] arguments) {
    try (var client = Client.create()) {
      client.complete(Prompt.of("Hello!"), GenerateOptions.builder().model("no-such-model").build());
    } catch (DragomanException error) {
      System.out.println(error.reasonName() + " " + error.retryable() + ": " + error.getMessage());
      switch (error.reason()) {
        case QUEUE_FULL -> System.out.println("busy; try again after " + error.retryDelay());
        case MODEL_NOT_SERVED -> System.out.println(error.reason().remedy());
        default -> throw error;
      }
    }
  }
}
