"""Attached models in threads, after exceptions, and handles that are used wrongly; test_adapters.py has the rest."""

import copy
import pickle
import sys
import threading

import pytest
import torch
from tiny_models import TINY_MODELS, build, run, steps, tokens

from quantize_state.adapters import attach
from quantize_state.quant.errors import QuantizeStateError

FAMILIES = [name for name in ("bamba", "qwen3_next", "kimi_linear", "glm5_next") if name in TINY_MODELS][:3]
IDS = tokens(2, 30)
CUTS = IDS[:, :9], *steps(IDS[:, 9:26])


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


def test_threads_that_share_one_attached_model(model):
    """Each with a cache of its own, switched as often as Python can, and one of them failing on the way."""
    with attach(model, "decoupled-nvfp4-w4") as handle:
        expected = run(model, *CUTS)[0]
        got, failed, start = {}, [], threading.Barrier(4)

        def work(i):
            start.wait()
            got[i] = run(model, *CUTS)[0]

        def fails():
            start.wait()
            try:
                run(model, *CUTS[:4], torch.full((2, 1), 10**6))  # no such token
            except IndexError as error:
                failed.append(error)

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            threads = [threading.Thread(target=work, args=(i,)) for i in range(3)] + [threading.Thread(target=fails)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert failed and all(torch.equal(got[i], expected) for i in range(3))
        assert torch.equal(run(model, *CUTS)[0], expected) and len(handle.layers) == 2


def test_a_model_goes_on_after_an_exception_inside_generate(model):
    options = {"attention_mask": torch.ones_like(IDS[:, :9]), "max_new_tokens": 12, "do_sample": False}
    options["pad_token_id"] = 0

    def fails(layer, inputs, y, state):
        if int(state.position[0]) == 14 and layer.index == 1:
            raise ZeroDivisionError

    with attach(model, "decoupled-nvfp4-w4") as handle:
        expected = model.generate(IDS[:, :9], **options)
        handle.observer = fails
        with pytest.raises(ZeroDivisionError):
            model.generate(IDS[:, :9], **options)
        handle.observer = None
        assert torch.equal(model.generate(IDS[:, :9], **options), expected)
    assert torch.equal(run(model, *CUTS)[0], run(copy.deepcopy(model), *CUTS)[0])


def test_a_handle_is_neither_copied_nor_pickled(model):
    """Its copy would restore the model a second time; the model's own copies are plain models."""
    with attach(model, "decoupled-nvfp4") as handle:
        expected = run(model, *CUTS)[0]
        for make in (copy.copy, copy.deepcopy, pickle.dumps, lambda h: copy.deepcopy({"kept": h})):
            with pytest.raises(QuantizeStateError, match="attach the copied model"):
                make(handle)
            with pytest.raises(QuantizeStateError, match="attach the copied model"):
                pickle.dumps(handle.layers[0])
        assert torch.equal(run(model, *CUTS)[0], expected)
        assert pickle.loads(pickle.dumps(model.state_dict())).keys() == model.state_dict().keys()


def test_a_detached_handle_is_not_entered_again(model):
    """The body would run on the untouched model."""
    handle = attach(model, "decoupled-nvfp4")
    with handle:
        pass
    with pytest.raises(QuantizeStateError, match="attach the model again"), handle:
        pass
    handle.detach()
    with attach(model, "decoupled-nvfp4"), pytest.raises(QuantizeStateError, match="again"), handle:
        pass


def test_a_state_in_memory_survives_copies_of_its_cache_in_another_model(model):
    """A cache of one attached model, given to another attached model of its class, keeps its policy."""
    other = copy.deepcopy(model)
    with attach(model, "decoupled-nvfp4-w4") as first, attach(other, "coupled-fp8") as second:
        _, cache = run(model, *CUTS)
        twin = copy.deepcopy(cache)
        expected = run(model, *steps(IDS[:, 26:]), cache=cache)[0]
        assert torch.equal(run(other, *steps(IDS[:, 26:]), cache=twin)[0], expected)
        policies = {state.policy.name for state in second.states(twin).values()}
        assert policies == {state.policy.name for state in first.states(cache).values()}
