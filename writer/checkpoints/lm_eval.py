"""Read what lm-evaluation-harness wrote, and keep it as evaluations of a checkpoint.

The layout of ``results_*.json`` is that of lm_eval 0.4 (``lm_eval/result_schema.py`` there); older files, whose metric
names have no filter, are read too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from llmtrack.writer.errors import UsageError

from .evals import EvalFile, EvalValue, to_json, write_evals

_BY_TASK: Final = ("versions", "n-shot", "n-samples", "configs", "group_subtasks")  # tables with tasks as their keys
_ELSEWHERE: Final = frozenset((*_BY_TASK, "results", "groups", "higher_is_better", "task_hashes", "samples"))
_NO_METRICS: Final = frozenset(("alias", "name", "sample_len", "sample_count"))
_STDERR: Final = "_stderr"
# The fields of a task's configuration that decide what the model is asked.
_PROMPT_FIELDS: Final = (
    *("task", "dataset_path", "dataset_name", "dataset_kwargs", "test_split", "validation_split", "fewshot_split"),
    *("doc_to_text", "doc_to_target", "doc_to_choice", "doc_to_image", "doc_to_audio", "process_docs", "use_prompt"),
    *("description", "target_delimiter", "fewshot_delimiter", "fewshot_config", "num_fewshot", "gen_prefix"),
)
_CHAT_FIELDS: Final = ("system_instruction_sha", "chat_template_sha", "fewshot_as_multiturn")
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")  # in the name of a function, and different in every process
_NUMPY: Final = re.compile(r"np\.float\d+\((.*)\)")  # how some versions wrote a number that JSON did not know
_VERSION: Final = re.compile(r"\d+\.\d+.*")  # an installation without metadata has an error message there
_LAST_SECOND: Final = 1 << 40


def import_lm_eval(
    root: str | os.PathLike[str],
    path: str | os.PathLike[str],
    ckpt_id: str,
    *,
    tokens: int | None = None,
    run_id: str | None = None,
) -> EvalFile:
    """Keep every number of a result file of lm-evaluation-harness as an evaluation of a checkpoint.

    A metric keeps its filter unless that is ``none`` (``exact_match,strict-match``); groups count as tasks; a standard
    error of ``N/A`` is null; the time is that of the evaluation. The prompt hash is the harness's own where it logged
    samples, and is made of the task's configuration otherwise. All else is in ``details``, except ``samples``.
    Importing a file again for the same checkpoint writes nothing.

    Args:
        root: The folder that holds the runs.
        path: ``results_*.json``.
        ckpt_id: Of the checkpoint that was evaluated.
        tokens: Of the checkpoint, for where no run has recorded it.
        run_id: The run that has recorded it; None to look for it.

    Raises:
        UsageError: It is no such file, or holds no number. Nothing was written.
        LlmtrackError: The storage refused; nothing was written.
    """
    source = Path(path)
    content = _read(source)
    document = _parse(source, content)
    values = list(_values(source, document))
    if not values:
        raise UsageError(f"{source}: no task has a number", hint="give the results_*.json of a finished evaluation")
    version = document.get("lm_eval_version")
    same_file = hashlib.sha256(f"{ckpt_id}\0".encode() + content).hexdigest()[:32]
    return write_evals(
        root,
        ckpt_id,
        values,
        harness="lm-eval",
        harness_version=version if isinstance(version, str) and _VERSION.fullmatch(version) else None,
        tokens=tokens,
        run_id=run_id,
        time_ms=_time_ms(document.get("date")),
        unique=f"import-{same_file}",
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}", hint="give the results_*.json that lm_eval wrote"
        ) from error


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    hint = "give the results_*.json that lm_eval wrote, not its samples_*.jsonl"
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}", hint=hint) from error
    tasks = document.get("results") if isinstance(document, dict) else None
    if not isinstance(tasks, dict) or not all(isinstance(entry, dict) for entry in tasks.values()):
        raise UsageError(f'{path}: no result file of lm-evaluation-harness: no "results" by task', hint=hint)
    return cast("dict[str, Any]", document)


def _time_ms(date: Any) -> int | None:
    return int(date * 1000) if isinstance(date, (int, float)) and 0 < date < _LAST_SECOND else None


def _values(source: Path, document: Mapping[str, Any]) -> Iterator[EvalValue]:
    evaluation = {key: value for key, value in document.items() if key not in _ELSEWHERE}
    for task, entry in {**_table(document, "groups"), **document["results"]}.items():
        metrics, rest = _split(entry)
        facts = {table: _table(document, table)[task] for table in _BY_TASK if task in _table(document, table)}
        better = _table(_table(document, "higher_is_better"), task)
        prompt_hash = _prompt_hash(document, task, frozenset())
        for key, value in metrics.items():
            name, _, kept_filter = key.partition(",")
            details = {
                "source": source.name,
                "task": {**rest, **facts, "filter": kept_filter or None, "higher_is_better": better.get(name)},
                "evaluation": evaluation,
            }
            stderr = _number(entry.get(_stderr_key(key)))
            metric = name if kept_filter in {"", "none"} else key
            yield EvalValue(task, metric, value, stderr, prompt_hash, to_json(details))


def _table(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = document.get(key)
    return table if isinstance(table, dict) else {}


def _split(entry: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Tell the metrics of a task from what else stands beside them; standard errors are in neither."""
    has_filters = any("," in key for key in entry)
    metrics: dict[str, float] = {}
    rest: dict[str, Any] = {}
    stderrs = {_stderr_key(key) for key in entry}
    for key, raw in entry.items():
        number = _number(raw)
        if key in stderrs:
            continue
        if number is None or key in _NO_METRICS or ("," in key) != has_filters:
            rest[key] = raw
        else:
            metrics[key] = number
    return metrics, rest


def _stderr_key(key: str) -> str:
    name, comma, kept_filter = key.partition(",")
    return f"{name}{_STDERR}{comma}{kept_filter}"


def _number(raw: Any) -> float | None:
    """Return a number, also one that the harness wrote as a string because JSON did not know its type."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        return None
    try:
        return float(_NUMPY.sub(r"\1", raw) if isinstance(raw, str) else raw)
    except (ValueError, OverflowError):
        return None


def _prompt_hash(document: Mapping[str, Any], task: str, above: frozenset[str]) -> str | None:
    """Hash what the model was asked, or return None when the file does not say it; `above` are the groups around."""
    own = _table(document, "task_hashes").get(task)
    if isinstance(own, str) and own:
        return own
    config = _table(_table(document, "configs"), task)
    members = _table(document, "group_subtasks").get(task)
    if config:
        asked: dict[str, Any] = {field: config.get(field) for field in _PROMPT_FIELDS}
        asked |= {field: document.get(field) for field in _CHAT_FIELDS}
        asked |= {field: _table(document, "config").get(field) for field in ("limit", "fewshot_seed")}
        return f"config-{_hash(asked)}"
    if isinstance(members, list) and members and task not in above:
        hashes = {str(member): _prompt_hash(document, str(member), above | {task}) for member in members}
        return f"group-{_hash(hashes)}" if None not in hashes.values() else None
    return None


def _hash(value: Any) -> str:
    return hashlib.sha256(_ADDRESS.sub("", to_json(value)).encode()).hexdigest()[:32]
