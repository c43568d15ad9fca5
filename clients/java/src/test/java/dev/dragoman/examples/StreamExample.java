package dev.dragoman.examples;

import dev.dragoman.Client;
import dev.dragoman.GenerateOptions;
import dev.dragoman.Message;
import dev.dragoman.Prompt;

final class StreamExample {
  public static void main(String[] arguments) {
    var options = GenerateOptions.builder().maxOutputTokens(32).build();
    try (var client = Client.create();
        var stream = client.generate(Prompt.of(Message.user("Hello!")), options)) {
      for (var token : stream) {
        System.out.print(token.text());
      }
    }
  }
}
