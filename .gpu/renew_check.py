"""Encoder, fold and renewal on the device: bits, errors, times. From the repository's root:

    PYTHONPATH=src python .gpu/renew_check.py [bits] [times] [before]

``before``: times of the table's launches alone, which an older commit has too (there, put this file and lib.py into .gpu)."""
import multiprocessing as mp, os, sys, time
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from lib import *
NAMES = ["nemotron-3-super", "qwen3.5-4b", "glm-5.3-flash"]
WHAT = sys.argv[1:] or ["bits", "times"]
BEFORE = "before" in WHAT
ARMS = ["decoupled-nvfp4", "decoupled-nvfp4-four_over_six", "decoupled-nvfp4-mse", "decoupled-mxfp4", "decoupled-mxfp8", "decoupled-fp8",
        "decoupled-int8", "decoupled-bf16", "decoupled-fp16", "decoupled-nvfp4-hadamard16", "decoupled-nvfp4-four_over_six-hadamard",
        "decoupled-mxfp4-hadamard16"]
L = [None] if BEFORE else [dict(rows=128, warps=1, programs=132 * 32), dict(rows=128, warps=1, programs=132 * 16),
                           dict(rows=128, warps=2, programs=132 * 16), dict(rows=128, warps=4, programs=132 * 8)]

def heads(name, programs, warps=1, rows=32, stages=None):
    """A fold of whole heads, which renews them."""
    t = {"nemotron-3-super": (32, 1, 1), "qwen3.5-4b": (32, 1, 3), "glm-5.3-flash": (128, 4, 3)}[name]
    return dict(rows=t[0], columns=32, warps=t[1], stages=t[2], programs=programs, heads=True)
F = [] if BEFORE else [132 * 8, 132 * 12]  # of one warp
def fused(name): return [heads(name, p if name != NAMES[2] else p // 4) for p in F]

def hard(spec, slots):
    """Adversarial heads: ties of E2M1 within 3 ulp at many scales, tiny, subnormal, huge, zeros and −0, outliers."""
    g = torch.Generator().manual_seed(3)
    H, V, K = spec.heads, spec.value_dim, spec.key_dim
    x = torch.randn(slots, H, V, K, generator=g)
    ties = torch.tensor([.25, .75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 1.0, 2.0, 4.0])
    m = torch.randint(8, 127, (slots, H, V, K // 16, 1), generator=g).to(torch.uint8).view(torch.float8_e4m3fn).float()
    near = ties[torch.randint(0, 11, (slots, H, V, K // 16, 16), generator=g)] * m
    near[..., 0] = 6 * m[..., 0]; near[:, :, 0, 0, 0] = 6 * 448.0
    tot = torch.rand(slots, H, 1, 1, 1, generator=g) + .5
    tot[:, 3::7] *= 2.0**-70; tot[:, 4::7] *= 2.0**-115; tot[:, 5::7] *= 2.0**60
    near = near * tot
    bits = near.view(torch.int32) + torch.randint(-3, 4, near.shape, generator=g, dtype=torch.int32)
    sign = torch.where(torch.rand(near.shape, generator=g) < .5, -1.0, 1.0)
    near = (bits.view(torch.float32).clamp(min=0) * sign).view(slots, H, V, K)
    x[:, 1::2] = near[:, 1::2]
    x[:, 0] = 0.0; x[:, 2, ::3] *= 1e-40; x[:, 2, 1, :16] = -0.0; x[:, 2, 2] = 0.0
    x[:, 4] *= 1e-42; x[:, 6] *= 1e37; x[:, 6, 0, 5] = 3.3e38; x[:, 8, 3, 7] = 1e9; x[:, 10] *= 10.0 ** torch.randint(-6, 6, (V, 1), generator=g)
    return x

def bits(job):
    name, arm = job
    from quantize_state.quant.codec import encode
    from quantize_state.kernels.fold.renew import renew
    try:
        spec = SHAPES[name]; pol = parse_arm(arm)
        x = hard(spec, 2)
        torch.set_num_threads(1)
        if pol.read in ("fp16", "bf16"): x = x.clamp(-1e4, 1e4)
        if pol.rotation: x = x.clamp(-1e30, 1e30)
        rate = -torch.ones(spec.heads, device=dev) if spec.rules.gain_sets_decay else None
        st = DecodeState.allocate(spec, pol, 3, device=dev, dtype=torch.bfloat16, decay_rate=rate)
        for t in st.copy.tensors().values(): t.view(torch.uint8).fill_(0xA5)
        st.checkpoint.codes[:2].copy_(x)
        renew(st, torch.tensor([1, -1, 0], dtype=torch.int32, device=dev)); torch.cuda.synchronize()
        e = encode(x, *pol.how(pol.read))
        wrong = {n: int((a.contiguous().view(torch.uint8) != b[:2].cpu().contiguous().view(torch.uint8)).sum()) for (n, a), b in zip(e.tensors().items(), st.copy.tensors().values())}
        spill = sum(int((t[2].contiguous().view(torch.uint8) != 0xA5).sum()) for t in st.copy.tensors().values() if t.shape[0] == 3)
        return f"{name} {arm}: " + ("equal" if not any(wrong.values()) and not spill else f"WRONG {wrong} outside {spill}")
    except Exception as e: return f"{name} {arm}: FAILED {type(e).__name__} {str(e)[:200]}"

def warm(job):
    name, l = job
    try:
        if l: use("fold" if l.get("heads") else "renew", **l)
        st = make(SHAPES[name], "decoupled-nvfp4", 4, fill=torch.full((4,), 15, device=dev))
        sequence.step(st, tok(SHAPES[name], 4)); torch.cuda.synchronize()
    except Exception as e: print("WARM", job, str(e)[:150], flush=True)

def t_renew(p):
    p.plan_all(p.st.policy.window - 1)
    for g, w in zip(p.groups, p.ws): sequence.fold(p.st, p.t, g, w, p.out)
    return graph_time(lambda: [sequence.renew_folded(p.st, g, w) for g, w in zip(p.groups, p.ws)], len(p.groups))
def t_both(p):
    p.plan_all(p.st.policy.window - 1)
    def fn():
        for g, w in zip(p.groups, p.ws): sequence.fold(p.st, p.t, g, w, p.out); sequence.renew_folded(p.st, g, w)
    return graph_time(fn, len(p.groups))
def t_few(p, rows):
    """Fold and renewal where ``rows`` rows flush, of which nothing is in the caches."""
    p.st.cursor.zero_()
    for g in p.groups: p.st.cursor[g[:rows].long()] = p.st.policy.window - 1
    for g, w in zip(p.groups, p.ws): sequence.plan(p.st, g, w)
    def fold():
        for g, w in zip(p.groups, p.ws): sequence.fold(p.st, p.t, g, w, p.out)
    def both():
        for g, w in zip(p.groups, p.ws): sequence.fold(p.st, p.t, g, w, p.out); sequence.renew_folded(p.st, g, w)
    return graph_time(fold, len(p.groups)), graph_time(both, len(p.groups))

if __name__ == "__main__":
    t = time.time()
    with mp.get_context("spawn").Pool(14) as pool:
        a = pool.map_async(bits, [(n, a) for n in NAMES for a in ARMS] if "bits" in WHAT else [], chunksize=1)
        b = pool.map_async(warm, [(n, l) for n in NAMES for l in L + fused(n)] if "times" in WHAT or BEFORE else [], chunksize=1)
        found = a.get(); b.get()
    if found:
        print(f"bits: {sum(f.endswith('equal') for f in found)} of {len(found)} equal"); print(*(f for f in found if not f.endswith("equal")), sep="\n")
        for n in NAMES:
            launch.TABLE = T0; check(n, "decoupled-nvfp4")
            if F: use("fold", **fused(n)[0]); print("whole heads:", end=" "); check(n, "decoupled-nvfp4")
        launch.TABLE = T0
    print(f"compiled, compared: {time.time()-t:.0f} s", flush=True)
    if "times" in WHAT or BEFORE:
        for name in NAMES:
            launch.TABLE = T0
            p = Pool(name, "decoupled-nvfp4")
            print(name, f"fold all rows {p.t_fold():.0f}", flush=True)
            for l in L:
                if l: use("renew", **l)
                try: print("   renew", l or "table", f"all rows: renew {t_renew(p):.0f} both {t_both(p):.0f};", "fold/both of 16 rows %.1f %.1f, of 1 row %.1f %.1f;" % (*t_few(p, 16), *t_few(p, 1)), f"mixed step {p.t_desync():.1f}", flush=True)
                except Exception as e: print("   ", l, type(e).__name__, str(e)[:150], flush=True)
                p.st.checkpoint.codes.normal_()
            for l in fused(name):
                launch.TABLE = T0; use("fold", **l)
                try: print("   whole heads", l, f"all rows: both {t_both(p):.0f};", "both of 16 rows %.1f, of 1 row %.1f;" % (t_few(p, 16)[1], t_few(p, 1)[1]), f"mixed step {p.t_desync():.1f}", flush=True)
                except Exception as e: print("   ", l, type(e).__name__, str(e)[:150], flush=True)
                p.st.checkpoint.codes.normal_()
            del p; torch.cuda.empty_cache()
    print(f"{time.time()-t:.0f} s")
