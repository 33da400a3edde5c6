"""The numbers of a candidate as people read them, each under its provenance."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.evidence.candidate import Candidate
from autoshard.text import bytes_text, first_line, seconds_text

NOT_PREDICTED = "none"
"""Where the model has no number: it does not know what the partitioner makes of arguments alone."""


@dataclass(frozen=True, slots=True)
class CandidateTexts:
    """Texts of one candidate, "" for what nobody asked for.

    `sent` is what one device sends in one call; `measured_time` is the median of the rounds.
    """

    predicted_time: str = ""
    predicted_peak: str = ""
    predicted_sent: str = ""
    partitioned_sent: str = ""
    compiled_peak: str = ""
    compiled_temporaries: str = ""
    compiled_sent: str = ""
    measured_time: str = ""
    calls_per_s: str = ""
    reason: str = ""


def candidate_texts(candidate: Candidate) -> CandidateTexts:
    """The texts of a candidate."""
    texts = {"reason": first_line(candidate.reason)}
    if candidate.predicted is not None:
        texts["predicted_time"] = seconds_text(candidate.predicted.time_s)
        texts["predicted_peak"] = bytes_text(candidate.predicted.peak_bytes)
        texts["predicted_sent"] = bytes_text(candidate.predicted.collective_bytes)
    elif candidate.constraints == "arguments":
        texts |= dict.fromkeys(
            ("predicted_time", "predicted_peak", "predicted_sent"), NOT_PREDICTED
        )
    if candidate.partitioned is not None:
        texts["partitioned_sent"] = bytes_text(candidate.partitioned.collective_bytes)
    if candidate.compiled is not None:
        texts["compiled_peak"] = bytes_text(candidate.compiled.peak_bytes)
        texts["compiled_temporaries"] = bytes_text(candidate.compiled.temp_bytes)
        texts["compiled_sent"] = bytes_text(candidate.compiled.collective_bytes)
    if candidate.measured is not None:
        texts["measured_time"] = seconds_text(candidate.measured.median_s)
        if candidate.measured.median_s > 0:  # a clock may be too coarse for a call
            texts["calls_per_s"] = f"{1 / candidate.measured.median_s:.3g}"
    return CandidateTexts(**texts)
