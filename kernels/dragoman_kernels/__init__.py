"""Kernels and their contracts. Importing this package compiles nothing and loads neither torch nor grpc."""
