# SPDX-License-Identifier: Apache-2.0
"""Where everything lies in a lane's segment. Imports nothing of the room.

    byte     word of 8 bytes      written by   read by
    0x000    magic and version    creator      both, once
    0x008    ring_bytes           creator      both, once
    0x010    release_slots        creator      both, once
    0x080    HEAD                 producer     consumer     bytes published
    0x100    TAIL                 consumer     producer     bytes consumed
    0x180    CONSUMER_PARKED      consumer     producer     epoch of its nap; 0: awake
    0x200    PRODUCER_WANTS       producer     consumer     epoch of its wait for room or releases
    0x280    RELEASE_HEAD         consumer     producer     releases published
    0x300    RELEASE_TAIL         producer     consumer     releases taken
    0x380    CONSUMER_WANTS       consumer     producer     epoch of its wait for release slots
    0x400    release slots, 16 bytes each: arena, block
    page     the ring: frames, 8-byte aligned

Every word has one writer. Words that change lie 128 bytes apart, because processors fetch cache
lines in pairs. Counters run freely and never wrap; a place is `counter & (size - 1)`.

A frame is a header word `kind << 32 | nbytes`, the payload, and padding to 8 bytes. It is never
split: where it does not fit before the ring's end, a frame of kind PAD fills the rest (`nbytes`
then counts from its header to the end; 8-byte alignment leaves room for that header always).
"""

from __future__ import annotations

MAGIC = int.from_bytes(b"aslane\x00\x01", "big")
"""Six letters and the layout's version."""

MAGIC_WORD = 0
RING_BYTES_WORD = 1
RELEASE_SLOTS_WORD = 2
HEAD = 0x080 >> 3
TAIL = 0x100 >> 3
CONSUMER_PARKED = 0x180 >> 3
PRODUCER_WANTS = 0x200 >> 3
RELEASE_HEAD = 0x280 >> 3
RELEASE_TAIL = 0x300 >> 3
CONSUMER_WANTS = 0x380 >> 3
RELEASES = 0x400 >> 3

SLOT_BYTES = 16
HEADER_BYTES = 8
LENGTH_MASK = 0xFFFFFFFF
PAD = 0xFFFF
"""The kind of a filler; kinds of real frames are smaller."""

SMALLEST_RING_BYTES = 4096
LARGEST_RING_BYTES = 1 << 30
LARGEST_RELEASE_SLOTS = 1 << 20
_PAGE_BYTES = 4096


def is_power_of_two(number: int) -> bool:
    """Say whether the number is 1, 2, 4, 8, …"""
    return number > 0 and number & (number - 1) == 0


def are_sizes_right(ring_bytes: int, release_slots: int) -> bool:
    """Say whether a lane may have these sizes: powers of two within the limits above."""
    return (
        is_power_of_two(ring_bytes)
        and SMALLEST_RING_BYTES <= ring_bytes <= LARGEST_RING_BYTES
        and is_power_of_two(release_slots)
        and release_slots <= LARGEST_RELEASE_SLOTS
    )


def ring_offset(release_slots: int) -> int:
    """Return the byte at which the ring begins, a multiple of 4096."""
    return (RELEASES * 8 + release_slots * SLOT_BYTES + _PAGE_BYTES - 1) & -_PAGE_BYTES
