"""A pool of pages as vLLM carves it, and a scheduler that treats requests in it as vLLM's does, both without vLLM."""

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import torch
from recurrence import SPECS, random_inputs, recurrence

from quantize_state.integrations.vllm.layer import ReadCopy
from quantize_state.integrations.vllm.pages import checkpoint_dtype, extra_dtypes, extra_shapes
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.quant.policy import parse_arm

PAGES = 7
GARBAGE = 0xFF
"""Every byte of a page that nobody has used yet: NaN as a float, −1 as an integer."""


def pool(
    spec, policies, *, dtype=torch.float32, convolution=24, padding=0, checkpoint=torch.float32, pages=PAGES,
    device="cpu",
):  # fmt: skip
    """Views of a fresh pool as vLLM carves them: convolution state, recurrent state, and the three tensors more."""
    shapes = ((convolution,), (spec.heads, spec.value_dim, spec.key_dim), *extra_shapes(spec, policies))
    dtypes = (dtype, checkpoint, *extra_dtypes(dtype))
    sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
    tensor = torch.full((pages, sum(sizes) + padding), GARBAGE, dtype=torch.uint8, device=device)
    views, offset = [], 0
    for shape, kind, size in zip(shapes, dtypes, sizes, strict=True):
        views.append(tensor[:, offset : offset + size].view(kind).view(pages, *shape))
        offset += size
    return tensor, views


def layer(family, arm, *, policies=None, transposed=False, rows=4, path="replay", **given):
    """A ReadCopy on fresh pages, and the pages. ``family``: one of SPECS, or (spec, Mamba-2's decay rate)."""
    spec, rate = SPECS[family] if isinstance(family, str) else family
    policy = parse_arm(arm)
    pages, views = pool(spec, policies or [policy], checkpoint=checkpoint_dtype(policy), **given)
    checkpoint = views[1]
    if transposed:
        checkpoint = checkpoint.view(len(pages), spec.heads, spec.key_dim, spec.value_dim).mT
    copy = ReadCopy("model.layers.0.mixer", spec, policy, max_rows=rows, path=path)
    copy.bind(checkpoint, tuple(views[2:]), None if rate is None else rate.to(pages.device))
    return copy, pages


@dataclass
class Request:
    """``inputs`` [1, N, …]: all tokens that it will ever see, ``prompt`` of them known from the beginning."""

    number: int
    inputs: TokenInputs
    prompt: int
    prefix: int = 0
    """Tokens that came from another request's page; of them there are no outputs here."""
    computed: int = 0
    page: int = 0
    outputs: dict = field(default_factory=dict)

    @property
    def tokens(self):
        return self.inputs.tokens

    def chunk(self, count):
        return self.inputs.slice(self.computed, self.computed + count)


class Scheduler:
    """Serves requests by a ReadCopy as vLLM's engine would: what it does depends on ``seed`` alone, not on numbers.

    In each batch decode rows come first, padded with page 0 to ``rows``, then chunks of prompts. A chunk of one token
    is a decode row unless it is a request's first. Requests are preempted and start again from nothing, pages are
    copied between requests with whatever their rings hold, and pages that are free again are given away as they are.
    """

    def __init__(self, copy, pages, requests, *, seed, rows=4, chunk=4):
        self.copy, self.pages, self.rows, self.chunk = copy, pages, rows, chunk
        self.rng = random.Random(seed)
        self.waiting, self.running, self.done = deque(requests), [], []
        self.free = deque(range(1, len(pages)))
        self.seen, self.used = Counter(), set()

    def serve(self):
        """Run until every request has had all its tokens; returns them in no particular order."""
        while self.waiting or self.running:
            self._admit()
            self._batch()
            for request in [r for r in self.running if r.computed == r.tokens]:
                self._leave(request, self.done)
            if self.running and self.rng.random() < 0.1:
                victim = self.rng.choice(self.running)
                self._leave(victim, self.waiting)
                # What it has generated is a prompt now.
                victim.prompt, victim.prefix, victim.computed = max(victim.prompt, victim.computed), 0, 0
                self.seen["preempted"] += 1
        return self.done

    def _admit(self):
        while self.waiting and self.free and len(self.running) < self.rows:
            request = self.waiting.popleft()
            request.page = self.free.popleft()
            self.seen["reused"] += request.page in self.used
            self.used.add(request.page)
            self.running.append(request)
            decoding = [r for r in self.running if r.computed > r.prompt]
            if decoding and self.free and len(self.running) < self.rows and self.rng.random() < 0.5:
                self._share(self.rng.choice(decoding))

    def _share(self, donor):
        """Prefix caching: a request with the tokens of ``donor`` so far takes a copy of its page."""
        page = self.free.popleft()
        self.pages[page] = self.pages[donor.page]
        count = donor.computed
        known = min(count + self.rng.randint(1, 3), donor.tokens)
        self.running.append(Request(donor.number, donor.inputs, known, prefix=count, computed=count, page=page))
        self.used.add(page)
        self.seen["shared"] += 1

    def _leave(self, request, where):
        self.running.remove(request)
        self.free.append(request.page)
        where.append(request)

    def _batch(self):
        decode, prefill = [], []
        for request in self.running:
            left = request.prompt - request.computed
            count = min(self.rng.randint(1, self.chunk), left) if left > 0 else 1
            if count == 1 and request.computed > 0:
                decode.append(request)
                self.seen["last chunks"] += left == 1
            else:
                prefill.append((request, count))
        self.seen["mixed"] += bool(decode) and bool(prefill)
        device = self.pages.device
        slots = torch.tensor([r.page for r, _ in prefill], dtype=torch.int32, device=device)
        has_state = torch.tensor([r.computed > 0 for r, _ in prefill], dtype=torch.bool, device=device)
        cursor = self.copy.state.cursor[slots.long()]
        self.seen["folded"] += int((cursor[has_state] > 0).sum())
        with self.copy.prefill(slots, has_state):
            self._decode(decode)
            for request, count in prefill:
                self._prefill(request, count)

    def _decode(self, requests):
        spec, device, padding = self.copy.spec, self.pages.device, self.rows - len(requests)
        if not requests:
            return
        self.seen["decoded"] += len(requests)
        self.seen["padded"] += padding
        tokens = [r.chunk(1) for r in requests]
        nothing = tokens[0].map(lambda t: torch.full_like(t, float("nan")))
        inputs = TokenInputs(
            *(
                None if parts[0] is None else torch.cat(parts)
                for parts in zip(*(vars(t).values() for t in [*tokens, *[nothing] * padding]), strict=True)
            )
        )
        slots = torch.tensor([r.page for r in requests] + [0] * padding, dtype=torch.int32, device=device)
        out = torch.full((self.rows, spec.heads, spec.value_dim), float("nan"), dtype=inputs.v.dtype, device=device)
        self.copy.decode(inputs, slots, out)
        for row, request in enumerate(requests):
            request.outputs[request.computed] = out[row]
            request.computed += 1

    def _prefill(self, request, count):
        """In place of vLLM's: the recurrence, on the checkpoint."""
        checkpoint = self.copy.state.checkpoint.codes[request.page]
        before = checkpoint if request.computed else torch.zeros_like(checkpoint)
        y, states = recurrence(self.copy.spec, request.chunk(count), before[None].double(), self.copy.state.decay_rate)
        self.copy.state.checkpoint.codes[request.page] = states[-1][0].to(checkpoint.dtype)
        request.outputs |= {request.computed + t: y[0, t] for t in range(count)}
        request.computed += count


def requests_of(spec, lengths, *, dtype=torch.float32, device="cpu"):
    """Requests of (prompt, tokens) each; gains and log-decays stay float32."""
    made = []
    for seed, (prompt, tokens) in enumerate(lengths):
        inputs = random_inputs(spec, 1, tokens, seed, dtype=torch.float32)
        q, k, v = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v))
        inputs = TokenInputs(q, k, v, inputs.beta, inputs.g).map(lambda t: t.to(device))
        made.append(Request(seed, inputs, prompt))
    return made


def all_outputs(requests):
    """[tokens of all requests but prefixes, H, V], in an order that depends on the requests alone."""
    return torch.cat(
        [torch.stack([r.outputs[t].float() for t in range(r.prefix, r.tokens)]) for r in _sorted(requests)]
    )


def exact_outputs(copy, requests):
    """What ``all_outputs`` would be without rounding, in float64."""
    spec, found = copy.spec, []
    for r in _sorted(requests):
        zeros = torch.zeros(1, spec.heads, spec.value_dim, spec.key_dim, dtype=torch.float64, device=r.inputs.v.device)
        found.append(recurrence(spec, r.inputs, zeros, copy.state.decay_rate)[0][0, r.prefix :])
    return torch.cat(found)


def _sorted(requests):
    return sorted(requests, key=lambda r: (r.number, r.prefix, r.prompt))
