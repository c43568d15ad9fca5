"""Decides which requests run, and where."""
