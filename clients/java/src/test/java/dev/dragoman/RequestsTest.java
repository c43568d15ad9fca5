package dev.dragoman;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.ByteString;
import dev.dragoman.Requests.Prepared;
import dev.dragoman.v1.AcquireTicketRequest;
import dev.dragoman.v1.EmbedRequest;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

final class RequestsTest {
  private static final Prompt HI = Prompt.of("hi");

  private static void refused(String param, Executable call) {
    DragomanException error = assertThrows(DragomanException.class, call);
    assertEquals(Reason.INVALID_REQUEST, error.reason());
    assertEquals(param, error.metadata().get("param"));
    assertTrue(error.getMessage().startsWith(param + ": "), error.getMessage());
  }

  @Test
  void digestsAreThoseOfEveryLanguage() throws IOException {
    JsonObject vectors =
        JsonParser.parseString(Files.readString(Path.of("../conformance/hashes.json"))).getAsJsonObject();
    JsonArray digests = vectors.getAsJsonArray("prompt_digests");
    assertFalse(digests.isEmpty());
    for (JsonElement entry : digests) {
      JsonObject vector = entry.getAsJsonObject();
      ByteString digest;
      if (vector.has("text")) {
        digest = Digests.ofText(Requests.utf8("text", vector.get("text").getAsString()));
      } else if (vector.has("token_ids")) {
        List<Integer> ids = new ArrayList<>();
        vector.getAsJsonArray("token_ids").forEach(id -> ids.add((int) id.getAsLong()));
        digest = Digests.ofTokens(ids);
      } else {
        List<ByteString> parts = new ArrayList<>();
        vector.getAsJsonArray("digests").forEach(part -> parts.add(hex(part.getAsString())));
        digest = Digests.ofInputs(parts);
      }
      assertEquals(hex(vector.get("digest").getAsString()), digest);
    }
  }

  private static ByteString hex(String text) {
    return ByteString.copyFrom(HexFormat.of().parseHex(text));
  }

  @Test
  void sizesAndOptionsAreTold() {
    GenerateOptions options =
        GenerateOptions.builder()
            .model("m")
            .maxOutputTokens(7)
            .numChoices(2)
            .topP(0.5f)
            .seed(-1)
            .stop(List.of("a", "ü"))
            .maxQueueWait(Duration.ofMillis(1500))
            .priority(Priority.BATCH)
            .oneOf(List.of("yes", "no"))
            .build();
    Prepared prepared = Requests.prepare(Prompt.of("ü"), options, "acme");
    AcquireTicketRequest acquire = prepared.acquire();
    assertEquals("m", acquire.getModel());
    assertEquals(2, acquire.getPromptBytes());
    assertFalse(acquire.hasPromptTokens());
    assertEquals(7, acquire.getMaxOutputTokens());
    assertEquals(2, acquire.getNumChoices());
    assertEquals("acme", acquire.getTenant());
    assertEquals(dev.dragoman.v1.Priority.PRIORITY_BATCH, acquire.getPriority());
    assertEquals(Duration.ofMillis(1500), Durations.of(acquire.getMaxQueueWait()));
    assertEquals(acquire.getRequestId(), prepared.generate().getRequestId());
    assertEquals(-1, prepared.generate().getSampling().getSeed());
    assertEquals(List.of("a", "ü"), prepared.generate().getStop().getStringsList());
    assertEquals(2, prepared.generate().getSampling().getGrammar().getChoices().getTextsCount());
    assertFalse(prepared.generate().getSampling().hasTemperature());
    Prepared ids = Requests.prepare(Prompt.ofTokens(List.of(1, 2, -1)), GenerateOptions.NONE, "");
    assertEquals(3, ids.acquire().getPromptTokens());
    assertEquals(12, ids.acquire().getPromptBytes());
    assertEquals("m", ids.forModel("m").acquire().getModel());
    assertEquals("m", ids.forModel("m").generate().getModel());
  }

  @Test
  void badArgumentsAreNamed() {
    refused("prompt", () -> Requests.prepare(Prompt.of(""), GenerateOptions.NONE, ""));
    refused("prompt", () -> Requests.prepare(Prompt.ofTokens(List.of()), GenerateOptions.NONE, ""));
    refused("prompt", () -> Requests.prepare(Prompt.of("a\ud800"), GenerateOptions.NONE, ""));
    refused("prompt", () -> Requests.prepare(Prompt.of(Message.user("hi")), GenerateOptions.NONE, ""));
    refused("messages", () -> Requests.conversation(new Prompt.Conversation(List.of())));
    refused("messages[0].content", () -> Requests.conversation(new Prompt.Conversation(List.of(Message.user("\udfff")))));
    refused("stop", () -> GenerateOptions.builder().stop(List.of("a", "")));
    refused("max_output_tokens", () -> GenerateOptions.builder().maxOutputTokens(-1));
    refused("deadline", () -> GenerateOptions.builder().deadline(Duration.ZERO));
    refused("max_queue_wait", () -> GenerateOptions.builder().maxQueueWait(Duration.ofSeconds(-1)));
    refused("inputs", () -> Requests.embed(EmbedRequest.newBuilder(), List.of(), ""));
    refused("inputs[1]", () -> Requests.embed(EmbedRequest.newBuilder(), List.of(HI, Prompt.of(Message.user("x"))), ""));
    refused("agent", () -> ClientConfig.builder().controller("a:1").agent("b:2").build());
    refused("agent", () -> Client.create(ClientConfig.builder().agent(" ").build()));
    refused("controller", () -> Client.create(ClientConfig.builder().controller(" , ").build()));
  }
}
