package dev.dragoman.conformance;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import dev.dragoman.Client;
import dev.dragoman.ClientConfig;
import dev.dragoman.DragomanException;
import dev.dragoman.RetryPolicy;
import io.grpc.TlsChannelCredentials;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;

/** Reads instructions until stdin ends, and says what it saw. */
public final class Main {
  private Main() {}

  /** The program. */
  public static void main(String[] arguments) throws IOException {
    JsonObject hello = new JsonObject();
    hello.addProperty("protocol", 1);
    hello.addProperty("language", "java");
    Observations.emit("hello", hello);
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      run(JsonParser.parseString(line).getAsJsonObject());
    }
  }

  private static void run(JsonObject instruction) throws IOException {
    JsonArray calls = instruction.getAsJsonArray("calls");
    try (Client client = Client.create(config(instruction))) {
      for (int index = 0; index < calls.size(); index++) {
        play(client, new Observations(index), calls.get(index).getAsJsonObject());
      }
    }
    JsonObject done = new JsonObject();
    done.add("id", instruction.get("id"));
    Observations.emit("done", done);
  }

  private static void play(Client client, Observations seen, JsonObject call) {
    long began = System.nanoTime();
    try {
      if (call.get("do").getAsString().equals("generate")) {
        Generate.run(client, seen, call);
      } else {
        Values.run(client, seen, call);
      }
    } catch (DragomanException error) {
      seen.error(error, (System.nanoTime() - began) / 1e9);
    }
  }

  private static ClientConfig config(JsonObject instruction) throws IOException {
    ClientConfig.Builder config =
        ClientConfig.builder()
            .tenant(instruction.get("tenant").getAsString())
            .retry(retry(instruction.getAsJsonObject("retry")))
            .executor(Runnable::run); // no subscriber here waits
    if (instruction.has("controller")) {
      config.controller(instruction.get("controller").getAsString());
    } else {
      config.agent(instruction.get("agent").getAsString());
    }
    if (instruction.has("tls")) {
      JsonObject tls = instruction.getAsJsonObject("tls");
      config.credentials(
          TlsChannelCredentials.newBuilder()
              .trustManager(pem(tls, "ca_pem"))
              .keyManager(pem(tls, "certificate_pem"), pem(tls, "key_pem"))
              .build());
    }
    return config.build();
  }

  private static InputStream pem(JsonObject tls, String name) {
    return new ByteArrayInputStream(tls.get(name).getAsString().getBytes(StandardCharsets.UTF_8));
  }

  private static RetryPolicy retry(JsonObject given) {
    RetryPolicy standard = RetryPolicy.DEFAULT;
    JsonElement attempts = given.get("max_attempts");
    JsonElement budget = given.get("budget");
    return new RetryPolicy(
        attempts == null ? standard.maxAttempts() : attempts.getAsInt(),
        seconds(given, "base_seconds", standard.base()),
        seconds(given, "max_delay_seconds", standard.maxDelay()),
        seconds(given, "resume_patience_seconds", standard.resumePatience()),
        seconds(given, "refused_patience_seconds", standard.refusedPatience()),
        budget == null ? standard.budget() : budget.getAsDouble());
  }

  private static Duration seconds(JsonObject given, String name, Duration otherwise) {
    return given.has(name) ? Options.seconds(given.get(name)) : otherwise;
  }
}
