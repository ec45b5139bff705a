"""A value that is not finite on one rank: every rank ends with exit code 7 and says where it came from."""

import json
from pathlib import Path

import pytest

from tests.fixtures import trainings
from tests.multi.launcher import start
from tuner.checkpoint.manifest import step_dirs

# Layer 3 of 4 gives NaN on rank 1 from step 7 (index 6) on; the replay of the step meets it again.
PLANTED = """
import sys
import tuner.train.loop as loop
real = loop.optimizer_step
def planted(state, index, *rest):
    if index == 6 and state.step_config.mesh.rank == 1:
        layer = state.root.model.get_decoder().layers[3]
        layer.mlp.down_proj.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    return real(state, index, *rest)
loop.optimizer_step = planted
from tuner.cli.main import main
main(sys.argv[1:])
"""


@pytest.mark.multi
@pytest.mark.slow
def test_nan_in_layer_3_at_step_7_on_rank_1(tmp_path: Path) -> None:
    trainings.prepare(tmp_path, 2, layers=4)
    processes = start(["-c", PLANTED, "train", "r.yaml", "--json"], 2, cwd=tmp_path)
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [7, 7], [error for _, error in outputs]
    document = json.loads(outputs[0][0])
    assert (document["status"], document["exit_code"]) == ("failed", 7)
    said = document["error"]["message"]
    assert said.startswith("step 7: loss nan")
    assert "first not finite: rank 1, the output of model.layers.3.mlp.down_proj" in said
    assert "Traceback" not in outputs[0][1] + outputs[1][1]
    run = tmp_path / "runs" / "r"
    assert [step for step, _ in step_dirs(run / "checkpoints")] == [4]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
