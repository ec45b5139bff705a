"""From a checkpoint to a Hugging Face directory, published only after it equals the trained model."""
