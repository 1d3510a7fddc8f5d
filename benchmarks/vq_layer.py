"""A synthetic layer at about 2 bits: each rung of vector quantization beside integers.

W is 512 × 512 with heavy tails, inputs are correlated and of uneven size; the error is that of the
outputs for inputs nobody calibrated with. It ranks steps; it does not predict a model's perplexity.

python benchmarks/vq_layer.py [--trellis]     (a trellis takes minutes more)
"""

import sys

import numpy as np
from claims import Claim, report

from tpukit.quantization import quantize_matrix

SIZE, TOKENS, GROUP = 512, 8192, 128


def layer() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight (in, out), inputs to calibrate with, and inputs to judge with."""
    random = np.random.default_rng(0)
    tilt = np.exp(random.normal(0, 0.5, SIZE))[:, None]
    weight = random.standard_t(5, (SIZE, SIZE)) * 0.02 * tilt**-0.3
    mixing = random.standard_normal((SIZE, 64)) / 8
    inputs = random.standard_normal((TOKENS, 64)) @ mixing.T
    inputs += 0.5 * random.standard_normal((TOKENS, SIZE))
    inputs *= np.exp(random.normal(0, 1.0, SIZE))
    return weight, inputs[: TOKENS // 2], inputs[TOKENS // 2 :]


def rounded(weight: np.ndarray, bits: int, hessian: np.ndarray | None = None) -> np.ndarray:
    """Integers of `bits` with scale and offset by 128 rows: nearest, or GPTQ with a Hessian."""
    left, made = weight.copy(), np.zeros_like(weight)
    levels = 2**bits - 1
    factor = None
    if hessian is not None:
        damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(SIZE)
        factor = np.linalg.cholesky(np.linalg.inv(damped)).T
    for row in range(SIZE):
        if row % GROUP == 0:
            part = left[row : row + GROUP]
            low = part.min(0)
            scale = (part.max(0) - low) / levels + 1e-12
        made[row] = np.clip(np.round((left[row] - low) / scale), 0, levels) * scale + low
        if factor is not None:
            lost = (left[row] - made[row]) / factor[row, row]
            left[row + 1 :] -= np.outer(factor[row, row + 1 :], lost)
    return made


def main() -> None:
    weight, calibration, held_out = layer()
    hessian = calibration.T @ calibration / len(calibration)
    outputs = ((held_out @ weight) ** 2).sum()

    def error(made: object) -> float:
        return float(((held_out @ (weight - np.asarray(made, np.float64))) ** 2).sum() / outputs)

    integers: dict[int, float] = {}
    for bits in (4, 3, 2):
        integers[bits] = error(rounded(weight, bits, hessian))
        report(
            Claim(
                f"int{bits} g128 nearest ({bits + 0.25:g} bits)", error(rounded(weight, bits)), ""
            ),
            Claim(f"int{bits} g128 GPTQ ({bits + 0.25:g} bits)", integers[bits], ""),
        )
    rungs = {
        "plain k-means": {"feedback": False, "refit": False},
        "+ weights of the inputs": {"hessian": hessian, "feedback": False, "refit": False},
        "+ error feedback": {"hessian": hessian, "refit": False},
        "+ entries and codes refined": {"hessian": hessian},
    }
    before = np.inf
    for name, options in rungs.items():
        made = quantize_matrix(weight, format="vq2", **options)
        found = error(made.dequantize())
        assert found < before, f"{name} does not lower the error: {found} after {before}"
        before = found
        last = name.startswith("+ entries")
        bar = 0.0125 if last else None
        report(Claim(f"vq2 {name} ({made.bits_per_weight:.2f} bits)", found, "", at_most=bar))
    report(Claim("the last beside GPTQ int3", before / integers[3], "×", at_most=1.0))
    others = {"vq2, Hadamard": ("vq2", True), "vq1.75": ("vq1.75", False), "vq4": ("vq4", False)}
    if "--trellis" in sys.argv:
        others["trellis2"] = ("trellis2:1024", False)
    for name, (format, hadamard) in others.items():
        made = quantize_matrix(weight, format=format, hessian=hessian, hadamard=hadamard)
        report(Claim(f"{name} ({made.bits_per_weight:.2f} bits)", error(made.dequantize()), ""))


if __name__ == "__main__":
    main()
