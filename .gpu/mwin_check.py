"""Verification on the device: every kernel against the references, then times. Run in the root: python .gpu/mwin_check.py
[check] [time] [accept]; about a minute with all."""
import multiprocessing as mp, os, sys, time
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "src"))
NAMES = {"mamba2": "nemotron-3-super", "gdn": "qwen3.5-4b", "kda": "glm-5.3-flash"}
TS, LS = (1, 2, 4, 8), (16, 32, 64)


def check(job):
    import torch
    from quantize_state.kernels import sequence
    from quantize_state.kernels.cases import random_state, random_tokens
    from quantize_state.kernels.shapes import SHAPES
    from quantize_state.kernels.verify_checks import check_verify
    from quantize_state.quant.policy import StatePolicy
    family, read, L, T = job
    try:
        spec, policy = SHAPES[NAMES[family]], StatePolicy(read=read, window=L)
        found = check_verify(spec, policy, "cuda", T)
        if read:  # as it is timed: compiled here, so that timing finds it in the cache
            state = random_state(spec, policy, 2, seed=0, device="cuda")
            x = random_tokens(spec, 2, T, seed=1, device="cuda")
            y = torch.zeros(2, T, spec.heads, spec.value_dim, dtype=torch.bfloat16, device="cuda")
            sequence.verify(state, x, torch.arange(2, dtype=torch.int32, device="cuda"), out=y)
            torch.cuda.synchronize()
        bad = [f"{c.name} {c.error:.2e} > {c.limit:g}" for c in found if not c.passed]
        return job, max((c.error for c in found if "output of reads" in c.name), default=0.0), bad
    except Exception as e:
        return job, float("nan"), [f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"]


def checks():
    t = time.time()
    jobs = [(f, "nvfp4", L, T) for L in LS[::-1] for f in NAMES for T in TS if L == 16 or T in (4, 8) or (L, f) == (64, "gdn")]
    jobs += [(f, None, L, T) for L in LS for f in NAMES for T in TS if (L == 16 and T > 1) or T == 4]
    with mp.get_context("spawn").Pool(12) as pool:
        found = pool.map(check, jobs, chunksize=1)
    bad = [f for f in found if f[2]]
    print(f"{len(found)} checks, {len(bad)} bad, {time.time() - t:.0f} s; reads: " + ", ".join(
        f"{r or 'fp32'} {max((e for (f, q, *_), e, b in found if q == r and not b), default=0):.1e}" for r in (None, "nvfp4")))
    for job, _, what in bad:
        print("BAD", job, what)


def prepared(family, L, T, B, groups):
    import torch
    from quantize_state.kernels import sequence
    from quantize_state.kernels.cases import random_state, random_tokens
    from quantize_state.kernels.shapes import SHAPES
    from quantize_state.quant.policy import StatePolicy
    spec = SHAPES[NAMES[family]]
    state = random_state(spec, StatePolicy(read="nvfp4", window=L), groups * B, seed=0, device="cuda")
    return spec, state


def measured(state, spec, T, B, groups, fill):
    """Window kernel alone, readout alone, whole verification, nobody closing, all rows at ``fill``; cold copies."""
    import torch
    from quantize_state.kernels import sequence
    from quantize_state.kernels.cases import random_tokens
    from quantize_state.kernels.readout.triton import readout
    from quantize_state.kernels.timing import GraphTimer
    timer = GraphTimer(replays=12, seconds=0.05)
    slots = torch.randperm(state.slots, generator=torch.Generator().manual_seed(0))[: groups * B].view(groups, B).int().cuda()
    x = random_tokens(spec, B, T, seed=1, device="cuda")
    y = torch.zeros(B, T, spec.heads, spec.value_dim, dtype=torch.bfloat16, device="cuda")
    ws = [sequence.Workspace.allocate(state, B, tokens=T) for _ in slots]
    state.cursor.fill_(fill)
    for s, w in zip(slots, ws):
        sequence.verify(state, x, s, workspace=w, out=y)
    t = [timer([lambda s=s, w=w: f(s, w) for s, w in zip(slots, ws)]).median for f in (
        lambda s, w: sequence.window(state, x, s, w),
        lambda s, w: readout(state.read_source, state.ring["v"], w.theta, w.gain, w.c, s, w.used, y, row=w.row if T > 1 else None),
        lambda s, w: sequence.verify(state, x, s, workspace=w, out=y))]
    if T == 1:
        t.append(timer([lambda s=s, w=w: sequence.step(state, x, s, workspace=w, out=y) for s, w in zip(slots, ws)],
                       lambda: state.cursor.fill_(fill)).median)
    return t


def times():
    import torch
    for family in NAMES:
        spec, state = prepared(family, 16, 1, 256, 3)
        for B, groups in ((256, 3), (32, 24)):
            line = []
            for T in TS:
                t = measured(state, spec, T, B, groups, 4)
                line.append(f"T {T}: {t[0]:.1f}+{t[1]:.1f} of {t[2]:.1f}" + (f" (step {t[3]:.1f})" if T == 1 else ""))
            print(f"{family} B {B} window+readout of verify: " + "; ".join(line), flush=True)
        del state
        torch.cuda.empty_cache()


def acceptance():
    """µs of a verification of four tokens, all accepted, rows spread over the cursors where they then are; and T = 8."""
    import torch
    from quantize_state.evals.speed.result import Bandwidth, Time
    from quantize_state.evals.speed.verify_measure import Bench, Shape
    from quantize_state.kernels.shapes import SHAPES
    from quantize_state.kernels.timing import GraphTimer, l2_bytes
    device = torch.device("cuda")
    any_time = Time(1.0, 1.0, 1.0, 1, 1)
    speeds = [Bandwidth("read", 1, any_time, 4.2), Bandwidth("copy", 1, any_time, 4.1)]
    for family in NAMES:
        line = []
        for L in LS:
            own = Bench(GraphTimer(replays=9, seconds=0.05), device, speeds, l2_bytes(device), L, 0.8, (256,), (4,))
            shape = Shape(own, SHAPES[NAMES[family]])
            steps = {s.kind: s for s in shape.steps("decoupled-nvfp4", 256, 4)}
            line.append(f"L {L}: reads {steps['reads'].time.median:.0f}, full {steps['full'].time.median:.0f} ({steps['full'].flushing:.2f} close), 0.8 {steps['partial'].time.median:.0f}")
            shape.pools.clear()
            torch.cuda.empty_cache()
        print(f"{family} B 256 T 4, with accept: " + "; ".join(line), flush=True)


if __name__ == "__main__":
    what, t = sys.argv[1:] or ["check", "time", "accept"], time.time()
    if "check" in what:
        checks()
    if "time" in what:
        times()
        print(f"{time.time() - t:.0f} s", flush=True)
    if "accept" in what:
        acceptance()
    print(f"all {time.time() - t:.0f} s")
