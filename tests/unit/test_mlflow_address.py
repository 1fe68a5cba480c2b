"""Which addresses MLflow can have, and what is said about the others; nothing is contacted."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llmtrack.sync.mlflow.client import connect, local_folder, resolve_uri
from llmtrack.writer.errors import RejectedError, UsageError


@pytest.mark.parametrize("uri", ["databricks", "databricks://profile", "databricks-uc", "uc:http://127.0.0.1:9"])
def test_databricks_is_no_file_store(uri: str) -> None:
    """MLflow's own words for it are left to MLflow."""
    assert resolve_uri(uri) == uri


@pytest.mark.parametrize("uri", ["file:///x/mlruns", "./mlruns", "/x/mlruns", "mlruns", "~/mlruns", "file:mlruns"])
def test_a_file_store_is_refused_with_the_way_out(uri: str) -> None:
    """The message names what works without a server, and how an old store is taken over."""
    with pytest.raises(UsageError, match="file store") as refused:
        resolve_uri(uri)
    assert "sqlite:///" in str(refused.value)
    assert "migrate-filestore" in str(refused.value)


def test_a_host_and_port_alone_are_told_what_is_missing() -> None:
    """``mlflow:5000`` is an address to a person, and a scheme to a program."""
    with pytest.raises(UsageError, match="no address") as refused:
        resolve_uri("mlflow:5000")
    assert "http://mlflow:5000" in str(refused.value)


def test_a_page_copied_from_the_browser_is_told_its_server() -> None:
    """Nobody types ``/#/experiments/1``, and a password in it is not shown."""
    with pytest.raises(UsageError, match="not the server's address") as refused:
        resolve_uri("http://me:secret@mlflow:5000/prefix/#/experiments/1")
    assert str(refused.value).endswith("--tracking-uri http://mlflow:5000/prefix")
    assert "secret" not in str(refused.value)


def test_https_to_a_server_that_speaks_http_is_no_matter_of_certificates() -> None:
    """The hint is the address that works."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(RejectedError, match="without TLS") as refused:
            connect(f"https://127.0.0.1:{server.server_port}", 5.0)
        assert f"--tracking-uri http://127.0.0.1:{server.server_port}" in str(refused.value)
    finally:
        server.shutdown()
        server.server_close()


def test_tables_go_beside_a_local_database(tmp_path: Path) -> None:
    """Whatever stands behind the file in its address; a server has a place of its own."""
    assert local_folder(resolve_uri(f"sqlite:///{tmp_path}/a%20b.db?timeout=5")) == tmp_path
    assert local_folder("http://127.0.0.1:5000") is None
    assert local_folder("postgresql://127.0.0.1/db") is None
