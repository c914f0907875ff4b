"""Kernels for CPUs in C++, compiled on first use. kernels.cpp lists its parts in reading order."""
