"""One warp's matrix product with every register in the open: m16n8k16, 16-bit operands, FP32 sums.

A tensor is one register: element e of [32 · warps] is held by thread e, and an operand is a few such tensors. So
loads bring codes to the threads that decode them and multiply with them, and nothing passes through shared memory,
which ``tl.dot`` would take it through. Of a warp's 32 lanes, lane 4·g + i has

* of A [16, 16]: rows g and g + 8, in four words the columns (2i, 2i + 1) of both, then (2i + 8, 2i + 9) of both;
* of B [16, 8]: of column g the rows (2i, 2i + 1), then (2i + 8, 2i + 9);
* of C and D [16, 8] float32: (g, 2i), (g, 2i + 1), (g + 8, 2i), (g + 8, 2i + 1).

The 16 that are summed over may be any, if A and B agree. Without tensor cores, and in the interpreter, the same
registers are multiplied as what they stand for, so that all that surrounds the instruction is tested there.
"""

# mypy: disable-error-code="assignment, index, misc, var-annotated"
# (tuples that grow in a loop that the compiler unrolls)
from __future__ import annotations

from .targets import tl, triton

MMA_F16_PTX = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
MMA_BF16_PTX = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


@triton.jit
def thread_index(THREADS: tl.constexpr, ISA: tl.constexpr):
    """[THREADS] int32, of as many threads: which one holds the element. Asked of the hardware, not of a layout."""
    o_thread = tl.arange(0, THREADS)
    if ISA >= 90:
        o_thread = tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r,r", [o_thread], tl.int32, True, 1)
    return o_thread


@triton.jit
def below(o_x, N: tl.constexpr, ALWAYS: tl.constexpr):
    """o_x < N, for the compiler where it is ALWAYS so."""
    if ALWAYS:
        return tl.full(o_x.shape, 1, tl.int1)
    else:
        return o_x < N


@triton.jit
def half_floats(b_w):
    """The two float16 of words as float32."""
    b_x = (b_w & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return b_x, (b_w >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def bf16_pair(b_x, b_y):
    """Two float32 cut to bfloat16, in one word."""
    b_x = b_x.to(tl.int32, bitcast=True) >> 16
    return (b_x & 0xFFFF) | (b_y.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def pair_parts(b_x, b_y, b_z, b_w):
    """Four float32 as three parts of two pairs: words of bfloat16, whose sums they are exactly (``dot.bf16_parts``)."""
    b_parts = ()
    for _ in tl.static_range(3):
        b_i, b_j = b_x.to(tl.int32, bitcast=True), b_y.to(tl.int32, bitcast=True)
        b_k, b_l = b_z.to(tl.int32, bitcast=True), b_w.to(tl.int32, bitcast=True)
        b_parts = b_parts + (
            (((b_i >> 16) & 0xFFFF) | (b_j & -65536), ((b_k >> 16) & 0xFFFF) | (b_l & -65536)),
        )  # fmt: skip
        b_x, b_y = b_x - (b_i & -65536).to(tl.float32, bitcast=True), b_y - (b_j & -65536).to(tl.float32, bitcast=True)
        b_z, b_w = b_z - (b_k & -65536).to(tl.float32, bitcast=True), b_w - (b_l & -65536).to(tl.float32, bitcast=True)
    return b_parts


@triton.jit
def scaled_pair(b_w, b_s, HALF: tl.constexpr, ISA: tl.constexpr):
    """Products of two words' numbers, which must be exact: codes times scales. float16 where HALF, else bfloat16."""
    if ISA >= 90:
        if HALF:
            return tl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [b_w, b_s], tl.int32, True, 1)
        else:
            return tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [b_w, b_s], tl.int32, True, 1)
    elif HALF:
        b_x = (b_w & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        b_x *= (b_s & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        b_y = (b_w >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        b_y *= (b_s >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        b_x, b_y = b_x.to(tl.int16, bitcast=True), b_y.to(tl.int16, bitcast=True)
        return (b_x.to(tl.int32) & 0xFFFF) | (b_y.to(tl.int32) << 16)
    else:
        b_x = (b_w << 16).to(tl.float32, bitcast=True) * (b_s << 16).to(tl.float32, bitcast=True)
        b_y = (b_w & -65536).to(tl.float32, bitcast=True) * (b_s & -65536).to(tl.float32, bitcast=True)
        return bf16_pair(b_x, b_y)


@triton.jit
def _numbers(b_x, b_y, HALF: tl.constexpr):
    """The four numbers of two words as float32 [..., 2, 2]: by word, then by half."""
    b_w = tl.join(b_x, b_y)
    if HALF:
        b_x, b_y = half_floats(b_w)
        return tl.join(b_x, b_y)
    else:
        return tl.join((b_w << 16).to(tl.float32, bitcast=True), (b_w & -65536).to(tl.float32, bitcast=True))


@triton.jit
def _product(b_c, b_a, b_b, PARTS_A: tl.constexpr, PARTS_B: tl.constexpr, HALF: tl.constexpr):
    """``mma`` in plain Triton, of operands that are sums of parts: float32 products."""
    W: tl.constexpr = b_c[0].shape[0] // 32
    b_x = _numbers(tl.join(b_a[0][0], b_a[0][1]), tl.join(b_a[0][2], b_a[0][3]), HALF)  # [threads, row, word, half]
    for i in tl.static_range(1, PARTS_A):
        b_x += _numbers(tl.join(b_a[i][0], b_a[i][1]), tl.join(b_a[i][2], b_a[i][3]), HALF)
    b_y = _numbers(b_b[0][0], b_b[0][1], HALF)
    for i in tl.static_range(1, PARTS_B):
        b_y += _numbers(b_b[i][0], b_b[i][1], HALF)
    b_x = tl.reshape(tl.permute(tl.reshape(b_x, [W, 8, 4, 2, 4]), (0, 1, 3, 2, 4)), [W, 8, 2, 1, 16])
    b_d = tl.sum(b_x * tl.reshape(b_y, [W, 1, 1, 8, 16]), axis=4)  # [warp, group, row, column]
    b_d = tl.permute(tl.reshape(b_d, [W * 8, 2, 4, 2]), (0, 2, 1, 3))  # the two columns of a thread, by row
    b_even, b_odd = tl.split(tl.reshape(b_d, [W * 32, 2, 2]))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return b_c[0] + b_0, b_c[1] + b_1, b_c[2] + b_2, b_c[3] + b_3


@triton.jit
def mma(b_c, b_a, b_b, HALF: tl.constexpr, ISA: tl.constexpr):
    """C (four float32) + A (four words) · B (two words) of every warp: float16 where HALF, else bfloat16."""
    if ISA >= 90:
        return tl.inline_asm_elementwise(
            MMA_F16_PTX if HALF else MMA_BF16_PTX, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [b_a[0], b_a[1], b_a[2], b_a[3], b_b[0], b_b[1], b_c[0], b_c[1], b_c[2], b_c[3]],
            (tl.float32, tl.float32, tl.float32, tl.float32), True, 1,
        )  # fmt: skip
    else:
        return _product(b_c, (b_a,), (b_b,), 1, 1, HALF)


@triton.jit
def mma_parts(b_c, b_a, b_b, PARTS: tl.constexpr, ISA: tl.constexpr):
    """C + A · B, of FP32's accuracy: A as PARTS operands of bfloat16, B as three, the smallest products first."""
    if ISA >= 90:
        b_c = mma(b_c, b_a[0], b_b[2], False, ISA)
        if PARTS > 1:
            b_c = mma(b_c, b_a[1], b_b[1], False, ISA)
        if PARTS > 2:
            b_c = mma(b_c, b_a[2], b_b[0], False, ISA)
        b_c = mma(b_c, b_a[0], b_b[1], False, ISA)
        if PARTS > 1:
            b_c = mma(b_c, b_a[1], b_b[0], False, ISA)
        return mma(b_c, b_a[0], b_b[0], False, ISA)
    else:
        return _product(b_c, b_a, b_b, PARTS, 3, False)
