"""Report of the fit of a platform to measured steps, as text of at most 80 columns."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpgo.base.messages import pluralize, printable
from hpgo.base.tables import plain
from hpgo.base.units import format_seconds

if TYPE_CHECKING:
    from hpgo.llm.measured_steps import PlatformFit

WIDTH = 80


def lines(fit: PlatformFit, width: int = WIDTH) -> list[str]:
    """Return the lines of the report: the platform's factors and error, then each step with its estimates."""
    platform, (computing, exchange) = fit.platform, fit.platform.factors
    rows = [
        (
            place,
            format_seconds(one.measured_s),
            format_seconds(one.predicted.step_s),
            _off(one.predicted.step_s, one.measured_s),
            format_seconds(predicted_s),
            _off(predicted_s, one.measured_s),
        )
        for place, (one, predicted_s) in enumerate(zip(fit.steps, fit.foretold_s, strict=True), start=1)
    ]
    # The factors in use differ from the measured ones by the exponent. Both are printed, because users compare the
    # measured ones with their own division.
    alike = platform.computing == platform.exchange
    if alike:
        used, measured = f"{computing:.3g}× on all terms", f"{platform.computing:.3g}×"
    else:
        used = f"{computing:.3g}× on computation, {exchange:.3g}× on communication"
        measured = f"{platform.computing:.3g}× and {platform.exchange:.3g}×"
    share = f"measured {measured}, applied with exponent {platform.trust:.2f}: the rest belongs to single steps"
    error = f"± {100 * platform.error:.0f} % expected for other steps on this platform"
    facts = [
        ("Factor" if alike else "Factors", used),
        ("", share),
        ("", fit.note),
        ("Error", error),
        ("Spread", f"{100 * platform.spread:.0f} % between single steps (standard deviation)"),
    ]
    columns = ["Step", "measured", "estimated", "error", "with platform", "error"]
    return [
        f"Platform {printable(platform.device)}, fitted to {pluralize(platform.steps, 'measured step')}",
        "",
        *(
            line
            for label, value in facts
            for line in textwrap.wrap(value, width, initial_indent=label.ljust(9), subsequent_indent=" " * 9)
        ),
        "",
        *plain(columns, rows, width),
    ]


def document(fit: PlatformFit) -> dict[str, object]:
    """Return the platform and its steps, for JSON."""
    steps = [
        {
            "model": one.model.name,
            "way": asdict(one.predicted.parallelism),
            "measured_s": one.measured_s,
            "predicted_s": one.predicted.step_s,
            "foretold_s": fitted_s,
        }
        for one, fitted_s in zip(fit.steps, fit.foretold_s, strict=True)
    ]
    return {"platform": asdict(fit.platform), "factors": fit.platform.factors, "note": fit.note, "steps": steps}


def _off(predicted_s: float, measured_s: float) -> str:
    return f"{100 * (predicted_s / measured_s - 1):+.1f} %"
