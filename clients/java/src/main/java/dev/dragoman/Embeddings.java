package dev.dragoman;

import java.util.List;

/**
 * The vectors of a call.
 *
 * @param vectors one of Euclidean norm 1 an input, in order
 * @param promptTokens tokens over all inputs
 */
public record Embeddings(List<List<Float>> vectors, int promptTokens) {}
