# SPDX-License-Identifier: Apache-2.0
"""CUDA's driver library through cuda-bindings: each result checked, each error one of ours.

The package and the library are loaded when a CudaCalls is made, and never before. What always
holds: after an error that poisons the context, every call raises DeviceLost with the first one's
text; the context that user code had current in a thread is current again after each of our uses.
"""

from __future__ import annotations

import importlib
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from actorserve.device.driver import DeviceError, DeviceLost, NoDevice, OutOfDeviceMemory

_NAME = "CUDA_ERROR_"
NO_ROOM = frozenset({"OUT_OF_MEMORY"})
NOWHERE = frozenset(
    {
        *("NO_DEVICE", "INVALID_DEVICE", "STUB_LIBRARY", "DEVICE_NOT_LICENSED"),
        *("SYSTEM_NOT_READY", "SYSTEM_DRIVER_MISMATCH", "COMPAT_NOT_SUPPORTED_ON_DEVICE"),
    }
)
"""There is no device that this process could use."""

FATAL = frozenset(
    {
        *("ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR"),
        *("ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC"),
        *("LAUNCH_FAILED", "TENSOR_MEMORY_LEAK", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE"),
        *("CONTAINED", "CONTEXT_IS_DESTROYED", "EXTERNAL_DEVICE", "DEINITIALIZED"),
        *("NOT_INITIALIZED", "MPS_CLIENT_TERMINATED"),
    }
)
"""The documentation says of these that the process must end, or its context is gone."""


class CallRefused(DeviceError):
    """One call failed and the next may work. `reason` is CUDA's name without "CUDA_ERROR_"."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class CudaCalls:
    """The library in this process; any thread may call. NoDevice, with the reason, if it fails."""

    def __init__(self) -> None:
        self.lost = ""
        self._contexts: dict[int, Any] = {}
        self._lock = threading.Lock()
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise NoDevice(
                f"no CUDA: the package cuda-bindings cannot be imported ({error}); "
                "pip install 'actorserve[cuda]'"
            ) from error
        try:
            code = int(self.api.cuInit(0)[0])
        except RuntimeError as error:  # the package's own way to say that there is no library
            raise NoDevice(f"no CUDA: the driver library cannot be loaded: {error}") from error
        if code:
            raise NoDevice(f"no CUDA: {self._text('cuInit', code)[1]}")
        self.uuids = [self._uuid(ordinal) for ordinal in range(self("cuDeviceGetCount"))]

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Make one call; return its value, a tuple for several, None for none.

        DeviceLost, OutOfDeviceMemory, NoDevice or CallRefused by its result.
        """
        if self.lost:
            raise DeviceLost(self.lost)
        try:
            code, *values = getattr(self.api, name)(*arguments)
        except RuntimeError as error:  # this driver's library has no such function
            raise CallRefused(f"{name}: {error}", "NOT_SUPPORTED") from error
        except ValueError as error:  # a code that is newer than the package
            raise CallRefused(f"{name}: {error}", "UNKNOWN") from error
        if code:
            raise self._error(name, int(code))
        return values[0] if len(values) == 1 else tuple(values) or None

    def check(self) -> None:
        """Raise DeviceLost if the context is."""
        if self.lost:
            raise DeviceLost(self.lost)

    @contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """Have a device's primary context, which torch and cupy use too, current in this thread."""
        context = self._contexts.get(ordinal)
        if context is None:
            context = self._retain(ordinal)
        self("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.api.cuCtxPopCurrent()  # its result may be an earlier work's error: not about this

    def used(self) -> list[int]:
        """Return the devices that have a context of ours, the first one first."""
        return list(self._contexts)

    def ordinal_of(self, device: str) -> int:
        """Return the ordinal of a UUID in this process; NoDevice if it is not visible."""
        try:
            return self.uuids.index(device)
        except ValueError:
            known = ", ".join(self.uuids)
            raise NoDevice(
                f"device {device} cannot be seen from this process; visible are {known}"
            ) from None

    def forget_contexts(self) -> None:
        """Give the primary contexts up; others' uses of them go on."""
        with self._lock:
            for ordinal in self._contexts:
                self.api.cuDevicePrimaryCtxRelease(ordinal)
            self._contexts = {}

    # --- inside -----------------------------------------------------------------------------------

    def _retain(self, ordinal: int) -> Any:
        attribute = self.api.CUdevice_attribute
        with self._lock:
            context = self._contexts.get(ordinal)
            if context is not None:
                return context
            for name in ("VIRTUAL_MEMORY_MANAGEMENT", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"):
                which = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}_SUPPORTED")
                if not self("cuDeviceGetAttribute", which, ordinal):
                    raise NoDevice(
                        f"device {self.uuids[ordinal]} cannot share memory by descriptor: {name} "
                        "is not supported"
                    )
            context = self._contexts[ordinal] = self("cuDevicePrimaryCtxRetain", ordinal)
            return context

    def _uuid(self, ordinal: int) -> str:
        value = self("cuDeviceGetUuid", self("cuDeviceGet", ordinal))
        return f"GPU-{uuid.UUID(bytes=bytes(value.bytes))}"

    def _text(self, name: str, code: int) -> tuple[str, str]:
        """Return an error's name, and its text with the call's name."""
        try:
            known = self.api.CUresult(code)
            label = str(known.name)
            text = self.api.cuGetErrorString(known)[1]
        except ValueError:  # newer than the package
            label, text = f"{_NAME}{code}", None
        says = text.decode(errors="replace") if isinstance(text, bytes) else "no description"
        return label.removeprefix(_NAME), f"{name}: {label} ({code}): {says}"

    def _error(self, name: str, code: int) -> Exception:
        label, text = self._text(name, code)
        if label in FATAL:
            if label == "NOT_INITIALIZED":
                text += "; a forked child cannot use what its parent had opened"
            self.lost = f"the CUDA device is lost to this process: {text}"
            return DeviceLost(self.lost)
        if label in NO_ROOM:
            return OutOfDeviceMemory(f"the device has no room: {text}")
        if label in NOWHERE:
            return NoDevice(f"no such CUDA device: {text}")
        return CallRefused(text, label)
