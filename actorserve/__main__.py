# SPDX-License-Identifier: Apache-2.0
"""`python -m actorserve` is the `actorserve` command."""

from actorserve.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
