"""A quick way to make the named tuples that every decision makes by the dozen.

`new(Shape, (1, 2))` is `Shape(1, 2)` without its defaults, in half the time: the constructor of a named tuple is a function of
Python that calls this one.
"""

from __future__ import annotations

new = tuple.__new__
