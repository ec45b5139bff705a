"""`make demo`: fine-tune a real model on this machine, break the training on purpose, and check what was learned."""
