# SPDX-License-Identifier: Apache-2.0
"""Device memory: drivers, the slabs of a process, references that cross processes.

    driver.py     what a kind of device must offer; plugins.py finds it by name
    emulated.py   a device that is none, for everywhere
    cuda.py       NVIDIA's; cuda_calls.py makes each call, cuda_fences.py is about waiting
    pool.py       a process's slabs: allocate, lend, borrow, release; buffer.py is one piece
    broker.py     the supervisor's: descriptors and counts, no driver and no context

Importing this room, or looking a driver up, touches no device: making a driver does.
"""
