"""The search of an agent in C++: compiled at first use, optional, with the choices that the Python code makes."""
