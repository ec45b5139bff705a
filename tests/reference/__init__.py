"""Proofs from outside: what the real command leaves on disk against transformers, by another hand."""
