"""Model FLOP utilization (MFU): one formula and one convention for every place that shows it."""

# The peak that FLOPs are held against, whatever format products are computed in: with eight-bit
# products a step may pass 100 %, and stays comparable with the same model in bf16.
MFU_FORMAT = "bf16"
MFU_CONVENTION = (
    f"model FLOPs (causal attention counted once, no recomputation) over {MFU_FORMAT} peak"
)


def model_flop_utilization(
    model_flops: float | None, step_time_s: float, peak_tflops: float | None
) -> float | None:
    """Share of the peak that a step's model FLOPs reach; None where either is not known.

    Args:
        model_flops: Of one step over all devices, counted as `MFU_CONVENTION` says.
        step_time_s: How long the step takes.
        peak_tflops: In `MFU_FORMAT`, of all devices together.
    """
    if model_flops is None or not peak_tflops or step_time_s <= 0:
        return None
    return model_flops / step_time_s / (peak_tflops * 1e12)
