"""What a training loads: what it uses, and neither an instrument nor, where the data is prepared, what prepares it."""

import sys
from pathlib import Path

from tests.fixtures import forked, trainings
from tuner.api.training import prepare_data

MOST, MOST_OF_DATA = 201, 22
"""The parts of a launch are not counted: each says in a file of its own what asks for it. Of data, five are what
compiles a chat template within its limits; others look at links and at headers of weights."""
TRAIN = f"""
{forked.LOADED_AGAIN}
from tuner.cli.main import main
try:
    main(["train", "r.yaml", "--train.duration", "2 steps"])
finally:
    with open("loaded", "w") as file:
        file.writelines(name + "\\n" for name in sys.modules if name.split(".")[0] == "tuner")
"""


def test_a_training_loads_what_it_uses(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, world_size=1)
    prepare_data(tmp_path / "r.yaml")
    done = forked.run([sys.executable, "-c", TRAIN], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = sorted((tmp_path / "loaded").read_text().split())
    data = [name for name in loaded if f"{name}.".startswith("tuner.data.")]
    assert "tuner.train.step" in loaded and "tuner.data.batches" in data
    assert len(data) <= MOST_OF_DATA, "\n".join(data)
    counted = [name for name in loaded if not name.startswith("tuner.run.parts.")]
    assert len(counted) <= MOST, "\n".join(counted)
    assert not [name for name in loaded if name.split(".")[1:2] in (["profile"], ["export"])]
