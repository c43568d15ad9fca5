package dev.dragoman;

import com.google.protobuf.ByteString;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.List;

/** What a ticket binds of a request: SHA-256 of what will be sent. */
final class Digests {
  private Digests() {}

  /** Of a prompt sent as text: its UTF-8 bytes. */
  static ByteString ofText(ByteString utf8) {
    MessageDigest digest = sha256();
    utf8.asReadOnlyByteBufferList().forEach(digest::update);
    return ByteString.copyFrom(digest.digest());
  }

  /** Of a prompt sent as ids: little-endian words. */
  static ByteString ofTokens(List<Integer> ids) {
    ByteBuffer words = ByteBuffer.allocate(Math.multiplyExact(4, ids.size())).order(ByteOrder.LITTLE_ENDIAN);
    ids.forEach(words::putInt);
    return ByteString.copyFrom(sha256().digest(words.array()));
  }

  /** Of an embedding request: the digest of its one input, or SHA-256 over those of several. */
  static ByteString ofInputs(List<ByteString> digests) {
    return digests.size() == 1 ? digests.get(0) : ofText(ByteString.copyFrom(digests));
  }

  private static MessageDigest sha256() {
    try {
      return MessageDigest.getInstance("SHA-256");
    } catch (NoSuchAlgorithmException error) {
      throw new IllegalStateException("every Java has SHA-256", error);
    }
  }
}
