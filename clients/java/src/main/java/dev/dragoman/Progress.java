package dev.dragoman;

import dev.dragoman.v1.ChoiceFinish;
import dev.dragoman.v1.ChoiceProgress;
import dev.dragoman.v1.GenerationDelta;
import dev.dragoman.v1.ResumeState;
import dev.dragoman.v1.TokenIds;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Optional;

/** Owner of the delivered tokens of one generation, choice by choice: the cursors, and the state that a resume sends. */
final class Progress {
  /** A delta that does not continue its choice: taking it would lose or double a token. */
  static final class MisfitException extends Exception {
    private static final long serialVersionUID = 1L;

    MisfitException(String message) {
      super(message);
    }
  }

  private static final class Delivered {
    private final TokenIds.Builder ids = TokenIds.newBuilder();
    private final StringBuilder text = new StringBuilder();
    private final List<TokenLogprob> logprobs = new ArrayList<>();
    private ChoiceFinish finish;
  }

  private final Delivered[] choices;
  private int numOpen;
  private long numTokens;

  Progress(int numChoices) {
    choices = new Delivered[Math.max(1, numChoices)];
    Arrays.setAll(choices, index -> new Delivered());
    numOpen = choices.length;
  }

  /** Tokens delivered over all choices. */
  long numTokens() {
    return numTokens;
  }

  /** Whether every choice has ended. */
  boolean complete() {
    return numOpen == 0;
  }

  /**
   * Takes a delta as an item of the stream; empty when all of it was delivered before. Throws where it leaves tokens out,
   * overlaps in part (its text cannot be cut), comes after the end of its choice, or is of a choice that was not asked for;
   * nothing is taken then.
   */
  Optional<Token> take(GenerationDelta delta) throws MisfitException {
    int index = delta.getChoiceIndex();
    if (index < 0 || index >= choices.length) {
      throw new MisfitException("choice " + Integer.toUnsignedString(index) + " was not asked for");
    }
    Delivered choice = choices[index];
    long cursor = delta.getCursor();
    long expected = choice.ids.getIdsCount();
    int count = delta.getTokenIdsCount();
    boolean before = cursor >= 0 && cursor + count <= expected;
    if (before && (cursor < expected || choice.finish != null)) {
      return Optional.empty();
    }
    if (cursor != expected) {
      throw new MisfitException(
          "choice " + index + ": cursor " + Long.toUnsignedString(cursor) + " came where " + expected + " is next");
    }
    if (choice.finish != null) {
      throw new MisfitException("choice " + index + ": tokens came after its end");
    }
    for (int position = 0; position < count; position++) {
      choice.ids.addIds(delta.getTokenIds(position));
    }
    numTokens += count;
    choice.text.append(delta.getText());
    List<TokenLogprob> logprobs = TokenLogprob.listOf(delta.getLogprobsList());
    choice.logprobs.addAll(logprobs);
    Optional<FinishReason> finish = Optional.empty();
    if (delta.hasFinish()) {
      choice.finish = delta.getFinish();
      numOpen--;
      finish = Optional.of(FinishReason.of(choice.finish.getReason()));
    }
    return Optional.of(new Token(delta.getText(), delta.getTokenIdsList(), cursor, index, logprobs, finish));
  }

  /** What the next agent needs to go on exactly where the last one was cut. */
  ResumeState resumeState(int attempt, long originEpoch, long seed) {
    ResumeState.Builder state =
        ResumeState.newBuilder().setAttempt(attempt).setOriginEpoch(originEpoch).setSeed(seed);
    for (int index = 0; index < choices.length; index++) {
      ChoiceProgress.Builder entry =
          ChoiceProgress.newBuilder().setChoiceIndex(index).setTokenIds(choices[index].ids.build());
      if (choices[index].finish != null) {
        entry.setFinish(choices[index].finish);
      }
      state.addChoices(entry);
    }
    return state.build();
  }

  /** The outputs. To be called when complete. */
  List<Choice> results() {
    return Arrays.stream(choices).map(Progress::result).toList();
  }

  private static Choice result(Delivered choice) {
    ChoiceFinish finish = choice.finish == null ? ChoiceFinish.getDefaultInstance() : choice.finish;
    return new Choice(
        choice.text.toString(),
        choice.ids.build().getIdsList(),
        FinishReason.of(finish.getReason()),
        finish.hasStopString() ? Optional.of(finish.getStopString()) : Optional.empty(),
        finish.hasStopTokenId() ? Optional.of(finish.getStopTokenId()) : Optional.empty(),
        List.copyOf(choice.logprobs));
  }
}
