# SPDX-License-Identifier: Apache-2.0
"""The server's actors: supervisor, scheduler, stub, response factory, repository.

The folder stands at the top of the repository and is installed as `actorserve.actors`
(`actorserve/actors` links here). Under any other name every class would exist twice.
"""

if __name__ != "actorserve.actors":
    raise ImportError(f"import this package as 'actorserve.actors', not as {__name__!r}")
