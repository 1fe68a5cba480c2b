"""Ask a root that is large: 100 million points, 10,000 parts, 10,000 segments, 64 MiB still open; beside the trackers.

python benchmarks/bench_query.py                  # builds the roots first: minutes, and 0.6 GB in --folder
python benchmarks/bench_query.py --points 1e6 --parts 256 --open-mib 8 --peers llmtrack

Each root is asked in a process of its own, several times on one connection; `wall` is the best (the others waited for a
CPU), `cpu` the median of CPU time on all threads. Memory is the process's peak over what it had before it connected.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import query_roots
import trackers
from measure import Aim, Memory, aims_table, cpu_s, figure, folder_bytes, machine, markdown_table, median
from query_roots import LOSS
from workload import metric_names, metric_values

_MB: Final = 1e6
_TIMES: Final = 7
_RUN: Final = "run-0000"
_SERIES: Final = f"SELECT tokens, value FROM series('{_RUN}', '{LOSS}')"
_LAST: Final = f"SELECT run_id, arg_max(value, tokens) FROM live WHERE name = '{LOSS}' GROUP BY run_id"
_QUESTIONS: Final = {
    "one series of one run": _SERIES,
    "smoothed": f"SELECT tokens, smooth FROM smooth('{_RUN}', '{LOSS}', 1e12)",
    "in 500 buckets": f"FROM bucket('{_RUN}', '{LOSS}', 500)",
    "last value of all runs": _LAST,
    "all runs at equal tokens": f"FROM at_tokens('{LOSS}', 10000000000000)",
    "all metrics of one run, a column each": (
        f"PIVOT (SELECT tokens, step, name, value FROM history WHERE run_id = '{_RUN}')"
        " ON name USING max(value) GROUP BY tokens, step"
    ),
    "points of every run and metric": "SELECT run_id, name, count(*) FROM metrics GROUP BY ALL",
}
_Figures = dict[str, float]


def main() -> None:
    """Build what is not there yet, ask, and print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="Keep the roots here, and take those that are there.")
    parser.add_argument("--points", type=float, default=1e8, help="Of 100 runs in 3 segments each.")
    parser.add_argument("--parts", type=int, default=10_000)
    parser.add_argument("--open-mib", type=int, default=64)
    parser.add_argument("--peer-points", type=float, default=2e4, help="What the trackers are given.")
    parser.add_argument("--peers", default="llmtrack,tensorboard,mlflow", help="Which of them to ask.")
    parser.add_argument("--json", type=Path, help="Write all figures here.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        task = json.loads(options.child)
        result = _TASKS[task["task"]](Path(task["folder"]))
        Path(task["result"]).write_text(json.dumps(result), encoding="utf-8")
        return
    with TemporaryDirectory(prefix="bench-query-") as scratch:
        folder = options.folder or Path(scratch)
        _build(folder, options)
        figures = {task: _ask(task, folder, Path(scratch)) for task in _TASKS}
    if options.json:
        options.json.write_text(json.dumps({"about": machine(), "figures": figures}, indent=1), encoding="utf-8")
    print(_report(figures))


def _build(folder: Path, options: argparse.Namespace) -> None:
    ten = max(round(options.parts**0.25), 1)  # 10,000 parts: 100 runs of 10 segments of 10 parts
    peer_points = int(options.peer_points)
    for name, build in (
        ("points", lambda root: query_roots.build_points(root, int(options.points))),
        ("parts", lambda root: query_roots.build_parts(root, runs=ten * ten, segments=ten, parts=ten)),
        ("segments", lambda root: query_roots.build_parts(root, runs=ten * ten * ten, segments=ten, parts=1)),
        ("open", lambda root: query_roots.build_open(root, options.open_mib << 20)),
        ("peer-llmtrack", lambda root: query_roots.build_points(root, peer_points, runs=1, segments=1)),
        ("peer-tensorboard", lambda root: _build_peer(root, trackers.open_tensorboard, peer_points)),
        ("peer-mlflow", lambda root: _build_peer(root, trackers.open_mlflow_async, peer_points)),
    ):
        root = folder / name
        is_wanted = not name.startswith("peer-") or name.removeprefix("peer-") in options.peers.split(",")
        if is_wanted and not root.exists():
            began_s = time.perf_counter()
            building = folder / f".{name}"
            building.mkdir(parents=True)
            build(building)
            building.rename(root)
            print(f"{name}: built in {time.perf_counter() - began_s:.0f} s", file=sys.stderr)


def _build_peer(folder: Path, open_peer: Callable[[Path], Any], points: int) -> None:
    names = metric_names(query_roots.METRICS)
    values = metric_values(points // len(names), len(names), single=True)
    opened = open_peer(folder)
    for step, row in enumerate(values.tolist(), start=1):
        opened.log(dict(zip(names, row, strict=True)), step, step)
    opened.settle()
    opened.close()


def _ask(task: str, folder: Path, scratch: Path) -> _Figures:
    result = scratch / "result.json"
    child = json.dumps({"task": task, "folder": str(folder), "result": str(result)})
    subprocess.run([sys.executable, __file__, "--child", child], check=True, stdout=sys.stderr)
    figures: _Figures = json.loads(result.read_text(encoding="utf-8"))
    return figures


def _timed(name: str, ask: Callable[[], object], times: int = _TIMES) -> _Figures:
    walls, cpus = [], []
    for _ in range(times):
        began_s, began_cpu_s = time.perf_counter(), cpu_s()
        ask()
        walls.append(time.perf_counter() - began_s)
        cpus.append(cpu_s() - began_cpu_s)
    return {f"{name}, wall ms": min(walls) * 1e3, f"{name}, cpu ms": median(cpus) * 1e3}


def _measure_points(folder: Path) -> _Figures:
    from llmtrack.query import connect

    memory = Memory()
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    con = connect(folder / "points")
    figures = {
        "connect, wall ms": (time.perf_counter() - began_s) * 1e3,
        "connect, cpu ms": (cpu_s() - began_cpu_s) * 1e3,
        "bytes": folder_bytes(folder / "points"),
        "points": con.execute("SELECT count(*) FROM metrics").fetchall()[0][0],
    }
    for name, query in _QUESTIONS.items():
        figures |= _timed(name, lambda query=query: con.execute(query).fetchnumpy())  # type: ignore[misc]  # mypy: a lambda with a default
    raw = f"{folder}/points/run_id={_RUN}/*/metrics-*.parquet"
    query = f"SELECT tokens, value FROM read_parquet('{raw}') WHERE name = '{LOSS}' ORDER BY tokens"
    figures |= _timed("one series, raw DuckDB", lambda: con.execute(query).fetchnumpy())
    figures["memory MB"] = memory.added_bytes() / _MB
    with connect(folder / "points", runs=[_RUN]) as alone:
        figures |= _timed("one series, connected to its run alone", lambda: alone.execute(_SERIES).fetchnumpy())
    return figures


def _measure_parts(folder: Path) -> _Figures:
    from llmtrack.query import connect, refresh

    figures = _timed("connect", lambda: connect(folder / "parts").close(), 3)
    figures |= _timed("connect without points", lambda: connect(folder / "parts", points=False).close(), 3)
    figures |= _timed("connect, unchecked", lambda: connect(folder / "parts", check=False).close(), 3)
    con = connect(folder / "parts")
    figures |= _timed("refresh, nothing new", lambda: refresh(con), 3)
    return figures | _timed("one series", lambda: con.execute(_SERIES).fetchnumpy(), 3)


def _measure_segments(folder: Path) -> _Figures:
    from llmtrack.query import connect
    from llmtrack.query.runs.describe import list_runs

    def ls() -> None:
        with connect(folder / "segments", points=False) as con:
            list_runs(con, folder / "segments")

    return _timed("ls", ls, 3)


def _measure_open(folder: Path) -> _Figures:
    from llmtrack.query import connect, refresh

    query = _SERIES.replace(_RUN, "running")

    def fresh() -> None:
        with connect(folder / "open") as con:
            con.execute(query).fetchnumpy()

    memory = Memory()
    figures = _timed("connect", lambda: connect(folder / "open").close(), 3)
    figures |= _timed("connect, and one series", fresh, 3)
    con = connect(folder / "open")
    figures["points"] = con.execute("SELECT count(*) FROM metrics").fetchall()[0][0]
    figures["bytes"] = folder_bytes(folder / "open")
    figures |= _timed("one series", lambda: con.execute(query).fetchnumpy())
    figures |= _timed("last value", lambda: con.execute(_LAST).fetchnumpy())
    figures |= _timed("refresh, nothing new", lambda: refresh(con))
    return figures | {"memory MB": memory.added_bytes() / _MB}


def _measure_peers(folder: Path) -> _Figures:
    """One series of one run, of the same points: open, and ask."""
    from llmtrack.query import connect

    def ours() -> None:
        with connect(folder / "peer-llmtrack") as con:
            con.execute(_SERIES).fetchnumpy()

    def tensorboard() -> None:
        module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
        events = module.EventAccumulator(str(folder / "peer-tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        events.Scalars(LOSS)

    def mlflow() -> None:
        client: Any = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{folder}/peer-mlflow/mlflow.db")
        experiment = client.get_experiment_by_name("bench")
        (run,) = client.search_runs([experiment.experiment_id])
        client.get_metric_history(run.info.run_id, LOSS)

    figures: _Figures = {}
    for name, ask in (("llmtrack", ours), ("tensorboard", tensorboard), ("mlflow", mlflow)):
        if not (folder / f"peer-{name}").exists():
            continue
        ask()  # imports
        figures |= _timed(name, ask, 3)
        figures[f"{name}, bytes"] = folder_bytes(folder / f"peer-{name}")
    return figures


_TASKS: Final[dict[str, Callable[[Path], _Figures]]] = {
    "points": _measure_points,
    "parts": _measure_parts,
    "segments": _measure_segments,
    "open": _measure_open,
    "peers": _measure_peers,
}


def _report(figures: dict[str, _Figures]) -> str:
    points, parts, opened = figures["points"], figures["parts"], figures["open"]
    aims = [
        Aim("one series of one run, warm, ms", points["one series of one run, wall ms"], 20, at_most=True),
        Aim("that, times raw DuckDB, CPU", _ratio(points, "one series of one run"), 3, at_most=True),
        Aim(
            "the same, its run alone, times", _ratio(points, "one series, connected to its run alone"), 3, at_most=True
        ),
        Aim("last value of all runs, ms", points["last value of all runs, wall ms"], 1000, at_most=True),
        Aim("memory, MB", points["memory MB"], 1024, at_most=True),
        Aim("connect to 10,000 parts, ms", parts["connect, wall ms"], 2000, at_most=True),
        Aim("ls of 10,000 segments, ms", figures["segments"]["ls, wall ms"], 2000, at_most=True),
        Aim("one series of a part of 64 MiB that is open, ms", opened["one series, wall ms"], 500, at_most=True),
        Aim("the same, connect included, ms", opened["connect, and one series, wall ms"], 500, at_most=True),
    ]
    tables = [str(machine()), aims_table(aims)]
    for task, found in figures.items():
        names = [name.removesuffix(", wall ms") for name in found if name.endswith(", wall ms")]
        rows = [[name, figure(found[f"{name}, wall ms"]), figure(found[f"{name}, cpu ms"])] for name in names]
        rest = ", ".join(f"{name} {figure(value)}" for name, value in found.items() if not name.endswith(" ms"))
        tables.append(f"### {task}\n\n" + markdown_table(["", "wall, ms", "CPU, ms"], rows) + f"\n\n{rest}")
    return "\n\n".join(tables)


def _ratio(points: _Figures, name: str) -> float:
    return points[f"{name}, cpu ms"] / points["one series, raw DuckDB, cpu ms"]


if __name__ == "__main__":
    main()
