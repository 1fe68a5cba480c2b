"""Utilisation: known formulas against figures that were published, and peaks that are known or not there."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import llmtrack
from llmtrack.writer.capture import flops
from llmtrack.writer.capture.peaks import find_peak
from tests.reading import find_segment, read_segment

GPT3 = {"layers": 96, "heads": 96, "head_dim": 128, "sequence": 2048}
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def _nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flops, "_warned", set())


def test_palm_540b_comes_to_what_its_paper_says() -> None:
    """238.3 thousand tokens per second on 6,144 TPU v4 chips were 46.2 % of 275 TFLOP/s, attention counted."""
    palm = flops.estimate(
        "palm",
        parameters=540.35e9,
        layers=118,
        heads=48,
        head_dim=256,
        sequence=2048,
        peak_flops=275e12,
        devices=6144,
    )
    assert palm.mfu(238_300) == pytest.approx(0.462, abs=0.001)


def test_megatron_175b_comes_to_what_its_papers_say() -> None:
    """A step of GPT-3 with batches of 64 on 64 GPUs took 13.75 s: 51.4 % of 312 TFLOP/s (Korthikanti et al.)."""
    megatron = flops.estimate(
        "megatron", layers=96, hidden=12_288, sequence=2048, vocabulary=51_200, peak_flops=312e12, devices=64
    )
    assert megatron.mfu(64 * 2048 / 13.75) == pytest.approx(0.514, abs=0.003)


def test_a_causal_mask_halves_the_attention() -> None:
    """And nothing else differs between the two formulas."""
    plain = flops.estimate("6n", parameters=175e9, device=H100).flops_per_token
    causal = flops.estimate("6n_attention", parameters=175e9, device=H100, **GPT3).flops_per_token
    whole = flops.estimate("palm", parameters=175e9, device=H100, **GPT3).flops_per_token
    assert plain == 6 * 175e9
    assert whole - plain == 2 * (causal - plain) == 12 * 96 * 96 * 128 * 2048


def test_of_a_mixture_of_experts_only_the_active_parameters_count() -> None:
    """Those that a token passes through."""
    shape = {"layers": 32, "heads": 32, "head_dim": 128, "sequence": 4096}
    moe = flops.estimate("moe", active_parameters=12.9e9, device=H100, **shape)
    assert moe.flops_per_token == flops.estimate("palm", parameters=12.9e9, device=H100, **shape).flops_per_token


def test_every_formula_says_where_it_is_from() -> None:
    """And its terms stand in its text."""
    for formula in flops.FORMULAS.values():
        assert formula.version >= 1
        assert formula.source
        assert all(term in formula.text for term in formula.terms)


@pytest.mark.parametrize(
    ("device", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("A100-SXM4-40GB", "bfloat16", 312.0),
        ("NVIDIA A100 80GB PCIe", "tf32", 156.0),
        ("NVIDIA A100-PCIE-40GB", "float16", 312.0),
        ("NVIDIA A10", "bfloat16", 125.0),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "float8", 1978.9),
        ("NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "bfloat16", 989.5),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA H20", "bfloat16", 148.0),
        ("NVIDIA GH200 480GB", "bfloat16", 989.5),
        ("NVIDIA B200", "bfloat16", 2250.0),
        ("NVIDIA GB200", "bfloat16", 2500.0),
        ("NVIDIA B300 SXM6 AC", "bfloat16", 2250.0),
        ("NVIDIA GB300", "float8", 5000.0),
        ("Tesla V100-SXM2-32GB", "float16", 125.0),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("AMD Instinct MI250X", "bfloat16", 191.5),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        ("AMD Instinct MI325X", "float8", 2614.9),
        ("AMD Instinct MI355X", "bfloat16", 2516.6),
    ],
)
def test_a_peak_is_that_of_the_part(device: str, dtype: str, teraflops: float) -> None:
    """Dense, in TFLOP/s; parts whose names are alike are not the same."""
    peak = find_peak(device, dtype)
    assert peak is not None
    assert peak.flops == teraflops * 1e12
    assert peak.source


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("", "bfloat16"),
        ("cpu", "bfloat16"),
        ("NVIDIA X900", "bfloat16"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bfloat16"),
        ("NVIDIA A100-SXM-64GB", "bfloat16"),
        ("NVIDIA A100X", "bfloat16"),
        ("NVIDIA H100", "bfloat16"),
        ("NVIDIA H200X", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("Tesla V100-SXM2-32GB", "bfloat16"),
        ("AMD Radeon RX 7900 XTX", "bfloat16"),
        ("NVIDIA H100 80GB HBM3", "int8"),
    ],
)
def test_what_is_not_known_is_not_guessed(device: str, dtype: str) -> None:
    """A slice of a GPU, a part of another size, a number format that it does not have."""
    assert find_peak(device, dtype) is None


def test_an_unknown_device_has_no_utilisation_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """An A100's peak would show 88 % as 12 %, or the other way round."""
    with caplog.at_level(logging.WARNING):
        unknown, *_ = (flops.estimate("6n", parameters=7e9, device="NVIDIA X900") for _ in range(3))
    assert unknown.peak_flops is None
    assert unknown.mfu(1e9) is None
    (record,) = caplog.records
    assert "the peak of 'NVIDIA X900' for bfloat16 is not known" in record.getMessage()
    assert "peak_flops" in record.getMessage()


def test_only_rank_zero_warns(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand ranks would say the same."""
    monkeypatch.setenv("RANK", "3")
    flops.estimate("6n", parameters=7e9, device="NVIDIA X900")
    assert not caplog.records


def test_the_caller_may_know_the_peak(caplog: pytest.LogCaptureFixture) -> None:
    """Then that counts, and it is said where it is from."""
    given = flops.estimate("6n", parameters=1e9, device="NVIDIA X900", peak_flops=1e15, devices=2)
    assert given.mfu(1e5) == 1e5 * 6e9 / 2e15
    assert given.peak_source == "given by the caller"
    assert not caplog.records


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bfloat16"),
        (torch.float8_e4m3fn, "float8"),
        ("float8_e5m2", "float8"),
        ("tf32", "tf32"),
        ("BFloat16", "bfloat16"),
    ],
)
def test_a_dtype_is_torchs_or_its_name(dtype: object, name: str) -> None:
    """All kinds of float8 are equally fast."""
    assert flops.estimate("6n", parameters=1, device=H100, dtype=dtype).dtype == name


def test_the_number_of_devices_is_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each rank."""
    monkeypatch.setenv("WORLD_SIZE", "1024")
    assert flops.estimate("6n", parameters=1, device=H100).devices == 1024


@pytest.mark.parametrize(
    ("formula", "terms", "message"),
    [
        ("7n", {"parameters": 1}, "6n, 6n_attention, palm, megatron, moe"),
        ("6n", {}, "give parameters"),
        ("6n", {"parameters": 1, "layers": 2}, "give parameters"),
        ("palm", {"parameters": 1}, "give parameters, layers, heads, head_dim, sequence"),
        ("6n", {"parameters": -1}, "parameters is -1"),
        ("6n", {"parameters": float("nan")}, "parameters is nan"),
        ("6n", {"parameters": 1, "peak_flops": 0}, "peak_flops is 0"),
        ("6n", {"parameters": 1, "devices": 0}, "devices is 0"),
    ],
)
def test_a_wrong_call_is_refused(formula: str, terms: dict[str, Any], message: str) -> None:
    """With what is right."""
    with pytest.raises(llmtrack.UsageError, match=message):
        flops.estimate(formula, device=H100, **terms)


def test_the_start_record_has_what_it_takes_to_compute_again(tmp_path: Path) -> None:
    """Formula, version, terms, peak and devices, as JSON."""
    palm = flops.estimate("palm", parameters=175e9, device=H100, devices=8, **GPT3)
    with llmtrack.open_run(tmp_path, flops=palm):
        pass
    (start, _) = read_segment(find_segment(tmp_path))["segments"]
    kept = json.loads(start["flops"])
    assert (kept["formula"], kept["version"], kept["terms"]) == ("palm", 1, {"parameters": 175e9, **GPT3})
    assert kept["peak_flops"] == 989.4e12
    assert kept["flops_per_token"] / (kept["peak_flops"] * kept["devices"]) * 1e4 == pytest.approx(palm.mfu(1e4))


def test_flops_need_no_torch() -> None:
    """A trainer in JAX names its device."""
    script = "import sys, llmtrack; llmtrack.flops.estimate('6n', parameters=1); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout.split()
