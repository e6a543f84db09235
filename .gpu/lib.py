import sys, time, statistics, itertools, traceback
sys.path.insert(0, "src")
import torch
from quantize_state.kernels import launch, sequence
from quantize_state.kernels.compile import SHAPES
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.kernels.step import step as ref_step
from quantize_state.quant.policy import StatePolicy, parse_arm
from quantize_state.quant.state import DecodeState
from quantize_state.kernels.readout.triton import readout
dev = "cuda"
T0 = launch.TABLE
def use(op, fmt=None, **kw):
    launch.TABLE = (launch.Entry(launch.Launch(**kw), op, fmt),) + T0
def make(spec, arm, slots, seed=0, fill=None):
    pol = parse_arm(arm)
    g = torch.Generator(dev).manual_seed(seed)
    rate = -torch.rand(spec.heads, device=dev, generator=g) if spec.rules.gain_sets_decay else None
    st = DecodeState.allocate(spec, pol, slots, device=dev, dtype=torch.bfloat16, decay_rate=rate)
    step = 64
    for i in range(0, slots, step):
        n = min(step, slots - i)
        st.renew_(torch.randn(n, spec.heads, spec.value_dim, spec.key_dim, device=dev, generator=g), torch.arange(i, i+n, device=dev))
    st.ring["k"].copy_(torch.randn(st.ring["k"].shape, device=dev, generator=g))
    st.ring["v"].copy_(torch.randn(st.ring["v"].shape, device=dev, generator=g))
    st.ring["beta"].copy_(torch.rand(st.ring["beta"].shape, device=dev, generator=g))
    if "g" in st.ring: st.ring["g"].copy_(-torch.rand(st.ring["g"].shape, device=dev, generator=g) * .2)
    if fill is not None: st.cursor.copy_(fill)
    if spec.rules.delta_rule: sequence.mixing_of(st)
    return st
def tok(spec, b, seed=1):
    g = torch.Generator(dev).manual_seed(seed)
    r = lambda *s: torch.randn(b, 1, *s, device=dev, generator=g).bfloat16()
    u = lambda *s: torch.rand(b, 1, *s, device=dev, generator=g)
    gg = None
    if spec.family == "gdn": gg = -u(spec.heads) * .2
    if spec.family == "kda": gg = -u(spec.heads, spec.key_dim) * .2
    return TokenInputs(r(spec.key_heads, spec.key_dim), r(spec.key_heads, spec.key_dim), r(spec.heads, spec.value_dim), u(spec.heads), gg)
def rel(a, b): return float((a.double()-b.double()).norm()/b.double().norm())
def check(name, arm, steps=20, b=6):
    spec = SHAPES[name]
    st = make(spec, arm, b, fill=torch.tensor([15, 3, 14, 0, 7, 12][:b], device=dev))
    cl = st.clone(); cl.mix = None
    worst = 0
    for i in range(steps):
        t = tok(spec, b, 100+i)
        y = sequence.step(st, t); yr = ref_step(cl, t)
        worst = max(worst, rel(y, yr))
    ck = rel(st.checkpoint.codes.float(), cl.checkpoint.codes.float())
    from quantize_state.quant.codec import encode
    bad = 0
    if st.copy is not None:
        e = encode(st.checkpoint.codes, *st.policy.how(st.policy.read))
        bad = max(float((a.view(torch.uint8) != b_.contiguous().view(torch.uint8)).float().mean()) for a, b_ in zip(e.tensors().values(), st.copy.tensors().values()))
    print(f"check {name} {arm}: y {worst:.1e} ckpt {ck:.1e} copy bytes wrong {bad:.1e}", flush=True)
    return worst, ck, bad
def graph_time(fn, launches, reps=12):
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        fn(); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): fn()
    ts = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) * 1e3 / launches)
    return statistics.median(ts[2:])
class Pool:
    def __init__(self, name, arm, B=256, slots=1025):
        self.spec = SHAPES[name]; self.B = B
        self.st = make(self.spec, arm, slots)
        perm = torch.randperm(slots - 1, device=dev)[: (slots - 1)//B*B].to(torch.int32)
        self.groups = list(perm.view(-1, B))
        self.t = tok(self.spec, B)
        self.out = torch.empty(B, 1, self.spec.heads, self.spec.value_dim, device=dev, dtype=torch.bfloat16)
        self.ws = [sequence.Workspace.allocate(self.st, B) for _ in self.groups]
    def plan_all(self, fill):
        self.st.cursor.fill_(fill)
        for g, w in zip(self.groups, self.ws): sequence.plan(self.st, g, w)
    def t_fold(self):
        self.plan_all(self.st.policy.window-1)
        return graph_time(lambda: [sequence.fold(self.st, self.t, g, w, self.out) for g, w in zip(self.groups, self.ws)], len(self.groups))
    def t_window(self, fill=7):
        self.plan_all(fill)
        return graph_time(lambda: [sequence.window(self.st, self.t, g, w) for g, w in zip(self.groups, self.ws)], len(self.groups))
    def t_readout(self, fill=7):
        self.plan_all(fill)
        for g, w in zip(self.groups, self.ws): sequence.window(self.st, self.t, g, w)
        return graph_time(lambda: [readout(self.st.read_source, self.st.ring["v"], w.theta, w.gain, w.c, g, w.used, self.out) for g, w in zip(self.groups, self.ws)], len(self.groups))
    def step_round(self):
        for g, w in zip(self.groups, self.ws): sequence.step(self.st, self.t, g, workspace=w, out=self.out)
    def t_nonflush(self):
        L = self.st.policy.window
        def fn():
            self.st.cursor.zero_()
            for _ in range(L-1): self.step_round()
        return graph_time(fn, (L-1)*len(self.groups), reps=6)
    def t_flush(self):
        L = self.st.policy.window
        def fn():
            self.st.cursor.fill_(L-1); self.step_round()
        return graph_time(fn, len(self.groups))
    def t_desync(self):
        L = self.st.policy.window
        c0 = (torch.arange(self.st.slots, device=dev) % L).int()
        def fn():
            self.st.cursor.copy_(c0)
            for _ in range(L): self.step_round()
        return graph_time(fn, L*len(self.groups), reps=6)
