# SPDX-License-Identifier: Apache-2.0
"""Drivers by name, settings by value, and nothing of CUDA before somebody asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actorserve.device.driver import NoDevice
from actorserve.device.emulated import EmulatedDriver
from actorserve.device.plugins import driver_names, find_driver, open_driver
from actorserve.device.settings import DeviceSettings, read_device_settings
from actorserve.errors import ConfigError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install, in effect, a package with drivers of all sorts."""
    (tmp_path / "plugged_driver.py").write_text(
        "from actorserve.device.emulated import EmulatedDriver\n"
        "class Mine(EmulatedDriver):\n    name = 'mine'\n"
        "def broken():\n    raise RuntimeError('libcuda.so.1 is not there')\n"
        "def half():\n    return object()\n"
        "thing = 5\n"
    )
    info = tmp_path / "plugged_driver-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-driver\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[actorserve.device_drivers]\n"
        "mine = plugged_driver:Mine\n"
        "emulated = plugged_driver:Mine\n"
        "broken = plugged_driver:broken\n"
        "half = plugged_driver:half\n"
        "thing = plugged_driver:thing\n"
        "absent = no_such_module_anywhere:Driver\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_package_offers_a_driver_by_entry_point(package: None) -> None:
    """Its name is enough; ours cannot be taken over."""
    assert {"mine", "emulated", "cuda", "broken"} <= set(driver_names())
    driver = open_driver("mine")
    assert driver.name == "mine"
    driver.shutdown()
    assert find_driver("emulated") is EmulatedDriver


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("nobody", ConfigError, "unknown; known are .*emulated"),
        ("absent", NoDevice, "no_such_module_anywhere"),
        ("broken", NoDevice, "libcuda"),
        ("half", ConfigError, "protocol"),
        ("thing", ConfigError, "callable"),
    ],
)
def test_a_driver_that_cannot_be_had_says_why(
    package: None, name: str, error: Any, text: str
) -> None:
    """NoDevice where host memory is to be used instead, ConfigError for a mistake."""
    with pytest.raises(error, match=text):
        open_driver(name)


def test_importing_touches_no_device_library() -> None:
    """Neither the package nor this room nor looking for names; not even the cuda driver's class."""
    program = (
        "import sys, actorserve, actorserve.device.pool, actorserve.device.broker\n"
        "import actorserve.device.emulated\n"
        "from actorserve.device.plugins import driver_names, find_driver\n"
        "driver_names(), find_driver('cuda')\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('cuda', 'torch', 'cupy')])\n"
        "print('libcuda' in open('/proc/self/maps').read())\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.split("\n")[:2] == ["[]", "False"]


def test_settings_are_read_from_a_decoded_object() -> None:
    """What is not said has its default."""
    settings = read_device_settings({"driver": "emulated", "full": "host"}, "model m")
    assert settings == DeviceSettings(driver="emulated", full="host")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"slab_bytes": 0}, "slab_bytes is 0"),
        ({"max_bytes": -1}, "max_bytes is -1"),
        ({"full": "panic"}, "panic"),
        ({"fence": 5}, "fence"),
        ({"quarantine_s": -1.0}, "quarantine_s"),
        ({"slabs": 3}, "'slabs' is unknown"),
        ([], "object"),
    ],
)
def test_a_wrong_setting_is_named(values: object, text: str) -> None:
    """Where, what, and what was expected."""
    with pytest.raises(ConfigError, match=text) as caught:
        read_device_settings(values, "model m")
    assert caught.value.message.startswith("model m: ")
