"""Backends behind one protocol; device differences live here and nowhere else."""
