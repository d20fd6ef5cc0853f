# SPDX-License-Identifier: Apache-2.0
"""The end of a model's forked child that comes back from user code.

`os.fork()` in a hook gives two processes that return from it, and only one of them is the stub.
The other has our whole call stack, but no end of the channel, and must not read the next message
from its copy of what was received: it ends here, as it would at the end of any script.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

from actorserve.runtime.stub_end import StubEnd


def end_if_forked(end: StubEnd, error: BaseException | None = None) -> None:
    """End this process if it is a fork of the stub; `error` is what user code raised."""
    if end.is_severed:
        _end(error)


def _end(error: BaseException | None) -> NoReturn:
    """Exit with the code of a script that ended so; without exit functions, which are the stub's.

    (Those of multiprocessing, for one, would terminate the stub's own pools.)
    """
    code = 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = (error.code or 0) & 0xFF
    elif error is not None:
        code = 1
        with contextlib.suppress(BaseException):
            text = str(error.code) if isinstance(error, SystemExit) else None
            print(text, file=sys.stderr) if text else traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)
