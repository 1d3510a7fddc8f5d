"""Bytes and products of one instruction, counted by hand from its shapes."""

import pytest

from tpukit.compiler.hlo import parse_hlo
from tpukit.compiler.timeline.machine import MatrixProduct, work_of

MIB = 2**20
STACK, LAYER = "bf16[8,1024,1024]{2,1,0:T(8,128)(2,1)}", "bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)}"
SQUARE, WIDE = "bf16[1024,1024]{1,0:T(8,128)(2,1)}", "f32[1024,1024]{1,0:T(8,128)}"
IN_VMEM, ON_HOST = (SQUARE.replace("(2,1)}", f"(2,1)S({space})}}") for space in (1, 5))
INDEX = "s32[]{:T(128)S(6)}"  # of a few bytes, in no memory that is counted


def work(root, *, operands, computations=""):
    """Of an instruction whose operands are %0, %1 …"""
    lines = [
        f"  %{number} = {shape} parameter({number})\n" for number, shape in enumerate(operands)
    ]
    text = f"HloModule f\n\n{computations}\nENTRY %main () -> {SQUARE} {{\n{''.join(lines)}"
    module = parse_hlo(f"{text}  ROOT %root = {root}\n}}\n")
    return work_of(module.entry.by_name["root"], module.entry, module)


def fused(result, *lines, operands):
    """A fusion of some lines, whose parameters are %p0, %p1 …"""
    parameters = [f"%p{i} = {shape} parameter({i})" for i, shape in enumerate(operands)]
    body = "".join(f"  {line}\n" for line in (*parameters, *lines))
    names = ", ".join(f"%{number}" for number in range(len(operands)))
    return work(
        f"{result} fusion({names}), kind=kLoop, calls=%fused",
        operands=operands,
        computations=f"%fused () -> {SQUARE} {{\n{body}}}\n",
    )


def mib(found):
    return found.hbm_bytes / MIB, found.vmem_bytes / MIB, found.host_bytes / MIB


@pytest.mark.parametrize(
    ("root", "operands", "expected"),
    [
        (f"{SQUARE} add(%0, %1)", (SQUARE, SQUARE), (3 * 2, 0, 0)),
        (f"{SQUARE} add(%0, %0)", (SQUARE,), (2 * 2, 0, 0)),  # read once
        (f"{SQUARE} add(%0, %1)", (IN_VMEM, ON_HOST), (2, 2, 2)),
        (f"{IN_VMEM} negate(%0)", (WIDE,), (4, 2, 0)),
        (f"{LAYER} dynamic-slice(%0, %1, %1, %1)", (STACK, INDEX), (2 + 2, 0, 0)),
        (f"{LAYER} slice(%0)", (STACK,), (2 + 2, 0, 0)),
        (f"{IN_VMEM} gather(%0, %1)", (STACK, INDEX), (2, 2, 0)),
        (f"{STACK} dynamic-update-slice(%0, %1, %2, %2, %2)", (STACK, LAYER, INDEX), (4, 0, 0)),
        (
            f"{STACK} dynamic-update-slice(%0, %1, %2, %2, %2)",
            (STACK, LAYER.replace("(2,1)}", "(2,1)S(1)}"), INDEX),
            (2, 2, 0),
        ),
        (f"{SQUARE} bitcast(%0)", (SQUARE,), (0, 0, 0)),
    ],
)
def test_an_op_moves_what_it_reads_and_writes(root, operands, expected):
    assert mib(work(root, operands=operands)) == expected


@pytest.mark.parametrize(
    ("result", "lines", "operands", "expected"),
    [
        (SQUARE, [f"ROOT %r = {SQUARE} add(%p0, %p1)"], (SQUARE, IN_VMEM), (2 + 2, 2, 0)),
        # Two slices of a stack are two layers; what is read whole beside them is all of it.
        (
            LAYER,
            [
                f"%a = {LAYER} dynamic-slice(%p0, %p1, %p1, %p1)",
                f"%b = {LAYER} dynamic-slice(%p0, %p1, %p1, %p1)",
                f"ROOT %r = {LAYER} add(%a, %b)",
            ],
            (STACK, INDEX),
            (2 + 2 + 2, 0, 0),
        ),
        (
            LAYER,
            [
                f"%a = {LAYER} dynamic-slice(%p0, %p1, %p1, %p1)",
                f"%n = {STACK} negate(%p0)",
                f"%b = {LAYER} dynamic-slice(%n, %p1, %p1, %p1)",
                f"ROOT %r = {LAYER} add(%a, %b)",
            ],
            (STACK, INDEX),
            (16 + 2, 0, 0),
        ),
        # Through a view, a slice is still a slice.
        (
            LAYER,
            [
                f"%v = {STACK} bitcast(%p0)",
                f"ROOT %r = {LAYER} dynamic-slice(%v, %p1, %p1, %p1)",
            ],
            (STACK, INDEX),
            (2 + 2, 0, 0),
        ),
        # Nine slices of a stack of eight read no more than all of it.
        (
            SQUARE,
            [
                *(f"%s{i} = {LAYER} slice(%p0)" for i in range(9)),
                f"ROOT %r = {SQUARE} bitcast(%s0)",
            ],
            (STACK,),
            (16 + 2, 0, 0),
        ),
        # Updated in place: the update is read and written, the rest stays where it is.
        (
            STACK,
            [
                f"%u = {STACK} dynamic-update-slice(%p0, %p1, %p2, %p2, %p2)",
                f"ROOT %r = {STACK} bitcast(%u)",
            ],
            (STACK, LAYER, INDEX),
            (2 + 2, 0, 0),
        ),
        # What updates another is read whole, even where it could be updated itself.
        (
            STACK,
            [f"ROOT %r = {STACK} dynamic-update-slice(%p0, %p1, %p2, %p2, %p2)"],
            (STACK.replace("(2,1)}", "(2,1)S(1)}"), STACK, INDEX),
            (16 + 16, 0, 0),
        ),
        # Of several results each counts where it lies.
        (
            f"({SQUARE}, {IN_VMEM}, {WIDE})",
            [
                f"%a = {SQUARE} negate(%p0)",
                f"%b = {IN_VMEM} negate(%p0)",
                f"%c = {WIDE} convert(%p0)",
                f"ROOT %r = ({SQUARE}, {IN_VMEM}, {WIDE}) tuple(%a, %b, %c)",
            ],
            (SQUARE,),
            (2 + 2 + 4, 2, 0),
        ),
        # An operand that nothing uses is not read.
        (SQUARE, [f"ROOT %r = {SQUARE} negate(%p0)"], (ON_HOST, WIDE), (2, 0, 2)),
    ],
)
def test_a_fusion_reads_what_its_parts_touch(result, lines, operands, expected):
    assert mib(fused(result, *lines, operands=operands)) == expected


INNER = f"""%inner (q0: bf16[8,1024,1024], q1: s32[]) -> bf16[1,1024,1024] {{
  %q0 = {STACK} parameter(0)
  %q1 = {INDEX} parameter(1)
  ROOT %s = {LAYER} dynamic-slice(%q0, %q1, %q1, %q1)
}}

%update (u0: bf16[8,1024,1024], u1: bf16[1,1024,1024], u2: s32[]) -> bf16[8,1024,1024] {{
  %u0 = {STACK} parameter(0)
  %u1 = {LAYER} parameter(1)
  %u2 = {INDEX} parameter(2)
  ROOT %d = {STACK} dynamic-update-slice(%u0, %u1, %u2, %u2, %u2)
}}

%outer (a: bf16[8,1024,1024], b: s32[]) -> bf16[8,1024,1024] {{
  %a = {STACK} parameter(0)
  %b = {INDEX} parameter(1)
  %f = {LAYER} fusion(%a, %b), kind=kLoop, calls=%inner
  ROOT %g = {STACK} fusion(%a, %f, %b), kind=kLoop, calls=%update
}}

"""


def test_fusions_inside_a_fusion_touch_what_they_would_alone():
    root = f"{STACK} fusion(%0, %1), kind=kLoop, calls=%outer"
    found = work(root, operands=(STACK, INDEX), computations=INNER)
    assert mib(found) == (2 + 2, 0, 0)  # one layer read, one written


def dot(result, a="%p0", b="%p1"):
    return f"{result} dot({a}, {b}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"


def test_a_product_is_fed_with_the_wider_of_its_operands():
    narrow = "s8[512,1024]{1,0:T(8,128)(4,1)}"
    flops = 2 * 512 * 1024 * 1024
    out = "f32[512,1024]{1,0:T(8,128)}"
    expected = (MatrixProduct(flops, "bf16", 512 * 1024),)
    assert fused(out, f"ROOT %r = {dot(out)}", operands=(narrow, SQUARE)).products == expected
    plain = work(dot(out, "%0", "%1"), operands=(narrow, SQUARE))
    assert plain.products == expected
    assert plain.flops == flops
    assert work(f"{SQUARE} negate(%0)", operands=(SQUARE,)).products == ()
    many = work(dot("f32[8192,1024]{1,0}", "%0", "%1"), operands=("s8[8192,1024]{1,0}", SQUARE))
    assert many.products == (MatrixProduct(16 * flops, "bf16", 2 * MIB),)
    wide = fused(WIDE, f"ROOT %r = {dot(WIDE)}", operands=(WIDE, SQUARE))
    assert wide.products == (MatrixProduct(2 * 1024**3, "f32", 2 * MIB),)


def test_products_of_fusions_inside_a_fusion_are_counted():
    inner = f"%multiply () -> {SQUARE} {{\n  %p0 = {SQUARE} parameter(0)\n"
    inner += f"  %p1 = {SQUARE} parameter(1)\n  ROOT %d = {dot(SQUARE)}\n}}\n\n"
    outer = f"%outer () -> {SQUARE} {{\n  %a = {SQUARE} parameter(0)\n"
    outer += f"  %e = {dot(SQUARE, '%a', '%a')}\n"
    outer += f"  ROOT %f = {SQUARE} fusion(%e, %a), kind=kLoop, calls=%multiply\n}}\n"
    root = f"{SQUARE} fusion(%0), kind=kLoop, calls=%outer"
    found = work(root, operands=(SQUARE,), computations=inner + outer)
    assert found.flops == 2 * 2 * 1024**3


SCATTERS = f"""%overwrite (a: bf16[], b: bf16[]) -> bf16[] {{
  %a = bf16[]{{:T(256)}} parameter(0)
  ROOT %b = bf16[]{{:T(256)}} parameter(1)
}}

%add (c: bf16[], d: bf16[]) -> bf16[] {{
  %c = bf16[]{{:T(256)}} parameter(0)
  %d = bf16[]{{:T(256)}} parameter(1)
  ROOT %e = bf16[]{{:T(256)}} add(%c, %d)
}}

%fused (t: bf16[8,1024,1024], i: s32[], u: bf16[1,1024,1024]) -> bf16[8,1024,1024] {{
  %t = {STACK} parameter(0)
  %i = {INDEX} parameter(1)
  %u = {LAYER} parameter(2)
  ROOT %s = {STACK} scatter(%t, %i, %u), index_vector_dim=1, to_apply=%WAY
}}
"""


@pytest.mark.parametrize(("way", "moved"), [("overwrite", 2 + 2), ("add", 16 + 2 + 16)])
def test_a_scatter_that_overwrites_touches_what_it_writes(way, moved):
    found = work(
        f"{STACK} fusion(%0, %1, %2), kind=kCustom, calls=%fused",
        operands=(STACK, INDEX, LAYER),
        computations=SCATTERS.replace("WAY", way),
    )
    assert mib(found) == (moved, 0, 0)
