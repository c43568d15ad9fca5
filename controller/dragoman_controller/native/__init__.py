"""The innermost loops of a decision in C++: compiled at first use, optional, with the results that the Python code has."""
