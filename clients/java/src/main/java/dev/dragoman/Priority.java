package dev.dragoman;

/** Class of service. */
public enum Priority {
  /** A person is waiting. */
  INTERACTIVE(dev.dragoman.v1.Priority.PRIORITY_INTERACTIVE),
  /** The default. */
  STANDARD(dev.dragoman.v1.Priority.PRIORITY_STANDARD),
  /** May wait and may be preempted. */
  BATCH(dev.dragoman.v1.Priority.PRIORITY_BATCH);

  private final dev.dragoman.v1.Priority wire;

  Priority(dev.dragoman.v1.Priority wire) {
    this.wire = wire;
  }

  dev.dragoman.v1.Priority wire() {
    return wire;
  }
}
