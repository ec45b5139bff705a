"""`tuner prove`: the command, its table, its document and its exit code."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.commands import tuner
from tests.fixtures.tables import cases
from tests.model.tiny import family_config
from tuner.cli.work.prove import _outcome, table
from tuner.prove.compare import LayoutProof
from tuner.prove.prove import Proven

EQUAL: Any = cases(__file__, "equal")
RECIPE: Any = cases(__file__, "recipe")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a model's config and a recipe."""
    family_config("llama", tied=True).save_pretrained(tmp_path / "model")
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


@pytest.mark.multi
def test_a_recipe_is_proven_without_its_data_or_weights(place: Path) -> None:
    done = tuner(
        "prove", "r.yaml", "--layouts", "none2,tp2", "--steps", "2", "--parallel.expert", "2", "--json", cwd=place
    )
    assert done.returncode == 2 and "parallel.shard" in done.stderr  # the recipe's own rules come first
    done = tuner("prove", "r.yaml", "--layouts", "none2,none2+tp2", "--steps", "2", "--json", cwd=place, code=0)
    document = json.loads(done.stdout)
    equal, refused = document["metrics"]["layouts"]
    assert (equal["layout"], equal["verdict"], equal["cause"]) == ("none2", "equal", None)
    assert (refused["layout"], refused["verdict"]) == ("none2+tp2", "refused")
    assert "splits weights over processes" in refused["cause"]
    assert document["artifacts"]["text"] == "layouts: 1 equal, 1 refused"
    assert "none2+tp2: parallel.tensor: 2 splits weights" in done.stderr
    assert sorted(path.name for path in place.iterdir()) == ["model", "r.yaml"]


def test_a_launcher_is_refused(place: Path) -> None:
    done = tuner("prove", "r.yaml", cwd=place, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    assert done.returncode == 2 and "starts its processes itself" in done.stderr


@pytest.mark.parametrize("words", [("--layouts", "pp2"), ("--layouts", ","), ("--steps", "1")])
def test_a_mistake_in_an_option_is_a_usage_error(words: tuple[str, str], place: Path) -> None:
    done = tuner("prove", "r.yaml", *words, cwd=place)
    assert done.returncode == 2 and words[0] in done.stderr


def test_what_is_unequal_is_marked_and_ends_with_6() -> None:
    found = EQUAL | {"gradients": 0.5, "saved": 1.0, "loss": float("nan")}
    wrong = LayoutProof("tp2", 2, "unequal", found, "gradient of x")
    lost = LayoutProof("sp2", 2, "failed", cause="rank 1: no")
    refused = LayoutProof("ep2", 2, "refused", cause="no experts")
    found = Proven((LayoutProof("fsdp2", 2, "equal", EQUAL), wrong, lost, refused), ("a twin",))
    header, equal, marked, failed = table(found)
    assert header[0] == "layout" and len(header) == len(equal) == len(marked) == len(failed)
    assert "!" not in " ".join(equal) and [cell for cell in marked if "!" in cell] == ["nan !", "5e-01 !", "differ !"]
    assert failed == ["sp2", *["-"] * 7, "failed"]
    outcome = _outcome(found)
    assert (outcome.status, outcome.exit_code, outcome.result) == (
        "failed", 6, "layouts: 1 equal, 1 unequal, 1 failed, 1 refused"
    )  # fmt: skip
    assert (
        outcome.error is not None and "tp2 is not what one process computes: gradient of x" in outcome.error["message"]
    )
    assert outcome.metrics["layouts"][1]["loss"] is None
    assert _outcome(Proven((found.proofs[0], refused), ())).exit_code == 0
