"""What generating gives back."""

from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table

from ...shown import Shown

Ending = Literal["end", "length", "stop"]


@dataclass(frozen=True, kw_only=True)
class Generation(Shown):
    """New tokens for every prompt. Times are measured on this machine.

    Attributes:
        tokens: The new tokens of each row, without the end token.
        ended: Why each row stopped: at an end token, a stop word, or its greatest length.
        prompt_lengths: Tokens of each prompt.
        compile_s: Seconds spent compiling; 0 where the programs were there already.
        prompt_s: Seconds for reading the prompts, up to the first new token.
        decode_s: Seconds for all further tokens.
        decode_steps: Further tokens of the longest row: each took one pass over the model.
    """

    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[Ending, ...]
    prompt_lengths: tuple[int, ...]
    compile_s: float
    prompt_s: float
    decode_s: float
    decode_steps: int

    @property
    def step_time_s(self) -> float | None:
        """Seconds a token takes each row, or None when there was only one."""
        return self.decode_s / self.decode_steps if self.decode_steps else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "tokens": [list(row) for row in self.tokens],
            "ended": list(self.ended),
            "prompt_lengths": list(self.prompt_lengths),
            "compile_s": self.compile_s,
            "prompt_s": self.prompt_s,
            "decode_s": self.decode_s,
            "step_time_s": self.step_time_s,
            "origin": "measured",
        }

    def __rich__(self) -> Table:
        table = Table("row", "prompt", "new tokens", "stopped at", title=self._headline())
        for row, (new, ended) in enumerate(zip(self.tokens, self.ended, strict=True)):
            table.add_row(str(row), str(self.prompt_lengths[row]), str(len(new)), ended)
        return table

    def _headline(self) -> str:
        step = self.step_time_s
        speed = "" if step is None else f", {len(self.tokens) / step:,.0f} tokens/s"
        return f"prompt {self.prompt_s * 1e3:,.0f} ms{speed} (measured)"
