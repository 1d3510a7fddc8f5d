"""Time of a training step by arithmetic, for thousands of candidates at once.

Rates are those of the compiler's timeline, so both model the same machine. It counts matmuls padded
to the matrix unit, attention by the blocks that its kernel visits, recomputation, HBM traffic
between matmuls, weights gathered and gradients scattered along `fsdp`, activations exchanged along
`tensor`, `expert` and `context`, gradients between slices, offloaded layer inputs, and pipeline
bubbles.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...hardware import formats
from .attention_time import joined_s, plain_s
from .candidates import PRECISIONS, Candidates
from .kept import OUT, Kept, kept_by
from .memory_model import MemorySplit
from .model_shape import LayerShape, ModelShape
from .product_groups import ProductGroup, ProductGroups
from .rates import Rates
from .step_variant import OUR_INT8, OUR_STEP, Rounding, StepSplit, StepVariant

BFLOAT16, FLOAT32 = formats.BFLOAT16.itemsize, formats.FLOAT32.itemsize  # bytes of a value


@dataclass(frozen=True)
class StepModel:
    """Inputs of the step time, for all candidates."""

    shape: ModelShape
    candidates: Candidates
    memory: MemorySplit
    rates: Rates
    sequence_length: int
    variant: StepVariant = OUR_STEP

    def split(self) -> StepSplit:
        """Return the seconds by cause, over all microbatches of a step."""
        pieces = self.candidates.microbatches
        forward, backward, again = self._products()
        attention_forward, attention_backward = self._attention()
        matrix = forward + backward + again
        attention = attention_forward + attention_backward
        compute = matrix + attention
        hbm = self._elementwise() + self._copied() + self._beside()
        # Compiled schedules hide some of the weight gathers and expose other waits. Published steps
        # are matched best if no gather is hidden (benchmarks/plan.py published), except behind the
        # sums along `tensor`, which use their own links.
        ici = np.maximum(self._weights_moved(), self._sums_moved()) + self._activations_moved()
        piece = compute + hbm + ici
        host = self._host(forward + attention_forward, piece)
        stages = self.candidates.sizes["stage"]
        bubble = piece * (stages - 1)  # once a step, one micro-batch for each other stage
        alone = StepSplit(
            matrix=matrix * pieces,
            attention=attention * pieces,
            hbm=hbm * pieces + self._update(),
            ici=ici * pieces,
            dcn=self._between_slices(forward + attention_forward, backward + attention_backward),
            host=host * pieces,
            bubble=bubble,
        )
        waiting = alone.total * self.rates.waiting_share
        return replace(alone, dcn=alone.dcn + waiting)

    @property
    def tokens(self) -> np.ndarray:
        """Tokens per device and microbatch."""
        return self.candidates.batch * self.sequence_length / self.candidates.sizes["context"]

    def _layers(self, layer: LayerShape) -> np.ndarray:
        """Return the layers of a kind per device."""
        return layer.count / self.candidates.sizes["stage"]

    @property
    def layers(self) -> np.ndarray:
        """Layers of all kinds per device."""
        return self.shape.layers_run / self.candidates.sizes["stage"]

    @cached_property
    def _kept(self) -> list[Kept]:
        return [kept_by(remat) for remat in self.candidates.remats]

    def _by_remat(self, values: list[float]) -> np.ndarray:
        return np.asarray(values)[self.candidates.remat]

    def _no_kernel(self, layer: LayerShape) -> np.ndarray:
        """Return where a window reaches past a device's shard, so that no kernel is used."""
        context = self.candidates.sizes["context"]
        far = (layer.window or 1) - 1 > self.sequence_length / context
        return self._ours & (context > 1) & far

    @property
    def _ours(self) -> bool:
        """Whether attention is tpukit's, which uses a ring instead of gathering keys."""
        return self.variant.attention == "ours"

    def _attention_again(self, layer: LayerShape) -> np.ndarray:
        """Return 1 where the backward pass runs attention's forward pass again."""
        again = self._by_remat([float(kept.attention_again) for kept in self._kept])
        nothing_kept = self._by_remat([float(not kept.everything) for kept in self._kept])
        # A state has no name that a policy could keep; its recomputation is counted in linear
        # attention.
        return np.where(self._no_kernel(layer), nothing_kept, 0.0 if layer.linear else again)

    def _products(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the seconds of matmuls with weights: forward, backward, recomputed."""
        r = self.rates
        forward = again = gradients = np.zeros(len(self.candidates))
        over_rows = self._by_precision(
            [r.narrow_gradient_time if one.weight_gradients else 1.0 for one in self._rounding]
        )
        of_experts = self._by_precision([one.experts for one in self._rounding])
        sizes = self.candidates.sizes
        for group in ProductGroups(self.shape, r, sizes, self.tokens, self._kept):
            narrow = group.in_layers & (of_experts | (not group.of_experts))
            seconds = group.flops * self.tokens / (r.bf16_flops_per_s * group.share)
            once = seconds * np.where(narrow, r.narrow_time, 1.0)
            forward = forward + once
            again = again + once * self._by_remat(group.again)
            if self._is_trained(group):
                gradients = gradients + seconds * np.where(narrow, over_rows, 1.0)
        # With few tokens a matmul is bound by reading its weights.
        least = self._layer_bytes() / r.hbm_bytes_per_s
        forward = np.maximum(forward, least)
        if self.shape.thin is None:
            gradients = np.maximum(gradients, least)
        other = self.variant.other_flops_per_token(self.shape) * self.tokens
        other = other / sizes["tensor"]
        again = again + other / (r.bf16_flops_per_s * r.streamed_share)
        return forward, forward + gradients, again

    def _is_trained(self, group: ProductGroup) -> bool:
        """Whether weights of a group have gradients; sums with LoRA matrices have them too."""
        thin = self.shape.thin
        return thin is None or (group.of_experts and thin.sums_experts)

    def _beside(self) -> np.ndarray:
        """Return the seconds of LoRA matmuls, and of decoding the frozen weights."""
        thin, r = self.shape.thin, self.rates
        if thin is None:
            return np.zeros(len(self.candidates))
        # Forward, again if nothing is kept, and two matmuls backward.
        passes = 3 + self._runs_again
        tokens = self.tokens / self.candidates.sizes["tensor"] * passes
        products = 2 * thin.products * tokens / (r.bf16_flops_per_s * r.streamed_share)
        read = thin.channels * BFLOAT16 * tokens / r.hbm_bytes_per_s
        if not thin.stored:
            return products + read
        # Codes are read and values written in each forward pass and in the backward pass.
        written = self._layer_bytes() * (2 + self._runs_again)
        return products + read + written / r.hbm_bytes_per_s

    def _attention(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of attention: forward, and backward with recomputation."""
        sizes, length = self.candidates.sizes, self.sequence_length
        share = self.tokens / (sizes["tensor"] * sizes["stage"])
        hops = (sizes["context"] - 1) * self._ours
        forward_s = backward_s = np.zeros(len(self.candidates))
        for layer in self.shape.kinds:
            ways = zip(
                plain_s(layer, self.rates, length=length, token_share=share),
                self.variant.attention_timer(layer, self.rates, length=length, token_share=share),
                joined_s(layer, self.rates, hops=hops, token_share=share),
                strict=True,
            )
            forward, backward = (
                np.where(self._no_kernel(layer), plain, kernel + joined)
                for plain, kernel, joined in ways
            )
            forward_s = forward_s + forward
            backward_s = backward_s + backward + forward * self._attention_again(layer)
        return forward_s, backward_s

    def _elementwise(self) -> np.ndarray:
        """Return the seconds of HBM traffic of norms, rotations, gates, residuals and the loss."""
        s, tensor = self.shape, self.candidates.sizes["tensor"]
        layers = ops = np.zeros(len(self.candidates))
        for k in s.kinds:
            split = 2 * (k.mixing_width + k.out_width) + k.hidden_matrices * k.hidden_width
            split += 2 * (k.heads + k.kv_heads) * k.qk_dim if k.qk_norm else 0
            stream = (12 if k.post_norms else 8) * k.d_model
            channels = split / tensor + stream / (tensor if self.variant.split_sequence else 1)
            moves = self.rates.step.routed_moves * k.experts_per_token * k.expert_rows
            passes = (3 + self._attention_again(k)) * self._layers(k)
            layers = layers + (channels + moves * k.d_model) * BFLOAT16 * passes
            ops = ops + self.rates.step.ops_per_layer * passes * self.rates.op_overhead_s
        logits = s.unembeddings * s.vocab / tensor * BFLOAT16 * 4
        traffic = self.tokens * (layers + logits) / self.rates.hbm_bytes_per_s
        return traffic + ops + self._narrowed()

    def _copied(self) -> np.ndarray:
        """Return the seconds of HBM traffic of offloaded activations."""
        return 2 * np.asarray(self.memory.host) / self.rates.hbm_bytes_per_s

    def _narrowed(self) -> np.ndarray:
        """Return the seconds of HBM traffic for rounding matmul operands to 8 bits."""
        tensor, split = self.candidates.sizes["tensor"], self.variant.split_sequence
        each = [
            sum(
                self._layers(layer)
                * one.bytes_per_token(layer, tensor, self._runs_again, split_sequence=split)
                for layer in self.shape.kinds
            )
            for one in self._rounding
        ]
        return self._by_precision([0.0, *each[1:]]) * self.tokens / self.rates.hbm_bytes_per_s

    @cached_property
    def _runs_again(self) -> np.ndarray:
        """Return 1 where forward matmuls run again in the backward pass."""
        return self._by_remat([float(not kept.everything) for kept in self._kept])

    @property
    def _rounding(self) -> list[Rounding]:
        """Return the rounding of each precision; bf16 has none."""
        own = {"int8": self.variant.int8, "fp8": self.variant.fp8}
        return [own.get(name, OUR_INT8) for name in PRECISIONS]

    def _by_precision(self, values: list[Any]) -> np.ndarray:
        spread = [np.broadcast_to(value, len(self.candidates)) for value in values]
        return np.stack(spread)[self.candidates.precision, np.arange(len(self.candidates))]

    def _layer_bytes(self, *, over_links: bool = False) -> np.ndarray:
        """Return the bytes of gathered layer weights per device.

        Over links they are at least two thirds as wide as in the matmul.
        """
        s, sizes = self.shape, self.candidates.sizes
        shared = (s.other_parameters - s.outside_parameters) / sizes["tensor"]
        experts = s.expert_parameters / (sizes["tensor"] * sizes["expert"])
        if over_links:
            narrow = self.candidates.precision > 0
            of_experts = self._by_precision([one.experts for one in self._rounding])
            shared = shared * np.where(narrow, 2 / 3, 1.0)
            experts = experts * np.where(narrow & of_experts, 2 / 3, 1.0)
        return (shared + experts) / sizes["stage"] * BFLOAT16

    def _weights_moved(self) -> np.ndarray:
        """Return the seconds to gather weights for both passes and to scatter their gradients."""
        tables = self.shape.outside_parameters / self.candidates.sizes["tensor"] * BFLOAT16
        amount = (self._layer_bytes(over_links=True) + tables) / self.layers
        fsdp, data, thin = self.rates.axes["fsdp"], self.rates.axes["data"], self.shape.thin
        if thin is not None:
            # Frozen weights and LoRA matrices for both passes; gradients of the LoRA matrices only.
            own = thin.parameters * BFLOAT16 / self.layers
            gathered = fsdp.gather_s(amount + own, times=2 * self.rates.gather_bytes * self.layers)
            scattered = fsdp.gather_s(own, times=self.layers)
            return gathered + scattered + data.reduce_s(self._trained_parameters() * BFLOAT16)
        times = 3 * self.rates.gather_bytes * self.layers
        # Compiled steps sum gradients along `data` before they scatter them.
        along_data = data.reduce_s(self._layer_bytes() / self.layers, times=self.layers)
        return fsdp.gather_s(amount, times=times) + along_data

    def _sums_moved(self) -> np.ndarray:
        """Return the seconds of sums along `tensor`, which the next matmul waits for."""
        # Two sums forward and two backward; one more if the first is not kept.
        once_more = [not k.everything and OUT not in k.names for k in self._kept]
        sums = self._by_remat([4.0 + more for more in once_more])
        if self.variant.split_sequence:
            # A sum is a reduce-scatter, and an all-gather for the next matmul. Inputs of matmuls
            # are gathered again in the backward pass for weight gradients, all in the width of the
            # matmul.
            narrow = [one.gathers(self._runs_again) for one in self._rounding]
            sums = (sums + self._by_precision([6.0, *narrow[1:]])) / 2
        rows = self.tokens * self.shape.d_model * BFLOAT16
        return self.rates.axes["tensor"].reduce_s(rows, times=sums * self.layers)

    def _activations_moved(self) -> np.ndarray:
        """Return the seconds of activations exchanged between experts, ring members or stages."""
        s, sizes, axes = self.shape, self.candidates.sizes, self.rates.axes
        rows = self.tokens * s.d_model * BFLOAT16
        # In a ring, gradients of keys travel with the keys in float32; windows need no ring.
        times, waited = (4, self.rates.step.ring_waited) if self._ours else (3, 1)
        expert = context = np.zeros(len(self.candidates))
        for k in s.kinds:
            routed = rows * k.experts_per_token * k.expert_rows * self._layers(k)
            expert = expert + routed * axes["expert"].all_to_all * (4 + 2 * self._runs_again)
            if k.linear or (self._ours and k.is_local):
                continue
            keys = self.tokens * k.key_width * BFLOAT16 * self._layers(k)
            hops = (sizes["context"] - 1) * (times + self._attention_again(k))
            context = context + waited * hops * keys / self.rates.ici_bytes_per_s
        stage = np.where(sizes["stage"] > 1, 2 * rows / self.rates.ici_bytes_per_s, 0.0)
        return expert + context + stage

    def _hidden(self, transfer: np.ndarray, work: np.ndarray) -> np.ndarray:
        """Return the part of a transfer that `work` does not hide."""
        return np.maximum(0.0, transfer - work)

    def _host(self, forward: np.ndarray, piece: np.ndarray) -> np.ndarray:
        """Return the seconds of waiting for offloaded layer inputs."""
        one_way: Any = self.memory.host / self.rates.host_bytes_per_s
        return self._hidden(one_way, forward) + self._hidden(one_way, piece - forward)

    def _between_slices(self, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """Return the seconds of waiting for transfers between slices, once per microbatch.

        Joined by `data`, gradients are summed. Joined by `fsdp`, each pass gathers the weights of
        other slices and sends gradients back. Transfers of a layer overlap with other layers, as in
        compiled schedules; those of the first layer are exposed.
        """
        count = self.candidates.num_slices
        is_shared = self.candidates.slices_sharing > 1
        own = self._trained_parameters() * BFLOAT16
        once = own * (count - 1) / self.rates.dcn_bytes_per_s
        backward_s = 2 * once / np.where(is_shared, 1, count)
        forward_s = np.where(is_shared, once, 0.0)
        if self.shape.thin is not None:  # weights for either pass, and no gradients of them
            held = np.asarray(self.memory.weights) * (count - 1) / self.rates.dcn_bytes_per_s
            forward_s = np.where(is_shared, held, 0.0)
            backward_s = forward_s + 2 * once / count
        first = self.shape.layer_parameters * self.candidates.sizes["stage"]
        open_share = np.minimum(1.0, first / self.shape.parameters)
        waited = sum(
            np.maximum(self._hidden(moved, work), moved * open_share)
            for moved, work in ((forward_s, forward), (backward_s, backward))
        )
        return waited * self.candidates.microbatches

    def _update(self) -> np.ndarray:
        """Return the seconds of the optimizer update, which is bound by HBM."""
        own = self._trained_parameters()
        pieces = self.candidates.microbatches
        summed = np.where(pieces > 1, 3 * own * FLOAT32 * pieces, 0.0)
        cut = np.where(self.candidates.int8_moments, self.rates.int8_moment_bytes * own, 0.0)
        moved: Any = 3 * own * FLOAT32 + 2 * self.memory.optimizer + summed + cut
        return moved / self.rates.hbm_bytes_per_s

    def _trained_parameters(self) -> np.ndarray:
        """Return the trained parameters per device."""
        thin = self.shape.thin
        if thin is not None:
            return thin.parameters / self.candidates.sizes["fsdp"]
        return np.asarray(self.memory.weights) / FLOAT32
