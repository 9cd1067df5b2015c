"""Report of the fit of a platform to measured steps, as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpgo.base.messages import pluralize, printable
from hpgo.base.tables import plain
from hpgo.base.units import format_seconds
from hpgo.llm.term_factors import TERMS

if TYPE_CHECKING:
    from hpgo.llm.measured_steps import MeasuredStep
    from hpgo.llm.platform_fit import PlatformFit

WIDTH = 80
_MOVED = 0.01
"""Smallest deviation of a factor from 1 that the report lists."""


def lines(fit: PlatformFit, width: int = WIDTH) -> list[str]:
    """Return the lines of the report: errors, the factors that moved, then each step with its estimates."""
    platform = fit.platform
    rows = [
        (
            place,
            format_seconds(one.measured_s),
            format_seconds(one.predicted.step_s),
            _off(one.predicted.step_s, one.measured_s),
            format_seconds(fitted_s),
            _off(fitted_s, one.measured_s),
        )
        for place, (one, fitted_s) in enumerate(zip(fit.steps, fit.fitted_s, strict=True), start=1)
    ]
    moved = [
        (
            TERMS[one.term].label + (f", {printable(one.model)}" if one.model else ""),
            f"{one.factor:.3f}×",
            _spread(TERMS[one.term].prior_sd),
            _spread(one.sd),
        )
        for one in platform.terms
        if abs(one.factor - 1) > _MOVED
    ]
    errors = f"{100 * fit.error_before:.1f} % without a platform, {100 * fit.error_fitted:.1f} % with it"
    if platform.steps > 1:
        errors += f", {100 * fit.error_left_out:.1f} % if each step is predicted from the others"
    facts = [
        ("Steps", fit.note),
        ("Error", errors),
        ("Expected", f"± {100 * platform.error:.0f} % on average for other steps on this platform"),
    ]
    stack = platform.software_stack
    facts += [] if stack.name == "default" else [("Stack", printable(f"{stack.name}: {stack.title}"))]
    terms = plain(["Time of", "factor", "± before", "± now"], moved, width)
    return [
        f"Platform {printable(platform.device)}, fitted to {pluralize(len(fit.steps), 'measured step')}",
        "",
        *(
            line
            for label, value in facts
            for line in textwrap.wrap(value, width, initial_indent=label.ljust(10), subsequent_indent=" " * 10)
        ),
        "",
        *(terms if moved else [f"No term moved by more than {100 * _MOVED:.0f} %."]),
        "",
        *plain(["Step", "measured", "estimated", "error", "with platform", "error"], rows, width),
        *_sources(fit.steps, width),
    ]


def document(fit: PlatformFit) -> dict[str, object]:
    """Return the platform and its steps, for JSON."""
    steps = [
        {
            "model": one.model.name,
            "parallelism": asdict(one.predicted.parallelism),
            "measured_s": one.measured_s,
            "predicted_s": one.predicted.step_s,
            "fitted_s": fitted_s,
            "source": one.source,
        }
        for one, fitted_s in zip(fit.steps, fit.fitted_s, strict=True)
    ]
    return {
        "platform": asdict(fit.platform),
        "prior_sd": {name: term.prior_sd for name, term in TERMS.items()},
        "note": fit.note,
        "error_before": fit.error_before,
        "error_fitted": fit.error_fitted,
        "error_left_out": fit.error_left_out,
        "steps": steps,
    }


def _sources(steps: tuple[MeasuredStep, ...], width: int) -> list[str]:
    """Return a line for each step that was read from a log: what was read there."""
    said = [f"Step {place}: {printable(one.source)}" for place, one in enumerate(steps, start=1) if one.source]
    wrapped = [line for text in said for line in textwrap.wrap(text, width, subsequent_indent="  ")]
    return ["", *wrapped] if said else []


def _spread(sd: float) -> str:
    return f"{100 * sd:.1f} %"


def _off(predicted_s: float, measured_s: float) -> str:
    return f"{100 * (predicted_s / measured_s - 1):+.1f} %"
