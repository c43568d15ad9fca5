package dev.dragoman;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import dev.dragoman.DragomanException.Transport;
import dev.dragoman.Retry.Decision;
import dev.dragoman.Retry.Pursuit;
import dev.dragoman.Retry.Step;
import java.time.Duration;
import java.util.EnumSet;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

final class RetryTest {
  private static final long SECOND = 1_000_000_000L;
  private static final Set<Reason> RESUMED =
      EnumSet.of(Reason.AGENT_LOST, Reason.DEVICE_FAULT, Reason.AGENT_DRAINING, Reason.CREDIT_TIMEOUT);

  private static DragomanException error(Reason reason) {
    return new DragomanException(reason, "it went wrong");
  }

  private static DragomanException delayed(Reason reason, Duration delay) {
    return new DragomanException(reason, reason.number(), "later", delay, Map.of(), Transport.NONE);
  }

  private static Pursuit pursuit() {
    return new Pursuit(RetryPolicy.DEFAULT, Optional.empty());
  }

  @ParameterizedTest
  @EnumSource(Reason.class)
  void whatEachReasonAsksFor(Reason reason) {
    Step running = RESUMED.contains(reason) ? Step.RESUME : Step.GIVE_UP;
    assertEquals(running, Retry.stepAfter(error(reason), true, false));
    Step fresh = reason.retryable() ? Step.ASK_AGAIN : Step.GIVE_UP;
    if (reason == Reason.AGENT_LOST || reason == Reason.DEVICE_FAULT) {
      fresh = Step.RESUME;
    }
    assertEquals(fresh, Retry.stepAfter(error(reason), false, false));
  }

  @Test
  void aDuplicateMayPassOnAResumeAlone() {
    assertEquals(Step.GIVE_UP, Retry.stepAfter(error(Reason.DUPLICATE_REQUEST), false, false));
    assertEquals(Step.ASK_AGAIN, Retry.stepAfter(error(Reason.DUPLICATE_REQUEST), false, true));
    assertEquals(Step.GIVE_UP, Retry.stepAfter(error(Reason.DUPLICATE_REQUEST), true, true));
  }

  @Test
  void delaysDoubleToTheLongestAndHeedTheServer() {
    DragomanException full = error(Reason.QUEUE_FULL);
    assertEquals(Duration.ofMillis(100), Retry.delay(RetryPolicy.DEFAULT, 1, full, 1));
    assertEquals(Duration.ofMillis(400), Retry.delay(RetryPolicy.DEFAULT, 3, full, 1));
    assertEquals(Duration.ofMillis(200), Retry.delay(RetryPolicy.DEFAULT, 3, full, 0.5));
    assertEquals(Duration.ofSeconds(5), Retry.delay(RetryPolicy.DEFAULT, 60, full, 1));
    DragomanException later = delayed(Reason.QUEUE_FULL, Duration.ofSeconds(7));
    assertEquals(Duration.ofSeconds(7), Retry.delay(RetryPolicy.DEFAULT, 1, later, 0.5));
  }

  @Test
  void aRequestOfWhichNothingCameIsAskedForSoManyTimes() {
    Pursuit pursuit = pursuit();
    for (int failure = 1; failure <= 3; failure++) {
      Decision decision = pursuit.failed(error(Reason.QUEUE_FULL), false, true, 0, 1).orElseThrow();
      assertEquals(Step.ASK_AGAIN, decision.step());
    }
    assertEquals(Optional.empty(), pursuit.failed(error(Reason.QUEUE_FULL), false, true, 0, 1));
  }

  @Test
  void theFirstCutIsAnsweredAtOnceAndAtMostThreeAre() {
    Pursuit pursuit = pursuit();
    pursuit.started();
    for (int resumed = 1; resumed <= 3; resumed++) {
      Optional<Decision> decision = pursuit.failed(error(Reason.AGENT_LOST), true, true, 0, 1);
      assertEquals(Optional.of(new Decision(Step.RESUME, Duration.ZERO)), decision);
      assertEquals(resumed, pursuit.numResumes());
      pursuit.flowed();
    }
    assertEquals(Optional.empty(), pursuit.failed(error(Reason.AGENT_LOST), true, true, 0, 1));
  }

  @Test
  void withoutAnOriginItIsAskedForAgain() {
    Decision decision = pursuit().failed(error(Reason.AGENT_LOST), false, false, 0, 1).orElseThrow();
    assertEquals(Step.ASK_AGAIN, decision.step());
  }

  @Test
  void aCutStreamIsPursuedUntilPatienceEnds() {
    Pursuit pursuit = pursuit();
    pursuit.started();
    assertTrue(pursuit.failed(error(Reason.AGENT_LOST), true, true, 0, 1).isPresent());
    for (int failure = 0; failure < 10; failure++) {
      assertTrue(pursuit.failed(error(Reason.NO_AGENT), false, true, 24 * SECOND, 1).isPresent());
    }
    assertEquals(Optional.empty(), pursuit.failed(error(Reason.NO_AGENT), false, true, 25 * SECOND + 1, 1));
    assertEquals(Reason.AGENT_LOST, pursuit.cut().orElseThrow().reason());
  }

  @Test
  void patienceIsShorterWhereEveryConnectionIsRefused() {
    DragomanException refused = Errors.unreachable(Reason.NO_AGENT, "connection refused", Transport.REFUSED);
    Pursuit pursuit = pursuit();
    pursuit.started();
    assertTrue(pursuit.failed(error(Reason.AGENT_LOST), true, true, 0, 1).isPresent());
    assertTrue(pursuit.failed(refused, false, true, 10 * SECOND, 1).isPresent());
    assertTrue(pursuit.failed(refused, false, true, 14 * SECOND, 1).isPresent());
    assertEquals(Optional.empty(), pursuit.failed(refused, false, true, 16 * SECOND, 1));
    // Another failure in between is a sign of life.
    assertTrue(pursuit.failed(error(Reason.QUEUE_FULL), false, true, 16 * SECOND, 1).isPresent());
    assertTrue(pursuit.failed(refused, false, true, 17 * SECOND, 1).isPresent());
  }

  @Test
  void noRetryPastTheDeadline() {
    Pursuit pursuit = new Pursuit(RetryPolicy.DEFAULT, Optional.of(3 * SECOND));
    DragomanException later = delayed(Reason.QUEUE_FULL, Duration.ofSeconds(2));
    assertTrue(pursuit.failed(later, false, true, SECOND - 1, 1).isPresent());
    assertEquals(Optional.empty(), pursuit.failed(later, false, true, SECOND, 1));
  }

  @Test
  void tenSuccessesMakeOneRetry() {
    Retry.Budget budget = new Retry.Budget(2);
    assertTrue(budget.spend());
    assertTrue(budget.spend());
    assertFalse(budget.spend());
    for (int success = 0; success < 9; success++) {
      budget.succeeded();
    }
    assertFalse(budget.spend());
    budget.succeeded();
    assertTrue(budget.spend());
    for (int success = 0; success < 100; success++) {
      budget.succeeded();
    }
    assertTrue(budget.spend());
    assertTrue(budget.spend());
    assertFalse(budget.spend());
  }

  @Test
  void aPolicyThatMakesNoSense() {
    Duration second = Duration.ofSeconds(1);
    assertThrows(
        IllegalArgumentException.class, () -> new RetryPolicy(0, second, second, second, second, 1));
    assertThrows(
        IllegalArgumentException.class, () -> new RetryPolicy(1, second, second, second, second, Double.NaN));
    assertThrows(
        IllegalArgumentException.class, () -> new RetryPolicy(1, second.negated(), second, second, second, 1));
  }
}
