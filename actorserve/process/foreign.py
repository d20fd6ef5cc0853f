# SPDX-License-Identifier: Apache-2.0
"""The first lines that an interpreter of another environment runs: is it new enough?

Run as a script, not imported: `<python> foreign.py <boot socket> ...` (see environment.py). Must
parse and run on every Python there is, 2.7 included, so that an old one names itself instead of
failing at the first line of the package with a SyntaxError that nobody connects to its cause.
"""

import os
import struct
import sys

# A script's folder comes first in its import path; this one holds names that are not meant there.
if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):  # noqa: PTH100, PTH120
    del sys.path[0]

if sys.version_info < (3, 10):  # noqa: UP036
    reason = "the interpreter {} is Python {}; a stub needs Python 3.10 or newer".format(
        sys.executable, ".".join(str(part) for part in sys.version_info[:3])
    )
    text = reason.encode("utf-8")
    # BootFailed(reason, "") by hand: array of 3, tag 33, a string, an empty string
    os.write(int(sys.argv[1]), b"\x93\x21\xdb" + struct.pack(">I", len(text)) + text + b"\xa0")
    sys.exit(reason)

if __name__ == "__main__":
    from actorserve.process.child import main

    main()
