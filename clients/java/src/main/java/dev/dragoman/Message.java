package dev.dragoman;

import java.util.Objects;

/**
 * One message of a conversation.
 *
 * @param role who speaks, such as "user"
 * @param content what was said
 */
public record Message(String role, String content) {
  /** Refuses null. */
  public Message {
    Objects.requireNonNull(role, "role");
    Objects.requireNonNull(content, "content");
  }

  /**
   * A message of the user.
   *
   * @param content what was said
   * @return the message
   */
  public static Message user(String content) {
    return new Message("user", content);
  }

  /**
   * A message of the system.
   *
   * @param content what was said
   * @return the message
   */
  public static Message system(String content) {
    return new Message("system", content);
  }
}
