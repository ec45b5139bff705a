"""TensorBoard: event files in the run directory, written by TensorBoard's own writer (no TensorFlow, no torch)."""

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tuner.run.tasks.trackers.choose import TrackedPoint, TrackedRun


class TensorBoard:
    """A tracker whose run is a directory of event files."""

    def __init__(self, run: TrackedRun, known_id: str | None) -> None:
        self.id = "tensorboard"
        self.place = str(run.facts.run_dir / self.id)
        self._writer = EventFileWriter(self.place)
        if known_id is not None:
            # Readers drop what earlier launches wrote of these steps: they are taken again.
            self._writer.add_event(Event(step=run.first_new_step, session_log=SessionLog(status=SessionLog.START)))
            self._writer.flush()

    def held(self) -> None:
        """Its files are not read: steps that are trained again replace what was there."""

    def send(self, points: Sequence[TrackedPoint]) -> None:
        """Write one event a point, through to the file."""
        for point in points:
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
            self._writer.add_event(Event(wall_time=point.time_s, step=point.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self, status: str) -> None:
        """Close the file."""
        self._writer.close()
