"""Every term of the arithmetic step, alone: a machine that is slow at one thing only.

With all other rates unlimited, and this one at a unit a second, seconds are the bytes or FLOPs of a
small model, which can be counted from its dimensions.
"""

from collections import defaultdict
from dataclasses import fields, replace

import numpy as np
import pytest

from tpukit.hardware import Slice
from tpukit.models import get_preset
from tpukit.planner.cost.candidates import PRECISIONS, Candidates, SliceMesh, optimizers_of
from tpukit.planner.cost.kept import kept_by
from tpukit.planner.cost.memory_model import MemorySplit
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.rates import AxisRates, Rates
from tpukit.planner.cost.step_model import StepModel
from tpukit.planner.cost.step_variant import (
    OUR_FLOAT8,
    OUR_FLOAT8_STATIC,
    OUR_INT8,
    OUR_INT8_THROUGHOUT,
    OUR_STEP,
    StepVariant,
)
from tpukit.planner.cost.torus import AXES, place_axes

CONFIG = get_preset(
    "tiny", n_layers=4, d_model=256, n_heads=4, n_kv_heads=2, head_dim=128, d_ff=1024,
    vocab_size=512, max_seq_len=4096,
)  # fmt: skip
EXPERTS = {"n_experts": 8, "experts_per_token": 2}
TOKENS = 1024
# Weights of its layers with their norms, in bfloat16: three matrices of 256 x 1024, and 256 x 512
# twice and 256 x 256 twice of attention; and one table of the two, before and after the layers.
LAYERS, TABLE = 2 * (4 * (786_432 + 393_216 + 512) + 256), 2 * 256 * 512
ROWS = 2 * TOKENS * 256
NOTHING = MemorySplit(weights=0, gradients=0, optimizer=0, activations=0, temporaries=0, host=0)
# Shares and ratios that are left at one, and what is left at none.
ONES = (
    *("matrix_share", "streamed_share", "backward_over_forward"),
    *("op_time_in_a_step", "narrow_time", "narrow_gradient_time", "gather_bytes"),
)
NONE = ("int8_moment_bytes", "waiting_share", "op_overhead_s")


def windows_but_every(nth, window):
    """Layers with a window, and every nth without."""
    kinds = {"local": {"sliding_window": window}, "global": {}}
    return {"layer_kinds": kinds, "layer_pattern": f"{nth - 1} local, global"}


def split(
    sizes=None, *, on="v6e-8", model=None, batch=2, length=512, remat="none", pieces=1,
    precision="bf16", variant=OUR_STEP, memory=None, moments="float32", joined_by="data",
    axes=None, **rates,
):  # fmt: skip
    """Seconds by cause where only the given rates are limited."""
    sizes = sizes or {}
    target = Slice.parse(on)
    mesh = SliceMesh(target, sizes, place_axes(target, sizes), joined_by)
    zero = np.asarray([0])
    candidates = Candidates(
        (mesh,), zero, zero + batch, zero + pieces, zero,
        zero + PRECISIONS.index(precision), zero, remats=(remat,),
        optimizers=optimizers_of("adamw", moments),
    )  # fmt: skip
    one = np.asarray([1.0])
    known = Rates.of(candidates, head_dims=[128.0])
    unlimited = {field.name: one * np.inf for field in fields(Rates)}
    unlimited |= dict.fromkeys(ONES, one) | dict.fromkeys(NONE, 0 * one)
    given = {name: one * value for name, value in rates.items()}
    share = given.pop("attention_share", one)
    given["attention_share"] = defaultdict(lambda: share)
    none = AxisRates(one * np.inf, one, 0 * one, 0 * one)
    links = dict.fromkeys(AXES, none) | (axes or {})
    found = Rates(**{**unlimited, **given, "axes": links, "step": known.step})
    shape = shape_of(replace(CONFIG, **(model or {})))
    held = MemorySplit(**{**vars(NOTHING), **(memory or {})})
    model = StepModel(shape, candidates, held, found, length, variant)
    return {cause: float(seconds) for cause, seconds in model.split().at(0).items()}


def test_an_unlimited_machine_takes_no_time():
    assert set(split().values()) == {0.0}


def test_without_tokens_or_state_nothing_moves():
    assert split(batch=0, hbm_bytes_per_s=1.0)["hbm"] == 0.0


class TestProducts:
    def matrix(self, sizes=None, **options):
        return split(sizes, bf16_flops_per_s=1.0, attention_share=np.inf, **options)["matrix"]

    def test_six_flops_a_parameter_and_token(self):
        multiplied = CONFIG.parameter_count().matmul_active
        assert self.matrix() == 6 * multiplied * TOKENS
        assert self.matrix({"fsdp": 8}) == 6 * multiplied * TOKENS  # of one device's tokens
        assert self.matrix({"tensor": 4, "fsdp": 2}) == 6 * multiplied * TOKENS / 4
        assert self.matrix(pieces=3) == 3 * 6 * multiplied * TOKENS
        assert self.matrix({"context": 2, "fsdp": 4}) == 6 * multiplied * TOKENS / 2

    def test_every_stage_waits_for_the_head(self):
        layers, head = 4 * (786_432 + 393_216), 256 * 512
        assert self.matrix({"stage": 2, "fsdp": 4}) == 6 * (layers / 2 + head) * TOKENS

    @pytest.mark.parametrize("remat", ["full", "minimal", "save=qkv_proj", "save=mlpwi"])
    def test_what_is_computed_again_is_multiplied_once_more(self, remat):
        (layer,) = shape_of(CONFIG).kinds
        weights = sum(kept_by(remat).recomputed_weights(layer))
        again = 2 * TOKENS * 4 * weights
        assert self.matrix(remat=remat) - self.matrix() == pytest.approx(again, abs=1)

    def test_operands_that_do_not_fit_are_multiplied_at_the_slower_share(self):
        shares = {"matrix_share": 0.5, "streamed_share": 0.25}
        flops = {"attention": 6 * 4 * 393_216, "hidden": 6 * 4 * 786_432, "head": 6 * 131_072}
        # Rows are 512 KiB. Weights of attention and of the head are 256 KiB, hidden ones 512 KiB.
        for resident, streamed in (
            (2**19, ()),
            (2**19 - 1, ("hidden",)),
            (2**18, ("hidden",)),
            (2**18 - 1, ("attention", "hidden", "head")),
        ):
            expected = sum(
                count * TOKENS / (0.25 if name in streamed else 0.5)
                for name, count in flops.items()
            )
            assert self.matrix(resident_bytes=resident, **shares) == expected
        # Of an eighth of the tokens, the rows are the smaller operand everywhere.
        few = self.matrix({"context": 8}, resident_bytes=2**16, **shares)
        assert few == sum(flops.values()) * TOKENS / 8 / 0.5
        few = self.matrix({"context": 8}, resident_bytes=2**16 - 1, **shares)
        assert few == sum(flops.values()) * TOKENS / 8 / 0.25
        # Split eight ways, so are its weights: 32 KiB of attention and the head, 64 of the others.
        narrow = {name: count * TOKENS / 8 for name, count in flops.items()}
        split_8 = self.matrix({"tensor": 4, "fsdp": 2}, resident_bytes=2**17 - 1, **shares)
        expected = 2 * (narrow["attention"] / 0.5 + narrow["hidden"] / 0.25 + narrow["head"] / 0.5)
        assert split_8 == expected

    def test_widths_are_filled_up_to_whole_lanes(self):
        # Four heads of 64, a block of 192 and a vocabulary of 320, eight ways: 32, 24 and 40 wide.
        model = {"head_dim": 64, "n_heads": 4, "n_kv_heads": 4, "d_ff": 192, "vocab_size": 320}
        projections, hidden, head = 256 * (4 * 256), 3 * 256 * 192, 256 * 320
        filled = 4 * (projections * 128 / 32 + hidden * 128 / 24) + head * 128 / 40
        assert self.matrix({"tensor": 8}, model=model) == pytest.approx(6 * filled * TOKENS / 8)

    @pytest.mark.parametrize(
        ("precision", "variant", "gradient_time"),
        [
            ("int8", OUR_STEP, 1.0),  # whose gradients of weights stay wide
            ("int8", StepVariant(int8=OUR_INT8_THROUGHOUT), 0.75),
            ("fp8", OUR_STEP, 0.75),
            ("bf16", OUR_STEP, 1.0),
        ],
    )
    def test_products_of_layers_may_have_fewer_bits(self, precision, variant, gradient_time):
        layers, head = 2 * TOKENS * 4 * (786_432 + 393_216), 2 * TOKENS * 131_072
        options = {"precision": precision, "variant": variant, "narrow_time": 0.5}
        options["narrow_gradient_time"] = 0.75 if precision != "bf16" else 1.0
        # Forward, to the inputs, to the weights; the head stays as wide as it is.
        expected = layers * (0.5 + 0.5 + gradient_time) + 3 * head
        assert self.matrix(**options) == expected
        again = layers * 0.5 * (1 - 1 / 4.5)  # all but the last of a block's products
        assert self.matrix(**options, remat="full") == pytest.approx(expected + again)

    def test_with_few_tokens_a_product_waits_for_its_weights(self):
        for sizes, share in (({}, 1), ({"fsdp": 8}, 1), ({"tensor": 2, "stage": 2}, 4)):
            assert split(sizes, hbm_bytes_per_s=1.0)["matrix"] == 3 * LAYERS / share

    def test_experts_wait_for_the_weights_of_their_share(self):
        experts = 4 * 8 * 3 * 256 * 1024
        others = 4 * (393_216 + 512 + 8 * 256) + 256  # with a router
        found = split({"expert": 4, "tensor": 2}, model=EXPERTS, hbm_bytes_per_s=1.0)["matrix"]
        assert found == 3 * 2 * (others + experts / 4) / 2

    def test_rows_of_experts_are_filled_up_to_tiles(self):
        attention, hidden, head = 4 * (393_216 + 8 * 256), 4 * 2 * 786_432, 131_072
        for sizes, further in (({}, 7), ({"expert": 2}, 3)):
            # Each further expert of a device shares a tile of 512 of its 2,048 rows.
            filled = attention + hidden * (1 + further * 512 / 2048) + head
            assert self.matrix(sizes, model=EXPERTS) == 6 * filled * TOKENS
        buffers = self.matrix(model={**EXPERTS, "routing": "capacity", "capacity_factor": 1.5})
        assert buffers == 6 * (attention + hidden * 1.5 + head) * TOKENS

    def test_rows_sorted_by_expert_are_multiplied_by_kernels_and_stay_wide(self):
        options = {"matrix_share": 0.5, "streamed_share": 0.25, "precision": "int8"}
        options |= {"narrow_time": 0.5, "model": EXPERTS}
        attention, head = 4 * (393_216 + 8 * 256), 131_072
        hidden = 4 * 2 * 786_432 * (1 + 7 / 4)
        expected = attention * (0.5 + 0.5 + 1) / 0.5 + 3 * hidden / 0.25 + 3 * head / 0.5
        assert self.matrix(**options) == 2 * expected * TOKENS

    def test_a_lookup_by_a_product_is_two_products(self):
        model = {"embedding_lookup": "one_hot"}
        for sizes, share in (({}, 1), ({"tensor": 4}, 4)):
            more = self.matrix(sizes, model=model, streamed_share=0.5) - self.matrix(sizes)
            assert more == 2 * 2 * 512 * 256 * TOKENS / 0.5 / share


class TestAttention:
    # One product of queries and keys in all layers: a block of 512 is visited whole.
    PRODUCT = 2 * 4 * 512 * 4 * 128 * TOKENS
    RATES = {  # noqa: RUF012
        "bf16_flops_per_s": 1.0, "attention_share": 0.5, "op_time_in_a_step": 0.8,
        "backward_over_forward": 0.64, "matrix_share": 0.5,
    }  # fmt: skip

    def attention(self, sizes=None, **options):
        return split(sizes, **{**self.RATES, **options})["attention"]

    @pytest.mark.parametrize(
        ("attention", "forward", "backward"),
        [
            ("splash", 2 * 0.8 / 0.5, 5 * 0.8 / 0.5 / 0.64),
            ("splash in two", 2 * 0.8 / 0.5, 7 * 0.8 / 0.5 / 0.64),
            ("ours", 0.75 * 2 * 0.8 / 0.5, 0.69 * 5 * 0.8 / 0.5 / 0.64),
            ("plain", 2 / 0.5, 4 / 0.5),
        ],
    )
    def test_products_at_the_share_of_their_kernel(self, attention, forward, backward):
        variant = StepVariant(attention=attention)
        once = (forward + backward) * self.PRODUCT
        assert self.attention(variant=variant) == pytest.approx(once)
        again = self.attention(variant=variant, remat="full")
        assert again == pytest.approx(once + forward * self.PRODUCT)
        kept = self.attention(variant=variant, remat="save=attention")
        assert kept == pytest.approx(once)
        parted = self.attention({"tensor": 2, "stage": 2}, variant=variant, pieces=3)
        assert parted == pytest.approx(3 * once / 4)

    def test_no_kernel_passes_the_peak_or_ours_what_products_reach(self):
        quick = {"attention_share": 100.0}
        scores = self.PRODUCT * (512 + 1) / 2 / 512  # without those that are masked
        splash = self.attention(variant=StepVariant(attention="splash"), **quick)
        assert splash == pytest.approx((2 + 5) * scores)
        assert self.attention(**quick) == pytest.approx((2 + 5) * scores / 0.5)

    def test_a_layer_with_a_window_visits_fewer_blocks(self):
        # Of 4,096 tokens in two blocks: a query meets 2,048 or 4,096 keys, 3,072 in the mean. A
        # window of 1,000 does not reach over the block before the last; one of 2,049 does not
        # spare any.
        model = windows_but_every(4, 1_000)
        options = {"length": 4096, "batch": 1, "variant": StepVariant(attention="splash")}
        per_key = 2 * 4 * 128 * 4096 * (2 * 0.8 / 0.5 + 5 * 0.8 / 0.5 / 0.64)
        assert self.attention(model=model, **options) == pytest.approx(4 * 3072 * per_key)
        longer = {"max_seq_len": 2**14, **model}
        options["length"] = 8192  # four blocks: 5,120 keys in the mean, and 3,584 with the window
        expected = (1 * 5120 + 3 * 3584) * 2 * per_key
        assert self.attention(model=longer, **options) == pytest.approx(expected)

    def test_a_ring_joins_results_in_every_hop(self):
        rates = {"hbm_bytes_per_s": 1.0}
        for sizes, hops in (({"context": 2}, 1), ({"context": 4, "tensor": 2}, 3)):
            numbers = 4 * 4 * 128 * TOKENS / np.prod(list(sizes.values()))
            joined = split(sizes, **rates)["attention"]
            assert joined == pytest.approx((24 + 37) * hops * numbers)
            again = split(sizes, remat="full", **rates)["attention"]
            assert again == pytest.approx((2 * 24 + 37) * hops * numbers)
        # Other programs gather keys, and layers with a window need only the piece before.
        other = split({"context": 2}, variant=StepVariant(attention="splash"), **rates)
        assert other["attention"] == 0
        windows = windows_but_every(2, 100)
        half = split({"context": 2}, model=windows, **rates)["attention"]
        assert half == pytest.approx((24 + 37) * 2 * 4 * 128 * TOKENS / 2)

    @pytest.mark.parametrize(
        ("sizes", "window", "is_kernel"),
        [
            ({"context": 2}, 257, True),  # as far as the 256 tokens of the piece before
            ({"context": 2}, 258, False),
            ({}, 400, True),
        ],
    )
    def test_a_window_past_the_piece_before_has_no_kernel(self, sizes, window, is_kernel):
        model = windows_but_every(4, window)
        tokens = TOKENS // sizes.get("context", 1)
        # Every score of 3 layers, 4 heads and 512 keys is written and read; the fourth has a ring.
        plain = (12 + 25) * 3 * 4 * 512 * tokens
        found = split(sizes, model=model, hbm_bytes_per_s=1.0)["attention"]
        joined = (24 + 37) * (sizes.get("context", 1) - 1) * 4 * 128 * tokens
        assert found == pytest.approx(joined + (0 if is_kernel else plain))
        # A policy that keeps the kernel's result keeps nothing where there is none.
        kept = split(sizes, model=model, hbm_bytes_per_s=1.0, remat="save=attention")["attention"]
        assert kept - found == pytest.approx(0 if is_kernel else 12 * 3 * 4 * 512 * tokens)


class TestBytesOfHBM:
    def hbm(self, sizes=None, **options):
        return split(sizes, hbm_bytes_per_s=1.0, **options)["hbm"]

    @pytest.mark.parametrize(
        ("sizes", "options", "a_token"),
        [
            # 2 x (1,024 + 512) channels of attention, 3 x 1,024 of the block and 8 x 256 of the
            # stream, of 2 bytes, in 3 passes of 4 layers; the logits four times.
            ({}, {}, 8192 * 2 * 3 * 4 + 4096),
            ({}, {"remat": "full"}, 8192 * 2 * 4 * 4 + 4096),
            ({}, {"remat": "save=attention"}, 8192 * 2 * 3 * 4 + 4096),
            ({}, {"model": {"qk_norm": True}}, (8192 + 2 * 6 * 128) * 24 + 4096),
            ({}, {"model": {"post_norms": True}}, (8192 + 4 * 256) * 24 + 4096),
            ({}, {"model": {"gated_mlp": False}}, (8192 - 1024) * 24 + 4096),
            ({"tensor": 2}, {}, (6144 / 2 + 2048) * 24 + 4096 / 2),
            ({"tensor": 2}, {"variant": StepVariant(split_sequence=True)}, 8192 / 2 * 24 + 2048),
            ({"stage": 2}, {}, 8192 * 12 + 4096),
            # Two experts a token: 3 x 2,048 channels of theirs, and their rows are moved 12 times.
            ({}, {"model": EXPERTS}, (3072 + 6144 + 2048 + 12 * 2 * 256) * 24 + 4096),
            (
                {},
                {"model": {**EXPERTS, "routing": "capacity", "capacity_factor": 1.25}},
                (3072 + 6144 + 2048 + 12 * 2 * 1.25 * 256) * 24 + 4096,
            ),
        ],
    )
    def test_what_lies_between_products(self, sizes, options, a_token):
        assert self.hbm(sizes, **options) == pytest.approx(a_token * TOKENS)
        assert self.hbm(sizes, pieces=3, **options) == pytest.approx(3 * a_token * TOKENS)

    def test_every_op_of_a_layer_has_its_overhead(self):
        assert split(op_overhead_s=1.0)["hbm"] == 24 * 3 * 4
        assert split({"stage": 2}, op_overhead_s=1.0, remat="full")["hbm"] == 24 * 4 * 2

    @pytest.mark.parametrize(
        ("sizes", "options", "a_token"),
        [
            # Inputs of 2 x 256 + 512 + 1,024 channels; gradients of 2 x 256 + 1,024 + 2 x 1,024,
            # each read twice and written, 5 bytes; of which three quarters are not fused.
            ({}, {}, (2048 + 3584) * 5 * 0.75),
            ({}, {"remat": "full"}, (2 * 2048 + 3584) * 5 * 0.75),
            ({}, {"precision": "fp8"}, (2048 + 3584) * 5 * 0.75),
            (
                {},
                {"variant": StepVariant(int8=OUR_INT8_THROUGHOUT)},
                (2 * 2048 + 2 * 3584) * 5 * 0.75,
            ),
            ({"tensor": 2}, {}, (512 + 1536 / 2 + 512 + 3072 / 2) * 5 * 0.75),
            ({"tensor": 2}, {"variant": StepVariant(split_sequence=True)}, 5632 / 2 * 5 * 0.75),
            # Experts' products are not narrow.
            ({}, {"model": EXPERTS}, (256 + 512 + 256 + 1024) * 5 * 0.75),
        ],
    )
    def test_rounding_to_eight_bits(self, sizes, options, a_token):
        wide = self.hbm(sizes, **{**options, "precision": "bf16"})
        more = self.hbm(sizes, **{"precision": "int8", **options}) - wide
        assert more == pytest.approx(4 * a_token * TOKENS)

    def test_what_goes_to_the_host_is_read_and_written(self):
        assert self.hbm(memory={"host": 50.0}, pieces=3) - self.hbm(pieces=3) == 2 * 50 * 3

    @pytest.mark.parametrize(
        ("options", "moved"),
        [
            # A weight, its gradient and the weight again, of 4 bytes; the state both ways.
            ({}, 100 * 3 * 4 + 2 * 70),
            # Gradients of micro-batches are read, added to and written, each time.
            ({"pieces": 2}, 100 * 3 * 4 + 2 * 70 + 2 * 100 * 3 * 4),
            ({"moments": "int8", "int8_moment_bytes": 9.0}, 100 * 3 * 4 + 2 * 70 + 9 * 100),
            ({"moments": "bfloat16", "int8_moment_bytes": 9.0}, 100 * 3 * 4 + 2 * 70),
        ],
    )
    def test_the_optimizer_reads_all_and_writes_all_but_gradients(self, options, moved):
        own = {"weights": 400.0, "optimizer": 70.0}
        assert self.hbm(memory=own, **options) - self.hbm(**options) == moved


def link(*, bytes_per_s=1.0, share=1.0, latency_s=0.0, all_to_all=0.0):
    one = np.asarray([1.0])
    return AxisRates(one * bytes_per_s, one * share, one * latency_s, one * all_to_all)


NO_BYTES = link(bytes_per_s=np.inf, latency_s=1.0)


class TestBytesOfLinks:
    def ici(self, axis, sizes=None, *, by=None, **options):
        return split(sizes, axes={axis: by or link()}, **options)["ici"]

    @pytest.mark.parametrize(
        ("sizes", "options", "moved"),
        [
            # Gathered for both passes, and gradients scattered.
            ({}, {}, 3 * (LAYERS + 2 * TABLE)),
            ({}, {"gather_bytes": 2.0}, 6 * (LAYERS + 2 * TABLE)),
            ({}, {"by": link(share=0.75, bytes_per_s=2.0)}, 3 * (LAYERS + 2 * TABLE) * 0.75 / 2),
            ({}, {"pieces": 3}, 9 * (LAYERS + 2 * TABLE)),
            ({}, {"model": {"tied_embeddings": True}}, 3 * (LAYERS + TABLE)),
            ({}, {"precision": "int8"}, 2 * LAYERS + 3 * 2 * TABLE),  # one time of two in half
            ({"tensor": 2}, {}, 3 * (LAYERS + 2 * TABLE) / 2),
            ({"stage": 2}, {}, 3 * (LAYERS / 2 + 2 * TABLE)),
            # Experts are rounded where they are used.
            (
                {"expert": 2},
                {"model": EXPERTS, "precision": "int8"},
                4 * (4 * (393_216 + 512 + 8 * 256) + 256)
                + 6 * (4 * 8 * 786_432 / 2 + 2 * 256 * 512),
            ),
            # In the formats of published runs they are rounded where they are stored.
            (
                {"expert": 2},
                {
                    "model": EXPERTS,
                    "precision": "fp8",
                    "variant": StepVariant(fp8=OUR_FLOAT8_STATIC),
                },
                4 * (4 * (393_216 + 512 + 8 * 256) + 256 + 4 * 8 * 786_432 / 2) + 6 * 2 * 256 * 512,
            ),
        ],
    )
    def test_weights_along_fsdp(self, sizes, options, moved):
        assert self.ici("fsdp", sizes, **options) == pytest.approx(moved)

    def test_each_layer_waits_for_its_own_gathers_and_sums(self):
        assert self.ici("fsdp", by=NO_BYTES) == 3 * 4
        assert self.ici("fsdp", {"stage": 2}, by=NO_BYTES) == 3 * 2
        assert self.ici("tensor", by=NO_BYTES) == 4 * 2 * 4

    @pytest.mark.parametrize(
        ("options", "sums"),
        [
            # Two forward and two backward, a scatter and a gather each.
            ({}, 4),
            ({"remat": "full"}, 5),
            ({"remat": "save=out_proj"}, 4),
            ({"remat": "offload=out_proj"}, 4),
            ({"remat": "save=mlpwo"}, 5),
            ({"remat": "minimal"}, 4),
            # A split stream is gathered for the gradients of weights too: 4 scatters, 6 gathers.
            ({"variant": StepVariant(split_sequence=True)}, 5),
            ({"variant": StepVariant(split_sequence=True), "remat": "full"}, 5.5),
            # In int8 two gathers of inputs and two of gradients have half the bytes; those for the
            # gradients of weights only where these are rounded too.
            ({"variant": StepVariant(split_sequence=True), "precision": "int8"}, (4 + 6) / 2),
            ({"variant": StepVariant(split_sequence=True), "precision": "fp8"}, (4 + 2) / 2),
        ],
    )
    def test_sums_along_tensor(self, options, sums):
        assert self.ici("tensor", **options) == pytest.approx(sums * 2 * 4 * ROWS)
        half = self.ici("tensor", {"stage": 2}, **options)
        assert half == pytest.approx(sums * 2 * 2 * ROWS)

    def test_weights_and_sums_go_by_links_of_their_own(self):
        sums, weights = 4 * 2 * 4 * ROWS, 3 * (LAYERS + 2 * TABLE)
        assert sums < weights
        assert split(axes={"fsdp": link(), "tensor": link()})["ici"] == weights
        slower = {"fsdp": link(), "tensor": link(bytes_per_s=0.1)}
        assert split(axes=slower)["ici"] == pytest.approx(10 * sums)

    def test_stages_hand_rows_on_and_gradients_back(self):
        assert split({"stage": 2}, ici_bytes_per_s=1.0)["ici"] == 2 * ROWS
        assert split(ici_bytes_per_s=1.0)["ici"] == 0

    @pytest.mark.parametrize(
        ("sizes", "options", "times"),
        [
            # Keys and values in both passes, and their gradients in float32.
            ({"context": 2}, {}, 0.36 * 4),
            ({"context": 2}, {"remat": "full"}, 0.36 * 5),
            ({"context": 4}, {}, 3 * 0.36 * 4 / 2),
            ({"context": 2}, {"variant": StepVariant(attention="splash")}, 3),
            ({"context": 2}, {"model": windows_but_every(2, 9)}, 0.36 * 4 / 2),
            (
                {"context": 2},
                {
                    "model": windows_but_every(2, 9),
                    "variant": StepVariant(attention="splash"),
                },
                3,
            ),
        ],
    )
    def test_keys_go_round_a_ring(self, sizes, options, times):
        keys = 2 * 2 * 128 * 2 * TOKENS / 2  # both, of two heads, of half of the tokens
        found = split(sizes, ici_bytes_per_s=1.0, **options)["ici"]
        assert found == pytest.approx(times * 4 * keys)

    @pytest.mark.parametrize(
        ("options", "times"),
        [
            ({"model": EXPERTS}, 2 * 4),  # there and back, in both passes
            ({"model": EXPERTS, "remat": "full"}, 2 * 6),
            ({"model": {**EXPERTS, "experts_per_token": 1}}, 4),
            ({"model": {**EXPERTS, "routing": "capacity", "capacity_factor": 1.5}}, 3 * 4),
        ],
    )
    def test_rows_go_to_their_experts_and_back(self, options, times):
        by = link(bytes_per_s=np.inf, all_to_all=0.5)
        assert self.ici("expert", by=by, **options) == pytest.approx(times * 4 * ROWS / 2)


class TestWaits:
    # Where only HBM is limited: the weights of a pass, and all that lies between products.
    FORWARD, BETWEEN = LAYERS, 200_704 * TOKENS

    def test_the_host_link_runs_beside_the_pass_that_uses_it(self):
        def waited(one_way_s, pieces=1):
            found = split(
                hbm_bytes_per_s=1.0, host_bytes_per_s=1000 / one_way_s, memory={"host": 1000.0},
                pieces=pieces,
            )  # fmt: skip
            return found["host"]

        rest = 2 * self.FORWARD + self.BETWEEN + 2 * 1000
        assert waited(self.FORWARD / 2) == 0
        assert waited(self.FORWARD + 1e6) == pytest.approx(1e6)
        later = (rest + 1e6 - self.FORWARD) + 1e6
        assert waited(rest + 1e6) == pytest.approx(later)
        assert waited(rest + 1e6, pieces=3) == pytest.approx(3 * later)

    # A million weights of a device are 2 MB in bfloat16.
    OWN = {"weights": 4e6}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("on", "joined_by", "seconds"),
        [
            ("v6e-8", "data", 0),
            ("2xv6e-8", "data", 2e6),  # half of the sums scattered to each, and gathered
            ("4xv6e-8", "data", 2 * 2e6 * 3 / 4),
            ("2xv6e-8", "fsdp", 2e6 + 4e6),  # gathered in both passes, and gradients sent back
            ("4xv6e-8", "fsdp", 3 * (2e6 + 4e6)),
        ],
    )
    def test_slices_exchange_gradients_or_weights(self, on, joined_by, seconds):
        options = {"on": on, "joined_by": joined_by, "memory": self.OWN, "dcn_bytes_per_s": 1.0}
        assert split(**options)["dcn"] == pytest.approx(seconds)
        assert split(**options, pieces=3)["dcn"] == pytest.approx(3 * seconds)

    def test_between_slices_all_but_the_first_layer_hides_behind_the_pass(self):
        options = {"on": "2xv6e-8", "memory": self.OWN, "hbm_bytes_per_s": 1.0}
        gradients = LAYERS * 2
        first = 1_180_224 / 4_983_040  # of the parameters

        def waited(exchange_s, **more):
            return split(**options, **more, dcn_bytes_per_s=2e6 / exchange_s)["dcn"]

        assert waited(gradients / 2) == pytest.approx(gradients / 2 * first)
        assert waited(10 * gradients) == pytest.approx(9 * gradients)
        staged = waited(gradients / 4, sizes={"stage": 2})
        assert staged == pytest.approx(gradients / 4 * 2 * first)
        whole = waited(gradients / 16, sizes={"stage": 8})
        assert whole == pytest.approx(gradients / 16)  # a stage of half a layer waits for all

    def test_the_longer_a_step_the_longer_slices_wait_for_the_slowest(self):
        alone = split(hbm_bytes_per_s=1.0, pieces=2)
        waiting = split(hbm_bytes_per_s=1.0, pieces=2, waiting_share=0.1)
        assert waiting["dcn"] == pytest.approx(0.1 * sum(alone.values()))
        assert {**waiting, "dcn": 0.0} == alone

    def test_a_pipeline_waits_a_piece_for_each_other_stage(self):
        rates = {"hbm_bytes_per_s": 1.0, "ici_bytes_per_s": 1.0, "pieces": 5}
        assert split(**rates)["bubble"] == 0
        staged = split({"stage": 4}, **rates)
        busy = sum(seconds for cause, seconds in staged.items() if cause != "bubble")
        assert staged["bubble"] == pytest.approx(3 * busy / 5)
        attending = split({"stage": 4}, bf16_flops_per_s=1.0, attention_share=1.0,
                          op_time_in_a_step=1.0, backward_over_forward=1.0)  # fmt: skip
        assert attending["attention"] > 0
        compute = attending["matrix"] + attending["attention"]
        assert attending["bubble"] == pytest.approx(3 * compute)


@pytest.mark.parametrize(
    ("rounding", "plain", "again"),
    [
        # Two inputs and two gradients, in eight bits half a gather each; in the backward pass the
        # inputs once more where they are computed again, and whole where their gradients are wide.
        (OUR_INT8, 1 + 1 + 4, 1 + 1 + 1 + 4),
        (OUR_FLOAT8, 1 + 1, 1 + 1 + 1),
        (OUR_INT8_THROUGHOUT, 1 + 1 + 2, 1 + 1 + 1 + 2),
    ],
)
def test_gathers_of_a_split_stream_in_eight_bits(rounding, plain, again):
    assert rounding.gathers(np.asarray([0.0, 1.0])).tolist() == [plain, again]
