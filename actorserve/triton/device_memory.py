# SPDX-License-Identifier: Apache-2.0
"""The device memory of this process as tensors see it: the pool, and what libraries allocated.

The stub says once which pool there is; everybody else asks here. What always holds: a forked
child has no pool, since a device's context does not survive a fork; memory that a library made is
used only where our driver reaches it, and lives at least as long as the object that stands for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

from actorserve.forking import sever_after_fork
from actorserve.triton.error import TritonModelException

if TYPE_CHECKING:
    from actorserve.device.buffer import DeviceBuffer
    from actorserve.device.driver import HostBytes
    from actorserve.device.pool import SlabPool

DEFAULT_STREAM = 0
"""The driver's default stream, which on CUDA all streams but those made non-blocking wait for."""

THREADS_STREAM = 2
"""The default stream of the thread that asks, for DLPack as for the driver."""


class ForeignMemory:
    """`nbytes` bytes at a device address, which a library allocated and frees with its owner.

    `device` is the ordinal, `pool` the one whose driver reaches the bytes; `stream` is the one
    behind whose work the data is complete.
    """

    __slots__ = ("__weakref__", "_owner", "address", "device", "nbytes", "pool", "stream")

    def __init__(
        self, pool: SlabPool, address: int, nbytes: int, device: int, owner: object
    ) -> None:
        self.pool = pool
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self.stream = DEFAULT_STREAM
        self._owner = owner

    def use_on(self, stream: int) -> None:
        """Have a stream's work see the data: the stream before is waited for."""
        if stream != self.stream:
            self.pool.driver.synchronize(self.stream)
            self.stream = stream

    def copy_in(self, source: HostBytes) -> None:
        """Fill the beginning from host memory, and wait: the library may use any stream."""
        self.use_on(DEFAULT_STREAM)
        self.pool.driver.copy_in(self.address, source, DEFAULT_STREAM)
        self.pool.driver.synchronize(DEFAULT_STREAM)

    def copy_out(self) -> bytearray:
        """Return the bytes on the host, complete."""
        target = bytearray(self.nbytes)
        if target:
            self.use_on(DEFAULT_STREAM)
            self.pool.driver.copy_out(target, self.address, DEFAULT_STREAM)
        return target

    def __repr__(self) -> str:
        return f"ForeignMemory({self.address:#x}, nbytes={self.nbytes}, device={self.device})"


Memory = Union["DeviceBuffer", ForeignMemory]
"""What a tensor on a device lies in: a piece of the pool's, or of a library's."""


def copy_within(target: Memory, source: Memory, nbytes: int) -> None:
    """Copy on the device, behind all that was done to both."""
    source.use_on(DEFAULT_STREAM)
    target.use_on(DEFAULT_STREAM)
    driver = target.pool.driver
    driver.copy_within(target.address, source.address, nbytes, DEFAULT_STREAM)
    if isinstance(source, ForeignMemory) or isinstance(target, ForeignMemory):
        # The pool waits before it uses a piece again; a library knows nothing of our copy.
        driver.synchronize(DEFAULT_STREAM)


def shown_on(memory: Memory, stream: int | None) -> Memory:
    """Return the memory for a consumer, whose stream finds the data complete; None: its own affair.

    It goes to others only when that stream has done its work. Which one it is, a consumer that
    nobody is to wait for does not say, and stream 2 is another one in each thread: the default
    stream stands for them, which waits for all that are not made non-blocking. Where another
    stream may be at work already, the consumer has a view of its own, that waits for its own.
    """
    if stream is None:
        if memory.stream is None:
            memory.use_on(DEFAULT_STREAM)
        return memory
    until = DEFAULT_STREAM if stream == THREADS_STREAM else stream
    if memory.stream not in (None, until):
        memory = _another_view(memory)
    memory.use_on(stream)
    memory.stream = until
    return memory


def _another_view(memory: Memory) -> Memory:
    """Return one more view of a piece, for another stream; a library's memory is its own affair."""
    noted = memory.stream
    if isinstance(memory, ForeignMemory) or noted is None or memory.slab.is_retired:
        return memory
    memory.pool.driver.synchronize(noted)
    view = memory.pool.adopt(memory.address, memory.nbytes)
    if view is None or view.slab is not memory.slab:  # retired just now: that is no view
        return memory
    view.stream = None
    return view


class _Current:
    """The pool of this process, or None."""

    __slots__ = ("__weakref__", "pool")

    def __init__(self) -> None:
        self.pool: SlabPool | None = None

    def sever(self) -> None:
        """Have none: this is a forked child."""
        self.pool = None


_current = _Current()


def use_pool(pool: SlabPool | None) -> None:
    """Say where tensors on the device are allocated from now on; None: nowhere."""
    _current.pool = pool
    if pool is not None:
        sever_after_fork(_current)


def current_pool() -> SlabPool | None:
    """Return the pool that the stub gave, or None."""
    return _current.pool


def pool_to_allocate() -> SlabPool:
    """Return the pool; TritonModelException where this process has none."""
    pool = _current.pool
    if pool is None:
        raise TritonModelException(
            "There is no device memory in this process, so that no tensor can be made on a "
            "device. A model gets some from a server that is set up with a device driver, before "
            "`initialize`, and not in processes that it forks. Make a tensor of a numpy array "
            "instead."
        )
    return pool


def pool_for_cuda(ordinal: int) -> SlabPool:
    """Return the pool whose driver reaches memory of a CUDA device; else TritonModelException."""
    pool = _current.pool
    if pool is None:
        problem = "this process has no device driver that could read it"
        remedy = "or have the server set up with the CUDA driver"
    elif not pool.driver.is_cuda:
        problem = f"the device driver {pool.driver.name!r} of this process cannot read it"
        remedy = "or have the server set up with the CUDA driver"
    elif pool.ordinal != ordinal:
        problem = f"it is GPU {ordinal}, while this process works on GPU {pool.ordinal}"
        remedy = f"or to GPU {pool.ordinal}"
    else:
        return pool
    raise TritonModelException(
        f"Provided tensor lies on a GPU, and {problem}. Copy the tensor to the CPU first, {remedy}."
    )
