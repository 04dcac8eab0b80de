"""An independent oracle of what the engine must compute: NumPy, one request, one loop at a time.

It shares no code with rlt_jax (not even the checkpoint reader), knows nothing of batches, slots or pages, and keeps
every version of every key and value, so that each KV layout is one rule.
"""

from tests.oracle.huginn import DROP, RING, HuginnOracle
from tests.oracle.judge import Judgement, judge
from tests.oracle.ouro import LAST_EXITED, SHARED, OuroOracle, Policy, Step

__all__ = [
    "DROP",
    "LAST_EXITED",
    "RING",
    "SHARED",
    "HuginnOracle",
    "Judgement",
    "OuroOracle",
    "Policy",
    "Step",
    "judge",
]
