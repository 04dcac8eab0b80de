"""An independent oracle of what the engine must compute: NumPy, one request, one position, one loop at a time.

It shares no code with rlt_jax (not even the checkpoint reader), knows nothing of batches, chunks, slots or pages, and
keeps every version of every key and value, so that the two KV rules are one line each.
"""

from tests.oracle.judge import Judgement, judge
from tests.oracle.ouro import LAST_EXITED, SHARED, OuroOracle, Policy, Step

__all__ = ["LAST_EXITED", "SHARED", "Judgement", "OuroOracle", "Policy", "Step", "judge"]
