# SPDX-License-Identifier: Apache-2.0
"""Count who needs which block: the supervisor's own holds and what it lent to each peer.

    request in flight ──► hold ─┐                        ┌─► drop ◄── request answered
    Execute sent to S ──► lend ─┼─► one total per block ─┼─► returned ◄── S's release ring
    handle came from S ► receive┘          │             └─► forget ◄── S died
                                           ▼ zero
                                      take_zeros: free it, or release it to its owner

Pure: no I/O, no clock; it does not know arenas. What always holds: a block's total is its own
holds and all peers' loans together; a peer can give back only what was lent to that peer, and a
dead one gives back all of it, once.
"""

from __future__ import annotations

import msgspec

from actorserve.errors import InternalError, ProtocolError

Key = tuple[int, int]
"""(arena, block number)"""


class LedgerStats(msgspec.Struct, frozen=True):
    """Blocks that are known, own holds and loans on them, peers with loans, zeros to be taken."""

    blocks: int
    held: int
    lent: int
    peers: int
    zeros: int


class Ledger:
    """Counts per block and per peer. Every method is O(1), `forget` in the peer's loans."""

    def __init__(self) -> None:
        self._totals: dict[Key, int] = {}
        self._own: dict[Key, int] = {}
        self._lent: dict[int, dict[Key, int]] = {}
        self._zeros: list[Key] = []

    def hold(self, key: Key) -> int:
        """Count a need of our own, and return the block's new total."""
        self._own[key] = self._own.get(key, 0) + 1
        total = self._totals[key] = self._totals.get(key, 0) + 1
        return total

    def receive(self, key: Key) -> None:
        """Count a need of our own that came as a handle from the block's owner.

        The owner counts each of its sendings, and we give one release for each: where the block
        is known here already, this sending's is due at once.
        """
        if self.hold(key) > 1:
            self._zeros.append(key)

    def drop(self, key: Key) -> None:
        """Count a need of our own less; InternalError if there is none."""
        own = self._own.get(key)
        if own is None:
            raise InternalError(f"arena {key[0]}, block {key[1]}: dropped, but not held here")
        if own > 1:
            self._own[key] = own - 1
        else:
            del self._own[key]
        self._lower(key, 1)

    def lend(self, peer: int, key: Key) -> None:
        """Count a sending of the block to a peer; call it when the message is sent."""
        loans = self._lent.get(peer)
        if loans is None:
            loans = self._lent[peer] = {}
        loans[key] = loans.get(key, 0) + 1
        self._totals[key] = self._totals.get(key, 0) + 1

    def returned(self, peer: int, key: Key) -> None:
        """Count a peer's release; ProtocolError if that peer has no such loan: it is broken."""
        loans = self._lent.get(peer)
        lent = loans.get(key) if loans is not None else None
        if loans is None or lent is None:
            raise ProtocolError(
                f"peer {peer} gave back block {key[1]} of arena {key[0]}, which it does not have"
            )
        if lent > 1:
            loans[key] = lent - 1
        else:
            del loans[key]
            if not loans:
                del self._lent[peer]
        self._lower(key, 1)

    def lent(self, peer: int, key: Key) -> int:
        """Return how often a peer has the block now.

        A handle of somebody else's block that comes from a peer is honest only if this is not 0.
        """
        loans = self._lent.get(peer)
        return loans.get(key, 0) if loans is not None else 0

    def total(self, key: Key) -> int:
        """Return all holds and loans of a block; 1 means that whoever has it is alone."""
        return self._totals.get(key, 0)

    def knows_arena(self, arena: int) -> bool:
        """Tell whether anybody needs a block of an arena. Looks at every block."""
        return any(key[0] == arena for key in self._totals)

    def forget(self, peer: int) -> dict[Key, int]:
        """Give all loans of a dead peer back; return them (block: how often)."""
        loans = self._lent.pop(peer, {})
        for key, lent in loans.items():
            self._lower(key, lent)
        return loans

    def take_zeros(self) -> list[Key]:
        """Return the blocks that nobody needs any more since the last call: one entry a release.

        Ours are to be freed, others' to be released to the owner if it lives.
        """
        zeros = self._zeros
        if zeros:
            self._zeros = []
            return zeros
        return []

    def stats(self) -> LedgerStats:
        """Return the sums of all counts as of now."""
        return LedgerStats(
            blocks=len(self._totals),
            held=sum(self._own.values()),
            lent=sum(sum(loans.values()) for loans in self._lent.values()),
            peers=len(self._lent),
            zeros=len(self._zeros),
        )

    def _lower(self, key: Key, count: int) -> None:
        total = self._totals[key] - count
        if total:
            self._totals[key] = total
        else:
            del self._totals[key]
            self._zeros.append(key)
