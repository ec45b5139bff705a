"""Ranks on Ray: what is said of them, and who is told what, is as on one machine."""

import contextlib
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.spawn_worker import work
from tests.runtime.test_spawn import send_when_ready
from tuner.errors import DataError, MachineError, RecipeError
from tuner.runtime import ray_cluster, spawn
from tuner.runtime.ray_cluster import RayLayout, cluster_for, interface_of, run_ranks

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(spawn, "GRACE_S", 0.7)


def run(ray: Any, logs: Path, *actions: str, timeout_s: float = 60, **job: Any) -> dict[str, Any]:
    layout = RayLayout(len(actions), len(actions), False, ray)
    return run_ranks(layout, timeout_s, work, {"actions": actions, "ready": str(logs), **job}, len(actions), logs)


def test_ranks_know_their_place_and_what_rank_0_says_is_the_commands(
    fake_ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    ray = fake_ray()
    found = run(ray, tmp_path, "facts", "warns, ok")
    assert found == {
        "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "3",
        "session": True, "at": ["0100007F"],
    }  # fmt: skip
    said = capfd.readouterr().err
    assert "rank 0 prints" in said
    assert "rank 1" not in said
    assert "rank 1 prints" in (tmp_path / "rank1.log").read_text()
    assert [what[0] for what in ray.done] == ["STRICT_SPREAD", "k", "k", "removed"]  # both actors are killed
    assert not list(tmp_path.glob("tuner-rank-*"))


@pytest.mark.parametrize(
    ("actions", "lost", "kind", "message", "code"),
    [
        (("lost", "data error at step 7, data"), None, DataError, "rank 1 at step 7, data: bad row", 3),
        (("lost", "killed at step 7, backward"), None, MachineError,
         "rank 1 was killed by SIGKILL at step 7, backward", 4),
        (("ok", "stops"), "ended", MachineError, "rank 0 was lost: its Ray worker died (RayError)", 4),
        (("ok", "ok"), "address", MachineError, "a worker of the Ray cluster cannot begin: its worker died", 4),
    ],
)  # fmt: skip
def test_the_first_failing_rank_is_named(  # noqa: PLR0917
    actions: tuple[str, ...], lost: Any, kind: type, message: str, code: int, fake_ray: Any, tmp_path: Path
) -> None:
    with pytest.raises(kind) as raised:
        run(fake_ray(lost=lost), tmp_path, *actions)
    assert (raised.value.message, raised.value.exit_code) == (message, code)


def test_the_first_signal_reaches_every_rank(fake_ray: Any, tmp_path: Path) -> None:
    send_when_ready(tmp_path, 2, signal.SIGUSR1)
    assert run(fake_ray(), tmp_path, "stops", "stops") == {"signal": "SIGUSR1"}


def test_without_room_it_is_said_what_is_needed(fake_ray: Any, tmp_path: Path) -> None:
    ray = fake_ray()
    ray.room = False
    with pytest.raises(MachineError, match=r"no room for parallel.timeout: 2 CPUs on 1 machine are needed"):
        run(ray, tmp_path, "ok", "ok", timeout_s=0)


@pytest.mark.parametrize(
    ("machines", "cpus", "gpus", "wanted", "device", "layout"),
    [
        (2, 8, 4, None, "auto", RayLayout(8, 4, True)),
        (2, 8, 4, 2, "auto", RayLayout(2, 2, True)),
        (2, 8, 4, 4, "cpu", RayLayout(4, 4, False)),
        (2, 8, 0, None, "auto", RayLayout(1, 1, False)),
        (2, 1, 0, 2, "cpu", RayLayout(2, 1, False)),
        (2, 8, 4, 6, "cuda", "set parallel.processes: 4"),
        (2, 8, 0, 2, "cuda", "set train.device: auto"),
    ],
)
def test_each_machine_has_as_many_ranks(  # noqa: PLR0917
    machines: int, cpus: int, gpus: int, wanted: int | None, device: str, layout: Any, fake_ray: Any
) -> None:
    fake_ray(machines=machines, cpus=cpus, gpus=gpus)
    refused = pytest.raises((RecipeError, MachineError))
    expected = refused if isinstance(layout, str) else contextlib.nullcontext()
    with expected as raised, cluster_for(wanted, device) as found:
        assert found == layout
        assert len(found.bundles()) == found.ranks // found.on_each
    assert raised is None or raised.value.hint == layout


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") == ""


def test_a_machine_with_other_versions_is_named() -> None:
    actor = ray_cluster.RankActor({**ray_cluster.node_versions(), "torch": "0"})
    with pytest.raises(MachineError, match="has torch .* for 0"):
        actor.address()
