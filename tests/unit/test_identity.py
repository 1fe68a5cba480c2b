"""The start record says with what and where a process runs, and nothing odd about a host keeps it from starting."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pytest
import torch

from llmtrack.writer.format import SCHEMAS
from llmtrack.writer.lineage import revision
from llmtrack.writer.lineage.identity import process_identity
from llmtrack.writer.lineage.revision import find_checkout, is_dirty, read_commit
from llmtrack.writer.lineage.scheduler import expand_nodes, read_job, read_nodes


def _git(folder: Path, *command: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    ran = subprocess.run(["git", *who, "-C", folder, *command], check=True, capture_output=True, text=True)
    return ran.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a repository with one commit and one file."""
    folder = tmp_path / "code"
    (folder / "src").mkdir(parents=True)
    _git(folder, "init", "-q")
    (folder / "train.py").write_text("lr = 1\n")
    _git(folder, "add", "train.py")
    _git(folder, "commit", "-q", "-m", "a")
    return folder


@pytest.fixture(autouse=True)
def no_batch_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the machine that runs the tests may be part of."""
    for name in list(os.environ):
        if name.startswith(
            ("LSB_", "PBS_", "KUBERNETES_", "APPTAINER_", "SINGULARITY_", "CONTAINER_", "IMAGE_", "OMPI_")
        ):
            monkeypatch.delenv(name)


def _versions() -> dict[str, str]:
    found: dict[str, str] = json.loads(str(process_identity()["versions"]))
    return found


# The whole


def test_it_is_a_part_of_a_start_record(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key is a column of it, and every value fits."""
    monkeypatch.chdir(checkout)
    identity = process_identity()
    assert pa.RecordBatch.from_pylist([identity], schema=SCHEMAS["segments"]).num_rows == 1
    assert identity.keys() <= set(SCHEMAS["segments"].names)
    assert identity["git_commit"] == _git(checkout, "rev-parse", "HEAD")
    assert identity["git_dirty"] is False
    assert (identity["host"], identity["pid"]) == (socket.gethostname(), os.getpid())
    assert (identity["nodes"], identity["world_size"], identity["scheduler"]) == ([socket.gethostname()], 1, None)
    assert identity["image_digest"] is None


def test_a_host_without_anything_gives_nulls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No git, no repository, a working directory that was removed, files that cannot be read."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PBS_NODEFILE", "/does/not/exist")
    monkeypatch.setenv("APPTAINER_CONTAINER", "/does/not/exist.sif")
    identity = process_identity()
    assert identity["git_commit"] is identity["git_dirty"] is identity["nodes"] is identity["image_digest"] is None
    assert identity["pid"] == os.getpid()


# Code


def test_the_commit_is_read_without_git(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a branch, packed, detached, and in a second work tree; a container often has no git."""
    commit = _git(checkout, "rev-parse", "HEAD")
    _git(checkout, "worktree", "add", "-q", "-b", "other", str(checkout.parent / "second"))
    second = checkout.parent / "second"
    (second / "train.py").write_text("lr = 2\n")
    _git(second, "commit", "-q", "-a", "-m", "b")
    other = _git(second, "rev-parse", "HEAD")
    git = os.environ["PATH"]
    monkeypatch.setenv("PATH", "")
    assert (read_commit(checkout), read_commit(second)) == (commit, other)
    monkeypatch.setenv("PATH", git)
    _git(checkout, "pack-refs", "--all")
    monkeypatch.setenv("PATH", "")
    assert (read_commit(checkout), read_commit(second)) == (commit, other)
    monkeypatch.setenv("PATH", git)
    _git(checkout, "checkout", "-q", "--detach")
    monkeypatch.setenv("PATH", "")
    assert read_commit(checkout) == commit


def test_a_repository_without_a_commit_has_none(tmp_path: Path) -> None:
    """Just initialised."""
    _git(tmp_path, "init", "-q")
    assert read_commit(tmp_path) is None


def test_only_a_change_of_a_tracked_file_makes_a_checkout_dirty(checkout: Path) -> None:
    """Outputs beside the code are no change of it."""
    (checkout / "out.log").write_text("x")
    assert is_dirty(checkout) is False
    (checkout / "train.py").write_text("lr = 2\n")
    assert is_dirty(checkout) is True


def test_git_takes_no_lock_in_the_checkout(checkout: Path) -> None:
    """Jobs that start at once, or a person who commits, are not disturbed."""
    os.utime(checkout / "train.py", (1, 1))
    index = (checkout / ".git" / "index").read_bytes()
    assert is_dirty(checkout) is False
    assert (checkout / ".git" / "index").read_bytes() == index


def test_a_slow_git_is_not_waited_for(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is dirty is then unknown, and no process stays behind."""
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin" / "git"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec {shutil.which('sleep')} 600\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(revision, "_TIMEOUT_S", 2.0)
    begun = time.monotonic()
    assert is_dirty(checkout) is None
    assert time.monotonic() - begun < 300
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_checkout_that_another_user_owns_has_a_commit_and_no_dirty_flag(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git refuses it as of dubious ownership; reading is not refused."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("HOME", str(checkout.parent))
    assert read_commit(checkout) is not None
    assert is_dirty(checkout) is None


def test_another_repository_in_the_environment_is_not_asked(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that was submitted from a git hook has GIT_DIR set."""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert is_dirty(checkout) is False


def test_the_code_is_where_the_main_script_lies_else_where_one_stands(checkout: Path, tmp_path: Path) -> None:
    """Jobs often run in a scratch folder."""
    code = "from llmtrack.writer.lineage.revision import find_checkout; print(find_checkout())"
    script = checkout / "src" / "run.py"
    script.write_text(code)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}

    def found(where: Path, *command: str) -> str:
        ran = subprocess.run(
            [sys.executable, *command], cwd=where, env=here, check=True, capture_output=True, text=True
        )
        return ran.stdout.strip()

    assert found(scratch, str(script)) == str(checkout)
    assert found(checkout / "src", "-c", code) == str(checkout)
    assert found(scratch, "-c", code) == "None"
    assert find_checkout() is None or (find_checkout() or scratch).is_dir()


# Image


def test_a_digest_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a launcher sets, or in the name of the image."""
    digest = "sha256:" + "0123456789abcdef" * 4
    monkeypatch.setenv("APPTAINER_CONTAINER", f"docker://nvcr.io/nvidia/pytorch@{digest}")
    assert process_identity()["image_digest"] == digest
    monkeypatch.setenv("IMAGE_DIGEST", digest.replace("0", "f"))
    assert process_identity()["image_digest"] == digest.replace("0", "f")


def test_an_image_of_apptainer_is_known_by_the_uuid_of_its_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands in the header; hashing 20 GB would take minutes."""
    image, uuid = tmp_path / "pytorch.sif", UUID("b2659d4e-bd50-4ea5-bd17-eec5e54f918e")
    head = b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + uuid.bytes
    image.write_bytes(head + bytes(1000))
    monkeypatch.setenv("SINGULARITY_CONTAINER", str(image))
    assert process_identity()["image_digest"] == f"sif:{uuid}"
    assert _versions()["image"] == str(image)
    image.write_bytes(b"hsqs" + bytes(1000))
    assert process_identity()["image_digest"] is None


# Versions


def test_versions_are_those_of_what_is_loaded_or_installed() -> None:
    """And of CUDA, when torch is loaded and has it."""
    versions = _versions()
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["pyarrow"] == pa.__version__
    assert versions["torch"] == torch.__version__
    assert versions.get("cuda") == torch.version.cuda


def test_nothing_is_imported_to_learn_its_version() -> None:
    """Importing torch takes seconds and memory."""
    code = (
        "import sys; from llmtrack.writer.lineage.identity import process_identity; before = set(sys.modules);"
        "print(process_identity()['versions']);"
        "print({'torch', 'numpy', 'transformers', 'mlflow'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert '"torch"' in ran.stdout
    assert "set()" in ran.stdout


def test_a_secret_in_what_a_batch_system_says_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images and job names are as users made them."""
    monkeypatch.setenv("CONTAINER_IMAGE", "docker://me:hunter2@registry/image")
    assert "hunter2" not in str(process_identity())


# Batch systems


def test_slurm_says_job_restarts_partition_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times in UTC, the limit in seconds."""
    said = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "pretrain",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_ARRAY_JOB_ID": "4700",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_JOB_START_TIME": "1700000000",
        "SLURM_JOB_END_TIME": "1700010800",
        "SLURM_JOB_NODELIST": "gpu[001-002]",
        "SLURM_NTASKS": "16",
    }
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    expected = {
        "scheduler": "slurm",
        "job_id": "4711",
        "job_name": "pretrain",
        "partition": "gpu",
        "array_job_id": "4700",
        "array_task_id": "3",
        "restart_count": 0,
        "start_time": "2023-11-14T22:13:20+00:00",
        "end_time": "2023-11-15T01:13:20+00:00",
        "time_limit_s": 10800,
    }
    assert read_job() == expected
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    identity = process_identity()
    assert json.loads(str(identity["scheduler"])) == {**expected, "restart_count": 2}
    assert (identity["nodes"], identity["world_size"]) == (["gpu001", "gpu002"], 16)
    monkeypatch.setenv("SLURM_JOB_START_TIME", "soon")
    assert "time_limit_s" not in (read_job() or {})


def test_other_batch_systems_say_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes, LSF, PBS; a host is there once."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOSTNAME", "trainer-0")
    assert read_job() == {"scheduler": "kubernetes", "job_id": "trainer-0"}
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\n")
    monkeypatch.setenv("PBS_JOBID", "5.server")
    monkeypatch.setenv("PBS_NODEFILE", str(nodes))
    assert read_job() == {"scheduler": "pbs", "job_id": "5.server"}
    assert read_nodes("here") == ["n1", "n2"]
    monkeypatch.setenv("LSB_JOBID", "6")
    monkeypatch.setenv("LSB_QUEUE", "normal")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "h1 8 h2 8")
    assert read_job() == {"scheduler": "lsf", "job_id": "6", "partition": "normal"}
    assert read_nodes("here") == ["h1", "h2"]


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("gpu1", "gpu1"),
        ("gpu[001-004,007],login1", "gpu001 gpu002 gpu003 gpu004 gpu007 login1"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[08-10]", "n08 n09 n10"),
        ("rack[1-2]n[3,5]-ib", "rack1n3-ib rack1n5-ib rack2n3-ib rack2n5-ib"),
        ("a,b[1],c.d-e_f", "a b1 c.d-e_f"),
    ],
)
def test_slurms_short_form_of_nodes_is_expanded(short: str, names: str) -> None:
    """In order, with leading zeros."""
    assert expand_nodes(short) == names.split()


@pytest.mark.parametrize(
    "unknown",
    [
        "",
        "a[1-",
        "a]1[",
        "a,,b",
        "a b",
        "n[2-1]",
        "n[a-b]",
        "n[1--2]",
        "n[1,]",
        "[0-999999999]",
        "n[1-90000],m[1-90000]",
    ],
)
def test_another_form_of_nodes_is_unknown(unknown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wrong name, and not a million of them."""
    assert expand_nodes(unknown) is None
    if unknown:
        monkeypatch.setenv("SLURM_JOB_NODELIST", unknown)
        assert process_identity()["nodes"] is None
