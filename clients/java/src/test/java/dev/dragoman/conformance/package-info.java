/** The Java client driven by the harness of clients/conformance; see its README for the protocol. */
package dev.dragoman.conformance;
