"""Kernels of our own for the CPU, in C: compiled for this machine when they are first wanted."""
