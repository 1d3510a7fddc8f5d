"""How long a training step takes, by arithmetic, for thousands of candidates at once.

Rates are those of the compiler's timeline, so that both speak of the same machine. What is counted:
matrix products padded to the matrix unit, attention by the blocks its kernel visits, what is
recomputed, HBM traffic between products, weights gathered and gradients scattered along `fsdp`,
activations exchanged along `tensor`, `expert` and `context`, gradients between slices, layer inputs
that go to the host, and the bubble of a pipeline.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...hardware import formats
from ..search.candidates import PRECISIONS, Candidates
from .attention_time import joined_s, plain_s
from .kept import OUT, Kept, kept_by
from .layer_shape import LayerShape
from .memory_model import MemorySplit
from .model_shape import ModelShape
from .product_groups import ProductGroup, ProductGroups
from .rates import Rates
from .step_variant import OUR_INT8, OUR_STEP, Rounding, StepSplit, StepVariant

BFLOAT16, FLOAT32 = formats.BFLOAT16.itemsize, formats.FLOAT32.itemsize  # bytes of a value


@dataclass(frozen=True)
class StepModel:
    """Everything a step's time follows from, for all candidates."""

    shape: ModelShape
    candidates: Candidates
    memory: MemorySplit
    rates: Rates
    sequence_length: int
    variant: StepVariant = OUR_STEP

    def split(self) -> StepSplit:
        """Seconds by cause, over all micro-batches of a step."""
        pieces = self.candidates.microbatches
        forward, backward, again = self._products()
        attention_forward, attention_backward = self._attention()
        matrix = forward + backward + again
        attention = attention_forward + attention_backward
        compute = matrix + attention
        hbm = self._elementwise() + self._copied() + self._beside()
        # Compiled schedules hide part of the weights' gathers and leave other waits open. Published
        # steps are met best when none is taken as hidden (benchmarks/plan_published.py), but behind
        # the sums along `tensor`, which go by links of their own.
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
        """Tokens a device holds of one micro-batch."""
        return self.candidates.batch * self.sequence_length / self.candidates.sizes["context"]

    def _layers(self, layer: LayerShape) -> np.ndarray:
        """Layers of a kind that a device holds."""
        return layer.count / self.candidates.sizes["stage"]

    @property
    def layers(self) -> np.ndarray:
        """Layers of all kinds that a device holds."""
        return self.shape.layers_run / self.candidates.sizes["stage"]

    @cached_property
    def _kept(self) -> list[Kept]:
        return [kept_by(remat) for remat in self.candidates.remats]

    def _by_remat(self, values: list[float]) -> np.ndarray:
        return np.asarray(values)[self.candidates.remat]

    def _no_kernel(self, layer: LayerShape) -> np.ndarray:
        """Where our attention is no kernel: windows that reach past a device's part of a ring."""
        context = self.candidates.sizes["context"]
        far = (layer.window or 1) - 1 > self.sequence_length / context
        return self._ours & (context > 1) & far

    @property
    def _ours(self) -> bool:
        """Whether attention is ours: other programs gather keys and values, without a ring."""
        return self.variant.attention == "ours"

    def _attention_again(self, layer: LayerShape) -> np.ndarray:
        """1 where the backward pass runs attention forward again."""
        again = self._by_remat([float(kept.attention_again) for kept in self._kept])
        nothing_kept = self._by_remat([float(not kept.everything) for kept in self._kept])
        # A state is kept by no name: its gradient makes it anew, which is counted there.
        return np.where(self._no_kernel(layer), nothing_kept, 0.0 if layer.linear else again)

    def _products(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds of the products with weights: forward, backward, recomputed."""
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
        # With few tokens a product waits for its weights instead.
        least = self._layer_bytes() / r.hbm_bytes_per_s
        forward = np.maximum(forward, least)
        if self.shape.thin is None:
            gradients = np.maximum(gradients, least)
        other = self.variant.other_flops_per_token(self.shape) * self.tokens
        other = other / sizes["tensor"]
        again = again + other / (r.bf16_flops_per_s * r.streamed_share)
        return forward, forward + gradients, again

    def _is_trained(self, group: ProductGroup) -> bool:
        """Whether weights of a group have gradients; sums with thin ones have them too."""
        thin = self.shape.thin
        return thin is None or (group.of_experts and thin.sums_experts)

    def _beside(self) -> np.ndarray:
        """Seconds of products with thin matrices, and of decoding the weights beside them."""
        thin, r = self.shape.thin, self.rates
        if thin is None:
            return np.zeros(len(self.candidates))
        # Forward, again where nothing is kept, and two products backward.
        passes = 3 + self._runs_again
        tokens = self.tokens / self.candidates.sizes["tensor"] * passes
        products = 2 * thin.products * tokens / (r.bf16_flops_per_s * r.streamed_share)
        read = thin.channels * BFLOAT16 * tokens / r.hbm_bytes_per_s
        if not thin.stored:
            return products + read
        # Codes are read and values written, for each pass forward and the one back.
        written = self._layer_bytes() * (2 + self._runs_again)
        return products + read + written / r.hbm_bytes_per_s

    def _attention(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of attention: forward, and backward with what is computed again."""
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
        """Seconds of HBM traffic of norms, rotations, gates, residuals and the loss."""
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
        """Seconds of HBM traffic of what goes to the host and comes back."""
        return 2 * np.asarray(self.memory.host) / self.rates.hbm_bytes_per_s

    def _narrowed(self) -> np.ndarray:
        """Seconds of HBM traffic to round the operands of products to eight bits."""
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
        """1 where products of the forward pass run again in the backward pass."""
        return self._by_remat([float(not kept.everything) for kept in self._kept])

    @property
    def _rounding(self) -> list[Rounding]:
        """What is rounded with each precision; with the first, nothing."""
        own = {"int8": self.variant.int8, "fp8": self.variant.fp8}
        return [own.get(name, OUR_INT8) for name in PRECISIONS]

    def _by_precision(self, values: list[Any]) -> np.ndarray:
        spread = [np.broadcast_to(value, len(self.candidates)) for value in values]
        return np.stack(spread)[self.candidates.precision, np.arange(len(self.candidates))]

    def _layer_bytes(self, *, over_links: bool = False) -> np.ndarray:
        """Bytes of the layers' weights one device multiplies with, gathered.

        Over links they are two of three times as wide as they are multiplied.
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
        """Seconds to gather weights for both passes and to scatter their gradients."""
        tables = self.shape.outside_parameters / self.candidates.sizes["tensor"] * BFLOAT16
        amount = (self._layer_bytes(over_links=True) + tables) / self.layers
        fsdp, data, thin = self.rates.axes["fsdp"], self.rates.axes["data"], self.shape.thin
        if thin is not None:
            # Weights and thin matrices for both passes; gradients of the thin ones alone.
            own = thin.parameters * BFLOAT16 / self.layers
            gathered = fsdp.gather_s(amount + own, times=2 * self.rates.gather_bytes * self.layers)
            scattered = fsdp.gather_s(own, times=self.layers)
            return gathered + scattered + data.reduce_s(self._trained_parameters() * BFLOAT16)
        times = 3 * self.rates.gather_bytes * self.layers
        # Compiled steps sum gradients along `data` before they are scattered.
        along_data = data.reduce_s(self._layer_bytes() / self.layers, times=self.layers)
        return fsdp.gather_s(amount, times=times) + along_data

    def _sums_moved(self) -> np.ndarray:
        """Seconds of the sums of partial products along `tensor`: the next product waits for it."""
        # Two sums forward and two backward; where the first is not kept, once more.
        once_more = [not k.everything and OUT not in k.names for k in self._kept]
        sums = self._by_remat([4.0 + more for more in once_more])
        if self.variant.split_sequence:
            # A sum is a scatter, and a gather for the next product. The inputs of products are
            # gathered in the backward pass once more, for the gradients of weights; and all of it
            # as wide as it is multiplied.
            narrow = [one.gathers(self._runs_again) for one in self._rounding]
            sums = (sums + self._by_precision([6.0, *narrow[1:]])) / 2
        rows = self.tokens * self.shape.d_model * BFLOAT16
        return self.rates.axes["tensor"].reduce_s(rows, times=sums * self.layers)

    def _activations_moved(self) -> np.ndarray:
        """Seconds of activations that are exchanged, passed round or handed on."""
        s, sizes, axes = self.shape, self.candidates.sizes, self.rates.axes
        rows = self.tokens * s.d_model * BFLOAT16
        # In a ring gradients of keys travel with them, in float32; windows need no ring.
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
        """What is left of a transfer that runs beside `work`."""
        return np.maximum(0.0, transfer - work)

    def _host(self, forward: np.ndarray, piece: np.ndarray) -> np.ndarray:
        """Seconds waited for layer inputs on their way to the host and back."""
        one_way: Any = self.memory.host / self.rates.host_bytes_per_s
        return self._hidden(one_way, forward) + self._hidden(one_way, piece - forward)

    def _between_slices(self, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """Seconds waited for what goes between slices, once each micro-batch.

        Joined by `data`, gradients are summed; joined by `fsdp`, each pass gathers the weights that
        other slices hold, and gradients go back to them. What a layer needs travels while others
        are at work, as compiled schedules have it; nothing is left to hide that of the first.
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
        """Seconds of the optimizer: everything read once, all but gradients written once."""
        own = self._trained_parameters()
        pieces = self.candidates.microbatches
        summed = np.where(pieces > 1, 3 * own * FLOAT32 * pieces, 0.0)
        cut = np.where(self.candidates.int8_moments, self.rates.int8_moment_bytes * own, 0.0)
        moved: Any = 3 * own * FLOAT32 + 2 * self.memory.optimizer + summed + cut
        return moved / self.rates.hbm_bytes_per_s

    def _trained_parameters(self) -> np.ndarray:
        """Numbers of one device that have gradients."""
        thin = self.shape.thin
        if thin is not None:
            return thin.parameters / self.candidates.sizes["fsdp"]
        return np.asarray(self.memory.weights) / FLOAT32
