"""One process of test_pretrain_parallel.py: `resformer`, which may train tensor-parallel on CPUs.

Accelerate refuses that, and so do we; nothing of it is about the devices.
"""

from accelerate.parallelism_config import ParallelismConfig

from resformer.cli import main
from resformer.training import parallel

if __name__ == "__main__":
    ParallelismConfig._validate_accelerator = lambda *given: None
    parallel.NOT_TENSOR_PARALLEL.clear()
    main()
