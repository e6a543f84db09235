"""The readout of one query from a 4-bit copy: as many bytes in flight as fit, few instructions behind them.

Four neighbouring threads, a quad, read four neighbouring rows of the state, sixteen bytes of each a thread, decode them
to f16x2 pairs (device/fp4.py) and multiply those with their part of Θ. Of the ring each thread takes the four rows'
values of some tokens, so that one exchange within the quad ends both sums, and a thread then stores its row. Nothing
passes through shared memory and nobody waits for another warp; every load that needs no other one's result is ahead
of the first use.
"""

# mypy: disable-error-code="assignment, index, misc, var-annotated"
# (tuples that grow in a loop that the compiler unrolls)
from __future__ import annotations

from ..device.codec import e8m0_scale
from ..device.fp4 import UNIT_CONVERTED, UNIT_MOVED, block_pairs, pairs_dot
from ..device.mma import below, thread_index
from ..device.operand import begin_loads, load_words
from ..device.targets import tl, triton

SHUFFLE_PTX = tl.constexpr("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;")


@triton.jit
def _of_neighbour(b_x, o_thread, BIT: tl.constexpr, ISA: tl.constexpr):
    """What the thread holds whose index has BIT turned over."""
    if ISA >= 90:
        b_bit = tl.full(b_x.shape, BIT, tl.int32)
        return tl.inline_asm_elementwise(SHUFFLE_PTX, "=f,f,r", [b_x, b_bit], tl.float32, False, 1)
    else:
        return tl.gather(b_x, o_thread ^ BIT, 0)


@triton.jit
def _sum_of_row(b_x, o_thread, ISA: tl.constexpr):
    """Of four sums in each thread of a quad, thread i gets the i-th of all four threads: three exchanges, not eight."""
    m_2 = (o_thread & 2) != 0
    b_0 = tl.where(m_2, b_x[2], b_x[0]) + _of_neighbour(tl.where(m_2, b_x[0], b_x[2]), o_thread, 2, ISA)
    b_1 = tl.where(m_2, b_x[3], b_x[1]) + _of_neighbour(tl.where(m_2, b_x[1], b_x[3]), o_thread, 2, ISA)
    m_1 = (o_thread & 1) != 0
    return tl.where(m_1, b_1, b_0) + _of_neighbour(tl.where(m_1, b_0, b_1), o_thread, 1, ISA)


@triton.jit
def _four(b_x):
    """[N, 4] as four tensors."""
    b_x, b_y = tl.split(tl.reshape(b_x, [b_x.shape[0], 2, 2]))
    b_0, b_2 = tl.split(b_x)
    b_1, b_3 = tl.split(b_y)
    return b_0, b_1, b_2, b_3


@triton.jit
def _scale_codes(p_block, m_x, FORMAT: tl.constexpr):
    """The codes of the scales of a piece's two blocks of 16."""
    if FORMAT == "nvfp4":
        return tl.split(tl.load(p_block[:, None] + tl.arange(0, 2)[None, :], mask=m_x[:, None], other=0))
    else:
        b_x = tl.load(p_block, mask=m_x, other=0)
        return b_x, b_x


@triton.jit
def _scale(b_code, FORMAT: tl.constexpr):
    """float32: of E4M3 codes 2**-8 of the scale, which is what their bits mean in a float16."""
    if FORMAT == "nvfp4":
        return (b_code.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return e8m0_scale(b_code)


@triton.jit
def readout_pairs_kernel(
    p_codes, p_block, p_total,  # the read copy: codes as int64, scales
    p_v,  # ring [slots, L, H, V]
    p_theta, p_gain, p_c,  # [B, H / SHARED, K] float16 in pair order, as int64; [B, H]; [B, H, L]
    p_slots, p_used,  # [B] int32: slot of each row; ring rows it reads, 0 for rows that are not read
    p_first,  # [B] int32, of a verification: the token's ring row, −1 where it has its output already
    p_x, p_d, p_gate,  # [B, H, V] inputs of the skip, [H], [B, H, V]
    p_y,  # [B, H, V]
    s_codes, s_block, s_total, s_v,  # slot strides in elements
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, L: tl.constexpr, M: tl.constexpr, WARPS: tl.constexpr,
    SHARED: tl.constexpr, FORMAT: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, SOME: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B · tiles of rows of all heads). Each thread takes part in M quads of rows. SHARED: heads that share one Θ
    (Mamba-2's groups)."""
    QUADS: tl.constexpr = (V + 3) // 4  # of a head: none goes over two
    TILE: tl.constexpr = 8 * M * WARPS
    TILES: tl.constexpr = (H * QUADS + TILE - 1) // TILE
    ONE_THETA: tl.constexpr = (SHARED * QUADS) % TILE == 0
    BLOCKS: tl.constexpr = K // (16 if FORMAT == "nvfp4" else 32)
    PIECES: tl.constexpr = K // 32  # of sixteen bytes, in a row
    LOADS: tl.constexpr = (PIECES + 3) // 4
    OF_M: tl.constexpr = 0 if ONE_THETA else 4 * LOADS
    CHUNKS: tl.constexpr = (L + 15) // 16
    i_b = tl.program_id(0) // TILES
    i_slot = tl.load(p_slots + i_b).to(tl.int64)
    i_used = tl.load(p_used + i_b)
    if i_used + begin_loads(ISA) <= 0:
        return
    o_thread = thread_index(32 * WARPS, ISA)
    o_lane = o_thread % 4
    p_codes += i_slot * s_codes
    p_block += i_slot * s_block
    p_total += i_slot * s_total
    p_v += i_slot * s_v
    i_head = i_b.to(tl.int64) * H
    i_theta = i_b.to(tl.int64) * (H // SHARED)

    m_pieces = ()
    for i_piece in tl.static_range(LOADS):
        m_pieces = m_pieces + (below(o_lane + i_piece * 4, PIECES, PIECES % 4 == 0),)

    # what comes from memory first
    o_heads, o_vs, m_quads, b_words, b_codes, b_values, b_cs, b_units, b_thetas = (), (), (), (), (), (), (), (), ()
    for i_m in tl.static_range(M):
        o_quad = (tl.program_id(0) % TILES) * TILE + i_m * (8 * WARPS) + o_thread // 4
        o_h = o_quad // QUADS
        o_v = o_quad % QUADS * 4
        m_h = below(o_h, H, (H * QUADS) % TILE == 0)
        o_heads, o_vs, m_quads = o_heads + (o_h,), o_vs + (o_v,), m_quads + (m_h,)
        # pointers first, then constants: those cost no instructions
        p_w = p_codes + ((o_h * V + o_v) * (PIECES * 2) + o_lane * 2)
        p_s = p_block + ((o_h * V + o_v) * BLOCKS + o_lane * (BLOCKS // PIECES))
        for i_r in tl.static_range(4):
            m_r = below(o_v + i_r, V, V % 4 == 0) & m_h
            for i_piece in tl.static_range(LOADS):
                m_x = m_r & m_pieces[i_piece]
                b_words = b_words + (load_words(p_w + (i_r * PIECES + i_piece * 4) * 2, m_x),)
                o_s = i_r * BLOCKS + i_piece * 4 * (BLOCKS // PIECES)
                b_codes = b_codes + (_scale_codes(p_s + o_s, m_x, FORMAT),)
    for i_m in tl.static_range(M):
        o_h, o_v, m_h = o_heads[i_m], o_vs[i_m], m_quads[i_m]
        p_t = p_v + (o_lane * (4 * H * V) + o_h * V + o_v)
        p_w = p_c + i_head * L + (o_h * L + o_lane * 4)
        for i_l in tl.static_range(CHUNKS):
            for i_j in tl.static_range(4):
                o_l = i_l * 16 + o_lane * 4 + i_j
                # rows from used on are never loaded: they may hold anything, NaN too
                m_v = (m_h & (o_l < i_used))[:, None]
                if V % 4:
                    m_v &= o_v[:, None] + tl.arange(0, 4)[None, :] < V
                p_l = p_t + (i_l * 16 + i_j) * (H * V)
                b_values = b_values + (_four(tl.load(p_l[:, None] + tl.arange(0, 4)[None, :], mask=m_v, other=0.0)),)
            o_c = i_l * 16 + o_lane[:, None] * 4 + tl.arange(0, 4)[None, :]
            m_c = m_h[:, None] & below(o_c, L, L % 16 == 0)
            b_c = tl.load((p_w + i_l * 16)[:, None] + tl.arange(0, 4)[None, :], mask=m_c, other=0.0)
            b_cs = b_cs + (_four(tl.where(o_c < i_used, b_c, 0.0)),)
        b_unit = tl.load(p_gain + i_head + o_h, mask=m_h, other=0.0)
        if FORMAT == "nvfp4":
            b_unit *= tl.load(p_total + o_h, mask=m_h, other=0.0) * 256.0  # see _scale
        b_units = b_units + (b_unit * (UNIT_CONVERTED if ISA >= 100 else UNIT_MOVED),)

    for i_m in tl.static_range(1 if ONE_THETA else M):
        o_h, m_h = o_heads[i_m], m_quads[i_m]
        p_q = p_theta + i_theta * (K // 4) + ((o_h // SHARED) * (K // 4) + o_lane * 8)
        for i_piece in tl.static_range(LOADS):
            m_x = m_h & m_pieces[i_piece]
            for i_w in tl.static_range(4):
                b_thetas = b_thetas + (load_words(p_q + (i_piece * 16 + i_w) * 2, m_x),)
    b_zero = begin_loads(ISA)

    for i_m in tl.static_range(M):
        o_h, o_v, m_h = o_heads[i_m], o_vs[i_m], m_quads[i_m]
        b_sums = ()
        for i_r in tl.static_range(4):
            b_sum = tl.zeros([32 * WARPS], tl.float32)
            for i_piece in tl.static_range(LOADS):
                b_w = b_words[(i_m * 4 + i_r) * LOADS + i_piece]
                b_s = b_codes[(i_m * 4 + i_r) * LOADS + i_piece]
                for i_w in tl.static_range(2):
                    b_p = block_pairs(b_w[i_w], ISA, b_zero)
                    b_q = b_thetas[OF_M * i_m + i_piece * 4 + i_w * 2]
                    b_t = b_thetas[OF_M * i_m + i_piece * 4 + i_w * 2 + 1]
                    b_dot = pairs_dot(
                        b_p[0], b_p[1], b_p[2], b_p[3], b_p[4], b_p[5], b_p[6], b_p[7], b_q[0], b_q[1], b_t[0], b_t[1],
                        ISA,
                    )  # fmt: skip
                    b_sum += b_dot * _scale(b_s[i_w], FORMAT)
            b_sum *= b_units[i_m]
            for i_l in tl.static_range(CHUNKS):
                for i_j in tl.static_range(4):
                    b_v = b_values[(i_m * CHUNKS + i_l) * 4 + i_j][i_r].to(tl.float32)
                    b_sum += b_v * b_cs[i_m * CHUNKS + i_l][i_j]
            b_sums = b_sums + (b_sum,)
        b_y = _sum_of_row(b_sums, o_thread, ISA)

        m_y = m_h & below(o_v + o_lane, V, V % 4 == 0)
        o_y = (i_head + o_h) * V + o_v + o_lane
        if SKIP:
            b_d = tl.load(p_d + o_h, mask=m_h, other=0.0).to(tl.float32)
            b_y += b_d * tl.load(p_x + o_y, mask=m_y, other=0.0).to(tl.float32)
        if GATE:
            b_z = tl.load(p_gate + o_y, mask=m_y, other=0.0).to(tl.float32)
            b_y *= b_z / (1.0 + tl.exp(-b_z))
        if SOME:
            i_row = tl.load(p_first + i_b)
            m_y &= o_lane < tl.where((i_row >= 0) & (i_row < i_used), 4, 0)
        tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)
