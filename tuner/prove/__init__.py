"""Layouts of a recipe's training compared with one process, on a small model of the same architecture."""
