"""What GPUs can do at most: FLOP/s with dense matrices, by the name that torch gives a device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_TERA: Final = 1e12


@dataclass(frozen=True)
class Peak:
    """The fastest that a device multiplies dense matrices, in one number format.

    Attributes:
        flops: FLOP/s, without structured sparsity and with accumulation in float32.
        source: Where the figure is from.
    """

    flops: float
    source: str


@dataclass(frozen=True)
class _Row:
    """A device.

    Attributes:
        name: Pattern of the whole name that torch gives it. Unlike parts share parts of their names (A10 and A100,
            H20 and H200, H200 and GH200), and the same name with another memory size may be another part.
        source: Vendor's document.
        teraflops: Number format -> TFLOP/s.
    """

    name: str
    source: str
    teraflops: dict[str, float]


def _half(value: float, **others: float) -> dict[str, float]:
    return {"bfloat16": value, "float16": value, **others}


_NVIDIA: Final = r"(?:NVIDIA |Tesla |GeForce |NVIDIA GeForce |Quadro )?"
_HALVED: Final = "half of the figure with sparsity"  # which is twice what dense matrices get
_NVIDIA_ROWS: Final = (
    _Row(r"V100-SXM2-(16|32)GB", "NVIDIA V100 data sheet", {"float16": 125.0}),
    _Row(r"V100-PCIE-(16|32)GB", "NVIDIA V100 data sheet", {"float16": 112.0}),
    _Row(r"T4", "NVIDIA T4 data sheet", {"float16": 65.0}),
    _Row(r"A10", "NVIDIA A10 data sheet", _half(125.0, tf32=62.5)),
    _Row(r"A30", "NVIDIA A30 data sheet", _half(165.0, tf32=82.0)),
    _Row(r"A40", "NVIDIA A40 data sheet", _half(149.7, tf32=74.8)),
    _Row(r"RTX A6000", "NVIDIA RTX A6000 data sheet", _half(154.8, tf32=77.4)),
    _Row(r"A[18]00(-SXM4?| 80GB PCIe|-PCIE)?(-[48]0GB)?", "NVIDIA A100 data sheet", _half(312.0, tf32=156.0)),
    _Row(r"L4", f"NVIDIA L4 data sheet, {_HALVED}", _half(121.0, float8=242.5, tf32=60.0)),
    _Row(r"L40", "NVIDIA L40 data sheet", _half(181.05, float8=362.0, tf32=90.5)),
    _Row(r"L40S", "NVIDIA L40S data sheet", _half(362.05, float8=733.0, tf32=183.0)),
    _Row(r"RTX 6000 Ada Generation", "NVIDIA Ada architecture white paper", _half(364.2, float8=728.5, tf32=182.1)),
    _Row(r"RTX 3090", "NVIDIA Ampere GA102 white paper", _half(71.0, tf32=35.6)),
    _Row(r"RTX 4090", "NVIDIA Ada architecture white paper", _half(165.2, float8=330.3, tf32=82.6)),
    _Row(r"RTX 5090", "NVIDIA RTX Blackwell architecture white paper", _half(209.5, float8=419.0, tf32=104.8)),
    _Row(
        r"(H[18]00( 80GB HBM3| SXM5|-SXM5-80GB)|H800)",
        "NVIDIA H100 white paper, SXM5",
        _half(989.4, float8=1978.9, tf32=494.7),
    ),
    _Row(r"H[18]00 PCIe", "NVIDIA H100 white paper, PCIe", _half(756.0, float8=1513.0, tf32=378.0)),
    _Row(
        r"H100 NVL",
        f"NVIDIA H100 NVL data sheet, {_HALVED}",
        _half(835.5, float8=1670.5, tf32=417.5),
    ),
    _Row(r"H200", f"NVIDIA H200 data sheet, {_HALVED}", _half(989.5, float8=1979.0, tf32=494.5)),
    _Row(
        r"H200 NVL",
        f"NVIDIA H200 data sheet, {_HALVED}",
        _half(835.5, float8=1670.5, tf32=417.5),
    ),
    _Row(r"H20(-3e)?", "NVIDIA H20 data sheet", _half(148.0, float8=296.0, tf32=74.0)),
    _Row(
        r"GH200( 480GB| 120GB| 144G HBM3e| 96GB HBM3)?",
        f"NVIDIA GH200 data sheet, {_HALVED}",
        _half(989.5, float8=1979.0, tf32=494.5),
    ),
    _Row(
        r"B200( SXM.*)?",
        f"NVIDIA HGX B200 data sheet, an eighth, {_HALVED}",
        _half(2250.0, float8=4500.0, float4=9000.0, tf32=1125.0),
    ),
    _Row(
        r"B300( SXM.*)?",
        f"NVIDIA HGX B300 data sheet, an eighth, {_HALVED}",
        _half(2250.0, float8=4500.0, tf32=1125.0),
    ),
    _Row(
        r"GB200",
        f"NVIDIA GB200 NVL72 data sheet, a 72nd, {_HALVED}",
        _half(2500.0, float8=5000.0, float4=10000.0, tf32=1250.0),
    ),
    _Row(
        r"GB300",
        f"NVIDIA GB300 NVL72 data sheet, a 72nd, {_HALVED}",
        _half(2500.0, float8=5000.0, tf32=1250.0),
    ),
)
_AMD: Final = r"AMD Instinct "
_AMD_ROWS: Final = (
    _Row(r"MI100", "AMD Instinct MI100 product page", {"bfloat16": 92.3, "float16": 184.6}),
    _Row(r"MI210", "AMD Instinct MI210 product page", _half(181.0)),
    # torch sees each of the two dies of a package as a device.
    _Row(r"MI250", "AMD Instinct MI250 product page, one of two dies", _half(181.05)),
    _Row(r"MI250X", "AMD Instinct MI250X product page, one of two dies", _half(191.5)),
    _Row(r"MI300A", "AMD Instinct MI300A product page", _half(980.6, float8=1961.2, tf32=490.3)),
    _Row(r"MI300X", "AMD Instinct MI300X product page", _half(1307.4, float8=2614.9, tf32=653.7)),
    _Row(r"MI325X", "AMD Instinct MI325X product page", _half(1307.4, float8=2614.9, tf32=653.7)),
    _Row(r"MI350X", "AMD Instinct MI350X product page", _half(2306.9, float8=4613.7, float4=9227.5)),
    _Row(r"MI355X", "AMD Instinct MI355X product page", _half(2516.6, float8=5033.2, float4=10066.3)),
)


def find_peak(device: str, dtype: str) -> Peak | None:
    """Return the peak of a device for a number format; None where it is not known, and never a guess.

    Args:
        device: As `torch.cuda.get_device_name()` says it. A slice of a GPU (MIG) is another device.
        dtype: bfloat16, float16, float8, float4 or tf32.
    """
    for maker, rows in ((_NVIDIA, _NVIDIA_ROWS), (_AMD, _AMD_ROWS)):
        for row in rows:
            if re.fullmatch(maker + row.name, device.strip(), re.IGNORECASE):
                value = row.teraflops.get(dtype)
                return None if value is None else Peak(value * _TERA, row.source)
    return None
