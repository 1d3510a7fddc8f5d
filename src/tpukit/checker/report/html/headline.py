"""The first thing on the page: does it fit, how long is a step, what holds it back."""

from typing import Any

from ....hardware.figure import bytes_text, seconds_text
from ....pages.markup import Markup, join
from ....pages.parts import Mood, badge, card, headline
from ..schema import Report

BOUND_BY = {
    "matrix": "the matrix unit",
    "hbm": "HBM bandwidth",
    "vector": "VMEM and the vector unit",
    "kernel": "Pallas kernels",
    "ici": "the links between chips",
    "dcn": "the network between slices",
    "host": "host memory",
    "overhead": "starting ops",
}
_NETWORKS = ("ici", "dcn")
_VERDICTS: dict[str, tuple[str, Mood]] = {
    "fits": ("FITS", "good"),
    "does not fit": ("DOES NOT FIT", "bad"),
}


def report_headline(report: Report) -> Markup:
    """Verdict, what was checked, and the four figures everybody asks for."""
    memory = report.get("memory")
    return headline(
        report.get("program") or "program",
        f"on {(report.get('slice') or {}).get('name') or 'an unnamed slice'}",
        verdict=_VERDICTS.get(report.get("verdict") or "", ("COULD NOT TELL", "unsure")),
        lead=_sentence(memory) if memory else "",
        cards=_cards(report),
    )


def binding_constraint(report: Report) -> tuple[str, str, str]:
    """What holds the program back, how much, and where that is known from."""
    memory, prediction = report.get("memory"), report.get("prediction")
    if report.get("verdict") == "does not fit" and memory:
        largest = max(memory["purposes"], key=lambda name: memory["purposes"][name], default="")
        amount = bytes_text(memory["purposes"].get(largest, 0))
        return "HBM capacity", f"most of it is {largest}: {amount}", "compiler"
    if not prediction:
        return "–", _why_no_step(report), ""
    seconds: dict[str, float] = prediction["seconds_by_cause"]
    cause = max(seconds, key=lambda name: seconds[name])
    share = f"{seconds[cause] / prediction['step_time_s']:.0%} of the step"
    waited = [row for row in report.get("collectives") or () if row["exposed_s"] > 0]
    if cause in _NETWORKS and waited:
        share += f", most in {waited[0]['kind']} over {waited[0]['group_size']} devices"
    return BOUND_BY.get(cause, cause), share, "model"


def _sentence(memory: dict[str, Any]) -> Markup:
    need, have = memory["total_bytes"], memory.get("usable_bytes")
    words = f"{bytes_text(need)} of HBM per device"
    if have:
        left = bytes_text(abs(have - need))
        rest = f"{left} free" if memory["fits"] else f"{left} too much"
        words = (
            f"The compiler plans {bytes_text(need)} of {bytes_text(have)} HBM per device "
            f"({need / have:.1%}): {rest}."
        )
    return join(words, " ", badge(memory.get("origin", "compiler")))


def _cards(report: Report) -> list[Markup]:
    prediction = report.get("prediction")
    what, why, origin = binding_constraint(report)
    bound = card("Held back by", what, why, origin)
    if not prediction:
        return [card("Predicted step", "–", _why_no_step(report)), bound]
    low, high = seconds_text(prediction["low_s"]), seconds_text(prediction["high_s"])
    capture = report.get("capture") or {}
    if len(capture.get("programs") or ()) > 1 and capture["step_time_s"]["value"] is not None:
        return [*_cards_of_several(capture), bound]
    rate, mfu = prediction.get("tokens_per_s_per_chip"), prediction.get("mfu")
    examples = prediction.get("examples_per_s_per_chip")
    unit, rate = ("Tokens", rate) if examples is None else ("Examples", examples)
    not_tokens = "the program does not say how many tokens a step has"
    no_flops = (capture.get("mfu") or {}).get("reason") or (
        "the program does not say how many FLOPs its model has"
    )
    return [
        card(
            "Predicted step", seconds_text(prediction["step_time_s"]), f"{low} to {high}", "model"
        ),
        card("MFU", f"{mfu:.1%}", prediction["mfu_convention"], "model")
        if mfu is not None
        else card("MFU", "–", no_flops),
        card(f"{unit}/s/chip", f"{rate:,.0f}", _chips_words(report), "model")
        if rate is not None
        else card(f"{unit}/s/chip", "–", not_tokens),
        bound,
    ]


def _cards_of_several(capture: dict[str, Any]) -> list[Markup]:
    """Return the figures of a captured step that consists of several programs."""
    mfu = capture["mfu"]
    runs = " + ".join(f"{one['calls']} × {one['name']}" for one in capture["programs"])
    return [
        card("Predicted step", seconds_text(capture["step_time_s"]["value"]), runs, "model"),
        card("MFU", "–", mfu["reason"])
        if mfu["value"] is None
        else card("MFU", f"{mfu['value']:.1%}", capture["mfu_counted"], mfu["origin"]),
    ]


def _why_no_step(report: Report) -> str:
    return report.get("no_prediction") or "the check stopped at the verdict on memory"


def _chips_words(report: Report) -> str:
    chips = (report.get("slice") or {}).get("chips")
    return f"{chips:,} chips" if chips else ""
