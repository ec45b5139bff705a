"""Rows to encoded documents to packed rows to batches."""
