"""What trackers hold, read back without the code under test."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[str, list[tuple[int, float]]]
_BLOCK, _HEADER, _PREFIX = 32768, 7, 7


def tensorboard_points(run_dir: Path) -> Points:
    """Scalars by tag as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    shown.Reload()
    return {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def mlflow_points(uri: str, run_id: str, names: list[str]) -> Points:
    """Metrics by name as MLflow's store holds them, duplicates included."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    return {name: [(item.step, item.value) for item in client.get_metric_history(run_id, name)] for name in names}


def wandb_records(run_dir: Path) -> Iterator[tuple[Path, Any]]:
    """Every record of the offline runs of a directory, the oldest run first, with the file it is in."""
    from wandb.proto import wandb_internal_pb2 as protocol

    files = {path.resolve() for path in run_dir.glob("wandb/offline-run-*/*.wandb")}
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
        for data in _chunks(path.read_bytes()):
            yield path, protocol.Record.FromString(data)


def _chunks(data: bytes) -> Iterator[bytes]:
    """Records of the LevelDB log format, which wandb's files have after seven bytes of their own."""
    position, whole = _PREFIX, b""
    while position + _HEADER <= len(data):
        if _BLOCK - position % _BLOCK < _HEADER:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEADER])
        position += _HEADER + length
        whole += data[position - length : position]
        if kind in (1, 4):  # whole, or the last of its parts
            yield whole
            whole = b""
