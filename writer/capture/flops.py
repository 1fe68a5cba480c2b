"""Model FLOPs utilisation: what a token costs, by formulas with a name, a version and a source, and what a GPU can do.

The formula, its terms and the peak stand in the start record of a segment, so that old rows can be computed again when
somebody finds that the peak was wrong.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from llmtrack.writer.errors import UsageError
from llmtrack.writer.ranks import rank, world_size

from .peaks import Peak, find_peak

_log = logging.getLogger("llmtrack")


@dataclass(frozen=True)
class Formula:
    """FLOPs that training takes a token, forward and backward, without recomputed activations.

    Attributes:
        name: For `estimate`.
        version: Goes up when the formula changes.
        source: Where it is from.
        text: In the terms' names.
        terms: What it needs to know.
        per_token: The terms -> FLOPs.
    """

    name: str
    version: int
    source: str
    text: str
    terms: tuple[str, ...]
    per_token: Callable[..., float]


FORMULAS: Final = {
    formula.name: formula
    for formula in (
        Formula(
            "6n",
            1,
            "Kaplan et al. 2020, Scaling Laws for Neural Language Models, section 2.1",
            "6 parameters",
            ("parameters",),
            lambda parameters: 6 * parameters,
        ),
        Formula(
            "6n_attention",
            1,
            "Kaplan et al. 2020, table 1, three times the forward pass: a causal mask leaves half of the attention",
            "6 parameters + 6 layers heads head_dim sequence",
            ("parameters", "layers", "heads", "head_dim", "sequence"),
            lambda parameters, layers, heads, head_dim, sequence: (
                6 * parameters + 6 * layers * heads * head_dim * sequence
            ),
        ),
        Formula(
            "palm",
            1,
            "Chowdhery et al. 2022, PaLM, appendix B",
            "6 parameters + 12 layers heads head_dim sequence",
            ("parameters", "layers", "heads", "head_dim", "sequence"),
            lambda parameters, layers, heads, head_dim, sequence: (
                6 * parameters + 12 * layers * heads * head_dim * sequence
            ),
        ),
        Formula(
            "megatron",
            1,
            "Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, model FLOPs "
            "(Narayanan et al. 2021 with three passes in place of four)",
            "72 layers hidden^2 (1 + sequence / (6 hidden) + vocabulary / (12 hidden layers))",
            ("layers", "hidden", "sequence", "vocabulary"),
            lambda layers, hidden, sequence, vocabulary: (
                72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (12 * hidden * layers))
            ),
        ),
        Formula(
            "moe",
            1,
            "PaLM's, with the parameters that a token passes through: router, chosen and shared experts, the rest",
            "6 active_parameters + 12 layers heads head_dim sequence",
            ("active_parameters", "layers", "heads", "head_dim", "sequence"),
            lambda active_parameters, layers, heads, head_dim, sequence: (
                6 * active_parameters + 12 * layers * heads * head_dim * sequence
            ),
        ),
    )
}


@dataclass(frozen=True)
class Flops:
    """What a token costs, and what the devices of a job can do; made by `estimate`.

    Attributes:
        formula: Its name.
        version: Its version.
        source: Where it is from.
        terms: What went into it.
        flops_per_token: What came out.
        device: Name of the device; None without one.
        dtype: Number format of the matrices.
        peak_flops: FLOP/s of one device with dense matrices; None where it is not known.
        peak_source: Where that is from.
        devices: How many train together.
    """

    formula: str
    version: int
    source: str
    terms: Mapping[str, float]
    flops_per_token: float
    device: str | None
    dtype: str
    peak_flops: float | None
    peak_source: str | None
    devices: int

    def mfu(self, tokens_per_s: float) -> float | None:
        """Return the share of the peak that is used at this speed of all devices together; None without a peak."""
        if self.peak_flops is None:
            return None
        return tokens_per_s * self.flops_per_token / (self.peak_flops * self.devices)

    def to_json(self) -> str:
        """Return what the start record of a segment holds."""
        return json.dumps(asdict(self))


def estimate(
    formula: str,
    *,
    dtype: object = "bfloat16",
    device: str | None = None,
    peak_flops: float | None = None,
    devices: int | None = None,
    **terms: float,
) -> Flops:
    """Return what a token costs by a formula, and what the devices of this job can do.

    Where the device's peak is not known, there is no utilisation and one warning: a peak that was guessed would be
    believed. ``peak_flops`` says it then.

    Args:
        formula: 6n, 6n_attention, palm, megatron or moe.
        dtype: Number format in which the matrices are multiplied: a torch dtype or its name, or tf32.
        device: Name of the device; default: that of the current CUDA device.
        peak_flops: FLOP/s of one device with dense matrices, in place of the table's.
        devices: How many train together; default: the world size.
        terms: What the formula needs: parameters, layers, heads, head_dim, sequence, hidden, vocabulary,
            active_parameters.

    Raises:
        UsageError: There is no such formula, it lacks a term or has one more, or a figure is not positive.
    """
    known = FORMULAS.get(formula)
    if known is None:
        raise UsageError(f"no formula is called {formula!r}", hint=f"there are {', '.join(FORMULAS)}")
    if terms.keys() != set(known.terms):
        raise UsageError(
            f"{formula} = {known.text}, and was given {', '.join(sorted(terms)) or 'nothing'}",
            hint=f"give {', '.join(known.terms)}",
        )
    for name, value in (*terms.items(), ("peak_flops", peak_flops), ("devices", devices)):
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise UsageError(f"{name} is {value!r}", hint="give a positive number")
    where, kind = device or _current_device(), _dtype_name(dtype)
    peak = Peak(peak_flops, "given by the caller") if peak_flops is not None else find_peak(where or "", kind)
    if peak is None:
        _warn_once(where, kind)
    return Flops(
        formula=known.name,
        version=known.version,
        source=known.source,
        terms=dict(terms),
        flops_per_token=float(known.per_token(**terms)),
        device=where,
        dtype=kind,
        peak_flops=None if peak is None else peak.flops,
        peak_source=None if peak is None else peak.source,
        devices=world_size() if devices is None else devices,
    )


def _current_device() -> str | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())


def _dtype_name(dtype: object) -> str:
    """Return the name of a number format: all kinds of float8 are equally fast."""
    name = str(dtype).removeprefix("torch.").lower()
    return next((short for short in ("float8", "float4") if name.startswith(short)), name)


_warned: set[tuple[str | None, str]] = set()


def _warn_once(device: str | None, dtype: str) -> None:
    if (device, dtype) not in _warned and rank() == 0:
        _warned.add((device, dtype))
        what = f"the peak of {device!r} for {dtype} is not known" if device else "there is no CUDA device"
        _log.warning("llmtrack: %s, so no MFU is logged; estimate(..., peak_flops=...) gives it", what)
