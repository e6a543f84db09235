"""The readout of several queries: each tile of the copy is read and decoded once, and multiplied on tensor cores.

A thread loads sixteen bytes of a row at a time, decodes them into words of an operand (device/operand.py), and holds
the same elements of Θ of one query. Eight queries are the columns of one product, whose sums are float32: the error is
that of Θ where that is float16 (2e-4 of the output's norm, of 4-bit formats), else of FP32's order. Vᵀ·C is one such
product too, with the values as rows.
"""

# mypy: disable-error-code="assignment, index, misc, var-annotated"
# (tuples that grow in a loop that the compiler unrolls)
from __future__ import annotations

from ..device.mma import below, mma, mma_parts, pair_parts, thread_index
from ..device.operand import begin_loads, block_scales, decoded, load_words, row_unit, theta_operand
from ..device.targets import tl, triton


@triton.jit
def _value_pairs(p_v, m_v, o_l, i_used, S: tl.constexpr, PARTS: tl.constexpr):
    """Of a row of Vᵀ the ring rows o_l to o_l + 3, S elements apart: parts of two pairs."""
    # rows from used on are never loaded: they may hold anything, NaN too
    b_x = tl.load(p_v, mask=m_v & (o_l < i_used), other=0.0)
    b_y = tl.load(p_v + S, mask=m_v & (o_l + 1 < i_used), other=0.0)
    b_z = tl.load(p_v + 2 * S, mask=m_v & (o_l + 2 < i_used), other=0.0)
    b_w = tl.load(p_v + 3 * S, mask=m_v & (o_l + 3 < i_used), other=0.0)
    if PARTS == 1:
        b_x, b_y = b_x.to(tl.int16, bitcast=True).to(tl.int32), b_y.to(tl.int16, bitcast=True).to(tl.int32)
        b_z, b_w = b_z.to(tl.int16, bitcast=True).to(tl.int32), b_w.to(tl.int16, bitcast=True).to(tl.int32)
        return (((b_x & 0xFFFF) | (b_y << 16), (b_z & 0xFFFF) | (b_w << 16)),)
    else:
        return pair_parts(b_x.to(tl.float32), b_y.to(tl.float32), b_z.to(tl.float32), b_w.to(tl.float32))


@triton.jit
def _two_rows(b_x, b_y, I: tl.constexpr):
    """Pairs I and I + 1 of two rows, as the A of one product."""
    return b_x[I], b_y[I], b_x[I + 1], b_y[I + 1]


@triton.jit
def _read_row(
    i_b, i_used,
    p_codes, p_row, p_block, p_total, p_v, p_theta, p_gain, p_c, p_slots, p_first, p_x, p_d, p_gate, p_y,
    s_codes, s_row, s_block, s_total, s_v,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, L: tl.constexpr, T: tl.constexpr,
    M: tl.constexpr, WARPS: tl.constexpr,
    SHARED: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, VALUE_PARTS: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, SOME: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """The outputs of batch row i_b and one tile of V; arguments as the kernel's."""
    R: tl.constexpr = 16 * M * WARPS
    TILES: tl.constexpr = (V + R - 1) // R
    PIECES: tl.constexpr = K * BITS // 128  # of sixteen bytes, in a row
    LOADS: tl.constexpr = (PIECES + 3) // 4
    STEPS: tl.constexpr = 32 // BITS  # of four elements, in a piece
    PARTS: tl.constexpr = 3 if FORMAT == "fp32" else 2 if FORMAT == "fp16" else 1
    PAIRS: tl.constexpr = 64 // BITS
    BLOCKS: tl.constexpr = K // (16 if FORMAT == "nvfp4" else 32)
    i_h = tl.program_id(0) // TILES
    i_slot = tl.load(p_slots + i_b).to(tl.int64)
    o_thread = thread_index(32 * WARPS, ISA)
    o_group = (o_thread // 4) % 8
    o_quad = o_thread % 4
    o_v = (tl.program_id(0) % TILES) * R + (o_thread // 32) * (16 * M) + o_group
    o_row = i_h * V + o_v
    p_codes += i_slot * s_codes + o_row * (PIECES * 2) + o_quad * 2
    p_row += i_slot * s_row + o_row
    p_block += i_slot * s_block + o_row * BLOCKS

    m_rows, m_pieces = (), ()
    for i_r in tl.static_range(2 * M):
        m_rows = m_rows + (below(o_v + 8 * i_r, V, V % R == 0),)
    for i_piece in tl.static_range(LOADS):
        m_pieces = m_pieces + (below(o_quad + i_piece * 4, PIECES, PIECES % 4 == 0),)

    # what comes from memory first: codes and scales, values of the ring
    b_words, b_scales, b_units, b_tops = (), (), (), ()
    for i_r in tl.static_range(2 * M):
        b_unit, b_top = row_unit(p_row + 8 * i_r, p_block + 8 * i_r * BLOCKS, m_rows[i_r], BLOCKS, FORMAT)
        b_units, b_tops = b_units + (b_unit,), b_tops + (b_top,)
        for i_piece in tl.static_range(LOADS):
            p_w = p_codes + (8 * i_r * PIECES * 2 + i_piece * 8)
            b_words = b_words + (load_words(p_w, m_rows[i_r] & m_pieces[i_piece]),)
    for i_r in tl.static_range(2 * M):
        for i_piece in tl.static_range(LOADS):
            m_x = m_rows[i_r] & m_pieces[i_piece]
            b_s = block_scales(p_block + 8 * i_r * BLOCKS, b_tops[i_r], o_quad + i_piece * 4, m_x, FORMAT, ISA)
            b_scales = b_scales + (b_s,)
    b_total = tl.full([], 1.0, tl.float32)
    if FORMAT == "nvfp4":
        b_total = tl.load(p_total + i_slot * s_total + i_h) * (256.0 if ISA >= 100 else 128.0)
    elif FORMAT == "mxfp4":
        b_total = b_total * 0.5
    i_row = 0
    if SOME:
        i_row = tl.load(p_first + i_b)
    p_v += i_slot * s_v + o_row
    b_values = ()
    for i_l in tl.static_range((L + 15) // 16):
        o_l = i_l * 16 + o_quad * 4
        for i_r in tl.static_range(2 * M):
            b_x = _value_pairs(p_v + 8 * i_r + o_l * (H * V), m_rows[i_r], o_l, i_used, H * V, VALUE_PARTS)
            b_values = b_values + (b_x,)

    b_zero = tl.zeros([32 * WARPS], tl.float32)
    if T == 1:  # of several queries there are other loads behind these anyway
        b_zero = (tl.zeros([32 * WARPS], tl.int32) + begin_loads(ISA)).to(tl.float32, bitcast=True)
    for i_n in tl.static_range((T + 7) // 8):
        o_t = i_n * 8 + o_group
        m_t = below(o_t, T, T % 8 == 0)
        i_bt = (i_b * T + o_t).to(tl.int64)
        p_q = p_theta + (i_bt * (H // SHARED) + i_h // SHARED) * (K // 4 if HALF else K // 2)
        m_us, b_gains = (), ()
        for i_c in tl.static_range(2):
            o_u = i_n * 8 + o_quad * 2 + i_c
            m_u = below(o_u, T, T % 8 == 0)
            b_gains = b_gains + (tl.load(p_gain + (i_b * T + o_u) * H + i_h, mask=m_u, other=0.0) * b_total,)
            if SOME:
                m_u &= (i_row + o_u >= 0) & (i_row + o_u < i_used)
            m_us = m_us + (m_u,)

        b_outs, b_sums = (), ()
        for _ in tl.static_range(M):
            b_outs = b_outs + ((b_zero, b_zero, b_zero, b_zero),)
            b_sums = b_sums + ((b_zero, b_zero, b_zero, b_zero),)
        for i_l in tl.static_range((L + 15) // 16):
            o_l = i_l * 16 + o_quad * 4
            p_cl = p_c + (i_bt * H + i_h) * L + o_l
            b_b = pair_parts(
                tl.load(p_cl, mask=m_t & (o_l < i_used), other=0.0),
                tl.load(p_cl + 1, mask=m_t & (o_l + 1 < i_used), other=0.0),
                tl.load(p_cl + 2, mask=m_t & (o_l + 2 < i_used), other=0.0),
                tl.load(p_cl + 3, mask=m_t & (o_l + 3 < i_used), other=0.0),
            )
            b_next = ()
            for i_m in tl.static_range(M):
                b_x, b_y, b_a = b_values[2 * (M * i_l + i_m)], b_values[2 * (M * i_l + i_m) + 1], ()
                for i_p in tl.static_range(VALUE_PARTS):
                    b_a = b_a + (_two_rows(b_x[i_p], b_y[i_p], 0),)
                b_next = b_next + (mma_parts(b_outs[i_m], b_a, b_b, VALUE_PARTS, ISA),)
            b_outs = b_next

        for i_piece in tl.static_range(LOADS):
            o_piece = o_quad + i_piece * 4
            m_q = m_t & m_pieces[i_piece]
            b_rows = ()
            for i_r in tl.static_range(2 * M):
                b_w, b_s = b_words[LOADS * i_r + i_piece], b_scales[LOADS * i_r + i_piece]
                b_rows = b_rows + (decoded(b_w[0], b_w[1], b_s[0], b_s[1], FORMAT, HALF, ISA),)
            for i_step in tl.static_range(STEPS):
                if HALF:
                    b_x = load_words(p_q + o_piece * 8 + i_step // 2 * 2, m_q)[i_step % 2]
                    b_b = (b_x.to(tl.int32), (b_x >> 32).to(tl.int32))
                else:
                    b_b = theta_operand(p_q, o_piece * (128 // BITS) + i_step * 4, m_q, i_step, FORMAT, ISA)
                b_next = ()
                for i_m in tl.static_range(M):
                    b_x, b_y, b_a = b_rows[2 * i_m], b_rows[2 * i_m + 1], ()
                    for i_p in tl.static_range(PARTS):
                        b_a = b_a + (_two_rows(b_x, b_y, i_p * PAIRS + i_step * 2),)
                    if HALF:
                        b_next = b_next + (mma(b_sums[i_m], b_a[0], b_b, True, ISA),)
                    else:
                        b_next = b_next + (mma_parts(b_sums[i_m], b_a, b_b, PARTS, ISA),)
                b_sums = b_next

        for i_m in tl.static_range(M):
            for i_c in tl.static_range(4):
                # of sixteen rows group + 8·(i_c // 2), of eight queries 2·quad + i_c % 2
                m_y = m_us[i_c % 2] & m_rows[2 * i_m + i_c // 2]
                b_unit = b_gains[i_c % 2] * b_units[2 * i_m + i_c // 2]
                b_y = b_outs[i_m][i_c] + b_sums[i_m][i_c] * b_unit
                o_y = ((i_b * T + i_n * 8 + o_quad * 2 + i_c % 2).to(tl.int64) * H + i_h) * V + o_v
                if SKIP:
                    b_x = tl.load(p_x + o_y + (16 * i_m + i_c // 2 * 8), mask=m_y, other=0.0).to(tl.float32)
                    b_y += tl.load(p_d + i_h).to(tl.float32) * b_x
                if GATE:
                    b_z = tl.load(p_gate + o_y + (16 * i_m + i_c // 2 * 8), mask=m_y, other=0.0).to(tl.float32)
                    b_y *= b_z / (1.0 + tl.exp(-b_z))
                tl.store(p_y + o_y + (16 * i_m + i_c // 2 * 8), b_y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def readout_many_kernel(
    p_codes, p_row, p_block, p_total,  # the read copy: codes as int64, scales
    p_v,  # ring [slots, L, H, V]
    p_theta, p_gain, p_c,  # as int64: [B, T, H / SHARED, K] float32, or float16 in pair order where HALF; [B, T, H]; …
    p_slots, p_used,  # [B] int32: slot of each row; ring rows it reads, 0 for rows that are not read
    p_list, p_count,  # int32 [B], [1]: the batch rows to look at, where LIST; else all
    p_first,  # [B] int32: ring row of the first query, −1 where that has its output already
    p_x, p_d, p_gate,  # [B, T, H, V] inputs of the skip, [H], [B, T, H, V]
    p_y,  # [B, T, H, V]
    s_codes, s_row, s_block, s_total, s_v,  # slot strides in elements
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, L: tl.constexpr, T: tl.constexpr,
    M: tl.constexpr, WARPS: tl.constexpr,
    SHARED: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, VALUE_PARTS: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, SOME: tl.constexpr, LIST: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Grid (H · V tiles, B), or fewer that take the rows of a list in turns. Each warp takes M times sixteen rows of
    the state of one head. C: [B, T, H, L]; VALUE_PARTS: bfloat16 parts of a value of the ring; SHARED: heads that share
    one Θ (Mamba-2's groups)."""
    if LIST:
        for i in range(tl.program_id(1), tl.load(p_count), tl.num_programs(1)):
            i_b = tl.load(p_list + i)
            i_used = tl.load(p_used + i_b)
            if i_used > 0:
                _read_row(
                    i_b, i_used,
                    p_codes, p_row, p_block, p_total, p_v, p_theta, p_gain, p_c, p_slots, p_first,
                    p_x, p_d, p_gate, p_y,
                    s_codes, s_row, s_block, s_total, s_v,
                    H, V, K, L, T, M, WARPS, SHARED, FORMAT, BITS, HALF, VALUE_PARTS, SKIP, GATE, SOME, ISA,
                )  # fmt: skip
    else:
        i_b = tl.program_id(1)
        i_used = tl.load(p_used + i_b)
        if i_used <= 0:
            return
        _read_row(
            i_b, i_used,
            p_codes, p_row, p_block, p_total, p_v, p_theta, p_gain, p_c, p_slots, p_first, p_x, p_d, p_gate, p_y,
            s_codes, s_row, s_block, s_total, s_v,
            H, V, K, L, T, M, WARPS, SHARED, FORMAT, BITS, HALF, VALUE_PARTS, SKIP, GATE, SOME, ISA,
        )  # fmt: skip
