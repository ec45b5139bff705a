"""One launch of a run: from a recipe and its data to a trained model in the run directory."""
