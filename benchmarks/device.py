#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prove and time the handoff of device memory on a machine with an NVIDIA GPU.

    device.py [--mib N] [--rounds N] [--json FILE] [--quick]

Three processes: this one has the descriptors and counts and never loads CUDA; a producer and a
borrower have a driver each. With torch and with cupy, where they can be imported, else with numpy
bytes, tensors are handed over and read; a borrower is killed while it holds a reference, and the
producer while it is held elsewhere, by a mapping or by the descriptor here alone. Then 64 MiB are
handed over by each way. It takes under five minutes and needs no network. Printed are a table and
JSON; the exit code is 0 if every check holds, 1 if one does not, 2 without a usable GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from actorserve.clock import monotonic_s  # noqa: E402
from actorserve.device.broker import SlabBroker  # noqa: E402
from actorserve.device.settings import DeviceSettings  # noqa: E402
from actorserve.errors import ActorserveError  # noqa: E402
from actorserve.process.packet import PeerGone, close_all, packet_pair  # noqa: E402
from actorserve.wire.device import (  # noqa: E402
    DeviceRef,
    DeviceReleased,
    SlabAccepted,
    SlabOffer,
)
from benchmarks.device_peer import Order, Road, be_a_peer  # noqa: E402

LIMIT_S = 290
MIB = 1 << 20


class NoGpu(Exception):
    """There is nothing to run on."""


class Process:
    """A peer as the supervisor sees it."""

    def __init__(self, epoch: int, process: subprocess.Popen[bytes], road: Road) -> None:
        self.epoch = epoch
        self.process = process
        self.road = road


class World:
    """The broker and the peers of one run; references that are received are dropped at its end."""

    def __init__(self, fence: str, slab_bytes: int) -> None:
        self.fence = fence
        self.slab_bytes = slab_bytes
        self.broker = SlabBroker()
        self.peers: dict[int, Process] = {}
        self.needed: list[DeviceRef] = []
        self._epoch = 0

    def start(self, other: Any) -> Process:
        """Start a peer; `other` is its end of the socket to the other one."""
        self._epoch += 1
        ours, theirs = packet_pair()
        command = [
            *(sys.executable, str(Path(__file__).resolve()), "--peer"),
            *(str(self._epoch), str(theirs.fileno()), str(other.fileno())),
            *(self.fence, str(self.slab_bytes)),
        ]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(), other.fileno()))
        theirs.close()
        peer = self.peers[self._epoch] = Process(self._epoch, process, Road(ours))
        self.broker.join(self._epoch)
        return peer

    def start_pair(self) -> tuple[Process, Process]:
        """Start two peers that know each other."""
        one, other = packet_pair()
        pair = self.start(one), self.start(other)
        one.close()
        other.close()
        return pair

    def tell(self, peer: Process, order: Order) -> None:
        """Send an order, lending its reference."""
        if order.ref is not None:
            offer = self.broker.lend(peer.epoch, order.ref)
            if offer is not None:
                peer.road.send(offer[0], (offer[1],))
        peer.road.send(order)

    def hear(self, peer: Process) -> Order:
        """Return the answer; RuntimeError if it is an error. What comes before it is heard too."""
        while True:
            message, fds = peer.road.recv()
            if isinstance(message, SlabOffer):
                self.broker.keep(peer.epoch, message, fds[0])
            elif isinstance(message, SlabAccepted):
                self.broker.accepted(peer.epoch, message)
                if message.error:
                    raise RuntimeError(f"a slab cannot be mapped: {message.error}")
            elif isinstance(message, DeviceReleased):
                self.broker.returned(peer.epoch, message)
            elif isinstance(message, Order):
                if message.ref is not None:
                    self.broker.receive(peer.epoch, message.ref)
                    self.needed.append(message.ref)
                if message.error:
                    raise RuntimeError(message.error)
                return message
            else:
                close_all(fds)

    def ask(self, peer: Process, do: str, **more: Any) -> Order:
        """Send an order and return its answer."""
        self.tell(peer, Order(do, **more))
        return self.hear(peer)

    def kill(self, peer: Process) -> None:
        """Kill a peer, and end the quarantine of what it had."""
        peer.process.kill()
        peer.process.wait()
        peer.road.sock.close()
        del self.peers[peer.epoch]
        self.broker.peer_died(peer.epoch, 0.0)
        self.broker.settle(1.0)

    def drop_all(self) -> None:
        """Need nothing any more, and tell the peers."""
        for ref in self.needed:
            self.broker.drop(ref)
        self.needed = []
        for epoch, message in self.broker.take_outgoing():
            if epoch in self.peers:
                self.peers[epoch].road.send(message)

    def close(self) -> None:
        """End every peer."""
        for peer in list(self.peers.values()):
            self.kill(peer)
        self.broker.close()


def prove(library: str, fence: str, nbytes: int) -> dict[str, bool]:
    """Hand tensors over and kill; return what held."""
    world = World(fence, max(4 * nbytes, 8 * MIB))
    held: dict[str, bool] = {}
    common = {"library": library, "nbytes": nbytes}
    try:
        maker, reader = world.start_pair()
        for do in ("make", "write"):
            right = []
            for pattern in (1, 77, 255):
                ref = world.ask(maker, do, pattern=pattern, **common).ref
                answer = world.ask(reader, "read", ref=ref, library=library, pattern=pattern)
                right.append(answer.facts["is_right"])
            name = "its own tensor, one copy" if do == "make" else "a tensor in our slab, no copy"
            held[f"read what is right: {name}"] = all(right)
        world.ask(reader, "hold", ref=world.ask(maker, "make", pattern=9, **common).ref)
        world.ask(reader, "facts")  # its releases come before the answer
        world.kill(reader)
        world.drop_all()
        held["a killed borrower's blocks come back"] = (
            world.ask(maker, "facts").facts["used_bytes"] == 0
        )
        kept = world.ask(maker, "write", pattern=42, **common).ref
        reader, heir = world.start_pair()
        world.ask(reader, "hold", ref=kept)
        if fence == "event":  # of a dead producer's fence nobody may know more than that it failed
            world.ask(reader, "wait_kept", library=library)
        world.kill(maker)
        answer = world.ask(reader, "read_kept", library=library, pattern=42)
        held["producer killed: a mapping keeps the memory"] = answer.facts["is_right"]
        world.kill(reader)
        if fence == "sync":
            answer = world.ask(heir, "read", ref=kept, library=library, pattern=42)
            held["producer killed: a descriptor keeps the memory"] = answer.facts["is_right"]
        else:
            held["producer killed: its fence is an error"] = _fence_fails(world, heir, kept)
    finally:
        world.close()
    return held


def _fence_fails(world: World, peer: Process, ref: DeviceRef | None) -> bool:
    try:
        world.ask(peer, "read", ref=ref, pattern=42)
    except RuntimeError as error:
        return "died" in str(error)
    return False


def measure(nbytes: int, rounds: int) -> dict[str, Any]:
    """Time each way; microseconds, or why there are none."""
    world = World("sync", 2 * nbytes)
    try:
        producer, borrower = world.start_pair()
        world.tell(borrower, Order("answer", nbytes=nbytes))
        times = world.ask(producer, "time", nbytes=nbytes, rounds=rounds).facts
        world.hear(borrower)
        return times
    finally:
        world.close()


def card() -> dict[str, Any]:
    """Return the card's name and the driver's version; NoGpu, saying why."""
    world = World("sync", 2 * MIB)
    try:
        first, _ = world.start_pair()
        facts = world.ask(first, "facts").facts
        return {"card": facts["card"], "cuda_driver": facts["driver"]}
    except (RuntimeError, PeerGone) as error:
        raise NoGpu(str(error)) from error
    finally:
        world.close()


def report(result: dict[str, Any], nbytes: int) -> str:
    """Return the table."""
    lines = [f"{result['card']}, CUDA driver {result['cuda_driver']}", ""]
    for name, held in result["checks"].items():
        lines += [f"{name}:"]
        lines += [f"  {'holds' if right else 'FAILS':5}  {what}" for what, right in held.items()]
    lines += ["", f"handoff of {nbytes / MIB:g} MiB     median us   min us   beyond the message us"]
    base = statistics.median(result["times_us"]["message alone"])
    for way, times in result["times_us"].items():
        if isinstance(times, str):
            lines += [f"  {way:<22} {times}"]
            continue
        median = statistics.median(times)
        lines += [f"  {way:<22} {median:>9.0f} {min(times):>8.0f} {median - base:>12.0f}"]
    return "\n".join(lines)


def run(mib: float, rounds: int, json_path: str, proof_bytes: int) -> int:
    """Do everything; return the exit code."""
    began_s = monotonic_s()
    try:
        result: dict[str, Any] = card()
    except NoGpu as error:
        print(f"no device to run on: {error}", file=sys.stderr)
        return 2
    found = [name for name in ("torch", "cupy") if importlib.util.find_spec(name)]
    result["checks"] = {}
    for library in found or ["numpy"]:
        for fence in ("sync", "event"):
            try:
                held = prove(library, fence, proof_bytes)
            except (ActorserveError, RuntimeError, TimeoutError) as error:
                held = {f"ended early: {type(error).__name__}: {error}": False}
            result["checks"][f"{library}, fence {fence}"] = held
    nbytes = int(mib * MIB)
    result["times_us"] = measure(nbytes, rounds)
    result["supervisor_has_cuda"] = any(name.split(".")[0] == "cuda" for name in sys.modules)
    result["seconds"] = round(monotonic_s() - began_s, 1)
    print(report(result, nbytes))
    text = json.dumps(result)
    print(text)
    if json_path:
        Path(json_path).write_text(text)
    is_right = all(right for held in result["checks"].values() for right in held.values())
    return 0 if is_right and not result["supervisor_has_cuda"] else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=float, default=64.0, help="size of a timed handoff, in MiB")
    parser.add_argument("--rounds", type=int, default=30, help="handoffs of each way")
    parser.add_argument("--json", default="", help="write the result to this file too")
    parser.add_argument("--quick", action="store_true", help="small and few: does it work at all")
    parser.add_argument("--peer", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peer is not None:
        epoch, road, other, fence, slab_bytes = options.peer
        settings = DeviceSettings(fence=fence, slab_bytes=int(slab_bytes))
        be_a_peer(int(epoch), int(road), int(other), settings)
        return 0
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))  # peers end with their sockets
    signal.alarm(LIMIT_S)
    if options.quick:
        return run(1.0, 3, options.json, 64 << 10)
    return run(options.mib, options.rounds, options.json, 4 * MIB)


if __name__ == "__main__":
    sys.exit(main())
