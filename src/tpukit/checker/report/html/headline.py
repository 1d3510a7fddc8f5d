"""The first thing on the page: does it fit, how long is a step, what holds it back."""

from typing import Any

from ..schema import Report
from ..wording import bytes_text, seconds_text
from .markup import Html, join, tag
from .parts import badge

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


def headline(report: Report) -> Html:
    """Verdict, what was checked, and the four figures everybody asks for."""
    verdict = report.get("verdict")
    words = {"fits": ("FITS", "good"), "does not fit": ("DOES NOT FIT", "bad")}
    word, mood = words.get(verdict or "", ("COULD NOT TELL", "unsure"))
    memory = report.get("memory")
    return tag(
        "header",
        tag(
            "h1",
            tag("span", word, class_=f"verdict {mood}"),
            " ",
            tag("span", report.get("program") or "program", class_="program"),
            tag("span", " on ", _slice_words(report), class_="slice"),
        ),
        tag("p", _sentence(memory), class_="lead") if memory else "",
        tag("div", *_cards(report), class_="cards"),
        class_="headline",
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


def _sentence(memory: dict[str, Any]) -> Html:
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


def _cards(report: Report) -> list[Html]:
    prediction = report.get("prediction")
    what, why, origin = binding_constraint(report)
    bound = _card("Held back by", what, why, origin)
    if not prediction:
        return [_card("Predicted step", "–", _why_no_step(report), ""), bound]
    low, high = seconds_text(prediction["low_s"]), seconds_text(prediction["high_s"])
    rate, mfu = prediction.get("tokens_per_s_per_chip"), prediction.get("mfu")
    not_tokens = "the program does not say how many tokens a step has"
    no_flops = "the program does not say how many FLOPs its model has"
    return [
        _card(
            "Predicted step", seconds_text(prediction["step_time_s"]), f"{low} to {high}", "model"
        ),
        _card("MFU", f"{mfu:.1%}", prediction["mfu_convention"], "model")
        if mfu is not None
        else _card("MFU", "–", no_flops, ""),
        _card("Tokens/s/chip", f"{rate:,.0f}", _chips_words(report), "model")
        if rate is not None
        else _card("Tokens/s/chip", "–", not_tokens, ""),
        bound,
    ]


def _card(title: str, value: str, below: str, origin: str) -> Html:
    return tag(
        "div",
        tag("div", title, " ", badge(origin) if origin else "", class_="card-title"),
        tag("div", value, class_="card-value"),
        tag("div", below, class_="card-below"),
        class_="card",
    )


def _why_no_step(report: Report) -> str:
    return report.get("no_prediction") or "the check stopped at the verdict on memory"


def _slice_words(report: Report) -> str:
    return str((report.get("slice") or {}).get("name") or "an unnamed slice")


def _chips_words(report: Report) -> str:
    chips = (report.get("slice") or {}).get("chips")
    return f"{chips:,} chips" if chips else ""
