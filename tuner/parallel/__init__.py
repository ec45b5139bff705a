"""The same model, spread over a device mesh by FSDP2; the model does not know."""
