"""What clusters are given: scripts and manifests that their own schemas take, and words that arrive as they are."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from tests.fixtures import commands
from tests.fixtures.tables import cases
from tuner.errors import ExitCode, RecipeError, TunerError
from tuner.submit import cluster
from tuner.submit.cluster import OPTIONS, Job, Volume, bytes_of, seconds_of, send, template, text_of, variables

ODD = ("/da ta/it's $HOME `id`.yaml", '--name="$(HOME)" $$ $(PATH)', "--data.train=ä😀 #1;&|*?{}[]: - \\n", "")
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text())
JOB = Job("r", ODD, "/", 3, 8, 4, 5 << 40, 90_061, "reg/im@sha:1", (Volume("runs", "/r"), Volume("/a b", "/b")))
RECIPE = "model: {name_or_path: owner/name}\ndata: {train: rows.jsonl}\ntrain: {global_batch_size: 48}\n"


def documents(text: str) -> list[dict[str, Any]]:
    return list(YAML(typ="safe").load_all(text))


def pod_of(text: str) -> dict[str, Any]:
    spec = documents(text)[-1]["spec"]
    spec = spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec
    pod: dict[str, Any] = spec["template"]["spec"]
    return pod


@pytest.mark.parametrize("jobset", [False, True])
@pytest.mark.parametrize("job", [JOB, Job("9.B_x", ("r.yaml",), "/", 1, 0, image="im")], ids=["all", "least"])
def test_manifests_are_what_kubernetes_takes(job: Job, jobset: bool) -> None:
    found = documents(cluster.manifest(job, 7, jobset, ["hf"], ["rdma/ib=8"]))
    assert [each["kind"] for each in found] == ["ConfigMap", "JobSet"] if jobset else ["ConfigMap", "Service", "Job"]
    for each in found:
        jsonschema.Draft202012Validator({**SCHEMAS, **SCHEMAS[each["kind"]]}).validate(each)
    assert found[0]["data"]["tasks.sh"] == template("tasks.sh")
    spec = found[-1]["spec"]
    if jobset:
        assert spec["failurePolicy"]["maxRestarts"] == 7
        assert (spec := spec["replicatedJobs"][0]["template"]["spec"])["backoffLimit"] == 0
    else:
        assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (7, 0)
    assert spec["completions"] == spec["parallelism"] == job.nodes
    assert spec.get("activeDeadlineSeconds") == job.seconds
    pod = spec["template"]["spec"]
    env = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    name = found[-1]["metadata"]["name"]
    assert env["MASTER_ADDR"] == (f"{name}-node-0-0.{name}" if jobset else f"{name}-0.{name}")
    assert (env["NODES"], env["PROCESSES"], pod["subdomain"]) == (str(job.nodes), str(max(1, job.gpus)), name)
    devices = {"rdma/ib": "8"} | ({"nvidia.com/gpu": "8"} if job.gpus else {})
    assert devices.items() <= pod["containers"][0]["resources"]["limits"].items()


def test_only_what_would_happen_again_ends_a_job() -> None:
    rules = documents(cluster.manifest(JOB))[-1]["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule}
    again = {ExitCode.OK, ExitCode.ENVIRONMENT, ExitCode.STOPPED, ExitCode.INTERRUPTED}
    assert codes == {"Ignore": [75], "FailJob": sorted(set(ExitCode) - again)}
    # In a set all pods start again together, also where the machine of one is gone.
    assert ["DisruptionTarget" in cluster.manifest(JOB, 1, jobset) for jobset in (False, True)] == [True, False]


def at_pod(codes: str, tmp_path: Path, words: Sequence[str] = ("tuner",)) -> subprocess.Popen[str]:
    """The script of a pod, with stand-ins of which each ends with its own of the `codes`, or waits to be stopped."""
    program = tmp_path / "tuner"
    program.write_text(
        '#!/bin/bash\nprintf "%s\\0" "$@" > "$OUT$RANK"\nset -- $CODES; code=${@:LOCAL_RANK + 1:1}\n'
        "trap 'exit 75' TERM\nwhile [ \"$code\" = wait ]; do sleep 0.05; done\nexit \"$code\"\n"
    )
    program.chmod(0o755)
    counts = {"NODES": "3", "PROCESSES": str(len(codes.split())), "JOB_COMPLETION_INDEX": "1", "CODES": codes}
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": f"{tmp_path}/of-", **counts}
    return subprocess.Popen(["bash", "-c", template("tasks.sh"), "tasks.sh", *words], env=env, text=True)


def test_a_pod_ends_with_the_code_that_says_why(tmp_path: Path) -> None:
    table = cases(__file__, "ends")
    started = []
    for number, (codes, _) in enumerate(table):
        (tmp_path / str(number)).mkdir()
        started.append(at_pod(codes, tmp_path / str(number)))
    while not (tmp_path / "0" / "of-4").exists():
        time.sleep(0.02)
    started[0].terminate()  # the first waits
    assert [pod.wait(60) for pod in started] == [code for _, code in table]
    assert sorted(path.name for path in (tmp_path / "0").glob("of-*")) == ["of-3", "of-4", "of-5"]


def test_words_arrive_in_pods_as_they_are(tmp_path: Path) -> None:
    container = pod_of(cluster.manifest(JOB))["containers"][0]
    args = [re.sub(r"\$\$", "$", word) for word in container["args"]]
    assert not any(re.search(r"(?<!\$)(\$\$)*\$\(", word) for word in container["args"]), "Kubernetes would expand it"
    assert at_pod("0", tmp_path, args).wait(60) == 0
    assert (tmp_path / "of-1").read_text().split("\0")[:-1] == ["train", *ODD, "--resume", "auto"]


def test_words_arrive_under_slurm_as_they_are(tmp_path: Path) -> None:
    job = Job("r", ODD, str(tmp_path), env={"X": ODD[1]}, image="im", volumes=(Volume("/a b", "/c"),))
    script = cluster.script(job, ["partition=gpu", "exclusive", "time=2:00:00", "comment=a # b"])
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\0" "$X" "$PWD" "$@" > got\n')
    (tmp_path / "srun").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    assert subprocess.run(["bash"], input=script, text=True, env=env, cwd="/", check=False).returncode == 0
    variable, directory, *words = (tmp_path / "got").read_text().split("\0")[:-1]
    assert (variable, directory, words[words.index("task") + 2 :]) == (ODD[1], str(tmp_path), list(ODD))
    assert words[2:5] == ["--container-image=im", f"--container-workdir={tmp_path}", "--container-mounts=/a b:/c"]
    head = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --partition=gpu", "#SBATCH --exclusive", '#SBATCH --comment="a # b"'} <= set(head)
    assert [line for line in head if "time" in line] == ["#SBATCH --time=2:00:00"]


def test_scripts_are_what_sbatch_and_bash_take() -> None:
    script = cluster.script(JOB, ["partition=gpu"])
    read, _, rest = script.partition("\n\n")
    assert "#SBATCH" not in rest and all(line.startswith("#") for line in read.splitlines())
    asked = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", read, re.MULTILINE)
    assert len(dict(asked)) == len(asked) == read.count("#SBATCH")
    assert dict(asked).keys() <= set(cases(__file__, "sbatch"))
    numbers = {"nodes": "3", "ntasks-per-node": "8", "gpus-per-node": "8", "cpus-per-task": "4", "requeue": ""}
    assert (numbers | {"time": "1-01:01:01", "mem": "5242880M", "job-name": "r"}).items() <= dict(asked).items()
    assert "gpus" not in cluster.script(Job("r", (), "/", gpus=0)).partition("\n\n")[0]
    for text in (script, template("tasks.sh")):
        shellcheck = [str(Path(sys.executable).with_name("shellcheck")), "--shell=bash", "--exclude=SC2016", "-"]
        done = subprocess.run(shellcheck, input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout


def test_ray_is_given_a_command() -> None:
    words = shlex.split(text_of("ray", JOB, {}))
    start, inner = words[: words.index("--")], words[words.index("--") + 1 :]
    assert start[:3] == ["ray", "job", "submit"]
    assert inner[:6] == ["env", "-C", "/", "tuner", "train", "--on"]
    assert inner[7:] == [*ODD, "--parallel.processes", "24", "--resume", "auto"]


@pytest.mark.parametrize(("reader", "text", "says"), cases(__file__, "refused"))
def test_what_is_no_value_is_refused(reader: str, text: str, says: str) -> None:
    readers: Mapping[str, Any] = {
        "volume": Volume.of, "memory": bytes_of, "time": seconds_of, "env": lambda each: variables([each]),
        "sbatch": lambda each: cluster.script(JOB, [each]),
        "resource": lambda each: cluster.manifest(JOB, resource=[each]),
    }  # fmt: skip
    with pytest.raises(RecipeError) as raised:
        readers[reader](text)
    assert says in f"{raised.value.message} {raised.value.hint}"


def test_sizes_and_times_are_read() -> None:
    assert (bytes_of("500GiB"), seconds_of("04:00:30"), seconds_of("2-00:00:00")) == (500 << 30, 14_430, 172_800)


@pytest.mark.parametrize(("words", "says"), cases(__file__, "command_lines"))
def test_a_command_line_that_cannot_start_is_refused(words: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    done = commands.tuner("launch", *words.split(), cwd=tmp_path, stdin=RECIPE, code=2)
    assert says in " ".join(done.stderr.split()).replace(str(tmp_path), "HERE")


def test_the_program_is_given_what_a_dry_run_prints(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    words = ("launch", "r.yaml", "--on", "kubernetes", "--nodes", "2", "--image", "i", "--volume", f"c:{tmp_path}")
    words += ("--optimizer.lr", "3e-4")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TUNER_TRAIN__PRECISION": "fp32"}
    printed = commands.tuner(*words, "--dry-run", cwd=tmp_path, code=0, **env)
    assert printed.stderr == ""
    container = pod_of(printed.stdout)["containers"][0]
    assert container["args"][2:5] == [f"{tmp_path}/r.yaml", "--train.precision=fp32", "--optimizer.lr=3e-4"]
    assert {"name": "TUNER_CACHE", "value": f"{tmp_path}/.tuner-cache"} in container["env"]
    (tmp_path / "kubectl").write_text('#!/bin/bash\necho "$@" > words\ncat > got\necho created\n')
    (tmp_path / "kubectl").chmod(0o755)
    sent = commands.document(commands.tuner(*words, "--json", cwd=tmp_path, **env))
    assert sent["artifacts"]["text"] == "created"
    assert (tmp_path / "got").read_text() == printed.stdout
    assert (tmp_path / "words").read_text() == "apply -f -\n"


def test_a_program_that_is_missing_or_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for on in OPTIONS:
        with pytest.raises(TunerError, match="is not on PATH") as missing:
            send(on, text_of(on, JOB, {}))
        assert missing.value.exit_code == ExitCode.ENVIRONMENT
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho no partition >&2\nexit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(TunerError, match="sbatch ended with 3: no partition"):
        send("slurm", "x")
