package dev.dragoman;

import com.google.protobuf.ByteString;
import dev.dragoman.v1.AcquireTicketRequest;
import dev.dragoman.v1.ChatMessage;
import dev.dragoman.v1.EmbedInput;
import dev.dragoman.v1.EmbedRequest;
import dev.dragoman.v1.GenerateRequest;
import dev.dragoman.v1.ResumeRequest;
import dev.dragoman.v1.Ticket;
import dev.dragoman.v1.TokenIds;
import java.nio.CharBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import java.util.UUID;

/** Turns the arguments of a call into the messages of the protocol, and says clearly what is wrong with them. */
final class Requests {
  private Requests() {}

  /** A request that is ready to be admitted and sent. */
  record Prepared(GenerateRequest generate, AcquireTicketRequest acquire) {
    /** The same for a model that was found out. */
    Prepared forModel(String model) {
      return new Prepared(
          generate.toBuilder().setModel(model).build(), acquire.toBuilder().setModel(model).build());
    }

    /** What a controller is asked: for a new stream, or for one that was cut at {@code origin}. */
    AcquireTicketRequest acquire(Optional<Duration> left, Optional<Ticket> origin, int attempt, long fromCursor) {
      AcquireTicketRequest.Builder message = acquire.toBuilder();
      left.ifPresent(limit -> message.setDeadline(Durations.wire(limit)));
      origin.ifPresent(
          cut ->
              message.setResume(
                  ResumeRequest.newBuilder()
                      .setOriginEpoch(cut.getEpoch())
                      .setOriginAgentId(cut.getAgentId())
                      .setAttempt(attempt)
                      .setFromCursor(fromCursor)));
      return message.build();
    }
  }

  /** The messages for a text or token ids; the model is empty where none is given. */
  static Prepared prepare(Prompt prompt, GenerateOptions options, String tenant) {
    GenerateRequest.Builder generate =
        GenerateRequest.newBuilder()
            .setRequestId(options.requestId.orElseGet(() -> UUID.randomUUID().toString()))
            .setModel(options.model.orElse(""))
            .setSampling(options.sampling)
            .setStop(options.stop)
            .setTextOptions(options.text)
            .setCacheSalt(options.cacheSalt);
    AcquireTicketRequest.Builder acquire =
        AcquireTicketRequest.newBuilder()
            .setRequestId(generate.getRequestId())
            .setModel(generate.getModel())
            .setMaxOutputTokens(options.stop.getMaxOutputTokens())
            .setNumChoices(options.sampling.getNumChoices())
            .setTenant(tenant)
            .setPriority(options.priority.wire());
    options.maxQueueWait.ifPresent(wait -> acquire.setMaxQueueWait(Durations.wire(wait)));
    if (prompt instanceof Prompt.Text text) {
      ByteString utf8 = utf8("prompt", text.text());
      if (utf8.isEmpty()) { // 0 bytes would read as a size that was not given
        throw Errors.invalid("prompt", "the text is empty; give at least one character");
      }
      generate.setTextBytes(utf8);
      acquire.setPromptBytes(utf8.size()).setPromptDigest(Digests.ofText(utf8));
    } else if (prompt instanceof Prompt.Tokens tokens) {
      if (tokens.ids().isEmpty()) {
        throw Errors.invalid("prompt", "the list of token ids is empty; give at least one");
      }
      generate.setTokenIds(TokenIds.newBuilder().addAllIds(tokens.ids()));
      acquire
          .setPromptTokens(tokens.ids().size())
          .setPromptBytes(4L * tokens.ids().size())
          .setPromptDigest(Digests.ofTokens(tokens.ids()));
    } else {
      throw Errors.invalid("prompt", "is a conversation; give a text or token ids here");
    }
    return new Prepared(generate.build(), acquire.build());
  }

  /** The messages of a conversation. */
  static List<ChatMessage> conversation(Prompt.Conversation conversation) {
    if (conversation.messages().isEmpty()) {
      throw Errors.invalid("messages", "the conversation is empty; give at least one message");
    }
    List<ChatMessage> built = new ArrayList<>();
    for (Message message : conversation.messages()) {
      String path = "messages[" + built.size() + "]";
      built.add(
          ChatMessage.newBuilder()
              .setRoleBytes(utf8(path + ".role", message.role()))
              .setContentBytes(utf8(path + ".content", message.content()))
              .build());
    }
    return built;
  }

  /** Adds the inputs to a request, and returns what the controller is told of it. */
  static AcquireTicketRequest embed(EmbedRequest.Builder request, List<? extends Prompt> inputs, String tenant) {
    List<ByteString> digests = new ArrayList<>();
    long numBytes = 0;
    for (Prompt input : inputs) {
      if (input instanceof Prompt.Text text) {
        ByteString utf8 = utf8("inputs[" + digests.size() + "]", text.text());
        request.addInputs(EmbedInput.newBuilder().setTextBytes(utf8));
        digests.add(Digests.ofText(utf8));
        numBytes += utf8.size();
      } else if (input instanceof Prompt.Tokens tokens) {
        request.addInputs(EmbedInput.newBuilder().setTokenIds(TokenIds.newBuilder().addAllIds(tokens.ids())));
        digests.add(Digests.ofTokens(tokens.ids()));
        numBytes += 4L * tokens.ids().size();
      } else {
        throw Errors.invalid("inputs[" + digests.size() + "]", "is a conversation; give a text or token ids");
      }
    }
    if (digests.isEmpty()) {
      throw Errors.invalid("inputs", "is empty; give at least one text");
    }
    return AcquireTicketRequest.newBuilder()
        .setRequestId(request.getRequestId())
        .setModel(request.getModel())
        .setMaxOutputTokens(1)
        .setPromptBytes(Math.max(numBytes, 1))
        .setPromptDigest(Digests.ofInputs(digests))
        .setNumInputs(digests.size())
        .setTenant(tenant)
        .build();
  }

  /** The bytes of a text. A lone surrogate, which has none, is an error. */
  static ByteString utf8(String param, String text) {
    try {
      return ByteString.copyFrom(StandardCharsets.UTF_8.newEncoder().encode(CharBuffer.wrap(text)));
    } catch (CharacterCodingException error) {
      throw Errors.invalid(param, "is not valid Unicode: it has a lone surrogate");
    }
  }

  static int notNegative(String param, int value) {
    if (value < 0) {
      throw Errors.invalid(param, "must not be negative, and is " + value);
    }
    return value;
  }

  static Duration positive(String param, Duration value) {
    if (value.isNegative() || value.isZero()) {
      throw Errors.invalid(param, "must be above 0, and is " + value);
    }
    return value;
  }
}
