"""List the flags of the installed jaxlib and libtpu by probing their own parsers.

Candidate names come from the libraries. The parser decides whether a name is a flag and of which
type: it gets every name with a few values, and its complaints are read.
"""

import re
from collections.abc import Container, Iterable, Mapping

from ...errors import TPUBackendError
from ..child import ChildError, offline_environment, run_child
from ..files import temporary_folder
from .flag import NEGATIVE, TRIAL_VALUES, WORD, Flag, Parser, infer_type, listed_choices

PROBE = "tpukit.runtime.flags.probe"
TIMEOUT_S = 180.0
# Orders to the parser itself (read a file, print help, stop), not settings of the compiler.
PARSER_ORDERS = frozenset(
    {"flagfile", "fromenv", "tryfromenv", "undefok", "version", "only_check_args"}
)
# jaxlib cuts a message off at 15,000 characters.
NAMES_PER_LOT = 100
# libtpu forgives an unknown flag that comes from a file, so a file is only for what is too long.
LONGEST_VARIABLE = 100_000

_LIBTPU_COMPLAINT = re.compile(
    r"Illegal value '(?P<value>[^']*)' specified for flag '(?P<name>\w+)'(?P<hint>.*)"
)
_LIBTPU_UNKNOWN = re.compile(r"Unknown command line flag '(\w+)'")
_XLA_COMPLAINT = re.compile(r"Couldn't interpret value (?P<value>\S*) for flag (?P<name>\w+)\.")
_XLA_UNKNOWN = re.compile(r"Unknown flags? in XLA_FLAGS: (.*)")
_XLA_HELP = re.compile(r"^\t--(?P<name>\w+)=(?P<default>.*?)\s*\t\w+\t(?P<text>.+)$", re.MULTILINE)
_NO_DEFAULT = {
    "libtpu": "libtpu writes down the defaults of its compiler flags only",
    "xla": "jaxlib says no default for lists and for what it keeps outside DebugOptions",
}

Complaints = dict[str, dict[str, str]]


def ask_libtpu(settings: Iterable[tuple[str, str]]) -> tuple[Complaints, set[str]]:
    """Pass `settings` to libtpu's parser.

    Returns:
        Its complaint about each (name, value) that it refused, and the unknown names.
    """
    with temporary_folder("tpukit-flags-") as folder:
        text = " ".join(f"--{name}={value}" for name, value in settings)
        if len(text) > LONGEST_VARIABLE:
            path = folder / "flags.txt"
            path.write_text(text.replace(" ", "\n"))
            text = f"--flagfile={path}"
        environment = offline_environment({"LIBTPU_INIT_ARGS": text})
        try:
            run_child(
                PROBE, {"question": "start libtpu"}, timeout_s=TIMEOUT_S, environment=environment
            )
        except ChildError as error:
            if error.kind != "exit":
                raise
            return _complaints(_LIBTPU_COMPLAINT, error.log), set(
                _LIBTPU_UNKNOWN.findall(error.log)
            )
    return {}, set()


def ask_jaxlib(texts: Iterable[str]) -> list[str]:
    """Return what jaxlib's parser prints for each value of XLA_FLAGS; "" if it accepts."""
    reply = run_child(
        PROBE,
        {"question": "try on jaxlib", "texts": list(texts)},
        timeout_s=TIMEOUT_S,
        environment=offline_environment({"TF_CPP_MIN_LOG_LEVEL": "0"}),
    )
    return reply["logs"]


def read_libtpu() -> dict[str, Flag]:
    """Return every flag of the installed libtpu.

    Raises:
        MissingExtraError: libtpu is not installed.
    """
    with temporary_folder("tpukit-flags-") as folder:
        asked = {"question": "libtpu", "folder": str(folder)}
        described = run_child(PROBE, asked, timeout_s=TIMEOUT_S)
    names = [
        name
        for name in described["names"]
        if name not in PARSER_ORDERS and not name.startswith("help")
    ]
    complaints, unknown = ask_libtpu((name, value) for value in TRIAL_VALUES for name in names)
    if not complaints:
        raise TPUBackendError(
            "libtpu accepted '@@' for every flag it has, so its parser cannot be read; "
            "reinstall it with pip install 'tpukit[tpu]'."
        )
    options = frozenset(described["options"])
    flags: dict[str, Flag] = {}
    for name in sorted(set(names) - unknown):
        refused = complaints.get(name, {})
        complaint = refused.get(WORD) or described["option_complaints"].get(name, "")
        flags[name] = _make_flag(
            name,
            "libtpu",
            refused,
            described["defaults"].get(name),
            choices=listed_choices(complaint),
            compile_option=name in options,
        )
    return flags


def read_jaxlib() -> dict[str, Flag]:
    """Return every flag that the installed jaxlib reads from XLA_FLAGS."""
    described = run_child(PROBE, {"question": "jaxlib"}, timeout_s=TIMEOUT_S)
    candidates: list[str] = described["names"]
    every = " ".join(f"--{name}={value}" for value in TRIAL_VALUES for name in candidates)
    log, usage = ask_jaxlib([every, f"--xla_backend_optimization_level={WORD}"])
    complaints = _complaints(_XLA_COMPLAINT, log)
    fields = frozenset(described["fields"])
    silent = [name for name in candidates if name not in complaints]
    # Fields go alone, for many are enums, and an enum ends a parse without naming itself.
    alone = [[name] for name in silent if name in fields]
    together = _lots([name for name in silent if name not in fields])
    unknown, enums = _sort_out([*alone, *together], WORD)
    signed = [name for name, said in complaints.items() if infer_type(said) in ("int32", "int64")]
    _, picky = _sort_out(_lots(signed), NEGATIVE)  # a range of their own: only jaxlib can tell
    complaints.update((name, dict.fromkeys(TRIAL_VALUES, "")) for name in picky)
    spellings = _spell_choices({name: described["choices"].get(name, []) for name in enums})
    printed = {entry["name"]: entry for entry in list(_XLA_HELP.finditer(usage))[:-1]}  # one is cut
    flags: dict[str, Flag] = {}
    for name in candidates:
        if name in unknown:
            continue
        spelled = spellings.get(name)
        default = described["defaults"].get(name)
        help_text = printed.get(name)
        if help_text and help_text["default"] in ("true", "false"):
            default = help_text["default"]  # jaxlib's own options start from another for a few
        flags[name] = _make_flag(
            name,
            "xla",
            complaints.get(name, {}) if spelled is None else TRIAL_VALUES,
            (spelled or {}).get(default, default),
            choices=tuple((spelled or {}).values()),
            compile_option=name in fields,
            description=help_text and help_text["text"],
        )
    return flags


def _lots(names: list[str]) -> list[list[str]]:
    return [names[start : start + NAMES_PER_LOT] for start in range(0, len(names), NAMES_PER_LOT)]


def _sort_out(lots: list[list[str]], value: str) -> tuple[set[str], list[str]]:
    """Split names without a complaint into those that are no flags and those refusing `value`."""
    unknown: set[str] = set()
    refusing: list[str] = []
    while lots:
        logs = ask_jaxlib(" ".join(f"--{name}={value}" for name in lot) for lot in lots)
        asked, lots = lots, []
        for lot, log in zip(asked, logs, strict=True):
            if listed := _XLA_UNKNOWN.search(log):
                unknown |= {word[2:].partition("=")[0] for word in listed[1].split()}
            elif log and len(lot) == 1:
                refusing += lot
            elif log:
                lots += [lot[: len(lot) // 2], lot[len(lot) // 2 :]]
    return unknown, refusing


def _spell_choices(labels: Mapping[str, list[str]]) -> dict[str, dict[str, str]]:
    """Return the parser's spelling of each label of each enum."""
    asked = [(name, label) for name, known in labels.items() for label in known]
    reply = run_child(
        PROBE,
        {
            "question": "first taken by jaxlib",
            "alternatives": [
                [f"--{name}={form}" for form in _forms(label)] for name, label in asked
            ],
        },
        timeout_s=TIMEOUT_S,
    )
    spelled: dict[str, dict[str, str]] = {name: {} for name in labels}
    for (name, label), taken in zip(asked, reply["taken"], strict=True):
        if taken is not None:
            spelled[name][label] = taken.partition("=")[2]
    return spelled


def _forms(label: str) -> list[str]:
    """Return the possible spellings of an enum label: with or without prefix, in lower case."""
    words = label.split("_")
    tails = ["_".join(words[start:]) for start in range(len(words))]
    return list(dict.fromkeys(form for tail in tails for form in (tail, tail.lower())))


def merge(jaxlib: Mapping[str, Flag], libtpu: Mapping[str, Flag]) -> dict[str, Flag]:
    """Merge both tables; a flag of both parsers keeps libtpu's type and default."""
    merged = dict(jaxlib)
    for name, flag in libtpu.items():
        other = jaxlib.get(name)
        if other is not None:
            flag = Flag(
                name=name,
                parsers=("libtpu", "xla"),
                type=flag.type,
                default=flag.default if flag.default is not None else other.default,
                default_reason=flag.default_reason and other.default_reason,
                choices=flag.choices,
                compile_option=flag.compile_option or other.compile_option,
                description=other.description,
            )
        merged[name] = flag
    return dict(sorted(merged.items()))


def _make_flag(
    name: str,
    parser: Parser,
    refused: Container[str],
    default: str | None,
    *,
    choices: tuple[str, ...],
    compile_option: bool,
    description: str | None = None,
) -> Flag:
    return Flag(
        name=name,
        parsers=(parser,),
        type="enum" if choices else infer_type(refused),
        default=default,
        default_reason=_NO_DEFAULT[parser] if default is None else None,
        choices=choices,
        compile_option=compile_option,
        description=description,
    )


def _complaints(pattern: re.Pattern[str], log: str) -> Complaints:
    complaints: Complaints = {}
    for found in pattern.finditer(log):
        hint = found.groupdict().get("hint") or ""
        complaints.setdefault(found["name"], {})[found["value"]] = hint.lstrip("; ")
    return complaints
