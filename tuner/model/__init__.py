"""A transformers causal language model: built, patched with packed attention and wrapped with adapters."""
