package dev.dragoman;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.dragoman.Progress.MisfitException;
import dev.dragoman.v1.ChoiceFinish;
import dev.dragoman.v1.GenerationDelta;
import dev.dragoman.v1.ResumeState;
import java.util.List;
import java.util.Optional;
import org.junit.jupiter.api.Test;

final class ProgressTest {
  private static final ChoiceFinish STOP =
      ChoiceFinish.newBuilder().setReason(dev.dragoman.v1.FinishReason.FINISH_REASON_STOP).setStopString("end").build();

  private static GenerationDelta.Builder delta(int choice, long cursor, Integer... ids) {
    return GenerationDelta.newBuilder()
        .setChoiceIndex(choice)
        .setCursor(cursor)
        .setText("x".repeat(ids.length))
        .addAllTokenIds(List.of(ids));
  }

  @Test
  void takesEachTokenOnce() throws MisfitException {
    Progress progress = new Progress(1);
    assertEquals(List.of(5, 6), progress.take(delta(0, 0, 5, 6).build()).orElseThrow().tokenIds());
    assertEquals(Optional.empty(), progress.take(delta(0, 0, 5, 6).build()));
    assertEquals(Optional.empty(), progress.take(delta(0, 1, 6).build()));
    Token last = progress.take(delta(0, 2, 7).setFinish(STOP).build()).orElseThrow();
    assertEquals(2, last.cursor());
    assertEquals(Optional.of(FinishReason.STOP), last.finishReason());
    assertTrue(progress.complete());
    assertEquals(3, progress.numTokens());
    Choice choice = progress.results().get(0);
    assertEquals(List.of(5, 6, 7), choice.tokenIds());
    assertEquals("xxx", choice.text());
    assertEquals(Optional.of("end"), choice.stopString());
  }

  @Test
  void refusesWhatDoesNotFitAndTakesNothingOfIt() throws MisfitException {
    Progress progress = new Progress(2);
    progress.take(delta(0, 0, 1, 2).build());
    progress.take(delta(1, 0, 9).setFinish(STOP).build());
    assertThrows(MisfitException.class, () -> progress.take(delta(0, 3, 4).build())); // a gap
    assertThrows(MisfitException.class, () -> progress.take(delta(0, 1, 2, 3).build())); // new in part
    assertThrows(MisfitException.class, () -> progress.take(delta(2, 0, 1).build())); // not asked for
    assertThrows(MisfitException.class, () -> progress.take(delta(-1, 0, 1).build()));
    assertThrows(MisfitException.class, () -> progress.take(delta(1, 1, 1).build())); // after its end
    assertThrows(MisfitException.class, () -> progress.take(delta(0, -1, 1).build())); // 2^64 - 1
    assertEquals(3, progress.numTokens());
    assertFalse(progress.complete());
    assertTrue(progress.take(delta(0, 2, 3).build()).isPresent());
  }

  @Test
  void aResumeTellsWhatWasDeliveredOfEachChoice() throws MisfitException {
    Progress progress = new Progress(3);
    progress.take(delta(0, 0, 1).build());
    progress.take(delta(1, 0, 8, 9).setFinish(STOP).build());
    ResumeState state = progress.resumeState(2, 77, -1);
    assertEquals(2, state.getAttempt());
    assertEquals(77, state.getOriginEpoch());
    assertEquals(-1, state.getSeed());
    assertEquals(List.of(1), state.getChoices(0).getTokenIds().getIdsList());
    assertEquals(List.of(8, 9), state.getChoices(1).getTokenIds().getIdsList());
    assertEquals(STOP, state.getChoices(1).getFinish());
    assertEquals(0, state.getChoices(2).getTokenIds().getIdsCount());
    assertFalse(state.getChoices(0).hasFinish());
  }
}
