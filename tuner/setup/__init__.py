"""A recipe made ready for this machine: resolved, timed and built."""
