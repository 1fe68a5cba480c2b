"""Result files of lm-evaluation-harness, as versions 0.3 to 0.4.13 wrote them, become evaluations."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from llmtrack.writer.checkpoints.lm_eval import import_lm_eval
from llmtrack.writer.errors import UsageError

DATA = Path(__file__).parents[1] / "data" / "lm_eval"
CKPT = "full-0123456789abcdef0123456789abcdef"


def imported(root: Path, source: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Import a file, and return its rows by task and metric, details parsed."""
    found = import_lm_eval(root, source, CKPT).table.to_pylist()
    assert [row["seq"] for row in found] == list(range(1, len(found) + 1))
    return {(row["task"], row["metric"]): {**row, "details": json.loads(row["details"])} for row in found}


def changed(tmp_path: Path, name: str, **changes: Any) -> Path:
    """Return a copy of a result file with some of its keys replaced."""
    path = tmp_path / "results_changed.json"
    path.write_text(json.dumps({**json.loads((DATA / name).read_text()), **changes}))
    return path


METRICS = {
    ("prose", "bits_per_byte"),
    ("prose", "word_perplexity"),
    ("sums", "acc"),
    ("sums_easy", "acc"),
    ("sums_easy", "acc_norm"),
    ("sums_hard", "acc"),
    ("sums_hard", "acc_norm"),
    ("sums_in_words", "exact_match,flexible-extract"),
    ("sums_in_words", "exact_match,strict-match"),
}


@pytest.mark.parametrize("name", sorted(path.name for path in DATA.glob("results_0.4*.json")))
def test_every_number_of_a_0_4_file_is_an_evaluation(tmp_path: Path, name: str) -> None:
    """Tasks and groups, with the filter in the name unless it is none; counts and aliases are no metrics."""
    found = imported(tmp_path, DATA / name)
    document = json.loads((DATA / name).read_text())
    assert found.keys() == METRICS
    assert {row["harness"] for row in found.values()} == {"lm-eval"}
    assert {row["harness_version"] for row in found.values()} == {document["lm_eval_version"]}
    for (task, metric), row in found.items():
        entry, key = document["results"][task], metric if "," in metric else f"{metric},none"
        stderr = entry[key.replace(",", "_stderr,")]
        assert row["value"] == entry[key]
        assert row["stderr"] == (None if stderr == "N/A" else stderr)


def test_the_time_is_that_of_the_evaluation(tmp_path: Path) -> None:
    """An import months later does not move the evaluation."""
    rows = imported(tmp_path, DATA / "results_0.4.9.2.json")
    date = json.loads((DATA / "results_0.4.9.2.json").read_text())["date"]
    assert abs(rows["sums", "acc"]["time"] - datetime.fromtimestamp(date, UTC)).total_seconds() < 0.001


def test_the_prompt_hash_is_the_harness_own_where_samples_were_logged(tmp_path: Path) -> None:
    """A group's is made of those of its tasks."""
    rows = imported(tmp_path, DATA / "results_0.4.13_with_samples.json")
    hashes = json.loads((DATA / "results_0.4.13_with_samples.json").read_text())["task_hashes"]
    assert rows["sums_easy", "acc"]["prompt_hash"] == hashes["sums_easy"]
    assert rows["sums", "acc"]["prompt_hash"].startswith("group-")


def test_without_samples_the_prompt_hash_is_made_of_what_decides_the_prompt(tmp_path: Path) -> None:
    """It differs with the prompt, the shots and the limit, and not with the model, the metric or an address."""
    name = "results_0.4.9.2.json"
    document = json.loads((DATA / name).read_text())
    easy, config = document["configs"]["sums_easy"], document["config"]

    def prompt_hash(task: dict[str, Any], evaluation: dict[str, Any] | None = None, **changes: Any) -> str:
        changes["configs"] = {**document["configs"], "sums_easy": {**easy, **task}}
        changes["config"] = {**config, **(evaluation or {})}
        return str(imported(tmp_path, changed(tmp_path, name, **changes))["sums_easy", "acc"]["prompt_hash"])

    plain = prompt_hash({})
    assert plain.startswith("config-")
    assert prompt_hash({"repeats": 3, "metadata": {"version": 9}}, {"model_args": "pretrained=x"}) == plain
    others = [
        prompt_hash({"doc_to_text": "Q: {{question}}"}),
        prompt_hash({"num_fewshot": 5}),
        prompt_hash({"description": ""}),
        prompt_hash({}, {"limit": 100}),
        prompt_hash({}, {"fewshot_seed": 7}),
        prompt_hash({}, chat_template_sha="abc"),
    ]
    assert len({plain, *others}) == len(others) + 1
    one, two = (prompt_hash({"process_docs": f"functools.partial(<function f at 0x7f{i}>)"}) for i in (1, 2))
    assert one == two != plain


def test_a_group_whose_tasks_are_not_all_known_has_no_prompt_hash(tmp_path: Path) -> None:
    """Unknown is null, also where groups contain each other."""
    for members in (["sums_easy", "not_there"], ["sums"], []):
        source = changed(tmp_path, "results_0.4.9.2.json", group_subtasks={"sums": members})
        assert imported(tmp_path, source)["sums", "acc"]["prompt_hash"] is None


def test_all_else_is_in_the_details(tmp_path: Path) -> None:
    """What the model was, how many shots and documents, and whether higher is better, can be asked for later."""
    rows = imported(tmp_path, DATA / "results_0.4.9.2_with_samples.json")
    details = rows["sums_in_words", "exact_match,strict-match"]["details"]
    assert details["source"] == "results_0.4.9.2_with_samples.json"
    assert details["task"]["filter"] == "strict-match"
    assert details["task"]["n-shot"] == 1
    assert details["task"]["n-samples"] == {"original": 12, "effective": 12}
    assert details["task"]["versions"] == 3.0
    assert details["task"]["higher_is_better"] is True
    assert details["task"]["configs"]["num_fewshot"] == 1
    assert details["evaluation"]["config"]["model"] == "dummy"
    assert details["evaluation"]["transformers_version"] == "4.57.6"
    assert rows["prose", "word_perplexity"]["details"]["task"]["higher_is_better"] is False
    assert rows["sums", "acc"]["details"]["task"]["group_subtasks"] == ["sums_easy", "sums_hard"]


def test_samples_are_not_copied(tmp_path: Path) -> None:
    """A dump of simple_evaluate() with every sample in it stays small."""
    source = changed(tmp_path, "results_0.4.9.2.json", samples={"sums_easy": ["x" * 1000] * 1000})
    assert "samples" not in imported(tmp_path, source)["sums_easy", "acc"]["details"]["evaluation"]


def test_an_older_file_without_filters_is_read(tmp_path: Path) -> None:
    """Version 0.3 has plain metric names and names neither its version, its date nor its prompts."""
    before = datetime.now(UTC)
    rows = imported(tmp_path, DATA / "results_0.3.0.json")
    assert set(rows) == {
        ("lambada_openai", "ppl"),
        ("lambada_openai", "acc"),
        ("squad2", "exact"),
        ("squad2", "f1"),
        ("squad2", "HasAns_exact"),
        ("wikitext", "word_perplexity"),
        ("wikitext", "byte_perplexity"),
        ("wikitext", "bits_per_byte"),
    }
    acc = rows["lambada_openai", "acc"]
    assert (acc["value"], acc["stderr"], acc["harness_version"], acc["prompt_hash"]) == (0.3932, 0.0068, None, None)
    assert (acc["time"] - before).total_seconds() > -0.001
    assert acc["details"]["task"]["versions"] == 0
    assert acc["details"]["evaluation"]["config"]["model"] == "hf-causal"


def test_groups_are_found_where_the_results_leave_them_out(tmp_path: Path) -> None:
    """Some versions list a group only under groups; some list it without any metric."""
    source = changed(
        tmp_path,
        "results_0.4.9.2.json",
        results={"sums_easy": {"alias": " - easy", "acc,none": 0.5, "acc_stderr,none": "N/A"}, "tag": {" ": " "}},
        groups={"sums": {"alias": "sums", "acc,none": 0.25}},
    )
    rows = imported(tmp_path, source)
    assert {key: row["value"] for key, row in rows.items()} == {("sums_easy", "acc"): 0.5, ("sums", "acc"): 0.25}


def test_numbers_that_were_written_as_words_are_numbers(tmp_path: Path) -> None:
    """The harness writes what JSON does not know as a string, and a NaN as NaN."""
    entry = {
        "acc,none": "0.5",
        "acc_stderr,none": "np.float64(0.01)",
        "f1,none": math.nan,
        "f1_stderr,none": None,
        "em,none": "N/A",
        "ok,none": True,
        "x_stderr,none": 0.5,
        "sample_len": 7,
    }
    rows = imported(tmp_path, changed(tmp_path, "results_0.4.9.2.json", results={"t": entry}, groups={}))
    assert rows.keys() == {("t", "acc"), ("t", "f1"), ("t", "x_stderr")}
    assert (rows["t", "acc"]["value"], rows["t", "acc"]["stderr"]) == (0.5, 0.01)
    assert math.isnan(rows["t", "f1"]["value"])
    task = rows["t", "acc"]["details"]["task"]
    assert (task["em,none"], task["ok,none"], task["sample_len"]) == ("N/A", True, 7)


def test_the_same_file_is_imported_once(tmp_path: Path) -> None:
    """Importing again writes nothing; for another checkpoint, or with other content, it does."""
    source = DATA / "results_0.4.9.2.json"
    first, second = import_lm_eval(tmp_path, source, CKPT), import_lm_eval(tmp_path, source, CKPT)
    assert (first.is_new, second.is_new, first.path) == (True, False, second.path)
    assert import_lm_eval(tmp_path, source, "full-other").is_new
    assert import_lm_eval(tmp_path, changed(tmp_path, source.name, model_name="x"), CKPT).is_new
    assert len(list((tmp_path / "evals").iterdir())) == 3


@pytest.mark.parametrize("version", ["No package metadata was found for lm_eval", None, 7])
def test_a_version_that_is_none_is_null(tmp_path: Path, version: Any) -> None:
    """An installation without metadata has an error message there; it stays in the details."""
    row = imported(tmp_path, changed(tmp_path, "results_0.4.9.2.json", lm_eval_version=version))["sums", "acc"]
    assert row["harness_version"] is None
    assert row["details"]["evaluation"]["lm_eval_version"] == version


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b'{"results": {"t": {"acc,none": 0.5}}', "not JSON"),
        (b'{"doc_id": 0}\n{"doc_id": 1}\n', "not JSON"),
        (b"\xff\xfe\xfa", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "no result file"),
        (b'{"config": {}}', "no result file"),
        (b'{"results": [1]}', "no result file"),
        (b'{"results": {"t": 1}}', "no result file"),
        (b'{"results": {"t": {"alias": "t", "acc,none": "N/A"}}}', "no task has a number"),
        (b'{"results": {}}', "no task has a number"),
    ],
)
def test_what_is_no_result_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """The message names the file and says what to give; nothing is written."""
    source = tmp_path / "x.json"
    source.write_bytes(content)
    with pytest.raises(UsageError, match=rf"x\.json: .*{message}") as caught:
        import_lm_eval(tmp_path, source, CKPT)
    assert "results_*.json" in caught.value.hint
    assert not (tmp_path / "evals").exists()


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A missing file, and a folder, are named."""
    for name, reason in (("gone.json", "No such file"), (".", "Is a directory")):
        with pytest.raises(UsageError, match=reason):
            import_lm_eval(tmp_path, tmp_path / name, CKPT)
