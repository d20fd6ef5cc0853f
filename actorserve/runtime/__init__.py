# SPDX-License-Identifier: Apache-2.0
"""The framework: actors in a loop, in threads and in processes, supervised; and channels.

What actors are made of (the names in `actorserve` itself are these):

    message.py ─ actor.py ─ placement.py        what a user writes
    ref.py ─ answer.py ─ stream.py              what a user holds
    system.py                                   where it all lives

A message's way, in the system's process and to a process of its own:

    ref ─► door ─► call ─► mailbox ─► loop_engine, thread_engine ─► life ─► user code
                              │
                              └─► process_host ─► outbox ─► host_end ═ rings ═ peer_end
                                                                                │
                         user code ◄─ life ◄─ an engine ◄─ inbox ◄─ child_end ◄─┘
                             └──► child_door: its own messages go back up (guest.py)

How an actor is kept alive:

    nursery ─► cell (one actor, state/supervision) ─► hosts, one for each life
               family (its siblings, state/strategy)

The channel (channel, host_end, peer_end, exchange) is the model server's too.
"""
