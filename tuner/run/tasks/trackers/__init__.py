"""Trackers: TensorBoard, W&B and MLflow get every line of metrics.jsonl once, over all launches of a run."""
