# SPDX-License-Identifier: Apache-2.0
"""How many threads the matrix work of an engine's own process takes: one, unless it is told.

Threads of OpenBLAS spin for each other between two multiplications. Beside other processes on the
same cores that makes small matrices five times slower, and a rank is never alone: its executor is
there, and the other ranks. A child that is forked has its library loaded already, so that the
variable which says how many comes too late for it, and the library has to be told.
"""

from __future__ import annotations

import os

VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def limit_blas_threads() -> None:
    """Keep BLAS to as many threads as the environment says, else one; for this whole process.

    Without threadpoolctl nothing is changed.
    """
    try:
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError:
        return
    given = [os.environ[name] for name in VARIABLES if os.environ.get(name, "").isdigit()]
    threadpool_limits(max(1, int(given[0])) if given else 1, user_api="blas")
