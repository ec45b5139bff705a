"""Exports during training: what the commands attach to a run, so that neither training nor export knows the other."""
