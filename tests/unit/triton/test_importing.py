# SPDX-License-Identifier: Apache-2.0
"""Importing models: each in a process of its own, as in a stub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json, sys
from actorserve.errors import BootError
from actorserve.triton import importing
from actorserve.triton.failure import format_exception
importing.install()
path = sys.argv[1]
try:
    found = importing.load_model_class(path)
    model = found()
    said = {"module": found.__module__, "value": getattr(model, "value", None)}
except BaseException as error:
    said = {"error": format_exception(error, path), "boot": isinstance(error, BootError)}
said["path"] = sys.path[-2:]
print(json.dumps(said))
"""


def load(path: Path | str, **settings: Any) -> dict[str, Any]:
    """Import a model in a new process; return what came of it."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        **settings,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture
def version_dir(tmp_path: Path) -> Path:
    """Return the folder of version 1 of an empty model."""
    folder = tmp_path / "repo" / "m" / "1"
    folder.mkdir(parents=True)
    return folder


def write(path: Path, text: str) -> Path:
    """Write a file and return its path."""
    path.write_text(text)
    return path


def test_model_is_imported_from_its_version(version_dir: Path) -> None:
    """Its module is `<version>.<file>`; both of its folders end sys.path."""
    path = write(
        version_dir / "model.py",
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    value = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE\n",
    )
    assert load(path) == {
        "module": "1.model",
        "value": 2,
        "path": [str(version_dir), str(version_dir.parent)],
    }


def test_siblings_are_imported_in_every_way(version_dir: Path) -> None:
    """Plainly, relatively, by the dotted name, and from the model's own folder."""
    write(version_dir / "sibling_a.py", "A = 1")
    write(version_dir.parent / "shared_b.py", "B = 10")
    (version_dir / "package").mkdir()
    write(version_dir / "package" / "__init__.py", "from ..sibling_a import A\nC = A * 100")
    path = write(
        version_dir / "model.py",
        "import importlib\n"
        "import sibling_a\n"
        "import shared_b\n"
        "from . import sibling_a as relative\n"
        "from .package import C\n"
        "dotted = importlib.import_module('1.sibling_a')\n"
        "assert dotted is relative\n"
        "class TritonPythonModel:\n"
        "    value = sibling_a.A + shared_b.B + C + relative.A * 1000\n",
    )
    assert load(path)["value"] == 1111


def test_version_folder_may_be_a_regular_package(version_dir: Path) -> None:
    """Its `__init__.py` runs first."""
    write(version_dir / "__init__.py", "VALUE = 5")
    path = write(
        version_dir / "model.py",
        "from . import VALUE\nclass TritonPythonModel:\n    value = VALUE\n",
    )
    assert load(path)["value"] == 5


def test_failing_package_is_the_models_failure(version_dir: Path) -> None:
    """An exception in `__init__.py` is reported with its place."""
    write(version_dir / "__init__.py", "raise KeyError('no')")
    error = load(write(version_dir / "model.py", ""))["error"]
    assert error.startswith("KeyError: 'no'\n\nAt:\n")
    assert f"  {version_dir}/__init__.py(1): <module>\n" in error


def test_folder_of_the_same_name_elsewhere_is_not_taken(version_dir: Path, tmp_path: Path) -> None:
    """A `1` in the working directory or on PYTHONPATH does not hide the version."""
    decoy = tmp_path / "decoy" / "1"
    decoy.mkdir(parents=True)
    write(decoy / "model.py", "raise RuntimeError('the wrong one')")
    write(decoy / "__init__.py", "raise RuntimeError('the wrong one')")
    path = write(version_dir / "model.py", "class TritonPythonModel:\n    value = 1\n")
    assert load(path, cwd=decoy.parent, env={"PYTHONPATH": f"{Path.cwd()}:{decoy.parent}"}) == {
        "module": "1.model",
        "value": 1,
        "path": [str(version_dir), str(version_dir.parent)],
    }


def test_file_may_have_another_name(version_dir: Path) -> None:
    """`default_model_filename` decides; a name need not be an identifier."""
    path = write(version_dir / "my-model.py", "class TritonPythonModel:\n    value = 3\n")
    assert load(path)["module"] == "1.my-model"


def test_relative_path_is_resolved_first(version_dir: Path) -> None:
    """The model may change the working directory later."""
    write(version_dir / "model.py", "class TritonPythonModel:\n    value = __file__\n")
    answer = load("m/1/model.py", cwd=version_dir.parents[1], env={"PYTHONPATH": str(Path.cwd())})
    assert answer["value"] == f"{version_dir}/model.py"


def test_missing_file_is_a_boot_error(version_dir: Path) -> None:
    """The text is the real server's."""
    path = version_dir / "model.py"
    answer = load(path)
    assert answer["error"] == f"Python model file not found in '{path}'"
    assert answer["boot"]


def test_other_file_types_are_a_boot_error(version_dir: Path) -> None:
    """The text is the real server's."""
    answer = load(write(version_dir / "model.txt", ""))
    assert answer["error"] == "Model name must end with '.py'. Model name is \"model.txt\"."
    assert answer["boot"]


def test_missing_class_is_a_boot_error(version_dir: Path) -> None:
    """The text is that of the attribute that is missing."""
    answer = load(write(version_dir / "model.py", "X = 1"))
    assert answer["error"] == (
        "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"
    )
    assert answer["boot"]


def test_missing_module_shows_the_recorded_frames() -> None:
    """The text is the recorded one, but for the interpreter's own line numbers."""
    cases = Path(__file__).parents[2] / "cases"
    recorded = json.loads((cases / "recorded" / "own_import_error_load.json").read_text())
    expected = recorded["response"]["json"]["error"].split("Internal: ")[1].removesuffix(";\n")
    repository = cases / "repository"
    error = load(repository / "import_error" / "1" / "model.py")["error"]
    got = error.replace(str(repository), "<REPO>")
    if sys.version_info[:2] == (3, 11):
        assert got == expected
    functions = [line.split(": ")[-1] for line in got.splitlines()[3:]]
    assert functions[:3] == ["<module>", "_call_with_frames_removed", "exec_module"]
    assert functions[-1] == "_find_and_load"


def test_syntax_error_says_where(version_dir: Path) -> None:
    """No frame of user code ran, so none but this test's is shown."""
    error = load(write(version_dir / "model.py", "def broken(:\n  pass"))["error"]
    assert error.startswith("SyntaxError: invalid syntax (model.py, line 1)\n")
    assert "importlib" not in error


def test_exit_while_importing_is_an_error(version_dir: Path) -> None:
    """A model that calls sys.exit at import does not end the process unseen."""
    error = load(write(version_dir / "model.py", "import sys\nsys.exit(7)"))["error"]
    assert error.startswith(f"SystemExit: 7\n\nAt:\n  {version_dir}/model.py(2): <module>\n")


def test_a_spawned_interpreter_finds_the_api(tmp_path: Path) -> None:
    """What a model starts with multiprocessing's spawn imports the same names."""
    code = (
        "import multiprocessing, sys\n"
        "from actorserve.triton import importing\n"
        "def child():\n"
        "    import triton_python_backend_utils as pb_utils, c_python_backend_utils\n"
        "    assert pb_utils.Tensor is c_python_backend_utils.Tensor\n"
        "if __name__ == '__main__':\n"
        "    importing.install()\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start()\n"
        "    process.join(20)\n"
        "    sys.exit(process.exitcode)\n"
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    command = [sys.executable, program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("has_init", [False, True])
def test_backend_s_folder_hides_no_library_of_its_name(tmp_path: Path, has_init: bool) -> None:
    """A backend is named after what it wraps; its siblings are found both ways."""
    folder = tmp_path / "backends" / "json"
    folder.mkdir(parents=True)
    write(folder / "near.py", "WORD = 'near'\n")
    if has_init:
        write(folder / "__init__.py", "WORD = 'init'\n")
    path = write(
        folder / "model.py",
        "import json, near\nfrom . import near as same\nimport triton_backend_json as own\n"
        "class TritonPythonModel:\n"
        "    value = [json.dumps(1), near.WORD, same.WORD, getattr(own, 'WORD', None)]\n",
    )
    said = load(path)
    assert said.get("value") == ["1", "near", "near", "init" if has_init else None], said
    assert said["module"] == "triton_backend_json.model"
    assert str(folder) in said["path"]
    assert str(folder.parent) not in said["path"]
