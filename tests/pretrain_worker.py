"""One process of test_pretrain_parallel.py: `resformer`, which may train tensor-parallel on CPUs.

Accelerate refuses that, and so do we; nothing of it is about the devices. The first process kills itself after step
`KILLED_AT`.
"""

import os
import signal
from typing import Any

from accelerate.parallelism_config import ParallelismConfig

from resformer.cli import main
from resformer.training import parallel, pretraining
from resformer.training.log import TrainingLog


class Killed(TrainingLog):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        if state.is_world_process_zero and state.global_step == int(os.environ["KILLED_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    ParallelismConfig._validate_accelerator = lambda *given: None
    parallel.NOT_TENSOR_PARALLEL.clear()
    if "KILLED_AT" in os.environ:
        pretraining.TrainingLog = Killed
    main()
