import multiprocessing as mp, time
C = ["128,32,4,3", "128,32,4,1", "64,32,8,1", "32,32,4,1", "64,32,4,1", "64,32,4,2", "32,32,2,1"]
def go(job):
    c, L, read = job
    import torch
    from quantize_state.kernels import launch
    from quantize_state.kernels.checks import check_replay
    from quantize_state.kernels.verify_checks import check_verify
    from quantize_state.kernels.shapes import SHAPES
    from quantize_state.quant.policy import StatePolicy
    r, k, w, s = map(int, c.split(","))
    launch.TABLE = (launch.Entry(launch.Launch(rows=r, columns=k, warps=w, stages=s, programs=264), "fold", "kda"),) + launch.TABLE
    try:
        out = []
        for f in (lambda: check_replay(SHAPES["glm-5.3-flash"], StatePolicy(read=read, window=L), "cuda"), lambda: check_verify(SHAPES["kimi-k3-rank"], StatePolicy(read=read, window=L), "cuda", 4)):
            out += [f"{x.name} {x.error:.1e}" for x in f() if not x.passed]
        return job, out or "good"
    except Exception as e:
        return job, repr(e)[:200]
if __name__ == "__main__":
    t = time.time()
    with mp.get_context("spawn").Pool(8) as p:
        for x in p.imap_unordered(go, [(c, 64, "nvfp4") for c in C] + [(C[0], 32, "nvfp4"), (C[0], 48, None)], chunksize=1): print(*x, flush=True)
    print(f"{time.time()-t:.0f} s")
