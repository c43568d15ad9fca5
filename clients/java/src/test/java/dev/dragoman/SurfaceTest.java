package dev.dragoman;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.io.IOException;
import java.lang.reflect.Constructor;
import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.lang.reflect.Modifier;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Set;
import java.util.TreeSet;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;

/** The public surface is what api.txt says; {@code -Ddragoman.updateSurface=true} writes it anew. */
final class SurfaceTest {
  private static final Path HELD = Path.of("src/test/resources/api.txt");

  @Test
  void thePublicSurfaceIsFrozen() throws Exception {
    String now = surface();
    if (Boolean.getBoolean("dragoman.updateSurface")) {
      Files.createDirectories(HELD.getParent());
      Files.writeString(HELD, now);
    }
    assertEquals(Files.readString(HELD), now, "where the change is meant, run with -Ddragoman.updateSurface=true");
  }

  private static String surface() throws IOException, ClassNotFoundException {
    Set<String> lines = new TreeSet<>();
    try (Stream<Path> sources = Files.list(Path.of("src/main/java/dev/dragoman"))) {
      for (Path source : sources.toList()) {
        String name = source.getFileName().toString().replace(".java", "");
        if (!name.equals("package-info")) {
          describe(Class.forName("dev.dragoman." + name), lines);
        }
      }
    }
    return String.join("\n", lines) + "\n";
  }

  private static void describe(Class<?> type, Set<String> lines) {
    if (!Modifier.isPublic(type.getModifiers())) {
      return;
    }
    lines.add(type.toGenericString());
    for (Field field : type.getDeclaredFields()) {
      if (Modifier.isPublic(field.getModifiers())) {
        lines.add(field.toGenericString());
      }
    }
    for (Constructor<?> constructor : type.getDeclaredConstructors()) {
      if (Modifier.isPublic(constructor.getModifiers())) {
        lines.add(constructor.toGenericString());
      }
    }
    for (Method method : type.getDeclaredMethods()) {
      if (Modifier.isPublic(method.getModifiers()) && !method.isSynthetic()) {
        lines.add(method.toGenericString());
      }
    }
    for (Class<?> inner : type.getDeclaredClasses()) {
      describe(inner, lines);
    }
  }
}
