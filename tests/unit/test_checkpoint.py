"""The id of a checkpoint depends on its content and tokens, and on nothing else."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrack.writer.checkpoints.checkpoint import CheckpointIdentity, checkpoint_id, identify
from llmtrack.writer.errors import LlmtrackError, UsageError

TOKENS = 10**15
META: dict[str, Any] = {"run_id": "7b-main", "segment": 3, "recipe_hash": "9f2c", "step": 4000, "tokens": TOKENS}

_NAMES = st.text("abc_", min_size=1, max_size=4)
_FOLDERS = st.dictionaries(
    st.builds(
        lambda parts, suffix: "/".join(parts) + suffix, st.lists(_NAMES, min_size=1, max_size=3), st.just(".bin")
    ),
    st.binary(max_size=40),
    min_size=1,
    max_size=5,
).filter(lambda files: any(files.values()))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """Create files below a folder, and return the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@contextmanager
def fresh_folder() -> Iterator[Path]:
    """Give each example of a property a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@given(files=_FOLDERS, seed=st.randoms(use_true_random=False), full=st.booleans())
@settings(max_examples=40, deadline=None)
def test_place_name_and_order_of_creation_do_not_matter(files: dict[str, bytes], seed: Any, full: bool) -> None:
    """Two folders with the same names and bytes have one id."""
    shuffled = list(files.items())
    seed.shuffle(shuffled)
    with fresh_folder() as folder:
        one = write(folder / "step_1000", files)
        other = write(folder / "elsewhere" / "copy", dict(shuffled))
        assert identify(one, 7, full=full) == identify(other, 7, full=full)


@given(files=_FOLDERS, data=st.data())
@settings(max_examples=40, deadline=None)
def test_one_changed_byte_changes_the_full_id(files: dict[str, bytes], data: st.DataObject) -> None:
    """Any byte of any weight file counts."""
    name = data.draw(st.sampled_from(sorted(name for name, content in files.items() if content)))
    at = data.draw(st.integers(0, len(files[name]) - 1))
    changed = bytearray(files[name])
    changed[at] ^= data.draw(st.integers(1, 255))
    with fresh_folder() as folder:
        assert checkpoint_id(write(folder / "a", files), 7) != checkpoint_id(
            write(folder / "b", {**files, name: bytes(changed)}), 7
        )


@given(files=_FOLDERS, full=st.booleans(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_names_within_the_folder_count(files: dict[str, bytes], full: bool, data: st.DataObject) -> None:
    """Two shards that swap their names, or one renamed, are another checkpoint."""
    name = data.draw(st.sampled_from(sorted(files)))
    renamed = {**files, f"{name}.pt": files[name]}
    del renamed[name]
    with fresh_folder() as folder:
        before, after = write(folder / "a", files), write(folder / "b", renamed)
        assert checkpoint_id(before, 7, full=full) != checkpoint_id(after, 7, full=full)


@pytest.mark.parametrize("full", [True, False])
def test_the_name_of_a_single_file_does_not_count(tmp_path: Path, full: bool) -> None:
    """A checkpoint of one file keeps its id when the file is renamed or moved."""
    (tmp_path / "step_1000.pt").write_bytes(b"weights")
    before = checkpoint_id(tmp_path / "step_1000.pt", 7, full=full)
    (tmp_path / "kept").mkdir()
    (tmp_path / "step_1000.pt").rename(tmp_path / "kept" / "best.tmp")
    assert checkpoint_id(tmp_path / "kept" / "best.tmp", 7, full=full) == before


def test_the_definition_of_an_id_stays(tmp_path: Path) -> None:
    """An id made by an earlier release is found again."""
    write(tmp_path, {"b/shard.bin": bytes(range(256)) * 4096, "a.safetensors": b"weights", "empty.bin": b""})
    size = (1 << 20) + 7
    full, quick = "full-79e72134be4b8aea1c31d3aebd383801", "quick-7b1c3073175acebcea765ccf5e33d0a7"
    assert identify(tmp_path, TOKENS, full=True) == CheckpointIdentity(full, size)
    assert identify(tmp_path, TOKENS, full=False) == CheckpointIdentity(quick, size)


@pytest.mark.parametrize("full", [True, False])
def test_the_token_count_is_part_of_the_id(tmp_path: Path, full: bool) -> None:
    """The same weights at another place of the run are another checkpoint."""
    write(tmp_path, {"model.pt": b"weights"})
    assert len({checkpoint_id(tmp_path, tokens, full=full) for tokens in (0, 1, 10**15)}) == 3


@pytest.mark.parametrize("full", [True, False])
def test_modification_times_do_not_count(tmp_path: Path, full: bool) -> None:
    """A copy that lost its times keeps its id."""
    write(tmp_path, {"model.pt": b"weights"})
    before = checkpoint_id(tmp_path, 7, full=full)
    os.utime(tmp_path / "model.pt", (0, 0))
    assert checkpoint_id(tmp_path, 7, full=full) == before


def test_a_byte_in_a_later_chunk_of_one_large_file_counts(tmp_path: Path) -> None:
    """A file is hashed in chunks, and each of them counts at its place."""
    path = tmp_path / "model.bin"
    with path.open("wb") as file:
        file.truncate(130 << 20)
    ids = {checkpoint_id(path, 7)}
    for at in (70 << 20, (130 << 20) - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"1")
        ids.add(checkpoint_id(path, 7))
    assert len(ids) == 3


def test_an_id_says_how_it_was_made(tmp_path: Path) -> None:
    """Quick and full ids are told apart by their first word, and never equal."""
    write(tmp_path, {"model.pt": b"weights"})
    full, quick = checkpoint_id(tmp_path, 7), checkpoint_id(tmp_path, 7, full=False)
    assert full.startswith("full-")
    assert quick.startswith("quick-")
    assert full[5:] != quick[6:]
    assert len(full[5:]) == len(quick[6:]) == 32


@given(size=st.integers(1, 2 << 20), grown=st.integers(-200, 200).filter(bool))
@settings(max_examples=25, deadline=None)
def test_a_truncated_or_grown_file_changes_the_quick_id(size: int, grown: int) -> None:
    """The size is part of it, even where every byte is the same."""
    with fresh_folder() as folder:
        one = write(folder / "a", {"x.bin": b"\1", "model.bin": bytes(size)})
        other = write(folder / "b", {"x.bin": b"\1", "model.bin": bytes(max(0, size + grown))})
        assert checkpoint_id(one, 7, full=False) != checkpoint_id(other, 7, full=False)


def test_a_quick_id_sees_head_tail_and_places_between_and_not_the_rest(tmp_path: Path) -> None:
    """Eight samples of 64 KiB are compared: what changes only between them keeps the quick id."""
    path, size = tmp_path / "model.bin", 16 << 20
    content = bytearray(size)
    path.write_bytes(content)
    before = checkpoint_id(path, 7, full=False)
    last = size - (64 << 10)
    for at in (0, size - 1, *(last * i // 7 for i in range(1, 7))):
        content[at] = 1
        path.write_bytes(content)
        assert checkpoint_id(path, 7, full=False) != before, at
        content[at] = 0
    content[100_000] = 1
    path.write_bytes(content)
    assert checkpoint_id(path, 7, full=False) == before


def test_a_quick_id_of_a_terabyte_reads_little(tmp_path: Path) -> None:
    """A sparse file of one TiB is identified by a read of half a MiB."""
    with (tmp_path / "model.bin").open("wb") as file:
        file.truncate(1 << 40)
    read_before = _bytes_read()
    assert identify(tmp_path, 7, full=False).bytes == 1 << 40
    assert _bytes_read() - read_before < 1 << 20


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


@pytest.mark.parametrize("full", [True, False])
def test_strays_and_text_beside_the_weights_do_not_count(tmp_path: Path, full: bool) -> None:
    """Temporary, hidden and lock files, caches and text come and go without changing the id."""
    write(tmp_path, {"rank_0/model.pt": b"weights"})
    before = identify(tmp_path, 7, full=full)
    strays = "model.pt.tmp .model.pt.swp .nfs0001 a.lock b.part c~ .cache/x.bin __pycache__/x.bin saving.tmp/x.bin"
    text = "config.json results_2024.json README.md train.log rank_0/trainer_state.JSON"
    write(tmp_path, dict.fromkeys([*strays.split(), *text.split()], b"other"))
    assert identify(tmp_path, 7, full=full) == before


def test_the_metadata_of_a_distributed_checkpoint_counts(tmp_path: Path) -> None:
    """Hidden as it is, it says which tensor lies where."""
    write(tmp_path, {"__0_0.distcp": b"weights"})
    before = checkpoint_id(tmp_path, 7)
    write(tmp_path, {".metadata": b"which tensor lies where"})
    assert checkpoint_id(tmp_path, 7) != before


def test_links_count_as_what_they_lead_to(tmp_path: Path) -> None:
    """A folder of links into a store of blobs is the checkpoint itself, and a link in a circle ends there."""
    plain = write(tmp_path / "plain", {"a.bin": b"1", "b/c.bin": b"2"})
    write(tmp_path / "blobs", {"x": b"1", "y/c.bin": b"2"})
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "a.bin").symlink_to(tmp_path / "blobs" / "x")
    (linked / "b").symlink_to(tmp_path / "blobs" / "y", target_is_directory=True)
    (tmp_path / "blobs" / "y" / "up").symlink_to(linked, target_is_directory=True)
    assert checkpoint_id(linked, 7) == checkpoint_id(plain, 7)


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    """A missing shard is not passed over; a dead link among the text is."""
    write(tmp_path, {"a.bin": b"1"})
    (tmp_path / "notes.txt").symlink_to(tmp_path / "gone.txt")
    checkpoint_id(tmp_path, 7)
    (tmp_path / "b.bin").symlink_to(tmp_path / "gone")
    with pytest.raises(LlmtrackError, match=r"b\.bin: deleted .* or a link that leads nowhere"):
        checkpoint_id(tmp_path, 7)


def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path) -> None:
    """The file and the storage's own words are in the message."""
    write(tmp_path, {"a.bin": b"1"})
    (tmp_path / "b.bin").symlink_to(tmp_path / "b.bin")
    with pytest.raises(LlmtrackError, match=r"b\.bin: could not be read: .*symbolic links") as caught:
        checkpoint_id(tmp_path, 7)
    assert caught.value.hint


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    """A missing path, an empty folder, a folder of text, an empty file and a pipe say what they are."""
    with pytest.raises(UsageError, match=r"there is no checkpoint at .*gone"):
        checkpoint_id(tmp_path / "gone", 7)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="folder holds no weights"):
        checkpoint_id(tmp_path / "folder", 7)
    write(tmp_path / "folder", {"config.json": b"{}", ".hidden": b"1", "model.bin": b""})
    with pytest.raises(UsageError, match="folder holds no weights") as caught:
        checkpoint_id(tmp_path / "folder", 7)
    assert "text and empty files" in caught.value.hint
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is neither a file nor a folder"):
        checkpoint_id(tmp_path / "pipe", 7)


@pytest.mark.parametrize("tokens", [-1, 1 << 63, True, 1.0, "7", None])
def test_what_is_no_token_count_is_refused(tmp_path: Path, tokens: Any) -> None:
    """Tokens are a whole number of 63 bits."""
    write(tmp_path, {"model.pt": b"weights"})
    with pytest.raises(UsageError, match="is no token count"):
        checkpoint_id(tmp_path, tokens)


_on_open: list[Callable[[str], None]] = []
_hook_installed = False


@contextmanager
def when_opened(path: Path, act: Callable[[], None]) -> Iterator[None]:
    """Act once, just before the file is opened for reading: what another process does while we read."""
    global _hook_installed  # noqa: PLW0603  an audit hook stays for the life of the process
    if not _hook_installed:
        sys.addaudithook(lambda event, args: [do(str(args[0])) for do in _on_open] if event == "open" else None)
        _hook_installed = True

    def do(opened: str) -> None:
        if opened == str(path):
            _on_open.clear()
            act()

    _on_open.append(do)
    try:
        yield
    finally:
        _on_open.clear()


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda folder: (folder / "b.bin").unlink(), r"b\.bin.*(vanished|deleted)"),
        (lambda folder: (folder / "a.bin").unlink(), r"a\.bin.*deleted"),
        (lambda folder: _grow(folder / "a.bin"), r"a\.bin changed while it was being read"),
        (lambda folder: os.truncate(folder / "a.bin", 3), r"a\.bin: cut short while it was being read"),
        (lambda folder: (folder / "a.bin").write_bytes(b"9" * 100), r"a\.bin changed while it was being read"),
        (lambda folder: (folder / "c.bin").write_bytes(b"3"), r"c\.bin appeared while it was being read"),
        (shutil.rmtree, "deleted"),
    ],
)
def test_a_checkpoint_that_changes_while_it_is_read_gets_no_id(
    tmp_path: Path, full: bool, act: Callable[[Path], None], message: str
) -> None:
    """A save that still goes on, or a clean-up that came too early, is said with the name of the file."""
    folder = write(tmp_path / "step", {"a.bin": b"1" * 100, "b.bin": b"2" * 100})
    os.utime(folder / "a.bin", (0, 0))  # the clock of a file system ticks only every few milliseconds
    with (
        when_opened(folder / "a.bin", lambda: act(folder)),
        pytest.raises(LlmtrackError, match=message) as caught,
    ):
        checkpoint_id(folder, 7, full=full)
    assert caught.value.hint


def test_no_thread_and_no_file_stays_open(tmp_path: Path) -> None:
    """An id leaves nothing behind, after an error neither."""
    write(tmp_path, {f"{i}.bin": bytes(i + 1) for i in range(50)})
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    checkpoint_id(tmp_path, 7)
    with when_opened(tmp_path / "30.bin", (tmp_path / "40.bin").unlink), pytest.raises(LlmtrackError):
        checkpoint_id(tmp_path, 7)
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_an_id_can_be_made_while_the_interpreter_ends(tmp_path: Path) -> None:
    """A run that ends at exit still records its last checkpoint, though no thread may start any more."""
    write(tmp_path, {f"{i}.bin": bytes(i + 1) for i in range(50)})
    script = (
        "import atexit\n"
        "from llmtrack.writer.checkpoints.checkpoint import checkpoint_id\n"
        f"atexit.register(lambda: print(checkpoint_id({str(tmp_path)!r}, 7)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == checkpoint_id(tmp_path, 7)


def test_an_id_can_be_made_with_a_single_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started, the caller's own does it all."""
    write(tmp_path, {f"{i}.bin": bytes(i + 1) for i in range(50)})
    expected = checkpoint_id(tmp_path, 7)

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert checkpoint_id(tmp_path, 7) == expected


def test_a_torch_checkpoint_has_an_id_and_keeps_the_meta(tmp_path: Path) -> None:
    """What run.meta() gives comes back from torch.save with weights_only, and one weight changes the id."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "step_4000.pt"
    model = torch.nn.Linear(64, 64)
    torch.save({"model": model.state_dict(), "llmtrack": META}, path)
    assert torch.load(path, weights_only=True)["llmtrack"] == META
    before = identify(path, TOKENS, full=True)
    assert before.bytes == path.stat().st_size
    with torch.no_grad():
        model.weight[3, 5] += 1e-3
    torch.save({"model": model.state_dict(), "llmtrack": META}, path)
    assert identify(path, TOKENS, full=True) != before


@pytest.fixture
def one_gloo_rank() -> Iterator[None]:
    """Make this process the one rank of a process group."""
    torch = pytest.importorskip("torch")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_gloo_rank")
def test_a_distributed_checkpoint_has_an_id_and_keeps_the_meta(tmp_path: Path) -> None:
    """A folder of torch.distributed.checkpoint is identified with all of its files and moves freely."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    folder = tmp_path / "step_4000"
    save({"model": torch.nn.Linear(64, 64).state_dict(), "llmtrack": META}, checkpoint_id=folder)
    state = {"model": torch.nn.Linear(64, 64).state_dict(), "llmtrack": {key: type(META[key])() for key in META}}
    load(state, checkpoint_id=folder)
    assert state["llmtrack"] == META
    before = identify(folder, TOKENS, full=True)
    assert before.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert identify(folder.rename(tmp_path / "moved"), TOKENS, full=True) == before


def _save_safetensors(path: Path, tensors: dict[str, bytes], metadata: dict[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [at, at + len(content)]}
        at += len(content)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def test_safetensors_shards_have_an_id_and_keep_the_meta(tmp_path: Path) -> None:
    """The meta fits into a safetensors header, whose values are strings; the index beside the shards is text."""
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        _save_safetensors(tmp_path / shard, {"w": os.urandom(1000)}, {"llmtrack": json.dumps(META)})
    raw = (tmp_path / "model-00001-of-00002.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert json.loads(header["__metadata__"]["llmtrack"]) == META
    before = identify(tmp_path, TOKENS, full=True)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert identify(tmp_path, TOKENS, full=True) == before
    assert before.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
