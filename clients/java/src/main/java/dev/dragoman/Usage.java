package dev.dragoman;

/**
 * Tokens used.
 *
 * @param promptTokens tokens in the prompt
 * @param cachedTokens prompt tokens found in the prefix cache
 * @param outputTokens tokens generated, over all choices
 */
public record Usage(int promptTokens, int cachedTokens, int outputTokens) {}
