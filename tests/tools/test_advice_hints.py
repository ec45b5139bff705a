"""Advice that proposes a line, a flag or a command is provoked and followed; all has a case but what is listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tools.advice.hint_place import Case, Place, judged
from tools.advice.hint_sites import Site, sites
from tools.advice.hint_starts import STARTS
from tools.advice.hints import WHAT_TO_DO, cases, needless, without_case

CASES = cases()
NOT_FOLLOWED: dict[str, tuple[str, ...]] = {
    "it needs a GPU, or a library or compiler that is missing or fails": (
        "checkpoint/staging.py:Staging.reserve:", "checkpoint/staging.py:_pin:", "errors.py:as_tuner_error:",
        "model/float8.py:Float8Layers.of:", "model/kernels.py:apply_liger:", "model/native/library.py:library:",
        "model/native/library.py:compiled:", "model/native/library.py:_run:",
        "model/native/library.py:_private_directory:", "model/offload.py:_require_unchanged:",
        "model/offload.py:_no_room:", "profile/measure.py:_memory_errors:", "runtime/device.py:device_facts:",
        "runtime/numa.py:cores_of:", "setup/host_states.py:announce_host_states:", "setup/machine.py:examine:",
        "setup/machine.py:_place:", "setup/precision.py:require_precision:", "setup/resolve.py:_compiled: install",
        "setup/resolve.py:_check_liger:", "setup/resolve.py:_check_numerics: write kernels: auto,",
    ),
    "it needs several processes": (
        "ladder/launch.py:run_rungs:", "run/tasks/evaluate.py:EvaluateTask._has_room:",
        "parallel/assemble.py:_spread_experts:",
        "parallel/assemble.py:_add_up_by_rows:", "parallel/expert.py:check_spread:",
        "parallel/fsdp.py:_shard_experts.placement:", "parallel/mesh.py:Mesh.of:",
        "parallel/mesh.py:_require_inside:", "parallel/sequence.py:: write p",
        "parallel/sequence.py:require_divided:", "parallel/tensor/plan.py:_ways:",
        "parallel/tensor/plan.py:_way_of_heads:", "parallel/tensor/plan.py:_instead:",
        "run/preflight.py:_require_same_choices:", "train/compact_adamw.py:_pieces:",
        "train/custom_optimizer.py:OwnOptimizer._require_saveable:", "train/custom_optimizer.py:build_own_optimizer:",
    ),
    "it needs a hub, a network or a data set library": (
        "data/reading/data_sets.py:named_split:", "data/reading/data_sets.py:hub_files:",
        "data/reading/data_sets.py:_slice:", "data/reading/data_sets.py:_bound:", "data/sources.py:_expand:",
        "export/hub.py:find_export:", "export/hub.py:plan_push:", "export/hub.py:_base_of:",
        "export/hub.py:_Tries.run:",
    ),
    "it is about what a signal, a crash or a damaged file leaves, which campaigns provoke": (
        "checkpoint/load.py:require_same_quantizer:", "data/building/documents.py:_worker_died:",
        "run/reference.py:with_reference:", "run/reference.py:values_of.values:",
        "run/reference.py:with_row_columns:", "run/reference.py:require_start:", "run/reference.py:cached_columns:",
        "run/tasks/export_process.py:ExportProcess._figures:",
        "run/tasks/export_process.py:ExportProcess._cut_short:", "run/teacher.py:with_teacher:",
        "run/teacher.py:key_facts:", "run/teacher.py:values_of.values:",
        "run/teacher_versions.py:TeacherVersions.identify:", "run/teacher_versions.py:require_version:",
        "run/teacher_versions.py:_noted:", "run/windows/finder.py:Finder._begin:",
        "run/windows/finder.py:Finder._entry:", "run/windows/preparation.py:PreparedHere.outcome:",
        "run/windows/start.py:begin_windows:", "run/windows/start.py:_noted:", "rundir/links.py:_require_plain:",
        "export/hf.py:_require_space:", "run/score.py:score: look at", "run/tasks/health.py:HealthTask._failed:",
    ),
    "not reached yet": (
        "cli/ladder.py:run:", "cli/profile.py:_hint:", "cli/prove.py:prove:",
        "config/ladder.py:LadderSize._one_way:",
        "config/ladder.py:require_one_run:", "config/load.py:_of_other_tool:", "config/load.py:_locate:",
        "config/optimizers.py:ParameterGroup._sets_something:",
        "config/optimizers.py:CustomOptimizer._has_one_place_for_each:", "config/overrides.py:merge:",
        "config/overrides.py:unknown:", "config/rules.py:_harness_scores_its_tasks:",
        "config/window_rules.py:names_have_a_place:", "config/window_rules.py:_cadence_in:",
        "config/yaml.py:_Builder._checked:", "data/building/cache.py:find:",
        "data/building/documents.py:bad_record_error:", "data/building/losses.py:length_warnings:",
        "data/building/prepare.py:check_prepared:", "data/building/rows.py:_nothing_left:",
        "data/encoding/named_templates.py:NamedTemplate.require_end:", "data/encoding/template.py:: set tok",
        "data/encoding/tokenizer.py:TextTokenizer.template:", "data/encoding/turns.py:Planner._plan:",
        "data/encoding/turns.py:_written_out:", "data/prepared.py:open_prepared:",
        "data/reading/json_blocks.py:Elements._fail:", "data/reading/jsonl.py:strict_json_record:",
        "export/outputs.py:Values._source_of:",
        "init_from/adapters.py:give_adapter:", "init_from/adapters.py:_keep:",
        "init_from/fit.py:fit:", "init_from/fit.py:takes:", "init_from/match.py:_chosen:",
        "init_from/match.py:_without_place:", "init_from/match.py:_require_all:",
        "init_from/sources.py:_of_checkpoint:", "ladder/batch.py:solve:", "ladder/fit_page.py:check_output:",
        "ladder/points.py:read_points:", "ladder/points.py:_size:", "ladder/points.py:_is_decayed:",
        "ladder/record.py:read_ladder:", "ladder/record.py:_require_same_plan:", "ladder/rules.py:course:",
        "ladder/rungs.py:rungs_of:", "ladder/score.py:_require_slope:", "ladder/shapes.py:Proportions.of:",
        "model/adapter.py:add_lora:", "model/adapter.py:_require_adapted:", "model/adapter.py:require_used:",
        "model/adapter.py:_not_adaptable:", "model/build.py:_overridden:",
        "model/mixers.py:Mixers._by_document.forward:", "model/multimodal.py:config_of_language_model:",
        "model/probe.py:require_same_reach:", "model/published.py:published:",
        "model/quantize/published.py:: name th", "model/refusal.py:not_causal:",
        "model/refusal.py:require_positions:", "model/router_loss.py:router_loss:",
        "model/router_loss.py:unasked_term:", "model/tiles.py:apply_tiles:", "model/tiles.py:_refused:",
        "model/tokens.py:train_new_tokens:", "model/vetting.py:_require_codes:",
        "model/vetting.py:require_known_losses:", "model/vetting.py:require_own_files:", "model/vetting.py:_refuse:",
        "profile/devices.py:parse_processes:", "profile/devices.py:parse_memory:", "profile/report.py:check_output:",
        "profile/tracing.py:refusing:", "prove/prove.py:train_alone:", "run/changes.py:resets_for:",
        "run/meta.py:require_same_data:", "run/preflight.py:_data_dir: prepare",
        "run/previous.py:find_checkpoint: resume", "run/previous.py:_own_checkpoint: \N{SECTION SIGN}",
        "run/previous.py:resume_source: give th", "run/previous.py:_way_from:",
        "run/trial.py:_require_elementwise:",
        "setup/axes.py:_check_numbers:", "setup/build.py:_inspect:", "setup/check.py:_check_model_directory: merge i",
        "setup/less_memory.py:less_memory:", "setup/resolve.py:require_apart:", "setup/resolve.py:rerouted:",
        "setup/resolve.py:_reference:", "setup/teacher.py:check_teacher:", "setup/timetable.py:few_steps:",
        "setup/window_course.py:check_reference:", "train/diagnose.py:diverged:", "train/methods/dpo.py:Dpo.columns:",
        "train/methods/method.py:check_logits:", "train/methods/reward.py:Reward.columns:",
        "train/plan.py:plan_steps:", "train/schedule.py:_without_overlap:",
    ),
}  # fmt: skip
"""Sites without a case, by the beginnings of their names, and why. It only gets shorter."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("hints"))


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.site, marks=[pytest.mark.slow] if case.dear else []) for case in CASES]
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
