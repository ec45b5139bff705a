"""Advice that proposes a line, a flag or a command is provoked and followed; all has a case but what is listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tools.advice.hint_cases import Case, cases
from tools.advice.hint_place import Place, judged
from tools.advice.hint_sites import Site, sites
from tools.advice.hint_starts import STARTS
from tools.advice.hints import WHAT_TO_DO, needless, without_case

CASES = cases()
NOT_FOLLOWED: dict[str, tuple[str, ...]] = {
    "it needs a GPU, or a library or compiler that is missing or fails": (
        "checkpoint/staging.py:Staging.reserve:", "checkpoint/staging.py:_pin:", "errors.py:as_tuner_error:",
        "model/float8.py:Float8Layers.of:", "model/kernels.py:apply_liger:",
        "model/native/library.py:_private_directory:", "model/native/library.py:_run:",
        "model/native/library.py:compiled:", "model/native/library.py:library:", "model/offload.py:_no_room:",
        "model/offload.py:_require_unchanged:", "profile/measure.py:_memory_errors:", "runtime/device.py:device_facts:",
        "runtime/numa.py:cores_of:", "setup/host_states.py:announce_host_states:", "setup/less_memory.py:less_memory:",
        "setup/machine.py:_place:", "setup/machine.py:examine:", "setup/precision.py:require_precision:",
        "setup/resolve.py:_check_liger:", "setup/resolve.py:_check_numerics: write kernels: auto,",
        "setup/resolve.py:_compiled: install",
    ),
    "it needs several processes": (
        "ladder/launch.py:run_rungs:", "parallel/assemble.py:_add_up_by_rows:", "parallel/assemble.py:_spread_experts:",
        "parallel/expert.py:check_spread:", "parallel/fsdp.py:_shard_experts.placement:", "parallel/mesh.py:Mesh.of:",
        "parallel/mesh.py:_require_inside:", "parallel/sequence.py:: write p", "parallel/sequence.py:require_divided:",
        "parallel/tensor/plan.py:_instead:", "parallel/tensor/plan.py:_way_of_heads:", "parallel/tensor/plan.py:_ways:",
        "run/status.py:require_same_choices:", "run/tasks/evaluate.py:EvaluateTask._has_room:",
        "train/compact_adamw.py:_pieces:", "train/custom_optimizer.py:OwnOptimizer._require_saveable:",
        "train/custom_optimizer.py:build_own_optimizer:",
    ),
    "it needs a hub, a network or a data set library": (
        "data/reading/data_sets.py:_bound:", "data/reading/data_sets.py:_slice:",
        "data/reading/data_sets.py:hub_files:", "data/reading/data_sets.py:named_split:", "data/sources.py:_expand:",
        "export/hub.py:_Tries.run:", "export/hub.py:_base_of:", "export/hub.py:find_export:",
        "export/hub.py:plan_push:",
    ),
    "it is about what a signal, a crash or a damaged file leaves, which campaigns provoke": (
        "rundir/same_base.py:require_same_quantizer:", "data/building/documents.py:_worker_died:",
        "export/hf.py:_require_space:", "run/reference.py:cached_columns:", "run/reference_start.py:_is_another:",
        "run/reference.py:values_of.values:", "run/reference.py:with_reference:", "run/reference.py:with_row_columns:",
        "run/score.py:score: look at", "run/tasks/export_process.py:ExportProcess._cut_short:",
        "run/tasks/export_process.py:ExportProcess._figures:", "run/tasks/health.py:HealthTask._failed:",
        "run/teacher.py:key_facts:", "run/teacher.py:values_of.values:", "run/teacher.py:with_teacher:",
        "run/teacher_versions.py:TeacherVersions.identify:", "run/teacher_versions.py:_noted:",
        "run/teacher_versions.py:require_version:", "run/windows/finder.py:Finder._begin:",
        "run/windows/finder.py:Finder._entry:", "run/windows/preparation.py:PreparedHere.outcome:",
        "ladder/record.py:read_ladder: have", "data/building/apart.py:prepare_apart:",
        "run/windows/start.py:_noted:", "run/windows/start.py:begin_windows:", "rundir/links.py:_require_plain:",
    ),
    "it needs a model, a layer or figures that are built for it, as its unit tests do": (
        "init_from/sources.py:_of_checkpoint:", "ladder/score.py:_require_slope:", "model/adapter.py:_not_adaptable:",
        "model/adapter.py:_require_adapted:", "model/mixers.py:Mixers._by_document.forward:",
        "model/multimodal.py:config_of_language_model:", "model/published.py:published:", "model/tiles.py:_refused:",
        "run/meta.py:require_same_data: restore it, or name its commit: model",
    ),
    "the command line finds it earlier, in words of its own; callers in Python meet it": (
        "ladder/rungs.py:rungs_of: write ladder", "model/probe.py:require_same_reach:",
        "run/status.py:resume_source: give th", "train/plan.py:plan_steps:",
    ),
    "it is about a file of data that was made to do harm: the same rows written otherwise are rows": (
        "data/reading/block.py:: where", "data/reading/ipc_sizes.py:refuse_bombs:",
        "data/reading/page_sizes.py:group_of: where",
    ),
    "not reached yet": (
        "cli/ladder.py:run:", "cli/profile.py:_hint:", "cli/prove.py:prove:", "export/outputs.py:Values._source_of:",
        "prove/prove.py:train_alone:",
    ),
}  # fmt: skip
"""Sites without a case, by the beginnings of their names, and why. It only gets shorter."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("hints"))


@pytest.mark.slow("cli/data.py:show")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.site, marks=[pytest.mark.slow] if case.is_dear else []) for case in CASES]
)
def test_what_is_proposed_leads_on(case: Case, place: Place) -> None:
    assert judged(case, place, STARTS) == ""


def test_all_that_is_proposed_is_followed() -> None:
    allowed = [entry for entries in NOT_FOLLOWED.values() for entry in entries]
    assert without_case(sites(), CASES, allowed) == [], WHAT_TO_DO


def test_a_new_proposal_without_a_case_is_found() -> None:
    new = Site("setup/other.py", "check", "write train.compile: false")
    assert without_case([*sites(), new], CASES, [site.name for site in sites()]) == [new.name]


def test_each_case_is_about_one_text() -> None:
    assert {case.site: len(case.sites) for case in CASES if len(case.sites) != 1} == {}


def test_nothing_is_listed_that_is_followed_or_gone() -> None:
    assert needless(sites(), CASES, NOT_FOLLOWED) == []
    wrong = (CASES[0].site, "setup/other.py:check")
    assert needless(sites(), CASES, {"": wrong}) == [*wrong]


WAY = "train.gradient_checkpointing: full"
OFFLOADED = next(case for case in CASES if case.site.startswith("config/rules.py:_offload_needs"))
MEANT_NONE = replace(OFFLOADED, meant=({"train.gradient_checkpointing": "none"},))
PLANTED: tuple[tuple[str, Case, Callable[[str], str], str], ...] = (
    ("another key", OFFLOADED, lambda text: text.replace(WAY, "train.compile: true"), "it proposes"),
    ("a key that is not there", OFFLOADED, lambda text: text.replace(WAY, "train.recompute: full"), "it proposes []"),
    ("another value", OFFLOADED, lambda text: text.replace("full", "selective"), "it proposes"),
    ("a value that is not taken", OFFLOADED, lambda text: text.replace("full", "all"), "it proposes []"),
    ("the same error again", MEANT_NONE, lambda text: text.replace("full", "none"), "ends with 2"),
    ("one way too few", OFFLOADED, lambda text: f"{text}, or train.offload_activations: false", "it proposes"),
    ("it is never said", replace(OFFLOADED, recipe={}), str, "it is not said"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "reworded", "found"), [one[1:] for one in PLANTED], ids=[one[0] for one in PLANTED])
def test_a_wrong_proposal_is_found(case: Case, reworded: Callable[[str], str], found: str, place: Place) -> None:
    assert judged(OFFLOADED, place, STARTS) == ""
    assert found in judged(case, place, STARTS, reworded)
