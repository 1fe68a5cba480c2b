"""What the batch system says of the job in its environment: Slurm, LSF, PBS, Kubernetes."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Final

_NODES_LIMIT: Final = 100_000  # what stands for more is no list of nodes

# From name of the variable that only this system sets to what its variables mean.
_SYSTEMS: Final = {
    "SLURM_JOB_ID": {
        "scheduler": "slurm",
        "job_id": "SLURM_JOB_ID",
        "job_name": "SLURM_JOB_NAME",
        "array_job_id": "SLURM_ARRAY_JOB_ID",
        "array_task_id": "SLURM_ARRAY_TASK_ID",
        "restart_count": "SLURM_RESTART_COUNT",
        "partition": "SLURM_JOB_PARTITION",
        "qos": "SLURM_JOB_QOS",
        "cluster": "SLURM_CLUSTER_NAME",
        "start_time": "SLURM_JOB_START_TIME",  # these two since Slurm 22.05
        "end_time": "SLURM_JOB_END_TIME",
    },
    "LSB_JOBID": {
        "scheduler": "lsf",
        "job_id": "LSB_JOBID",
        "job_name": "LSB_JOBNAME",
        "array_task_id": "LSB_JOBINDEX",
        "partition": "LSB_QUEUE",
    },
    "PBS_JOBID": {
        "scheduler": "pbs",
        "job_id": "PBS_JOBID",
        "job_name": "PBS_JOBNAME",
        "array_task_id": "PBS_ARRAY_INDEX",
        "partition": "PBS_QUEUE",
    },
    "KUBERNETES_SERVICE_HOST": {
        "scheduler": "kubernetes",
        "job_id": "HOSTNAME",  # the pod's name
        "array_task_id": "JOB_COMPLETION_INDEX",
    },
}
_ITEM: Final = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+")
_PIECE: Final = re.compile(r"[^\[\]]+|\[[0-9,-]+\]")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def read_job() -> dict[str, str | int] | None:
    """Return what is known of the job, or None outside a batch system.

    Times are ISO-8601 in UTC, `time_limit_s` is what the job was given from its start to its end, in seconds.
    """
    variables = next((system for name, system in _SYSTEMS.items() if os.environ.get(name)), None)
    if variables is None:
        return None
    job: dict[str, str | int] = {key: os.environ[name] for key, name in variables.items() if os.environ.get(name)}
    job["scheduler"] = variables["scheduler"]
    if job["scheduler"] == "slurm":
        job["restart_count"] = _number(job.get("restart_count")) or 0  # Slurm sets it from the first restart on
    start_s, end_s = _number(job.pop("start_time", None)), _number(job.pop("end_time", None))
    for key, time_s in {"start_time": start_s, "end_time": end_s}.items():
        if time_s is not None:
            job[key] = datetime.fromtimestamp(time_s, UTC).isoformat()
    if start_s is not None and end_s is not None:
        job["time_limit_s"] = end_s - start_s
    return job


def read_nodes(host: str) -> list[str] | None:
    """Return the nodes of the job, in the batch system's order; this host alone outside one.

    None where the batch system's list cannot be understood.
    """
    environment = os.environ
    slurm = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if slurm:
        return expand_nodes(slurm)
    if environment.get("LSB_MCPU_HOSTS"):
        return environment["LSB_MCPU_HOSTS"].split()[::2]  # each with its number of slots
    file = environment.get("PBS_NODEFILE")
    if file:
        return list(dict.fromkeys(Path(file).read_text().split()))  # a node is there once a slot
    return [host]


def expand_nodes(nodes: str) -> list[str] | None:
    """Expand Slurm's short form: ``gpu[001-003,007],login1`` is gpu001, gpu002, gpu003, gpu007 and login1.

    Returns:
        The names, or None when it is of another form.
    """
    if not re.fullmatch(rf"{_ITEM.pattern}(?:,{_ITEM.pattern})*", nodes):
        return None
    names: list[str] = []
    for item in _ITEM.finditer(nodes):
        choices = [_choices(piece) for piece in _PIECE.findall(item[0])]
        count = 1
        for choice in choices:
            if choice is None:
                return None
            count *= len(choice)
        if len(names) + count > _NODES_LIMIT:
            return None
        names += map("".join, product(*(choice for choice in choices if choice is not None)))
    return names


def _choices(piece: str) -> list[str] | None:
    """Return what one piece of a name can be: itself, or the numbers in brackets with their leading zeros."""
    if not piece.startswith("["):
        return [piece]
    numbers: list[str] = []
    for part in piece[1:-1].split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            return None
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _NODES_LIMIT:
            return None
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _number(text: str | int | None) -> int | None:
    return int(text) if text is not None and str(text).isdecimal() else None
