"""What measured steps say of a platform, for people: text of at most 80 columns."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpgo.base.messages import pluralize, printable
from hpgo.base.tables import plain
from hpgo.base.units import format_seconds
from hpgo.llm.platform import usual_error

if TYPE_CHECKING:
    from hpgo.llm.measured_steps import PlatformFit

WIDTH = 80


def lines(fit: PlatformFit, width: int = WIDTH) -> list[str]:
    """The whole report."""
    platform, (computing, exchange) = fit.platform, fit.platform.factors
    rows = [
        (
            place,
            format_seconds(one.measured_s),
            format_seconds(one.predicted.step_s),
            _off(one.predicted.step_s, one.measured_s),
            format_seconds(foretold_s),
            _off(foretold_s, one.measured_s),
        )
        for place, (one, foretold_s) in enumerate(zip(fit.steps, fit.foretold_s, strict=True), start=1)
    ]
    alike = platform.computing == platform.exchange
    took = (
        f"a step takes {platform.computing:.3g} times as long as by terms"
        if alike
        else f"computing takes {platform.computing:.3g} times as long as by terms,"
        f" exchange {platform.exchange:.3g} times"
    )
    followed = f"{computing:.3g}" if alike else f"{computing:.3g} and {exchange:.3g}"
    before = usual_error(fit.steps[0].cluster)
    said = [
        (
            f"{printable(platform.device)}, {pluralize(platform.steps, 'step')}: {took}; single steps are"
            f" {100 * platform.spread:.0f} % off that."
        ),
        f"({fit.note})",
        (
            f"Part of that is the steps' own, not the platform's: it is followed as {followed}, to the power of"
            f" {platform.trust:.2f}. Other steps here are expected to be {100 * platform.error:.0f} % off, where they"
            f" are {100 * before:.0f} % without what was measured."
        ),
    ]
    return [
        *plain(["step", "measured", "by terms", "off", "here", "off"], rows, width),
        "",
        *(line for one in said for line in textwrap.wrap(one, width)),
    ]


def document(fit: PlatformFit) -> dict[str, object]:
    """All of it for JSON."""
    steps = [
        {
            "model": one.model.name,
            "way": asdict(one.predicted.parallelism),
            "measured_s": one.measured_s,
            "predicted_s": one.predicted.step_s,
            "foretold_s": foretold_s,
        }
        for one, foretold_s in zip(fit.steps, fit.foretold_s, strict=True)
    ]
    return {"platform": asdict(fit.platform), "factors": fit.platform.factors, "note": fit.note, "steps": steps}


def _off(foretold_s: float, measured_s: float) -> str:
    return f"{100 * (foretold_s / measured_s - 1):+.1f} %"
