"""The stand-ins of vllm_standins.py in each worker of an engine that has several: they are processes of their own.

An engine imports this where it is named as its ``worker_extension_cls``, in a worker and before the worker's model.
"""

import pytest
import vllm_standins
from vllm_engine import Worker

CALLED = vllm_standins.use(pytest.MonkeyPatch())


class StandIns(Worker):
    """What an engine can ask its workers for beside what vLLM's answer to."""

    def called_stand_ins(self):
        return dict(CALLED)
