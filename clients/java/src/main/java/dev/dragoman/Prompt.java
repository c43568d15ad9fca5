package dev.dragoman;

import java.util.List;
import java.util.Objects;

/** What a generation follows: a text, token ids, or a conversation. */
public sealed interface Prompt {
  /**
   * A text, tokenized by the agent.
   *
   * @param text the text
   */
  record Text(String text) implements Prompt {
    /** Refuses null. */
    public Text {
      Objects.requireNonNull(text, "text");
    }
  }

  /**
   * Token ids, used as they are.
   *
   * @param ids the ids, unsigned
   */
  record Tokens(List<Integer> ids) implements Prompt {
    /** Copies the ids. */
    public Tokens {
      ids = List.copyOf(ids);
    }
  }

  /**
   * A conversation, rendered with the model's own chat template.
   *
   * @param messages the messages
   */
  record Conversation(List<Message> messages) implements Prompt {
    /** Copies the messages. */
    public Conversation {
      messages = List.copyOf(messages);
    }
  }

  /**
   * A text as a prompt.
   *
   * @param text the text
   * @return the prompt
   */
  static Prompt of(String text) {
    return new Text(text);
  }

  /**
   * Token ids as a prompt.
   *
   * @param ids the ids, unsigned
   * @return the prompt
   */
  static Prompt ofTokens(List<Integer> ids) {
    return new Tokens(ids);
  }

  /**
   * A conversation as a prompt.
   *
   * @param messages the messages
   * @return the prompt
   */
  static Prompt of(Message... messages) {
    return new Conversation(List.of(messages));
  }
}
